"""Upkeep of the feed: what is reported, what is trimmed, and what an owner corrects when it opens the manifest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import quire
from quire.core.errors import CursorLost, ManifestDamaged, OutOfRange, QuireError, TimedOut
from quire.core.settings import FeedSettings, MaintenanceSettings, StoreSettings
from quire.manifest import feed as feed_module
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.ops.cursors import TRIM_ROWS, AcknowledgeChanges, LoseCursor, TrimChanges
from quire.manifest.overlay import OLDEST_SEQUENCE
from quire.manifest.reads import ReadTxn
from quire.manifest.records import CursorState, MetaRecord
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean
from tests.manifest.helpers import chunk, commit, eventually, finish, held, python, register

Event = tuple[str, dict[str, object]]

EXTRA_ROWS = 300
"""How many rows more than one operation trims."""


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The events that the feed reports."""
    reported: list[Event] = []
    monkeypatch.setattr(feed_module, "emit", lambda _, event, **fields: reported.append((event, fields)))
    return reported


@pytest.fixture
def owner(path: str) -> Iterator[Callable[[], ManifestStore]]:
    """Opens the manifest again at each call, as successive owners do."""
    opened: list[ManifestStore] = []

    def reopen() -> ManifestStore:
        for manifest in opened:
            manifest.close()
        opened.append(ManifestStore.open(path))
        return opened[-1]

    yield reopen
    for manifest in opened:
        manifest.close()


def fill(manifest: ManifestStore, changes: int) -> None:
    """Add that many changes."""
    first = manifest.feed.head()
    if not first:
        commit(manifest, register(1))
    for guard in [manifest.submit([chunk(n)]) for n in range(max(first, 1), first + changes)]:
        guard.result()


def rows(manifest: ManifestStore) -> int:
    with manifest.read() as txn:
        return txn.count(CHANGE_LOG)


def becomes_empty(manifest: ManifestStore) -> bool:
    return eventually(lambda: rows(manifest) == 0)


def set_oldest(manifest: ManifestStore, sequence: int) -> None:
    """Set the beginning of the log regardless of cursors, as an older version or manual editing may have done."""
    with manifest.env.begin_write() as txn:
        row = t.META.codec.encode(MetaRecord(number=sequence))
        txn.put(OLDEST_SEQUENCE, row, db=manifest.env.handles[t.META.name])


# ── lag ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_lag_of_every_live_cursor_is_reported(manifest: ManifestStore) -> None:
    assert manifest.feed.lag() == {}
    fill(manifest, 10)
    nameless = manifest.feed.register(4).cursor_id
    manifest.feed.register(name="fast")
    manifest.feed.register(name="dead", max_lag=5)
    manifest.feed.acknowledge("fast", 9)
    manifest.feed.maintain()
    assert manifest.feed.lag() == {nameless: 6, "fast": 1}, "a lost cursor does not hold the log"
    assert max(manifest.feed.lag().values()) == 6


def test_a_lagging_cursor_is_reported_once_each_time_it_falls_behind(
    manifest: ManifestStore, events: list[Event]
) -> None:
    feed = manifest.feed
    fill(manifest, 10)
    feed.register(name="slow")
    feed.register(9, name="fast")
    for _ in range(3):
        feed.maintain(lag_reported=5)
    assert [(event, fields["cursor"], fields["lag"]) for event, fields in events] == [
        ("feed.cursor_lagging", "slow", 10)
    ]
    assert "ttl_seconds" in str(events[0][1]["hint"])
    feed.acknowledge("slow", 8)
    feed.maintain(lag_reported=5)
    fill(manifest, 10)
    for _ in range(2):
        feed.maintain(lag_reported=5)
    assert sorted((fields["cursor"], fields["lag"]) for _, fields in events[1:]) == [("fast", 11), ("slow", 12)]


def test_nothing_is_reported_below_the_usual_threshold(manifest: ManifestStore, events: list[Event]) -> None:
    fill(manifest, 50)
    manifest.feed.register(name="slow")
    manifest.feed.maintain()
    assert not events
    assert feed_module.LAG_REPORTED == 100_000


# ── start-up ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_tail_that_one_owner_left_is_trimmed_by_the_next(owner: Callable[[], ManifestStore]) -> None:
    manifest = owner()
    fill(manifest, TRIM_ROWS + EXTRA_ROWS)
    cursor = manifest.feed.register(name="app").cursor_id
    commit(
        manifest, AcknowledgeChanges(cursor, TRIM_ROWS + EXTRA_ROWS)
    )  # as `acknowledge` does, if the owner dies before it trims the rest
    assert rows(manifest) == EXTRA_ROWS
    manifest = owner()
    assert rows(manifest) == EXTRA_ROWS, "the feed has not been used yet"
    assert manifest.feed.head() == TRIM_ROWS + EXTRA_ROWS
    assert becomes_empty(manifest)
    assert not manifest.feed.tail_rows()
    assert_clean(manifest, leaks=True)


def test_an_acknowledgement_that_is_rolled_back_trims_nothing(manifest: ManifestStore) -> None:
    """The batch is rejected after its first operation has raised the oldest sequence; another batch commits with it."""
    fill(manifest, 40)
    cursor = manifest.feed.register(name="app").cursor_id
    rejected = manifest.submit([AcknowledgeChanges(cursor, 30), AcknowledgeChanges(cursor, 10**6)])
    manifest.submit([AcknowledgeChanges(cursor, 10)]).result()
    with pytest.raises(OutOfRange):
        rejected.result()
    assert manifest.feed.cursor(cursor).acked_sequence == 10
    assert manifest.feed.fetch(cursor).changes[0].sequence == 11
    assert rows(manifest) == 30
    assert_clean(manifest, leaks=True)


def test_only_the_slowest_cursor_moves_the_beginning_of_the_log(manifest: ManifestStore) -> None:
    fill(manifest, 40)
    slow, fast = (manifest.feed.register(name=name).cursor_id for name in ("slow", "fast"))
    for position in (10, 20, 30):
        manifest.feed.acknowledge(fast, position)
    assert rows(manifest) == 40
    manifest.feed.acknowledge(slow, 25)
    assert rows(manifest) == 15
    manifest.feed.acknowledge(slow, 35)
    assert rows(manifest) == 10
    assert_clean(manifest, leaks=True)


def test_maintain_trims_a_tail_too(owner: Callable[[], ManifestStore]) -> None:
    manifest = owner()
    fill(manifest, TRIM_ROWS + EXTRA_ROWS)
    feed = manifest.feed
    commit(manifest, AcknowledgeChanges(feed.register(name="app").cursor_id, TRIM_ROWS + EXTRA_ROWS))
    feed.maintain()
    assert becomes_empty(manifest)


def test_a_reader_does_not_trim(manifest: ManifestStore) -> None:
    fill(manifest, TRIM_ROWS + EXTRA_ROWS)
    commit(manifest, AcknowledgeChanges(manifest.feed.register(name="app").cursor_id, TRIM_ROWS + EXTRA_ROWS))
    code = """
        import sys
        from quire.manifest.store import ManifestStore
        with ManifestStore.open(sys.argv[1], mode="r") as manifest:
            print(manifest.feed.tail_rows() > 0, len(manifest.feed.fetch("app").changes))
    """
    assert finish(python(code, manifest.env.path)) == "True 0\n"
    assert rows(manifest) == EXTRA_ROWS


def test_closing_while_a_tail_is_trimmed_raises_nothing_and_the_next_owner_continues(
    owner: Callable[[], ManifestStore], events: list[Event]
) -> None:
    manifest = owner()
    fill(manifest, 2 * TRIM_ROWS)
    cursor = manifest.feed.register(name="app").cursor_id
    manifest.feed.acknowledge(cursor, 2 * TRIM_ROWS)
    manifest.close()
    assert {event for event, _ in events} <= {"feed.trim_stopped"}
    manifest = owner()
    manifest.feed.maintain()
    assert becomes_empty(manifest)
    assert eventually(lambda: not any(thread.name == "quire-feed-trimmer" for thread in threading.enumerate()))


def test_a_tail_that_grows_while_it_is_trimmed_is_trimmed_completely(manifest: ManifestStore) -> None:
    """The trimmer must not stop at the end that it read when it started."""
    fill(manifest, 2 * TRIM_ROWS)
    cursor = manifest.feed.register().cursor_id
    for upto in range(TRIM_ROWS // 4, 2 * TRIM_ROWS + 1, TRIM_ROWS // 4):
        manifest.feed.acknowledge(cursor, upto)
    assert becomes_empty(manifest)


def test_a_trimmer_that_could_not_be_started_is_started_later(
    manifest: ManifestStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a trimmer whose thread could not be started once counted as running: the log grew until the next open."""
    fill(manifest, 2 * TRIM_ROWS)
    commit(manifest, AcknowledgeChanges(manifest.feed.register().cursor_id, 2 * TRIM_ROWS))

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            manifest.feed.trim_behind()
    manifest.feed.maintain()
    assert becomes_empty(manifest)


def test_a_trimmer_takes_one_step_at_a_time(manifest: ManifestStore) -> None:
    """A writer waits for one step at most: the next one is submitted when the last is durable."""
    fill(manifest, 2 * TRIM_ROWS)
    commit(manifest, AcknowledgeChanges(manifest.feed.register().cursor_id, 2 * TRIM_ROWS))
    with held(manifest):
        manifest.feed.trim_behind()
        between = manifest.submit([register(2, "between")])
    assert between.result(30).sequence == 2 * TRIM_ROWS + 1
    assert eventually(lambda: rows(manifest) == 1)


@pytest.mark.parametrize("oldest", [3, 8, 11])
def test_a_cursor_below_the_oldest_change_never_skips_silently(path: str, oldest: int) -> None:
    """Start-up clamps or rejects (the change-feed document); here the cursor raises an error wherever it is used."""
    with ManifestStore.open(path) as manifest:
        fill(manifest, 10)
        manifest.feed.register(name="app")
        manifest.feed.acknowledge("app", 1)
        set_oldest(manifest, oldest)
        for use in (lambda: manifest.feed.fetch("app"), lambda: next(manifest.feed.follow("app"))):
            with pytest.raises(CursorLost, match=f"2 to {oldest - 1} are no longer kept"):
                use()
    with ManifestStore.open(path) as manifest, pytest.raises(CursorLost, match="no longer kept"):
        manifest.feed.fetch("app")


def test_maintain_marks_such_a_cursor_as_lost_with_a_reason(path: str, events: list[Event]) -> None:
    with ManifestStore.open(path) as manifest:
        fill(manifest, 10)
        manifest.feed.register(name="app")
        set_oldest(manifest, 5)
        manifest.feed.maintain()
        cursor = manifest.feed.cursor("app")
        assert (cursor.state, cursor.lost_reason) == (CursorState.LOST, "the log begins with 5, it had read up to 0")
        assert [event for event, _ in events] == ["feed.cursor_lost"]
        with pytest.raises(CursorLost, match="is lost"):
            manifest.feed.fetch("app")
    with ManifestStore.open(path) as manifest:
        assert_clean(manifest, leaks=True)


def test_a_gap_in_the_log_is_reported_as_damage(manifest: ManifestStore) -> None:
    fill(manifest, 10)
    manifest.feed.register(name="app")
    log = manifest.env.handles[CHANGE_LOG.name]
    removed: dict[bytes, Any] = {}
    with manifest.env.begin_write() as txn:
        for sequence in (4, 9, 10):
            key = CHANGE_LOG.key.pack(sequence)
            removed[key] = txn.get(key, db=log)
            txn.delete(key, db=log)
    with pytest.raises(ManifestDamaged, match="gap"):
        manifest.feed.fetch("app")
    assert len(manifest.feed.fetch("app", 3).changes) == 3, "everything before the gap is there"
    with pytest.raises(ManifestDamaged, match="gap"):
        manifest.feed.fetch("app", after=3)
    with manifest.env.begin_write() as txn:  # the fixture checks the manifest
        for key, value in removed.items():
            txn.put(key, value, db=log)


# ── sequences ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_next_sequence_never_restarts_however_the_log_became_empty(owner: Callable[[], ManifestStore]) -> None:
    """M5: by acknowledgement, by retention, or by both; once, twice, and after every restart."""
    manifest, expected = owner(), 0

    def consumed_by_a_cursor() -> None:
        manifest.feed.acknowledge(manifest.feed.register().cursor_id, expected)
        for cursor in manifest.feed.cursors():
            manifest.feed.drop(cursor.cursor_id)

    def trimmed_by_retention() -> None:
        manifest.feed.settings = FeedSettings(retain_bytes=0)
        manifest.feed.maintain()

    for empty_log in (consumed_by_a_cursor, trimmed_by_retention) * 2:
        fill(manifest, 7)
        expected += 7
        manifest.remember_checked()  # changes after the checked point stay on disk until the next one
        empty_log()
        assert becomes_empty(manifest)
        for _ in range(2):
            manifest = owner()
            assert manifest.feed.head() == expected
            assert manifest.feed.register().acked_sequence == expected
            manifest.feed.drop(manifest.feed.cursors()[0].cursor_id)
        assert manifest.submit([chunk(9_999)]).result().sequence == expected + 1
        expected += 1
    assert_clean(manifest, leaks=True)


# ── retention ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_retention_by_age_finds_the_first_change_that_is_recent_enough(path: str) -> None:
    clock = ManualClock(1_000_000)
    with ManifestStore.open(path, clock=clock) as manifest:
        manifest.feed.settings = FeedSettings(retain_seconds=10)
        for _ in range(30):
            fill(manifest, 3)
            clock.advance(1)
        manifest.feed.maintain()
        with manifest.read() as txn:
            oldest, head = txn.feed_bounds()
            assert (oldest, head) == (61, 90), "ten seconds of three changes each"
        clock.advance(1_000)
        manifest.feed.maintain()
        assert rows(manifest) == 0


def test_the_bytes_of_a_long_log_are_not_summed_every_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ManifestStore.open(path) as manifest:
        manifest.feed.settings = FeedSettings(retain_bytes=20_000)
        fill(manifest, 2_000)
        manifest.feed.maintain()
        assert eventually(lambda: 0 < rows(manifest) < 600)
        scan, scanned = ReadTxn.raw_scan_back, list[str]()

        def record_and_scan(txn: ReadTxn, table: t.Table[Any]) -> Iterator[tuple[bytes, bytes]]:
            scanned.append(table.name)
            return scan(txn, table)

        monkeypatch.setattr(ReadTxn, "raw_scan_back", record_and_scan)
        fill(manifest, 1)
        manifest.feed.maintain()
        assert not scanned
        fill(manifest, 300)
        manifest.feed.maintain()
        assert scanned


def test_a_trim_that_fails_does_not_stop_the_next(manifest: ManifestStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(manifest, 1_300)
    feed = manifest.feed
    commit(manifest, AcknowledgeChanges(feed.register().cursor_id, 1_300))

    def fail(*_: object) -> None:
        raise QuireError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(TrimChanges, "apply", fail)
        feed.maintain()
        assert eventually(lambda: feed._trimmer is None)
    feed.maintain()
    assert becomes_empty(manifest)


def test_the_manifest_file_of_a_long_consumed_feed_stays_small(path: str) -> None:
    """A feed that is consumed as fast as it grows reuses its pages."""
    with ManifestStore.open(path) as manifest:
        cursor = manifest.feed.register().cursor_id
        sizes = []
        for _ in range(8):
            fill(manifest, 500)
            manifest.feed.acknowledge(cursor, manifest.feed.head())
            assert becomes_empty(manifest)
            sizes.append(Path(path).stat().st_size)
        assert sizes[-1] < 2.5 * sizes[2]


# ── start-up ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def set_cursor_fields(manifest: ManifestStore, cursor_id: int, **fields: Any) -> None:
    with manifest.read() as txn:
        row = txn.get(t.CHANGE_CURSORS, cursor_id)
    assert row is not None
    key = t.CHANGE_CURSORS.key.pack(cursor_id)
    with manifest.env.begin_write() as txn:
        txn.put(
            key, t.CHANGE_CURSORS.rows.encode(key, replace(row, **fields)), db=manifest.env.handles["change_cursors"]
        )


def test_a_cursor_beyond_the_head_is_clamped_to_it_when_the_store_is_opened(
    owner: Callable[[], ManifestStore],
) -> None:
    """Hazard: the whole store was rejected."""
    manifest = owner()
    fill(manifest, 4)
    cursor = manifest.feed.register(name="tail").cursor_id
    set_cursor_fields(manifest, cursor, acked_sequence=999)
    manifest = owner()
    info = manifest.feed.cursor("tail")
    assert (info.acked_sequence, info.state) == (4, CursorState.LIVE)
    fill(manifest, 1)
    assert [change.sequence for change in manifest.feed.fetch("tail").changes] == [5]
    assert_clean(manifest, leaks=True)


def test_a_cursor_below_the_log_is_clamped_and_lost_and_continues_when_it_is_resumed(
    owner: Callable[[], ManifestStore],
) -> None:
    """Hazard: the whole store was rejected. Changes that the cursor has missed are never skipped silently."""
    manifest = owner()
    fill(manifest, 9)
    manifest.feed.register(name="tail")
    set_oldest(manifest, 7)
    manifest = owner()
    info = manifest.feed.cursor("tail")
    assert (info.acked_sequence, info.state) == (6, CursorState.LOST)
    with pytest.raises(CursorLost, match="the changes 1 to 6 are no longer kept") as caught:
        manifest.feed.fetch("tail")
    assert "quire feed resume" in caught.value.hint
    assert manifest.feed.resume("tail").state is CursorState.LIVE
    assert [change.sequence for change in manifest.feed.fetch("tail").changes] == [7, 8, 9]
    assert_clean(manifest, leaks=True)


def test_resuming_a_lost_cursor_misses_only_trimmed_changes(owner: Callable[[], ManifestStore]) -> None:
    manifest = owner()
    fill(manifest, 6)
    manifest.feed.register(name="slow")
    manifest.feed.acknowledge("slow", 3)
    commit(manifest, LoseCursor(1, "too slow"))
    manifest.feed.resume("slow")
    assert [change.sequence for change in manifest.feed.fetch("slow").changes] == [4, 5, 6]
    assert manifest.feed.resume("slow").acked_sequence == 3  # no effect on a live cursor


def test_a_store_without_maintenance_prunes_its_feed_when_it_is_opened(tmp_path: Path) -> None:
    """Hazard: only upkeep applied `feed.retain_seconds`."""
    clock = ManualClock()
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False), feed=FeedSettings(retain_seconds=60))
    with quire.open(tmp_path / "s", settings=settings, clock=clock) as store:
        commit(store.manifest, register(1))
        assert rows(store.manifest) > 0
    clock.advance(3600)
    with quire.open(tmp_path / "s", settings=settings, clock=clock) as store:
        assert becomes_empty(store.manifest)
        assert store.manifest.feed.head() > 0


def test_a_read_only_process_polls_rarely_while_nothing_is_written(path: str) -> None:
    """Hazard: it polled fifty times a second."""
    ManifestStore.open(path).close()
    with ManifestStore.open(path, mode="r") as manifest:
        polls: list[int] = []
        feed = manifest.feed
        head = feed.head
        feed.head = lambda: polls.append(1) or head()  # type: ignore[func-returns-value,method-assign]
        with pytest.raises(TimedOut):
            feed.wait(0, 0.5)
    assert len(polls) <= 3


def test_a_read_only_process_is_woken_by_a_write(path: str) -> None:
    manifest = ManifestStore.open(path)
    child = python(
        """
        import sys
        from quire.manifest import feed
        from quire.manifest.store import ManifestStore
        feed.LOOK_SECONDS = 600.0  # so that only the write can wake it
        with ManifestStore.open(sys.argv[1], mode="r") as manifest:
            print("waiting", flush=True)
            print(manifest.feed.wait(0, 600), flush=True)
        """,
        path,
    )
    with manifest, child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "waiting"
        commit(manifest, register(1))
        assert int(child.stdout.readline()) == 1
