"""The chat page: the files of `web/`, as they are, with headers that keep whatever a model writes from running.

The page is open without a key and holds no secret; what it asks the server for needs one. Knows nothing about engines.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import attrs
from quart import Blueprint, Response, request

import trioengine
from trioengine.errors import NotFoundError

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Setting innerHTML and its like fails: nodes are all that scripts can make.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Mapping[str, str] = {
    # A browser asks whether a file is still the same, so that a page never meets scripts of another version.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_CONTENT_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""Files of other kinds are not served."""
_INDEX = "index.html"


@attrs.frozen
class _File:
    body: bytes
    content_type: str
    etag: str


def page_blueprint() -> Blueprint:
    """The page at `/` and its files below `/static/`. They are read once, here.

    Raises:
        FileNotFoundError: this installation has no page.
    """
    files = _read_files(_folder())
    blueprint = Blueprint("page", __name__)

    async def index() -> Response:
        # Below a root path the page's own addresses, which are relative, need the slash.
        if not request.scope["raw_path"].endswith(b"/"):
            return Response(b"", status=308, headers={"Location": quote(f"{request.root_path}/")})
        return _answer(files[_INDEX])

    async def static(path: str) -> Response:
        file = files.get(path)
        if file is None or path == _INDEX:
            raise NotFoundError("There is nothing at this address.")
        return _answer(file)

    blueprint.get("/")(index)
    blueprint.get("/static/<path:path>")(static)
    return blueprint


def _folder() -> Path:
    """Where the files are: a wheel has them in the package, a working tree beside it."""
    package = Path(trioengine.__file__).parent
    for folder in (package / "web", package.parent / "web"):
        if (folder / _INDEX).is_file():
            return folder
    raise FileNotFoundError(f"The files of the chat page are missing: there is no {package / 'web' / _INDEX}.")


def _read_files(folder: Path) -> dict[str, _File]:
    files: dict[str, _File] = {}
    for path in folder.rglob("*"):
        content_type = _CONTENT_TYPES.get(path.suffix)
        if content_type is not None and path.is_file():
            body = path.read_bytes()
            digest = hashlib.sha256(body).hexdigest()[:32]
            files[path.relative_to(folder).as_posix()] = _File(body, content_type, digest)
    return files


def _answer(file: _File) -> Response:
    """The file, or 304 where the browser has it. Quart leaves the body out for HEAD."""
    is_known = request.if_none_match.contains_weak(file.etag)
    response = Response(b"" if is_known else file.body, status=304 if is_known else 200)
    response.headers.update(_HEADERS)
    response.content_type = file.content_type
    response.set_etag(file.etag)
    if is_known:
        del response.headers["Content-Length"]
    return response
