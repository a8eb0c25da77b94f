"""The chat page in a real Chromium: what a user does with it, and what a model cannot do to it."""

import json
import re
from collections.abc import Generator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Error, WebSocketRoute, expect

from trioengine.testing.browser import ScriptedServer, Watched, scripted_server, watch

pytestmark = pytest.mark.slow

KEY = "sk-browser-test"
PHONE = {"width": 360, "height": 740}
NUM_RUNNING = "async () => (await (await fetch('load', {headers: {authorization: 'Bearer ' + %r}})).json()).running"


@pytest.fixture
def server_with_key() -> Generator[ScriptedServer]:
    with scripted_server(api_key=[KEY]) as running:
        yield running


def wait_until_idle(watched: Watched, key: str = "") -> None:
    """Return once the server runs no request; its engine's load says so."""
    watched.page.wait_for_function(f"async () => (await ({NUM_RUNNING % key})()) === 0")


def stored_titles(watched: Watched) -> list[str]:
    return watched.page.locator("#conversations a").all_inner_texts()


def test_an_answer_streams_and_says_how_fast_it_was(watched: Watched, server: ScriptedServer) -> None:
    watched.open(server.url)
    expect(watched.page.locator("#model")).to_have_text("fake-model")
    watched.ask("Hello there")
    assert watched.answer == "You said: Hello there"
    expect(watched.page.locator(".stats").last).to_have_text(
        re.compile(
            r"^[\d.]+ tokens/s · 3 tokens · first token after \d+\.\d\d s$|^3 tokens · first token after \d+\.\d\d s$"
        )
    )
    expect(watched.page).to_have_title("Hello there · TrioEngine")
    assert watched.sockets == [server.url.replace("http", "ws") + "/v1/stream"]


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_ends_the_request_and_keeps_what_came(watched: Watched, server: ScriptedServer, how: str) -> None:
    watched.open(server.url)
    watched.send("wait for ever")
    page = watched.page
    expect(page.locator("article.assistant .content")).to_contain_text("You said: wait")
    assert page.evaluate(NUM_RUNNING % "") == 1
    if how == "button":
        page.click("#send")
    else:
        page.press("#prompt", "Escape")
    expect(page.locator("article.assistant .note")).to_have_text("Stopped.")
    expect(page.locator("#send")).to_have_text("Send")
    wait_until_idle(watched)
    assert watched.answer.startswith("You said: wait")


def test_closing_the_page_ends_its_requests(watched: Watched, server: ScriptedServer, context: BrowserContext) -> None:
    other = watch(context.new_page())
    watched.open(server.url)
    other.open(server.url)
    other.send("wait here")
    expect(other.page.locator("article.assistant .content")).to_contain_text("You said: wait")
    other.page.close()
    wait_until_idle(watched)
    assert other.faults == []


def test_conversations_run_beside_each_other(watched: Watched, server: ScriptedServer) -> None:
    """An answer goes on while another conversation is shown, and is there when one comes back."""
    page = watched.page
    watched.open(server.url)
    watched.send("wait one")
    expect(page.locator("article.assistant .content")).to_contain_text("You said: wait")
    page.click("#new-conversation")
    watched.ask("two")
    assert watched.answer == "You said: two"
    page.click("#conversations a:has-text('wait one')")
    expect(page.locator("article.assistant.running .content")).to_contain_text("You said: wait")
    page.click("#send")
    expect(page.locator("article.assistant .note")).to_have_text("Stopped.")
    page.go_back()
    expect(page.locator("article.assistant .content")).to_have_text("You said: two")


def test_markdown_becomes_nodes(watched: Watched, server: ScriptedServer) -> None:
    watched.open(server.url)
    watched.ask("markdown")
    content = watched.page.locator("article.assistant .content")
    expect(content.locator("h1")).to_have_text("Heading")
    for tag, text in {"em": "emphasis", "strong": "strong", "s": "struck"}.items():
        expect(content.locator(f"p > {tag}")).to_have_text(text)
    expect(content.locator("ol > li > ul > li > ol > li")).to_have_text("deep")
    expect(content.locator("ol > li > p").last).to_have_text("with a paragraph")
    expect(content.locator("blockquote blockquote p")).to_have_text("twice")
    expect(content.locator("table td.align-right")).to_have_text("2")
    assert content.locator("pre code").all_inner_texts() == ['def f(x):\n    return "<b>" + x', "indented code"]
    expect(content.locator(".code-head span").first).to_have_text("python")
    expect(content.locator("p").last).to_have_text("Term with & and <tag>.")
    links = content.locator("a").evaluate_all("links => links.map(link => [link.href, link.rel, link.target])")
    rel = "noopener noreferrer nofollow"
    assert links == [["https://example.com/a?b=c", rel, "_blank"], ["https://example.org/", rel, "_blank"]]


def test_what_a_model_writes_never_runs(watched: Watched, server: ScriptedServer) -> None:
    """Tags, handlers and links of every kind stay text, also when they come back from the store."""
    watched.open(server.url)
    watched.ask("attack")
    for _ in range(2):
        page = watched.page
        content = page.locator("article.assistant .content")
        expect(content).to_contain_text("<img src=x onerror=")
        assert content.locator("img, script, style, svg, iframe, object, form, [style], [srcdoc]").count() == 0
        hrefs = content.locator("a").evaluate_all("links => links.map(link => link.href)")
        assert hrefs
        assert all(href.startswith("https://example.com/") for href in hrefs)
        handlers = "all => all.flatMap(one => one.getAttributeNames()).filter(name => name.startsWith('on'))"
        assert content.locator("*").evaluate_all(handlers) == []
        assert page.evaluate("window.attacked") is None
        page.reload()
        page.wait_for_selector("html[data-ready]")


def test_the_policy_refuses_what_would_make_html_or_run(watched: Watched, server: ScriptedServer) -> None:
    """Behind our own care stands the browser's: were there a hole, nothing would come through it."""
    watched.open(server.url)
    page = watched.page
    tries = (
        "document.body.innerHTML = '<p>x</p>'",
        "document.body.setAttribute('onclick', 'x')",
        "new DOMParser().parseFromString('<p>x</p>', 'text/html')",
        "document.createRange().createContextualFragment('<p>x</p>')",
    )
    for attempt in tries:
        with pytest.raises(Error, match="requires 'Trusted"):
            page.evaluate(f"() => {{ {attempt}; }}")
    page.evaluate("""() => {
        const image = document.createElement('img');
        image.src = 'https://example.com/pixel.png';
        const script = document.createElement('script');
        script.append('window.attacked = 1');
        const style = document.createElement('style');
        style.append('body { display: none; }');
        document.body.append(image, style);
        try { document.body.append(script); } catch {}
    }""")
    page.wait_for_function("() => document.querySelector('body > img').complete")
    assert page.evaluate("window.attacked") is None
    assert page.is_visible("#prompt")
    assert len(watched.faults) >= 2
    refused = r"Trusted|Content Security Policy|^request: https://example.com/pixel.png"
    assert [fault for fault in watched.faults if not re.search(refused, fault)] == []
    watched.faults.clear()


STREAMED_AND_WHOLE = """async (cases) => {
    const {MarkdownStream, renderMarkdown} = await import(new URL('static/markdown.js', document.baseURI));
    const html = (node) => { const box = document.createElement('div'); box.append(node); return box.innerHTML; };
    return cases.map(([text, size]) => {
        const box = document.createElement('div');
        const stream = new MarkdownStream(box);
        for (let start = 0; start < text.length; start += size) stream.push(text.slice(start, start + size));
        const streamed = box.innerHTML;
        stream.finish();
        return [streamed, box.innerHTML, html(renderMarkdown(text))];
    });
}"""
PARTS = (
    *(
        "# ",
        "b *c*",
        "`d`",
        "\n",
        "\n\n",
        "  ",
        "    ",
        "- ",
        "* ",
        "1. ",
        "2. ",
        "> ",
        "```",
        "```py\n",
        "~~~\n",
        "---\n",
    ),
    *(
        "===\n",
        "|--|--\n",
        "|--|--",
        "a | b\n",
        "| c |",
        "**",
        "_",
        "&amp;",
        "<b>",
        "<!--",
        "x\n",
        "[t](https://e.com)",
        "![i](u)",
    ),
    *("http://e.com", "\t", "|", "+ ", "#", "##", "10) ", "\r\n", "\u00a0", "é"),
)
"""What decides how lines are read, and a little text."""


def test_streamed_markdown_is_what_the_whole_text_would_be(watched: Watched, server: ScriptedServer) -> None:
    """Wherever the text is cut. Blocks that are taken for complete are so: also before the end is known."""
    random = Random(8)
    texts = ["".join(random.choices(PARTS, k=random.randrange(1, 40))) for _ in range(400)]
    watched.open(server.url)
    cases = [(text, random.choice((1, 5))) for text in texts]
    results = watched.page.evaluate(STREAMED_AND_WHOLE, cases)
    assert len(results) == len(cases)
    for case, (streamed, finished, whole) in zip(cases, results, strict=True):
        assert finished == whole, case
        assert streamed == whole, case


def test_links_defined_at_the_end_are_made_when_the_answer_ends(watched: Watched, server: ScriptedServer) -> None:
    watched.open(server.url)
    text = "A [link][1] in the first.\n\nA second.\n\nA third.\n\n[1]: https://example.com/\n"
    ((streamed, finished, whole),) = watched.page.evaluate(STREAMED_AND_WHOLE, [(text, 9)])
    assert "<a" not in streamed
    assert '<a href="https://example.com/"' in finished
    assert finished == whole


def test_complete_blocks_of_a_long_answer_are_not_touched_again(watched: Watched, server: ScriptedServer) -> None:
    """Each piece of text costs as much at the end of an answer as at its beginning."""
    watched.open(server.url)
    changed = watched.page.evaluate("""async () => {
        const {MarkdownStream} = await import(new URL('static/markdown.js', document.baseURI));
        const box = document.createElement('div');
        const stream = new MarkdownStream(box);
        const observer = new MutationObserver(() => {});
        observer.observe(box, {subtree: true, childList: true, characterData: true});
        const counts = [];
        for (let index = 0; index < 400; index++) {
            stream.push(`Paragraph ${index} with **words**.\\n\\n`);
            counts.push(observer.takeRecords().length);
        }
        stream.finish();
        return [Math.max(...counts), observer.takeRecords().length, box.childNodes.length];
    }""")
    assert changed[0] <= 4
    assert changed[1:] == [0, 400]


def test_the_server_gets_a_key_that_the_user_gives(
    watched: Watched, server_with_key: ScriptedServer, context: BrowserContext
) -> None:
    """Asked for when one is needed, again when it is wrong; never in an address; kept for the tab unless told to."""
    page = watched.page
    watched.open(server_with_key.url)
    expect(page.locator("#key-note")).to_have_text("This server wants an API key.")
    page.fill("#key [name=key]", "wrong")
    page.click("#key [type=submit]")
    expect(page.locator("#key-note")).to_have_text("The server does not know this API key.")
    page.fill("#key [name=key]", KEY)
    page.press("#key [name=key]", "Enter")
    expect(page.locator("#model")).to_have_text("fake-model")
    watched.ask("hello")
    assert watched.answer == "You said: hello"
    watched.open(server_with_key.url)
    expect(page.locator("#model")).to_have_text("fake-model")
    assert not page.is_visible("#key")
    assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 1]
    assert not any(KEY in address for address in [*watched.sockets, page.url])

    other = watch(context.new_page())
    other.open(server_with_key.url)
    other.page.fill("#key [name=key]", KEY)
    other.page.check("#key [name=remember]")
    other.page.click("#key [type=submit]")
    expect(other.page.locator("#model")).to_have_text("fake-model")
    third = watch(context.new_page())
    third.open(server_with_key.url)
    expect(third.page.locator("#model")).to_have_text("fake-model")
    third.page.click("#open-settings")
    third.page.click("#forget-key")
    expect(third.page.locator("#key-note")).to_be_visible()
    assert third.page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 0]
    # The browser itself writes refused requests to the console.
    for one in (watched, other, third):
        assert all("401" in fault for fault in one.faults), one.faults
    watched.faults.clear()


def test_conversations_stay_in_the_browser(watched: Watched, server: ScriptedServer, tmp_path: Path) -> None:
    """Over a reload; they can be renamed, exported and deleted."""
    page = watched.page
    watched.open(server.url)
    watched.ask("first")
    watched.ask("more")
    page.click("#new-conversation")
    watched.ask("second")
    page.reload()
    expect(page.locator("#conversations a")).to_have_text(["second", "first"])
    expect(page.locator("article.assistant .content")).to_have_text(["You said: second"])

    page.click("#conversations a:has-text('first')")
    expect(page.locator("article.assistant .content")).to_have_text(["You said: first", "You said: more"])
    page.click("#open-menu")
    page.click("#rename")
    page.fill("#naming [name=title]", "Renamed")
    page.press("#naming [name=title]", "Enter")
    expect(page.locator("#conversations a[aria-current]")).to_have_text("Renamed")

    page.click("#open-menu")
    with page.expect_download() as download:
        page.click("#export")
    assert download.value.suggested_filename == "Renamed.json"
    download.value.save_as(tmp_path / "export.json")
    exported = json.loads((tmp_path / "export.json").read_text())
    (conversation,) = exported["conversations"]
    assert conversation["title"] == "Renamed"
    said = [(message["role"], message["content"]) for message in conversation["messages"]]
    assert said[:2] == [("user", "first"), ("assistant", "You said: first")]

    page.click("#open-menu")
    page.click("#delete")
    page.click("#confirming [type=submit]")
    expect(page.locator("#conversations a")).to_have_text(["second"])
    page.click("#open-settings")
    page.click("#delete-all")
    page.click("#confirming [type=submit]")
    expect(page.locator("#conversations a")).to_have_count(0)
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert stored_titles(watched) == []


def test_other_tabs_follow(watched: Watched, server: ScriptedServer, context: BrowserContext) -> None:
    """They show what is new, also in the conversation that they show, so that none overwrites what another wrote."""
    other = watch(context.new_page())
    watched.open(server.url)
    other.open(server.url)
    other.ask("from there")
    watched.page.click("#conversations a:has-text('from there')")
    watched.ask("from here")
    expect(other.page.locator("article.user .content")).to_have_text(["from there", "from here"])
    other.ask("and back")
    expect(watched.page.locator("article.user .content")).to_have_text(["from there", "from here", "and back"])
    assert other.faults == []


def test_a_conversation_deleted_while_it_runs_is_gone(watched: Watched, server: ScriptedServer) -> None:
    page = watched.page
    watched.open(server.url)
    watched.send("wait to be deleted")
    expect(page.locator("article.assistant .content")).to_contain_text("You said: wait")
    page.click("#open-menu")
    page.click("#delete")
    page.click("#confirming [type=submit]")
    wait_until_idle(watched)
    expect(page.locator("#conversations a")).to_have_count(0)
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert stored_titles(watched) == []


def test_a_conversation_that_cannot_be_kept_says_so(watched: Watched, server: ScriptedServer) -> None:
    watched.open(server.url)
    watched.page.evaluate("""() => {
        IDBObjectStore.prototype.put = () => { throw new DOMException('The disk is full.', 'QuotaExceededError'); };
    }""")
    watched.ask("hello")
    assert watched.answer == "You said: hello"
    expect(watched.page.locator("#notice")).to_contain_text("The disk is full.")


def test_an_answer_that_a_reload_cut_off_is_kept_as_such(watched: Watched, server: ScriptedServer) -> None:
    page = watched.page
    watched.open(server.url)
    watched.send("wait and reload")
    expect(page.locator("article.assistant .content")).to_contain_text("You said: wait")
    page.reload()
    expect(page.locator("article.assistant .note")).to_contain_text("The page was closed")
    wait_until_idle(watched)
    page.click("article.user button:has-text('Edit')")
    page.fill(".editor textarea", "hello instead")
    page.click(".editor [type=submit]")
    expect(page.locator("article.assistant .content")).to_have_text("You said: hello instead")


def test_messages_are_edited_and_answers_made_anew(watched: Watched, server: ScriptedServer) -> None:
    page = watched.page
    watched.open(server.url)
    watched.ask("one")
    watched.ask("two")
    page.click("article.assistant:last-of-type button:has-text('Regenerate')")
    expect(page.locator("article.assistant .content")).to_have_text(["You said: one", "You said: two"])
    page.locator("article.user button:has-text('Edit')").first.click()
    page.press(".editor textarea", "Escape")
    expect(page.locator(".editor")).to_have_count(0)
    page.locator("article.user button:has-text('Edit')").first.click()
    page.fill(".editor textarea", "three")
    page.press(".editor textarea", "Enter")
    expect(page.locator("article.assistant .content")).to_have_text(["You said: three"])
    expect(page.locator("article.user .content")).to_have_text(["three"])


def test_settings_reach_the_model(watched: Watched, server: ScriptedServer) -> None:
    page = watched.page
    watched.open(server.url)
    watched.ask("settings")
    roles, _, _ = json.loads(watched.answer)
    assert roles == ["user"]
    page.click("#open-settings")
    page.fill("#settings [name=systemPrompt]", "Be brief.")
    page.fill("#settings [name=temperature]", "0.25")
    page.fill("#settings [name=maxTokens]", "77")
    page.click("#settings [type=submit]")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    page.click("#new-conversation")
    watched.ask("settings")
    assert json.loads(watched.answer) == [["system", "user"], 0.25, 77]


def test_a_request_that_fails_says_why(watched: Watched, server: ScriptedServer) -> None:
    page = watched.page
    watched.open(server.url)
    page.evaluate("localStorage.setItem('trioengine.settings', JSON.stringify({model: 'no-such-model'}))")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    watched.ask("hello")
    expect(page.locator("article.assistant .note.error")).to_contain_text("no-such-model")


def test_a_lost_connection_is_made_again_and_nothing_is_repeated(watched: Watched) -> None:
    page = watched.page
    with scripted_server() as first:
        watched.open(first.url)
        watched.send("wait for the end")
        expect(page.locator("article.assistant .content")).to_contain_text("You said: wait")
        first.process.kill()
        expect(page.locator("article.assistant .note.error")).to_contain_text("Nothing was sent again")
        expect(page.locator("#connection")).to_contain_text("no connection")
        port = first.port
    watched.send("hello again")  # Waits for the connection.
    with scripted_server(port=port):
        expect(page.locator("article.assistant:last-of-type .content")).to_have_text("You said: hello again")
        expect(page.locator("#connection")).to_have_text("")
        assert page.evaluate(NUM_RUNNING % "") == 0
    assert all("ERR_CONNECTION" in fault for fault in watched.faults), watched.faults
    watched.faults.clear()


class _ScriptedSocket:
    """A server's side of `/v1/stream` that answers every request with these chunks' deltas, as credits allow."""

    def __init__(self, deltas: Sequence[dict[str, str]], finish: str, warnings: Sequence[str] = ()) -> None:
        self._deltas = list(deltas)
        self._finish = finish
        self._warnings = warnings
        self._credits = 0
        self.received: list[dict[str, Any]] = []

    def serve(self, socket: WebSocketRoute) -> None:
        socket.on_message(lambda text: self._receive(socket, json.loads(text)))

    def _receive(self, socket: WebSocketRoute, message: dict[str, Any]) -> None:
        self.received.append(message)
        match message["type"]:
            case "hello":
                self._send(socket, type="hello", version=1, model="scripted", limits={})
            case "create":
                self._send(socket, type="started", id=message["id"], prompt_tokens=1, warnings=self._warnings)
                self._credits = message["credits"]
            case "credit":
                self._credits += message["n"]
        while message["type"] in ("create", "credit") and self._credits and self._deltas:
            self._credits -= 1
            delta = self._deltas.pop(0)
            self._send(socket, type="chunk", id=message["id"], data={"choices": [{"index": 0, "delta": delta}]})
            if not self._deltas:
                self._send(socket, type="done", id=message["id"], finish=[self._finish], usage=None)

    def _send(self, socket: WebSocketRoute, **message: object) -> None:
        socket.send(json.dumps(message))


class _SilentSocket(_ScriptedSocket):
    """A network that has gone without a word once the request was sent."""

    def _receive(self, socket: WebSocketRoute, message: dict[str, Any]) -> None:
        if message["type"] in ("hello", "create"):
            super()._receive(socket, message)
        else:
            self.received.append(message)


def test_stop_needs_no_network(watched: Watched, server: ScriptedServer) -> None:
    page = watched.page
    silent = _SilentSocket([], "stop")
    page.route_web_socket("**/v1/stream", silent.serve)
    page.clock.install()
    watched.open(server.url)
    watched.send("hello")
    page.wait_for_function("document.querySelector('#send').textContent === 'Stop'")
    page.press("#prompt", "Escape")
    page.clock.fast_forward(6000)
    expect(page.locator("article.assistant .note")).to_have_text("Stopped.")
    expect(page.locator("#send")).to_have_text("Send")
    assert [message["type"] for message in silent.received] == ["hello", "create", "cancel"]


def test_reasoning_warnings_and_limits_are_shown(watched: Watched, server: ScriptedServer) -> None:
    page = watched.page
    deltas = [{"reasoning_content": "Let me "}, {"reasoning_content": "<b>see</b>."}, {"content": "Four."}]
    page.route_web_socket("**/v1/stream", _ScriptedSocket(deltas, "length", ["max_tokens was cut"]).serve)
    watched.open(server.url)
    watched.ask("2 + 2?")
    assert watched.answer == "Four."
    expect(page.locator(".reasoning div")).to_be_hidden()
    page.click(".reasoning summary")
    expect(page.locator(".reasoning div")).to_have_text("Let me <b>see</b>.")
    notes = ["max_tokens was cut", "The answer reached its limit of tokens."]
    expect(page.locator("article.assistant .note")).to_have_text(notes)
    page.reload()
    expect(page.locator(".reasoning div")).to_have_text("Let me <b>see</b>.")


def test_a_request_never_runs_out_of_credits(watched: Watched, server: ScriptedServer) -> None:
    """The server sends a chunk per credit and no more; all of a thousand come, for few messages back."""
    socket = _ScriptedSocket([{"content": f"{index} "} for index in range(1000)], "stop")
    watched.page.route_web_socket("**/v1/stream", socket.serve)
    watched.open(server.url)
    watched.ask("count")
    assert watched.answer.split() == [str(index) for index in range(1000)]
    kinds = [message["type"] for message in socket.received]
    assert kinds[:2] == ["hello", "create"]
    assert 10 < kinds.count("credit") <= 1000 / 16


def test_a_server_of_another_version_is_told_from_a_missing_key(watched: Watched, server: ScriptedServer) -> None:
    def refuse(socket: WebSocketRoute) -> None:
        error = {"message": "This server speaks version 2.", "type": "invalid_request_error"}
        socket.send(json.dumps({"type": "error", "status": 400, "error": error}))
        socket.close(code=1008)

    watched.page.route_web_socket("**/v1/stream", lambda socket: socket.on_message(lambda _: refuse(socket)))
    watched.open(server.url)
    expect(watched.page.locator("#connection")).to_have_text("This server speaks version 2.")
    assert not watched.page.is_visible("#key")


def test_the_page_works_below_a_root_path(watched: Watched) -> None:
    """Its addresses are relative, and one without the slash at the end leads to the one with it."""
    with scripted_server(root_path="/llm") as server:
        watched.open(f"{server.url}/llm")
        watched.ask("hello")
        assert watched.answer == "You said: hello"
        assert watched.page.url.startswith(f"{server.url}/llm/#")
        assert watched.sockets == [f"{server.url}/llm/v1/stream".replace("http", "ws")]


def test_the_keyboard_is_enough(watched: Watched, server: ScriptedServer) -> None:
    page = watched.page
    watched.open(server.url)
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    page.keyboard.press("Enter")
    expect(page.locator("article.user .content")).to_have_text("a\nb", use_inner_text=True)
    expect(page.locator("article.assistant .content")).to_contain_text("You said: a")
    reached = set[str]()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert {"new-conversation", "open-settings", "open-menu", "messages", "prompt", "send", "Regenerate"} <= reached
    unnamed = (
        "all => all.filter(one => !(one.textContent.trim() || one.ariaLabel || one.labels?.length)).map(one => one.id)"
    )
    assert page.locator("button, input, textarea, select, a").evaluate_all(unnamed) == []


def test_code_is_copied(watched: Watched, server: ScriptedServer, context: BrowserContext) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = watched.page
    watched.open(server.url)
    watched.ask("markdown")
    page.locator(".copy-code").first.click()
    expect(page.locator(".copy-code").first).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == 'def f(x):\n    return "<b>" + x'


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything(browser: Browser, server: ScriptedServer, scheme: str) -> None:
    """Nothing is wider than the screen, fields do not make it zoom, the list comes and goes, the scheme is followed."""
    with browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True, color_scheme=scheme) as context:
        watched = watch(context.new_page())
        page = watched.page
        watched.open(server.url)
        for asked in ("markdown", "attack", "x" * 300):
            watched.ask(asked)
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
            assert page.evaluate("document.getElementById('messages').scrollWidth") <= PHONE["width"]
        box = page.locator("#send").bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= PHONE["height"]
        sizes = "all => all.map(one => parseFloat(getComputedStyle(one).fontSize))"
        assert min(page.locator("input, textarea, select").evaluate_all(sizes)) >= 16
        expect(page.locator("#sidebar")).to_be_hidden()
        page.tap("#toggle-sidebar")
        page.tap("#conversations a")
        expect(page.locator("#sidebar")).to_be_hidden()
        page.tap("#toggle-sidebar")
        page.tap("#new-conversation")
        expect(page.locator(".welcome")).to_be_visible()
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (scheme == "light")
        assert watched.faults == []


def test_the_end_stays_in_view_unless_the_user_reads_elsewhere(watched: Watched, server: ScriptedServer) -> None:
    page = watched.page
    watched.open(server.url)
    watched.ask("long")
    below = """() => {
        const list = document.getElementById('messages');
        return list.scrollHeight - list.scrollTop - list.clientHeight;
    }"""
    assert page.evaluate(below) < 5
    page.evaluate("document.getElementById('messages').scrollTop = 0")
    expect(page.locator("#to-end")).to_be_visible()
    page.click("#to-end")
    expect(page.locator("#to-end")).to_be_hidden()
    assert page.evaluate(below) < 5
