"""Where the HTTP side listens, and how it ends."""

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
from tests.service.web.test_bad_requests import until
from tests.service.web.world import Asker, web_served


class UnixConnection(http.client.HTTPConnection):
    """HTTP through a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


def ask(path: str, method: str, target: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = UnixConnection(path)
    try:
        connection.request(method, target, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_whoever_may_open_the_unix_socket_may_do_everything(path: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "web.sock")
    with web_served(path, f"http+unix://{place}") as (store, web):
        assert web.address == f"http+unix://{place}"
        assert stat.S_IMODE(os.stat(place).st_mode) == 0o600
        store.create("shop", "pages")
        made = ask(place, "POST", "/api/databases/shop/snapshots", b"{}", **{"content-type": "application/json"})
        assert made[0] == 201
        assert ask(place, "GET", "/db/shop.sqlite", host="any.name.at.all")[0] == 200
        assert ask(place, "GET", "/api/overview", authorization="Bearer wrong-token-wrong-token")[0] == 401
        assert ask(place, "GET", "/healthz", origin="http://evil.example")[0] == 403
        with pytest.raises(quire.InvalidInput):
            store.serve_http(f"http+unix://{place}")
    assert not os.path.exists(place)


def test_a_socket_that_a_killed_owner_left_is_replaced(path: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "web.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(place)
    with web_served(path, f"http+unix://{place}"):
        assert ask(place, "GET", "/healthz")[0] == 200


def test_an_ipv6_address_is_listened_on(path: Path) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with web_served(path, "[::1]:0") as (_, web):
        assert web.address.startswith("http://[::1]:")
        assert Asker(web.address).get("/api/overview").status == 200


def test_a_bare_port_is_on_loopback(path: Path) -> None:
    with web_served(path, "0") as (_, web):
        assert web.address.startswith("http://127.0.0.1:")


def test_loopback_writes_without_a_token_only_where_configured(path: Path) -> None:
    body = b'{"requests": [{"type": "execute", "stmt": {"sql": "create table t(a)"}}, {"type": "close"}]}'
    for configured, kind in ((False, "error"), (True, "ok")):
        with web_served(path, http_anonymous_writes=configured) as (store, web):
            store.sqlite("shop", create=True).close()
            told = Asker(web.address).ask("POST", "/v2/pipeline", body, x_namespace="shop")
            assert (told.status, told.json["results"][0]["type"]) == (200, kind)
            assert Asker(web.address).post("/v1/namespaces/more/create").status == 401, "administering is another thing"
    with pytest.raises(quire.InvalidConfig), web_served(path, http_anonymous_writes=True, http_ask_readers=True):
        pass
    with web_served(path, "0.0.0.0:0", http_anonymous_writes=True) as (_, web):
        assert Asker(web.address).ask("POST", "/v2/pipeline", body, x_namespace="shop").status == 401


def test_clients_that_are_turned_away_are_told_and_few_are_waited_for(path: Path) -> None:
    with web_served(path, http_connections_max=2, http_events_max=1) as (_, web):
        asker = Asker(web.address)
        held = [socket.create_connection(asker.place, timeout=60) for _ in range(2)]
        until(lambda: web.figures().connections_now == 2, "they are not there")
        refused = [socket.create_connection(asker.place, timeout=60) for _ in range(HELD_MAX + 8)]
        assert [connection.recv(12) for connection in refused[:HELD_MAX]] == [b"HTTP/1.1 503"] * HELD_MAX
        until(lambda: web.figures().limited.get("connections") == HELD_MAX + 8, "not all were turned away")
        for connection in held + refused:
            connection.close()


def test_sqlites_memory_has_a_soft_limit_and_no_hard_one(path: Path) -> None:
    before = apsw.soft_heap_limit(-1)
    try:
        with web_served(path, sql_heap_bytes=64 << 20):
            assert (apsw.soft_heap_limit(-1), apsw.hard_heap_limit(-1)) == (64 << 20, 0)
    finally:
        apsw.soft_heap_limit(before)


# ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_request_that_is_under_way_is_answered_before_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(_: object, **__: object) -> dict[str, Any]:
        entered.set()
        assert leave.wait(60)
        return {"late": True}

    monkeypatch.setattr("quire.service.web.overview.lineage", slow)
    answers: list[Any] = []
    with web_served(path, stop_seconds=60.0) as (_, web):
        asking = threading.Thread(target=lambda: answers.append(Asker(web.address).get("/api/lineage")))
        asking.start()
        assert entered.wait(60)
        closing = threading.Thread(target=web.close)
        closing.start()
        until(lambda: web._web.context.stopping.is_set(), "it does not close")
        leave.set()
        closing.join(60)
        asking.join(60)
    assert [answer.json for answer in answers] == [{"late": True}]


def test_who_stays_too_long_is_hung_up_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def endless(_: object, **__: object) -> dict[str, Any]:
        entered.set()
        leave.wait(60)
        return {}

    monkeypatch.setattr("quire.service.web.overview.lineage", endless)
    failures: list[BaseException] = []

    def ask_forever(asker: Asker) -> None:
        try:
            asker.get("/api/lineage")
        except (ConnectionError, http.client.HTTPException) as error:
            failures.append(error)

    with web_served(path, stop_seconds=0.2) as (_, web):
        asking = threading.Thread(target=ask_forever, args=(Asker(web.address),))
        asking.start()
        assert entered.wait(60)
        web.close()
        asking.join(60)
        assert len(failures) == 1
        leave.set()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("quire-web")]


def test_a_server_that_is_told_to_end_ends_though_clients_stay(path: Path) -> None:
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
        asker = Asker(lines[1].split()[2])
        idle = socket.create_connection(asker.place, timeout=60)
        half = socket.create_connection(asker.place, timeout=60)
        half.sendall(b"GET /healthz HTTP/1.1\r\nHost: local")
        page = socket.create_connection(asker.place, timeout=60)
        page.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert page.recv(12) == b"HTTP/1.1 200"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
        assert time.monotonic() - began < 60
        for connection in (idle, half, page):
            connection.close()
    finally:
        process.kill()
        process.communicate()
