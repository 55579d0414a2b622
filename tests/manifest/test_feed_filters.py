"""Filtered subscriptions: only changes of some databases or tables are delivered; skipped changes count as seen."""

from __future__ import annotations

import threading
from itertools import islice

import pytest

from quire.core.errors import CursorLost, InvalidInput, OutOfRange, UnknownDatabase
from quire.manifest import feed as feed_pages
from quire.manifest.change import ChangeRecord
from quire.manifest.ops.databases import DropDb, RenameDb
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import chunk, commit, eventually, register


@pytest.fixture
def mixed(manifest: ManifestStore) -> ManifestStore:
    """Changes 1 to 3 register three databases; then come chunks of 1, 2, 1, 2, … and, as change 10, a batch of both."""
    for db_id, name in ((1, "one"), (2, "two"), (3, "three")):
        commit(manifest, register(db_id, name))
    for number in range(6):
        commit(manifest, chunk(number, db_id=1 + number % 2))
    commit(manifest, chunk(100), chunk(101, db_id=2), chunk(102))
    return manifest


def numbers(changes: tuple[ChangeRecord, ...] | list[ChangeRecord]) -> list[tuple[int, int]]:
    """(sequence, number of operations) of each change."""
    return [(change.sequence, len(change.operations)) for change in changes]


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_page_has_the_changes_of_the_database_and_skips_the_rest(mixed: ManifestStore) -> None:
    cursor = mixed.feed.register().cursor_id
    page = mixed.feed.fetch(cursor, databases=["two"])
    assert numbers(page.changes) == [(2, 1), (5, 1), (7, 1), (9, 1), (10, 1)]
    assert (page.next_sequence, page.at_head) == (11, True)
    unfiltered = mixed.feed.fetch(cursor).changes[9]
    assert page.changes[-1].generation_updates == unfiltered.generation_updates
    assert page.changes[-1].committed_at_ms == unfiltered.committed_at_ms


def test_pages_are_limited_by_matching_changes_and_are_consecutive(mixed: ManifestStore) -> None:
    cursor = mixed.feed.register().cursor_id
    first = mixed.feed.fetch(cursor, 2, databases=[2])
    assert (numbers(first.changes), first.next_sequence, first.at_head) == ([(2, 1), (5, 1)], 6, False)
    second = mixed.feed.fetch(cursor, 9, after=first.next_sequence - 1, databases=[2])
    assert numbers(second.changes) == [(7, 1), (9, 1), (10, 1)]


def test_tables_and_databases_are_combined(mixed: ManifestStore) -> None:
    cursor = mixed.feed.register().cursor_id
    assert numbers(mixed.feed.fetch(cursor, tables=["db"]).changes) == [(1, 1), (2, 1), (3, 1)]
    assert numbers(mixed.feed.fetch(cursor, tables=["db_names", "job_queue"]).changes) == [(1, 1), (2, 1), (3, 1)]
    both = mixed.feed.fetch(cursor, databases=["one"], tables=["chunk_catalog"])
    assert numbers(both.changes) == [(4, 1), (6, 1), (8, 1), (10, 2)]
    empty = mixed.feed.fetch(cursor, databases=["three"], tables=["chunk_catalog"])
    assert (empty.changes, empty.next_sequence, empty.at_head) == ((), 11, True)


def test_many_changes_without_a_match_are_several_pages(mixed: ManifestStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read transactions are short (M4), however rare a match is."""
    monkeypatch.setattr(feed_pages, "SCAN_ROWS_MAX", 4)
    cursor, position, matches, pages = mixed.feed.register().cursor_id, 0, [], 0
    while True:
        page = mixed.feed.fetch(cursor, after=position, databases=["three"])
        matches += numbers(page.changes)
        pages, position = pages + 1, page.next_sequence - 1
        if page.at_head:
            break
    assert (matches, pages) == ([(3, 1)], 3)


def test_a_page_is_bounded_in_bytes(mixed: ManifestStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_pages, "PAGE_BYTES", 100)
    cursor = mixed.feed.register().cursor_id
    page = mixed.feed.fetch(cursor)
    assert 0 < len(page.changes) < 5
    assert not page.at_head
    assert [change.sequence for change in mixed.feed.follow("app", timeout=0)] == list(range(1, 11))


@pytest.mark.parametrize("filters", [{"databases": ["nobody"]}, {"databases": [99]}])
def test_an_unknown_database_is_rejected_and_no_cursor_is_registered(
    mixed: ManifestStore, filters: dict[str, list[str]]
) -> None:
    with pytest.raises(UnknownDatabase):
        mixed.feed.follow("app", **filters)  # type: ignore[arg-type]  # one keyword at a time
    assert mixed.feed.cursors() == []


@pytest.mark.parametrize("table", ["nothing", "idempotency"])
def test_a_table_that_is_never_in_the_feed_is_rejected_and_no_cursor_is_registered(
    mixed: ManifestStore, table: str
) -> None:
    with pytest.raises(InvalidInput, match="table"):
        mixed.feed.follow("app", tables=[table])
    assert mixed.feed.cursors() == []


# ── following ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_filtered_follower_acknowledges_what_it_skips(mixed: ManifestStore) -> None:
    feed = mixed.feed
    assert numbers(list(feed.follow("app", databases=["two"], timeout=0))) == [(2, 1), (5, 1), (7, 1), (9, 1), (10, 1)]
    assert feed.cursor("app").lag == 0
    commit(mixed, chunk(200), chunk(201))
    assert list(feed.follow("app", databases=["two"], timeout=0)) == []
    assert feed.cursor("app").lag == 0, "nothing matched, but the cursor has advanced"


def test_leaving_the_loop_does_not_acknowledge_the_unfinished_change(mixed: ManifestStore) -> None:
    feed = mixed.feed
    assert numbers(list(islice(feed.follow("app", databases=["two"]), 2))) == [(2, 1), (5, 1)]
    assert feed.cursor("app").acked_sequence == 2, "the body of the loop had not finished the second"
    assert numbers(list(feed.follow("app", databases=["two"], timeout=0)))[0] == (5, 1)


def test_a_name_means_the_database_that_had_it_at_the_start(mixed: ManifestStore) -> None:
    sequences: list[int] = []
    follower = mixed.feed.follow("app", databases=["one"], tables=["chunk_catalog", "db"], timeout=5)
    sequences.append(next(follower).sequence)
    commit(mixed, RenameDb(1, "uno"))
    commit(mixed, RenameDb(2, "one"))
    commit(mixed, chunk(300))
    commit(mixed, chunk(301, db_id=2))
    commit(mixed, DropDb(1))
    sequences += [next(follower).sequence for _ in range(7)]
    follower.close()
    assert sequences == [1, 4, 6, 8, 10, 11, 13, 15], "without the rename of 2 and its chunk"


def test_a_busy_neighbour_does_not_cost_a_commit_per_change(
    mixed: ManifestStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, acknowledged, acknowledge = mixed.feed, list[int](), mixed.feed.acknowledge

    def record_and_acknowledge(cursor: int | str, upto: int) -> None:
        acknowledged.append(upto)
        acknowledge(cursor, upto)

    monkeypatch.setattr(feed, "acknowledge", record_and_acknowledge)
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
        commit(mixed, chunk(400 + number))
    assert len(acknowledged) - before < 75
    assert eventually(lambda: feed.cursor("app").lag == 0), "but they are acknowledged soon"
    stop.set()
    commit(mixed, chunk(1, db_id=3))
    follower.join(30)


def test_a_busy_neighbour_does_not_keep_a_follower_from_timing_out(mixed: ManifestStore) -> None:
    stop = threading.Event()

    def produce() -> None:
        number = 1000
        while not stop.is_set():
            number += 1
            commit(mixed, chunk(number))

    neighbour = threading.Thread(target=produce)
    neighbour.start()
    try:
        assert numbers(list(mixed.feed.follow("app", databases=["three"], timeout=0.05))) == [(3, 1)]
    finally:
        stop.set()
        neighbour.join(30)


# ── positions that the caller stores ──────────────────────────────────────────────────────────────────────────────────
def test_a_stored_position_takes_precedence_over_the_cursors_position(mixed: ManifestStore) -> None:
    feed = mixed.feed
    feed.register(name="holder")
    assert [change.sequence for change in feed.follow("app", after=7, timeout=0)] == [8, 9, 10]
    assert feed.cursor("app").acked_sequence == 10
    repeated = [change.sequence for change in feed.follow("app", after=4, timeout=0)]
    assert repeated == [5, 6, 7, 8, 9, 10], (
        "as after restoring the consumer from a backup, if the log still has the changes"
    )
    assert feed.cursor("app").acked_sequence == 10


def test_a_position_that_is_no_longer_kept_is_an_error(mixed: ManifestStore) -> None:
    feed = mixed.feed
    assert len(list(feed.follow("app", timeout=0))) == 10
    for use in (lambda: feed.fetch("app", after=4), lambda: next(feed.follow("app", after=4))):
        with pytest.raises(CursorLost, match="5 to 10 are no longer kept"):
            use()
    with pytest.raises(CursorLost):
        next(feed.follow("another", after=4))
    assert [cursor.name for cursor in feed.cursors()] == ["app"], "the rejected call has left no cursor"


def test_a_position_beyond_the_head_is_rejected(mixed: ManifestStore) -> None:
    """The store was restored from a backup, its consumer was not: continuing would silently skip later changes."""
    mixed.feed.register(name="app")
    with pytest.raises(OutOfRange, match="backup"):
        mixed.feed.fetch("app", after=11)
    with pytest.raises(InvalidInput):
        mixed.feed.fetch("app", after=-1)
    assert mixed.feed.fetch("app", after=10).changes == ()
