"""A `Disk` with some files in the bucket: files that a restore did not download are read from there, range by range (A10).

Terms
  remote   an immutable file whose bytes are an object (`state_files.RemoteFile`). It has a path and a size, and can be read,
           linked, renamed and removed like a local file

remote_files.json in the store's directory lists the remote files. It is replaced as a whole when the list changes, before the
call returns.

Threads: any. Raises `Corruption`, and the errors of disk and object store.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from quire.archive.format import HELPED_BY
from quire.archive.recorder import REMOTE_FILES
from quire.archive.state_files import RemoteFile, read_remote_files
from quire.core.cache import ByteCache
from quire.core.errors import Corruption, OutOfRange
from quire.core.limits import KIB, MIB
from quire.durable.checksums import crc64
from quire.durable.files import Disk, DiskLayer, File, write_atomic
from quire.objects.api import ObjectStore, Range

BLOCK_BYTES = 256 * KIB
"""Unit of reads from the bucket: blocks of tables have this order of size, and a request costs more than its bytes."""
CACHE_BYTES = 64 * MIB


class RemoteFiles(DiskLayer):
    """A `Disk` over another, with the files of remote_files.json."""

    def __init__(self, inner: Disk, root: str, objects: Callable[[], ObjectStore]) -> None:
        super().__init__(inner)
        # constant after construction
        self._root = os.path.abspath(root)
        self._objects = objects
        self._cache: ByteCache[tuple[str, int], bytes] = ByteCache(CACHE_BYTES)
        # guarded by _lock
        self._lock = threading.Lock()
        self._remote = {os.path.join(self._root, path): file for path, file in read_remote_files(inner, root).items()}

    def remote(self, path: str) -> RemoteFile | None:
        """Return the remote file at this path, or `None`."""
        return self._remote.get(os.path.abspath(path))

    def read(self, file: RemoteFile, size: int, offset: int) -> bytes:
        """Read bytes of a remote file; fewer than `size` only at its end. Called by `RemoteHandle`."""
        end = min(offset + size, file.size)
        numbers = range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        blocks = {number: self._cache.get((file.key, number)) for number in numbers}
        missing = [number for number in numbers if blocks[number] is None]
        starts = [number * BLOCK_BYTES for number in missing]
        ranges = [Range(offset=start, length=min(BLOCK_BYTES, file.size - start)) for start in starts]
        if ranges:  # adjacent ranges become one request
            try:
                present = self._objects().get_ranges(file.key, ranges)
            except OutOfRange as error:
                what = "an archive object is shorter than recorded"
                raise Corruption(what, hint=HELPED_BY, key=file.key, size=file.size) from error
            for number, block in zip(missing, present, strict=True):
                self._cache.put((file.key, number), block, len(block))
                blocks[number] = block
        data = b"".join(block for block in blocks.values() if block is not None)
        start = numbers.start * BLOCK_BYTES
        return data[offset - start : end - start]

    def _change(self, remove: str = "", add: str = "", file: RemoteFile | None = None) -> None:
        """Remove and add paths, and write the list. REQUIRES the lock."""
        if remove:
            del self._remote[remove]
        if add and file is not None:
            self._remote[add] = file
        listed = {os.path.relpath(path, self._root): kept for path, kept in self._remote.items()}
        write_atomic(self._inner, os.path.join(self._root, REMOTE_FILES), msgspec.json.encode(listed))

    # ── the `Disk` interface ──────────────────────────────────────────────────────────────────────────────────────────
    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        if not write and (file := self._remote.get(os.path.abspath(path))) is not None:
            return RemoteHandle(self, path, file)
        return self._inner.open(path, create=create, exclusive=exclusive, write=write)

    def exists(self, path: str) -> bool:
        return os.path.abspath(path) in self._remote or self._inner.exists(path)

    def size(self, path: str) -> int:
        file = self._remote.get(os.path.abspath(path))
        return file.size if file is not None else self._inner.size(path)

    def names(self, path: str) -> list[str]:
        folder = os.path.abspath(path)
        with self._lock:
            here = {os.path.basename(name) for name in self._remote if os.path.dirname(name) == folder}
        try:
            return sorted(here.union(self._inner.names(path)))
        except FileNotFoundError:
            if not here:
                raise
            return sorted(here)

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            if (file := self._remote.get(os.path.abspath(source))) is not None:
                self._change(os.path.abspath(source), os.path.abspath(target), file)
                return
        self._inner.rename(source, target)

    def link(self, source: str, target: str) -> None:
        with self._lock:
            if (file := self._remote.get(os.path.abspath(source))) is not None:
                if self._inner.exists(target) or os.path.abspath(target) in self._remote:
                    raise FileExistsError(target)
                self._change(add=os.path.abspath(target), file=file)
                return
        self._inner.link(source, target)

    def remove(self, path: str) -> None:
        with self._lock:
            if os.path.abspath(path) in self._remote:
                self._change(os.path.abspath(path))
                return
        self._inner.remove(path)


class RemoteHandle:
    """A remote file, open for reading."""

    def __init__(self, files: RemoteFiles, path: str, file: RemoteFile) -> None:
        self._files = files
        self._path = path
        self._file = file
        self._descriptor = -1

    @property
    def path(self) -> str:
        return self._path

    @property
    def number(self) -> int:
        """The number that identifies the file in the archive, in place of an inode."""
        return number_of(self._file)

    def read_at(self, size: int, offset: int) -> bytes:
        return self._files.read(self._file, size, offset)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise EBADF, as for a descriptor opened for reading: a file in the bucket never changes."""
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)

    write_at = truncate = allocate = _refuse

    def size(self) -> int:
        return self._file.size

    def sync(self) -> None:
        """Do nothing: an object in the bucket is durable."""

    def fileno(self) -> int:
        """Return a descriptor that only distinguishes open files (open_files.py). It is never read: nothing maps tables or
        segments."""
        if self._descriptor < 0:
            self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptor

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def number_of(file: RemoteFile) -> int:
    """Return the number that replaces the inode of a remote file. The top bit is set, which inodes do not have."""
    return crc64(file.key.encode()) | 1 << 63


def remote_at(disk: Disk, path: str) -> RemoteFile | None:
    """Return the remote file at this path, or `None`."""
    return disk.remote(path) if isinstance(disk, RemoteFiles) else None
