"""Frames: an invalid frame is refused with an error and closes only its own connection; a length field alone allocates
nothing."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quire
from quire.core.errors import AccessDenied, InvalidInput, Overloaded, QuireError, Unavailable
from quire.core.limits import MIB
from quire.service import frame_server
from quire.service import messages as m
from quire.service.client import Client
from quire.service.frame_server import FrameServer
from quire.service.frames import (
    ANSWER_BYTES_MAX,
    MAGIC,
    PREFACE,
    SIZE,
    FramedCall,
    FrameError,
    FrameReader,
    read_framed,
    write_framed,
)
from quire.service.wire import WIRE_VERSION, RemoteError, error_of, read_answer, write_call
from tests.hostile import memory_limit
from tests.service.owners import served

HELLO = PREFACE.pack(MAGIC, WIRE_VERSION, bytes(16))
DATABASES = write_framed("databases", "", write_call(b"", m.Nothing()))


@contextmanager
def raw(server: Any) -> Iterator[socket.socket]:
    """A connection for arbitrary bytes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(server.address.removeprefix("grpc+unix://") + ".f")
        yield connection


def refusal(connection: socket.socket) -> QuireError:
    """The error that is sent before the connection is closed."""
    reader = FrameReader(connection)
    with pytest.raises(RemoteError) as refused:
        read_answer(reader.frame(MIB), Any)
    with pytest.raises((EOFError, ConnectionError)):
        reader.exactly(1)
    return error_of(refused.value.form)


# ── invalid frames ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(20),
        bytes(64),
        os.urandom(64),
        HELLO + SIZE.pack(0xFFFFFFFF) + b"x",
        HELLO + SIZE.pack(17 * MIB) + b"x",
        HELLO + SIZE.pack(3) + b"\xc1\xc1\xc1",
        HELLO + SIZE.pack(0),
        HELLO + SIZE.pack(6) + b"\xdd\xff\xff\xff\xff\x00",
        HELLO + SIZE.pack(1) + b"\x90",
    ],
    ids=[
        "http",
        "grpc",
        "zeros",
        "noise",
        "4 GiB",
        "above the limit",
        "no msgpack",
        "empty",
        "a false length",
        "no call",
    ],
)
def test_an_invalid_frame_is_refused_and_closes_only_its_connection(server: Any, client: Client, data: bytes) -> None:
    with memory_limit(64 * MIB), raw(server) as connection:
        connection.sendall(data)
        assert isinstance(refusal(connection), InvalidInput)
    assert client.databases() == []
    assert server.figures().refused >= 1


def test_a_version_mismatch_reports_the_supported_version(server: Any) -> None:
    with raw(server) as connection:
        connection.sendall(PREFACE.pack(MAGIC, 99, bytes(16)))
        assert "version 99" in refusal(connection).what


@pytest.mark.parametrize("data", [b"", HELLO[:5], HELLO, HELLO + DATABASES[:2], HELLO + DATABASES[:-1]])
def test_half_a_frame_and_a_disconnect_leave_nothing_behind(server: Any, client: Client, data: bytes) -> None:
    before = server._frames.connections
    with raw(server) as connection:
        connection.sendall(data)
    deadline = time.monotonic() + 60
    while server._frames.connections > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server._frames.connections == before
    assert client.databases() == []


def test_frames_in_pieces_and_several_at_once_are_answered_in_order(server: Any) -> None:
    with raw(server) as connection:
        for byte in HELLO + DATABASES:
            connection.sendall(bytes([byte]))
        reader = FrameReader(connection)
        assert read_answer(reader.frame(MIB), Any) == []
        connection.sendall(DATABASES * 3)
        assert [read_answer(reader.frame(MIB), Any) for _ in range(3)] == [[], [], []]


@pytest.mark.parametrize(
    ("name", "body", "error"),
    [
        ("no.such.action", write_call(b"", m.Nothing()), "unknown action"),
        ("create", b"\x90", "cannot be read"),
        ("create", write_call(b"", m.Nothing()), "cannot be read"),
        ("kv.write", b"\x92\xc4\x03abc\x92\xa1k\x80", "16 bytes"),
        ("databases", write_call(bytes(16), m.Nothing()), "no idempotency key"),
        ("kv.scan", b"\x92\xc4\x00\x95\xa1k\xc4\x00\xc0\xc2\xa4gone", "the snapshot does not exist"),
        ("holding.renew", b"\x92\xc4\x00\x91\xa4gone", "the lease does not exist"),
        ("sql.execute", b"\x92\xc4\x00\x95\xa4gone\x01\x01\xa8select 1\x90", "the SQL connection does not exist"),
    ],
)
def test_an_invalid_call_is_refused_and_the_connection_stays_open(
    server: Any, name: str, body: bytes, error: str
) -> None:
    with raw(server) as connection:
        connection.sendall(HELLO + write_framed(name, "", body) + DATABASES)
        reader = FrameReader(connection)
        with pytest.raises(RemoteError, match=error):
            read_answer(reader.frame(MIB), Any)
        assert read_answer(reader.frame(MIB), Any) == []


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_as_a_call_or_refused(data: bytes) -> None:
    try:
        call = read_framed(data)
    except FrameError:
        return
    assert isinstance(call.name, str)


# ── limits ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_one_connection_too_many_is_refused_with_a_reason(path: Path) -> None:
    with served(path, connections_max=2) as (_, server), quire.connect(server.address) as client, raw(server) as second:
        second.sendall(HELLO + DATABASES)
        assert FrameReader(second).frame(MIB)
        with raw(server) as third:
            assert isinstance(refusal(third), Overloaded)
        assert client.databases() == []


def test_a_connection_without_a_thread_is_refused_and_later_ones_are_accepted(
    server: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: when the system had no thread for one connection, the accepting thread ended, and no client could connect."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "frames-call":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with raw(server) as connection:
        assert isinstance(refusal(connection), Overloaded)
    monkeypatch.undo()
    with quire.connect(server.address) as later:
        assert later.databases() == client.databases() == []
    deadline = time.monotonic() + 30
    while server._frames.connections > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server._frames.connections == 1


def test_an_answer_too_long_for_its_client_is_not_read() -> None:
    left_end, right_end = socket.socketpair()
    with left_end, right_end:
        right_end.sendall(SIZE.pack(ANSWER_BYTES_MAX + 1))
        with pytest.raises(FrameError, match="exceeds the limit"):
            FrameReader(left_end).frame(ANSWER_BYTES_MAX)


def test_the_socket_is_accessible_to_its_owner_only_and_removed_with_the_server(path: Path) -> None:
    with served(path) as (_, server):
        socket_path = server.address.removeprefix("grpc+unix://") + ".f"
        assert stat.S_IMODE(os.stat(socket_path).st_mode) == 0o600
    assert not os.path.exists(socket_path)


def test_closing_answers_waiting_calls_and_disconnects(path: Path) -> None:
    with served(path, stop_seconds=30.0) as (_, server):
        client = quire.connect(server.address, timeout=1)
        stream = client.stream("s", create=True)
        records: list[object] = []

        def wait() -> None:
            try:
                records.extend(stream.tail(timeout=60))
            except Unavailable as error:
                records.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not server.figures().waits_now:
            time.sleep(0.01)
        started = time.monotonic()
        server.close()
        waiting.join(60)
        assert len(records) == 1
        assert isinstance(records[0], Unavailable)
        assert time.monotonic() - started < 25, "closing does not wait for stop_seconds"
        client.close()


def test_a_call_that_was_just_read_is_answered_when_the_server_closes(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a connection was treated as idle, and shut down, between reading a call and executing it."""
    idle_are_closed: list[threading.Thread] = []
    idle_are_told = threading.Event()
    hang_up = FrameServer._hang_up

    def hang_up_and_signal(frames: FrameServer, *arguments: Any, **options: Any) -> None:
        hang_up(frames, *arguments, **options)
        idle_are_told.set()

    def read(frame: bytes) -> FramedCall:
        idle_are_closed.append(threading.Thread(target=server._frames.close))
        idle_are_closed[0].start()
        assert idle_are_told.wait(60)
        return read_framed(frame)

    monkeypatch.setattr(FrameServer, "_hang_up", hang_up_and_signal)
    monkeypatch.setattr(frame_server, "read_framed", read)
    with raw(server) as connection:
        connection.sendall(HELLO + DATABASES)
        reader = FrameReader(connection)
        assert read_answer(reader.frame(MIB), Any) == []
        with pytest.raises(EOFError):
            reader.exactly(1)
    idle_are_closed[0].join(60)
    assert server._frames.connections == 0


def test_a_read_only_copy_accepts_no_writes_through_frames(path: Path) -> None:
    with quire.open(path) as store:
        store.copy_of = "memory://"
        with (
            store.serve() as server,
            quire.connect(server.address) as client,
            pytest.raises(AccessDenied, match="copy of an archive"),
        ):
            client.create("shop", "pages")


def test_after_a_fork_parent_and_child_have_separate_connections(server: Any, client: Client) -> None:
    assert client.databases() == []
    pid = os.fork()
    if not pid:
        os._exit(0 if client.databases() == [] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert client.databases() == []
