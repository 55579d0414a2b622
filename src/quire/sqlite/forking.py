"""A fork of a database as it was at any version that can still be read: a snapshot's, a commit's, a moment's.

Terms
  kept     a version that only a snapshot still holds: the checkpoint after it has put newer pages into the live chunks

Rules
  1. A snapshot's name is forked as ever. A version that the log still holds is anchored where it is: nothing is copied, and a
     lease holds it until the fork has committed (P13).
  2. A kept version may lie before its snapshot's. Then the snapshot is forked, and the pages that were changed since are set
     back in one commit: it costs what changed between the two.
  3. Until that commit the fork has a name of its own (`unfinished_name`): under the name that was asked for there is the whole
     fork or none. What fails is dropped; what a crash leaves is seen by `quire ls` and dropped by the next attempt.

Threads: any. Raises what finding a version raises (`SnapshotGone`, `OutOfRange`, `InvalidInput`), and `NameTaken`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime

from quire.core.errors import NameTaken, UnknownDatabase
from quire.core.ids import Epoch
from quire.durable.names import check_name
from quire.manifest.store import ManifestStore
from quire.pages.anchors import publish_at
from quire.pages.catalog import find_database
from quire.pages.engine import PageEngine
from quire.pages.framemap import FrameMap, Regions
from quire.pages.snapshot import Snapshot
from quire.pages.view import ViewReader

SET_BACK_AT_ONCE = 1_024
"""Pages that are read together when a fork is set back."""
TAGS = {"hold": "fork"}


def fork_at(
    manifest: ManifestStore, engine: PageEngine, name: str, new_name: str, at: str | int | Epoch | datetime
) -> int:
    """A new database that begins as another one was `at` a snapshot's name, an lsn, an epoch or a time; its id."""
    with manifest.read() as txn:
        db_id, _ = find_database(txn, name)
    if isinstance(at, str):
        return engine.fork(db_id, new_name, at=at)
    _require_free(manifest, new_name)
    store = engine.open(db_id)
    lsn = at.lsn if isinstance(at, Epoch) else at
    if not isinstance(lsn, int) or lsn <= store.wal.written.lsn:
        store.wal.sync()  # what was written may be asked for, and only what is durable can be found
    with store.open_snapshot(at=at, tags=TAGS) as version:
        if isinstance(version, ViewReader):
            return _from_kept(manifest, engine, db_id, new_name, version)
        return _anchored(manifest, engine, db_id, new_name, version)


def unfinished_name(new_name: str) -> str:
    """What a fork is called while it is set back (rule 3)."""
    return f"{new_name}.unfinished"


def _require_free(manifest: ManifestStore, name: str) -> None:
    """Said before anything is done; the manifest asks again when it counts."""
    check_name("database", name)
    if (db_id := _named(manifest, name)) is not None:
        raise NameTaken("a database has this name", hint="choose another", name=name, db_id=db_id)


def _named(manifest: ManifestStore, name: str) -> int | None:
    with suppress(UnknownDatabase), manifest.read() as txn:
        return txn.database_id(name)
    return None


def _anchored(manifest: ManifestStore, engine: PageEngine, db_id: int, new_name: str, version: Snapshot) -> int:
    """Fork a version that the log still holds where it is, without copying; `version` is the lease (rule 1)."""
    engine.flush(db_id)  # a fork pins sealed segments
    fork = manifest.snapshots.fork
    return publish_at(manifest, db_id, version.mark, lambda db_id, anchor: fork(db_id, new_name, anchor=anchor))


def _from_kept(manifest: ManifestStore, engine: PageEngine, db_id: int, new_name: str, version: ViewReader) -> int:
    """Fork the snapshot behind a kept version and set later pages back, under an unfinished name until then (rules 2
    and 3)."""
    snapshot_id = version.view.snapshot_id
    with engine.open_view(db_id, snapshot_id) as whole:
        if whole.lsn == version.lsn:
            return engine.fork(db_id, new_name, at=snapshot_id)
        unfinished = unfinished_name(new_name)
        if (left := _named(manifest, unfinished)) is not None:
            manifest.drop_db(left).result()
        made = engine.fork(db_id, unfinished, at=snapshot_id)
        try:
            _set_back(engine, made, version, whole)
            manifest.rename_db(made, new_name).result()
        except BaseException:
            manifest.drop_db(made).result()
            raise
    return made


def _set_back(engine: PageEngine, made: int, version: ViewReader, whole: ViewReader) -> None:
    with engine.open(made).begin() as txn:
        if version.size_pages < whole.size_pages:
            txn.truncate(version.size_pages)
        pages = list(_changed_since(engine, version, whole))
        for start in range(0, len(pages), SET_BACK_AT_ONCE):
            txn.write_pages(version.read_pages(pages[start : start + SET_BACK_AT_ONCE], cold=True))
        guard = txn.commit()
    guard.result()


def _changed_since(engine: PageEngine, version: ViewReader, whole: ViewReader) -> Iterator[int]:
    """The pages of a version that its snapshot has otherwise: written after it, or cut off."""
    newest = FrameMap.of(Regions(engine.sources), whole.view.pins, whole.lsn)
    for page in newest:
        found = newest.find(page)
        if found is not None and found[0] > version.lsn and page < min(version.size_pages, whole.size_pages):
            yield page
    yield from range(whole.size_pages, version.size_pages)
