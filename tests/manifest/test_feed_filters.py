"""Filtered subscriptions: only what concerns some databases or tables; what is skipped counts as seen."""

from __future__ import annotations

import threading
from itertools import islice

import pytest

from quire.core.errors import CursorLost, InvalidInput, OutOfRange, UnknownDatabase
from quire.manifest import feed as feed_pages
from quire.manifest.change import ChangeRecord
from quire.manifest.ops.databases import DropDb, RenameDb
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import chunk, does, eventually, register


@pytest.fixture
def mixed(manifest: ManifestStore) -> ManifestStore:
    """Changes 1 to 3 make three databases; then come chunks: of 1, 2, 1, 2, … and a batch of both as change 10."""
    for db_id, name in ((1, "one"), (2, "two"), (3, "three")):
        does(manifest, register(db_id, name))
    for number in range(6):
        does(manifest, chunk(number, db_id=1 + number % 2))
    does(manifest, chunk(100), chunk(101, db_id=2), chunk(102))
    return manifest


def numbers(changes: tuple[ChangeRecord, ...] | list[ChangeRecord]) -> list[tuple[int, int]]:
    """(sequence, operations) of each."""
    return [(change.sequence, len(change.operations)) for change in changes]


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_page_has_what_concerns_the_database_and_counts_the_rest(mixed: ManifestStore) -> None:
    cursor = mixed.feed.register().cursor_id
    page = mixed.feed.fetch(cursor, databases=["two"])
    assert numbers(page.changes) == [(2, 1), (5, 1), (7, 1), (9, 1), (10, 1)]
    assert (page.next_sequence, page.at_head) == (11, True)
    whole = mixed.feed.fetch(cursor).changes[9]
    assert page.changes[-1].generation_updates == whole.generation_updates
    assert page.changes[-1].committed_at_ms == whole.committed_at_ms


def test_pages_are_limited_by_what_passes_and_follow_each_other(mixed: ManifestStore) -> None:
    cursor = mixed.feed.register().cursor_id
    first = mixed.feed.fetch(cursor, 2, databases=[2])
    assert (numbers(first.changes), first.next_sequence, first.at_head) == ([(2, 1), (5, 1)], 6, False)
    second = mixed.feed.fetch(cursor, 9, after=first.next_sequence - 1, databases=[2])
    assert numbers(second.changes) == [(7, 1), (9, 1), (10, 1)]


def test_tables_and_databases_narrow_each_other(mixed: ManifestStore) -> None:
    cursor = mixed.feed.register().cursor_id
    assert numbers(mixed.feed.fetch(cursor, tables=["db"]).changes) == [(1, 1), (2, 1), (3, 1)]
    assert numbers(mixed.feed.fetch(cursor, tables=["db_names", "job_queue"]).changes) == [(1, 1), (2, 1), (3, 1)]
    both = mixed.feed.fetch(cursor, databases=["one"], tables=["chunk_catalog"])
    assert numbers(both.changes) == [(4, 1), (6, 1), (8, 1), (10, 2)]
    nothing = mixed.feed.fetch(cursor, databases=["three"], tables=["chunk_catalog"])
    assert (nothing.changes, nothing.next_sequence, nothing.at_head) == ((), 11, True)


def test_a_long_stretch_without_a_match_is_several_pages(mixed: ManifestStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction is for a moment (M4), however rare a match is."""
    monkeypatch.setattr(feed_pages, "SCAN_ROWS_MAX", 4)
    cursor, position, seen, pages = mixed.feed.register().cursor_id, 0, [], 0
    while True:
        page = mixed.feed.fetch(cursor, after=position, databases=["three"])
        seen += numbers(page.changes)
        pages, position = pages + 1, page.next_sequence - 1
        if page.at_head:
            break
    assert (seen, pages) == ([(3, 1)], 3)


def test_a_page_is_bounded_in_bytes(mixed: ManifestStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_pages, "PAGE_BYTES", 100)
    cursor = mixed.feed.register().cursor_id
    page = mixed.feed.fetch(cursor)
    assert 0 < len(page.changes) < 5
    assert not page.at_head
    assert [change.sequence for change in mixed.feed.follow("app", timeout=0)] == list(range(1, 11))


@pytest.mark.parametrize("wanted", [{"databases": ["nobody"]}, {"databases": [99]}])
def test_an_unknown_database_is_refused_and_nothing_registered(
    mixed: ManifestStore, wanted: dict[str, list[str]]
) -> None:
    with pytest.raises(UnknownDatabase):
        mixed.feed.follow("app", **wanted)  # type: ignore[arg-type]  # one of them at a time
    assert mixed.feed.cursors() == []


@pytest.mark.parametrize("table", ["nothing", "idempotency"])
def test_a_table_that_never_shows_is_refused_and_nothing_registered(mixed: ManifestStore, table: str) -> None:
    with pytest.raises(InvalidInput, match="table"):
        mixed.feed.follow("app", tables=[table])
    assert mixed.feed.cursors() == []


# ── following ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_filtered_follower_acknowledges_what_it_skips(mixed: ManifestStore) -> None:
    feed = mixed.feed
    assert numbers(list(feed.follow("app", databases=["two"], timeout=0))) == [(2, 1), (5, 1), (7, 1), (9, 1), (10, 1)]
    assert feed.cursor("app").lag == 0
    does(mixed, chunk(200), chunk(201))
    assert list(feed.follow("app", databases=["two"], timeout=0)) == []
    assert feed.cursor("app").lag == 0, "nothing passed, and yet it is further"


def test_leaving_the_loop_keeps_what_was_not_finished_for_the_next_time(mixed: ManifestStore) -> None:
    feed = mixed.feed
    assert numbers(list(islice(feed.follow("app", databases=["two"]), 2))) == [(2, 1), (5, 1)]
    assert feed.cursor("app").acked_sequence == 2, "the second was still in the body"
    assert numbers(list(feed.follow("app", databases=["two"], timeout=0)))[0] == (5, 1)


def test_a_name_means_the_database_it_was_at_the_start(mixed: ManifestStore) -> None:
    seen: list[int] = []
    follower = mixed.feed.follow("app", databases=["one"], tables=["chunk_catalog", "db"], timeout=5)
    seen.append(next(follower).sequence)
    does(mixed, RenameDb(1, "uno"))
    does(mixed, RenameDb(2, "one"))
    does(mixed, chunk(300))
    does(mixed, chunk(301, db_id=2))
    does(mixed, DropDb(1))
    seen += [next(follower).sequence for _ in range(7)]
    follower.close()
    assert seen == [1, 4, 6, 8, 10, 11, 13, 15], "the rename of 2, and its chunk, are none of ours"


def test_a_busy_neighbour_does_not_cost_a_commit_per_change(
    mixed: ManifestStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, acknowledged, acknowledge = mixed.feed, list[int](), mixed.feed.acknowledge

    def spy(cursor: int | str, upto: int) -> None:
        acknowledged.append(upto)
        acknowledge(cursor, upto)

    monkeypatch.setattr(feed, "acknowledge", spy)
    stop = threading.Event()

    def follow() -> None:
        for _ in feed.follow("app", databases=["three"]):
            if stop.is_set():
                return

    follower = threading.Thread(target=follow)
    follower.start()
    assert eventually(lambda: bool(acknowledged))
    before = len(acknowledged)
    for number in range(150):
        does(mixed, chunk(400 + number))
    assert len(acknowledged) - before < 75
    assert eventually(lambda: feed.cursor("app").lag == 0), "but they are acknowledged before long"
    stop.set()
    does(mixed, chunk(1, db_id=3))
    follower.join(30)


def test_a_busy_neighbour_does_not_keep_a_follower_from_timing_out(mixed: ManifestStore) -> None:
    stop = threading.Event()

    def produce() -> None:
        number = 1000
        while not stop.is_set():
            number += 1
            does(mixed, chunk(number))

    neighbour = threading.Thread(target=produce)
    neighbour.start()
    try:
        assert numbers(list(mixed.feed.follow("app", databases=["three"], timeout=0.05))) == [(3, 1)]
    finally:
        stop.set()
        neighbour.join(30)


# ── positions that the caller stores ──────────────────────────────────────────────────────────────────────────────────
def test_a_stored_position_goes_before_the_cursors_own(mixed: ManifestStore) -> None:
    feed = mixed.feed
    feed.register(name="holder")
    assert [change.sequence for change in feed.follow("app", after=7, timeout=0)] == [8, 9, 10]
    assert feed.cursor("app").acked_sequence == 10
    again = [change.sequence for change in feed.follow("app", after=4, timeout=0)]
    assert again == [5, 6, 7, 8, 9, 10], "it was restored from a backup, and the log still has it all"
    assert feed.cursor("app").acked_sequence == 10


def test_a_position_that_is_no_longer_kept_is_not_a_silent_gap(mixed: ManifestStore) -> None:
    feed = mixed.feed
    assert len(list(feed.follow("app", timeout=0))) == 10
    for use in (lambda: feed.fetch("app", after=4), lambda: next(feed.follow("app", after=4))):
        with pytest.raises(CursorLost, match="5 to 10 are no longer kept"):
            use()
    with pytest.raises(CursorLost):
        next(feed.follow("another", after=4))
    assert [cursor.name for cursor in feed.cursors()] == ["app"], "whoever was refused has left no cursor"


def test_a_position_beyond_the_head_is_refused(mixed: ManifestStore) -> None:
    """The store came from a backup, its consumer did not: going on quietly would skip what is to come."""
    mixed.feed.register(name="app")
    with pytest.raises(OutOfRange, match="backup"):
        mixed.feed.fetch("app", after=11)
    with pytest.raises(InvalidInput):
        mixed.feed.fetch("app", after=-1)
    assert mixed.feed.fetch("app", after=10).changes == ()
