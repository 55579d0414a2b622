"""Invalid requests: each ends in a clear error, is counted, and leaves no connection, lease or thread behind."""

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
from tests.service.owners import settings
from tests.service.test_access import certificate
from tests.service.web.http_client import HttpClient, admin_client, web_served
from tests.service.web.test_version_files import versions

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


class ServedStore(NamedTuple):
    """A store with a database, its server, and tokens."""

    store: Store
    web: WebServer
    tokens: dict[str, str]

    def client(self, holder: str = "") -> HttpClient:
        return HttpClient(self.web.address, self.tokens[holder])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
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
        yield ServedStore(store, web, tokens)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if "served" not in request.fixturenames:
        yield
        return
    served: ServedStore = request.getfixturevalue("served")
    threads = {thread.name for thread in threading.enumerate()}
    yield
    until(lambda: served.web.figures().connections_now == 0, "a connection was left behind")
    versions(served.web).close_idle(0)
    assert versions(served.web).now == 0
    assert served.store.manifest.leases.count() == 0
    more = {thread.name for thread in threading.enumerate()} - threads - {"quire-files", "quire-sqlite"}
    pooled = ("web-call", "sql", "quire-sql")  # pool threads stay, up to their number
    assert not [name for name in more if not name.startswith(pooled) and "keepalive" not in name], more
    assert served.client("read").get("/readyz").json == {"ready": True}


def until(condition: Callable[[], bool], message: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.01)


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────
PIPELINE = json.dumps({"requests": [{"type": "execute", "stmt": {"sql": "select 1"}}, {"type": "close"}]}).encode()
WRITE = PIPELINE.replace(b"select 1", b"insert into item values (2)")
SHOP: dict[str, str] = {"x-namespace": "shop"}
JSON = {"content-type": "application/json"}


class Case(NamedTuple):
    """A request, its token, and the expected error."""

    name: str
    method: str
    path: str
    holder: str
    status: int
    body: bytes | None = None
    headers: dict[str, str] = {}  # noqa: RUF012 - a constant


BAD = [
    # tokens
    Case("no token", "GET", "/api/overview", "", 401),
    Case("no token for what is not there", "GET", "/nothing", "", 401),
    Case("a wrong token", "GET", "/db/shop.sqlite", "wrong", 401),
    Case("a forged token", "GET", "/db/shop.sqlite", "forged", 401),
    Case("an unsigned token", "GET", "/db/shop.sqlite", "unsigned", 401),
    Case("a token of another algorithm", "GET", "/db/shop.sqlite", "other-algorithm", 401),
    Case("an expired token", "GET", "/db/shop.sqlite", "expired", 401),
    Case("a token that is not valid yet", "GET", "/db/shop.sqlite", "not-yet", 401),
    Case("an expired token where none is needed", "GET", "/api/me", "expired", 401),
    Case("a password", "GET", "/api/overview", "", 401, headers={"authorization": "Basic YWRtaW46YWRtaW4="}),
    Case("a token in the address", "GET", "/api/overview?token=x&jwt=y", "", 401),
    Case("a token in a cookie", "GET", "/api/overview", "", 401, headers={"cookie": "token=x"}),
    Case("another database's file", "GET", "/db/other.sqlite", "shop", 403),
    Case("a database that is not there, with a token of another", "GET", "/db/nothing.sqlite", "shop", 403),
    Case("the whole store with a token of one database", "GET", "/api/overview", "shop", 403),
    Case("metrics with a token of one database", "GET", "/metrics", "shop", 403),
    Case("administering with a token of one database", "POST", "/api/jobs/1/retry", "shop", 403, b"{}", JSON),
    Case("administering with the read token", "POST", "/api/jobs/1/retry", "read", 403, b"{}", JSON),
    Case("SQL without a token", "POST", "/v2/pipeline", "", 401, PIPELINE, SHOP),
    Case("SQL with an expired token", "POST", "/v2/pipeline", "expired", 401, PIPELINE, SHOP),
    Case("SQL on another database", "POST", "/v2/pipeline", "shop", 403, PIPELINE, {"x-namespace": "other"}),
    Case("SQL on another database by path", "POST", "/db/other/v2/pipeline", "shop", 403, PIPELINE),
    Case("creating a database", "POST", "/v1/namespaces/new/create", "shop", 403, b"{}", JSON),
    Case("creating a database with the read token", "POST", "/v1/namespaces/new/create", "read", 403, b"{}", JSON),
    # origins
    Case("a foreign host", "GET", "/healthz", "admin", 403, headers={"host": "evil.example"}),
    Case("a foreign host that ends like ours", "GET", "/healthz", "admin", 403, headers={"host": "localhost.evil.example"}),
    Case("two labels before our name", "GET", "/healthz", "admin", 403, headers={"host": "a.b.localhost"}),
    Case("a foreign page", "GET", "/db/shop.sqlite", "admin", 403, headers={"origin": "https://evil.example"}),
    Case("an origin that is none", "GET", "/healthz", "admin", 403, headers={"origin": "http://["}),
    # names and addresses
    Case("a limit with zeros before it", "GET", "/v1/namespaces?limit=0000000019999999", "admin", 400),
    Case("a path that climbs", "GET", "/db/../../etc/passwd", "admin", 404),
    Case("an encoded path that climbs", "GET", "/db/..%2f..%2fetc%2fpasswd.sqlite", "admin", 404),
    Case("a name of dots", "GET", "/db/...sqlite", "admin", 400),
    Case("a name with a control character", "GET", "/db/a%00b.sqlite", "admin", 400),
    Case("a name that is too long", "GET", f"/db/{'n' * 300}.sqlite", "admin", 400),
    Case("a name that is not UTF-8", "GET", "/db/%ff%fe.sqlite", "admin", 404),
    Case("no name", "GET", "/db/.sqlite", "admin", 404),
    Case("a version of no name", "GET", "/db/@monday.sqlite", "admin", 400),
    Case("an unknown database", "GET", "/db/nothing.sqlite", "admin", 404),
    Case("an unknown version", "GET", "/db/shop@tuesday.sqlite", "admin", 404),
    Case("an epoch that is no number", "GET", "/db/shop@1e9.sqlite", "admin", 404),
    Case("an epoch that is not there yet", "GET", "/db/shop@999999999.sqlite", "admin", 400),
    Case("a time before it was created", "GET", "/db/shop@2001-01-01T00:00:00.sqlite", "admin", 404),
    Case("a time before there was a database", "GET", "/db/shop@1999-01-01T00:00:00Z.sqlite", "admin", 404),
    Case("an asset outside", "GET", "/static/..%2fserver.py", "admin", 404),
    Case("an unknown address", "GET", "/v9/pipeline", "admin", 404),
    Case("this method is not allowed", "PUT", "/db/shop.sqlite", "admin", 405, b"x"),
    Case("this method is not allowed of SQL", "GET", "/v2/pipeline", "admin", 405),
    Case("a method that is none", "FROBNICATE", "/healthz", "admin", 400),
    # ranges
    Case("a range behind the end", "GET", "/db/shop.sqlite", "admin", 416, headers={"range": "bytes=99999999-"}),
    Case("ranges that overlap", "GET", "/db/shop.sqlite", "admin", 416, headers={"range": "bytes=0-9,5-20"}),
    Case("too many ranges", "GET", "/db/shop.sqlite", "admin", 416, headers={"range": "bytes=" + "0-0," * 50 + "1-1"}),
    Case("a range that is none", "GET", "/db/shop@monday.sqlite", "admin", 416, headers={"range": "bytes=one-two"}),
    # sizes
    Case("a long address", "GET", "/" + "a" * 5000, "admin", 431),
    Case("a long header", "GET", "/healthz", "admin", 431, headers={"x-long": "a" * 5000}),
    Case("a long token", "GET", "/healthz", "", 431, headers={"authorization": "Bearer " + "a" * 9000}),
    Case("many headers", "GET", "/healthz", "admin", 431, headers={f"x-{n}": "a" * 50 for n in range(90)}),
    Case("a long body", "POST", "/v2/pipeline", "shop", 413, b" " * (65 * 1024), SHOP),
    Case("a long body of the dashboard", "POST", "/api/jobs/1/retry", "admin", 413, b" " * (65 * 1024), JSON),
    # bodies
    Case("a body that is no JSON", "POST", "/v2/pipeline", "shop", 400, b"select 1", SHOP),
    Case("JSON of another shape", "POST", "/v2/pipeline", "shop", 400, b'{"requests": 7}', SHOP),
    Case("JSON that is too deep", "POST", "/v2/pipeline", "shop", 400, b"[" * 50_000, SHOP),
    Case("a body of another type", "POST", "/api/jobs/1/retry", "admin", 415, b"a=b", {"content-type": "text/plain"}),
    Case("a query of too many fields", "GET", "/api/feed?" + "&".join(f"a{n}=1" for n in range(40)), "admin", 400),
    Case("a number that is none", "GET", "/api/feed?limit=-1", "admin", 400),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_bad_request_ends_in_a_clear_error(served: ServedStore, bad: Case) -> None:
    response = served.client(bad.holder).request(bad.method, bad.path, bad.body, **bad.headers)
    assert response.status == bad.status, response.body[:300]
    error = response.json
    assert error.get("message"), error
    text = response.body.decode() + repr(response.headers)
    assert "Traceback" not in text
    assert not [token for token in served.tokens.values() if token and token in text]
    assert str(served.store.path) not in text


STATEMENTS_LEAVING_DATABASE = [
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
def test_sql_that_would_leave_its_database_is_refused_over_the_wire(served: ServedStore, carrier: str) -> None:
    """Together with the cases above, more than a hundred ways to send a bad request. None of them leaves anything
    behind."""
    assert len(BAD) + len(STATEMENTS_LEAVING_DATABASE) >= 100
    for sql in STATEMENTS_LEAVING_DATABASE:
        request: dict[str, Any] = {"type": "execute", "stmt": {"sql": sql}}
        if carrier == "batch":
            request = {"type": "batch", "batch": {"steps": [{"stmt": {"sql": sql}}]}}
        requests = [request, *([] if carrier == "stream" else [{"type": "close"}])]
        response = served.client("shop").request(
            "POST", "/v3/pipeline", json.dumps({"requests": requests}).encode(), **SHOP
        )
        assert response.status == 200, (sql, response.body)
        result = response.json["results"][0]
        error = result.get("error") or result["response"]["result"]["step_errors"][0]
        assert error is not None, sql
        assert error["message"], sql
        if carrier == "stream":
            end = json.dumps({"baton": response.json["baton"], "requests": [{"type": "close"}]}).encode()
            assert served.client("shop").request("POST", "/v3/pipeline", end, **SHOP).status == 200
    assert [info.name for info in served.store.databases() if "escaped" in info.name] == []
    assert not [*Path("/tmp").glob("quire-escaped*")]
    assert "quire_sql_streams 0.0" in served.client("admin").request("GET", "/metrics").body.decode()


def test_a_read_token_writes_nothing_over_the_wire(served: ServedStore) -> None:
    response = served.client("shop-ro").request("POST", "/v2/pipeline", WRITE, **SHOP)
    assert (response.status, response.json["results"][0]["type"]) == (200, "error")
    with closing(served.store.sqlite("shop")) as connection:
        assert connection.execute("select count(*) from item").get == 1


def test_tokens_are_never_logged(served: ServedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(admission, "LOGGED_PER_SECOND", 1_000_000)
    monkeypatch.setattr(admission, "emit", lambda *names, **fields: events.append({"names": names, **fields}))
    for holder in ("wrong", "expired", "forged", "unsigned", "shop"):
        served.client(holder).get(f"/api/overview?access_token={served.tokens['admin']}")
    assert [event["names"][1] for event in events] == ["service.refused"] * 5
    assert not [token for token in served.tokens.values() if token and token in repr(events)]


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
def test_a_client_that_does_not_finish_its_request_is_disconnected(
    served: ServedStore, name: str, data: bytes, status: bytes, limit: str
) -> None:
    before = limited(served.web, limit)
    answer = served.client().raw(data.replace(b"TOKEN", served.tokens["shop"].encode()))
    assert answer[9:12] == status, answer[:200]
    if status:
        assert b"connection: close" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["message"]
    if limit:
        assert limited(served.web, limit) == before + 1


def test_a_client_that_sends_single_bytes_is_disconnected(served: ServedStore) -> None:
    """Slow loris: bytes that arrive in time do not extend the timeout."""
    before = limited(served.web, "head_seconds")
    with socket.create_connection(served.client().host_and_port, timeout=60) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\n")
        while limited(served.web, "head_seconds") == before:
            try:
                slow.sendall(b"x: a\r\n")
            except OSError:
                break
            time.sleep(0.05)
    assert limited(served.web, "head_seconds") == before + 1


def test_many_half_open_clients_leave_capacity_for_others(path: Path) -> None:
    with web_served(path, http_connections_max=40, http_head_seconds=30.0) as (store, web):
        client = admin_client(web, store)
        half_open = [socket.create_connection(client.host_and_port, timeout=60) for _ in range(39)]
        until(lambda: web.figures().connections_now == 39, "not all connections are open")
        assert client.get("/readyz").json == {"ready": True}
        until(lambda: web.figures().connections_now == 39, "the last connection is still open")
        half_open.append(socket.create_connection(client.host_and_port, timeout=60))
        until(lambda: web.figures().connections_now == 40, "the last connection was not accepted")
        response = client.get("/readyz")
        assert (response.status, response.json["error"], response.headers["retry-after"]) == (503, "Overloaded", "1")
        assert web.figures().limited == {"connections": 1}
        for connection in half_open:
            connection.close()
        until(lambda: web.figures().connections_now == 0, "a slot was lost")


def test_a_client_that_does_not_read_its_answer_is_disconnected(served: ServedStore) -> None:
    store, before = served.store, limited(served.web, "send_seconds")
    with closing(store.sqlite("large", create=True)) as connection:
        connection.execute("create table t(a); insert into t values (zeroblob(40000000))")
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        lazy.connect(served.client().host_and_port)
        token = served.tokens["admin"].encode()
        lazy.sendall(
            b"GET /db/large.sqlite HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + token + b"\r\n\r\n"
        )
        until(lambda: limited(served.web, "send_seconds") == before + 1, "the slow client was not disconnected")
    until(
        lambda: all(not version.users for version in versions(served.web)._open.values()), "the version is still held"
    )
    store.drop("large")


def test_requests_above_the_limit_are_refused_with_a_reason(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(_: object, **__: object) -> dict[str, object]:
        entered.set()
        leave.wait(60)
        return {}

    monkeypatch.setattr("quire.service.web.overview.lineage", slow)
    with web_served(path, http_requests_max=1) as (_, web):
        client = HttpClient(web.address)
        first = threading.Thread(target=client.get, args=("/api/lineage",))
        first.start()
        assert entered.wait(60)
        response = client.get("/api/jobs")
        assert (response.status, response.json["error"]) == (503, "Overloaded")
        assert client.get("/healthz").status == 200, "health checks are answered"
        assert web.figures().limited == {"requests": 1}
        leave.set()
        first.join(60)
        assert client.get("/api/jobs").status == 200


def test_an_answer_to_an_unread_body_reaches_the_client(served: ServedStore) -> None:
    """Hazard: closing a connection with unread bytes resets it, and the answer is lost."""
    with socket.create_connection(served.client().host_and_port, timeout=60) as client:
        client.sendall(HEAD + b"Content-Length: 50000000\r\n\r\n")
        sent = 0
        try:
            for _ in range(40):
                sent += client.send(b" " * 50_000)
        except OSError:
            pass
        answer = b""
        while piece := client.recv(65_536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 401"), answer[:100]
    assert answer.count(b"HTTP/1.1") == 1


# ── WebSocket ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_websocket_is_accepted_from_our_own_pages_and_from_programs(served: ServedStore) -> None:
    url = served.web.address.replace("http", "ws")
    for headers, status in (({"Origin": "https://evil.example"}, 403), ({"Host": "evil.example"}, 400)):
        with pytest.raises(InvalidStatus) as refused:
            connect(url, additional_headers=headers, subprotocols=["hrana3"], open_timeout=60)  # type: ignore[list-item]
        assert refused.value.response.status_code == status
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{url}/nothing", open_timeout=60)
    assert refused.value.response.status_code == 404


def test_a_message_that_is_too_long_ends_its_websocket(served: ServedStore) -> None:
    url = served.web.address.replace("http", "ws")
    with connect(url, subprotocols=["hrana3"], open_timeout=60) as client:  # type: ignore[list-item]
        client.send("x" * (65 * 1024))
        with pytest.raises(ConnectionClosedError) as closed:
            client.recv(timeout=60)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


# ── TLS ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_unfinished_handshake_uses_a_slot_only_briefly(path: Path, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    few = settings(http_head_seconds=0.5, http_connections_max=3, http_events_max=1)
    with quire.open(path, settings=few) as store:
        credentials = Credentials(tls_cert_file=cert, tls_key_file=key)
        with store.serve_http("https://127.0.0.1:0", credentials) as web:
            address = HttpClient(web.address).host_and_port
            held = [socket.create_connection(address, timeout=60) for _ in range(3)]
            until(lambda: web.figures().connections_now == 3, "the connections are not open")
            with socket.create_connection(address, timeout=60) as more:
                assert more.recv(10) == b"", "over TLS the connection is only closed"
            assert web.figures().limited["connections"] == 1
            until(lambda: web.figures().connections_now == 0, "a handshake never ends")
            assert web.figures().limited["tls_handshake"] == 3
            assert [connection.recv(10) for connection in held] == [b""] * 3
            context = ssl.create_default_context(cafile=cert)
            context.check_hostname = False
            with socket.create_connection(address, timeout=60) as plain, context.wrap_socket(plain) as secured:
                secured.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert secured.recv(12) == b"HTTP/1.1 200"
            for connection in held:
                connection.close()
