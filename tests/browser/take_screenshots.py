"""Takes the pictures in docs/images anew: `.venv/bin/python -P tests/browser/take_screenshots.py`."""

from pathlib import Path
from typing import Any

from trioengine.testing.browser import Watched, open_browser, scripted_server, watch

IMAGES = Path(__file__).parents[2] / "docs" / "images"
DESKTOP: dict[str, Any] = {"viewport": {"width": 1180, "height": 760}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 780}, "device_scale_factor": 2, "is_mobile": True}
PICTURES = {
    "web-page-light.png": DESKTOP | {"color_scheme": "light"},
    "web-page-dark.png": DESKTOP | {"color_scheme": "dark"},
    "web-page-phone.png": PHONE | {"has_touch": True, "color_scheme": "light"},
}


def hold_conversations(watched: Watched) -> None:
    """As somebody might."""
    for asked in ("Names for a small sailing boat", "A soup of what is in season"):
        watched.ask(asked)
        watched.page.evaluate("document.getElementById('new-conversation').click()")
    watched.ask("How do nurseries help?")
    watched.page.evaluate("document.activeElement.blur()")


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with scripted_server() as server, open_browser() as browser:
        for name, options in PICTURES.items():
            with browser.new_context(**options) as context:
                watched = watch(context.new_page())
                watched.open(server.url)
                hold_conversations(watched)
                watched.page.screenshot(path=IMAGES / name)


if __name__ == "__main__":
    main()
