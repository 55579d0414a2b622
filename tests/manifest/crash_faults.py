"""Faults that the crash machine must detect: each changes the code of the manifest in the child process that requests it.

A crash test that never fails may be unable to fail (RocksDB 15168).
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

    def remember_group(self: ManifestWriter, group: Any, started: float) -> Any:
        groups[:] = [group]
        return transact(self, group, started)

    def flush_and_resolve(self: ManifestWriter, txn: Any, changes: Any) -> int:
        rows = flush(self, txn, changes)
        self._resolve(groups[0])
        return rows

    _patch(ManifestWriter, _transact=remember_group, _flush=flush_and_resolve)


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
    """Rows and change records are committed in two transactions, which only a crash between them reveals."""
    flush, begin_write = Overlay.flush, ManifestEnv.begin_write

    def flush_and_tear(self: Overlay) -> int:
        rows = flush(self)
        self.txn.tear()
        return rows

    _patch(Overlay, flush=flush_and_tear)
    _patch(ManifestEnv, begin_write=lambda self: TornTransaction(lambda: begin_write(self)))


def forgets_a_change() -> None:
    """The last change record of a group is not written."""
    flush = ManifestWriter._flush

    def flush_without_last(self: ManifestWriter, txn: Any, changes: Any) -> int:
        return flush(self, txn, changes[:-1] if len(changes) > 1 else changes)

    _patch(ManifestWriter, _flush=flush_without_last)


def halves_batches() -> None:
    """Metrics of a batch are written with the next commit or at close, so that only a crash loses part of a batch."""
    flush, close = Overlay.flush, ManifestStore.close
    late: dict[bytes, Any] = {}

    def flush_previous_metrics(self: Overlay) -> int:
        pending = self.metrics.pending
        current = dict(pending)
        pending.clear()
        pending.update(late)
        rows = flush(self)
        pending.clear()
        pending.update(current)
        late.clear()
        late.update(current)
        return rows

    def close_and_flush(self: ManifestStore) -> None:
        self.writer.close()
        with self.env.begin_write() as txn:
            table = self.writer._overlay.metrics.table
            for key, record in late.items():
                txn.put(key, table.codec.encode(record), db=self.env.handles[table.name])
        close(self)

    _patch(Overlay, flush=flush_previous_metrics)
    _patch(ManifestStore, close=close_and_flush)


def reuses_ids() -> None:
    """After opening, the last id of each counter is handed out again."""
    original = ownership.next_ids

    def repeat_last_ids(txn: Any) -> dict[Any, int]:
        return {counter: max(1, upcoming - 1) for counter, upcoming in original(txn).items()}

    _patch(ownership, next_ids=repeat_last_ids)


def reorders_batches() -> None:
    """Of the queued batches, the last is committed first."""
    take = BatchQueue.take

    def take_reversed(self: BatchQueue, answered: int, patience_seconds: float) -> Any:
        batches = take(self, answered, patience_seconds)
        return batches if batches is None else batches[::-1]

    _patch(BatchQueue, take=take_reversed)


def _patch(owner: Any, **changes: Callable[..., Any]) -> None:
    for name, change in changes.items():
        setattr(owner, name, change)


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (answers_early, tears_commits, forgets_a_change, halves_batches, reuses_ids, reorders_batches)
}
