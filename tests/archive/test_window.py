"""The window of an archive: retired objects are kept as long as a moment needs them, and deleted after that (A3,
A8)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

import quire
from quire.archive.format import Position
from quire.archive.log_reader import find, header_of
from quire.archive.sealing import _ahead_of, _put_seal
from quire.archive.state_files import read_remote_files
from quire.archive.window import Line, list_archive, reach
from quire.core.errors import InvalidInput, QuireError, StoreFenced
from quire.core.settings import ArchiveSettings, MaintenanceSettings, StoreSettings
from quire.durable.failpoints import armed
from quire.manifest import tables as t
from quire.manifest.namespaces import retired_objects
from quire.objects.collector import Collector
from quire.objects.guarded import path_store
from quire.objects.open import open_store
from quire.store.heavy import audit_bucket
from quire.store.restoring import restore
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.archive.archived_store import Gate
from tests.programs import run_program

HOUR = 3_600.0


class WindowedStore:
    """An archived store, its bucket and its clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bucket = str(path / "bucket")
        self.clock = ManualClock()
        self.restores = 0
        self.lost: set[str] = set()
        """Objects that moments of the archive lack because it was switched off."""

    def open(self, *, mode: str = "async", retain_seconds: float = 2 * HOUR) -> Store:
        archive = ArchiveSettings(
            mode=mode,  # type: ignore[arg-type]
            interval_seconds=0.02,
            base_seconds=0.001,
            retain_seconds=retain_seconds,
        )
        settings = StoreSettings(
            object_store=self.bucket, archive=archive, maintenance=MaintenanceSettings(enabled=False)
        )
        return quire.open(str(self.path / "store"), settings=settings, clock=self.clock)

    def restored(self, at_ms: int | None = None) -> Store:
        """The store as of a moment, for reading."""
        self.restores += 1
        target = str(self.path / f"restored-{self.restores}")
        restore(self.bucket, target, at_ms=at_ms, clock=self.clock)
        return quire.open(target, "r", clock=self.clock)

    def remote_files(self) -> set[str]:
        """The objects that a restore leaves in the bucket, all of which must exist."""
        with self.restored() as copy:
            named = read_remote_files(copy.disk, copy.path)
        store = open_store(self.bucket)
        assert all(store.head(file.key).size_bytes == file.size for file in named.values())
        return {file.key for file in named.values()}

    def objects(self, part: str = "") -> set[str]:
        store = open_store(self.bucket)
        return {info.key for page in store.list_pages("") for info in page if f"/{part}" in info.key}


@pytest.fixture
def windowed(tmp_path: Path) -> WindowedStore:
    return WindowedStore(tmp_path)


def write(store: Store, value: int) -> None:
    """Set every row of the database to this value, in chunks of its own."""
    connection = store.sqlite("shop", create=True)
    connection.execute("create table if not exists t(a, b)")
    with connection:
        connection.execute("delete from t")
        connection.executemany("insert into t values(?, ?)", ((value, os.urandom(64)) for _ in range(500)))
    connection.close()
    store.heavy.checkpoint_all()
    store.heavy.merge_all()


def new_base(store: Store) -> None:
    """Wait until a base that begins now counts."""
    archive = store.archive
    assert archive is not None
    before = archive._base
    deadline = time.monotonic() + 30
    while archive._base in (before, 2**64 - 1):
        store.kv("ticks", create=True).put(b"tick", os.urandom(8))
        archive.wait(10)
        assert time.monotonic() < deadline, "no base was written"
        time.sleep(0.01)
    archive.wait(10)


def value_of(store: Store) -> int:
    with store:
        rows = store.sqlite("shop").execute("select distinct a from t").fetchall()
    assert len(rows) == 1
    return int(str(rows[0][0]))


def retired_names(store: Store) -> list[str]:
    with store.manifest.read() as txn:
        return sorted(row.name for _, row in retired_objects(txn))


def run_hours(windowed: WindowedStore, store: Store, hours: int) -> list[tuple[int, int]]:
    """(moment, value) of each hour: the database is rewritten, and its previous chunks are collected."""
    moments = []
    for hour in range(hours):
        write(store, hour)
        new_base(store)
        moments.append((windowed.clock.now_ms(), hour))
        windowed.clock.advance(HOUR)
        store.maintain()
    return moments


def test_objects_that_engines_delete_are_kept_for_the_window(windowed: WindowedStore) -> None:
    with windowed.open() as store:
        write(store, 1)
        new_base(store)
        before = windowed.objects("e/")
        windowed.clock.advance(HOUR)
        write(store, 2)
        windowed.clock.advance(HOUR)
        store.maintain()
        names = retired_names(store)
        assert names, "nothing was retired"
        assert set(names) <= before <= windowed.objects("e/")
        windowed.clock.advance(120)
        new_base(store)
        windowed.clock.advance(1.9 * HOUR)
        store.maintain()
        assert set(names) <= set(retired_names(store)), "moments of the last two hours need them"
        new_base(store)
        windowed.clock.advance(HOUR)
        done = store.maintain()
        assert done.collected >= len(names)
        assert not set(names) & (windowed.objects("e/") | set(retired_names(store)))
        assert value_of(windowed.restored()) == 2


def test_every_moment_of_the_window_can_be_restored_after_heavy_collection(windowed: WindowedStore) -> None:
    with windowed.open() as store:
        moments = run_hours(windowed, store, 6)
        assert store.archive is not None
        store.archive.wait(10)
        oldest = reach(store.objects, store.info().store_id).oldest_at_ms
        now = windowed.clock.now_ms()
        assert moments[1][0] < oldest <= now - 2 * HOUR * 1000, "the window covers two hours, not five"
        assert value_of(windowed.restored(oldest)) == next(value for at, value in reversed(moments) if at <= oldest)
        for at_ms, value in moments:
            if at_ms >= oldest:
                assert value_of(windowed.restored(at_ms)) == value
        with pytest.raises(InvalidInput, match="does not reach back"):
            find(store.objects, store.info().store_id, moments[0][0])


def test_logs_bases_and_files_before_the_window_are_trimmed_and_the_newest_base_never_is(
    windowed: WindowedStore,
) -> None:
    with windowed.open() as store:
        kv = store.kv("ticks", create=True)
        for number in range(300):
            kv.put(b"%d" % number, os.urandom(100))
        kv.flush()
        run_hours(windowed, store, 5)
        listing = list_archive(store.objects, store.info().store_id)
        logs = sorted(listing.epochs[1].logs)
        assert logs[0] > 0
        oldest = Line(store.objects, listing).oldest()
        assert oldest is not None
        assert oldest.base.first_log == logs[0]
        windowed.clock.advance(100 * HOUR)
        store.maintain()
        assert reach(store.objects, store.info().store_id).oldest_at_ms
        assert value_of(windowed.restored()) == 4
        assert windowed.remote_files(), "a table older than the oldest base is still needed"


POINTS = [
    "archive.trim.before",
    "archive.trim.parts",
    "archive.trim.logs",
    "archive.trim.files",
    "archive.retired.before",
    "archive.retired.deleted",
    "archive.retired.forgotten",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_round_interrupted_anywhere_is_completed_by_the_next(windowed: WindowedStore, point: str) -> None:
    class Killed(BaseException):
        pass

    def kill(_: str) -> None:
        raise Killed

    with windowed.open() as store:
        moments = []
        for hour in range(4):
            write(store, hour)
            new_base(store)
            moments.append((windowed.clock.now_ms(), hour))
            windowed.clock.advance(HOUR)
            store.worker.drain()
        windowed.clock.advance(1.5 * HOUR)
        with armed(point, kill), pytest.raises(Killed):
            store.maintain()
        at_ms = reach(store.objects, store.info().store_id).oldest_at_ms
        assert at_ms, "the rest can be restored"
        assert value_of(windowed.restored(at_ms)) == next(value for at, value in reversed(moments) if at <= at_ms)
        store.maintain()
        listing = list_archive(store.objects, store.info().store_id)
        oldest = Line(store.objects, listing).oldest()
        assert oldest is not None
        assert min(listing.epochs[1].logs) == oldest.base.first_log
        assert min(number for number, _ in listing.epochs[1].parts.values()) == oldest.base.first_log
        assert not store.maintain().collected
        assert value_of(windowed.restored()) == 3


def test_with_archiving_off_nothing_is_retired_and_retired_objects_are_deleted(windowed: WindowedStore) -> None:
    with windowed.open() as store:
        write(store, 1)
        write(store, 2)
        windowed.clock.advance(HOUR)
        store.maintain()
        names = retired_names(store)
        assert names
    with windowed.open(mode="off") as store:
        assert retired_names(store) == names
        objects_before = windowed.objects("e/")
        store.maintain()
        assert not retired_names(store)
        assert not set(names) & windowed.objects("e/")
        write(store, 3)
        windowed.clock.advance(HOUR)
        objects_after_write = windowed.objects("e/")
        store.maintain()
        assert not retired_names(store)
        assert windowed.objects("e/") < objects_after_write
        windowed.lost = (objects_before | objects_after_write) - windowed.objects("e/")
    with windowed.open() as store:  # on again: a base, and everything from now on
        new_base(store)
        assert value_of(windowed.restored()) == 3
        write(store, 4)
        windowed.clock.advance(HOUR)
        store.maintain()
        assert retired_names(store)
    assert audit_bucket(windowed.bucket).problems, "the audit reports the lost moments of the first session"


def test_a_damaged_row_keeps_its_object_and_nothing_else_and_is_repaired(windowed: WindowedStore) -> None:
    with windowed.open() as store:
        write(store, 1)
        write(store, 2)
        write(store, 3)
        windowed.clock.advance(HOUR)
        store.maintain()
        names = retired_names(store)
        assert len(names) > 1
        key = t.RETIRED.key.pack(t.retired_digest("", names[0]))
        with store.manifest.env.begin_write() as txn:
            handle = store.manifest.env.handles[t.RETIRED.name]
            row = bytearray(txn.get(key, db=handle) or b"")
            row[-1] ^= 1
            txn.put(key, bytes(row), db=handle)
    with windowed.open(mode="off") as store:
        store.maintain()
        assert retired_names(store) == []
        assert set(names) & windowed.objects("e/") == {names[0]}
    with quire.open(str(windowed.path / "store"), repair=True, clock=windowed.clock) as store:
        assert not store.manifest.check()
        windowed.lost = set(names)


def test_segments_that_a_stream_retires_are_kept_for_moments_that_read_them(windowed: WindowedStore) -> None:
    with windowed.open() as store:
        stream = store.stream("events", create=True)
        for number in range(3):
            stream.append(b"record %d" % number)
            stream.seal()
        stream.tick()
        new_base(store)
        at_ms = windowed.clock.now_ms()
        windowed.clock.advance(HOUR)
        segments = {segment.key for segment in stream.ledger.view if segment.key}
        assert segments <= windowed.objects("e/"), "the segments are uploaded"
        for segment in list(stream.ledger.view)[:2]:
            assert stream.tiers.retire(segment.segment_id)
        assert len(segments & set(retired_names(store))) == 2
        assert segments <= windowed.objects("e/")
        assert store.archive is not None
        store.archive.wait(10)
        with windowed.restored(at_ms) as copy, copy.manifest.read() as txn:
            assert {row.suffix for _, row in txn.scan(t.WAL_CATALOG)} >= segments


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_the_round_of_an_owner_killed_anywhere_is_completed_by_the_next(windowed: WindowedStore, point: str) -> None:
    with windowed.open() as store:
        for hour in range(3):
            write(store, hour)
            new_base(store)
            windowed.clock.advance(HOUR)
            store.worker.drain()
        new_base(store)  # after the objects were retired: they can be deleted when this base is older than the window
        assert retired_names(store)
        windowed.clock.advance(3 * HOUR)
    child = (
        "import sys; from pathlib import Path; from tests.archive.test_window import WindowedStore\n"
        "windowed = WindowedStore(Path(sys.argv[1])); windowed.clock.jump(float(sys.argv[2]))\n"
        "windowed.open().maintain()"
    )
    seconds = (windowed.clock.now_ms() - ManualClock().now_ms()) / 1000
    killed = run_program(
        ["-c", child, str(windowed.path), str(seconds)],
        env={**os.environ, "QUIRE_FAILPOINTS": f"{point}=kill"},
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL
    assert value_of(windowed.restored()) == 2
    with windowed.open() as store:
        store.maintain()
        listing = list_archive(store.objects, store.info().store_id)
        oldest = Line(store.objects, listing).oldest()
        assert oldest is not None
        assert min(listing.epochs[1].logs) == oldest.base.first_log
        assert not any(since <= oldest.at_ms - 60_000 for since in ages(store))


def ages(store: Store) -> list[int]:
    with store.manifest.read() as txn:
        return [row.since_ms for _, row in retired_objects(txn)]


def test_a_sweep_does_not_delete_retired_objects(windowed: WindowedStore) -> None:
    with windowed.open() as store:
        write(store, 1)
        write(store, 2)
        windowed.clock.advance(HOUR)
        store.maintain()
        names = retired_names(store)
        assert names
        swept = store.heavy.sweep(delete=True, grace_seconds=-10 * HOUR)
        assert not {orphan["object"] for orphan in swept.result["orphans"]} & set(names)
        assert set(names) <= windowed.objects("e/")


def test_after_a_takeover_the_previous_epoch_is_trimmed_and_files_in_use_are_kept(windowed: WindowedStore) -> None:
    with windowed.open() as store:
        kv = store.kv("ticks", create=True)
        for number in range(300):
            kv.put(b"%d" % number, os.urandom(100))
        kv.flush()
        write(store, 1)
        new_base(store)
    target = str(windowed.path / "successor")
    windowed.clock.advance(60)
    restore(windowed.bucket, target, takeover=True, clock=windowed.clock)
    settings = StoreSettings(
        object_store=windowed.bucket,
        archive=ArchiveSettings(mode="async", interval_seconds=0.02, base_seconds=0.001, retain_seconds=HOUR),
        maintenance=MaintenanceSettings(enabled=False),
    )
    with quire.open(target, settings=settings, clock=windowed.clock) as store:
        write(store, 2)
        new_base(store)
        store.maintain()
        listing = list_archive(store.objects, store.info().store_id)
        assert listing.epochs[1].logs, "the window includes the previous epoch"
        windowed.clock.advance(2 * HOUR)
        write(store, 3)
        new_base(store)
        windowed.clock.advance(2 * HOUR)
        store.maintain()
        listing = list_archive(store.objects, store.info().store_id)
        assert len(listing.epochs[1].logs) == 1, "only the seal remains"
        assert not listing.epochs[1].parts
        assert listing.epochs[1].files, "its tables are still read"
        assert set(listing.epochs[1].files) & windowed.remote_files()


class SuspendedGate(Gate):
    """Pauses an owner between its ownership check and the put of a log object."""

    def put(self, key: str, *arguments: Any, **options: Any) -> Any:
        self.is_waiting.set()
        assert self.may_put.wait(60)
        store = self._objects()
        return (path_store(store) if "/log/" in key else store).put(key, *arguments, **options)  # type: ignore[union-attr]


def test_objects_deleted_without_being_retired_are_detected_as_missing(
    windowed: WindowedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above would show if an engine deleted objects that only an archived moment needs."""
    monkeypatch.setattr(Collector, "delete", Collector.delete_now)
    with windowed.open() as store:
        moments = run_hours(windowed, store, 4)
    failed_restores = 0
    for moment, _ in moments:
        try:
            value_of(windowed.restored(moment))
        except QuireError:
            failed_restores += 1
    assert failed_restores
    problems = audit_bucket(windowed.bucket).problems
    assert problems, "the audit finds it too"
    windowed.lost = {row["artifact"] for row in problems}


def test_an_owner_suspended_for_longer_than_the_window_resumes_without_effect(windowed: WindowedStore) -> None:
    """Its successor has trimmed its log and deleted what it had retired; it puts and deletes nothing more."""
    owner = windowed.open()
    run_hours(windowed, owner, 3)
    assert retired_names(owner)
    assert owner.archive is not None
    gate = SuspendedGate(owner.archive)
    gate.may_put.clear()
    gate.is_waiting.clear()
    owner.kv("ticks").put(b"late", b"in its hands")
    assert gate.is_waiting.wait(30)
    target = str(windowed.path / "successor")
    restore(windowed.bucket, target, takeover=True, clock=windowed.clock)
    bucket, store_id = open_store(windowed.bucket), owner.info().store_id
    sealed = header_of(bucket, store_id, Position(1, max(list_archive(bucket, store_id).epochs[1].logs)))
    assert _put_seal(bucket, store_id, _ahead_of(sealed, 3)), "like a takeover that lost a race with the owner"
    settings = StoreSettings(
        object_store=windowed.bucket,
        archive=ArchiveSettings(mode="async", interval_seconds=0.02, base_seconds=0.001, retain_seconds=HOUR),
        maintenance=MaintenanceSettings(enabled=False),
    )
    with quire.open(target, settings=settings, clock=windowed.clock) as successor:
        moments = run_hours(windowed, successor, 5)[-1:]
        assert successor.archive is not None
        successor.archive.wait(30)
        listing = list_archive(successor.objects, successor.info().store_id)
        assert not listing.epochs[1].parts, "the window no longer includes the previous epoch"
        assert len(listing.epochs[1].logs) == 2, "only the seals remain"
        assert reach(successor.objects, successor.info().store_id).abandoned == ()
        before = windowed.objects("e/00000001/") | windowed.objects("archive/00000001/")
        gate.may_put.set()
        with pytest.raises(StoreFenced):
            owner.archive.wait(30)
        with suppress(QuireError):
            owner.maintain()
        with suppress(QuireError):
            owner.close()
        assert windowed.objects("e/00000001/") | windowed.objects("archive/00000001/") == before
        successor.kv("ticks").put(b"and", b"on")
        successor.archive.wait(30)
    for moment, value in [*moments, (windowed.clock.now_ms(), 4)]:
        assert value_of(windowed.restored(moment)) == value
    with windowed.restored() as copy:
        assert copy.kv("ticks").get(b"late") is None


@pytest.fixture(autouse=True)
def sound(windowed: WindowedStore) -> Iterator[None]:
    """Every store and its archive are sound at the end."""
    yield
    if os.path.isdir(windowed.path / "store"):
        with quire.open(str(windowed.path / "store"), "r") as store, store.manifest.read():
            assert not store.manifest.check()
        audit = audit_bucket(windowed.bucket)
        assert ({row["artifact"] for row in audit.problems} - windowed.lost, audit.orphans) == (set(), [])


def test_the_default_window_is_one_day() -> None:
    assert msgspec.structs.asdict(ArchiveSettings())["retain_seconds"] == 86_400.0
