"""Backs up a store as of one moment to a directory, an object store or a tar file, while the store is in use.

A backup has the format of an archive (docs/formats/archive.md): a base, and the log of what changed while the base was read.
In addition it has all objects of the store, and an index that names everything a restore needs. It is self-contained: a restore
needs neither the store's directory nor its bucket.

State of the target after each step, and what happens if the backup stops there:
  parts of the base, log   objects that no index names      the next backup continues the log after them
  objects                  the same                         they are not copied again
  index                    the same                         the next backup writes its own index
  last log object          a backup                         restorable
A tar file gets its final name last; an incomplete one is `….tar.tmp`.

An object that the owner deletes during the backup is copied before it is deleted (`Collector.before_delete`).

Threads: the caller's, and a pool that copies objects. Raises `InvalidInput`, `Conflict`, and the errors of the manifest, the
disk and the object stores.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec

from quire.archive.base_writer import base_records
from quire.archive.clones import CLOCK_MS
from quire.archive.format import (
    NO_DIGEST,
    NONE,
    OBJECT_BYTES,
    AnyEvent,
    ArtifactEvent,
    BaseEvent,
    Header,
    Kind,
    Position,
    archive_prefix,
    base_key,
    encode_object,
    file_key,
    log_key,
    parse_archive_key,
)
from quire.archive.log_reader import epochs, owner_log, read_object
from quire.archive.queue import Entry, EventQueue, PendingArtifact, PendingBase
from quire.archive.recorder import sha256_of
from quire.archive.remote_files import number_of, remote_at
from quire.core.errors import Corruption, InvalidInput, ObjectNotFound
from quire.durable import names
from quire.durable.failpoints import hit
from quire.durable.names import parse_object_key
from quire.durable.object_names import is_log_key
from quire.manifest.namespaces import owned_names
from quire.objects.api import ExistingObject, ObjectStore, list_objects
from quire.objects.open import open_store
from quire.objects.tar import TarStore
from quire.store import object_access, object_location
from quire.store.backup_index import (
    Index,
    earlier_objects,
    earlier_places,
    index_prefix,
    missing_backup,
    open_backup,
    put_index,
    relative_place,
)

if TYPE_CHECKING:
    from quire.archive.replay import Replay
    from quire.objects.options import StoreOptions
    from quire.store.store import Store

Progress = Callable[[str, int, int], None]
"""Called with (step, done, total); total is 0 if it is not known."""

COPIERS = 8
"""Objects copied concurrently."""
SLOT_PAUSE_SECONDS = 0.001
"""Interval between checks whether a commit in progress has completed."""


class BackedUp(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a backup."""

    target: str
    store_id: str
    position: Position
    at_ms: int
    """The moment that a restore reproduces."""
    copied: int
    """Objects and files copied."""
    copied_bytes: int
    present: int
    """Objects and files not copied, because the target or the earlier backup has them."""
    seconds: float


def back_up(
    store: Store,
    target: str,
    *,
    since: str = "",
    options: StoreOptions | None = None,
    progress: Progress | None = None,
) -> BackedUp:
    """Back up a store that is in use; see `Store.backup`."""
    began = time.monotonic()
    store.manifest.ensure_owner_epoch()
    target = _checked(store, target)
    with store.manifest.read() as txn:
        store_id, epoch = txn.store_id(), txn.owner_epoch()
        options = options or object_access.options_of(txn, store.settings, target)
        _, newest = max(txn.timelines(), key=itemgetter(0), default=(0, None))
        # After a takeover objects have names of its epoch; after the restore of a backup they have those of the lost owner.
        restored = newest if newest is not None and newest.parent_epoch == epoch else None
    with store.backup_recorder.reserved():
        skippable, earlier = earlier_objects(store_id, target, since, options, restored)
        with closing(open_backup(target, options=options, write=True)) as place:
            copies = _Copies(store, place, skippable)
            log = _Log(store, place, store_id, epoch)
            # From before the cut until the last object is copied: rows of the cut may name objects that the owner deletes
            # meanwhile.
            with _copying_before_delete(store, copies):
                with store.backup_recorder.recording() as queue:
                    _copy_state(store, queue, log, copies, progress or no_progress)
                hit("backup.cut")
                objects = copies.all_objects(progress or no_progress)
                hit("backup.objects.copied")
            first, *beyond = [relative_place(url, target) for url in earlier if url != target] or [""]
            put_index(place, store_id, log.next, Index(first, sorted({*objects, *copies.listed}), beyond))
            hit("backup.index.put")
            # Everything that it needs is there: this object makes the backup restorable.
            header = log.put_last()
            if isinstance(place, TarStore):
                place.finish()
    return BackedUp(
        target=target,
        store_id=store_id,
        position=header.position,
        at_ms=header.at_ms,
        copied=copies.copied,
        copied_bytes=copies.copied_bytes + log.bytes,
        present=copies.present,
        seconds=time.monotonic() - began,
    )


def no_progress(_step: str, _done: int, _total: int) -> None:
    """Report no progress."""


def _checked(store: Store, target: str) -> str:
    """Return the target as an absolute path or URL. Raises if it is inside the store's directory or its own object store."""
    target = target if "://" in target else os.path.abspath(target)
    place = object_location.place_of(store.path, target)
    if object_location.is_inside(store.path, place):
        raise InvalidInput(
            "a backup inside the store's directory would be lost with it",
            hint="choose a directory elsewhere",
            target=target,
        )
    if place == object_location.place_of(store.path, store.settings.object_store):
        raise InvalidInput(
            "the target is the store's own object store",
            hint="choose another location, or enable archiving",
            target=target,
        )
    return target


# ── the directory and the manifest ────────────────────────────────────────────────────────────────────────────────────
def _copy_state(store: Store, queue: EventQueue, log: _Log, copies: _Copies, progress: Progress) -> None:
    """Copy files and rows while the store is in use, and record what changes in the meantime."""
    first = log.next
    disk = store.backup_recorder.below
    parts: list[tuple[str, int, bytes]] = []
    held: list[AnyEvent] = []
    size = 0

    def put_part() -> None:
        nonlocal held, size
        header = Header(kind=Kind.BASE, position=first, parent=Position(0, 0), at_ms=store.manifest.clock.now_ms())
        data = encode_object(header, held)
        key = base_key(log.store_id, first, len(parts))
        copies.place.put(key, data)
        log.bytes += len(data)
        parts.append((key, len(data), hashlib.sha256(data).digest()))
        held, size = [], 0
        hit("backup.part.put")
        progress("base", len(parts), 0)
        while queue.size_bytes > OBJECT_BYTES:  # else a busy store would fill memory while a large base is read
            log.add(copies.resolved(queue.take(OBJECT_BYTES)[0], log))

    def artifact(path: str, relative: str) -> AnyEvent:
        if (remote := remote_at(disk, path)) is not None:
            return copies.remote_file(
                ArtifactEvent(number_of(remote), relative, remote.key, remote.size, remote.sha256)
            )
        return copies.file(path, relative, os.stat(path).st_ino, log)

    for event in base_records(store.manifest, disk, store.path, store.backup_recorder.recorder, artifact):
        held.append(event)
        size += event.size_bytes()
        if size >= OBJECT_BYTES:
            put_part()
    put_part()
    hit("backup.base.put")
    queue.append(BaseEvent(first.number, tuple(parts)))
    end, taken = queue.end, 0
    while taken < end:
        events, taken = queue.take(OBJECT_BYTES)
        if events:
            log.add(copies.resolved(events, log))
        elif taken < end:  # a commit has reserved its place in the queue and is not durable yet
            time.sleep(SLOT_PAUSE_SECONDS)


class _Log:
    """Writes the log objects of a backup. One is always held back, so that the last is put after everything it refers to."""

    def __init__(self, store: Store, place: ObjectStore, store_id: str, epoch: int) -> None:
        self.store_id = store_id
        self.bytes = 0
        self._clock = store.manifest.clock
        self._place = place
        self._held: list[AnyEvent] | None = None
        self._at_ms = 0
        self._new_base = NONE
        self._digest, self._restorable, self._base = NO_DIGEST, NONE, NONE
        self._parent = Position(0, 0)
        self.next = Position(epoch, 0)
        """Position of the object that is held back, or will be put next."""
        if positions := owner_log(place, store_id, epoch).positions:
            header, self._digest, _ = read_object(place, store_id, positions[-1])
            self._parent, self._restorable, self._base = header.position, header.restorable, header.base
            self._at_ms = header.at_ms
            self.next = Position(epoch, header.position.number + 1)
        else:  # continue the last backup from before a takeover, if any: --at finds earlier backups through it
            before = max((earlier for earlier in epochs(place, store_id) if earlier < epoch), default=0)
            if before and (positions := owner_log(place, store_id, before).positions):
                header, self._digest, _ = read_object(place, store_id, positions[-1])
                self._parent = header.position

    def add(self, events: list[AnyEvent]) -> None:
        """Add the events of the next object, and put the one held back."""
        if self._held is not None:
            self._put(self._restorable, self._base)
        self._held = events
        self._at_ms = max(self._at_ms, self._clock.now_ms())  # never decreases within an epoch (log_reader.find)
        if any(isinstance(event, BaseEvent) for event in events):
            self._new_base = self.next.number

    def put_last(self) -> Header:
        """Put the last object, which completes the backup."""
        return self._put(self.next.number, self._new_base)

    def _put(self, restorable: int, base: int) -> Header:
        assert self._held is not None, "a backup has at least the event that names its base"
        header = Header(
            kind=Kind.LOG,
            position=self.next,
            parent=self._parent,
            parent_digest=self._digest,
            at_ms=self._at_ms,
            restorable=restorable,
            base=base,
        )
        data = encode_object(header, self._held)
        key = log_key(self.store_id, self.next)
        self._place.put(key, data, create_only=True, identity=lambda existing: existing.read_all() == data)
        hit("backup.log.put")
        self.bytes += len(data)
        self._held, self._digest, self._parent = None, hashlib.sha256(data).digest(), self.next
        self.next = Position(self.next.epoch, self.next.number + 1)
        return header


# ── immutable files and objects ───────────────────────────────────────────────────────────────────────────────────────
class _Copies:
    """Copies objects and files into the target, each once. Threads: any."""

    def __init__(self, store: Store, place: ObjectStore, skippable: dict[str, int]) -> None:
        self._store = store
        self.place = place
        self._skippable = skippable
        self._changed = threading.Condition()
        # guarded by _changed
        self.listed: dict[tuple[str, int], None] = {}
        """(key, size) of the objects that this backup needs, in insertion order."""
        self._under_way: set[str] = set()
        """Keys that a thread is copying."""
        self.copied = self.copied_bytes = self.present = 0

    def resolved(self, events: list[Entry], log: _Log) -> list[AnyEvent]:
        """Copy the files that events refer to, and return the events with the keys of the copies."""
        shipped: list[AnyEvent] = []
        for event in events:
            if isinstance(event, PendingArtifact):
                shipped.append(self.file(event.kept, event.path, event.identity[0], log))
                with suppress(FileNotFoundError):
                    self._store.backup_recorder.below.remove(event.kept)
            elif isinstance(event, ArtifactEvent):
                shipped.append(self.remote_file(event))
            else:
                assert not isinstance(event, PendingBase), "only an archiver hands those over"
                shipped.append(event)
        return shipped

    def file(self, path: str, relative: str, inode: int, log: _Log) -> ArtifactEvent:
        """Copy a local immutable file. Its key is its digest, so later backups find it."""
        digest, size = sha256_of(path), os.path.getsize(path)
        key = file_key(log.store_id, Position(log.next.epoch, 0), digest.hex())
        with self._copying(key, size) as is_needed:
            if is_needed:
                self.place.put_file(key, path, create_only=True, identity=_of_size(size))
        return ArtifactEvent(inode, relative, key, size, digest)

    def remote_file(self, event: ArtifactEvent) -> ArtifactEvent:
        """Copy a file that a restore left in the bucket."""
        with self._copying(event.key, event.size) as is_needed:
            if is_needed:
                data = self._store.objects.get(event.key)
                self.place.put(event.key, data, create_only=True, identity=_of_size(event.size))
        return event

    def object(self, url: str, key: str, size: int | None = None) -> None:
        """Copy an object of the store, or wait until another thread has copied it. One that no longer exists is skipped: no row
        refers to it."""
        source = self._store.context.open_store(url)
        with suppress(ObjectNotFound):
            size = source.head(key).size_bytes if size is None else size
            with self._copying(key, size) as is_needed:
                if is_needed:
                    data = source.get(key)
                    # By its content: an interrupted backup may have left it, of this store or of what this store has lost.
                    self.place.put(key, data, create_only=True, identity=lambda existing: existing.read_all() == data)
                    hit("backup.object.put")

    def all_objects(self, progress: Progress) -> list[tuple[str, int]]:
        """Copy every object of the store and return (key, size) of each. Called after the last change was recorded: objects are
        put before rows refer to them, so each object a row refers to is either listed or was copied before its deletion."""
        listing = list(_objects_of(self._store))
        done = 0
        with ThreadPoolExecutor(COPIERS, thread_name_prefix="quire-backup") as pool:
            for _ in pool.map(lambda item: self.object(*item), listing):
                done += 1
                progress("objects", done, len(listing))
        return [(key, size) for _, key, size in listing if (key, size) in self.listed]

    @contextmanager
    def _copying(self, key: str, size: int) -> Iterator[bool]:
        """List an object, and yield whether the block must copy it; unlist it if the block raises.

        Waits for another thread that copies it: on return the object is in the target, and its original may be deleted.
        """
        with self._changed:
            self._changed.wait_for(lambda: key not in self._under_way)
            is_needed = (key, size) not in self.listed and self._skippable.get(key) != size
            self.present += (key, size) not in self.listed and not is_needed
            self.listed[key, size] = None
            if is_needed:
                self._under_way.add(key)
        if not is_needed:
            yield False
            return
        is_copied = False
        try:
            yield True
            is_copied = True
        finally:
            with self._changed:
                self._under_way.discard(key)
                if is_copied:
                    self.copied += 1
                    self.copied_bytes += size
                else:
                    del self.listed[key, size]
                self._changed.notify_all()


def _of_size(size: int) -> Callable[[ExistingObject], bool]:
    return lambda existing: existing.info.size_bytes == size


@contextmanager
def _copying_before_delete(store: Store, copies: _Copies) -> Iterator[None]:
    """Copy each object that the owner deletes before it is deleted."""

    def rescue(url: str, keys: list[str]) -> None:
        for key in keys:
            if parse_archive_key(key) is None:  # a backup needs no objects of the store's own archive
                copies.object(url, key)

    collector = store.context.collector
    collector.before_delete = rescue
    try:
        yield
    finally:
        collector.before_delete = None


def _objects_of(store: Store) -> Iterator[tuple[str, str, int]]:
    """Yield (URL, key, size) of every object that is the store's own by name, and of its parents' objects that it may read."""
    with store.manifest.read() as txn:
        owned = owned_names(txn, store.objects_url)
        moments = {parent.store_id: parent.at_ms for parent in txn.parents()}
        former = owned.former if txn.current_namespace()[1].legacy else frozenset()
        archive = archive_prefix(txn.store_id())
    for url, prefix in sorted(owned.current | owned.ancestors):
        if prefix.startswith(archive):
            continue  # the backup has its own base and log
        for info in list_objects(store.context.open_store(url), prefix):
            yield url, info.key, info.size_bytes
    for url, prefix in sorted(owned.foreign):
        parent, is_of_databases, _ = prefix.partition("/e/")
        if is_of_databases:  # the clone does not read what the parent has put since
            for info in list_objects(store.context.open_store(url), prefix):
                if info.modified_ms <= moments[parent] + CLOCK_MS:
                    yield url, info.key, info.size_bytes
    for url, prefix in sorted(former):
        for info in list_objects(store.context.open_store(url), prefix):
            suffix = info.key.removeprefix(f"{prefix}/") if prefix else info.key
            if parse_object_key(suffix) is not None or is_log_key(suffix):
                yield url, info.key, info.size_bytes


class _Layers:
    """Reads objects from a backup and the earlier ones it builds on. Must be closed."""

    def __init__(self, url: str, place: ObjectStore, store_id: str, index: Index, options: StoreOptions | None) -> None:
        self._places = [place]
        try:
            for earlier in earlier_places(url, store_id, index, options)[1:]:
                self._places.append(open_backup(earlier, options=options))
                if next(list_objects(self._places[-1], index_prefix(store_id)), None) is None:
                    raise missing_backup(earlier)
        except BaseException:
            self.close()
            raise

    def get(self, key: str, size: int) -> bytes:
        """Return an object of this size from the first place that has it."""
        for place in self._places:
            with suppress(ObjectNotFound):
                data = place.get(key)
                if len(data) == size:
                    return data
        raise Corruption("the backup lacks an object that it names", hint="restore another backup", key=key, size=size)

    def close(self) -> None:
        for place in self._places[1:]:  # the caller closes the first
            place.close()


def copy_into(
    url: str,
    place: ObjectStore,
    store_id: str,
    index: Index,
    replay: Replay,
    root: str,
    *,
    options: StoreOptions | None,
    progress: Progress,
) -> None:
    """Copy a backup's files and objects into the directory being restored, which then no longer needs the backup."""
    files = {file.key for file in replay.remote.values()}
    objects = [(key, size) for key, size in index.objects if key not in files]
    total, done = len(replay.remote) + len(objects), 0
    with (
        closing(_Layers(url, place, store_id, index, options)) as layers,
        closing(open_store(os.path.join(root, names.OBJECTS))) as home,
    ):
        for path, file in sorted(replay.remote.items()):
            data = layers.get(file.key, file.size)
            if hashlib.sha256(data).digest() != file.sha256:
                raise Corruption(
                    "a file of the backup is damaged", hint="restore another backup", key=file.key, path=path
                )
            replay.place(path, data)
            done += 1
            progress("objects", done, total)

        def put(item: tuple[str, int]) -> None:
            home.put(item[0], layers.get(*item))

        with ThreadPoolExecutor(COPIERS, thread_name_prefix="quire-restore") as pool:
            for _ in pool.map(put, objects):
                done += 1
                progress("objects", done, total)
