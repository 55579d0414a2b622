"""Faults for the crash machine to find: each changes the manifest's code, in the child process that asks for it only.

A crash test that never fails may be one that cannot (RocksDB 15168).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.manifest import ownership
from quire.manifest.env import ManifestEnv
from quire.manifest.overlay import Overlay
from quire.manifest.queue import BatchQueue
from quire.manifest.store import ManifestStore
from quire.manifest.writer import ManifestWriter


def answers_early() -> None:
    """Guards resolve when their rows are written, before the transaction is committed."""
    transact, flush = ManifestWriter._transact, ManifestWriter._flush
    groups: list[Any] = []

    def transacting(self: ManifestWriter, group: Any, started: float) -> Any:
        groups[:] = [group]
        return transact(self, group, started)

    def flushing(self: ManifestWriter, txn: Any, changes: Any) -> int:
        rows = flush(self, txn, changes)
        self._resolve(groups[0])
        return rows

    _plant(ManifestWriter, _transact=transacting, _flush=flushing)


class TornTransaction:
    """A transaction that can be committed in two halves."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin
        self._txn = begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def tear(self) -> None:
        self._txn.commit()
        self._txn = self._begin()


def tears_commits() -> None:
    """Rows and change records are committed one after the other: nobody sees it but who comes after a crash in between."""
    flush, begin_write = Overlay.flush, ManifestEnv.begin_write

    def flushing(self: Overlay) -> int:
        rows = flush(self)
        self.txn.tear()
        return rows

    _plant(Overlay, flush=flushing)
    _plant(ManifestEnv, begin_write=lambda self: TornTransaction(lambda: begin_write(self)))


def forgets_a_change() -> None:
    """The last change record of a group is not written."""
    flush = ManifestWriter._flush

    def flushing(self: ManifestWriter, txn: Any, changes: Any) -> int:
        return flush(self, txn, changes[:-1] if len(changes) > 1 else changes)

    _plant(ManifestWriter, _flush=flushing)


def halves_batches() -> None:
    """Metrics of a batch are written with the next commit, or at close: half of a batch can be lost, but only to a crash."""
    flush, close = Overlay.flush, ManifestStore.close
    late: dict[bytes, Any] = {}

    def flushing(self: Overlay) -> int:
        pending = self.metrics.pending
        held = dict(pending)
        pending.clear()
        pending.update(late)
        rows = flush(self)
        pending.clear()
        pending.update(held)
        late.clear()
        late.update(held)
        return rows

    def closing(self: ManifestStore) -> None:
        self.writer.close()
        with self.env.begin_write() as txn:
            table = self.writer._overlay.metrics.table
            for key, record in late.items():
                txn.put(key, table.codec.encode(record), db=self.env.handles[table.name])
        close(self)

    _plant(Overlay, flush=flushing)
    _plant(ManifestStore, close=closing)


def reuses_ids() -> None:
    """After opening, the last id of each counter is handed out again."""
    original = ownership.next_ids

    def reading(txn: Any) -> dict[Any, int]:
        return {counter: max(1, upcoming - 1) for counter, upcoming in original(txn).items()}

    _plant(ownership, next_ids=reading)


def lets_batches_overtake() -> None:
    """Of the batches that are queued, the last is committed first."""
    take = BatchQueue.take

    def taking(self: BatchQueue, answered: int, patience_seconds: float) -> Any:
        taken = take(self, answered, patience_seconds)
        return taken if taken is None else taken[::-1]

    _plant(BatchQueue, take=taking)


def _plant(owner: Any, **changes: Callable[..., Any]) -> None:
    for name, change in changes.items():
        setattr(owner, name, change)


PLANTS: dict[str, Callable[[], None]] = {
    plant.__name__: plant
    for plant in (answers_early, tears_commits, forgets_a_change, halves_batches, reuses_ids, lets_batches_overtake)
}
