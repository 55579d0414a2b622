"""Hrana over WebSocket: many streams of one socket, cursors, and what is left when it goes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

import quire
from quire.service.signed_tokens import create_token
from quire.store.store import Store
from tests.service.sql.test_http import NUMBERS, until
from tests.service.sql.world import SqlAsker, plain_rows, settings, sql_served, statement
from tests.service.web.world import Asker


class Socket:
    """A socket; requests get numbers."""

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

    def ask(self, **request: Any) -> dict[str, Any]:
        number = self.send(**request)
        message = self.receive()
        assert message["request_id"] == number
        return message

    def done(self, **request: Any) -> dict[str, Any]:
        message = self.ask(**request)
        assert message["type"] == "response_ok", message
        response: dict[str, Any] = message["response"]
        return response

    def run(self, stream_id: int, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        response = self.done(type="execute", stream_id=stream_id, stmt=statement(sql, *args))
        return plain_rows(response["result"]["rows"])


def limited(asker: SqlAsker) -> dict[str, int]:
    """What was refused because a client had used it up, by the name of the limit."""
    lines = Asker(asker.address).ask("GET", "/metrics").body.decode().splitlines()
    counts = [line.partition('limit="')[2] for line in lines if line.startswith("quire_http_limited_total{")]
    parts = [text.partition('"} ') for text in counts]
    return {name: round(float(value)) for name, _, value in parts if float(value)}


@contextmanager
def socket_to(asker: SqlAsker, *protocols: str, path: str = "/", jwt: str | None = None) -> Iterator[Socket]:
    url = asker.address.replace("http", "ws") + path
    offered = [Subprotocol(name) for name in protocols or ("hrana3",)]
    with connect(url, subprotocols=offered, compression=None) as connection:
        socket = Socket(connection)
        connection.send(json.dumps({"type": "hello", "jwt": jwt}))
        assert socket.receive() == {"type": "hello_ok"}
        yield socket


@pytest.mark.parametrize(
    ("offered", "chosen"), [(("hrana1",), "hrana1"), (("hrana2", "hrana3"), "hrana3"), (("x", "hrana2"), "hrana2")]
)
def test_the_newest_version_that_both_know(asker: SqlAsker, offered: tuple[str, ...], chosen: str) -> None:
    with socket_to(asker, *offered) as socket:
        assert socket.connection.subprotocol == chosen


def test_a_client_that_only_knows_protobuf_is_refused(asker: SqlAsker) -> None:
    with pytest.raises(InvalidStatus), socket_to(asker, "hrana3-protobuf"):
        pass


def test_streams_of_a_socket_have_transactions_of_their_own(asker: SqlAsker) -> None:
    asker.once("create table t(a)")
    with socket_to(asker) as socket:
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
    assert asker.rows("select a from t order by a") == [(1,), (2,)]


def test_requests_of_a_stream_are_done_in_order(asker: SqlAsker) -> None:
    asker.once("create table t(a)")
    with socket_to(asker) as socket:
        socket.send(type="open_stream", stream_id=0)
        for number in range(50):
            socket.send(type="store_sql", sql_id=number, sql=f"insert into t values ({number})")
            socket.send(type="execute", stream_id=0, stmt={"sql_id": number})
            socket.send(type="close_sql", sql_id=number)
        answers = [socket.receive() for _ in range(151)]
    assert [answer["type"] for answer in answers] == ["response_ok"] * 151
    assert asker.rows("select a from t order by rowid") == [(number,) for number in range(50)]


@pytest.mark.parametrize("closes_stream", [True, False])
def test_when_the_socket_goes_everything_is_rolled_back(asker: SqlAsker, closes_stream: bool) -> None:
    asker.once("create table t(a)")
    for number in range(5):
        with socket_to(asker) as socket:
            socket.done(type="open_stream", stream_id=0)
            socket.run(0, "begin immediate")
            socket.run(0, "insert into t values (?)", number)
            if closes_stream:  # and goes before it is answered
                socket.send(type="close_stream", stream_id=0)
        assert asker.once("insert into t values (-1)")["type"] == "ok"
    assert asker.rows("select distinct a from t") == [(-1,)]


def test_an_idle_transaction_is_rolled_back_and_its_stream_is_told(path: Path) -> None:
    with sql_served(path, sql_transaction_seconds=0.2) as (_, asker), socket_to(asker) as socket:
        asker.once("create table t(a)")
        socket.done(type="open_stream", stream_id=0)
        socket.run(0, "begin immediate")
        assert asker.once("insert into t values (2)")["type"] == "ok"
        message = socket.ask(type="execute", stream_id=0, stmt=statement("commit"))
        assert message["error"]["code"] == "TRANSACTION_TIMEOUT"
        assert socket.run(0, "select a from t") == [(2,)]


def test_a_cursor_is_fetched_in_parts(asker: SqlAsker) -> None:
    with socket_to(asker) as socket:
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


def test_a_cursor_that_is_closed_early_lets_its_stream_go_on(asker: SqlAsker) -> None:
    with socket_to(asker) as socket:
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
def test_what_is_not_there_is_an_error_of_its_request(asker: SqlAsker, request_: dict[str, Any]) -> None:
    with socket_to(asker) as socket:
        socket.done(type="open_stream", stream_id=0)
        assert socket.ask(**request_)["type"] == "response_error"
        assert socket.run(0, "select 1") == [(1,)]


@pytest.mark.parametrize(
    "message", ["", "{}", "[", '{"type":"request","request_id":1,"request":{"type":"fly"}}', b"\0\1"]
)
def test_a_message_that_cannot_be_read_ends_the_socket(asker: SqlAsker, message: str | bytes) -> None:
    with socket_to(asker) as socket:
        socket.connection.send(message)
        with pytest.raises(ConnectionClosed):
            socket.connection.recv(timeout=60)


def test_nothing_is_done_before_hello_or_with_a_wrong_token(asker: SqlAsker) -> None:
    url = asker.address.replace("http", "ws")
    with connect(url, subprotocols=[Subprotocol("hrana3")]) as connection:
        socket = Socket(connection)
        assert socket.ask(type="open_stream", stream_id=0)["error"]["code"] == "AUTH_FAILED"
        connection.send(json.dumps({"type": "hello", "jwt": "wrong"}))
        assert socket.receive()["type"] == "hello_error"
        assert socket.ask(type="open_stream", stream_id=0)["error"]["code"] == "AUTH_FAILED"


@pytest.mark.parametrize("jwt", ["", "None", "null", "undefined"])
def test_what_clients_send_in_the_place_of_a_token_is_none(path: Path, asker: SqlAsker, jwt: str) -> None:
    """The client of Go says hello with an empty token when it was given none."""
    with socket_to(asker, jwt=jwt) as socket:
        socket.done(type="open_stream", stream_id=0)
        assert socket.run(0, "select 1") == [(1,)]
    asked = settings(http_ask_readers=True, http_anonymous_writes=False)
    with quire.open(path.parent / "asked", settings=asked) as store, store.serve_http("127.0.0.1:0") as web:
        url = web.address.replace("http", "ws")
        with connect(url, subprotocols=[Subprotocol("hrana3")]) as connection:
            connection.send(json.dumps({"type": "hello", "jwt": jwt}))
            assert Socket(connection).receive()["type"] == "hello_error"


def test_a_database_is_named_by_the_path(asker: SqlAsker, store: Store) -> None:
    connection = store.sqlite("shop", create=True)
    connection.execute("create table t as select 'shop' as name")
    connection.close()
    with socket_to(asker, path="/db/shop") as socket:
        socket.done(type="open_stream", stream_id=0)
        assert socket.run(0, "select name from t") == [("shop",)]


@pytest.mark.parametrize(
    ("limit", "code", "counted"),
    [("STREAMS_MAX", "TOO_MANY_STREAMS", "sql_streams"), ("CURSORS_MAX", "TOO_MANY_CURSORS", "sql_cursors")],
)
def test_a_socket_has_so_many_streams_and_cursors(
    asker: SqlAsker, monkeypatch: pytest.MonkeyPatch, limit: str, code: str, counted: str
) -> None:
    monkeypatch.setattr(f"quire.service.sql.socket.{limit}", 1)
    batch = {"steps": [{"stmt": statement("select 1")}]}
    with socket_to(asker) as socket:
        socket.done(type="open_stream", stream_id=0)
        if counted == "sql_cursors":
            socket.done(type="open_cursor", stream_id=0, cursor_id=0, batch=batch)
            refused = socket.ask(type="open_cursor", stream_id=0, cursor_id=1, batch=batch)
        else:
            refused = socket.ask(type="open_stream", stream_id=1)
        assert refused["error"]["code"] == code
        assert limited(asker) == {counted: 1}


def test_streams_of_sockets_are_counted_and_given_back(path: Path) -> None:
    with sql_served(path, sql_streams_max=2, sql_database_streams_max=2) as (_, asker):
        with socket_to(asker) as socket:
            for stream_id in range(2):
                socket.done(type="open_stream", stream_id=stream_id)
            assert socket.ask(type="open_stream", stream_id=2)["error"]["code"] == "TOO_MANY_STREAMS"
            assert limited(asker) == {"sql_streams": 1}

        def opens() -> bool:
            with socket_to(asker) as another:
                return bool(another.ask(type="open_stream", stream_id=0)["type"] == "response_ok")

        until(opens)


SLOW = "with recursive n(x) as (select 1 union all select x + 1 from n limit 1000000) select sum(x) from n"


def test_an_abandoned_cursor_gives_its_lock_back(path: Path) -> None:
    with sql_served(path, sql_transaction_seconds=0.2) as (_, asker), socket_to(asker) as socket:
        asker.once("create table t(a)")
        socket.done(type="open_stream", stream_id=0)
        steps = [{"stmt": statement(sql)} for sql in ("begin immediate", NUMBERS.format(100_000))]
        socket.done(type="open_cursor", stream_id=0, cursor_id=1, batch={"steps": steps})
        socket.done(type="fetch_cursor", cursor_id=1, max_count=10)
        assert asker.once("insert into t values (2)")["type"] == "ok"
        assert socket.ask(type="fetch_cursor", cursor_id=1, max_count=1)["error"]["code"] == "CURSOR_EXPIRED"
        assert (
            socket.ask(type="execute", stream_id=0, stmt=statement("commit"))["error"]["code"] == "TRANSACTION_TIMEOUT"
        )


def test_two_cursors_that_wait_for_their_streams_cannot_have_one_number(asker: SqlAsker) -> None:
    asker.once("create table t(a)")
    with socket_to(asker) as socket:
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
    assert asker.once("insert into t values (1)")["type"] == "ok"


@pytest.mark.parametrize("second", ["fetch_cursor", "close_cursor"])
def test_requests_for_one_cursor_are_done_one_after_the_other(asker: SqlAsker, second: str) -> None:
    with socket_to(asker) as socket:
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


def test_a_socket_whose_client_says_no_hello_is_closed(path: Path) -> None:
    with sql_served(path, http_head_seconds=0.3) as (_, asker):
        url = asker.address.replace("http", "ws")
        with connect(url, subprotocols=[Subprotocol("hrana3")]) as connection, pytest.raises(ConnectionClosed):
            connection.recv(timeout=60)
        assert limited(asker) == {"hello_seconds": 1}
        with socket_to(asker) as socket:  # one that has may be idle
            with pytest.raises(TimeoutError):
                socket.connection.recv(timeout=1)
            socket.done(type="open_stream", stream_id=0)


def test_another_hello_takes_the_rights_of_open_streams(path: Path) -> None:
    with sql_served(path) as (_, asker), socket_to(asker) as socket:
        socket.done(type="open_stream", stream_id=0)
        socket.run(0, "create table t(a)")
        token = create_token(str(path), ["default"], read_only=True)
        socket.connection.send(json.dumps({"type": "hello", "jwt": token}))
        assert socket.receive() == {"type": "hello_ok"}
        message = socket.ask(type="execute", stream_id=0, stmt=statement("insert into t values (1)"))
        assert message["error"]["code"] == "AUTH_FAILED"
        socket.done(type="open_stream", stream_id=1)
        assert socket.run(1, "select * from t") == []
