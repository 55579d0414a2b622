"""The outbox: where objects wait, what a break of the chain drops, and which files are left."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from quire.archive.artifacts import Artifacts
from quire.archive.format import Header, Kind, Position
from quire.archive.outbox import Outbox, Outgoing
from quire.core.settings import ArchiveSettings
from quire.durable.files import OsDisk

DATA = bytes(1 << 20)


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    """An outbox with room for two objects in memory and two on disk."""
    settings = ArchiveSettings(memory_bytes=2 * len(DATA), backlog_bytes=2 * len(DATA))
    spool, lock = str(tmp_path / "archive"), threading.Condition()
    return Outbox(OsDisk(), spool, Artifacts(OsDisk(), spool), settings, lock)


def outgoing(number: int) -> Outgoing:
    header = Header(kind=Kind.LOG, position=Position(1, number), parent=Position(0, 0), at_ms=1)
    return Outgoing(header=header, digest=b"", end=number, taken_at=0.0, size_bytes=len(DATA))


def held(outbox: Outbox, count: int) -> list[Outgoing]:
    objects = [outgoing(number) for number in range(count)]
    assert not any(outbox.hold(item, DATA, queued_bytes=0) for item in objects)
    return objects


def spooled(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("archive/*"))


def test_objects_wait_in_memory_then_on_disk_then_are_refused(outbox: Outbox, tmp_path: Path) -> None:
    objects = held(outbox, 4)
    assert [item.data is not None for item in objects] == [True, True, False, False]
    assert outbox.sizes() == (2 * len(DATA), 2 * len(DATA))
    assert spooled(tmp_path) == ["0000000000000002.log", "0000000000000003.log"]
    assert "archive.backlog_bytes" in outbox.hold(outgoing(4), DATA, queued_bytes=0)
    assert len(outbox) == 4


def test_the_queue_shares_the_memory_but_the_first_object_needs_no_file(outbox: Outbox, tmp_path: Path) -> None:
    assert not outbox.hold(outgoing(0), DATA, queued_bytes=9 * len(DATA))
    assert spooled(tmp_path) == []
    assert not outbox.hold(outgoing(1), DATA, queued_bytes=len(DATA))
    assert spooled(tmp_path) == ["0000000000000001.log"]


@pytest.mark.parametrize("keep_first", [True, False])
def test_a_break_keeps_at_most_the_object_that_may_be_in_an_upload(
    outbox: Outbox, tmp_path: Path, keep_first: bool
) -> None:
    objects = held(outbox, 4)
    dropped = outbox.break_chain(keep_first=keep_first)
    assert dropped == objects[keep_first:]
    assert outbox.first is (objects[0] if keep_first else None)
    assert (len(outbox), outbox.breaks) == (int(keep_first), 1)
    outbox.discard(dropped)
    assert spooled(tmp_path) == []


def test_an_uploaded_object_is_removed_unless_a_break_has_dropped_it(outbox: Outbox) -> None:
    first, second = held(outbox, 2)
    assert not outbox.remove_first(second)
    assert outbox.remove_first(first)
    assert outbox.first is second
    outbox.break_chain(keep_first=False)
    assert not outbox.remove_first(second)
