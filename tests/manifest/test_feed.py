"""The change feed: every change, in order, at least once, and no change is kept for ever."""

from __future__ import annotations

import subprocess
import textwrap
import threading
from contextlib import suppress
from itertools import islice

import pytest

from quire.core.errors import CursorLost, InvalidInput, NameTaken, OutOfRange, TimedOut, UnknownCursor
from quire.core.settings import FeedSettings
from quire.manifest.change import CHANGE_LOG
from quire.manifest.feed import ChangeFeed, Start
from quire.manifest.records import CursorState
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean
from tests.manifest.helpers import chunk, commit, eventually, register
from tests.programs import Program


def fill(manifest: ManifestStore, changes: int) -> None:
    """Add that many change records."""
    commit(manifest, register(1))
    for guard in [manifest.submit([chunk(n)]) for n in range(1, changes)]:
        guard.result()


def sequences(feed: ChangeFeed, cursor: int | str, limit: int = 256) -> list[int]:
    return [change.sequence for change in feed.fetch(cursor, limit).changes]


def rows(manifest: ManifestStore) -> int:
    with manifest.read() as txn:
        return txn.count(CHANGE_LOG)


# ── registering ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_cursor_begins_at_the_requested_position(manifest: ManifestStore) -> None:
    fill(manifest, 10)
    feed = manifest.feed
    assert sequences(feed, feed.register(Start.OLDEST).cursor_id) == list(range(1, 11))
    assert sequences(feed, feed.register(Start.LATEST).cursor_id) == []
    assert sequences(feed, feed.register(7).cursor_id) == [8, 9, 10]
    assert feed.register(99).acked_sequence == 10, "clamped to the head"


def test_a_name_finds_its_cursor_again_after_a_restart(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        fill(manifest, 5)
        created = manifest.feed.register(name="app")
        manifest.feed.acknowledge("app", 3)
        with pytest.raises(NameTaken):
            manifest.feed.register(name="app")
    with ManifestStore.open(path) as manifest:
        cursor = manifest.feed.cursor("app")
        assert (cursor.cursor_id, cursor.acked_sequence, cursor.next_sequence, cursor.lag) == (
            created.cursor_id,
            3,
            4,
            2,
        )
        assert sequences(manifest.feed, "app") == [4, 5]


@pytest.mark.parametrize("cursor", [0, 99, "nobody", ""])
def test_an_unknown_cursor_is_rejected(manifest: ManifestStore, cursor: int | str) -> None:
    for call in (manifest.feed.fetch, manifest.feed.cursor, manifest.feed.drop):
        with pytest.raises(UnknownCursor):
            call(cursor)
    with pytest.raises(UnknownCursor):
        manifest.feed.acknowledge(cursor, 0)


def test_invalid_arguments_are_rejected(manifest: ManifestStore) -> None:
    cursor = manifest.feed.register()
    with pytest.raises(InvalidInput):
        manifest.feed.fetch(cursor.cursor_id, 0)
    with pytest.raises(InvalidInput):
        manifest.feed.register(-1)


# ── fetching and acknowledging ────────────────────────────────────────────────────────────────────────────────────────
def test_pages_are_consecutive_and_show_when_they_reach_the_head(manifest: ManifestStore) -> None:
    fill(manifest, 10)
    cursor = manifest.feed.register().cursor_id
    page = manifest.feed.fetch(cursor, 4)
    assert ([c.sequence for c in page.changes], page.next_sequence, page.at_head) == ([1, 2, 3, 4], 5, False)
    page = manifest.feed.fetch(cursor, 10, after=4)
    assert ([c.sequence for c in page.changes], page.next_sequence, page.at_head) == ([5, 6, 7, 8, 9, 10], 11, True)
    assert sequences(manifest.feed, cursor, 2) == [1, 2], "nothing was acknowledged, so the changes are delivered again"


def test_an_acknowledgement_never_moves_back_nor_beyond_the_head(manifest: ManifestStore) -> None:
    fill(manifest, 5)
    cursor = manifest.feed.register().cursor_id
    manifest.feed.acknowledge(cursor, 4)
    manifest.feed.acknowledge(cursor, 2)
    assert manifest.feed.cursor(cursor).acked_sequence == 4
    with pytest.raises(OutOfRange):
        manifest.feed.acknowledge(cursor, 6)


def test_changes_acknowledged_by_every_cursor_are_trimmed_in_the_same_transaction(manifest: ManifestStore) -> None:
    fill(manifest, 10)
    first, second = manifest.feed.register().cursor_id, manifest.feed.register().cursor_id
    manifest.feed.acknowledge(first, 8)
    assert rows(manifest) == 10, "the second cursor has acknowledged nothing yet"
    manifest.feed.acknowledge(second, 5)
    assert (rows(manifest), manifest.feed.cursor(first).oldest_sequence) == (5, 6)
    manifest.feed.drop(second)
    assert rows(manifest) == 2


def test_a_long_tail_is_trimmed_in_bounded_commits_and_writers_interleave(manifest: ManifestStore) -> None:
    fill(manifest, 6_000)
    cursor = manifest.feed.register().cursor_id
    manifest.feed.acknowledge(cursor, 6_000)
    commit(manifest, register(2, "between"))
    assert eventually(lambda: not manifest.feed.tail_rows())
    assert rows(manifest) == 1


def test_sequences_continue_when_the_log_is_empty(path: str) -> None:
    """M5: the mark is never lost, not even when everything was consumed."""
    with ManifestStore.open(path) as manifest:
        fill(manifest, 7)
        manifest.feed.acknowledge(manifest.feed.register().cursor_id, 7)
        assert rows(manifest) == 0
    with ManifestStore.open(path) as manifest:
        assert manifest.feed.head() == 7
        assert manifest.submit([register(2)]).result().sequence == 8
        assert_clean(manifest, leaks=True)


# ── waiting and following ─────────────────────────────────────────────────────────────────────────────────────────────
def test_a_waiter_wakes_with_the_next_change(manifest: ManifestStore) -> None:
    heads: list[int] = []
    waiter = threading.Thread(target=lambda: heads.append(manifest.feed.wait(0, 30)))
    waiter.start()
    commit(manifest, register(1))
    waiter.join(30)
    assert heads == [1]
    with pytest.raises(TimedOut):
        manifest.feed.wait(1, 0.01)


def test_following_resumes_where_it_stopped_and_repeats_a_change_that_failed(manifest: ManifestStore) -> None:
    fill(manifest, 6)
    feed = manifest.feed
    assert [change.sequence for change in islice(feed.follow("app", limit=2), 3)] == [1, 2, 3]
    assert feed.cursor("app").acked_sequence == 2, "the loop ended before the body had finished the third"
    with suppress(ZeroDivisionError):
        for change in feed.follow("app", timeout=0):
            1 // (5 - change.sequence)
    assert [change.sequence for change in feed.follow("app", timeout=0)] == [5, 6]
    assert feed.cursor("app").acked_sequence == 6


def test_a_follower_gets_changes_as_they_are_committed(manifest: ManifestStore) -> None:
    received: list[int] = []

    def follow() -> None:
        for change in manifest.feed.follow("app", timeout=5):
            received.append(change.sequence)
            if change.sequence == 20:
                return

    follower = threading.Thread(target=follow)
    follower.start()
    fill(manifest, 20)
    follower.join(30)
    assert received == list(range(1, 21))


def test_a_read_only_process_fetches_and_waits_but_cannot_acknowledge(manifest: ManifestStore, path: str) -> None:
    fill(manifest, 3)
    manifest.feed.register(name="app")
    program = f"""
        from quire.manifest.store import ManifestStore
        from quire.core.errors import ReadOnly
        with ManifestStore.open({manifest.env.path!r}, mode="r") as manifest:
            print(len(manifest.feed.fetch("app").changes), flush=True)
            print(manifest.feed.wait(3, 30), flush=True)
            try:
                manifest.feed.acknowledge("app", 1)
            except ReadOnly:
                print("read-only")
    """
    command = ["-c", textwrap.dedent(program)]
    with Program(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "3\n"
        commit(manifest, chunk(77))
        assert child.stdout.read() == "4\nread-only\n"
    assert child.returncode == 0


# ── policies and retention ────────────────────────────────────────────────────────────────────────────────────────────
def test_a_dead_consumer_does_not_pin_the_log_for_ever(path: str) -> None:
    clock = ManualClock(1_000_000)
    with ManifestStore.open(path, clock=clock) as manifest:
        fill(manifest, 5)
        feed = manifest.feed
        feed.register(name="patient")
        feed.register(name="mortal", ttl_seconds=60)
        feed.register(name="slow", max_lag=3)
        clock.advance(61)
        feed.maintain()
        assert [(c.name, c.state) for c in feed.cursors()] == [
            ("patient", CursorState.LIVE),
            ("mortal", CursorState.LOST),
            ("slow", CursorState.LOST),
        ]
        for use in (feed.fetch, lambda cursor: feed.acknowledge(cursor, 1)):
            with pytest.raises(CursorLost):
                use("mortal")
        assert rows(manifest) == 5, "the patient cursor still needs them"
        feed.acknowledge("patient", 5)
        assert rows(manifest) == 0, "lost cursors do not hold the log"
        feed.drop("mortal")
        assert_clean(manifest, leaks=True)


def test_without_cursors_the_log_is_kept_for_a_while(path: str) -> None:
    clock = ManualClock(1_000_000)
    with ManifestStore.open(path, clock=clock) as manifest:
        manifest.feed.settings = FeedSettings(retain_seconds=100)
        fill(manifest, 5)
        clock.advance(60)
        commit(manifest, chunk(50))
        manifest.feed.maintain()
        assert rows(manifest) == 6
        clock.advance(60)
        manifest.feed.maintain()
        assert rows(manifest) == 1, "the first five are too old"


def test_without_cursors_the_log_is_kept_within_its_bytes(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        manifest.feed.settings = FeedSettings(retain_bytes=500)
        fill(manifest, 50)
        manifest.feed.maintain()
        assert 0 < rows(manifest) < 15
        assert_clean(manifest, leaks=True)


def test_retention_never_removes_changes_that_a_cursor_needs(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        manifest.feed.settings = FeedSettings(retain_bytes=0)
        fill(manifest, 10)
        manifest.feed.register(4, name="app")
        manifest.feed.maintain()
        assert sequences(manifest.feed, "app") == [5, 6, 7, 8, 9, 10]
