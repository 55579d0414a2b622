"""Where the HTTP server listens, and how it shuts down."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import apsw
import pytest

import quire
from quire.service.web.accepting import HELD_MAX
from tests.programs import Program
from tests.rules.tree import SRC
from tests.service.web.http_client import HttpClient, web_served
from tests.service.web.test_bad_requests import until


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


def request_over_socket(
    path: str, method: str, target: str, body: bytes | None = None, **headers: str
) -> tuple[int, bytes]:
    connection = UnixConnection(path)
    try:
        connection.request(method, target, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_access_to_the_unix_socket_gives_admin_permission(path: Path, tmp_path: Path) -> None:
    socket_path = str(tmp_path / "web.sock")
    with web_served(path, f"http+unix://{socket_path}") as (store, web):
        assert web.address == f"http+unix://{socket_path}"
        assert stat.S_IMODE(os.stat(socket_path).st_mode) == 0o600
        store.create("shop", "pages")
        created = request_over_socket(
            socket_path, "POST", "/api/databases/shop/snapshots", b"{}", **{"content-type": "application/json"}
        )
        assert created[0] == 201
        assert request_over_socket(socket_path, "GET", "/db/shop.sqlite", host="any.name.at.all")[0] == 200
        assert (
            request_over_socket(socket_path, "GET", "/api/overview", authorization="Bearer wrong-token-wrong-token")[0]
            == 401
        )
        assert request_over_socket(socket_path, "GET", "/healthz", origin="http://evil.example")[0] == 403
        with pytest.raises(quire.InvalidInput):
            store.serve_http(f"http+unix://{socket_path}")
    assert not os.path.exists(socket_path)


def test_a_socket_left_by_a_killed_owner_is_replaced(path: Path, tmp_path: Path) -> None:
    socket_path = str(tmp_path / "web.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(socket_path)
    with web_served(path, f"http+unix://{socket_path}"):
        assert request_over_socket(socket_path, "GET", "/healthz")[0] == 200


def test_an_ipv6_address_is_listened_on(path: Path) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with web_served(path, "[::1]:0") as (_, web):
        assert web.address.startswith("http://[::1]:")
        assert HttpClient(web.address).get("/api/overview").status == 200


def test_a_port_without_host_listens_on_loopback(path: Path) -> None:
    with web_served(path, "0") as (_, web):
        assert web.address.startswith("http://127.0.0.1:")


def test_loopback_writes_without_a_token_only_where_configured(path: Path) -> None:
    body = b'{"requests": [{"type": "execute", "stmt": {"sql": "create table t(a)"}}, {"type": "close"}]}'
    for configured, kind in ((False, "error"), (True, "ok")):
        with web_served(path, http_anonymous_writes=configured) as (store, web):
            store.sqlite("shop", create=True).close()
            response = HttpClient(web.address).request("POST", "/v2/pipeline", body, x_namespace="shop")
            assert (response.status, response.json["results"][0]["type"]) == (200, kind)
            assert HttpClient(web.address).post("/v1/namespaces/more/create").status == 401, (
                "administration still needs a token"
            )
    with pytest.raises(quire.InvalidConfig), web_served(path, http_anonymous_writes=True, http_ask_readers=True):
        pass
    with web_served(path, "0.0.0.0:0", http_anonymous_writes=True) as (_, web):
        assert HttpClient(web.address).request("POST", "/v2/pipeline", body, x_namespace="shop").status == 401


def test_refused_clients_get_a_reason_and_few_are_waited_for(path: Path) -> None:
    with web_served(path, http_connections_max=2, http_events_max=1) as (_, web):
        client = HttpClient(web.address)
        held = [socket.create_connection(client.host_and_port, timeout=60) for _ in range(2)]
        until(lambda: web.figures().connections_now == 2, "the connections are not open")
        refused = [socket.create_connection(client.host_and_port, timeout=60) for _ in range(HELD_MAX + 8)]
        assert [connection.recv(12) for connection in refused[:HELD_MAX]] == [b"HTTP/1.1 503"] * HELD_MAX
        until(lambda: web.figures().limited.get("connections") == HELD_MAX + 8, "not all were refused")
        for connection in held + refused:
            connection.close()


def test_sqlites_memory_has_a_soft_limit_and_no_hard_one(path: Path) -> None:
    before = apsw.soft_heap_limit(-1)
    try:
        with web_served(path, sql_heap_bytes=64 << 20):
            assert (apsw.soft_heap_limit(-1), apsw.hard_heap_limit(-1)) == (64 << 20, 0)
    finally:
        apsw.soft_heap_limit(before)


# ── shutdown ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_request_in_progress_is_answered_before_shutdown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(_: object, **__: object) -> dict[str, Any]:
        entered.set()
        assert leave.wait(60)
        return {"late": True}

    monkeypatch.setattr("quire.service.web.overview.lineage", slow)
    answers: list[Any] = []
    with web_served(path, stop_seconds=60.0) as (_, web):
        thread = threading.Thread(target=lambda: answers.append(HttpClient(web.address).get("/api/lineage")))
        thread.start()
        assert entered.wait(60)
        closing = threading.Thread(target=web.close)
        closing.start()
        until(lambda: web._web.context.stopping.is_set(), "the server does not stop")
        leave.set()
        closing.join(60)
        thread.join(60)
    assert [answer.json for answer in answers] == [{"late": True}]


def test_a_client_that_stays_too_long_is_disconnected(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def endless(_: object, **__: object) -> dict[str, Any]:
        entered.set()
        leave.wait(60)
        return {}

    monkeypatch.setattr("quire.service.web.overview.lineage", endless)
    failures: list[BaseException] = []

    def ask_forever(client: HttpClient) -> None:
        try:
            client.get("/api/lineage")
        except (ConnectionError, http.client.HTTPException) as error:
            failures.append(error)

    with web_served(path, stop_seconds=0.2) as (_, web):
        requester = threading.Thread(target=ask_forever, args=(HttpClient(web.address),))
        requester.start()
        assert entered.wait(60)
        web.close()
        requester.join(60)
        assert len(failures) == 1
        leave.set()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("quire-web")]


def test_shutdown_ends_although_clients_stay_connected(path: Path) -> None:
    quire.open(path).close()
    process = Program(
        ["-m", "quire", "serve", "--store", str(path), "--http", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        client = HttpClient(lines[1].split()[2])
        idle = socket.create_connection(client.host_and_port, timeout=60)
        half = socket.create_connection(client.host_and_port, timeout=60)
        half.sendall(b"GET /healthz HTTP/1.1\r\nHost: local")
        page = socket.create_connection(client.host_and_port, timeout=60)
        page.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert page.recv(12) == b"HTTP/1.1 200"
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
        assert time.monotonic() - started < 60
        for connection in (idle, half, page):
            connection.close()
    finally:
        process.kill()
        process.communicate()
