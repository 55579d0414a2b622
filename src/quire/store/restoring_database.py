"""Restores one database, stream or key-value set of an archived moment into a store that is in use (A10).

The archived moment is restored into scratch, which claims nothing, and the database is copied from there: pages by an import,
pairs by one load, records by appends. The copy has a temporary name until it is complete and was read back.

State after each step, and what happens if the restore stops there:
  restored    a directory in scratch/                        removed when the store is opened
  copied      `NEW.restoring`, tagged as such                dropped by the next attempt
  renamed     NEW

Threads: the caller's, in the owner. Raises `NameTaken`, `UnknownDatabase`, `Corruption`, and the errors of a restore.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

import msgspec

from quire.core.errors import Conflict, Corruption, InvalidName, NameTaken, UnknownDatabase
from quire.core.limits import MIB, NAME_BYTES_MAX
from quire.core.time_parsing import requested_moment
from quire.durable import names
from quire.durable.failpoints import hit
from quire.durable.files import OsDisk, remove_tree
from quire.lsm.bulk import BulkWriter, begin_load
from quire.manifest.ops.databases import RenameDb, SetDbOptions
from quire.manifest.records import DbKind
from quire.sqlite import importing
from quire.store.backup import Progress, no_progress
from quire.store.object_access import options_of

if TYPE_CHECKING:
    from quire.lsm.kv import Kv
    from quire.objects.options import StoreOptions
    from quire.pages.snapshot import Snapshot
    from quire.service.values import DatabaseInfo
    from quire.store.restoring import Restored
    from quire.store.store import Store
    from quire.stream.stream import Stream

TAG = "quire.restoring"
"""Tag of a database that is being copied; its value is the final name."""
SUFFIX = ".restoring"
RECORDS_PER_APPEND = 4096
APPEND_BYTES = 8 * MIB
"""Payload of one append, which is in memory: a record may have a megabyte."""

_lock = threading.Lock()
_under_way: set[tuple[str, str]] = set()
"""(store, name) of the restores that threads of this process are copying; guarded by `_lock`."""


class RestoredDatabase(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `restore_database`."""

    name: str
    db_id: int
    kind: DbKind
    source: str
    """Its name in the archive."""
    at_ms: int
    """The archived moment."""
    items: int
    """Pages, records or pairs."""
    sha256: str
    """Digest of the content, equal in the archive and in the store."""
    seconds: float


class CopyOpener(Protocol):
    """Restores an archived moment of a store into a directory and opens the copy; see `archive_copy.restored_copy`."""

    def __call__(
        self,
        url: str,
        scratch: str,
        *,
        at_ms: int | None = None,
        store_id: str = "",
        options: StoreOptions | None = None,
        progress: Progress | None = None,
    ) -> tuple[Restored, Store]: ...


def restore_database(
    store: Store,
    url: str,
    name: str,
    *,
    new: str = "",
    at: datetime | str | int | None = None,
    at_ms: int | None = None,
    store_id: str = "",
    options: StoreOptions | None = None,
    progress: Progress | None = None,
) -> RestoredDatabase:
    """Copy one database out of an archive or backup; see `Store.restore_db`."""
    began, new, progress = time.monotonic(), new or name, progress or no_progress
    at_ms = requested_moment(at, at_ms, now_ms=store.manifest.clock.now_ms())
    url = url or store.objects_url
    _check_new_name(new)
    with store.manifest.read() as txn:
        options, own_id = options or options_of(txn, store.settings, url), txn.store_id()
        if new in {info.name for info in store.databases()}:
            raise NameTaken("a database with this name already exists", hint="choose another name with --as", name=new)
    if url == store.objects_url:
        store_id = store_id or own_id
        if store.archive is not None and at_ms is None:
            store.archive.wait()
    scratch = os.path.join(store.path, names.SCRATCH, f"restore-db-{os.urandom(4).hex()}")
    try:
        restored, copy = store._open_copy(
            url, scratch, at_ms=at_ms, store_id=store_id, options=options, progress=progress
        )
        with copy:
            hit("restore_db.restored")
            try:
                source = copy.database(name)
            except UnknownDatabase as error:
                hint = "choose another moment with --at"
                raise UnknownDatabase(
                    "the archive has no such database at that moment", hint=hint, name=name
                ) from error
            db_id, items, digest = _copy(store, copy, source, new, progress)
    finally:
        with suppress(FileNotFoundError):
            remove_tree(OsDisk(), scratch)
    return RestoredDatabase(
        name=new,
        db_id=db_id,
        kind=source.kind,
        source=name,
        at_ms=restored.at_ms,
        items=items,
        sha256=digest,
        seconds=time.monotonic() - began,
    )


def _check_new_name(new: str) -> None:
    """Raise `InvalidName` for a name that cannot be given, also if only the temporary one is too long."""
    names.check_name("database", new)
    longest = NAME_BYTES_MAX - len(SUFFIX)
    if (size := len(new.encode())) > longest:
        hint = f"use 1 to {longest} bytes; `quire rename` can give it a longer name afterwards"
        raise InvalidName("the name is too long for a database that is being restored", hint=hint, name=new, size=size)


def _copy(store: Store, copy: Store, source: DatabaseInfo, new: str, progress: Progress) -> tuple[int, int, str]:
    """Copy one database under a temporary name, then rename it. Return its (id, items, digest)."""
    staging = new + SUFFIX
    with _alone(store, new):
        return _copy_as(store, copy, source, new, staging, progress)


@contextmanager
def _alone(store: Store, new: str) -> Iterator[None]:
    """Refuse other restores under this name during the block: each would take the other's copy for that of a killed attempt."""
    name = store.path, new
    with _lock:
        if name in _under_way:
            raise Conflict(
                "a database is already being restored under this name", hint="wait until it is there", name=new
            )
        _under_way.add(name)
    try:
        yield
    finally:
        with _lock:
            _under_way.discard(name)


def _copy_as(
    store: Store, copy: Store, source: DatabaseInfo, new: str, staging: str, progress: Progress
) -> tuple[int, int, str]:
    with suppress(UnknownDatabase):
        if TAG not in store.database(staging).tags:
            raise Conflict("the temporary name for the copy is taken by another database", name=staging)
        store.drop(staging, snapshots=True)  # left by an earlier attempt
    created = store.create(staging, source.kind, tags={**source.tags, TAG: new})
    try:
        copied = _COPIERS[source.kind](store, copy, source, created, progress)
        hit("restore_db.copied")
        # In one batch: without its tag, a copy with the temporary name would be taken for a database of the user's.
        ops = [RenameDb(created.db_id, new), SetDbOptions(created.db_id, source.tags)]
        store.manifest.submit(ops).result()
    except BaseException:
        store.drop(staging, snapshots=True)
        raise
    # After the block above: the copy has its name, so it is not dropped if the bucket does not answer.
    if store.manifest.barrier is not None:
        store.manifest.barrier.hold()
    return created.db_id, *copied


def _copy_pages(
    store: Store, copy: Store, source: DatabaseInfo, target: DatabaseInfo, progress: Progress
) -> tuple[int, str]:
    with copy.pages.open(source.db_id).open_snapshot() as version:
        if not version.lsn:
            return 0, hashlib.sha256().hexdigest()
        pages = store.pages.open(target.db_id, page_size=version.page_size)
        brought = importing.import_source(pages, _Pages(version), progress)
        importing.verify(pages, brought, progress)
    return brought.size_pages, brought.sha256


class _Pages:
    """A version of a page database as a source for an import (`importing.ImportedPages`)."""

    def __init__(self, version: Snapshot) -> None:
        self._version = version
        self.page_size = version.page_size
        self.size_pages = version.size_pages

    def read(self, first: int, count: int) -> dict[int, bytes]:
        pages = range(first, min(first + count, self.size_pages))
        images = self._version.read_pages(pages, cold=True)
        return {page: images[page] for page in pages}

    def read_page(self, page: int) -> bytes:
        return self.read(page, 1)[page]


def _copy_pairs(
    store: Store, copy: Store, source: DatabaseInfo, target: DatabaseInfo, progress: Progress
) -> tuple[int, str]:
    kv = store.kv(target.name)
    digest, pairs = hashlib.sha256(), 0
    with begin_load(kv) as load:
        writer = BulkWriter.of(kv, load)
        for batch in copy.kv(source.name).batches(b"", None, reverse=False):
            keys, values = batch.column("key"), batch.column("value")
            writer.add(keys, values)
            for key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True):
                _add_pair(digest, key, value)
            pairs += batch.num_rows
            progress("copying", pairs, 0)
        load.publish(writer.finish())
    return pairs, _compared(digest.hexdigest(), _pairs_digest(kv), target)


def _pairs_digest(kv: Kv) -> str:
    digest = hashlib.sha256()
    for key, value in kv.scan():
        _add_pair(digest, key, value)
    return digest.hexdigest()


def _add_pair(digest: hashlib._Hash, key: bytes, value: bytes) -> None:
    digest.update(b"%d:%d:" % (len(key), len(value)))
    digest.update(key)
    digest.update(value)


def _copy_records(
    store: Store, copy: Store, source: DatabaseInfo, target: DatabaseInfo, progress: Progress
) -> tuple[int, str]:
    restored, stream = copy.stream(source.name), store.stream(target.name)
    first, end = restored.first_record, restored.end_record
    copied = 0
    for block in _blocks(bytes(record.payload) for record in restored.read(first, end)):
        stream.append(block).result()
        copied += len(block)
        progress("copying", copied, end - first)
    return copied, _compared(_records_digest(restored), _records_digest(stream), target)


def _blocks(payloads: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield the payloads in lists for one append each."""
    block: list[bytes] = []
    size = 0
    for payload in payloads:
        block.append(payload)
        size += len(payload)
        if size >= APPEND_BYTES or len(block) >= RECORDS_PER_APPEND:
            yield block
            block, size = [], 0
    if block:
        yield block


def _records_digest(stream: Stream) -> str:
    digest = hashlib.sha256()
    for block in _record_blocks(stream):
        digest.update(block)
    return digest.hexdigest()


def _record_blocks(stream: Stream) -> Iterator[bytes]:
    """Yield the payloads to compare. Ids and times are left out: the new stream assigns its own."""
    for record in stream.read(stream.first_record, stream.end_record):
        yield b"%d:" % len(record.payload)
        yield bytes(record.payload)


def _compared(expected: str, actual: str, target: DatabaseInfo) -> str:
    if expected != actual:
        hint = "nothing was restored; run `quire verify`"
        raise Corruption("the copy does not match the original", hint=hint, name=target.name)
    return expected


_COPIERS = {DbKind.PAGES: _copy_pages, DbKind.LSM: _copy_pairs, DbKind.STREAM: _copy_records}
