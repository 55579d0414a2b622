"""Runs in a separate process that gets killed: opens a manifest, submits batches, and notes which ones were acknowledged.

    python crash_child.py PATH NOTES SEED THREADS BATCHES

Every marked batch writes k rows that contain its number and k, in a logged and in a local table, so that a partial batch is
detected. Random batches of every kind, valid and invalid, are submitted between them. Notes are lines, each appended with one
write: `try NUMBER`, `ack NUMBER K SEQUENCE`, `id DB_ID`. They survive SIGKILL, as everything passed to the kernel does.
"""

from __future__ import annotations

import os
import sys
import threading
from random import Random

from quire.core.errors import Conflict
from quire.core.settings import ManifestSettings
from quire.manifest.ops.artifacts import PutChunk
from quire.manifest.ops.base import Op
from quire.manifest.ops.local import RecordMetric
from quire.manifest.records import ChunkRecord, DbKind, Residency
from quire.manifest.store import ManifestStore
from tests.manifest.batches import BatchMaker, hold_feed, outcome

HOME = "home"
"""The database of the marked rows; `BatchMaker` does not use its name."""


def marked(db_id: int, number: int, rows: int) -> list[Op]:
    """A batch whose rows all contain its number and their count."""
    chunk = ChunkRecord(Residency.LOCAL, size_bytes=number, created_at_ms=0, page_count=rows)
    ops: list[Op] = [PutChunk(db_id, number, row, chunk) for row in range(1, rows + 1)]
    ops.append(RecordMetric(number, rows, [float(rows)]))
    return ops


def work(manifest: ManifestStore, home: int, notes: int, rng: Random, first: int, batches: int) -> None:
    maker = BatchMaker(rng, databases_max=8, spare={home})
    for number in range(first, first + batches):
        if rng.random() < 0.5:
            manifest.submit(maker.batch(manifest, rng.randint(1, 3)))
        if rng.random() < 0.1:
            manifest.remember_checked()  # as upkeep does: the next open checks what changed since
        if rng.random() < 0.1:
            try:
                db_id = manifest.register_db(f"own-{number}", DbKind.STREAM)
                os.write(notes, f"id {db_id}\n".encode())
            except Conflict:
                pass  # a random batch has used the id already
        rows = rng.randint(1, 6)
        os.write(notes, f"try {number}\n".encode())
        guard = manifest.submit(marked(home, number, rows))
        if rng.random() < 0.7:
            receipt = guard.result(60)
            os.write(notes, f"ack {number} {rows} {receipt.sequence}\n".encode())
        outcome(manifest.submit(maker.batch(manifest)))


def main(path: str, notes_path: str, seed: int, threads: int, batches: int) -> None:
    settings = ManifestSettings(map_bytes=1 << 20, group_ops_max=64)
    manifest = ManifestStore.open(path, settings=settings)
    hold_feed(manifest)
    notes = os.open(notes_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    with manifest.read() as txn:
        names = {record.name: db_id for db_id, record in txn.databases()}
    home = names[HOME] if HOME in names else manifest.register_db(HOME, DbKind.PAGES)
    workers = [
        threading.Thread(
            target=work, args=(manifest, home, notes, Random(f"{seed}/{n}"), seed * 1_000_000 + n * 100_000, batches)
        )
        for n in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    manifest.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
