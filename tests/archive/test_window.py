"""The window of an archive: what is retired stays as long as a moment needs it, and what no moment needs goes (A3, A8)."""

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
from quire.jobs.archive_window import ArchiveWindow
from quire.manifest import tables as t
from quire.manifest.namespaces import retired_objects
from quire.objects.collector import Collector
from quire.objects.guarded import path_store
from quire.objects.open import open_store
from quire.store import opening
from quire.store.heavy import audit_bucket
from quire.store.restoring import restore
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.archive.world import Gate
from tests.programs import run_program

HOUR = 3_600.0


class World:
    """A store that is archived, its bucket and its clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bucket = str(path / "bucket")
        self.clock = ManualClock()
        self.restores = 0
        self.lost: set[str] = set()
        """Objects that moments of the archive lack, because it was switched off."""

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
        return opening.open(str(self.path / "store"), settings=settings, clock=self.clock)

    def restored(self, at_ms: int | None = None) -> Store:
        """The store as of a moment, for reading."""
        self.restores += 1
        target = str(self.path / f"restored-{self.restores}")
        restore(self.bucket, target, at_ms=at_ms, clock=self.clock)
        return opening.open(target, "r", clock=self.clock)

    def remote_files(self) -> set[str]:
        """The objects that a restore leaves in the bucket, which are all there."""
        with self.restored() as copy:
            named = read_remote_files(copy.disk, copy.path)
        store = open_store(self.bucket)
        assert all(store.head(file.key).size_bytes == file.size for file in named.values())
        return {file.key for file in named.values()}

    def objects(self, below: str = "") -> set[str]:
        store = open_store(self.bucket)
        return {info.key for page in store.list_pages("") for info in page if f"/{below}" in info.key}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def write(store: Store, value: int) -> None:
    """Every page of the database has this value, in chunks of its own."""
    connection = store.sqlite("shop", create=True)
    connection.execute("create table if not exists t(a, b)")
    with connection:
        connection.execute("delete from t")
        connection.executemany("insert into t values(?, ?)", ((value, os.urandom(64)) for _ in range(500)))
    connection.close()
    store.heavy.checkpoint_all()
    store.heavy.merge_all()


def new_base(store: Store) -> None:
    """Have a base that begins now counted."""
    archive = store.archive
    assert archive is not None
    before = archive._base
    deadline = time.monotonic() + 30
    while archive._base in (before, 2**64 - 1):
        store.kv("ticks", create=True).put(b"tick", os.urandom(8))
        archive.wait(10)
        assert time.monotonic() < deadline, "no base came"
        time.sleep(0.01)
    archive.wait(10)


def value_of(store: Store) -> int:
    with store:
        rows = store.sqlite("shop").execute("select distinct a from t").fetchall()
    assert len(rows) == 1
    return int(str(rows[0][0]))


def waiting(store: Store) -> list[str]:
    with store.manifest.read() as txn:
        return sorted(row.name for _, row in retired_objects(txn))


def grown(world: World, store: Store, hours: int) -> list[tuple[int, int]]:
    """(moment, value) of each hour: the database is rewritten, and what it had before is collected."""
    moments = []
    for hour in range(hours):
        write(store, hour)
        new_base(store)
        moments.append((world.clock.now_ms(), hour))
        world.clock.advance(HOUR)
        store.maintain()
    return moments


def test_what_engines_delete_stays_for_the_window_and_goes_after_it(world: World) -> None:
    with world.open() as store:
        write(store, 1)
        new_base(store)
        before = world.objects("e/")
        world.clock.advance(HOUR)
        write(store, 2)
        world.clock.advance(HOUR)
        store.maintain()
        names = waiting(store)
        assert names, "nothing was retired"
        assert set(names) <= before <= world.objects("e/")
        world.clock.advance(120)
        new_base(store)
        world.clock.advance(1.9 * HOUR)
        store.maintain()
        assert set(names) <= set(waiting(store)), "moments of the last two hours still need them"
        new_base(store)
        world.clock.advance(HOUR)
        done = store.maintain()
        assert done.collected >= len(names)
        assert not set(names) & (world.objects("e/") | set(waiting(store)))
        assert value_of(world.restored()) == 2


def test_every_moment_of_the_window_is_restored_after_heavy_collection(world: World) -> None:
    with world.open() as store:
        moments = grown(world, store, 6)
        assert store.archive is not None
        store.archive.wait(10)
        oldest = reach(store.objects, store.info().store_id).oldest_at_ms
        now = world.clock.now_ms()
        assert moments[1][0] < oldest <= now - 2 * HOUR * 1000, "the window reaches back two hours, and not five"
        assert value_of(world.restored(oldest)) == next(value for at, value in reversed(moments) if at <= oldest)
        for at_ms, value in moments:
            if at_ms >= oldest:
                assert value_of(world.restored(at_ms)) == value
        with pytest.raises(InvalidInput, match="does not reach back"):
            find(store.objects, store.info().store_id, moments[0][0])


def test_logs_bases_and_files_before_the_window_are_trimmed_and_the_newest_base_never_is(world: World) -> None:
    with world.open() as store:
        kv = store.kv("ticks", create=True)
        for number in range(300):
            kv.put(b"%d" % number, os.urandom(100))
        kv.flush()
        grown(world, store, 5)
        listing = list_archive(store.objects, store.info().store_id)
        logs = sorted(listing.epochs[1].logs)
        assert logs[0] > 0
        oldest = Line(store.objects, listing).oldest()
        assert oldest is not None
        assert oldest.base.first_log == logs[0]
        world.clock.advance(100 * HOUR)
        store.maintain()
        assert reach(store.objects, store.info().store_id).oldest_at_ms
        assert value_of(world.restored()) == 4
        assert world.remote_files(), "a table from before the oldest base is still needed"


POINTS = [
    "archive.trim.parts",
    "archive.trim.logs",
    "archive.trim.files",
    "archive.retired.deleted",
    "archive.retired.forgotten",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_round_that_ends_anywhere_is_carried_to_its_end_by_the_next(world: World, point: str) -> None:
    class Killed(BaseException):
        pass

    def die(_: str) -> None:
        raise Killed

    with world.open() as store:
        moments = []
        for hour in range(4):
            write(store, hour)
            new_base(store)
            moments.append((world.clock.now_ms(), hour))
            world.clock.advance(HOUR)
            store.worker.drain()
        world.clock.advance(1.5 * HOUR)
        with armed(point, die), pytest.raises(Killed):
            store.maintain()
        at_ms = reach(store.objects, store.info().store_id).oldest_at_ms
        assert at_ms, "what is left can be restored"
        assert value_of(world.restored(at_ms)) == next(value for at, value in reversed(moments) if at <= at_ms)
        store.maintain()
        listing = list_archive(store.objects, store.info().store_id)
        oldest = Line(store.objects, listing).oldest()
        assert oldest is not None
        assert min(listing.epochs[1].logs) == oldest.base.first_log
        assert min(number for number, _ in listing.epochs[1].parts.values()) == oldest.base.first_log
        assert not store.maintain().collected
        assert value_of(world.restored()) == 3


def test_with_archiving_off_nothing_waits_and_what_waited_goes_with_the_next_round(world: World) -> None:
    with world.open() as store:
        write(store, 1)
        write(store, 2)
        world.clock.advance(HOUR)
        store.maintain()
        names = waiting(store)
        assert names
    with world.open(mode="off") as store:
        assert waiting(store) == names
        there = world.objects("e/")
        store.maintain()
        assert not waiting(store)
        assert not set(names) & world.objects("e/")
        write(store, 3)
        world.clock.advance(HOUR)
        gone = world.objects("e/")
        store.maintain()
        assert not waiting(store)
        assert world.objects("e/") < gone
        world.lost = (there | gone) - world.objects("e/")
    with world.open() as store:  # on again: a base, and everything from now on
        new_base(store)
        assert value_of(world.restored()) == 3
        write(store, 4)
        world.clock.advance(HOUR)
        store.maintain()
        assert waiting(store)
    assert audit_bucket(world.bucket).problems, "the audit says which moments of the first life are lost"


def test_a_clone_keeps_what_it_reads(world: World) -> None:
    with world.open() as store:
        write(store, 1)
        new_base(store)
        world.clock.advance(HOUR)
        write(store, 2)
        world.clock.advance(HOUR)
        store.worker.drain()
        world.clock.advance(120)
        new_base(store)
        world.clock.advance(3 * HOUR)
        names = waiting(store)
        assert names
        settings = store.settings.archive
        until = world.clock.now_ms() + 1000
        kept = ArchiveWindow(store.context, settings, lambda _url, name, _since: until if name == names[0] else 0)
        kept.look(now=True)
        assert names[0] in waiting(store)
        assert names[0] in world.objects("e/")
        assert not set(names[1:]) & set(waiting(store))
        world.clock.advance(2)
        kept.look(now=True)
        assert names[0] not in world.objects("e/")


def test_a_damaged_row_keeps_its_object_and_nothing_else_and_is_repaired(world: World) -> None:
    with world.open() as store:
        write(store, 1)
        write(store, 2)
        write(store, 3)
        world.clock.advance(HOUR)
        store.maintain()
        names = waiting(store)
        assert len(names) > 1
        key = t.RETIRED.key.pack(t.retired_digest("", names[0]))
        with store.manifest.env.begin_write() as txn:
            handle = store.manifest.env.handles[t.RETIRED.name]
            row = bytearray(txn.get(key, db=handle) or b"")
            row[-1] ^= 1
            txn.put(key, bytes(row), db=handle)
    with world.open(mode="off") as store:
        store.maintain()
        assert waiting(store) == []
        assert set(names) & world.objects("e/") == {names[0]}
    with opening.open(str(world.path / "store"), repair=True, clock=world.clock) as store:
        assert not store.manifest.check()
        world.lost = set(names)


def test_segments_that_a_stream_retires_stay_for_the_moments_that_read_them(world: World) -> None:
    with world.open() as store:
        stream = store.stream("events", create=True)
        for number in range(3):
            stream.append(b"record %d" % number)
            stream.seal()
        stream.tick()
        new_base(store)
        at_ms = world.clock.now_ms()
        world.clock.advance(HOUR)
        segments = {segment.key for segment in stream.ledger.view if segment.key}
        assert segments <= world.objects("e/"), "they are uploaded"
        for segment in list(stream.ledger.view)[:2]:
            assert stream.tiers.retire(segment.segment_id)
        assert len(segments & set(waiting(store))) == 2
        assert segments <= world.objects("e/")
        assert store.archive is not None
        store.archive.wait(10)
        with world.restored(at_ms) as copy, copy.manifest.read() as txn:
            assert {row.suffix for _, row in txn.scan(t.WAL_CATALOG)} >= segments


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_an_owner_that_is_killed_anywhere_is_followed_by_one_that_ends_the_round(world: World, point: str) -> None:
    with world.open() as store:
        for hour in range(3):
            write(store, hour)
            new_base(store)
            world.clock.advance(HOUR)
            store.worker.drain()
        new_base(store)  # behind what was retired: it can go when this base is older than the window
        assert waiting(store)
        world.clock.advance(3 * HOUR)
    child = (
        "import sys; from pathlib import Path; from tests.archive.test_window import World\n"
        "world = World(Path(sys.argv[1])); world.clock.jump(float(sys.argv[2]))\n"
        "world.open().maintain()"
    )
    seconds = (world.clock.now_ms() - ManualClock().now_ms()) / 1000
    killed = run_program(
        ["-c", child, str(world.path), str(seconds)],
        env={**os.environ, "QUIRE_FAILPOINTS": f"{point}=kill"},
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL
    assert value_of(world.restored()) == 2
    with world.open() as store:
        store.maintain()
        listing = list_archive(store.objects, store.info().store_id)
        oldest = Line(store.objects, listing).oldest()
        assert oldest is not None
        assert min(listing.epochs[1].logs) == oldest.base.first_log
        assert not any(since <= oldest.at_ms - 60_000 for since in ages(store))


def ages(store: Store) -> list[int]:
    with store.manifest.read() as txn:
        return [row.since_ms for _, row in retired_objects(txn)]


def test_a_sweep_leaves_retired_objects_alone(world: World) -> None:
    with world.open() as store:
        write(store, 1)
        write(store, 2)
        world.clock.advance(HOUR)
        store.maintain()
        names = waiting(store)
        assert names
        swept = store.heavy.sweep(delete=True, grace_seconds=-10 * HOUR)
        assert not {orphan["object"] for orphan in swept.result["orphans"]} & set(names)
        assert set(names) <= world.objects("e/")


def test_after_a_takeover_the_former_epoch_is_trimmed_and_files_that_are_read_stay(world: World) -> None:
    with world.open() as store:
        kv = store.kv("ticks", create=True)
        for number in range(300):
            kv.put(b"%d" % number, os.urandom(100))
        kv.flush()
        write(store, 1)
        new_base(store)
    target = str(world.path / "successor")
    world.clock.advance(60)
    restore(world.bucket, target, takeover=True, clock=world.clock)
    settings = StoreSettings(
        object_store=world.bucket,
        archive=ArchiveSettings(mode="async", interval_seconds=0.02, base_seconds=0.001, retain_seconds=HOUR),
        maintenance=MaintenanceSettings(enabled=False),
    )
    with opening.open(target, settings=settings, clock=world.clock) as store:
        write(store, 2)
        new_base(store)
        store.maintain()
        listing = list_archive(store.objects, store.info().store_id)
        assert listing.epochs[1].logs, "the window reaches into the former epoch"
        world.clock.advance(2 * HOUR)
        write(store, 3)
        new_base(store)
        world.clock.advance(2 * HOUR)
        store.maintain()
        listing = list_archive(store.objects, store.info().store_id)
        assert len(listing.epochs[1].logs) == 1, "the seal"
        assert not listing.epochs[1].parts
        assert listing.epochs[1].files, "its tables are read from there"
        assert set(listing.epochs[1].files) & world.remote_files()


class Suspended(Gate):
    """Holds an owner between the question whether the store is still its own and the request that puts a log object."""

    def put(self, key: str, *arguments: Any, **options: Any) -> Any:
        self.is_waiting.set()
        assert self.held.wait(60)
        store = self._objects()
        return (path_store(store) if "/log/" in key else store).put(key, *arguments, **options)  # type: ignore[union-attr]


def test_objects_that_are_deleted_without_being_retired_are_missed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above would see if an engine deleted what the store no longer needs, and an archived moment does."""
    monkeypatch.setattr(Collector, "delete", Collector.delete_now)
    with world.open() as store:
        moments = grown(world, store, 4)
    missed = 0
    for moment, _ in moments:
        try:
            value_of(world.restored(moment))
        except QuireError:
            missed += 1
    assert missed
    problems = audit_bucket(world.bucket).problems
    assert problems, "an audit finds it, too"
    world.lost = {row["artifact"] for row in problems}


def test_an_owner_that_was_suspended_for_longer_than_the_window_wakes(world: World) -> None:
    """Its successor has trimmed its log and deleted what it had retired; it puts and deletes nothing any more."""
    owner = world.open()
    grown(world, owner, 3)
    assert waiting(owner)
    assert owner.archive is not None
    gate = Suspended(owner.archive)
    gate.held.clear()
    gate.is_waiting.clear()
    owner.kv("ticks").put(b"late", b"in its hands")
    assert gate.is_waiting.wait(30)
    target = str(world.path / "successor")
    restore(world.bucket, target, takeover=True, clock=world.clock)
    bucket, store_id = open_store(world.bucket), owner.info().store_id
    sealed = header_of(bucket, store_id, Position(1, max(list_archive(bucket, store_id).epochs[1].logs)))
    assert _put_seal(bucket, store_id, _ahead_of(sealed, 3)), "as a takeover does that has lost a race with the owner"
    settings = StoreSettings(
        object_store=world.bucket,
        archive=ArchiveSettings(mode="async", interval_seconds=0.02, base_seconds=0.001, retain_seconds=HOUR),
        maintenance=MaintenanceSettings(enabled=False),
    )
    with opening.open(target, settings=settings, clock=world.clock) as successor:
        moments = grown(world, successor, 5)[-1:]
        assert successor.archive is not None
        successor.archive.wait(30)
        listing = list_archive(successor.objects, successor.info().store_id)
        assert not listing.epochs[1].parts, "the window has left the former epoch"
        assert len(listing.epochs[1].logs) == 2, "the seals"
        assert reach(successor.objects, successor.info().store_id).abandoned == ()
        before = world.objects("e/00000001/") | world.objects("archive/00000001/")
        gate.held.set()
        with pytest.raises(StoreFenced):
            owner.archive.wait(30)
        with suppress(QuireError):
            owner.maintain()
        with suppress(QuireError):
            owner.close()
        assert world.objects("e/00000001/") | world.objects("archive/00000001/") == before
        successor.kv("ticks").put(b"and", b"on")
        successor.archive.wait(30)
    for moment, value in [*moments, (world.clock.now_ms(), 4)]:
        assert value_of(world.restored(moment)) == value
    with world.restored() as copy:
        assert copy.kv("ticks").get(b"late") is None


@pytest.fixture(autouse=True)
def sound(world: World) -> Iterator[None]:
    """Every store is sound at the end, and so is its archive."""
    yield
    if os.path.isdir(world.path / "store"):
        with quire.open(str(world.path / "store"), "r") as store, store.manifest.read():
            assert not store.manifest.check()
        audit = audit_bucket(world.bucket)
        assert ({row["artifact"] for row in audit.problems} - world.lost, audit.orphans) == (set(), [])


def test_settings_are_those_of_the_page() -> None:
    assert msgspec.structs.asdict(ArchiveSettings())["retain_seconds"] == 86_400.0
