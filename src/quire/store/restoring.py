"""Restores a store from its bucket (A10): files, then the manifest, then corrections of rows that describe the old machine.

Restoring claims nothing: the restored directory can be read as of its moment, and written after `quire takeover`. Chunks,
tables and compressed segments stay in the bucket and are read on demand.

What is on disk after each step, and what happens if the restore stops there:
  directory made     .files/                                opening and restoring refuse it: it is incomplete (layout.py)
  base, log applied  files, and rows of some of the log     the same
  corrected          everything but restored.json           the same
  named              restored.json, then no .files/         opens; fenced at its first upload
  disowned           owner.json                             can be read; can be written after a takeover

With `takeover`, after the log is applied:
  claimed            owner.json, the claim's object         as above: incomplete; owners before it are fenced
  sealed, named      restored.json, then no .files/         can be read; `quire takeover` continues with the claimed epoch
  taken over         the new epoch                          opens

Threads: one. Raises `InvalidInput`, `ObjectNotFound`, `Corruption`, and the errors of the disk and the object store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from quire.archive.format import NO_DIGEST, AnyEvent, Header, Position
from quire.archive.log_reader import (
    RestorePoint,
    base_events,
    header_of,
    is_continuous,
    log_events,
    with_base_before,
)
from quire.archive.replay import Replay
from quire.archive.sealing import highest_epoch, newest_missing_position, seal, seal_later
from quire.archive.state_files import Origin, write_origin
from quire.archive.store_choice import choose_store
from quire.archive.window import point_at
from quire.core.clock import Clock, SystemClock
from quire.core.errors import Corruption, InvalidInput, ObjectNotFound, QuireError, StoreFenced
from quire.core.events import emit
from quire.core.settings import StoreSettings
from quire.core.time_parsing import requested_moment
from quire.core.timeline import preceding
from quire.durable import names
from quire.durable.failpoints import hit
from quire.durable.files import Disk, OsDisk, remove_tree
from quire.jobs.enqueue import has_open_segment
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.namespaces import Parent, begin_restored
from quire.manifest.records import DbKind, MetaRecord, Residency
from quire.manifest.store import ManifestStore
from quire.objects.ownership import OwnerFile, claim_epoch, no_successor, write_file
from quire.store import layout, object_location
from quire.store.backup import Progress, copy_into, no_progress
from quire.store.backup_index import open_backup, read_index
from quire.store.config_edit import Value, change_config
from quire.store.opening import open_owner

if TYPE_CHECKING:
    from quire.manifest.overlay import TableRows
    from quire.manifest.reads import ReadTxn
    from quire.objects.api import ObjectStore
    from quire.objects.options import StoreOptions
    from quire.store.store import Store


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a restore."""

    path: str
    store_id: str
    position: Position
    at_ms: int
    newest: Position
    """The newest log object of that owner; those after `position` were not restored."""
    damaged: tuple[Position, ...] = ()
    """Those of them that were requested and are damaged. The ones after them need them."""
    abandoned: Position | None = None
    """A newer state that the store had at the requested time. A takeover of an earlier state has abandoned it; restore it with
    its owner epoch."""
    abandoned_at_ms: int = 0
    objects: int
    bytes: int
    """Bytes read from the bucket."""
    files: int
    remote_files: int
    seconds: float
    is_backup: bool = False
    """Whether a backup was restored: the directory then has everything and can be written at once."""


def restore(
    url: str,
    directory: str | os.PathLike[str],
    *,
    at: datetime | str | int | None = None,
    at_ms: int | None = None,
    epoch: int | None = None,
    store_id: str = "",
    options: StoreOptions | None = None,
    takeover: bool = False,
    disk: Disk | None = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> Restored:
    """Restore the store in the bucket at `url` into `directory`: its newest state, or the newest one not after `at`.

    `at` is a time, a text such as "15m" or "2026-05-01T14:30" (UTC), or milliseconds since the Unix epoch, as `at_ms` is.
    `epoch` restores a state of that owner epoch, also if a takeover of an earlier state has abandoned it. If the last log
    object is damaged, the state before it is restored.

    `takeover=True` also claims the next owner epoch, seals the log of the owner that wrote it, applies what that owner wrote
    until then, and makes this directory the owner.
    """
    started = time.monotonic()
    disk, clock, progress = disk or OsDisk(), clock or SystemClock(), progress or no_progress
    at_ms = requested_moment(at, at_ms, now_ms=clock.now_ms())
    is_newest = at_ms is None and epoch is None
    if takeover and not is_newest:
        hint = "restore without --takeover, then run `quire takeover --discard`"
        raise InvalidInput("a restore of an earlier state cannot take over directly", hint=hint)
    url = url if "://" in url else os.path.abspath(url)  # a relative path in quire.toml is relative to the store
    root = _empty_directory(disk, directory)
    bucket = open_backup(url, options=options)
    try:
        store_id = choose_store(bucket, store_id)
        point = point_at(bucket, store_id, at_ms, epoch=epoch)
        index = read_index(bucket, point.store_id, point.position)
        if index is not None and takeover:
            raise InvalidInput("a restored backup is a separate store", hint="restore it without --takeover", url=url)
        layout.make_directory(disk, root)
        with _beginning_again(bucket, point, is_newest=is_newest):
            replay, digest, count, size = replay_state(bucket, point, disk, root, progress)
        with replay:
            if takeover:
                point, digest = _depose(bucket, point, digest, replay, root, disk, clock)
            # Objects after a break, or of an owner that completed no base, cannot be restored by any restore.
            given_up = newest_missing_position(bucket, point.store_id, point.position) if takeover else None
            home = url if index is None else ""
            if index is not None:  # a backup: everything is copied here, and the backup itself is no longer needed
                copy_into(url, bucket, point.store_id, index, replay, root, options=options, progress=progress)
            correct_rows(replay, root, home, is_backup=index is not None)
            write_config(disk, root, home, options if index is None else None)
            replay.settle()
            origin = _origin(point, bucket.url, digest) if index is None else None
            if origin:
                write_origin(disk, root, origin)
            replay.finish()
        if takeover:
            _become_owner(bucket, point, given_up, root, disk, clock)
        else:
            _recover(root, disk, clock, point, origin)
        return _result(root, point, replay, count, size, time.monotonic() - started, is_backup=index is not None)
    except _NewerBase:  # once the log is sealed, this does not happen again
        _empty(disk, root)
        return restore(
            url, root, store_id=store_id, options=options, takeover=takeover, disk=disk, clock=clock, progress=progress
        )
    finally:
        bucket.close()


def _become_owner(
    bucket: ObjectStore, point: RestorePoint, given_up: Position | None, root: str, disk: Disk, clock: Clock
) -> None:
    """Take the store over with the restored directory, in the epoch that it has claimed, and run recovery."""
    # Another takeover that came first has continued the log: what it has put is not given up, but refused.
    discard = given_up == newest_missing_position(bucket, point.store_id, point.position)
    with open_owner(root, quiet_settings(disk, root), clock, disk, takeover=True, discard=discard) as store:
        open_written(store)


def _empty_directory(disk: Disk, directory: str | os.PathLike[str]) -> str:
    """Return the path of the directory to restore into, which must be empty or not exist."""
    root = os.path.abspath(os.fspath(directory))
    if layout.directory_state(disk, root) not in (layout.DirectoryState.NOTHING, layout.DirectoryState.EMPTY):
        raise InvalidInput("the directory is not empty", hint="restore into a new directory", path=root)
    return root


def _empty(disk: Disk, root: str) -> None:
    """Remove what a replay has left in a directory. `.files/` goes last: without it the rest would pass for a store."""
    left = [name for name in disk.names(root) if name not in layout.FOREIGN_BUT_FINE]
    for name in sorted(left, key=names.REPLAYED.__eq__):
        remove_tree(disk, os.path.join(root, name))


class _NewerBase(Exception):
    """A base was completed while an older log was replayed: by the owner, after a break of its chain, or by its successor."""


@contextmanager
def _beginning_again(bucket: ObjectStore, point: RestorePoint, *, is_newest: bool) -> Iterator[None]:
    """Raise `_NewerBase` if an object is missing because the owner has trimmed it, and has a newer base."""
    try:
        yield
    except ObjectNotFound:
        if is_newest and point_at(bucket, point.store_id).base != point.base:
            raise _NewerBase from None
        raise


def _result(
    root: str, point: RestorePoint, replay: Replay, count: int, size: int, seconds: float, *, is_backup: bool
) -> Restored:
    return Restored(
        path=root,
        store_id=point.store_id,
        position=point.position,
        at_ms=point.at_ms,
        newest=point.newest,
        damaged=point.damaged,
        abandoned=point.abandoned,
        abandoned_at_ms=point.abandoned_at_ms,
        objects=count,
        bytes=size,
        files=replay.files,
        remote_files=len(replay.remote),
        seconds=seconds,
        is_backup=is_backup,
    )


def _origin(point: RestorePoint, url: str, digest: bytes) -> Origin:
    return Origin(store_id=point.store_id, url=url, position=point.position, digest=digest, at_ms=point.at_ms)


def replay_state(
    bucket: ObjectStore, point: RestorePoint, disk: Disk, root: str, progress: Progress
) -> tuple[Replay, bytes, int, int]:
    """Replay a restore point into a directory that is otherwise empty. Return (the open replay, digest of the last object,
    objects, bytes).

    If a part of its base is damaged or missing, the base before and a longer part of the log are replayed. A backup's log has
    only what changed while its base was read.
    """
    while True:
        replay = Replay(disk, root)
        try:
            return replay, *replay_point(bucket, point, replay, progress)
        except BaseException as error:
            replay.close()
            if not isinstance(error, QuireError) or read_index(bucket, point.store_id, point.position) is not None:
                raise
            point = with_base_before(bucket, point, error)
        _empty(disk, root)


def replay_point(
    bucket: ObjectStore, point: RestorePoint, replay: Replay, progress: Progress
) -> tuple[bytes, int, int]:
    """Apply the base and the log up to a restore point. Return (digest of the last object, objects, bytes)."""
    first = Position(point.position.epoch, point.base.first_log)
    parts, logs = len(point.base.parts), point.position.number - first.number + 1
    size = sum(part_size for _, part_size, _ in point.base.parts)
    replay.base = point.base
    for number, events in enumerate(base_events(bucket, point.base), 1):
        replay.apply(events)
        progress("base", number, parts)
    last = NO_DIGEST
    for number, (header, digest, events) in enumerate(log_events(bucket, point.store_id, first, point.position), 1):
        replay.apply(events)
        size, last = size + header.body_bytes, digest
        progress("log", number, logs)
    return last, parts + logs, size


def _depose(
    bucket: ObjectStore, point: RestorePoint, digest: bytes, replay: Replay, root: str, disk: Disk, clock: Clock
) -> tuple[RestorePoint, bytes]:
    """Claim the next owner epoch, seal the log of the owner before it, and apply what that one wrote until then."""
    # In this order (A2): an owner whose log is sealed, and a standby whose promotion was interrupted, find the claim, also if
    # this process dies before it has begun the epoch.
    successor = _claim(bucket, point, root, disk, clock)
    return _seal(bucket, point, digest, replay, successor, clock)


def _claim(bucket: ObjectStore, point: RestorePoint, root: str, disk: Disk, clock: Clock) -> int:
    """Claim the next owner epoch for the directory, and return its number. From then on all owners before it are fenced."""
    hit("restore.replayed")
    epoch = highest_epoch(bucket, point.store_id, point.position.epoch) + 1
    if not claim_epoch(bucket, disk, root, point.store_id, epoch, clock.now_ms()):
        what = f"another directory has claimed owner epoch {epoch} at the same moment"
        hint = "use that directory, or remove this one and restore again"
        raise StoreFenced(what, hint=hint, path=root)
    return epoch


def _seal(
    bucket: ObjectStore, point: RestorePoint, digest: bytes, replay: Replay, successor: int, clock: Clock
) -> tuple[RestorePoint, bytes]:
    """Seal the log of the owner that wrote it, and apply what it wrote until then. After a broken chain nothing is applied: the
    restored state is the last consistent one, unless a base has followed (`_NewerBase`)."""
    epoch, now_ms = point.position.epoch, clock.now_ms()
    seal_later(bucket, point.store_id, epoch, successor, now_ms)
    if point_at(bucket, point.store_id).position.epoch > epoch:
        raise _NewerBase  # one of these owners has completed a base meanwhile, and may have trimmed the log that was replayed
    if point.newest != point.position:
        seal(bucket, point.store_id, epoch, successor, now_ms)
        _refuse_newer_base(bucket, point.store_id, point.position)
        return point, digest
    try:
        known = (header_of(bucket, point.store_id, point.position), digest)
    except ObjectNotFound:
        raise _NewerBase from None  # the owner has put one before it removed this object

    applied, chain = [(point.position, digest)], [True]

    def overtaken(header: Header, digest: bytes, events: list[AnyEvent]) -> None:
        chain[0] = chain[0] and is_continuous(header, events)
        if chain[0]:
            replay.apply(events)
            applied[0] = header.position, digest

    # From the last object that was applied: what the owner acknowledged while this restore was reading is included.
    last, _ = seal(bucket, point.store_id, epoch, successor, now_ms, known=known, overtaken=overtaken)
    position, digest = applied[0]
    _refuse_newer_base(bucket, point.store_id, position)
    return msgspec.structs.replace(point, position=position, newest=last), digest


def _refuse_newer_base(bucket: ObjectStore, store_id: str, applied: Position) -> None:
    """Raise `_NewerBase` if a sealed log can be restored beyond what was applied: the owner may have acknowledged that."""
    if point_at(bucket, store_id).position > applied:
        raise _NewerBase


def _adopt(root: str, disk: Disk, clock: Clock, point: RestorePoint) -> None:
    """Begin a new range of numbers, also in a restored backup: what is changed from here on must not have the sequences, epochs
    and record ids of changes that the owner made after the restored moment. Requeue the jobs of that owner's workers."""
    path, settings = os.path.join(root, names.MANIFEST), quiet_settings(disk, root).manifest
    with ManifestStore.open(path, settings=settings, clock=clock, create=False) as manifest:
        begin_restored(manifest, Parent(point.position.number, point.at_ms))
        manifest.jobs.requeue_all()


def _recover(root: str, disk: Disk, clock: Clock, point: RestorePoint, origin: Origin | None) -> None:
    """Run recovery of the page databases that were being written, which publishes the tail of their WAL for readers. Disown
    the directory, unless it is a restored backup."""
    _adopt(root, disk, clock, point)
    with open_owner(root, quiet_settings(disk, root), clock, disk) as store:
        # Before a database is opened: its recovery must not put objects into a bucket that belongs to an owner.
        store.rights.refuse("a restored directory has no owner until it is taken over")
        if origin is not None:
            owner = OwnerFile(
                store_id=origin.store_id,
                epoch=origin.position.epoch,
                session=0,
                nonce="",
                successor=no_successor(origin.position.epoch),
                successor_text=f"this directory was restored from {origin.url}",
            )
            write_file(disk, root, owner)
        open_written(store)


def open_written(store: Store) -> None:
    """Open the page databases that have an unpublished tail, which publishes it. One that cannot be recovered is reported, and
    raises when it is used: it must not keep the others from being restored or promoted."""
    with store.manifest.read() as txn:
        written = [
            db_id for (db_id,), row in txn.scan(t.DB) if row.kind is DbKind.PAGES and has_open_segment(txn, db_id)
        ]
    for db_id in written:
        try:
            store.pages.open(db_id)
        except Corruption as error:
            emit("error", "restore.database_damaged", path=store.path, db_id=db_id, error=str(error))


def quiet_settings(disk: Disk, root: str) -> StoreSettings:
    """Return the store's settings with background work (maintenance, archiving) turned off."""
    settings = layout.read_config(disk, root, None)
    return msgspec.structs.replace(
        settings,
        maintenance=msgspec.structs.replace(settings.maintenance, enabled=False),
        archive=msgspec.structs.replace(settings.archive, mode="off"),
    )


def write_config(disk: Disk, root: str, url: str, options: StoreOptions | None = None) -> None:
    """Update the store's quire.toml with the bucket it came from and the options to access it. Credentials are not written."""
    if not disk.exists(os.path.join(root, names.CONFIG)):
        layout.write_config(disk, root, url)
    settings = layout.read_config(disk, root, None)
    changes: dict[tuple[str, str], Value] = {}
    if settings.object_store != url:
        changes["", "object_store"] = url
    if not url and settings.archive.mode != "off":  # objects are now inside the directory, where an archive is refused
        changes["archive", "mode"] = "off"
    if options is not None:
        # Before the endpoint, which may be plain HTTP. Without an endpoint it means nothing: the environment may set one.
        if options.endpoint and options.allow_http != settings.objects.allow_http:
            changes["objects", "allow_http"] = options.allow_http
        for name, value in (("endpoint", options.endpoint or ""), ("region", options.region or "")):
            if value and value != getattr(settings.objects, name):
                changes["objects", name] = value
    change_config(disk, root, changes)


# ── rows that describe the old machine ────────────────────────────────────────────────────────────────────────────────
def correct_rows(replay: Replay, root: str, url: str, *, is_backup: bool = False) -> None:
    """Correct rows after a replay: cached copies of chunks are gone, objects are where they were read from, the feed starts at
    the first change that was restored, and none of the new files has been verified."""
    rows = replay.rows()
    with rows.read() as txn:
        corrections = [block for table in (t.CHUNK_CATALOG, t.CHUNK_DELTA_INDEX) for block in _evicted(txn, table)]
        meta = [(t.OBJECT_PLACE, MetaRecord(text=object_location.place_of(root, url)))]
        first = next(txn.raw_scan(CHANGE_LOG), None)
        oldest, head = txn.feed_bounds()
        held = preceding(txn.gaps(), CHANGE_LOG.key.unpack(first[0])[0]) + 1 if first is not None else head + 1
        if held > oldest:
            meta.append(("oldest_sequence", MetaRecord(number=held)))
        if is_backup:
            corrections += _without_places(txn)
    pack = t.META.key.pack
    known = t.META.rows.encode_all([(pack(name), row) for name, row in meta])
    corrections.append((t.META.name, known, [pack(t.LAST_VERIFICATION)]))
    rows.apply([corrections])


def _without_places(txn: ReadTxn) -> Iterator[TableRows]:
    """Clear the URLs of namespaces: a backup has the objects of all namespaces in one place, the restored store's own."""
    table = t.REMOTE_NAMESPACE
    changed = [(table.key.pack(*key), msgspec.structs.replace(row, url="")) for key, row in txn.scan(table) if row.url]
    if changed:
        yield table.name, table.rows.encode_all(changed), []


def _evicted(txn: ReadTxn, table: t.Table[Any]) -> Iterator[TableRows]:
    changed = [
        (table.key.pack(*key), msgspec.structs.replace(row, residency=Residency.EVICTED))
        for key, row in txn.scan(table)
        if row.residency is Residency.LOCAL_AND_REMOTE
    ]
    if changed:
        yield table.name, table.rows.encode_all(changed), []


def correct_block(table: str, rows: list[tuple[bytes, bytes]], oldest_change: int) -> list[tuple[bytes, bytes]]:
    """Correct rows of a log object that a standby applies, as `correct_rows` does after a restore. `oldest_change`: the first
    change that the standby has."""
    if table in (t.CHUNK_CATALOG.name, t.CHUNK_DELTA_INDEX.name):
        codec = (t.CHUNK_CATALOG if table == t.CHUNK_CATALOG.name else t.CHUNK_DELTA_INDEX).rows
        records = [(key, codec.decode(key, row)) for key, row in rows]
        return codec.encode_all(
            (key, msgspec.structs.replace(row, residency=Residency.EVICTED))
            if row.residency is Residency.LOCAL_AND_REMOTE
            else (key, row)
            for key, row in records
        )
    if table != t.META.name:
        return rows
    oldest = t.META.key.pack("oldest_sequence")
    own = (t.META.key.pack(t.OBJECT_PLACE), t.META.key.pack(t.LAST_VERIFICATION), oldest)
    kept = [(key, row) for key, row in rows if key not in own]
    for key, row in rows:
        if key == oldest:
            number = max(t.META.rows.decode(key, row).number, oldest_change)
            kept += t.META.rows.encode_all([(key, MetaRecord(number=number))])
    return kept
