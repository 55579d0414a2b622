"""Creates, forks and drops databases by the thousand.

Each database is one batch, submitted without waiting for the previous one: the writer commits all waiting batches together, so
a thousand databases cost a few syncs. At most `OUTSTANDING` batches wait for their commit, which bounds memory.

A name that is refused (taken, invalid) ends the call with its error. The refusal may arrive after later names were submitted,
so the error's `where` says what became of all names that were read: `read` is their number, `refused` lists those that failed,
and `done` is the number of the others, which are kept. A second call with the names from position `read` on continues. An error
of the iterable itself is raised once all submitted batches have completed, so that nothing appears later.

Threads: any. Raises `InvalidInput` for a string, and the errors of creating, forking or dropping one database."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from quire.core.errors import InvalidInput, QuireError
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
    """Drop databases and return their ids and kinds, in the order of the names. A repeated name is dropped once."""

    given: set[str] = set()

    def drop(name: str) -> tuple[tuple[int, DbKind], ManifestGuard] | None:
        if name in given:
            return None
        given.add(name)
        with manifest.read() as txn:
            db_id, record = txn.require_database(name)
        return (db_id, record.kind), manifest.drop_db(db_id, snapshots=snapshots)

    return pipelined(names, drop)


def checked_names(names: Iterable[str]) -> Iterable[str]:
    """Return `names`; refuse one string, whose letters would otherwise be taken for names."""
    if isinstance(names, str | bytes):
        raise InvalidInput("the names must be a list, not one string", hint=f"write [{names!r}]", names=names)
    return names


def pipelined(names: Iterable[str], submit: Callable[[str], tuple[T, ManifestGuard] | None]) -> list[T]:
    """Submit one batch for each name, at most `OUTSTANDING` at a time, and return what `submit` returned with each guard.

    `submit` returns None for a name that needs no batch.
    """
    run = _Run[T]()
    try:
        for name in checked_names(names):
            run.submit(name, submit)
            if len(run.waiting) >= OUTSTANDING:
                run.wait(OUTSTANDING // 2)
            if run.failure is not None:
                break
    finally:
        run.wait(0)  # also if `names` raises: what was submitted happens in any case
    if run.failure is not None:
        run.failure.where.update(done=len(run.done), read=run.read, refused=run.refused)
        raise run.failure
    return run.done


class _Run(Generic[T]):
    """The names read so far, and what became of each."""

    def __init__(self) -> None:
        self.read = 0
        self.done: list[T] = []
        self.refused: list[str] = []
        self.failure: QuireError | None = None
        self.waiting: deque[tuple[str, T, ManifestGuard]] = deque()

    def submit(self, name: str, submit: Callable[[str], tuple[T, ManifestGuard] | None]) -> None:
        """Submit the batch of a name."""
        self.read += 1
        try:
            if (submitted := submit(name)) is not None:
                self.waiting.append((name, *submitted))
        except QuireError as error:
            self.wait(0)  # an earlier name's error comes first
            self._refuse(name, error)

    def wait(self, left: int) -> None:
        """Wait until at most `left` batches are waiting, or for all of them after a failure."""
        while len(self.waiting) > left or (self.failure is not None and self.waiting):
            name, result, guard = self.waiting.popleft()
            try:
                guard.result()
                self.done.append(result)
            except QuireError as error:
                self._refuse(name, error)

    def _refuse(self, name: str, error: QuireError) -> None:
        self.refused.append(name)
        self.failure = self.failure or error
