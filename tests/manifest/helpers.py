"""Helpers that several tests of the manifest share."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from quire.core.errors import QuireError
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.failpoints import armed
from quire.manifest import tables as t
from quire.manifest.guard import ManifestGuard
from quire.manifest.ops.artifacts import PutChunk
from quire.manifest.ops.base import Op
from quire.manifest.ops.databases import RegisterDb
from quire.manifest.ops.local import RecordMetric
from quire.manifest.ops.refs import RemoveArtifact, unpack_artifact
from quire.manifest.ops.slots import CollectLeaf
from quire.manifest.ops.wal import AdvanceWal
from quire.manifest.records import ChunkRecord, DbKind, DbRecord, DeltaRecord, Residency
from quire.manifest.store import ManifestStore
from quire.testing.manifest import difference, dump
from tests.manifest.batches import outcome
from tests.manifest.checkpoints import ChunkMutation, DeltaChunk, FullChunk, checkpoint_apply
from tests.programs import Program


def register(db_id: int, name: str = "", kind: DbKind = DbKind.PAGES) -> RegisterDb:
    return RegisterDb(db_id, DbRecord(name or f"db{db_id}", kind, 0))


def chunk(number: int, size: int = 10, db_id: int = 1, generation: int = 1) -> PutChunk:
    return PutChunk(db_id, number, generation, ChunkRecord(Residency.LOCAL, size, 0))


def assert_rejected(manifest: ManifestStore, error: type[QuireError], *ops: Op) -> None:
    """Assert that the batch is rejected with exactly this error and that no table has changed by a byte."""
    before = dump(manifest)
    result = outcome(manifest.submit(ops))
    assert type(result) is error, f"{result!r} is not {error.__name__}"
    changed = difference(before, dump(manifest))
    assert not changed, f"a rejected batch changed rows: {changed}"


def commit(manifest: ManifestStore, *ops: Op) -> None:
    """Commit the batch."""
    manifest.submit(ops).result(60)


def checkpoint(manifest: ManifestStore, db_id: int, *slots: int, delta: bool = False) -> int:
    """Rewrite slots of a database (or add deltas to them) as a checkpoint does; returns the generation."""
    with manifest.read() as txn:
        wal = txn.wal_state(db_id)
        assert wal is not None
        lsn = wal.last_applied_lsn + 1
        generation = manifest.reserve_generation(db_id)
        mutations: list[ChunkMutation] = []
        for slot in slots:
            if delta:
                base = txn.chain(db_id, slot)[0].generation
                record = DeltaRecord(base, Residency.LOCAL, 1, 0)
                mutations.append(DeltaChunk(slot=slot, delta_id=len(txn.chain(db_id, slot)), record=record))
            else:
                mutations.append(FullChunk(slot=slot, record=ChunkRecord(Residency.LOCAL, 10, 0)))
    commit(manifest, AdvanceWal(db_id, 0, lsn, lsn, lsn))
    checkpoint_apply(manifest, db_id, generation, mutations, covered_lsn=lsn).result(60)
    return generation


def counts(manifest: ManifestStore, kind: ArtifactKind | None = None) -> dict[ArtifactKey, tuple[int, int]]:
    """(in_use, pending_upload) of every artifact, or of every artifact of one kind."""
    with manifest.read() as txn:
        rows = {ArtifactKey(k[0], ArtifactKind(k[1]), *k[2:]): row for k, row in txn.scan(t.GC_REFCOUNTS)}
    return {key: (row.in_use, row.pending_upload) for key, row in rows.items() if kind is None or key.kind is kind}


def anchor(manifest: ManifestStore, db_id: int) -> int:
    """The lsn at which a snapshot of the database can be taken now."""
    with manifest.read() as txn:
        wal = txn.wal_state(db_id)
    assert wal is not None
    return wal.last_applied_lsn


def collect(manifest: ManifestStore) -> None:
    """Do the work of the collector until no artifact is at zero."""
    while True:
        with manifest.read() as txn:
            keys = [unpack_artifact(raw) for raw, _ in txn.raw_scan(t.GC_ZERO)]
        if not keys:
            return
        for key in keys:
            if key.kind is ArtifactKind.LEAF:
                commit(manifest, CollectLeaf(key.origin_db_id, key.id, key.generation))
            else:
                commit(manifest, RemoveArtifact(key.origin_db_id, key.kind, key.id, key.generation, key.delta_id))


class Hold:
    """Stops the writer thread at a failpoint until `release`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._released = threading.Event()

    def __call__(self, _name: str) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self._released.wait(30), "the writer was not released"

    def release(self) -> None:
        self._released.set()


@contextmanager
def held(manifest: ManifestStore, point: str = "manifest.commit.applied") -> Iterator[Hold]:
    """Keep the writer busy with a commit for the duration of the block, or until it is released."""
    hold = Hold()
    with armed(point, hold):
        guard = manifest.submit([RecordMetric(99, 99, [1.0])])
        assert hold.reached.wait(60)
        try:
            yield hold
        finally:
            hold.release()
            guard.result(30)


def submit_as_group(manifest: ManifestStore, batches: Sequence[Sequence[Op]]) -> list[ManifestGuard]:
    """Submit batches so that they are committed in one group."""
    with held(manifest):
        return [manifest.submit(batch) for batch in batches]


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Run a script in a separate process, with pipes."""
    return Program(
        ["-c", textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def finish(child: subprocess.Popen[str], stdin: str = "") -> str:
    out, err = child.communicate(stdin, timeout=60)
    assert child.returncode == 0, err
    return out


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether a condition becomes true in time: guards resolve before the writer has counted and reported their
    commit."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()
