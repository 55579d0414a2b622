"""Access control by host, origin and token; response headers; and requests that are refused early."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, cast

import pytest

import quire
from quire.service.tokens import Credentials
from quire.service.web.answers import SECURITY_HEADERS as HEADERS
from quire.service.web.dashboard import BODY_BYTES_MAX
from quire.service.web.protocol import _CycleTransport
from quire.service.web.server import WebServer
from quire.store.store import Store
from tests.service.test_access import certificate
from tests.service.web.http_client import JSON, HttpClient, admin_client, web_served

READ = ["/metrics", "/api/overview", "/api/lineage", "/api/jobs", "/api/feed", "/api/verification", "/nothing"]


def test_every_answer_has_its_security_headers(anonymous: HttpClient) -> None:
    for target in ("/", "/static/app.js", "/healthz", "/api/overview", "/nothing", "/metrics"):
        headers = anonymous.get(target).headers
        for name, value in HEADERS.items():
            assert headers[name.lower()] == value, target
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert "set-cookie" not in headers
        assert "access-control-allow-origin" not in headers
        assert "python" not in headers["server"].lower()


# ── hosts and origins ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_ip_addresses_and_localhost_are_accepted_as_host(anonymous: HttpClient) -> None:
    for host in (
        "localhost",
        "localhost:7448",
        "127.0.0.1:1",
        "[::1]:80",
        "LOCALHOST",
        "10.1.2.3",
        "shop.localhost",
        "",
    ):
        assert anonymous.get("/api/me", Host=host).status == 200, host


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", ":", "[", "a@b"]
)
def test_a_foreign_host_is_refused_for_every_address(anonymous: HttpClient, web: WebServer, host: str) -> None:
    """DNS rebinding: the name of a foreign page resolves to this machine."""
    for target in ("/", "/healthz", "/api/overview", "/api/events"):
        before = web.figures().refused
        assert anonymous.get(target, Host=host).status == 403
        assert web.figures().refused == before + 1


def test_a_host_from_the_settings_is_accepted(path: Path) -> None:
    with web_served(path, http_hosts=("data.lan",)) as (_, web):
        assert HttpClient(web.address).get("/api/me", Host="Data.LAN:7448").status == 200
        assert HttpClient(web.address).get("/api/me", Host="other.lan").status == 403


def test_a_page_of_another_origin_is_refused(admin: HttpClient, store: Store) -> None:
    store.create("shop", "pages")
    for origin in ("http://evil.example", "null", "http://localhost:1", "https://127.0.0.1"):
        assert admin.get("/api/overview", Origin=origin).status == 403
        assert admin.post("/api/databases/shop/snapshots", {"name": "x"}, Origin=origin).status == 403
    assert admin.get("/api/overview", Sec_Fetch_Site="cross-site").status == 403
    assert admin.get("/api/overview", Sec_Fetch_Site="same-origin").status == 200
    assert store.database("shop").snapshots == 0


def test_our_own_page_and_programs_may_post(admin: HttpClient, store: Store) -> None:
    store.create("shop", "pages")
    origin = admin.address
    assert admin.post("/api/databases/shop/snapshots", {"name": "page"}, Origin=origin).status == 201
    assert admin.post("/api/databases/shop/snapshots", {"name": "program"}).status == 201
    assert [snapshot.name for snapshot in store.manifest.snapshots.of("shop")] == ["page", "program"]


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_on_loopback_reading_needs_no_token_and_writing_does(
    anonymous: HttpClient, admin: HttpClient, store: Store
) -> None:
    store.create("shop", "pages")
    assert anonymous.get("/api/me").json == {"role": "read", "asks_readers": False}
    assert admin.get("/api/me").json["role"] == "admin"
    refused = anonymous.post("/api/databases/shop/snapshots", {"name": "x"})
    assert (refused.status, refused.json["error"]) == (401, "Unauthenticated")
    assert "admin.token" in refused.json["hint"]
    reader = HttpClient(anonymous.address, (Path(store.path) / "read.token").read_text().strip())
    assert reader.get("/api/me").json["role"] == "read"
    assert reader.post("/api/databases/shop/snapshots").status == 401
    assert store.database("shop").snapshots == 0


def test_beyond_loopback_everything_except_health_and_the_page_needs_a_token(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with web_served(path, "0.0.0.0:0") as (store, web):
        assert "web.plaintext" in capsys.readouterr().err
        anonymous = HttpClient(web.address)
        for free in ("/", "/static/style.css", "/healthz", "/readyz"):
            assert anonymous.get(free).status == 200
        assert anonymous.get("/api/me").json == {"role": "none", "asks_readers": True}
        for address in READ:
            response = anonymous.get(address)
            assert (response.status, response.headers["www-authenticate"]) == (401, 'Bearer realm="quire"')
        assert anonymous.raw(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").startswith(
            b"HTTP/1.1 401"
        )
        reader = HttpClient(web.address, (Path(store.path) / "read.token").read_text().strip())
        assert [reader.get(address).status for address in READ] == [200] * 6 + [404]
        store.create("shop", "pages")
        assert reader.post("/api/databases/shop/snapshots").status == 403
        assert admin_client(web, store).post("/api/databases/shop/snapshots").status == 201


def test_on_loopback_readers_need_a_token_if_configured(path: Path) -> None:
    with web_served(path, http_ask_readers=True) as (_, web):
        assert HttpClient(web.address).get("/api/overview").status == 401


def test_a_wrong_token_is_refused_even_if_none_is_needed(anonymous: HttpClient) -> None:
    for shown in ("Bearer wrong-token-wrong-token", "Basic YTpi", "Bearer a.b.c", "", "Bearer \xe9"):
        assert anonymous.get("/api/overview", Authorization=shown).status == 401, shown


def test_a_client_without_a_token_may_send_a_placeholder(anonymous: HttpClient) -> None:
    """`libsql-client` sends `Bearer None`, others an empty token: both count as missing."""
    for shown in ("Bearer", "Bearer None", "Bearer null"):
        assert anonymous.get("/api/overview", Authorization=shown).status == 200, shown
        assert anonymous.post("/api/jobs/1/retry", Authorization=shown).status == 401, shown


def test_a_token_in_a_url_or_a_cookie_is_ignored(anonymous: HttpClient, admin: HttpClient, store: Store) -> None:
    store.create("shop", "pages")
    target = f"/api/databases/shop/snapshots?token={admin.token}&access_token={admin.token}"
    assert anonymous.post(target, Cookie=f"token={admin.token}").status == 401


def test_refusals_do_not_repeat_the_token(anonymous: HttpClient, capsys: pytest.CaptureFixture[str]) -> None:
    anonymous.get("/api/overview", Authorization="Bearer some-secret-of-another-service")
    log = capsys.readouterr().err
    assert "service.refused" in log
    assert "some-secret" not in log


# ── bodies and methods ────────────────────────────────────────────────────────────────────────────────────────────────
WRONG_BODIES = [
    ("text/plain", b"{}", 415),
    ("application/x-www-form-urlencoded", b"name=x", 415),
    (JSON, b"{", 400),
    (JSON, b'{"name": 7}', 400),
    (JSON, b'{"nmae": "x"}', 400),
    (JSON, b'{"name": "/"}', 400),
    (JSON, b"\xff", 400),
    (JSON, b" " * (BODY_BYTES_MAX + 1), 413),
]


def test_an_invalid_body_changes_nothing(admin: HttpClient, store: Store) -> None:
    store.create("shop", "pages")
    for kind, body, status in WRONG_BODIES:
        response = admin.request("POST", "/api/databases/shop/snapshots", body, Content_Type=kind)
        assert response.status == status, body[:40]
        assert admin.get("/healthz").status == 200
    assert store.database("shop").snapshots == 0


def test_a_body_of_unknown_length_is_refused_and_its_connection_closed(admin: HttpClient) -> None:
    """Hazard: its bytes would be parsed as the next request."""
    head = f"Host: localhost\r\nAuthorization: Bearer {admin.token}\r\nContent-Type: {JSON}\r\n"
    smuggled = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    for length, status in ((len(smuggled), b"411"), (len(smuggled) - 8, b"400")):
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (length, smuggled)
        chunked = f"POST /api/jobs/1/retry HTTP/1.1\r\n{head}Transfer-Encoding: chunked\r\n\r\n"
        answer = admin.raw(chunked.encode() + body)
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert answer.count(b"HTTP/1.1") == 1
    answer = admin.raw(
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n"
    )
    assert answer.count(b"HTTP/1.1 ") == 1


def test_unknown_methods_are_refused(admin: HttpClient) -> None:
    for method, status in (("PUT", 501), ("DELETE", 501), ("OPTIONS", 501), ("TRACE", 501), ("CONNECT", 400)):
        response = admin.request(method, "/api/overview")
        assert (response.status, response.json["error"]) == (status, "InvalidInput"), method


def test_a_wrong_method_is_answered_with_the_allowed_ones(admin: HttpClient) -> None:
    assert admin.post("/api/overview").status == 405
    response = admin.get("/api/jobs/1/retry")
    assert (response.status, response.json["message"]) == (405, "this address has POST")


def test_an_invalid_request_closes_its_connection_only(anonymous: HttpClient) -> None:
    for data in (
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\r\n\r\n",
        b"GET " + b"a" * 70_000,
    ):
        answer = anonymous.raw(data)
        assert b"Traceback" not in answer
        assert b"<html" not in answer.lower()
        assert anonymous.get("/healthz").status == 200


def test_head_returns_the_headers_of_get(anonymous: HttpClient) -> None:
    whole, head = anonymous.get("/static/style.css"), anonymous.request("HEAD", "/static/style.css")
    assert head.body == b""
    assert head.headers["content-length"] == str(len(whole.body))


def test_an_internal_error_is_answered_without_its_traceback(
    anonymous: HttpClient, web: WebServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Any:
        raise ZeroDivisionError("secret inside")

    monkeypatch.setattr("quire.service.web.overview.lineage", lambda _, **__: broken())
    response = anonymous.get("/api/lineage")
    assert (response.status, response.json["error"]) == (500, "InternalError")
    assert b"secret" not in response.body
    assert "web.bug" in capsys.readouterr().err
    assert web.figures().failed == 1


# ── assets ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_unchanged_asset_is_not_sent_again(anonymous: HttpClient) -> None:
    first = anonymous.get("/static/app.js")
    assert first.headers["content-type"].startswith("text/javascript")
    repeated = anonymous.get("/static/app.js", If_None_Match=first.headers["etag"])
    assert (repeated.status, repeated.body) == (304, b"")
    assert anonymous.get("/static/app.js", If_None_Match='"other"').body == first.body


def test_only_the_pages_own_files_are_served(anonymous: HttpClient) -> None:
    for target in ("/static/", "/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/../x"):
        assert anonymous.get(target).status == 404, target


def test_the_page_loads_nothing_from_other_hosts() -> None:
    from quire.service.web.assets import assets

    for name, asset in assets().items():
        text = asset.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, name
        assert "https://" not in text, name
        assert "innerHTML" not in text, name
        assert " style=" not in text, name
    assert {"index.html", "app.js", "style.css", "icon.svg"} <= assets().keys()


# ── lifetime ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_connections_above_the_limit_are_refused_with_a_reason(path: Path) -> None:
    with web_served(path, http_connections_max=2, http_events_max=1) as (_, web):
        client = HttpClient(web.address)
        held = [socket.create_connection(client.host_and_port, timeout=60) for _ in range(2)]
        try:
            deadline = time.monotonic() + 60
            while web.figures().connections_now < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            response = client.get("/healthz")
            assert (response.status, response.json["error"]) == (503, "Overloaded")
            assert web.figures().busy == 1
        finally:
            for connection in held:
                connection.close()
        deadline = time.monotonic() + 60
        while web.figures().connections_now and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.get("/healthz").status == 200


def test_one_connection_carries_many_requests_and_many_clients_are_served(anonymous: HttpClient) -> None:
    failures: list[object] = []

    def work() -> None:
        connection = http.client.HTTPConnection(*anonymous.host_and_port, timeout=60)
        try:
            for _ in range(20):
                connection.request("GET", "/api/overview")
                answer = connection.getresponse()
                if answer.status != 200 or not json.loads(answer.read())["quire"]:
                    failures.append(answer.status)
        finally:
            connection.close()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_closing_ends_idle_connections_and_frees_the_port(path: Path) -> None:
    with quire.open(path) as store:
        web = store.serve_http("127.0.0.1:0")
        address = HttpClient(web.address).host_and_port
        with socket.create_connection(address, timeout=60) as idle:
            while not web.figures().connections_now:  # a connection that is not accepted yet is reset instead
                time.sleep(0.01)
            started = time.monotonic()
            web.close()
            assert time.monotonic() - started < 3
            assert idle.recv(10) == b""
        web.close()
        with store.serve_http(f"127.0.0.1:{address[1]}") as restarted:
            assert HttpClient(restarted.address).get("/healthz").status == 200
            with pytest.raises(quire.InvalidInput, match="cannot listen"):
                store.serve_http(restarted.address)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("quire-web")]


def test_closing_the_store_closes_its_http_server(path: Path) -> None:
    store = quire.open(path)
    web = store.serve_http("127.0.0.1:0")
    store.close()
    with pytest.raises(ConnectionError):
        HttpClient(web.address).get("/healthz")


def test_an_invalid_address_is_refused(path: Path) -> None:
    with quire.open(path) as store:
        for address in (
            "ftp://127.0.0.1:1",
            "127.0.0.1",
            "127.0.0.1:99999",
            "http://:80",
            "http://a:1/x",
            "999.1.1.1:0",
        ):
            with pytest.raises(quire.InvalidInput):
                store.serve_http(address)


def test_only_the_owner_serves(path: Path) -> None:
    quire.open(path).close()
    with quire.open(path, mode="r") as reader, pytest.raises(quire.ReadOnly):
        reader.serve_http()


def test_https_serves_and_needs_both_files(path: Path, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    with quire.open(path) as store:
        for address, host in (
            ("https://127.0.0.1:0", Credentials()),
            ("https://127.0.0.1:0", Credentials(tls_cert_file=cert)),
            ("https://127.0.0.1:0", Credentials(tls_cert_file=cert, tls_key_file=str(tmp_path / "none"))),
            ("http://127.0.0.1:0", Credentials(tls_cert_file=cert, tls_key_file=key)),
        ):
            with pytest.raises(quire.InvalidConfig):
                store.serve_http(address, host)
        with store.serve_http("https://127.0.0.1:0", Credentials(tls_cert_file=cert, tls_key_file=key)) as web:
            context = ssl.create_default_context(cafile=cert)
            context.check_hostname = False
            with urllib.request.urlopen(f"{web.address}/readyz", context=context, timeout=60) as answer:
                assert json.load(answer) == {"ready": True}
            assert HttpClient(web.address).raw(b"GET / HTTP/1.1\r\n\r\n") == b""
            with urllib.request.urlopen(f"{web.address}/healthz", context=context, timeout=60) as answer:
                assert answer.status == 200


def test_headers_are_sent_with_the_body_unless_it_takes_long() -> None:
    """One system call per answer."""

    class Recorder:
        def __init__(self) -> None:
            self.sent: list[bytes] = []

        def write(self, data: bytes) -> None:
            self.sent.append(data)

        def writelines(self, parts: tuple[bytes, ...]) -> None:
            self.sent.append(b"".join(parts))

        def is_closing(self) -> bool:
            return False

    class Connection:
        def __init__(self) -> None:
            self.transport, self.loop = Recorder(), asyncio.get_running_loop()

        def close_gently(self) -> None:
            self.transport.sent.append(b"closed")

    async def run() -> list[bytes]:
        connection = Connection()
        transport = _CycleTransport(cast(Any, connection))
        transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
        transport.write(b"body")
        transport.write(b"more")
        transport.write(b"HTTP/1.1 201 Created\r\n\r\n")
        await asyncio.sleep(0)
        transport.write(b"late")
        transport.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        transport.close()
        await asyncio.sleep(0)
        return connection.transport.sent

    assert asyncio.run(run()) == [
        b"HTTP/1.1 200 OK\r\n\r\nbody",
        b"more",
        b"HTTP/1.1 201 Created\r\n\r\n",
        b"late",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"closed",
    ]


def test_a_link_on_another_site_opens_the_dashboard(anonymous: HttpClient) -> None:
    """A click in Grafana or a chat showed an error as JSON."""
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert anonymous.get("/", **link).status == 200
    assert anonymous.get("/", **link | {"Sec_Fetch_Dest": "iframe"}).status == 403
    assert anonymous.get("/", **link | {"Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "script"}).status == 403
    assert anonymous.get("/", **link, Origin="https://evil.example").status == 403, "a form that is sent from there"


def test_a_link_on_another_site_changes_nothing(path: Path) -> None:
    """Hazard: the first request of a replica creates the default database, and records what it has exported. It is a GET, to
    which any page could link."""
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    with web_served(path, http_anonymous_writes=True, sql_default_database="main") as (store, web):
        client = HttpClient(web.address)
        for target in ("/info", "/db/main/info", "/api/overview"):
            assert client.get(target, **link).status == 403
        assert client.request("POST", "/", **link).status == 403
        assert not store.databases()
        assert client.get("/info").status == 200
        assert [info.name for info in store.databases()] == ["main"]
        assert client.get("/db/main.sqlite", **link).status == 200
