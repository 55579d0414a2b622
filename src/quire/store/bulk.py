"""Creates, forks and drops databases by the thousand.

Each database is one batch, submitted without waiting for the previous one: the writer commits all waiting batches together, so
a thousand databases cost a few syncs. At most `OUTSTANDING` batches wait for their commit, which bounds memory.

A name that is refused (taken, invalid) ends the call with its error after the batches submitted before it have completed;
`done` in the error's `where` is the number of those that succeeded. They are kept: a second call with the rest continues.

Threads: any. Raises the errors of creating, forking or dropping one database."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from quire.core.errors import QuireError
from quire.durable.names import check_name
from quire.manifest import tables as t
from quire.manifest.guard import ManifestGuard
from quire.manifest.ops.base import Counter
from quire.manifest.ops.databases import RegisterDb, SetDbOptions
from quire.manifest.ops.snapshots import ForkDb
from quire.manifest.records import DbKind, DbRecord
from quire.manifest.store import ManifestStore

OUTSTANDING = 2_000
"""Most batches that may wait for their commit at once."""

T = TypeVar("T")


def create_many(
    manifest: ManifestStore, names: Iterable[str], kind: DbKind, tags: dict[str, str], namespace_id: int
) -> list[int]:
    """Create databases and return their ids, in the order of the names."""

    def create(name: str) -> tuple[int, ManifestGuard]:
        check_name("database", name)
        db_id = manifest.allocate(Counter.DB)
        record = DbRecord(
            name=name, kind=kind, created_at_ms=manifest.clock.now_ms(), namespace_id=namespace_id, tags=tags
        )
        return db_id, manifest.submit((RegisterDb(db_id, t.DB.codec.checked(record)),))

    return pipelined(names, create)


def fork_many(
    manifest: ManifestStore, source: int, snapshot_id: int, names: Iterable[str], tags: dict[str, str]
) -> list[int]:
    """Fork a page database at a snapshot, once for each name, and return the ids, in the order of the names."""
    with manifest.read() as txn:
        _, record = txn.require_database(source)
    own = {**record.tags, **tags}

    def fork(name: str) -> tuple[int, ManifestGuard]:
        check_name("database", name)
        db_id = manifest.allocate(Counter.DB)
        op = ForkDb(db_id, source, name, snapshot_id)
        return db_id, manifest.submit((op, SetDbOptions(db_id, own, None)) if own else (op,))

    return pipelined(names, fork)


def drop_many(manifest: ManifestStore, names: Iterable[str], *, snapshots: bool) -> list[tuple[int, DbKind]]:
    """Drop databases and return their ids and kinds, in the order of the names."""

    def drop(name: str) -> tuple[tuple[int, DbKind], ManifestGuard]:
        with manifest.read() as txn:
            db_id, record = txn.require_database(name)
        return (db_id, record.kind), manifest.drop_db(db_id, snapshots=snapshots)

    return pipelined(names, drop)


def pipelined(names: Iterable[str], submit: Callable[[str], tuple[T, ManifestGuard]]) -> list[T]:
    """Submit one batch for each name, at most `OUTSTANDING` at a time, and return what `submit` returned with each guard."""
    done: list[T] = []
    waiting: deque[tuple[T, ManifestGuard]] = deque()
    failure: QuireError | None = None
    for name in names:
        try:
            waiting.append(submit(name))
        except QuireError as error:
            failure = error
            break
        if len(waiting) >= OUTSTANDING and (failure := _answer(waiting, done, OUTSTANDING // 2)) is not None:
            break
    rest = _answer(waiting, done, 0)
    if (failure := failure or rest) is not None:
        failure.where["done"] = len(done)
        raise failure
    return done


def _answer(waiting: deque[tuple[T, ManifestGuard]], done: list[T], left: int) -> QuireError | None:
    """Wait until at most `left` batches are waiting, or for all of them after a failure. Return the first error."""
    failure: QuireError | None = None
    while len(waiting) > left or (failure is not None and waiting):
        result, guard = waiting.popleft()
        try:
            guard.result()
            done.append(result)
        except QuireError as error:
            failure = failure or error
    return failure
