"""Hrana over WebSocket: many streams per socket, cursors, and cleanup when the socket closes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

import quire
from quire.service.signed_tokens import create_token
from quire.store.store import Store
from tests.service.sql.hrana_client import HranaClient, plain_rows, settings, sql_served, statement
from tests.service.sql.test_http import NUMBERS, until
from tests.service.web.http_client import HttpClient


class Socket:
    """A socket that numbers its requests."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self._next = 0

    def send(self, **request: Any) -> int:
        self._next += 1
        self.connection.send(json.dumps({"type": "request", "request_id": self._next, "request": request}))
        return self._next

    def receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.connection.recv(timeout=60))
        return message

    def request(self, **request: Any) -> dict[str, Any]:
        number = self.send(**request)
        message = self.receive()
        assert message["request_id"] == number
        return message

    def done(self, **request: Any) -> dict[str, Any]:
        message = self.request(**request)
        assert message["type"] == "response_ok", message
        response: dict[str, Any] = message["response"]
        return response

    def run(self, stream_id: int, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        response = self.done(type="execute", stream_id=stream_id, stmt=statement(sql, *args))
        return plain_rows(response["result"]["rows"])


def limited(hrana: HranaClient) -> dict[str, int]:
    """Refusals because a client has reached a limit, by the name of the limit."""
    lines = HttpClient(hrana.address).request("GET", "/metrics").body.decode().splitlines()
    counts = [line.partition('limit="')[2] for line in lines if line.startswith("quire_http_limited_total{")]
    parts = [text.partition('"} ') for text in counts]
    return {name: round(float(value)) for name, _, value in parts if float(value)}


@contextmanager
def socket_to(hrana: HranaClient, *protocols: str, path: str = "/", jwt: str | None = None) -> Iterator[Socket]:
    url = hrana.address.replace("http", "ws") + path
    subprotocols = [Subprotocol(name) for name in protocols or ("hrana3",)]
    with connect(url, subprotocols=subprotocols, compression=None) as connection:
        socket = Socket(connection)
        connection.send(json.dumps({"type": "hello", "jwt": jwt}))
        assert socket.receive() == {"type": "hello_ok"}
        yield socket


@pytest.mark.parametrize(
    ("offered", "chosen"), [(("hrana1",), "hrana1"), (("hrana2", "hrana3"), "hrana3"), (("x", "hrana2"), "hrana2")]
)
def test_the_newest_common_version_is_chosen(hrana: HranaClient, offered: tuple[str, ...], chosen: str) -> None:
    with socket_to(hrana, *offered) as socket:
        assert socket.connection.subprotocol == chosen


def test_a_client_that_only_knows_protobuf_is_refused(hrana: HranaClient) -> None:
    with pytest.raises(InvalidStatus), socket_to(hrana, "hrana3-protobuf"):
        pass


def test_streams_of_a_socket_have_separate_transactions(hrana: HranaClient) -> None:
    hrana.once("create table t(a)")
    with socket_to(hrana) as socket:
        for stream_id in (1, 2):
            socket.done(type="open_stream", stream_id=stream_id)
        socket.run(1, "begin immediate")
        socket.run(1, "insert into t values (1)")
        assert socket.run(2, "select * from t") == []
        waiting = socket.send(type="execute", stream_id=2, stmt=statement("insert into t values (2)"))
        committed = socket.send(type="execute", stream_id=1, stmt=statement("commit"))
        answers = [socket.receive() for _ in range(2)]
        assert {answer["request_id"] for answer in answers} == {waiting, committed}
        assert all(answer["type"] == "response_ok" for answer in answers)
        assert socket.done(type="get_autocommit", stream_id=1)["is_autocommit"] is True
    assert hrana.rows("select a from t order by a") == [(1,), (2,)]


def test_requests_of_a_stream_are_executed_in_order(hrana: HranaClient) -> None:
    hrana.once("create table t(a)")
    with socket_to(hrana) as socket:
        socket.send(type="open_stream", stream_id=0)
        for number in range(50):
            socket.send(type="store_sql", sql_id=number, sql=f"insert into t values ({number})")
            socket.send(type="execute", stream_id=0, stmt={"sql_id": number})
            socket.send(type="close_sql", sql_id=number)
        answers = [socket.receive() for _ in range(151)]
    assert [answer["type"] for answer in answers] == ["response_ok"] * 151
    assert hrana.rows("select a from t order by rowid") == [(number,) for number in range(50)]


@pytest.mark.parametrize("closes_stream", [True, False])
def test_closing_the_socket_rolls_everything_back(hrana: HranaClient, closes_stream: bool) -> None:
    hrana.once("create table t(a)")
    for number in range(5):
        with socket_to(hrana) as socket:
            socket.done(type="open_stream", stream_id=0)
            socket.run(0, "begin immediate")
            socket.run(0, "insert into t values (?)", number)
            if closes_stream:  # and disconnects before it is answered
                socket.send(type="close_stream", stream_id=0)
        assert hrana.once("insert into t values (-1)")["type"] == "ok"
    assert hrana.rows("select distinct a from t") == [(-1,)]


def test_an_idle_transaction_is_rolled_back_and_the_next_request_fails(path: Path) -> None:
    with sql_served(path, sql_transaction_seconds=0.2) as (_, hrana), socket_to(hrana) as socket:
        hrana.once("create table t(a)")
        socket.done(type="open_stream", stream_id=0)
        socket.run(0, "begin immediate")
        assert hrana.once("insert into t values (2)")["type"] == "ok"
        message = socket.request(type="execute", stream_id=0, stmt=statement("commit"))
        assert message["error"]["code"] == "TRANSACTION_TIMEOUT"
        assert socket.run(0, "select a from t") == [(2,)]


def test_a_cursor_is_fetched_in_parts(hrana: HranaClient) -> None:
    with socket_to(hrana) as socket:
        socket.done(type="open_stream", stream_id=0)
        steps = [{"stmt": statement(NUMBERS.format(3_000))}, {"stmt": statement("selec")}]
        socket.done(type="open_cursor", stream_id=0, cursor_id=7, batch={"steps": steps})
        entries: list[dict[str, Any]] = []
        while True:
            response = socket.done(type="fetch_cursor", cursor_id=7, max_count=700)
            assert len(response["entries"]) <= 700
            entries += response["entries"]
            if response["done"]:
                break
        socket.done(type="close_cursor", cursor_id=7)
        kinds = [entry["type"] for entry in entries]
        assert kinds == ["step_begin", *["row"] * 3_000, "step_end", "step_error"]
        assert socket.run(0, "select 1") == [(1,)]


def test_closing_a_cursor_early_frees_its_stream(hrana: HranaClient) -> None:
    with socket_to(hrana) as socket:
        socket.done(type="open_stream", stream_id=0)
        steps = [{"stmt": statement(NUMBERS.format(100_000))}]
        socket.done(type="open_cursor", stream_id=0, cursor_id=1, batch={"steps": steps})
        socket.done(type="fetch_cursor", cursor_id=1, max_count=10)
        waiting = socket.send(type="execute", stream_id=0, stmt=statement("select 5"))
        socket.send(type="close_cursor", cursor_id=1)
        assert {socket.receive()["request_id"] for _ in range(2)} == {waiting, waiting + 1}


@pytest.mark.parametrize(
    "request_",
    [
        {"type": "execute", "stream_id": 9, "stmt": statement("select 1")},
        {"type": "fetch_cursor", "cursor_id": 9, "max_count": 1},
        {"type": "open_stream", "stream_id": 0},
        {"type": "describe", "stream_id": 0, "sql_id": 3},
    ],
)
def test_a_missing_stream_or_cursor_is_an_error_of_its_request(hrana: HranaClient, request_: dict[str, Any]) -> None:
    with socket_to(hrana) as socket:
        socket.done(type="open_stream", stream_id=0)
        assert socket.request(**request_)["type"] == "response_error"
        assert socket.run(0, "select 1") == [(1,)]


@pytest.mark.parametrize(
    "message", ["", "{}", "[", '{"type":"request","request_id":1,"request":{"type":"fly"}}', b"\0\1"]
)
def test_an_unreadable_message_closes_the_socket(hrana: HranaClient, message: str | bytes) -> None:
    with socket_to(hrana) as socket:
        socket.connection.send(message)
        with pytest.raises(ConnectionClosed):
            socket.connection.recv(timeout=60)


def test_nothing_runs_before_hello_or_with_a_wrong_token(hrana: HranaClient) -> None:
    url = hrana.address.replace("http", "ws")
    with connect(url, subprotocols=[Subprotocol("hrana3")]) as connection:
        socket = Socket(connection)
        assert socket.request(type="open_stream", stream_id=0)["error"]["code"] == "AUTH_FAILED"
        connection.send(json.dumps({"type": "hello", "jwt": "wrong"}))
        assert socket.receive()["type"] == "hello_error"
        assert socket.request(type="open_stream", stream_id=0)["error"]["code"] == "AUTH_FAILED"


@pytest.mark.parametrize("jwt", ["", "None", "null", "undefined"])
def test_placeholders_for_a_token_count_as_none(path: Path, hrana: HranaClient, jwt: str) -> None:
    """The Go client sends a hello with an empty token if it has none."""
    with socket_to(hrana, jwt=jwt) as socket:
        socket.done(type="open_stream", stream_id=0)
        assert socket.run(0, "select 1") == [(1,)]
    restricted = settings(http_ask_readers=True, http_anonymous_writes=False)
    with quire.open(path.parent / "asked", settings=restricted) as store, store.serve_http("127.0.0.1:0") as web:
        url = web.address.replace("http", "ws")
        with connect(url, subprotocols=[Subprotocol("hrana3")]) as connection:
            connection.send(json.dumps({"type": "hello", "jwt": jwt}))
            assert Socket(connection).receive()["type"] == "hello_error"


def test_a_database_is_named_by_the_path(hrana: HranaClient, store: Store) -> None:
    connection = store.sqlite("shop", create=True)
    connection.execute("create table t as select 'shop' as name")
    connection.close()
    with socket_to(hrana, path="/db/shop") as socket:
        socket.done(type="open_stream", stream_id=0)
        assert socket.run(0, "select name from t") == [("shop",)]


@pytest.mark.parametrize(
    ("limit", "code", "metric"),
    [("STREAMS_MAX", "TOO_MANY_STREAMS", "sql_streams"), ("CURSORS_MAX", "TOO_MANY_CURSORS", "sql_cursors")],
)
def test_streams_and_cursors_of_a_socket_are_limited(
    hrana: HranaClient, monkeypatch: pytest.MonkeyPatch, limit: str, code: str, metric: str
) -> None:
    monkeypatch.setattr(f"quire.service.sql.socket.{limit}", 1)
    batch = {"steps": [{"stmt": statement("select 1")}]}
    with socket_to(hrana) as socket:
        socket.done(type="open_stream", stream_id=0)
        if metric == "sql_cursors":
            socket.done(type="open_cursor", stream_id=0, cursor_id=0, batch=batch)
            refused = socket.request(type="open_cursor", stream_id=0, cursor_id=1, batch=batch)
        else:
            refused = socket.request(type="open_stream", stream_id=1)
        assert refused["error"]["code"] == code
        assert limited(hrana) == {metric: 1}


def test_streams_of_sockets_are_counted_and_released(path: Path) -> None:
    with sql_served(path, sql_streams_max=2, sql_database_streams_max=2) as (_, hrana):
        with socket_to(hrana) as socket:
            for stream_id in range(2):
                socket.done(type="open_stream", stream_id=stream_id)
            assert socket.request(type="open_stream", stream_id=2)["error"]["code"] == "TOO_MANY_STREAMS"
            assert limited(hrana) == {"sql_streams": 1}

        def opens() -> bool:
            with socket_to(hrana) as another:
                return bool(another.request(type="open_stream", stream_id=0)["type"] == "response_ok")

        until(opens)


SLOW = "with recursive n(x) as (select 1 union all select x + 1 from n limit 1000000) select sum(x) from n"


def test_an_abandoned_cursor_releases_its_lock(path: Path) -> None:
    with sql_served(path, sql_transaction_seconds=0.2) as (_, hrana), socket_to(hrana) as socket:
        hrana.once("create table t(a)")
        socket.done(type="open_stream", stream_id=0)
        steps = [{"stmt": statement(sql)} for sql in ("begin immediate", NUMBERS.format(100_000))]
        socket.done(type="open_cursor", stream_id=0, cursor_id=1, batch={"steps": steps})
        socket.done(type="fetch_cursor", cursor_id=1, max_count=10)
        assert hrana.once("insert into t values (2)")["type"] == "ok"
        assert socket.request(type="fetch_cursor", cursor_id=1, max_count=1)["error"]["code"] == "CURSOR_EXPIRED"
        assert (
            socket.request(type="execute", stream_id=0, stmt=statement("commit"))["error"]["code"]
            == "TRANSACTION_TIMEOUT"
        )


def test_two_waiting_cursors_cannot_have_the_same_number(hrana: HranaClient) -> None:
    hrana.once("create table t(a)")
    with socket_to(hrana) as socket:
        steps = [{"stmt": statement("begin immediate")}, {"stmt": statement(NUMBERS.format(100_000))}]
        for stream_id in range(2):
            socket.done(type="open_stream", stream_id=stream_id)
        sent = [socket.send(type="execute", stream_id=stream_id, stmt=statement(SLOW)) for stream_id in range(2)]
        sent += [
            socket.send(type="open_cursor", stream_id=stream_id, cursor_id=5, batch={"steps": steps})
            for stream_id in range(2)
        ]
        answers = {message["request_id"]: message for message in (socket.receive() for _ in sent)}
        assert answers[sent[2]]["type"] == "response_ok"
        assert answers[sent[3]]["error"]["code"] == "CURSOR_EXISTS"
        socket.done(type="fetch_cursor", cursor_id=5, max_count=5)
    assert hrana.once("insert into t values (1)")["type"] == "ok"


@pytest.mark.parametrize("second", ["fetch_cursor", "close_cursor"])
def test_requests_for_one_cursor_are_executed_in_order(hrana: HranaClient, second: str) -> None:
    with socket_to(hrana) as socket:
        socket.done(type="open_stream", stream_id=0)
        socket.done(type="open_cursor", stream_id=0, cursor_id=1, batch={"steps": [{"stmt": statement(SLOW)}]})
        more = {"max_count": 9} if second == "fetch_cursor" else {}
        sent = [
            socket.send(type="fetch_cursor", cursor_id=1, max_count=9),
            socket.send(type=second, cursor_id=1, **more),
            socket.send(type="execute", stream_id=0, stmt=statement("select 1")),
        ]
        answers = [socket.receive() for _ in sent]
        assert [(message["request_id"], message["type"]) for message in answers] == [(n, "response_ok") for n in sent]


def test_a_socket_without_hello_is_closed(path: Path) -> None:
    with sql_served(path, http_head_seconds=0.3) as (_, hrana):
        url = hrana.address.replace("http", "ws")
        with connect(url, subprotocols=[Subprotocol("hrana3")]) as connection, pytest.raises(ConnectionClosed):
            connection.recv(timeout=60)
        assert limited(hrana) == {"hello_seconds": 1}
        with socket_to(hrana) as socket:  # a socket that has sent it may be idle
            with pytest.raises(TimeoutError):
                socket.connection.recv(timeout=1)
            socket.done(type="open_stream", stream_id=0)


def test_another_hello_revokes_the_rights_of_open_streams(path: Path) -> None:
    with sql_served(path) as (_, hrana), socket_to(hrana) as socket:
        socket.done(type="open_stream", stream_id=0)
        socket.run(0, "create table t(a)")
        token = create_token(str(path), ["default"], read_only=True)
        socket.connection.send(json.dumps({"type": "hello", "jwt": token}))
        assert socket.receive() == {"type": "hello_ok"}
        message = socket.request(type="execute", stream_id=0, stmt=statement("insert into t values (1)"))
        assert message["error"]["code"] == "AUTH_FAILED"
        socket.done(type="open_stream", stream_id=1)
        assert socket.run(1, "select * from t") == []


def test_another_hello_revokes_the_attach_rights_of_open_streams(path: Path) -> None:
    """Hazard: the connection of an open stream kept the right to attach of the token with which it was opened."""
    with sql_served(path) as (store, hrana):
        for name in ("shop", "secret"):
            store.sqlite(name, create=True).close()
        with closing(store.sqlite("secret")) as connection:
            connection.execute("create table t(a)")
        trusted, other = create_token(str(path), ["shop"], attach=["secret"]), create_token(str(path), ["shop"])
        with socket_to(hrana, path="/db/shop/", jwt=trusted) as socket:
            socket.done(type="open_stream", stream_id=0)
            for token, code in ((trusted, None), (other, "AUTH_FAILED"), (trusted, None)):
                socket.connection.send(json.dumps({"type": "hello", "jwt": token}))
                assert socket.receive() == {"type": "hello_ok"}
                message = socket.request(type="execute", stream_id=0, stmt=statement("attach 'secret' as s"))
                if code is None:
                    socket.run(0, "detach s")
                assert message.get("error", {}).get("code") == code
