"""The key-value manifest document's tables, row by row: the tracked state and the effect of each event."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.lsm.manifest_data import (
    AddFrozenWal,
    AddSst,
    AllocateSstId,
    Compaction,
    ManifestData,
    ManifestEvent,
    ManifestSstEntry,
    RemoveFrozenWal,
    RemoveSst,
    SetActiveWal,
    UpdateLsn,
    Version,
)
from quire.lsm.manifest_format import encode_event, replay
from tests.lsm.manifests import EVENTS, entry


def after(*events: ManifestEvent) -> ManifestData:
    return ManifestData().apply_all(events)


# ── Tracked State ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_new_manifest_tracks_nothing_and_allocates_ids_from_one() -> None:
    data = ManifestData()
    assert (data.version, data.last_lsn, data.active_wal) == (0, 0, 0)
    assert (data.frozen_wals, data.sstables, data.next_sst_id, data.dirty) == ([], [], 1, False)


def test_an_entry_is_an_id_and_a_path() -> None:
    assert ManifestSstEntry(7, "sst/000007.sst") == entry(7)
    assert entry(7).__struct_fields__ == ("id", "path")


# ── Event Types ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_version_sets_the_version() -> None:
    assert after(Version(3)).version == 3


def test_set_active_wal_switches_and_takes_the_id_from_the_frozen_list() -> None:
    data = after(AddFrozenWal(1), AddFrozenWal(2), SetActiveWal(2))
    assert (data.active_wal, data.frozen_wals) == (2, [1])
    assert after(SetActiveWal(5)).frozen_wals == []


def test_add_frozen_wal_adds_once() -> None:
    assert after(AddFrozenWal(4), AddFrozenWal(4)).frozen_wals == [4]


def test_remove_frozen_wal_removes() -> None:
    assert after(AddFrozenWal(4), AddFrozenWal(5), RemoveFrozenWal(4)).frozen_wals == [5]
    assert after(RemoveFrozenWal(4)).frozen_wals == []


def test_add_sst_skips_an_existing_id() -> None:
    data = after(AddSst(entry(1)), AddSst(ManifestSstEntry(1, "sst/other.sst")))
    assert data.sstables == [entry(1)]


def test_remove_sst_removes_by_id() -> None:
    assert after(AddSst(entry(1)), AddSst(entry(2)), RemoveSst(1)).sstables == [entry(2)]
    assert after(RemoveSst(1)).sstables == []


def test_update_lsn_only_advances() -> None:
    assert after(UpdateLsn(9), UpdateLsn(4)).last_lsn == 9


def test_allocate_sst_id_advances_past_the_id() -> None:
    assert after(AllocateSstId(7)).next_sst_id == 8
    assert after(AllocateSstId(7), AllocateSstId(3)).next_sst_id == 8


def test_compaction_adds_and_removes_in_one_event() -> None:
    data = after(AddSst(entry(1)), AddSst(entry(2)), Compaction((entry(3),), (1, 2)))
    assert data.sstables == [entry(3)]


def test_a_bulk_load_is_a_compaction_that_removes_nothing() -> None:
    assert after(Compaction((entry(3), entry(4)), ())).sstables == [entry(3), entry(4)]


# ── idempotence ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_event_makes_the_state_dirty() -> None:
    data = ManifestData()
    data.apply(UpdateLsn(0))
    assert data.dirty


@given(st.lists(EVENTS, max_size=30), st.data())
def test_replaying_any_prefix_twice_gives_the_same_state(events: list[ManifestEvent], data: st.DataObject) -> None:
    prefix = events[: data.draw(st.integers(0, len(events)))]
    once = after(*prefix)
    assert after(*prefix, *prefix) == once
    assert after(*prefix, *events) == after(*events)


@given(st.lists(EVENTS, max_size=30))
def test_replaying_records_is_equal_to_applying_events(events: list[ManifestEvent]) -> None:
    data = ManifestData()
    replay(data, [encode_event(event) for event in events], [0] * len(events), "")
    assert (data, data.dirty) == (after(*events), bool(events))


@given(st.lists(EVENTS, max_size=30))
def test_an_immediately_repeated_event_changes_nothing(events: list[ManifestEvent]) -> None:
    doubled = [repeated for event in events for repeated in (event, event)]
    assert after(*doubled) == after(*events)


@given(st.lists(EVENTS, max_size=20), st.lists(EVENTS, max_size=20))
def test_a_copy_is_independent(first: list[ManifestEvent], later: list[ManifestEvent]) -> None:
    data = after(*first)
    copy = data.copy()
    data.apply_all(later)
    assert copy == after(*first)
