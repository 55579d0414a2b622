"""Streams of a store: opened, maintained in the background, snapshotted, dropped; on a path and on S3."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import DatabaseTombstoned, InvalidInput, ReadOnly, StoreClosed, UnknownDatabase, WrongKind
from quire.core.settings import MaintenanceSettings, ManifestLogSettings, StoreSettings, StreamSettings
from quire.durable.failpoints import armed
from quire.manifest.records import RetentionRecord
from quire.stream.state import Retention
from tests.stream.streams import record

QUICK = StoreSettings(
    maintenance=MaintenanceSettings(delete_grace_seconds=0.0),
    stream=StreamSettings(segment_bytes=16 << 10, tick_seconds=0.02, hot_bytes=0, warm_bytes=0, seal_seconds=0.1),
)


def test_a_store_opens_a_stream_once(tmp_path: Path) -> None:
    with quire.open(tmp_path) as store:
        store.create("clicks", "stream")
        stream = store.stream("clicks")
        assert store.stream("clicks") is stream
        stream.append(b"a").result()
        with pytest.raises(UnknownDatabase):
            store.stream("nothing")
        store.create("shop", "pages")
        with pytest.raises(WrongKind):
            store.stream("shop")
        with pytest.raises(WrongKind, match="cannot be forked"):
            store.fork("clicks", "copy")
    with pytest.raises(StoreClosed):
        stream.append(b"b")
    with quire.open(tmp_path, "r") as reader, pytest.raises(ReadOnly, match="opened for reading"):
        reader.stream("clicks").append(b"b")
    with quire.open(tmp_path) as store:
        assert [record.payload for record in store.stream("clicks").read()] == [b"a"]


def test_a_stream_that_cannot_be_maintained_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hazard: an unexpected error in one stream ended the thread that maintains all of them."""

    def broken() -> None:
        raise RuntimeError("unexpected")

    with quire.open(tmp_path, settings=QUICK) as store:
        monkeypatch.setattr(store.stream("a", create=True).upkeep, "tick", broken)
        stream = store.stream("b", create=True)
        stream.append(b"b").result()
        deadline = time.monotonic() + 60
        while not stream.info().remote_segments:
            assert time.monotonic() < deadline, stream.info()
            time.sleep(0.02)
    assert "RuntimeError: unexpected" in capsys.readouterr().err


def test_a_snapshot_refers_to_no_segment_that_is_being_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: a snapshot published while retention deleted an object pinned a segment of which nothing was left."""
    with quire.open(tmp_path) as store:
        stream = store.stream("clicks", create=True)
        for _ in range(2):
            stream.append(b"x").result()
            stream.seal()
        stream.upload()
        waits, pin = threading.Event(), stream.tiers.pin

        def pin_later(segment_ids: Iterable[int]) -> AbstractContextManager[None]:
            waits.set()
            return pin(segment_ids)

        monkeypatch.setattr(stream.tiers, "pin", pin_later)
        snapshot = threading.Thread(target=store.streams.snapshot, args=("clicks", "keep"))

        def begin_snapshot(_: str) -> None:
            snapshot.start()
            while snapshot.is_alive() and not waits.wait(0.01):
                pass

        with armed("stream.retire.deleted", begin_snapshot):
            assert stream.tiers.retire(1)
        snapshot.join()
        [info] = store.manifest.snapshots.of("clicks")
        assert info.pins == 1


def test_retention_removes_no_segment_while_a_snapshot_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: retention looked for holders of a segment before the snapshot had its references, and removed it after."""
    with quire.open(tmp_path) as store:
        stream = store.stream("clicks", create=True)
        stream.append(b"x").result()
        snapshots, removed = store.manifest.snapshots, list[bool]()
        publish = snapshots.publish

        def publish_during_retention(*args: Any, **named: Any) -> Any:
            thread = threading.Thread(target=lambda: removed.append(stream.tiers.retire(1)))
            thread.start()
            thread.join()
            return publish(*args, **named)

        monkeypatch.setattr(snapshots, "publish", publish_during_retention)
        assert store.streams.snapshot("clicks", "keep").pins == 1
        assert removed == [False]
        assert [record.payload for record in stream.read()] == [b"x"]


def test_segments_move_in_the_background(tmp_path: Path) -> None:
    with quire.open(tmp_path, settings=QUICK) as store:
        stream = store.stream("clicks", create=True)
        payloads = [record(number, 400) for number in range(1, 301)]
        for start in range(0, 300, 30):
            stream.append(payloads[start : start + 30]).result()
        deadline = time.monotonic() + 60
        while stream.info().remote_segments < 8 or stream.info().hot_segments or stream.info().warm_segments:
            assert time.monotonic() < deadline, stream.info()
            time.sleep(0.02)
        assert [record.payload for record in stream.read()] == payloads
        assert [figures.stream_id for figures in store.streams.figures()] == [stream.stream_id]
    with quire.open(tmp_path) as store:
        assert [record.payload for record in store.stream("clicks").read()] == payloads
        assert store.manifest.check() == []


def test_a_stream_that_failed_is_reopened(tmp_path: Path) -> None:
    with quire.open(tmp_path) as store:
        stream = store.stream("clicks", create=True)
        stream.append(b"a").result()
        stream.hot._poison(OSError("the disk is on fire"))
        again = store.stream("clicks")
        assert again is not stream
        assert again.append(b"b").result() == 2


def test_a_snapshot_seals_and_pins(tmp_path: Path) -> None:
    with quire.open(tmp_path) as store:
        stream = store.stream("clicks", create=True)
        stream.append([b"a", b"b"]).result()
        snapshot = store.snapshot("clicks", "monday")
        assert snapshot.anchor_lsn == 2
        stream.retain(Retention(bytes=1))
        assert stream.retire() == 0
        store.manifest.snapshots.drop("clicks", "monday")
        assert stream.retire() == 1


@pytest.mark.parametrize("limit", [-1.0, float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("name", ["seconds", "hold_seconds", "bytes"])
def test_retention_that_cannot_be_stored_is_refused(name: str, limit: float) -> None:
    """NaN and infinity were written to the state file, and the stream never opened again."""
    limits: dict[str, Any] = {name: limit}
    with pytest.raises(InvalidInput, match="retention limits"):
        Retention(**limits)


def test_a_dropped_stream_leaves_nothing(tmp_path: Path) -> None:
    with quire.open(tmp_path, settings=QUICK) as store:
        stream = store.stream("clicks", create=True)
        stream.append([record(number, 400) for number in range(100)]).result()
        stream.seal()
        stream.upload()
        home = Path(stream.files.home)
        assert home.exists()
        store.drop("clicks")
        with pytest.raises((UnknownDatabase, DatabaseTombstoned)):
            store.stream("clicks")
        store.maintain()
        assert not home.exists()
        assert not [info for page in store.objects.list_pages() for info in page]
        assert store.manifest.check() == []


def test_files_left_by_a_killed_drop_of_a_stream_are_removed_by_maintenance(tmp_path: Path) -> None:
    """The row was gone, but the files remained until another stream was dropped."""
    with quire.open(tmp_path, settings=QUICK) as store:
        stream = store.stream("clicks", create=True)
        stream.append([record(number, 400) for number in range(100)]).result()
        stream.upload()
        store.stream("other", create=True).append(b"kept").result()
        home = Path(stream.files.home)
    with quire.open(tmp_path, settings=QUICK) as owner:
        owner.manifest.drop_db(stream.stream_id).result()  # the process is killed before it removes the files
        assert home.exists()
        owner.maintain()
        assert not home.exists()
        assert not [info for page in owner.objects.list_pages() for info in page]
        assert [record.payload for record in owner.stream("other").read()] == [b"kept"]
        assert owner.manifest.check() == []


def test_many_threads_and_a_tail(tmp_path: Path) -> None:
    with quire.open(tmp_path) as store:
        stream = store.stream("clicks", create=True)
        ids_seen: list[int] = []
        tail = threading.Thread(target=lambda: ids_seen.extend(record.id for record in stream.tail(1, timeout=2)))
        tail.start()

        def work() -> None:
            for _ in range(40):
                stream.append(b"x").result()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in (*threads, tail):
            thread.join()
        assert ids_seen == list(range(1, 161))


@pytest.mark.parametrize("use", ["read", "read_batches", "tail", "seek"])
def test_after_a_fork_the_child_cannot_read_the_stream(tmp_path: Path, use: str) -> None:
    """The child returned what was in memory at the fork, and nothing for records that were in a file."""
    with quire.open(tmp_path) as store:
        stream = store.stream("clicks", create=True)
        stream.append(b"a").result()
        uses: dict[str, Callable[[], object]] = {
            "read": lambda: list(stream.read()),
            "read_batches": lambda: list(stream.read_batches()),
            "tail": lambda: next(stream.tail(1)),
            "seek": lambda: stream.seek(0),
        }
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                uses[use]()
            except StoreClosed:
                status = 0
            finally:
                os._exit(status)
        _, wait_status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(wait_status) == 0
        assert [record.payload for record in stream.read()] == [b"a"]


def test_after_a_fork_the_stream_belongs_to_the_parent(tmp_path: Path) -> None:
    with quire.open(tmp_path) as store:
        stream = store.stream("clicks", create=True)
        stream.append(b"a").result()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                stream.append(b"b")
            except StoreClosed:
                status = 0
            finally:
                os._exit(status)
        _, wait_status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(wait_status) == 0
        assert stream.append(b"c").result() == 2


def test_a_scheduled_snapshot_of_a_stream_contains_the_open_segment(tmp_path: Path) -> None:
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
    with quire.open(tmp_path, settings=settings) as store:
        stream = store.stream("clicks", create=True)
        stream.append([b"a", b"b"]).result()
        store.manifest.retention.set("clicks", RetentionRecord(schedules=["hourly"], hourly=2))
        store.upkeep.round()
        (snapshot,) = store.manifest.snapshots.of("clicks")
        assert snapshot.anchor_lsn == 2
        store.streams.close_stream("clicks")
        store.manifest.snapshots.drop("clicks", snapshot.snapshot_id)
        store.snapshot("clicks")
        assert store.streams.streams() == [], "a snapshot leaves no stream open that was closed"


def test_the_manifest_log_is_rotated_when_it_is_due(tmp_path: Path) -> None:
    """The timer was checked only by maintenance, which runs a quarter as often."""
    settings = StoreSettings(
        stream=StreamSettings(tick_seconds=3600), manifest_log=ManifestLogSettings(rotation_seconds=0.01)
    )
    with quire.open(tmp_path, settings=settings) as store:
        stream = store.stream("clicks", create=True)
        stream.append(b"a").result()
        deadline = time.monotonic() + 60
        while stream.ledger.log.committed.chunk_index == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_extent_of_a_closed_stream_is_known_without_opening_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False), stream=StreamSettings(open_max=1))
    with quire.open(tmp_path, settings=settings) as store:
        clicks = store.stream("clicks", create=True)
        clicks.register("etl")
        clicks.append([b"a", b"b"])  # nobody waits for them: closing makes them durable
        number = clicks.stream_id
        del clicks
        store.stream("other", create=True)
        assert [stream.stream_id for stream in store.streams.streams()] != [number]
        with monkeypatch.context() as patch:
            patch.setattr(store.streams, "_recover", None)
            extent = store.streams.extent(number)
        assert (extent.end_record, extent.consumers["etl"].position) == (3, 1)
        store.stream("clicks").append(b"c").result()
        store.stream("clicks").ack("etl", 2)
        store.stream("other")
        extent = store.streams.extent(number)
        assert (extent.end_record, extent.consumers["etl"].position) == (4, 2), (
            "not what it was when it was closed first"
        )
