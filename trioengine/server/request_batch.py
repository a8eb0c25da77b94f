"""`RequestBatch`: the requests to the engine that one request of a client means, entered and left as one."""

from collections.abc import Sequence
from types import TracebackType

from trioengine.client.interface import OutputStream
from trioengine.errors import RequestError
from trioengine.openai.errors import at_path


class RequestBatch:
    """Several requests that are entered and left as one."""

    def __init__(self, streams: Sequence[OutputStream], paths: Sequence[str] = ("prompt",)) -> None:
        """Enter these, in their order. `paths` are their prompts' places in the request's body."""
        self.streams = streams
        self._paths = paths
        self._entered: list[OutputStream] = []

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of all, each once."""
        return tuple(dict.fromkeys(warning for stream in self.streams for warning in stream.warnings))

    @property
    def num_prompt_tokens(self) -> int:
        """Of all."""
        return sum(stream.num_prompt_tokens for stream in self.streams)

    async def __aenter__(self) -> "RequestBatch":
        """Enter all, or none.

        Raises:
            RequestError: as the first that cannot be entered raises.
        """
        try:
            for stream, path in zip(self.streams, self._paths, strict=True):
                try:
                    await stream.__aenter__()
                except RequestError as error:
                    raise at_path(error, path) from None
                self._entered.append(stream)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        while self._entered:
            # Leaving awaits nothing, so all are left, also when this is cancelled.
            await self._entered.pop().__aexit__(None, None, None)
