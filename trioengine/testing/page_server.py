"""The server of the browser tests: `serve` over an engine that answers by what the last message says.

Run as a program, with options of `ServerConfig` as OPTION=JSON. It prints its URL.
"""

import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

import trio

from trioengine.config.server import ServerConfig
from trioengine.server.app import create_app
from trioengine.server.serving import serve
from trioengine.testing.fake_engine import FakeEngine, FakeOutputStream, ScriptedReply
from trioengine.types.request import ChatPrompt, GenerateRequest

MARKDOWN = """# Heading

A paragraph with *emphasis*, **strong**, `code`, ~~struck~~ and a [link](https://example.com/a?b=c).
A second line, and https://example.org/ by itself.

1. one
   - nested *a*
   - nested b
     1. deep
2. two

   with a paragraph

> quoted
> > twice

| left | right |
| :--- | ----: |
| 1    | 2     |

```python
def f(x):
    return "<b>" + x
```

---

    indented code

Term with &amp; and &lt;tag&gt;.
"""
ATTACKS = """<img src=x onerror="window.attacked='img'">
<script>window.attacked='script'</script>
<svg onload="window.attacked='svg'"><style>body{display:none}</style>

[script](javascript:window.attacked='link') [data](data:text/html,<script>window.attacked=1</script>)
[vb](vbscript:x) [file](file:///etc/passwd) [relative](/v1/models) [tab](java\tscript:alert(1))
![remote](https://example.com/pixel.png) ![x](javascript:alert(1))
<https://example.com/"onmouseover="window.attacked='auto'>

[ref]: javascript:window.attacked='ref'
[ref]

```"><img src=x onerror=window.attacked='info'>
</code></pre><script>window.attacked='fence'</script>
```

<iframe srcdoc="<script>parent.attacked='frame'</script>"></iframe>
"""
LONG = "\n\n".join(f"Paragraph {number} with **words** and `code` in it, line after line." for number in range(80))
NURSERIES = """A nursery is a block that its tasks cannot outlive, so:

1. **Nothing is left behind.** When the block ends, every task in it has ended.
2. **No error is lost.** What a task raises comes out of the block, and the others are cancelled.

```python
async with trio.open_nursery() as nursery:
    nursery.start_soon(fetch, "one")
    nursery.start_soon(fetch, "two")
print("both are here")
```

| | `create_task` | nursery |
| --- | --- | --- |
| who waits | nobody has to | the block |
| an error | is logged, perhaps | is raised |
"""
TEXTS: Mapping[str, str] = {
    "markdown": MARKDOWN,
    "attack": ATTACKS,
    "long": LONG,
    "How do nurseries help?": NURSERIES,
}


class _PageEngine(FakeEngine):
    """Answers `TEXTS` by name, waits for ever before the end of "wait ...", tells the "settings", repeats the rest."""

    def generate(self, request: GenerateRequest) -> FakeOutputStream:
        assert isinstance(request.prompt, ChatPrompt)
        messages = request.prompt.messages
        asked = str(messages[-1]["content"])
        text = TEXTS.get(asked, f"You said: {asked}")
        if asked == "settings":
            roles = [message["role"] for message in messages]
            text = json.dumps([roles, request.sampling.temperature, request.sampling.max_tokens])
        deltas = [text[start : start + 7] for start in range(0, len(text), 7)]
        go_on = trio.Event() if asked.startswith("wait") else None
        return FakeOutputStream(self, request, ScriptedReply(deltas, go_on=go_on))


async def _main() -> None:
    words = (word.partition("=") for word in sys.argv[1:])
    options: dict[str, Any] = {"port": 0}
    options.update((name, json.loads(value)) for name, _, value in words)
    config = ServerConfig(**options)
    async with trio.open_nursery() as nursery:
        app = create_app(_PageEngine(), config)
        urls: list[str] = await nursery.start(functools.partial(serve, app, config))
        print(urls[0], flush=True)


if __name__ == "__main__":
    trio.run(_main)
