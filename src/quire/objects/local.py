"""A directory as an object store: each object is a file, its key its path below the root (O1).

A body is written and synced in staging (`<root>/.tmp/<created_ms>-<token>`) before it gets its name, so a crash at any step
leaves no partial object. Files that crashes leave in staging are never listed; `sweep_temporary` removes them. Nothing is
created on disk before the first put: a store on a read-only mount can be read.

Threads: any; also processes, since the file system arbitrates. `_named` is only a cache: a lost entry costs a sync.

Raises: see `quire.objects.api`; errors of the disk as `DiskFull`, `NotWritable`, `StorageFault`.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

from quire.core.clock import Clock, SystemClock
from quire.core.errors import InvalidName, ObjectNotFound, StorageFault
from quire.durable.files import Disk, File, OsDisk, base_disk
from quire.objects.api import (
    PAGE_OBJECTS,
    TEMPORARY_SEGMENT,
    Buffer,
    Identity,
    NameIsTaken,
    ObjectInfo,
    PutResult,
    Range,
    check_digest_before_put,
    check_key,
    check_listing,
    check_prefix,
    check_range,
    create_or_adopt,
    past_the_end,
    read_verified,
)

COPY_STEP_BYTES = 8 << 20
"""Bytes of the file that `put_file` holds in memory at a time."""

NAMED_MAX = 1 << 16
"""Directories remembered as named. A full cache is cleared, so that it does not grow with the store."""

NAMING_ROUNDS = 8
"""How often a put recreates its directory while deletes keep removing it."""

TEMPORARY_AGE_SECONDS = 3600.0
"""Staging files younger than this may belong to a live writer in another process; no put takes an hour."""

_NO_SUCH_OBJECT = frozenset({"ENOTDIR", "EISDIR"})
"""Errors of the system if part of a key is a file, or if the key is a directory: no such object."""


class LocalStore:
    """An `ObjectStore` on a `Disk`."""

    __slots__ = ("_clock", "_disk", "_named", "_root", "_staging")

    def __init__(self, root: str, *, disk: Disk | None = None, clock: Clock | None = None) -> None:
        self._root = os.path.abspath(root)
        self._staging = os.path.join(self._root, TEMPORARY_SEGMENT)
        self._disk: Disk = disk or OsDisk()
        self._clock: Clock = clock or SystemClock()
        self._named: set[str] = set()

    @property
    def url(self) -> str:
        return self._root

    def put(
        self,
        key: str,
        data: Buffer,
        *,
        create_only: bool = False,
        identity: Identity | None = None,
        sha256: bytes | None = None,
    ) -> PutResult:
        check_key(key)
        check_digest_before_put(key, data, sha256)

        def fill(file: File) -> int:
            file.write_at(data, 0)
            return len(data)

        return self._put(key, fill, create_only, identity)

    def put_file(
        self, key: str, path: str, *, create_only: bool = False, identity: Identity | None = None
    ) -> PutResult:
        check_key(key)

        def fill(file: File) -> int:
            with closing(self._disk.open(path, write=False)) as source:
                done = 0
                while step := source.read_at(COPY_STEP_BYTES, done):
                    file.write_at(step, done)
                    done += len(step)
                return done

        return self._put(key, fill, create_only, identity)

    def get(self, key: str) -> bytes:
        with self._opened(key) as file:
            return self._read(file, key, 0, file.size())

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        check_range(key, offset, length)
        if length == 0:
            check_key(key)
            return b""
        with self._opened(key) as file:
            return self._read(file, key, offset, length)

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        check_key(key)
        for span in ranges:
            check_range(key, span.offset, span.length)
        if not any(span.length for span in ranges):
            return [b""] * len(ranges)
        with self._opened(key) as file:
            return [self._read(file, key, span.offset, span.length) for span in ranges]

    def get_verified(
        self, key: str, *, size_bytes: int, sha256: bytes | None = None, crc64: int | None = None
    ) -> bytes:
        return read_verified(self, key, size_bytes=size_bytes, sha256=sha256, crc64=crc64)

    def head(self, key: str) -> ObjectInfo:
        with self._opened(key) as file:
            size = file.size()
            file.read_at(1, 0)  # a directory can be opened and has a size; only reading it fails
        return ObjectInfo(key=key, size_bytes=size, etag=None, modified_ms=_modified_ms(self._path(key)))

    def list_pages(
        self, prefix: str = "", *, start_after: str = "", page_objects: int = PAGE_OBJECTS
    ) -> Iterator[Sequence[ObjectInfo]]:
        return self._pages(check_listing(prefix, start_after, page_objects), start_after, page_objects)

    def list_prefixes(self, prefix: str = "") -> list[str]:
        folder = check_prefix(prefix)
        folder = folder + "/" if folder else ""
        return [
            key[:-1]
            for key in self._children(folder)
            if key.endswith("/") and next(self._walk(key, ""), None) is not None
        ]

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_many(self, keys: Iterable[str]) -> None:
        touched: dict[str, None] = {}
        try:
            for key in keys:
                path = self._path(check_key(key))
                try:
                    self._disk.remove(path)
                except FileNotFoundError:
                    continue
                except StorageFault as fault:
                    if fault.where.get("errno") in _NO_SUCH_OBJECT:
                        continue
                    raise
                touched[os.path.dirname(path)] = None
        finally:
            # Also after a failure: objects removed so far must not reappear after a crash.
            for directory in touched:
                self._settle_removals(directory)

    def sweep_temporary(self, *, older_than_seconds: float = TEMPORARY_AGE_SECONDS) -> int:
        """Remove the files that crashed puts left in staging, and return their number.

        Pass 0 only when no other process can be writing, as the owner does at start-up.
        """
        horizon_ms = self._clock.now_ms() - int(older_than_seconds * 1000)
        try:
            names = self._disk.names(self._staging)
        except FileNotFoundError:
            return 0
        removed = 0
        for name in names:
            if _created_ms(name) > horizon_ms:
                continue
            try:
                self._disk.remove(os.path.join(self._staging, name))
                removed += 1
            except FileNotFoundError:
                pass  # its writer was alive and has finished, or another sweep removed it
        return removed

    def close(self) -> None:
        """Do nothing: no file is held open between calls."""

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _put(self, key: str, fill: Callable[[File], int], create_only: bool, identity: Identity | None) -> PutResult:
        def put() -> PutResult:
            staged, size = self._stage(fill)
            try:
                self._name(key, staged, create_only)
            finally:
                # After a link it is a second name of the object; after a rename it is gone.
                self._discard(staged)
            return PutResult(key=key, size_bytes=size, etag=None, adopted=False)

        return create_or_adopt(self, key, put, identity) if create_only else put()

    def _stage(self, fill: Callable[[File], int]) -> tuple[str, int]:
        """Write and sync a body in staging; return its path and size in bytes."""
        self._make_named(self._staging)
        path = os.path.join(self._staging, f"{self._clock.now_ms():013x}-{secrets.token_hex(8)}")
        try:
            with closing(self._disk.open(path, exclusive=True)) as file:
                size = fill(file)
                file.sync()
        except BaseException:
            self._discard(path)
            raise
        return path, size

    def _name(self, key: str, staged: str, create_only: bool) -> None:
        """Give the staged body its name durably."""
        target = self._path(key)
        directory = os.path.dirname(target)
        for _ in range(NAMING_ROUNDS):
            try:
                self._make_named(directory, key)
                # `link` fails if the name is taken, `rename` replaces atomically.
                (self._disk.link if create_only else self._disk.rename)(staged, target)
                break
            except FileNotFoundError:
                if not self._disk.exists(staged):
                    raise StorageFault(
                        "the staged file was removed before it could be renamed",
                        hint="put the object again; run sweep_temporary with a higher age",
                        key=key,
                        path=staged,
                    ) from None
                self._named.clear()  # a delete removed the directory: distrust the cache and create it again
            except FileExistsError:
                if _is_directory(self._disk, target):
                    raise _not_a_leaf(key) from None
                self._sync_directory(directory)  # before it is adopted: its writer may have died between link and sync
                raise NameIsTaken(key) from None
            except StorageFault as fault:
                if fault.where.get("errno") in _NO_SUCH_OBJECT:
                    raise _not_a_leaf(key) from fault
                raise
        else:
            raise StorageFault("the directory of the object keeps being removed", key=key, path=directory)
        self._sync_directory(directory)

    def _make_named(self, directory: str, key: str = "") -> None:
        """Create a directory below the root, and make every directory entry on the path to it durable."""
        if directory in self._named:
            return
        if directory == self._root:
            self._disk.make_dirs(directory)
        else:
            parent = os.path.dirname(directory)
            self._make_named(parent, key)
            if self._disk.exists(directory):
                # Its creator may have died before syncing the parent.
                self._sync_directory(parent)
            try:
                self._disk.make_dirs(directory)
            except FileExistsError:
                if self._disk.exists(directory) and not _is_directory(self._disk, directory):
                    raise _not_a_leaf(key) from None
                # A delete removed the directory between `make_dirs` and `exists`: the caller tries again.
                raise FileNotFoundError(directory) from None
        if len(self._named) >= NAMED_MAX:
            self._named.clear()
        self._named.add(directory)

    def _sync_directory(self, directory: str) -> None:
        try:
            self._disk.sync_dir(directory)
        except FileNotFoundError:
            pass  # a concurrent delete removed it together with the object: nothing is left to make durable

    def _discard(self, staged: str) -> None:
        """Remove a staged file if it still exists. Errors must not hide the put's outcome; the sweep removes what is left."""
        try:
            self._disk.remove(staged)
        except (FileNotFoundError, StorageFault):
            pass

    def _settle_removals(self, directory: str) -> None:
        """Make removals in `directory` durable, and remove it and its parents if they are now empty."""
        while directory != self._root:
            try:
                self._disk.remove_dir(directory)
            except FileNotFoundError:
                pass  # already removed by another thread or process; its parent must still be synced
            except StorageFault:
                break  # not empty
            self._named.discard(directory)
            directory = os.path.dirname(directory)
        self._sync_directory(directory)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @contextmanager
    def _opened(self, key: str) -> Iterator[File]:
        """Open the object's file; the system's errors for missing files become `ObjectNotFound`."""
        path = self._path(check_key(key))
        try:
            with closing(self._disk.open(path, write=False)) as file:
                yield file
        except FileNotFoundError:
            raise ObjectNotFound("the object store has no object with this name", store=self._root, key=key) from None
        except StorageFault as fault:
            if fault.where.get("errno") in _NO_SUCH_OBJECT:
                raise ObjectNotFound(
                    "the object store has no object with this name", store=self._root, key=key
                ) from None
            raise

    def _read(self, file: File, key: str, offset: int, length: int) -> bytes:
        data = file.read_at(length, offset)
        if len(data) != length:
            raise past_the_end(key, offset, length, file.size())
        return data

    def _pages(self, prefix: str, start_after: str, page_objects: int) -> Iterator[Sequence[ObjectInfo]]:
        page: list[ObjectInfo] = []
        for info in self._walk(prefix + "/" if prefix else "", start_after):
            page.append(info)
            if len(page) == page_objects:
                yield page
                page = []
        if page:
            yield page

    def _walk(self, folder: str, start_after: str) -> Iterator[ObjectInfo]:
        """Yield the objects below `folder` (a key prefix ending in '/', or '') after `start_after`, in key order."""
        for key in self._children(folder):
            if key.endswith("/"):
                # Everything below sorts after `key` itself; skip it only if `start_after` lies beyond all of it.
                if key > start_after or start_after.startswith(key):
                    yield from self._walk(key, start_after)
            elif key > start_after:
                path = self._path(key)
                try:
                    yield ObjectInfo(
                        key=key, size_bytes=self._disk.size(path), etag=None, modified_ms=_modified_ms(path)
                    )
                except FileNotFoundError:
                    pass  # deleted since the directory was read

    def _children(self, folder: str) -> list[str]:
        """Return the entries of a folder as keys, directories with a trailing '/', in the order of the keys below them.

        A directory sorts as `name/`, not as `name`: otherwise `a.b` would come after `a/c`, unlike in a bucket.
        """
        path = self._path(folder)
        try:
            names = self._disk.names(path)
        except FileNotFoundError:
            return []
        except StorageFault as fault:
            if fault.where.get("errno") in _NO_SUCH_OBJECT:
                return []  # the prefix is itself an object: nothing is below it
            raise
        entries = []
        for name in names:
            if "\\" in name or not name.isprintable() or (not folder and name == TEMPORARY_SEGMENT):
                continue  # staging, or a foreign file that no key can name
            is_directory = _is_directory(self._disk, os.path.join(path, name))
            entries.append(f"{folder}{name}/" if is_directory else folder + name)
        entries.sort()
        return entries

    def _path(self, key: str) -> str:
        return os.path.join(self._root, *key.split("/")) if key else self._root


def _is_directory(disk: Disk, path: str) -> bool:
    if isinstance(base_disk(disk), OsDisk):
        return os.path.isdir(path)  # avoids reading the directory, which a listing would do a second time
    try:
        disk.names(path)
    except FileNotFoundError:
        return False
    except StorageFault as fault:
        if fault.where.get("errno") == errno.errorcode[errno.ENOTDIR]:
            return False
        raise
    return True


def _modified_ms(path: str) -> int:
    """Return the modification time in milliseconds; 0 on a simulated disk, which has none. It is a hint only: nothing is
    decided by it."""
    try:
        return os.stat(path).st_mtime_ns // 1_000_000
    except OSError:
        return 0


def _created_ms(name: str) -> int:
    """Return the creation time, in milliseconds, from the name of a staging file; 0 (ancient) for foreign names."""
    try:
        return int(name.partition("-")[0], 16)
    except ValueError:
        return 0


def _not_a_leaf(key: str) -> InvalidName:
    return InvalidName("an object already exists at a prefix of this key, or below this key", key=key)
