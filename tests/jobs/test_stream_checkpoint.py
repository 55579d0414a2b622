"""The checkpoint of a stream: sealed segments become chunks that share their bytes (decision 009)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import quire
from quire.core.errors import IllegalTransition, ManifestDamaged
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.failpoints import VARIABLE, armed, hits, recording
from quire.durable.names import Tier, object_key
from quire.jobs.residency import request_evict, request_hydrate, request_upload
from quire.jobs.stream_checkpoint.job import row_of
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.reads import ReadTxn
from quire.manifest.records import ChunkRecord, JobKind, JobState, Residency, WalState
from quire.manifest.verification import shares_bytes
from quire.stream.state import Retention
from quire.stream.stream import Stream
from tests.jobs.small_stream import SETTINGS, check, fill
from tests.programs import run_program

ROOT = Path(__file__).parents[2]
POINTS = ("planned", "seen", "reserved")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[quire.Store]:
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        yield store
        check(store)


@pytest.fixture
def clicks(store: quire.Store) -> Stream:
    stream = store.stream("clicks", create=True)
    fill(stream, 4)
    stream.upload(2, 3)
    stream.evict(3, warm=True)
    return stream


def chunks(store: quire.Store) -> dict[int, ChunkRecord]:
    """Segment → chunk row, of the chunks in the live set."""
    with store.manifest.read() as txn:
        live_chunks = {}
        for (origin, slot, generation), row in txn.scan(t.CHUNK_CATALOG):
            chain = txn.chain(origin, slot)
            if chain and chain[0].generation == generation:
                live_chunks[slot] = row
        return live_chunks


def chunk_rows(store: quire.Store) -> list[tuple[int, ...]]:
    with store.manifest.read() as txn:
        return [key for key, _ in txn.scan(t.CHUNK_CATALOG)]


def states(store: quire.Store) -> dict[int, WalState]:
    with store.manifest.read() as txn:
        return {key[1]: row.state for key, row in txn.scan(t.WAL_CATALOG)}


# ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_sealed_segments_become_chunks_and_no_byte_is_written(store: quire.Store, clicks: Stream) -> None:
    clicks.append(b"in the open segment").result()
    before = {path: path.stat().st_mtime_ns for path in Path(store.path, "objects").rglob("*") if path.is_file()}
    job = store.checkpoint("clicks")
    assert job.result == {
        "chunks": 4,
        "bytes": sum(item.durable_bytes for item in clicks.ledger.view.sealed),
        "missing": 0,
    }
    after = {path: path.stat().st_mtime_ns for path in Path(store.path, "objects").rglob("*") if path.is_file()}
    assert after == before
    for segment_id, row in chunks(store).items():
        segment = clicks.ledger.view.get(segment_id)
        assert segment is not None
        assert (row.lsn_start, row.lsn_end) == (segment.base_record, segment.end_record - 1)
        assert row.suffix == object_key(ArtifactKey(clicks.stream_id, ArtifactKind.WAL, segment_id, 0))
        assert not segment.is_remote or segment.key.endswith(f"/e/00000001/{row.suffix}")
    assert set(states(store).values()) == {WalState.INDEXED}


def test_a_second_checkpoint_publishes_new_segments(store: quire.Store, clicks: Stream) -> None:
    assert store.checkpoint("clicks").result["chunks"] == 4
    rows = chunk_rows(store)
    assert store.checkpoint("clicks").result == {"chunks": 0, "bytes": 0, "missing": 0}
    assert chunk_rows(store) == rows
    fill(clicks, 1)
    assert store.checkpoint("clicks").result["chunks"] == 1
    assert sorted(chunks(store)) == [1, 2, 3, 4, 5]
    clicks.upload()  # moves continue as before, and do not change chunks
    clicks.evict(warm=True)
    clicks.hydrate()
    assert len(list(clicks.read())) == 100


def test_segments_beyond_one_job_are_published_by_the_next(
    store: quire.Store, clicks: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.jobs.stream_checkpoint.job.SEGMENTS_MAX", 3)
    assert store.checkpoint("clicks").result["chunks"] == 3
    store.worker.drain()
    assert sorted(chunks(store)) == [1, 2, 3, 4]


def test_a_damaged_row_of_one_stream_does_not_keep_upkeep_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: the step ended at that row, in every round: no stream was checkpointed any more."""
    maintenance = replace(SETTINGS.maintenance, checkpoint_seconds=0.0)
    with quire.open(tmp_path / "store", settings=replace(SETTINGS, maintenance=maintenance)) as store:
        streams = [store.stream(name, create=True) for name in ("one", "two")]
        for stream in streams:
            fill(stream, 2)
        store.streams.tick()
        scan = ReadTxn.scan

        def damaged(self: ReadTxn, table: t.Table[Any], *prefix: int, **options: Any) -> Any:
            if table is t.WAL_CATALOG and prefix == (streams[0].stream_id,):
                raise ManifestDamaged("a row is damaged")
            return scan(self, table, *prefix, **options)

        with monkeypatch.context() as patched:
            patched.setattr(ReadTxn, "scan", damaged)
            store.upkeep.round(everything=True)
        jobs = [job for job in store.manifest.jobs.jobs() if job.kind is JobKind.CHECKPOINT]
        assert [job.db_id for job in jobs] == [streams[1].stream_id]


def test_upkeep_publishes_by_size_and_age(tmp_path: Path) -> None:
    import msgspec

    eager = msgspec.structs.replace(SETTINGS.maintenance, checkpoint_bytes=1 << 40, checkpoint_seconds=0.0)
    with quire.open(tmp_path / "store", settings=msgspec.structs.replace(SETTINGS, maintenance=eager)) as store:
        fill(store.stream("clicks", create=True), 2)
        store.streams.tick()
        assert store.maintain().checkpoints == 1
        assert sorted(chunks(store)) == [1, 2]
        assert store.maintain().checkpoints == 0
        check(store)


def test_a_segment_without_a_copy_is_reported_and_not_published(store: quire.Store, clicks: Stream) -> None:
    path = Path(clicks.files.segment(Tier.HOT, 4))
    path.rename(path.with_suffix(".away"))
    assert store.checkpoint("clicks").result["missing"] == 1
    assert sorted(chunks(store)) == [1, 2, 3]
    path.with_suffix(".away").rename(path)
    assert store.checkpoint("clicks").result["chunks"] == 1


# ── ownership of the bytes ────────────────────────────────────────────────────────────────────────────────────────────
def test_retention_clears_slots_in_the_same_fold_and_the_object_is_deleted_once(
    store: quire.Store, clicks: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.checkpoint("clicks")
    head = store.feed.head()
    deleted: list[str] = []
    backend: Any = type(store.objects)
    original = backend.delete_many

    def delete_many(self: Any, keys: Any) -> Any:
        deleted.extend(keys)
        return original(self, keys)

    monkeypatch.setattr(backend, "delete_many", delete_many)  # also called by `delete`
    clicks.retain(Retention(bytes=1))
    assert clicks.retire() == 4
    assert chunks(store) == {}
    with store.manifest.read() as txn:
        changes = [record.operations for _, record in txn.scan(CHANGE_LOG, start=(head + 1,))]
    folds = [{type(op).__name__ for op in ops} for ops in changes]
    assert [fold - {"UpdateArtifact"} for fold in folds if "SetSlots" in fold] == [{"MoveWalState", "SetSlots"}] * 4
    store.maintain()
    assert chunk_rows(store) == []
    assert states(store) == {}
    with store.manifest.read() as txn:
        prefix = txn.object_prefixes()[0]
    keys = [
        f"{prefix}/{object_key(ArtifactKey(clicks.stream_id, ArtifactKind.WAL, segment_id, 0))}"
        for segment_id in (2, 3)
    ]
    assert sorted(key for key in deleted if not key.startswith("manifest/")) == keys, (
        "each is deleted once, by the stream"
    )


def test_a_snapshot_keeps_segments_and_chunks(store: quire.Store, clicks: Stream) -> None:
    store.checkpoint("clicks")
    store.snapshot("clicks", "monday")
    clicks.retain(Retention(bytes=1))
    assert clicks.retire() == 0, "pinned segments are kept"
    assert len(list(clicks.read())) == 80
    store.manifest.snapshots.drop("clicks", "monday")
    store.maintain()
    assert clicks.retire() == 4
    store.maintain()
    assert (chunk_rows(store), states(store)) == ([], {})


def test_audit_sweep_verify_and_figures_accept_chunks(store: quire.Store, clicks: Stream) -> None:
    sizes = {row.database: row.size_bytes for row in store.heavy.stats()}
    store.checkpoint("clicks")
    assert {row.database: row.size_bytes for row in store.heavy.stats()} == sizes, "shared bytes are counted once"
    swept = store.heavy.sweep(delete=True, grace_seconds=0.0).result
    assert (swept["orphaned"], swept["missing"]) == (0, [])
    assert store.heavy.audit().num_rows == 0
    assert store.heavy.verify(runner="threads").result["altered"] == 0
    assert len(list(clicks.read())) == 80


def test_dropping_a_stream_removes_everything(store: quire.Store, clicks: Stream) -> None:
    store.checkpoint("clicks")
    assert clicks.stream_id
    store.drop("clicks")
    store.maintain()
    store.maintain()
    assert (chunk_rows(store), states(store)) == ([], {})
    assert [path for path in Path(store.path, "objects").rglob("*wal*") if path.is_file()] == []


@pytest.mark.parametrize("request_move", [request_upload, request_evict, request_hydrate])
def test_generic_moves_refuse_segments_and_chunks(
    store: quire.Store, clicks: Stream, request_move: Callable[..., int]
) -> None:
    """An upload would store the uncompressed file under the name of the compressed object."""
    store.checkpoint("clicks")
    with store.manifest.read() as txn:
        (link,) = txn.chain(clicks.stream_id, 1)
    for key in (ArtifactKey(clicks.stream_id, ArtifactKind.WAL, 1, 0), link.artifact(1)):
        job = request_move(store.manifest, key)
        store.worker.run(job)
        failed_job = store.manifest.jobs.get(job)
        assert failed_job.record.state is JobState.FAILED_PERMANENT
        assert "moved by their stream" in failed_job.record.error
    segment = clicks.ledger.view.get(1)
    assert segment is not None
    assert not segment.is_remote


def test_a_chunk_that_shares_bytes_is_recognized_by_its_name() -> None:
    row = row_of(7, 3, first_lsn=1, last_lsn=9, at_ms=5)
    key = ArtifactKey(7, ArtifactKind.BASE, 3, 1)
    assert shares_bytes(key, row)
    assert not shares_bytes(key, ChunkRecord(Residency.LOCAL, 1, 1))
    assert not shares_bytes(key, ChunkRecord(Residency.LOCAL, 1, 1, suffix=object_key(key)))


# ── crashes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_retention_between_plan_and_publication_wins(store: quire.Store, clicks: Stream) -> None:
    def retire(_: str) -> None:
        clicks.retain(Retention(bytes=clicks.ledger.view.sealed[-1].durable_bytes))
        assert clicks.retire() == 3

    with armed("jobs.stream_checkpoint.reserved", retire):
        job = store.manifest.jobs.enqueue(JobKind.CHECKPOINT, clicks.stream_id)
        store.worker.run(job)
    assert IllegalTransition.__name__ in store.manifest.jobs.get(job).record.error
    assert chunk_rows(store) == []
    assert store.checkpoint("clicks").result["chunks"] == 1
    assert sorted(chunks(store)) == [4]


def run_stream_program(root: Path, failpoints: str = "") -> int:
    environment = {**os.environ, VARIABLE: failpoints, "PYTHONPATH": str(ROOT)}
    process = run_program(["-m", "tests.jobs.small_stream", str(root)],
        env=environment, cwd=ROOT, capture_output=True, timeout=120,
    )  # fmt: skip
    assert process.returncode in (0, -9), process.stderr
    return process.returncode


def assert_recovers(root: Path) -> None:
    """What exists is sound; another run ends like one without a crash."""
    with quire.open(root, settings=SETTINGS) as store:
        stream = store.stream("clicks")
        check(store)
        first = stream.first_record
        assert [record.id for record in stream.read()] == list(range(first, 81))
        swept = store.heavy.sweep(grace_seconds=0.0).result
        assert swept["missing"] == []
        due_ms = max((job.record.not_before_ms for job in store.manifest.jobs.jobs(JobState.PENDING)), default=0)
    time.sleep(max(0.0, due_ms / 1000 - time.time()))  # the job of a dead worker is retried after its backoff
    assert run_stream_program(root) == 0
    with quire.open(root, settings=SETTINGS) as store:
        stream = store.stream("clicks")
        check(store)
        assert [record.id for record in stream.read()] == list(range(41, 81))
        assert sorted(chunks(store)) == [3, 4]
        assert len(chunk_rows(store)) == 2
        swept = store.heavy.sweep(grace_seconds=0.0).result
        assert (swept["orphaned"], swept["missing"]) == (0, [])


@pytest.mark.parametrize("point", ["jobs.stream_checkpoint.reserved", "stream.retire.told"])
def test_a_crash_leaves_nothing_half_done(tmp_path: Path, point: str) -> None:
    assert run_stream_program(tmp_path / "store", f"{point}=kill") == -9
    assert_recovers(tmp_path / "store")


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        *(f"jobs.stream_checkpoint.{step}" for step in ("planned", "seen")),
        "jobs.worker.completed",
        "stream.retire.queued",
        "stream.retire.deleted",
        "jobs.delete.planned",
        "jobs.delete.objects_gone",
        "jobs.delete.published",
    ],
)
def test_a_crash_at_any_step_leaves_nothing_half_done(tmp_path: Path, point: str) -> None:
    assert run_stream_program(tmp_path / "store", f"{point}=kill") == -9
    assert_recovers(tmp_path / "store")


def test_every_step_is_hit(store: quire.Store, clicks: Stream) -> None:
    with recording():
        store.checkpoint("clicks")
    assert {f"jobs.stream_checkpoint.{step}" for step in POINTS} <= set(hits())
