"""Bad requests: each ends in a clear error, is counted, and leaves nothing behind: no connection, no lease, no thread."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jwt
import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

import quire
from quire.service import admission
from quire.service.signed_tokens import create_token, ensure_signing_key
from quire.service.tokens import Credentials
from quire.service.web.server import WebServer
from quire.store.store import Store
from quire.testing import ManualClock
from tests.service.test_access import certificate
from tests.service.web.test_version_files import versions
from tests.service.web.world import Asker, admin, web_served
from tests.service.world import settings

LIMITS: dict[str, Any] = {
    "http_head_bytes_max": 4096,
    "body_bytes_max": 64 * 1024,
    "http_head_seconds": 0.5,
    "http_body_seconds": 0.5,
    "http_idle_seconds": 0.5,
    "http_send_seconds": 0.5,
    "http_ask_readers": True,
    "stop_seconds": 2.0,
}


class World(NamedTuple):
    """A store with a database, its server, and tokens."""

    store: Store
    web: WebServer
    tokens: dict[str, str]

    def asker(self, holder: str = "") -> Asker:
        return Asker(self.web.address, self.tokens[holder])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path = tmp_path_factory.mktemp("bad") / "store"
    with web_served(path, **LIMITS) as (store, web):
        for name in ("shop", "other"):
            with closing(store.sqlite(name, create=True)) as connection:
                connection.execute("create table item(a); insert into item values (1)")
        store.snapshot("shop", "monday")
        past = ManualClock(store.manifest.clock.now_ms() - 7_200_000)
        key = ensure_signing_key(str(path / "jwt.key"))
        tokens = {
            "": "",
            "admin": (path / "admin.token").read_text().strip(),
            "read": (path / "read.token").read_text().strip(),
            "shop": create_token(str(path), ["shop"]),
            "shop-ro": create_token(str(path), ["shop"], read_only=True),
            "expired": create_token(str(path), ["shop"], ttl_seconds=3600, clock=past),
            "wrong": "a-token-that-nobody-has-given-out",
            "forged": create_token(str(path), ["shop"])[:-8] + "AAAAAAAA",
            "unsigned": jwt.encode({"id": "shop"}, "", algorithm="none"),
            "not-yet": jwt.encode({"nbf": 9_999_999_999}, key, algorithm="EdDSA"),
            "other-algorithm": jwt.encode({"id": "shop"}, "x" * 40, algorithm="HS256"),
        }
        yield World(store, web, tokens)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if "world" not in request.fixturenames:
        yield
        return
    world: World = request.getfixturevalue("world")
    threads = {thread.name for thread in threading.enumerate()}
    yield
    until(lambda: world.web.figures().connections_now == 0, "a connection was left behind")
    versions(world.web).close_idle(0)
    assert versions(world.web).now == 0
    assert world.store.manifest.leases.count() == 0
    more = {thread.name for thread in threading.enumerate()} - threads - {"quire-files", "quire-sqlite"}
    own = ("web-call", "sql", "quire-sql")  # threads that stay, up to their number
    assert not [name for name in more if not name.startswith(own) and "keepalive" not in name], more
    assert world.asker("read").get("/readyz").json == {"ready": True}


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


# ── whole requests ────────────────────────────────────────────────────────────────────────────────────────────────────
PIPELINE = json.dumps({"requests": [{"type": "execute", "stmt": {"sql": "select 1"}}, {"type": "close"}]}).encode()
WRITE = PIPELINE.replace(b"select 1", b"insert into item values (2)")
SHOP: dict[str, str] = {"x-namespace": "shop"}
JSON = {"content-type": "application/json"}


class Bad(NamedTuple):
    """A request, who asks, and how it ends."""

    name: str
    method: str
    path: str
    holder: str
    status: int
    body: bytes | None = None
    headers: dict[str, str] = {}  # noqa: RUF012 - a constant


BAD = [
    # who asks
    Bad("no token", "GET", "/api/overview", "", 401),
    Bad("no token for what is not there", "GET", "/nothing", "", 401),
    Bad("a wrong token", "GET", "/db/shop.sqlite", "wrong", 401),
    Bad("a forged token", "GET", "/db/shop.sqlite", "forged", 401),
    Bad("an unsigned token", "GET", "/db/shop.sqlite", "unsigned", 401),
    Bad("a token of another algorithm", "GET", "/db/shop.sqlite", "other-algorithm", 401),
    Bad("an expired token", "GET", "/db/shop.sqlite", "expired", 401),
    Bad("a token that is not valid yet", "GET", "/db/shop.sqlite", "not-yet", 401),
    Bad("an expired token where none is needed", "GET", "/api/me", "expired", 401),
    Bad("a password", "GET", "/api/overview", "", 401, headers={"authorization": "Basic YWRtaW46YWRtaW4="}),
    Bad("a token in the address", "GET", "/api/overview?token=x&jwt=y", "", 401),
    Bad("a token in a cookie", "GET", "/api/overview", "", 401, headers={"cookie": "token=x"}),
    Bad("another database's file", "GET", "/db/other.sqlite", "shop", 403),
    Bad("a database that is not there, with a token of another", "GET", "/db/nothing.sqlite", "shop", 403),
    Bad("the whole store with a token of one database", "GET", "/api/overview", "shop", 403),
    Bad("metrics with a token of one database", "GET", "/metrics", "shop", 403),
    Bad("administering with a token of one database", "POST", "/api/jobs/1/retry", "shop", 403, b"{}", JSON),
    Bad("administering with the read token", "POST", "/api/jobs/1/retry", "read", 403, b"{}", JSON),
    Bad("SQL without a token", "POST", "/v2/pipeline", "", 401, PIPELINE, SHOP),
    Bad("SQL with an expired token", "POST", "/v2/pipeline", "expired", 401, PIPELINE, SHOP),
    Bad("SQL on another database", "POST", "/v2/pipeline", "shop", 403, PIPELINE, {"x-namespace": "other"}),
    Bad("SQL on another database by path", "POST", "/db/other/v2/pipeline", "shop", 403, PIPELINE),
    Bad("creating a database", "POST", "/v1/namespaces/new/create", "shop", 403, b"{}", JSON),
    Bad("creating a database with the read token", "POST", "/v1/namespaces/new/create", "read", 403, b"{}", JSON),
    # from where
    Bad("a foreign host", "GET", "/healthz", "admin", 403, headers={"host": "evil.example"}),
    Bad("a foreign host that ends like ours", "GET", "/healthz", "admin", 403, headers={"host": "localhost.evil.example"}),
    Bad("two labels before our name", "GET", "/healthz", "admin", 403, headers={"host": "a.b.localhost"}),
    Bad("a foreign page", "GET", "/db/shop.sqlite", "admin", 403, headers={"origin": "https://evil.example"}),
    Bad("an origin that is none", "GET", "/healthz", "admin", 403, headers={"origin": "http://["}),
    # names and addresses
    Bad("a limit with zeros before it", "GET", "/v1/namespaces?limit=0000000019999999", "admin", 400),
    Bad("a path that climbs", "GET", "/db/../../etc/passwd", "admin", 404),
    Bad("an encoded path that climbs", "GET", "/db/..%2f..%2fetc%2fpasswd.sqlite", "admin", 404),
    Bad("a name of dots", "GET", "/db/...sqlite", "admin", 400),
    Bad("a name with a control character", "GET", "/db/a%00b.sqlite", "admin", 400),
    Bad("a name that is too long", "GET", f"/db/{'n' * 300}.sqlite", "admin", 400),
    Bad("a name that is not UTF-8", "GET", "/db/%ff%fe.sqlite", "admin", 404),
    Bad("no name", "GET", "/db/.sqlite", "admin", 404),
    Bad("a version of no name", "GET", "/db/@monday.sqlite", "admin", 400),
    Bad("an unknown database", "GET", "/db/nothing.sqlite", "admin", 404),
    Bad("an unknown version", "GET", "/db/shop@tuesday.sqlite", "admin", 404),
    Bad("an epoch that is no number", "GET", "/db/shop@1e9.sqlite", "admin", 404),
    Bad("an epoch that is not there yet", "GET", "/db/shop@999999999.sqlite", "admin", 400),
    Bad("a time before it was created", "GET", "/db/shop@2001-01-01T00:00:00.sqlite", "admin", 404),
    Bad("a time before there was a database", "GET", "/db/shop@1999-01-01T00:00:00Z.sqlite", "admin", 404),
    Bad("an asset outside", "GET", "/static/..%2fserver.py", "admin", 404),
    Bad("an unknown address", "GET", "/v9/pipeline", "admin", 404),
    Bad("this method is not allowed", "PUT", "/db/shop.sqlite", "admin", 405, b"x"),
    Bad("this method is not allowed of SQL", "GET", "/v2/pipeline", "admin", 405),
    Bad("a method that is none", "FROBNICATE", "/healthz", "admin", 400),
    # ranges
    Bad("a range behind the end", "GET", "/db/shop.sqlite", "admin", 416, headers={"range": "bytes=99999999-"}),
    Bad("ranges that overlap", "GET", "/db/shop.sqlite", "admin", 416, headers={"range": "bytes=0-9,5-20"}),
    Bad("too many ranges", "GET", "/db/shop.sqlite", "admin", 416, headers={"range": "bytes=" + "0-0," * 50 + "1-1"}),
    Bad("a range that is none", "GET", "/db/shop@monday.sqlite", "admin", 416, headers={"range": "bytes=one-two"}),
    # sizes
    Bad("a long address", "GET", "/" + "a" * 5000, "admin", 431),
    Bad("a long header", "GET", "/healthz", "admin", 431, headers={"x-long": "a" * 5000}),
    Bad("a long token", "GET", "/healthz", "", 431, headers={"authorization": "Bearer " + "a" * 9000}),
    Bad("many headers", "GET", "/healthz", "admin", 431, headers={f"x-{n}": "a" * 50 for n in range(90)}),
    Bad("a long body", "POST", "/v2/pipeline", "shop", 413, b" " * (65 * 1024), SHOP),
    Bad("a long body of the dashboard", "POST", "/api/jobs/1/retry", "admin", 413, b" " * (65 * 1024), JSON),
    # bodies
    Bad("a body that is no JSON", "POST", "/v2/pipeline", "shop", 400, b"select 1", SHOP),
    Bad("JSON of another shape", "POST", "/v2/pipeline", "shop", 400, b'{"requests": 7}', SHOP),
    Bad("JSON that is too deep", "POST", "/v2/pipeline", "shop", 400, b"[" * 50_000, SHOP),
    Bad("a body of another type", "POST", "/api/jobs/1/retry", "admin", 415, b"a=b", {"content-type": "text/plain"}),
    Bad("a query of too many fields", "GET", "/api/feed?" + "&".join(f"a{n}=1" for n in range(40)), "admin", 400),
    Bad("a number that is none", "GET", "/api/feed?limit=-1", "admin", 400),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_bad_request_ends_in_a_clear_error(world: World, bad: Bad) -> None:
    told = world.asker(bad.holder).ask(bad.method, bad.path, bad.body, **bad.headers)
    assert told.status == bad.status, told.body[:300]
    error = told.json
    assert error.get("message"), error
    text = told.body.decode() + repr(told.headers)
    assert "Traceback" not in text
    assert not [token for token in world.tokens.values() if token and token in text]
    assert str(world.store.path) not in text


LEAVING = [
    "attach '/etc/passwd' as x",
    "attach 'other' as x",
    "attach 'shop' as x",
    "attach ':memory:' as x",
    "attach 'file:/etc/passwd?mode=ro' as x",
    "attach 'file::memory:?cache=shared' as x",
    "attach ('oth' || 'er') as x",
    "/* a hint */ -- and another\nAtTaCh 'other' as x",
    "explain attach 'other' as x",
    "detach main",
    "vacuum into '/tmp/quire-escaped.db'",
    "vacuum into 'other'",
    "vacuum main into 'file:/tmp/quire-escaped.db'",
    "select load_extension('x')",
    "with x as (select load_extension('x', 'y')) select * from x",
    "select fts3_tokenizer('simple')",
    "select sqlite_log(1, 'x')",
    "select readfile('/etc/passwd')",
    "select writefile('/tmp/quire-escaped', 'x')",
    "select edit('x')",
    "create virtual table v using csv(filename='/etc/passwd')",
    "create virtual table v using zipfile('/etc/passwd')",
    "select * from fsdir('/etc')",
    "select * from pragma_temp_store_directory",
    "pragma temp_store_directory = '/tmp'",
    "pragma data_store_directory = '/tmp'",
    "pragma synchronous = off",
    "pragma main.synchronous = 0",
    "pragma cache_size = 1000000",
    "pragma busy_timeout = 60000",
    "pragma writable_schema = on",
    "pragma locking_mode = exclusive",
    "pragma mmap_size = 1000000000",
    "pragma temp_store = memory",
    "pragma query_only = off",
    "pragma trusted_schema = on",
    "pragma hard_heap_limit = 1",
    "pragma soft_heap_limit = 1",
    "pragma threads = 8",
    "pragma max_page_count = 1",
    "pragma key = 'x'",
    "pragma module_of_tomorrow = 1",
    "update sqlite_master set sql = 'x'",
    "delete from sqlite_schema",
    "select 1; select 2",
]


@pytest.mark.parametrize("carrier", ["pipeline", "stream", "batch"])
def test_sql_that_would_leave_its_database_is_refused_over_the_wire(world: World, carrier: str) -> None:
    """With the ways in which bad requests end, above: a hundred and more. Nothing is left behind by any of them."""
    assert len(BAD) + len(LEAVING) >= 100
    for sql in LEAVING:
        request: dict[str, Any] = {"type": "execute", "stmt": {"sql": sql}}
        if carrier == "batch":
            request = {"type": "batch", "batch": {"steps": [{"stmt": {"sql": sql}}]}}
        requests = [request, *([] if carrier == "stream" else [{"type": "close"}])]
        told = world.asker("shop").ask("POST", "/v3/pipeline", json.dumps({"requests": requests}).encode(), **SHOP)
        assert told.status == 200, (sql, told.body)
        result = told.json["results"][0]
        error = result.get("error") or result["response"]["result"]["step_errors"][0]
        assert error is not None, sql
        assert error["message"], sql
        if carrier == "stream":
            end = json.dumps({"baton": told.json["baton"], "requests": [{"type": "close"}]}).encode()
            assert world.asker("shop").ask("POST", "/v3/pipeline", end, **SHOP).status == 200
    assert [info.name for info in world.store.databases() if "escaped" in info.name] == []
    assert not [*Path("/tmp").glob("quire-escaped*")]
    assert "quire_sql_streams 0.0" in world.asker("admin").ask("GET", "/metrics").body.decode()


def test_a_reader_writes_nothing_over_the_wire(world: World) -> None:
    told = world.asker("shop-ro").ask("POST", "/v2/pipeline", WRITE, **SHOP)
    assert (told.status, told.json["results"][0]["type"]) == (200, "error")
    with closing(world.store.sqlite("shop")) as connection:
        assert connection.execute("select count(*) from item").get == 1


def test_no_token_is_told_to_whoever_listens(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(admission, "LOGGED_PER_SECOND", 1_000_000)
    monkeypatch.setattr(admission, "emit", lambda *names, **fields: events.append({"names": names, **fields}))
    for holder in ("wrong", "expired", "forged", "unsigned", "shop"):
        world.asker(holder).get(f"/api/overview?access_token={world.tokens['admin']}")
    assert [event["names"][1] for event in events] == ["service.refused"] * 5
    assert not [token for token in world.tokens.values() if token and token in repr(events)]


# ── connections ───────────────────────────────────────────────────────────────────────────────────────────────────────
def limited(web: WebServer, limit: str) -> int:
    return web.figures().limited.get(limit, 0)


HEAD = b"POST /v2/pipeline HTTP/1.1\r\nHost: localhost\r\nx-namespace: shop\r\n"
AUTH = b"Authorization: Bearer TOKEN\r\n"
UPGRADE = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
WEBSOCKET = UPGRADE[:-2].replace(b"h2c", b"websocket") + (
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
TRAILER = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + AUTH + b"\r\n"
SLOW = [
    ("half a head", b"GET /healthz HT", b"408", "head_seconds"),
    ("a header that does not end", b"GET /healthz HTTP/1.1\r\nHost: local", b"408", "head_seconds"),
    ("headers without an end", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n", b"408", "head_seconds"),
    ("nothing at all", b"", b"", ""),
    ("blank lines", b"\r\n\r\n\r\n", b"408", "idle_seconds"),
    ("half a body", HEAD + AUTH + b"Content-Length: 100\r\n\r\n{", b"408", "body_seconds"),
    ("a chunk that does not end", HEAD + AUTH + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", b"408", "body_seconds"),
    ("an endless header", b"GET /healthz HTTP/1.1\r\nx: " + b"a" * 100_000, b"431", "head_bytes"),
    ("no HTTP", b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n", b"400", ""),
    ("another protocol", b"SSH-2.0-OpenSSH_9.6\r\n", b"400", ""),
    ("a length that is none", HEAD + b"Content-Length: -5\r\n\r\n", b"400", ""),
    ("two hosts", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", b"400", ""),
    ("two lengths", HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde", b"400", ""),
    ("a length and chunks", HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400", ""),
    ("an upgrade to something else", UPGRADE, b"400", ""),
    ("a WebSocket with a body", WEBSOCKET + b"Content-Length: 5\r\n\r\nabcde", b"400", ""),
    ("a WebSocket with chunks", WEBSOCKET + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400", ""),
    ("a token behind the body", TRAILER, b"401", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "data", "status", "limit"), SLOW, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_client_that_does_not_finish_is_hung_up_on(
    world: World, name: str, data: bytes, status: bytes, limit: str
) -> None:
    before = limited(world.web, limit)
    said = world.asker().raw(data.replace(b"TOKEN", world.tokens["shop"].encode()))
    assert said[9:12] == status, said[:200]
    if status:
        assert b"connection: close" in said
        assert json.loads(said.partition(b"\r\n\r\n")[2])["message"]
    if limit:
        assert limited(world.web, limit) == before + 1


def test_a_client_that_sends_a_byte_now_and_then_is_hung_up_on(world: World) -> None:
    """Slow loris: bytes that come in time do not give it more."""
    before = limited(world.web, "head_seconds")
    with socket.create_connection(world.asker().place, timeout=60) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\n")
        while limited(world.web, "head_seconds") == before:
            try:
                slow.sendall(b"x: a\r\n")
            except OSError:
                break
            time.sleep(0.05)
    assert limited(world.web, "head_seconds") == before + 1


def test_many_half_open_clients_leave_room_for_the_others(path: Path) -> None:
    with web_served(path, http_connections_max=40, http_head_seconds=30.0) as (store, web):
        asker = admin(web, store)
        half_open = [socket.create_connection(asker.place, timeout=60) for _ in range(39)]
        until(lambda: web.figures().connections_now == 39, "they are not all there")
        assert asker.get("/readyz").json == {"ready": True}
        until(lambda: web.figures().connections_now == 39, "the last is still there")
        half_open.append(socket.create_connection(asker.place, timeout=60))
        until(lambda: web.figures().connections_now == 40, "the last did not come")
        told = asker.get("/readyz")
        assert (told.status, told.json["error"], told.headers["retry-after"]) == (503, "Overloaded", "1")
        assert web.figures().limited == {"connections": 1}
        for connection in half_open:
            connection.close()
        until(lambda: web.figures().connections_now == 0, "a slot was lost")


def test_who_does_not_read_its_answer_is_hung_up_on(world: World) -> None:
    store, before = world.store, limited(world.web, "send_seconds")
    with closing(store.sqlite("large", create=True)) as connection:
        connection.execute("create table t(a); insert into t values (zeroblob(40000000))")
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        lazy.connect(world.asker().place)
        token = world.tokens["admin"].encode()
        lazy.sendall(
            b"GET /db/large.sqlite HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + token + b"\r\n\r\n"
        )
        until(lambda: limited(world.web, "send_seconds") == before + 1, "it may still be read")
    until(lambda: all(not version.users for version in versions(world.web)._open.values()), "the version is still held")
    store.drop("large")


def test_more_requests_than_there_are_places_are_told_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(_: object, **__: object) -> dict[str, object]:
        entered.set()
        leave.wait(60)
        return {}

    monkeypatch.setattr("quire.service.web.overview.lineage", slow)
    with web_served(path, http_requests_max=1) as (_, web):
        asker = Asker(web.address)
        first = threading.Thread(target=asker.get, args=("/api/lineage",))
        first.start()
        assert entered.wait(60)
        told = asker.get("/api/jobs")
        assert (told.status, told.json["error"]) == (503, "Overloaded")
        assert asker.get("/healthz").status == 200, "whoever watches the server is answered"
        assert web.figures().limited == {"requests": 1}
        leave.set()
        first.join(60)
        assert asker.get("/api/jobs").status == 200


def test_an_answer_to_an_unread_body_is_seen_by_the_client(world: World) -> None:
    """A connection that is closed with unread bytes is reset, and the answer would be lost."""
    with socket.create_connection(world.asker().place, timeout=60) as client:
        client.sendall(HEAD + b"Content-Length: 50000000\r\n\r\n")
        sent = 0
        try:
            for _ in range(40):
                sent += client.send(b" " * 50_000)
        except OSError:
            pass
        said = b""
        while piece := client.recv(65_536):
            said += piece
    assert said.startswith(b"HTTP/1.1 401"), said[:100]
    assert said.count(b"HTTP/1.1") == 1


# ── WebSocket ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_websocket_comes_from_our_own_pages_or_from_programs(world: World) -> None:
    url = world.web.address.replace("http", "ws")
    for headers, status in (({"Origin": "https://evil.example"}, 403), ({"Host": "evil.example"}, 400)):
        with pytest.raises(InvalidStatus) as refused:
            connect(url, additional_headers=headers, subprotocols=["hrana3"], open_timeout=60)  # type: ignore[list-item]
        assert refused.value.response.status_code == status
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{url}/nothing", open_timeout=60)
    assert refused.value.response.status_code == 404


def test_a_message_that_is_too_long_ends_its_websocket(world: World) -> None:
    url = world.web.address.replace("http", "ws")
    with connect(url, subprotocols=["hrana3"], open_timeout=60) as client:  # type: ignore[list-item]
        client.send("x" * (65 * 1024))
        with pytest.raises(ConnectionClosedError) as closed:
            client.recv(timeout=60)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


# ── TLS ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_handshake_that_does_not_end_costs_a_slot_for_a_moment(path: Path, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    few = settings(http_head_seconds=0.5, http_connections_max=3, http_events_max=1)
    with quire.open(path, settings=few) as store:
        given = Credentials(tls_cert_file=cert, tls_key_file=key)
        with store.serve_http("https://127.0.0.1:0", given) as web:
            place = Asker(web.address).place
            held = [socket.create_connection(place, timeout=60) for _ in range(3)]
            until(lambda: web.figures().connections_now == 3, "they are not there")
            with socket.create_connection(place, timeout=60) as more:
                assert more.recv(10) == b"", "over TLS it is only hung up on"
            assert web.figures().limited["connections"] == 1
            until(lambda: web.figures().connections_now == 0, "a handshake never ends")
            assert web.figures().limited["tls_handshake"] == 3
            assert [connection.recv(10) for connection in held] == [b""] * 3
            context = ssl.create_default_context(cafile=cert)
            context.check_hostname = False
            with socket.create_connection(place, timeout=60) as plain, context.wrap_socket(plain) as secured:
                secured.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert secured.recv(12) == b"HTTP/1.1 200"
            for connection in held:
                connection.close()
