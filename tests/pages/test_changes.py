"""Which pages changed between two versions: never one too few, compared with all pages of both (W6)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from quire.core.errors import EpochLost, OutOfRange
from quire.core.ids import ArtifactKind
from quire.durable.failpoints import armed
from quire.manifest.ops.timeline import Timeline
from quire.manifest.records import ChunkRecord, DeltaRecord, JobKind, Residency
from quire.pages import changes
from quire.pages.changes import HISTORY_BYTES_MAX, HISTORY_ENTRIES_MAX, KEPT_MS, history_after, history_of
from quire.pages.pagestore import PageStore
from tests.pages.engine_harness import PAGES_PER_CHUNK, Model, Pages, Version, image, small_segments, write

WEEK_SECONDS = KEPT_MS / 1000


def _differing(before: Version, after: Version) -> set[int]:
    """The pages of `after` that differ from `before` or are not in it."""
    return {page for page in range(after.size) if page >= before.size or before.page(page) != after.page(page)}


def _assert_all_changes(store: PageStore, model: Model) -> None:
    """From every past version to the newest: no changed page is missing."""
    with store.open_snapshot() as newest:
        for version in model.versions:
            changed = set(store.changed(version.lsn, newest.mark))
            assert changed >= _differing(version, model.newest), f"since {version.lsn}"
            assert all(page < newest.size_pages for page in changed)


def _changed(store: PageStore, since: int) -> set[int]:
    with store.open_snapshot() as newest:
        return set(store.changed(since, newest.mark))


def _is_single_base(store: PageStore, pages: Pages, slot: int = 0) -> bool:
    with pages.manifest.read() as txn:
        return [link.kind for link in txn.chain(store.db_id, slot)] == [ArtifactKind.BASE]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.lists(st.integers(0, 40), min_size=1, max_size=6)),
        st.tuples(st.just("shrink"), st.integers(1, 30)),
        st.tuples(st.sampled_from(["checkpoint", "merge", "reopen", "publish", "seal", "fork", "week", "crash"])),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_no_changed_page_is_missing_in_any_history(steps: list[tuple[object, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as base:
        small_segments(patch, frames=6)
        pages = Pages(Path(base))
        model, name, forks = Model(), "shop", 0
        store = pages.database()
        for step, *arguments in steps:
            if step == "write":
                write(store, model, {page: image() for page in arguments[0]})  # type: ignore[attr-defined]
            elif step == "shrink":
                size = min(int(str(arguments[0])), model.newest.size)
                if size:
                    write(store, model, {0: image()}, truncate=size)
            elif step == "checkpoint":
                pages.checkpoint(store)
            elif step == "merge":
                pages.run(JobKind.MERGE, store.db_id)
            elif step == "publish":
                store.wal.publish()
            elif step == "seal":
                store.wal.seal()
            elif step == "week":
                pages.clock.advance(WEEK_SECONDS / 2)
            elif step == "fork":
                forks += 1
                pages.engine.fork(name, f"fork-{forks}")
                name = f"fork-{forks}"
                store = pages.engine.open(name)
                with store.open_snapshot() as reader:
                    model = model.copy(reader.lsn)
            else:
                pages.crash() if step == "crash" else pages.reopen()
                store = pages.engine.open(name)
            _assert_all_changes(store, model)
        pages.stop()


def test_changed_pages_are_exact_when_unpublished_published_and_checkpointed(pages: Pages) -> None:
    store, model = pages.database(), Model()
    start = write(store, model, {page: image() for page in range(24)}).lsn
    pages.checkpoint(store)
    write(store, model, {3: image(), 9: image()})
    for advance in (lambda: None, store.wal.publish, lambda: pages.checkpoint(store)):
        advance()
        assert _changed(store, start) == {3, 9}
    assert _changed(store, model.newest.lsn) == set()


def test_a_base_that_replaces_its_deltas_still_has_their_changes(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {page: image() for page in range(PAGES_PER_CHUNK)})
    pages.checkpoint(store)
    versions = [model.newest.lsn]
    for page in (1, 5):
        versions.append(write(store, model, {page: image()}).lsn)
        pages.checkpoint(store)
    pages.run(JobKind.MERGE, store.db_id)
    assert _is_single_base(store, pages)
    assert [_changed(store, since) for since in versions] == [{1, 5}, {5}, set()]
    # A rewrite, because most of the slot is dirty, adds its own pages.
    write(store, model, {page: image() for page in range(2, 6)})
    pages.checkpoint(store)
    assert _is_single_base(store, pages)
    assert [_changed(store, since) for since in versions] == [{1, 2, 3, 4, 5}, {2, 3, 4, 5}, {2, 3, 4, 5}]


def test_after_a_week_a_merged_slot_is_sent_whole(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {page: image() for page in range(2 * PAGES_PER_CHUNK)})
    pages.checkpoint(store)
    since = model.newest.lsn
    write(store, model, {1: image()})
    pages.checkpoint(store)
    pages.clock.advance(WEEK_SECONDS + 1)
    write(store, model, {2: image()})
    pages.checkpoint(store)
    pages.run(JobKind.MERGE, store.db_id)
    assert _is_single_base(store, pages)
    assert _changed(store, since) == set(range(PAGES_PER_CHUNK)), "only the merged slot is sent whole"


def test_versions_without_a_known_answer_are_refused(pages: Pages) -> None:
    store, model = pages.database(), Model()
    since = write(store, model, {0: image()}).lsn
    with store.open_snapshot() as newest:
        for invalid_lsn in (-1, newest.lsn + 1):
            with pytest.raises(OutOfRange):
                store.changed(invalid_lsn, newest.mark)
        assert store.changed(0, newest.mark) == BitMap([0])
    head = pages.manifest.feed.head()
    pages.manifest.submit([Timeline(2, 1, 0, 1, head, 2 << 40)]).result()
    pages.reopen()
    store = pages.database()
    with store.open_snapshot() as newest:
        assert store.changed(since, newest.mark) == BitMap(), "nothing has been written since the takeover"
    write(store, model, {0: image()})
    with store.open_snapshot() as newest, pytest.raises(EpochLost):
        store.changed(since, newest.mark)


def test_a_shrunk_database_that_grew_again_has_its_new_pages_among_the_changes(pages: Pages) -> None:
    store, model = pages.database(), Model()
    since = write(store, model, {page: image() for page in range(20)}).lsn
    write(store, model, {0: image()}, truncate=4)
    pages.checkpoint(store)
    assert _changed(store, since) <= set(range(4))
    write(store, model, {19: image()})
    assert _changed(store, since) >= set(range(4, 20)) | {0}
    pages.checkpoint(store)
    assert _changed(store, since) >= set(range(4, 20)) | {0}


# ── histories ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _base(covered: int, history: bytes) -> tuple[int, ChunkRecord]:
    return covered, ChunkRecord(Residency.REMOTE_ARCHIVED, 1, 1, changes=history)


def test_a_base_of_an_older_version_stands_for_its_whole_slot() -> None:
    covered, row = _base(9, b"")
    assert history_of(row, covered) == (9, [])
    after, entries = history_of(_base(20, history_after([_base(9, b"")], 20, BitMap([3]).serialize(), 1000))[1], 20)
    assert after == 9
    assert [(lsn, set(BitMap.deserialize(bitmap))) for lsn, _, bitmap in entries] == [(20, {3})]
    unknown = DeltaRecord(1, Residency.REMOTE_ARCHIVED, 1, 1)
    assert history_of(_base(15, history_after([_base(9, b""), (15, unknown)], 15, b"", 1000))[1], 15) == (15, [])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.integers(0, KEPT_MS // 3), st.sets(st.integers(0, 16_383), max_size=50)),
        max_size=120,
    )
)
def test_a_history_is_small_and_never_omits_a_changed_page(
    steps: list[tuple[int, int, set[int]]],
) -> None:
    covered, now, history = 0, 0, b""
    chain: list[tuple[int, ChunkRecord | DeltaRecord]] = []
    expected: list[tuple[int, set[int]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "HISTORY_BYTES_MAX", 600)
        for step, pause, pages in steps:
            covered, now = covered + step, now + pause
            expected.append((covered, pages))
            history = history_after(chain, covered, BitMap(pages).serialize() if pages else b"", now)
            chain = [_base(covered, history)]
            after, entries = history_of(_base(covered, history)[1], covered)
            assert len(entries) <= HISTORY_ENTRIES_MAX
            assert sum(len(bitmap) for _, _, bitmap in entries[1:]) <= min(600, HISTORY_BYTES_MAX)
            for since, _ in [(0, set()), *expected]:
                if since >= after:
                    changed_pages = set().union(
                        *(BitMap.deserialize(bitmap) for lsn, _, bitmap in entries if lsn > since)
                    )
                    assert changed_pages >= set().union(*(changed for lsn, changed in expected if lsn > since))


def test_changes_are_found_between_the_publication_of_a_segment_and_its_seal(pages: Pages) -> None:
    """Hazard: a segment that had ended with room left was read up to the last published lsn, beyond its frames, and reported as
    damaged until its seal was committed."""
    store, model = pages.database(), Model()
    since = write(store, model, {0: image(), 1: image()}).lsn
    write(store, model, {0: image()})
    store.wal.seal()
    write(store, model, {1: image()})
    found: list[set[int]] = []
    with armed("pages.wal.published", lambda _: found.append(_changed(store, since))):
        store.wal.publish()
    assert found == [{0, 1}]
