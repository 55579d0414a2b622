"""The index: a deterministic fold of the records, by a declared table. Early records are deferred, illegal ones are
refused.
"""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import IllegalTransition, ManifestIntegrityError
from quire.durable.checksums import crc64
from quire.stream import mlog_reader
from quire.stream import mlog_records as r
from quire.stream.mlog_format import CHUNK_BYTES, RECORD, RECORD_BYTES, ChunkFacts, encode_record, new_header
from quire.stream.mlog_index import ManifestIndex, replay
from quire.stream.mlog_reader import Chunk, load_chunk
from quire.stream.mlog_snapshot import decode_snapshot, encode_snapshot
from quire.stream.mlog_states import (
    NOTHING,
    RULES,
    STATES,
    TABLE,
    Event,
    State,
    code_of,
    is_valid,
    next_state,
    tiers_of,
)
from tests.stream.logs import same_state
from tests.stream.random_history import RandomHistory

SegmentRecord = tuple[r.Payload, int]


def chunk_of(records: list[SegmentRecord], index: int = 0, base: int = 0) -> Chunk:
    body = b"".join(encode_record(v.TYPE, s, r.encode(v), timestamp_ms=5) for v, s in records)
    header = new_header(
        chunk_index=index, base_record=base, committed_len=CHUNK_BYTES + len(body), chunk_crc64=crc64(body), flags=1
    )
    return load_chunk(header.encode() + body + ChunkFacts(header, len(records), 0).encode(), chunk_index=index)


def folded(records: list[SegmentRecord]) -> ManifestIndex:
    return replay(ManifestIndex(), [chunk_of(records)]) if records else ManifestIndex()


def test_the_table_matches_the_rules() -> None:
    for event in Event:
        for code, state in enumerate(STATES):
            assert code_of(state) == code
            expected = code_of(next_state(state, event)) if is_valid(state, event) else -1
            assert TABLE[event][code] == expected
    assert set(RULES) == set(Event)


def reachable() -> set[State]:
    states, pending = {NOTHING}, [NOTHING]
    while pending:
        state = pending.pop()
        for event in Event:
            if is_valid(state, event) and (new := next_state(state, event)) not in states:
                states.add(new)
                pending.append(new)
    return states


def test_only_a_requested_deletion_leaves_a_sealed_segment_without_a_copy() -> None:
    """Evictions and failures alone never lose the last copy."""
    for state in reachable():
        if state.life.name == "SEALED" and not tiers_of(state):
            assert state.remote.name in ("DELETING", "DELETED", "UPLOADING", "FAILED"), state
    assert len(reachable()) > 50


def test_the_table_never_forgets_an_object_a_copy_or_work() -> None:
    """Checked against the meaning of the facets, not against `RULES`: no object, copy or outstanding work is forgotten."""
    for state, event in product(reachable(), Event):
        name, remote = event.name, state.remote.name
        if not is_valid(state, event):
            if name == "DELETE_QUEUED":
                assert remote not in ("DONE", "FAILED"), "an upload that may have left an object can be deleted"
            if name in ("UPLOAD_FAILED", "UPLOAD_DONE"):
                assert remote != "UPLOADING", "a started upload can end"
            continue
        new = next_state(state, event)
        if name == "RETIRED":
            assert remote in ("NONE", "DELETED"), "an unknown object would remain"
            assert new == NOTHING
            continue
        if state.life.name == "SEALED" and tiers_of(state) and not tiers_of(new):
            assert name == "DELETE_QUEUED", f"{name} removes the last copy"
        if name.endswith("_FAILED"):
            assert "FAILED" in (new.warm.name, new.remote.name, new.hydration.name), "it must be retried"
        gained = tiers_of(new) - tiers_of(state)
        assert gained <= {"OPENED": {0}, "HYDRATION_DONE": {0}, "COMPRESSION_DONE": {1}, "UPLOAD_DONE": {2}}.get(
            name, set()
        )
        assert new.life.name in ("OPEN", "SEALED")


def test_a_history_folds_the_same_live_and_replayed_however_it_is_divided() -> None:
    history = RandomHistory(1)
    records = history.many(3_000)
    assert same_state(folded(records), history.index)
    assert history.index.rejected == 0
    cuts = [0, 1, 700, 701, 2_000, 3_000]
    chunks = [chunk_of(records[a:b], index=i, base=a) for i, (a, b) in enumerate(pairwise(cuts))]
    assert same_state(replay(ManifestIndex(), chunks), history.index)


@given(seed=st.integers(0, 2**32), count=st.integers(0, 120), cut=st.integers(0, 120))
def test_a_snapshot_and_the_records_after_it_give_the_whole_state(seed: int, count: int, cut: int) -> None:
    records = RandomHistory(seed, alive=4).many(count)
    cut = min(cut, count)
    data = encode_snapshot(3, mlog_reader.LogPosition(0, 64), folded(records[:cut]), 17)
    snapshot = decode_snapshot(data, snapshot_id=3)
    assert encode_snapshot(3, snapshot.position, snapshot.index, snapshot.uploaded_upto) == data
    if records:
        snapshot.index.fold_chunk(chunk_of(records))
    assert same_state(snapshot.index, folded(records))


def test_large_and_small_chunks_are_folded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    records = RandomHistory(4).many(900)
    folded_together = folded(records)
    monkeypatch.setattr("quire.stream.mlog_reader.TOGETHER_RECORDS", 10_000)
    assert same_state(folded(records), folded_together)


def test_the_index_has_outstanding_work_and_the_tiers_of_copies() -> None:
    index = folded(
        [
            (r.SegmentOpened(0, 1), 1),
            (r.SealSegment(500, 9), 1),
            (r.CompressionStarted(44), 1),
            (r.SegmentOpened(500, 1), 2),
            (r.SealSegment(500, 9), 2),
            (r.UploadStarted("k/2"), 2),
            (r.UploadFailed("k/2", 5), 2),
            (r.SegmentOpened(900, 1), 3),
            (r.SealSegment(500, 9), 3),
            (r.UploadStarted("k/3"), 3),
            (r.UploadDone("k/3", "e"), 3),
            (r.LocalEvicted(500), 3),
            (r.HydrationStarted(2), 3),
            (r.Tier2DeleteQueued("manifest/7/0.mlog"), 0),
        ]
    )
    assert index.rejected == 0
    work = index.outstanding()
    assert work.compressions == {1: 44}
    assert work.uploads == {2: "k/2"}
    assert work.hydrations == {3: 2}
    assert work.deletes == {"manifest/7/0.mlog": 0}
    third = index.get(3)
    assert third is not None
    assert third.tiers == {2}
    assert third.key == "k/3"
    assert third.field(r.RecordType.SEGMENT_OPENED, "base_offset") == 900
    assert [segment.segment_id for segment in index.segments()] == [1, 2, 3]
    index.fold_raw(encode_record(8, 3, r.Tier2DeleteQueued("k/3").encode()))
    assert index.outstanding().deletes == {"k/3": 3, "manifest/7/0.mlog": 0}


def test_records_of_a_segment_that_is_not_open_yet_are_deferred() -> None:
    early: list[SegmentRecord] = [(r.SealSegment(10, 1), 2), (r.UploadStarted("k"), 2)]
    index = folded([(r.SegmentOpened(0, 0), 1), *early])
    assert index.reconciliation() == {2: 2}
    assert len(index) == 1
    index.fold_raw(encode_record(0, 2, r.SegmentOpened(10, 0).encode()))
    assert index.reconciliation() == {}
    assert index.outstanding().uploads == {2: "k"}
    late = folded([(r.SegmentOpened(0, 0), 1), (r.SegmentOpened(10, 0), 2), *early])
    assert late.entries[2][0] == index.entries[2][0]


def test_a_skipped_segment_never_opens() -> None:
    index = folded([(r.SealSegment(10, 1), 2), (r.SegmentOpened(0, 0), 3)])
    assert index.reconciliation() == {}
    assert index.rejected == 1
    with pytest.raises(IllegalTransition):
        index.check(r.SegmentOpened(0, 0), 2)


@pytest.mark.parametrize(
    ("records", "value"),
    [
        ([(r.SegmentOpened(0, 0), 1)], r.SegmentOpened(0, 0)),
        ([(r.SegmentOpened(0, 0), 1)], r.CompressionStarted(1)),
        ([(r.SegmentOpened(0, 0), 1), (r.SealSegment(1, 1), 1)], r.LocalEvicted(1)),
        ([(r.SegmentOpened(0, 0), 1), (r.SealSegment(1, 1), 1)], r.HydrationStarted(1)),
        ([(r.SegmentOpened(0, 0), 1), (r.SealSegment(1, 1), 1), (r.UploadStarted("a"), 1)], r.UploadDone("b", "")),
        ([(r.SegmentOpened(0, 0), 1), (r.SealSegment(1, 1), 1), (r.UploadStarted("a"), 1)], r.UploadStarted("a")),
    ],
)
def test_an_illegal_record_is_refused_live_and_ignored_in_replay(
    records: list[SegmentRecord], value: r.Payload
) -> None:
    index = folded(records)
    with pytest.raises(IllegalTransition) as caught:
        index.check(value, 1)
    assert caught.value.where["segment"] == 1
    before = list(index.entries[1])
    index.fold_raw(encode_record(value.TYPE, 1, r.encode(value)))
    assert index.entries[1] == before
    assert index.rejected == 1
    assert index.rejections[0].ordinal == len(records)


def test_a_retired_segment_cannot_be_opened_again() -> None:
    records: list[SegmentRecord] = [
        (r.SegmentOpened(0, 0), 1),
        (r.SealSegment(1, 1), 1),
        (r.CustomEvent(r.Schema.SEGMENT_RETIRED), 1),
    ]
    index = folded(records)
    assert index.get(1) is None
    assert len(index) == 0
    for value in (r.SegmentOpened(0, 0), r.SealSegment(1, 1)):
        with pytest.raises(IllegalTransition):
            index.check(value, 1)


def test_records_of_the_log_itself_are_checked_too() -> None:
    index = ManifestIndex()
    index.check(r.SnapshotMarker(0, 64, 1), 0)
    index.check(r.Tier2DeleteQueued("manifest/7/1.mlog"), 0)
    for value in (r.Tier2Deleted("manifest/7/1.mlog"), r.SealSegment(1, 1)):
        with pytest.raises(IllegalTransition):
            index.check(value, 0)


def test_chunks_out_of_order_are_damage() -> None:
    records = RandomHistory(2).many(20)
    with pytest.raises(ManifestIntegrityError):
        replay(ManifestIndex(), [chunk_of(records[10:], index=1, base=10)])
    with pytest.raises(ManifestIntegrityError):
        folded(records).fold_chunk(chunk_of(records, index=1, base=21))


def test_the_minimal_records_fold_to_the_segments() -> None:
    """Diagnostics: the minimal records of a history have the newest facts of every segment."""
    history = RandomHistory(8)
    history.many(400)
    minimal = list(history.index.minimal())
    assert len(minimal) < 100
    assert len(set(minimal)) == len(minimal)
    newest: dict[int, dict[int, r.Payload]] = {}
    for raw in minimal:
        kind, _, size, segment, *_ = RECORD.unpack_from(raw)
        assert len(raw) == RECORD_BYTES + size
        newest.setdefault(segment, {})[kind] = r.decode(kind, raw[RECORD_BYTES:])
    assert newest == {info.segment_id: info.records for info in history.index.segments()}
    assert len(newest) > 3
