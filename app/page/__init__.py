"""The browser page: static files, served with a content policy under which only these files can run.

The other security headers come from `app.gate`, as on every answer.

The page is plain ES modules with its libraries vendored beside it (`make vendor`), so there is no build step.
"""

from __future__ import annotations

from pathlib import Path

from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"

CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        # Markup can enter the page through DOMPurify's own policy only; any other way throws in the browser.
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)

PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    # Files keep their names between versions: a browser asks whether its copy is still good.
    "Cache-Control": "no-cache",
}


class PageFiles(StaticFiles):
    """The static files, each with the page's headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


async def index(_: object) -> Response:
    return FileResponse(STATIC / "index.html", headers=PAGE_HEADERS)


def page_routes() -> list[BaseRoute]:
    """`/` and `/static/...`. Needs no key: the files hold no secret, and the page asks for the key itself."""
    return [Route("/", index, name="page"), Mount("/static", PageFiles(directory=STATIC), name="static")]
