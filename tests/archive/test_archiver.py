"""What the archiver guarantees while the bucket is available, unavailable, available again, and across restarts of the
store."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

import quire
from quire.archive import base_writer
from quire.archive.archiver import Archiver
from quire.archive.format import Position, encode_object
from quire.core.errors import AccessDenied, DiskFull, NotArchived
from quire.core.limits import MIB
from quire.testing.clock import ManualClock
from tests.archive.archived_store import (
    WAIT,
    ArchivedStore,
    Gate,
    archived_store,
    contents,
    fill,
    kill,
    quiet,
    read,
    settings,
    until,
)


def test_a_clean_close_continues_without_a_base(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.reopen()
        bases = {header.base for header in archived.headers()}
        fill(archived.store, 100)
        archived.wait_archived()
        assert {header.base for header in archived.headers()} == bases
        expected = contents(archived.store)
    assert read(archived.restore()) == expected


def test_a_kill_leads_to_a_base(tmp_path: Path) -> None:
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    last = archived.headers()[-1]
    kill(archived.store)
    archived.store = archived.open()
    fill(archived.store, 100)
    archived.wait_archived()
    assert archived.headers()[-1].base > last.position.number
    expected = contents(archived.store)
    archived.close()
    assert read(archived.restore()) == expected


def test_changes_of_a_session_without_an_archive_are_in_the_next_base(tmp_path: Path) -> None:
    """A session with mode "off" left archive.json unchanged; key-value writes change no row of the manifest, so the
    next session continued without a base, and what was written between was missing in the bucket."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.close()
    with quire.open(archived.root, settings=quiet()) as store:
        store.kv("pairs").put(b"between", b"lives")
    archived.store = archived.open()
    fill(archived.store, 100)
    archived.wait_archived()
    expected = contents(archived.store)
    archived.close()
    assert read(archived.restore()) == expected
    assert expected["pairs"][b"between"] == b"lives"


# ── an unavailable bucket ─────────────────────────────────────────────────────────────────────────────────────────────
def test_work_continues_while_the_bucket_is_unavailable_and_nothing_is_lost(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        gate = Gate(archived.archiver)
        gate.is_down = True
        fill(archived.store, 100)
        archived.store.kv("pairs").flush()
        archived.store.kv("pairs").compact()
        with pytest.raises(NotArchived, match="not yet in the bucket"):
            archived.archiver.wait(0.2)
        until(lambda: archived.archiver.lag_seconds() > 0.3)
        assert archived.archiver.last_error
        gate.is_down = False
        archived.wait_archived()
        until(lambda: archived.archiver.lag_seconds() == 0.0)
        assert archived.archiver.last_error == ""
        expected = contents(archived.store)
    assert read(archived.restore()) == expected


def test_the_lag_is_reported_if_the_bucket_was_never_available(tmp_path: Path) -> None:
    """Nothing was taken from the queue yet, and the lag was 0."""
    archived = ArchivedStore(tmp_path)
    archived.close()
    bucket, moved_bucket = tmp_path / "bucket", tmp_path / "away"
    (archived.root / "archive.json").unlink()
    os.rename(bucket, moved_bucket)
    bucket.write_bytes(b"a file: nothing can be listed or put")
    archived.store = archived.open()
    fill(archived.store, 0)
    until(lambda: archived.archiver.lag_seconds() > 0.3)
    bucket.unlink()
    os.rename(moved_bucket, bucket)
    archived.wait_archived()
    until(lambda: archived.archiver.lag_seconds() == 0.0)
    archived.close()


def test_a_permanent_error_is_reported(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        gate = Gate(archived.archiver)
        gate.error, gate.is_down = AccessDenied("access denied"), True
        fill(archived.store, 100)
        with pytest.raises(NotArchived) as raised:
            archived.archiver.wait(0.3)
        assert "access denied" in str(raised.value)
        assert "access denied" in archived.archiver.last_error
        gate.is_down = False
        archived.wait_archived()


def test_a_backlog_larger_than_memory_is_kept_on_disk(tmp_path: Path) -> None:
    with archived_store(tmp_path, memory_bytes=MIB) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        gate = Gate(archived.archiver)
        gate.is_down = True
        bulk(archived, 0, 24)
        until(lambda: list((archived.root / "archive").glob("*.log")))
        gate.is_down = False
        archived.wait_archived()
        until(lambda: not list((archived.root / "archive").iterdir()))
        assert {header.base for header in archived.headers()[-3:]} == {archived.headers()[-1].base}
        expected = contents(archived.store)
    assert read(archived.restore()) == expected


def bulk(archived: ArchivedStore, start: int, count: int, size: int = 200_000) -> None:
    """Append incompressible records, each in its own cut if the archiver is fast."""
    stream = archived.store.stream("events")
    for _ in range(start, start + count):
        stream.append([os.urandom(size)]).result()
        time.sleep(0.03)


def test_a_broken_chain_is_restorable_up_to_the_break_and_after_the_next_base(tmp_path: Path) -> None:
    with archived_store(tmp_path, memory_bytes=MIB, backlog_bytes=2 * MIB) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        before = contents(archived.store)
        gate = Gate(archived.archiver)
        gate.is_down = True
        breaks = archived.archiver._outbox.breaks
        while archived.archiver._outbox.breaks == breaks:
            bulk(archived, 0, 10)
        assert archived.restored_contents("during") == before
        fill(archived.store, 100)
        gate.is_down = False
        archived.wait_archived()
        numbers = [header.position.number for header in archived.headers()]
        assert numbers == list(range(len(numbers))), "numbers have no gaps"
        expected = contents(archived.store)
    assert read(archived.restore("after")) == expected


def test_changes_dropped_by_a_break_are_not_reported_as_archived(tmp_path: Path) -> None:
    """The object being uploaded when the chain broke arrived, and the queue was empty: `wait` returned before the
    base."""
    with archived_store(tmp_path, memory_bytes=MIB, backlog_bytes=0) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        gate = Gate(archived.archiver)
        gate.may_put.clear()
        gate.is_waiting.clear()
        archived.store.kv("pairs").put(b"first", b"on its way")
        assert gate.is_waiting.wait(WAIT)
        base_may_begin = threading.Event()
        write_base = archived.archiver._write_base

        def write_base_later(first: Position, breaks: int) -> None:
            assert base_may_begin.wait(WAIT)
            write_base(first, breaks)

        archived.archiver._write_base = write_base_later  # type: ignore[method-assign]
        breaks = archived.archiver._outbox.breaks
        while archived.archiver._outbox.breaks == breaks:
            bulk(archived, 0, 4)
        gate.may_put.set()
        until(lambda: not archived.archiver._outbox)
        time.sleep(0.2)
        with pytest.raises(NotArchived):
            archived.archiver.wait(0.2)
        base_may_begin.set()
        archived.wait_archived()
        expected = contents(archived.store)
    assert read(archived.restore()) == expected


def test_tables_that_a_break_dropped_are_uploaded_by_the_base_after_it(tmp_path: Path) -> None:
    """They were recorded as uploaded: the base referred to objects that the bucket never received."""
    with archived_store(tmp_path, memory_bytes=MIB, backlog_bytes=0) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        gate = Gate(archived.archiver)
        gate.is_down = True
        archived.store.kv("pairs").put(b"x", b"on its way")
        until(lambda: archived.archiver._outbox)
        breaks = archived.archiver._outbox.breaks
        fill(archived.store, 100)
        archived.store.kv("pairs").flush()  # a table in a cut that is dropped
        until(lambda: not archived.archiver.queue.size_bytes)
        while archived.archiver._outbox.breaks == breaks:
            bulk(archived, 0, 4)
        gate.is_down = False
        archived.wait_archived()
        until(lambda: not list((archived.root / "archive").iterdir()))  # including those of dropped tables
        expected = contents(archived.store)
    assert read(archived.restore()) == expected


def test_a_base_that_began_before_a_break_does_not_count(tmp_path: Path) -> None:
    with archived_store(tmp_path, memory_bytes=MIB, backlog_bytes=0, base_seconds=0.5) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        gate = Gate(archived.archiver)
        gate.before_put = lambda key: gate.may_put.clear() if "/base/" in key else None
        gate.is_waiting.clear()
        start = 1000
        while gate.may_put.is_set():
            fill(archived.store, start, 1)
            start += 1
        breaks = archived.archiver._outbox.breaks  # a base is being read: its parts wait
        while archived.archiver._outbox.breaks == breaks:
            bulk(archived, 0, 4)
        gate.before_put = lambda _: None
        gate.may_put.set()
        archived.wait_archived()
        expected = contents(archived.store)
    assert read(archived.restore()) == expected


# ── restarts ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_late_object_of_a_killed_process_deposes_no_owner(tmp_path: Path) -> None:
    """A put whose process was killed may take effect after the next process has looked for the end of the log."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    number = archived.headers()[-1].position.number
    late_path = archived.log_path(Position(1, number + 1))
    fill(archived.store, 100)
    archived.wait_archived()
    data = late_path.read_bytes()
    kill(archived.store)
    for header in archived.headers():
        if header.position.number > number:
            archived.log_path(header.position).unlink()
    archived.store = archived.open()
    until(lambda: archived.archiver._next is not None)
    if not late_path.exists():  # this process writes its first object when a base has begun or something has changed
        late_path.write_bytes(data)
    fill(archived.store, 200)
    archived.wait_archived()
    expected = contents(archived.store)
    archived.close()
    assert read(archived.restore()) == expected


def test_moments_never_decrease_when_the_clock_goes_back(tmp_path: Path) -> None:
    clock = ManualClock(4_000_000_000_000)
    archived = ArchivedStore(tmp_path, clock=clock)
    fill(archived.store, 0)
    archived.wait_archived()
    expected = contents(archived.store)
    moment = clock.now_ms()
    clock.jump(-86_400.0)
    fill(archived.store, 100)
    archived.reopen()
    fill(archived.store, 200)
    archived.wait_archived()
    clock.jump(2 * 86_400.0)
    fill(archived.store, 300)
    archived.close()
    moments = [header.at_ms for header in archived.headers()]
    assert moments == sorted(moments)
    assert contents_of_shop(read(archived.restore("past", at_ms=moment), clock=clock)) >= contents_of_shop(expected)


def contents_of_shop(state: dict[str, object]) -> int:
    shop = state["shop"]
    assert isinstance(shop, dict)
    return len(shop)


def test_changes_during_a_cut_wait_for_the_next_one(tmp_path: Path) -> None:
    """Objects followed each other without a pause during writes."""
    with archived_store(tmp_path, interval_seconds=0.5) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        objects, started = len(archived.headers()), time.monotonic()
        kv = archived.store.kv("pairs")
        while time.monotonic() - started < 2.0:
            kv.put(b"hot", b"value")
        intervals = (time.monotonic() - started) / 0.5
        assert len(archived.headers()) - objects <= intervals + 2


def test_the_archive_uses_the_settings_given_to_open(tmp_path: Path) -> None:
    """quire.toml has no archive section; the settings with which a program opens the store do."""
    with quire.open(tmp_path / "store", settings=settings(tmp_path / "bucket")) as store:
        assert store.archive is not None
        fill(store, 0)
        store.archive.wait(WAIT)
        expected = contents(store)
    quire.restore(str(tmp_path / "bucket"), tmp_path / "restored")
    assert read(tmp_path / "restored") == expected


def test_a_base_that_waits_for_the_bucket_holds_no_transaction_of_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB does not reuse pages that an open reader may see: an outage during a base would have filled the map."""
    monkeypatch.setattr(base_writer, "OBJECT_BYTES", 1_000)  # parts end in the middle of the manifest's rows
    with archived_store(tmp_path, base_seconds=0.3) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        gate = Gate(archived.archiver)
        gate.before_put = lambda key: gate.may_put.clear() if "/base/" in key else None
        start = 1000
        while gate.may_put.is_set():
            fill(archived.store, start, 1)
            start += 1
        readers = [thread for _, thread in archived.store.manifest.env.gate.unreported(0.0)]
        gate.before_put = lambda _: None
        gate.may_put.set()
        archived.wait_archived()
        expected = contents(archived.store)
    assert not [thread for thread in readers if "archive" in thread]
    assert read(archived.restore()) == expected


@pytest.mark.timeout(60)
def test_a_base_does_not_wait_for_a_file_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with archived_store(tmp_path) as archived:
        path = archived.root / "lsm" / "table.sst"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"table")
        put = archived.archiver._uploader.put_artifact

        def remove_then_put(key: str, name: str) -> None:
            path.unlink()
            put(key, name)

        monkeypatch.setattr(archived.archiver._uploader, "put_artifact", remove_then_put)
        with pytest.raises(FileNotFoundError):
            archived.archiver.artifact(Position(1, 0), str(path), "lsm/table.sst")


def test_a_close_that_finds_an_object_of_a_former_life_does_not_claim_to_be_complete_without_a_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a killed process had an object on its way, which arrived while the next one closed. That one reported its own
    objects as uploaded, and the log of the third could not be restored."""
    archived = ArchivedStore(tmp_path, interval_seconds=5.0)
    fill(archived.store, 0)
    archived.archiver.base()
    kill(archived.store)
    last = archived.headers()[-1]
    digest = hashlib.sha256(archived.log_path(last.position).read_bytes()).digest()
    late = msgspec.structs.replace(
        last,
        position=Position(last.position.epoch, last.position.number + 1),
        parent=last.position,
        parent_digest=digest,
        restorable=last.position.number + 1,
    )
    start = Archiver.start

    def start_with_a_late_object(self: Archiver) -> None:
        start(self)

        def arrive(key: str) -> None:
            if "/log/" in key and not archived.log_path(late.position).exists():
                archived.log_path(late.position).write_bytes(encode_object(late, []))

        Gate(self).before_put = arrive

    with monkeypatch.context() as patch:
        patch.setattr(Archiver, "start", start_with_a_late_object)
        archived.store = archived.open()
        archived.close()
    assert archived.log_path(late.position).exists()
    archived.store = archived.open()
    archived.store.kv("pairs").put(b"after", b"the late object")
    archived.wait_archived()
    assert archived.restored_contents()["pairs"][b"after"] == b"the late object"
    archived.close()


def test_a_close_whose_bucket_has_lost_the_last_object_uploads_a_base(tmp_path: Path) -> None:
    """Hazard: it reported everything as uploaded, and had uploaded nothing."""
    archived = ArchivedStore(tmp_path, interval_seconds=20.0)
    fill(archived.store, 0)
    archived.archiver.base()
    archived.close()
    archived.log_path(archived.headers()[-1].position).unlink()
    archived.store = archived.open()
    archived.store.kv("pairs").put(b"after", b"the loss")
    archived.close()
    assert archived.restored_contents()["pairs"][b"after"] == b"the loss"


def test_a_close_is_not_complete_while_the_bucket_does_not_answer(tmp_path: Path) -> None:
    archived = ArchivedStore(tmp_path, close_seconds=0.5)
    Gate(archived.archiver).is_down = True
    archived.store.kv("pairs", create=True).put(b"key", b"value")
    assert not archived.archiver.close()
    archived.close()


def test_the_archive_continues_after_its_backlog_has_met_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: it stopped until the store was opened again, also when there was space and the bucket answered."""
    with archived_store(tmp_path, memory_bytes=MIB) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        gate = Gate(archived.archiver)
        gate.is_down = True
        with monkeypatch.context() as patch:
            patch.setattr("quire.archive.outbox.write_new", raise_disk_full)
            breaks = archived.archiver._outbox.breaks
            while archived.archiver._outbox.breaks == breaks:
                archived.store.stream("events").append([os.urandom(200_000)]).result()
        gate.is_down = False
        fill(archived.store, 500)
        archived.wait_archived()
        expected = contents(archived.store)
        assert archived.restored_contents() == expected


def raise_disk_full(*_: Any, **__: Any) -> None:
    raise DiskFull("no space is left")


def size_of(spool: Path) -> int:
    """The size of the files that wait for upload; they may disappear meanwhile."""
    size = 0
    for file in spool.glob("*.file"):
        with suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


def test_files_that_only_the_archive_needs_count_as_its_backlog(tmp_path: Path) -> None:
    """Hazard: compactions during an outage left all tables in between on disk, without a limit."""
    with archived_store(tmp_path, memory_bytes=MIB, backlog_bytes=2 * MIB) as archived:
        pairs = archived.store.kv("pairs", create=True)
        archived.wait_archived()
        gate = Gate(archived.archiver)
        gate.is_down = True
        spool, waiting = archived.root / "archive", 0
        for _ in range(40):
            for number in range(600):
                pairs.put(b"%06d" % number, os.urandom(400), sync=False)
            pairs.flush()
            pairs.compact()
            waiting = max(waiting, size_of(spool))
        assert archived.archiver._outbox.breaks
        assert waiting < 8 * MIB  # 40 rounds write 10 MiB, and each table of them is compacted away
        gate.is_down = False
        archived.wait_archived()
        assert archived.restored_contents()["pairs"] == contents(archived.store)["pairs"]


def test_an_append_that_is_larger_than_an_object_can_be_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: it became one event, and readers refuse an object above their limit."""
    monkeypatch.setattr("quire.archive.format.RAW_BYTES_MAX", 24 * MIB)
    monkeypatch.setattr("quire.archive.recorder.PIECE_BYTES", MIB)
    with archived_store(tmp_path, memory_bytes=16 * MIB) as archived:
        fill(archived.store, 0)
        records = [os.urandom(MIB - 1) for _ in range(30)]
        archived.store.stream("events").append(records).result()
        archived.wait_archived()
        expected = contents(archived.store)
        assert archived.restored_contents() == expected
