"""Checkpoints: what a plan covers and its maximum size, what is fixed for a database, and what is logged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from quire.core.errors import ConfigMismatch
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.failpoints import armed
from quire.jobs import handler as done
from quire.jobs.checkpoint import job as checkpoint_module
from quire.jobs.checkpoint import plan
from quire.jobs.checkpoint.run import Dirty
from quire.manifest import tables as t
from quire.manifest.ops.databases import SetDbPageSize
from quire.manifest.records import Compression, DbKind, JobKind, JobState, WalState
from quire.objects.open import open_store
from quire.pages.chunk_format import load_footer
from tests.jobs.checkpoint_child import Owner, images
from tests.jobs.job_store import epoch_name
from tests.pages.engine_harness import PAGE, PAGES_PER_CHUNK, Model, small_segments, write


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    yield owner
    owner.stop()


def test_a_plan_takes_a_bounded_number_of_frames_and_the_next_job_takes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_segments(monkeypatch, frames=6)
    monkeypatch.setattr(plan, "PLAN_FRAMES_MAX", 13)
    owner = Owner(tmp_path)
    store, model = owner.database(), Model()
    for number in range(10):
        write(store, model, images(*range(number, number + 5)), truncate=12 if number == 6 else None)
    owner.enqueue()
    owner.worker().drain()
    jobs = [job for job in owner.manifest.jobs.jobs() if job.kind is JobKind.CHECKPOINT]
    assert len(jobs) > 3
    assert {job.state for job in jobs} == {JobState.SUCCEEDED}
    assert max(job.result["segments"] for job in jobs) == 2
    assert not [state for state in owner.segments() if state is WalState.INDEXED], "every segment is absorbed"
    owner.assert_newest(model)
    owner.settle()
    owner.stop()


def test_a_transaction_larger_than_a_plan_is_absorbed_in_pieces_and_never_seen_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_segments(monkeypatch, frames=6)
    monkeypatch.setattr(plan, "PLAN_FRAMES_MAX", 7)
    owner = Owner(tmp_path)
    store, model = owner.database(), Model()
    write(store, model, images(*range(3)))
    write(store, model, images(*range(26)))
    write(store, model, images(*range(20)), truncate=5)

    def assert_newest(_: str) -> None:
        owner.assert_newest(model)

    with armed("jobs.worker.completed", assert_newest):
        owner.enqueue()
        owner.worker().drain()
    owner.assert_newest(model)
    owner.settle()
    owner.stop()


def test_a_hot_page_is_written_once(owner: Owner) -> None:
    store, model = owner.database(), Model()
    for _ in range(300):
        write(store, model, images(3))
    write(store, model, images(11))
    job_id = owner.enqueue()
    owner.worker().drain()
    result = owner.job(job_id).result
    assert (result["slots"], result["pages"]) == (2, 12), "the pages below them exist too, as zeros"
    owner.assert_newest(model)


def test_one_dirty_slot_among_many_is_the_only_one_that_is_written(owner: Owner) -> None:
    store, model = owner.database(), Model()
    write(store, model, images(*range(80)))
    owner.checkpoint(store)
    write(store, model, images(17))
    job_id = owner.enqueue()
    owner.worker().drain()
    assert owner.job(job_id).result["slots"] == 1
    assert [len(owner.chain(slot)) for slot in range(10)] == [1, 1, 2, *[1] * 7]
    owner.assert_newest(model)


def test_slots_beyond_the_size_are_dropped_and_come_back_empty(owner: Owner) -> None:
    store, model = owner.database(), Model()
    write(store, model, images(*range(40)))
    owner.checkpoint(store)
    write(store, model, images(0), truncate=10)
    owner.checkpoint(store)
    assert [bool(owner.chain(slot)) for slot in range(5)] == [True, True, False, False, False]
    write(store, model, images(39))
    owner.checkpoint(store)
    owner.assert_newest(model)
    owner.settle()
    owner.assert_newest(model)


def test_frames_are_read_a_few_megabytes_at_a_time(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.jobs.checkpoint import run
    from quire.pages.sources import ReadSegment

    monkeypatch.setattr(run, "WINDOW_BYTES", 4 * PAGE)
    monkeypatch.setattr(run, "RUN_BYTES", 2 * (PAGE + 64))
    store, model = owner.database(), Model()
    write(store, model, images(*range(8)))
    frame_counts: list[int] = []
    original = ReadSegment.read_raw

    def read_raw(segment: Any, first: int, count: int) -> bytes:
        frame_counts.append(count)
        return original(segment, first, count)

    monkeypatch.setattr(ReadSegment, "read_raw", read_raw)
    owner.checkpoint(store)
    assert frame_counts == [2, 2, 2, 2]
    monkeypatch.undo()
    owner.assert_newest(model)


# ── the digest ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_difference_in_any_input_changes_the_digest(owner: Owner) -> None:
    """Everything in which two plans of one name could differ (P10, P11)."""
    store, model = owner.database(), Model()
    write(store, model, images(*range(20)))
    owner.checkpoint(store)
    write(store, model, images(1, 9))
    owner.engine.flush(1)
    with owner.manifest.read() as txn:
        shape = plan.shape_of(txn, 1, owner.objects_url)
        chosen = plan.candidates(txn, 1, store.wal.durable.lsn)
        dirty = {0: Dirty(1, 1), 1: Dirty(1, 1)}
        first = plan.plan_checkpoint(txn, 1, chosen, shape, dirty)
        again = plan.plan_checkpoint(txn, 1, chosen, shape, dirty)
        slots_state = plan._slots(txn, 1)
    assert again.digest == first.digest
    task, other = first.tasks
    as_base = replace(task, key=msgspec.structs.replace(task.key, kind=ArtifactKind.BASE, delta_id=0))
    longer = replace(slots_state, chains={**slots_state.chains, 0: slots_state.chains[0] * 2})
    ((segment_id, row),) = chosen
    arguments: dict[str, Any] = {
        "db_id": 1,
        "shape": shape,
        "covered": first.covered_lsn,
        "size_pages": first.size_pages,
        "segments": chosen,
        "tasks": first.tasks,
        "cleared": (),
        "held": slots_state,
    }
    changes: list[dict[str, Any]] = [
        {"db_id": 2},
        {"shape": replace(shape, generation=99)},
        {"shape": replace(shape, compression=Compression.NONE)},
        {"shape": replace(shape, pages_per_chunk=16)},
        {"covered": first.covered_lsn + 1},
        {"size_pages": first.size_pages + 1},
        {"tasks": [task]},
        {"tasks": [as_base, other]},
        {"tasks": [replace(task, dirty=2), other]},
        {"tasks": [replace(task, parts=2), other]},
        {"segments": []},
        {"segments": [(segment_id + 1, row)]},
        {"segments": [(segment_id, structs.replace(row, salt=b"another life"))]},
        {"segments": [(segment_id, structs.replace(row, last_lsn=row.last_lsn + 1))]},
        {"cleared": (7,)},
        {"held": longer},
    ]
    digests = {plan._digest(**{**arguments, **change}) for change in changes}
    assert plan._digest(**arguments) == first.digest
    assert len(digests - {first.digest}) == len(changes)


# ── what is fixed for a database ──────────────────────────────────────────────────────────────────────────────────────
def test_a_database_without_compression_gets_uncompressed_chunks(owner: Owner) -> None:
    owner.manifest.register_db(
        "shop", DbKind.PAGES, page_size=PAGE, pages_per_chunk=PAGES_PER_CHUNK, compression=Compression.NONE
    )
    store, model = owner.database(), Model()
    write(store, model, {0: bytes(PAGE), 1: bytes(PAGE)})
    owner.checkpoint(store)
    ((_, generation),) = owner.chain(0)
    key = epoch_name(owner.manifest, ArtifactKey(1, ArtifactKind.BASE, 0, generation))
    objects = open_store(owner.objects_url)
    size = objects.head(key).size_bytes
    footer, _ = load_footer(lambda offset, length: objects.get_range(key, offset, length), size, name=key)
    assert footer.compression is Compression.NONE
    with owner.manifest.read() as txn:
        row = txn.get(t.CHUNK_CATALOG, 1, 0, generation)
    assert row is not None
    assert row.compression is Compression.NONE
    owner.assert_newest(model)


def test_a_shape_that_does_not_match_its_hash_is_not_checkpointed(owner: Owner) -> None:
    store, model = owner.database(), Model()
    write(store, model, images(0))
    owner.engine.close_database("shop")
    with owner.manifest.read() as txn:
        record = txn.database(1)
    assert record is not None
    owner.manifest.submit([SetDbPageSize(1, PAGE, 2 * PAGES_PER_CHUNK, record.config_hash)]).result()
    with pytest.raises(ConfigMismatch):
        owner.engine.open("shop")
    job_id = owner.enqueue()
    for _ in range(5):
        owner.retry()
    assert owner.state(job_id) is JobState.FAILED_PERMANENT
    assert ConfigMismatch.__name__ in owner.job(job_id).record.error
    assert owner.objects() == {}
    owner.manifest.submit([SetDbPageSize(1, PAGE, PAGES_PER_CHUNK, record.config_hash)]).result()
    owner.assert_newest(model)


# ── what is logged ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_each_step_of_a_segment_is_logged(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str, Any]] = []

    def record(level: str, event: str, /, **fields: Any) -> None:
        events.append((level, event, fields.get("segment_id")))

    monkeypatch.setattr(checkpoint_module, "emit", record)
    monkeypatch.setattr(done, "emit", record)
    store, model = owner.database(), Model()
    write(store, model, images(0))
    owner.checkpoint(store)
    assert events == [
        ("info", "wal.checkpoint_ready", 1),
        ("info", "wal.checkpointed", 1),
        ("info", "wal.truncated", 1),
    ]


def test_the_planner_span_has_the_segments_and_the_blocking_readers(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[tuple[str, dict[str, Any]]] = []

    class Recorder:
        def __init__(self, name: str, **attributes: Any) -> None:
            spans.append((name, attributes))

        def __enter__(self) -> Recorder:
            return self

        def __exit__(self, *_: object) -> None: ...

        def set(self, **attributes: Any) -> None:
            spans[-1][1].update(attributes)

    monkeypatch.setattr(plan, "span", Recorder)
    store, model = owner.database(), Model()
    first = write(store, model, images(0))
    with store.open_snapshot(tags={"who": "report"}):
        owner.engine.flush(1)
        write(store, model, images(1))
        owner.checkpoint(store)
        ((name, attributes),) = spans
        assert name == "CheckpointPlanner.select_mvcc_segments"
        assert (attributes["floor_lsn"], attributes["segments"], attributes["waiting"]) == (first.lsn, [1], 1)
        assert attributes["blocking_readers"] == [owner.engine.readers(1)[0].description]
        owner.clock.advance(2)
        owner.checkpoint(store)
        owner.clock.advance(3)
    owner.checkpoint(store)
    assert owner.engine.figures().databases[0].wait_for_floor_ms == 3000
    assert spans[-1][1]["blocking_readers"] == []


def test_an_unknown_payload_is_refused(owner: Owner) -> None:
    owner.database()
    for kind, payload in ((JobKind.CHECKPOINT, {"seal_only": True}), (JobKind.MERGE, {"chain_min": "two"})):
        job_id = owner.enqueue(kind, payload)
        owner.worker().drain()
        assert owner.state(job_id) is JobState.FAILED_PERMANENT
