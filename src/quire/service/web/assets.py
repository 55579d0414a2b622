"""The dashboard's static files: read once, sent with an `ETag`, so that a browser revalidates them and gets 304.

Rules
  1. Only files of the package are served, by their exact names, so path traversal is impossible.
  2. Nothing is loaded from elsewhere: the content policy allows this origin and no inline code.

Threads: any; constant after the first use.
"""

from __future__ import annotations

import hashlib
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import NamedTuple

from quire.service.web.answers import Response

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class Asset(NamedTuple):
    """One file."""

    body: bytes
    content_type: str
    tag: str


@cache
def assets() -> dict[str, Asset]:
    """Return every file of the dashboard by its name."""
    by_name = {}
    for file in files("quire.service.web").joinpath("static").iterdir():
        kind = file.name.rpartition(".")[2]
        if kind in TYPES:
            body = file.read_bytes()
            by_name[file.name] = Asset(body, TYPES[kind], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return by_name


def asset_answer(name: str, known_tag: str | None) -> Response | None:
    """Return a file, or 304 if the browser has it; `None` if there is no such file."""
    asset = assets().get(name)
    if asset is None:
        return None
    headers = {"ETag": asset.tag, "Cache-Control": "no-cache"}
    if known_tag is not None and asset.tag in (tag.strip().removeprefix("W/") for tag in known_tag.split(",")):
        return Response(b"", asset.content_type, HTTPStatus.NOT_MODIFIED, headers)
    return Response(asset.body, asset.content_type, HTTPStatus.OK, headers)
