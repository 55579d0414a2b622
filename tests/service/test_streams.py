"""Streams through a client: where records are, and how far consumers have read; what a read token cannot do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.core.errors import AccessDenied, CursorLost, InvalidInput, OutOfRange, UnknownCursor, WrongKind
from quire.service import tickets as m
from quire.service.channel import Channel
from quire.store.store import Store
from quire.stream.state import Retention
from tests.service.owners import settings


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with quire.open(path, settings=settings()) as opened:
        clicks = opened.stream("clicks", create=True)
        for _ in range(3):
            clicks.append([b"x" * 100] * 10).result()
            clicks.seal()
        clicks.append([b"open"] * 5).result()
        yield opened


@pytest.fixture
def channel(store: Store) -> Iterator[Channel]:
    opened = Channel(store.serve().address)
    yield opened
    opened.close()


def test_a_share_lists_the_segments_of_its_records(store: Store, channel: Channel) -> None:
    whole = channel.ask(m.STREAM_SHARE, m.OfStream("clicks"))
    assert (whole.first_record, whole.end_record) == (1, 36)
    spans = [(segment.base_record, segment.end_record, bool(segment.sealed_ms)) for segment in whole.segments]
    assert spans == [(1, 11, True), (11, 21, True), (21, 31, True), (31, 36, False)]
    some = channel.ask(m.STREAM_SHARE, m.OfStream("clicks", 12, 22))
    assert [segment.segment_id for segment in some.segments] == [2, 3]
    assert channel.ask(m.STREAM_SHARE, m.OfStream("clicks", 12, 12)).segments == ()
    sent = channel.ask(m.STREAM_SHARE, m.OfStream("clicks", 30, 33, True))
    assert [bool(segment.key) for segment in sent.segments] == [True, True], "the open segment was sealed and uploaded"
    view = store.stream("clicks").ledger.view
    assert [segment.is_remote for segment in view] == [False, False, True, True]
    with pytest.raises(OutOfRange):
        channel.ask(m.STREAM_SHARE, m.OfStream("clicks", 37))
    store.create("shop", "pages")
    with pytest.raises(WrongKind):
        channel.ask(m.STREAM_SHARE, m.OfStream("shop"))


def test_consumers_only_move_forward(store: Store, channel: Channel) -> None:
    assert channel.ask(m.STREAM_REGISTER, m.RegisterConsumer("clicks", "etl")) == 1
    channel.ask(m.STREAM_ACK, m.AckRecords("clicks", "etl", 21))
    channel.ask(m.STREAM_ACK, m.AckRecords("clicks", "etl", 5))
    assert channel.ask(m.STREAM_POSITION, m.OfConsumer("clicks", "etl")) == 21
    assert channel.ask(m.STREAM_REGISTER, m.RegisterConsumer("clicks", "etl", "latest")) == 21
    assert channel.ask(m.STREAM_REGISTER, m.RegisterConsumer("clicks", "new", "latest")) == 36
    with pytest.raises(UnknownCursor):
        channel.ask(m.STREAM_POSITION, m.OfConsumer("clicks", "nobody"))
    with pytest.raises(OutOfRange):
        channel.ask(m.STREAM_ACK, m.AckRecords("clicks", "etl", 99))
    with pytest.raises(OutOfRange):
        channel.ask(m.STREAM_REGISTER, m.RegisterConsumer("clicks", "far", 99))
    with pytest.raises(InvalidInput):
        channel.ask(m.STREAM_REGISTER, m.RegisterConsumer("clicks", "odd", "yesterday"))
    stream = store.stream("clicks")
    stream.drop_consumer("new")
    stream.retain(Retention(consumed=True))
    assert stream.retire() == 2
    with pytest.raises(CursorLost):
        channel.ask(m.STREAM_REGISTER, m.RegisterConsumer("clicks", "late", 1))
    with pytest.raises(CursorLost):
        channel.ask(m.STREAM_SHARE, m.OfStream("clicks", 1))


def test_waiting_ends_with_a_record_or_at_the_timeout(store: Store, channel: Channel) -> None:
    assert channel.ask(m.STREAM_WAIT, m.WaitForRecord("clicks", 35, 30.0)) == 36, "the record exists already"
    assert channel.ask(m.STREAM_WAIT, m.WaitForRecord("clicks", 36, 0.05)) == 36
    later = threading.Timer(0.2, lambda: store.stream("clicks").append(b"more").result())
    later.start()
    assert channel.ask(m.STREAM_WAIT, m.WaitForRecord("clicks", 36, 30.0)) == 37
    later.join()


def test_a_read_token_can_read(store: Store) -> None:
    server = store.serve("grpc://127.0.0.1:0")
    reader = Channel(server.address, token_file=str(Path(store.path, "read.token")))
    try:
        assert len(reader.ask(m.STREAM_SHARE, m.OfStream("clicks")).segments) == 4
        for action, request in (
            (m.STREAM_SHARE, m.OfStream("clicks", upload=True)),
            (m.STREAM_REGISTER, m.RegisterConsumer("clicks", "etl")),
            (m.STREAM_ACK, m.AckRecords("clicks", "etl", 2)),
        ):
            with pytest.raises(AccessDenied):
                reader.ask(action, request)
    finally:
        reader.close()


def test_manifest_logs_can_be_switched_remotely(store: Store) -> None:
    stream = store.stream("clicks")
    client = quire.connect(store.serve("grpc://127.0.0.1:0").address, token_file=str(Path(store.path, "admin.token")))
    assert client.manifest_log_mode() == "on"
    assert client.manifest_log_mode("shadow") == "shadow"
    assert (stream.mode.value, store.streams.mode.value) == ("shadow", "shadow")
    with pytest.raises(InvalidInput, match="unknown mode"):
        client.manifest_log_mode("half")
