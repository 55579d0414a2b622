"""Properties of every address, whichever part answers it: it is documented, and it requires a token."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.routing import Route, WebSocketRoute

from quire.service.web.server import WebServer
from tests.rules.tree import ROOT
from tests.service.web.http_client import HttpClient, web_served

PUBLIC_ADDRESSES = {
    "/v2",
    "/v3",
    "/v3-protobuf",
    "/v3-protobuf/pipeline",
    "/v3-protobuf/cursor",
    "/sync/{position:path}",
}
"""Protocol discovery is public: these answers are the same for everybody, and clients request them before they send a
token."""
EXAMPLES = {
    "action": "hello",
    "generation": "1",
    "first": "1",
    "last": "2",
    "position": "x",
    "name": "shop",
    "new_name": "b",
    "database": "shop",
}


def addresses(web: WebServer) -> list[tuple[str, str]]:
    """(method, path) of every route, without the prefix of a database."""
    routes = [route for route in web._web.app.routes if isinstance(route, Route)]
    registered = {(method, route.path) for route in routes for method in (route.methods or {"GET"}) if method != "HEAD"}
    assert len(registered) > 20
    return sorted(registered)


def example(path: str) -> str:
    return re.sub(r"\{(\w+)(:\w+)?\}", lambda name: EXAMPLES[name[1]], path)


def test_the_page_lists_every_address(web: WebServer) -> None:
    table = (ROOT / "docs" / "sql-server.md").read_text("utf-8").partition("## Endpoints")[2]
    for method, path in addresses(web):
        plain = path.removeprefix("/db/{database}")
        shown = re.sub(r"\{position:path\}", "…", plain)
        shown = re.sub(r"\{new_name\}", "NEW", shown)
        shown = re.sub(r"\{(\w+)(:\w+)?\}", lambda name: name[1].upper(), shown)
        if not shown.startswith("/v3-protobuf/"):
            assert f"`{method} {shown}`" in table, f"{method} {path}"
    assert any(isinstance(route, WebSocketRoute) for route in web._web.app.routes)


def test_every_address_requires_a_token(path: Path) -> None:
    with web_served(path, http_ask_readers=True) as (store, web):
        store.sqlite("shop", create=True).close()
        anonymous = HttpClient(web.address)
        wrong = HttpClient(web.address, "a-token-that-nobody-has-given-out")
        for method, route in addresses(web):
            if route.removeprefix("/db/{database}") in PUBLIC_ADDRESSES:
                continue
            for client in (anonymous, wrong):
                response = client.request(
                    method, example(route), b"{}" if method == "POST" else None, x_namespace="shop"
                )
                assert response.status == 401, (method, route, response.body)
                assert response.headers["www-authenticate"] == 'Bearer realm="quire"'


@pytest.mark.parametrize("holder", ["read.token", "admin.token"])
def test_the_store_token_is_accepted_everywhere(path: Path, holder: str) -> None:
    with web_served(path, http_ask_readers=True) as (store, web):
        store.sqlite("shop", create=True).close()
        client = HttpClient(web.address, (path / holder).read_text().strip())
        for method, route in addresses(web):
            response = client.request(method, example(route), b"{}" if method == "POST" else None, x_namespace="shop")
            assert response.status != 401, (method, route, response.body)
            if holder == "admin.token":
                assert response.status != 403, (method, route, response.body)
            store.sqlite("shop", create=True).close()  # one of the requests drops it
