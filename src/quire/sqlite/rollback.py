"""Sets a page database back to an earlier version, as a new version: the versions in between are kept.

    1. The writer slot is taken: there are no commits from here on. Readers keep the versions they have.
    2. The pages that differ are written into one transaction.
    3. The current version becomes the snapshot `before-rollback-LSN`, by which the rollback can be undone.
    4. The transaction is committed, made durable, and recorded in the audit.

A crash before 4 leaves the database as it was, with the snapshot at most; another rollback uses the same one. A commit is one
record of the log, so there is no intermediate state. A commit that fails removes the snapshot, unless its outcome is unknown.

Two numbers of SQLite's header are not set back: the change counter and the schema cookie grow. Otherwise a connection that
was idle during the rollback and later commits would take cached pages or a cached schema for current ones.

Forks, snapshots, replicas, the feed, the archive and standbys see an ordinary commit. A connection that has read, and writes
after the rollback, gets `SQLITE_BUSY_SNAPSHOT` as after any other commit.

Threads: any. Raises `SnapshotGone` and the other errors of opening a version, `ReadOnly`, `TimedOut`, `Conflict` for a
database that follows a file, `WrongKind`.
"""

from __future__ import annotations

import shlex
from contextlib import closing, suppress
from datetime import datetime

import apsw
import msgspec

from quire.core.errors import Conflict, EpochLost, NotFound, UnknownSnapshot
from quire.core.ids import Epoch
from quire.durable.failpoints import hit
from quire.manifest import tables as t
from quire.manifest.ops.databases import RecordRollback
from quire.manifest.snapshots import RolledBack, SnapshotInfo, before_rollback
from quire.manifest.store import ManifestStore
from quire.pages.catalog import find_database
from quire.pages.engine import PageEngine
from quire.pages.pagestore import PageStore
from quire.pages.snapshot import Snapshot
from quire.pages.transaction import WriteTxn
from quire.sqlite.dbfile import MAGIC
from quire.sqlite.importing import STEP_BYTES, write_changed

TAGS = {"hold": "rollback"}
SNAPSHOT_TAGS = {"by": "rollback"}
TIMEOUT_SECONDS = 30.0
"""Seconds to wait for the current writer, and for space in the WAL budget."""

CHANGE_COUNTER, SCHEMA_COOKIE, VALID_FOR = slice(24, 28), slice(40, 44), slice(92, 96)
"""Big-endian 32-bit numbers of SQLite's header."""


def roll_back(manifest: ManifestStore, engine: PageEngine, name: str, to: str | int | Epoch | datetime) -> RolledBack:
    """Set a database back to a snapshot, an lsn, an epoch or a time, in one commit that is durable when this returns."""
    with manifest.read() as txn:
        db_id, record = find_database(txn, name)
        followed = txn.get(t.FOLLOWED_FILES, db_id)
    if followed is not None:
        hint = f"run `quire sqlite unfollow {shlex.quote(record.name)}` first, or roll the file back"
        raise Conflict("the database follows a file, which would undo the rollback", hint=hint, path=followed.path)
    if not record.page_size:
        raise NotFound("the database has no earlier version: nothing has been written to it yet", database=record.name)
    store = engine.open(db_id)
    with _open_version(manifest, engine, store, to) as target, store.begin(TIMEOUT_SECONDS) as txn_:
        # Opened while no other commit is possible, so this is the version that the transaction builds on.
        with store.open_snapshot(written=True, tags=TAGS) as before:
            changed = _write(txn_, store, before, target)
            done = RolledBack(
                database=record.name,
                db_id=db_id,
                to_lsn=target.lsn,
                to_ms=target.mark.commit_ms,
                lsn=before.lsn,
                before_lsn=before.lsn,
                snapshot=before_rollback(before.lsn) if changed else "",
                changed_pages=changed,
            )
            if not changed:
                txn_.rollback()
                return done
            # Before the commit: a snapshot is of the version that is newest when it is taken.
            created = _keep(manifest, engine, db_id, done.snapshot)
        hit("sqlite.rollback.kept")
        try:
            guard = txn_.commit()
        except BaseException:
            # If the database is unusable, recovery may find the commit: the snapshot is then the only way back.
            if created is not None and store.wal.failure is None:
                with suppress(UnknownSnapshot):
                    manifest.snapshots.drop(db_id, created.snapshot_id)
            raise
        hit("sqlite.rollback.written")
        lsn = guard.result()
    hit("sqlite.rollback.committed")
    done = msgspec.structs.replace(done, lsn=lsn)
    manifest.submit(
        [RecordRollback(**{name: getattr(done, name) for name in RecordRollback.__struct_fields__})]
    ).result()
    return done


def _open_version(
    manifest: ManifestStore, engine: PageEngine, store: PageStore, to: str | int | Epoch | datetime
) -> Snapshot:
    version = manifest.snapshots.find(store.db_id, to) if isinstance(to, str) else to
    if isinstance(version, SnapshotInfo):
        return engine.open_view(store.db_id, version.snapshot_id)
    store.wal.sync()  # `to` may lie in commits that are written but not durable; only durable ones are found
    return store.open_snapshot(at=version, tags=TAGS)


def _keep(manifest: ManifestStore, engine: PageEngine, db_id: int, name: str) -> SnapshotInfo | None:
    """Keep the current version as a named snapshot; return None if an earlier attempt has done so."""
    with suppress(UnknownSnapshot):
        manifest.snapshots.get(db_id, name)
        return None
    return engine.snapshot(db_id, name, tags=SNAPSHOT_TAGS)


def _write(txn: WriteTxn, store: PageStore, before: Snapshot, target: Snapshot) -> int:
    """Write the pages that differ and return how many there were."""
    try:
        differing = [page for page in store.changed(target.lsn, before.mark) if 0 < page < target.size_pages]
    except EpochLost:  # the store was taken over in between: the changed pages are unknown, so all are compared
        differing = list(range(1, min(before.size_pages, target.size_pages)))
    pages = [*differing, *range(before.size_pages, target.size_pages)]
    step, changed = max(STEP_BYTES // store.page_size, 1), 0
    for start in range(0, len(pages), step):
        changed += write_changed(txn, before, target.read_pages(pages[start : start + step], cold=True))
    size_pages = max(target.size_pages, 1)  # a database that has pages keeps at least one
    is_same = not changed and size_pages == before.size_pages
    first = target.read_page(0) if target.size_pages else _empty(store.page_size)
    changed += write_changed(txn, before, {0: _header_grown(first, before.read_page(0), is_same=is_same)})
    if txn.size_pages != size_pages:
        txn.truncate(size_pages)
    return changed


def _empty(page_size: int) -> bytes:
    """Return a SQLite database without tables; in a store it has one page."""
    with closing(apsw.Connection(":memory:")) as connection:
        connection.execute(f"PRAGMA page_size={page_size}; CREATE TABLE t(c); DROP TABLE t; VACUUM")
        return connection.serialize("main")


def _header_grown(image: bytes, current: bytes, *, is_same: bool) -> bytes:
    """Return the first page of a version with a change counter and a schema cookie that no connection has seen.

    Returns the current page if it and all others differ in nothing but these numbers.
    """
    if not (image.startswith(MAGIC) and current.startswith(MAGIC)):
        return image  # not a SQLite database
    page = bytearray(image)
    for number in (CHANGE_COUNTER, SCHEMA_COOKIE, VALID_FOR):
        page[number] = current[number]
    if is_same and page == current:
        return current
    for number in (CHANGE_COUNTER, SCHEMA_COOKIE):
        page[number] = ((int.from_bytes(current[number], "big") + 1) % (1 << 32)).to_bytes(4, "big")
    page[VALID_FOR] = page[CHANGE_COUNTER]
    return bytes(page)
