"""Progress: one changing line on a terminal, a line per stage elsewhere."""

import io

from trioengine.cli.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_each_stage_once() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    for stage, fraction in [("Loading", 0.0), ("Loading", 0.5), ("Loading", 1.0), ("Warming up", 0.0)]:
        progress(stage, fraction)
    progress.clear()
    assert stream.getvalue() == "Loading\nWarming up\n"


def test_a_terminal_gets_one_line_that_is_gone_at_the_end() -> None:
    stream = Terminal()
    progress = Progress(stream)
    progress("Loading", 0.0)
    progress("Loading", 1.0)
    progress.clear()
    assert "\n" not in stream.getvalue()
    assert "100%" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_nobody_to_look_is_no_failure() -> None:
    class BrokenPipe(io.StringIO):
        def write(self, text: str, /) -> int:
            raise BrokenPipeError

    progress = Progress(BrokenPipe())
    progress("Loading", 0.0)
    assert progress("Loading", 1.0) is None
