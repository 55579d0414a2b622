"""The interface between quire and the file system, and the only module that syncs.

After `File.sync` returns, the bytes and the size of a file survive power loss; after `Disk.sync_dir`, the *name* of a new,
renamed or removed file does too, which syncing the file alone does not guarantee. After a failed sync the state on disk is
unknown: the caller must stop using the file (see `StoreUnusable`).

Every durable path goes through a `Disk`, so that `quire.testing` can keep, drop, garble or fail each step. All syncs are in
`OsFile.sync`, `OsFile.write_synced_at` and `OsDisk.sync_dir`.

Threads: any; positional reads and writes share no file offset.

Raises: operating-system errors are translated here, once. ENOSPC, EDQUOT and EFBIG become `DiskFull`; EACCES, EPERM and EROFS
become `NotWritable`; EMFILE and ENFILE `TooManyOpenFiles`; everything else `StorageFault`. `FileNotFoundError` and
`FileExistsError` pass unchanged: they are answers, not faults.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from typing import Protocol, runtime_checkable

from quire.core.closing import ClosedOnExit
from quire.core.errors import DiskFull, NotWritable, StorageFault, TooManyOpenFiles

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
DENIED_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
FILES_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})
UNSUPPORTED_ERRNOS = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""Returned by a kernel or file system that does not support a flag of a write."""
ADVICE_ERRNOS = UNSUPPORTED_ERRNOS | {errno.ESPIPE, errno.EPERM, errno.EACCES, errno.EINTR, errno.EAGAIN}
"""Mean that advice was ignored; they report nothing about the bytes."""

SYNC_FILE_RANGE_WRITE = 2
"""Linux: start writing the dirty pages of a range, without waiting."""

ZERO_FILL_STEP = 1 << 20
"""Zero-filling writes this much at a time: large enough to stream, small enough not to double a segment in memory."""


class File(Protocol):
    """An open file with positional reads and writes."""

    @property
    def path(self) -> str: ...

    def read_at(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes from `offset`; fewer only at the end of the file."""

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write all of `data` at `offset`."""

    def size(self) -> int: ...

    def truncate(self, size: int) -> None: ...

    def allocate(self, size: int) -> None:
        """Reserve `size` bytes on disk and grow the file to that size; never sparse, so later writes cannot hit ENOSPC."""

    def sync(self) -> None:
        """Make bytes and size durable (fdatasync)."""

    def fileno(self) -> int:
        """Return the descriptor, for mmap and locks."""

    def close(self) -> None: ...


class Disk(Protocol):
    """The file operations quire uses. Paths are absolute or relative to the process, as for `os`."""

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        """Open for reading and, unless `write=False`, writing. `exclusive` creates the file and fails if it exists."""

    def exists(self, path: str) -> bool: ...

    def size(self, path: str) -> int: ...

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; a missing directory raises `FileNotFoundError`."""

    def make_dirs(self, path: str) -> None:
        """Create a directory and its missing parents, and make their names durable."""

    def rename(self, source: str, target: str) -> None:
        """Rename `source`, replacing `target` atomically. Durable only after `sync_dir`."""

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; `FileExistsError` if the name is taken."""

    def remove(self, path: str) -> None:
        """Remove a file; a missing one raises `FileNotFoundError`."""

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory."""

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""


@runtime_checkable
class ReplaceableDisk(Protocol):
    """A `Disk` whose directories another process may replace, as a standby that starts over does."""

    def directories_id(self) -> int:
        """Return a number that identifies the current directories; waits while they are being replaced."""


def directories_id(disk: Disk) -> int:
    """Return a number that changes when the directories of `disk` are replaced.

    Files and rows read before and after a change may be inconsistent with each other.
    """
    return disk.directories_id() if isinstance(disk, ReplaceableDisk) else 0


class DiskLayer:
    """A `Disk` over another one: a subclass overrides some operations, the rest are forwarded."""

    def __init__(self, inner: Disk) -> None:
        self._inner = inner

    def exists(self, path: str) -> bool:
        return self._inner.exists(path)

    def size(self, path: str) -> int:
        return self._inner.size(path)

    def names(self, path: str) -> list[str]:
        return self._inner.names(path)

    def make_dirs(self, path: str) -> None:
        self._inner.make_dirs(path)

    def rename(self, source: str, target: str) -> None:
        self._inner.rename(source, target)

    def link(self, source: str, target: str) -> None:
        self._inner.link(source, target)

    def remove(self, path: str) -> None:
        self._inner.remove(path)

    def remove_dir(self, path: str) -> None:
        self._inner.remove_dir(path)

    def sync_dir(self, path: str) -> None:
        self._inner.sync_dir(path)


def base_disk(disk: Disk) -> Disk:
    """Return the disk below all layers."""
    while isinstance(disk, DiskLayer):
        disk = disk._inner
    return disk


@contextmanager
def translated(path: str, doing: str) -> Iterator[None]:
    """Translate operating-system errors raised in a block into quire's."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        raise translate(error, path, doing) from error


def translate(error: OSError, path: str, doing: str) -> StorageFault:
    """Return the `StorageFault` that corresponds to `error`."""
    number = error.errno or 0
    where = {"path": path, "errno": errno.errorcode.get(number, str(number))}
    if number in FULL_ERRNOS:
        return DiskFull(
            f"the disk is full while {doing}", hint="free up space or raise the quota, then try again", **where
        )
    if number in DENIED_ERRNOS:
        return NotWritable(f"no permission while {doing}", hint="check the owner and mode of the directory", **where)
    if number in FILES_ERRNOS:
        return too_many_open_files(doing, number, **where)
    return StorageFault(f"{error.strerror or error} while {doing}", hint="check the disk and the system log", **where)


def too_many_open_files(doing: str, number: int = errno.EMFILE, **where: object) -> TooManyOpenFiles:
    """Return the error for a process (with ENFILE, a machine) that has run out of descriptors."""
    if number == errno.ENFILE:
        hint = "close files in other programs, or raise fs.file-max (sysctl)"
        return TooManyOpenFiles(f"too many open files on this machine while {doing}", hint=hint, **where)
    limit, most = descriptor_limits()
    hint = "raise it with `ulimit -n` before the program starts, lower open_files_max in quire.toml, or close unused databases"
    what = f"too many open files while {doing}: the limit of this process is {limit}"
    return TooManyOpenFiles(what, hint=hint, **where, limit=limit, limit_max=most)


def descriptor_limits() -> tuple[int, int]:
    """Return this process's soft and hard limit on descriptors; -1 means no limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


class DirectFile:
    """A file of the operating system, or a wrapper of one (open_files.py), with the operations that only such files have."""

    __slots__ = ()

    def write_synced_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write all of `data` and make it durable, in one call."""
        raise NotImplementedError

    def begin_write_back(self, size: int, offset: int) -> None:
        """Start write-back of bytes that will be synced soon."""
        raise NotImplementedError


class FileLayer:
    """Forwards every operation to another file; a subclass overrides those it changes."""

    __slots__ = ("_inner",)

    def __init__(self, inner: File) -> None:
        self._inner = inner

    @property
    def path(self) -> str:
        return self._inner.path

    def read_at(self, size: int, offset: int) -> bytes:
        return self._inner.read_at(size, offset)

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        self._inner.write_at(data, offset)

    def size(self) -> int:
        return self._inner.size()

    def truncate(self, size: int) -> None:
        self._inner.truncate(size)

    def allocate(self, size: int) -> None:
        self._inner.allocate(size)

    def sync(self) -> None:
        self._inner.sync()

    def fileno(self) -> int:
        return self._inner.fileno()

    def close(self) -> None:
        self._inner.close()


class OsFile(DirectFile, ClosedOnExit):
    """A `File` on a descriptor of the operating system."""

    __slots__ = ("_fd", "_path")

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path

    @property
    def path(self) -> str:
        return self._path

    # The next three calls are part of every commit and every read. They do not use `translated`, because a context manager
    # costs 3 µs, as much as the system call itself.
    def read_at(self, size: int, offset: int) -> bytes:
        try:
            data = os.pread(self._fd, size, offset)
            if len(data) == size or not data:
                return data
            parts = [data]
            done = len(data)
            while done < size and (data := os.pread(self._fd, size - done, offset + done)):
                parts.append(data)
                done += len(data)
            return b"".join(parts)
        except OSError as error:
            raise translate(error, self._path, "reading") from error

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        try:
            done = os.pwrite(self._fd, data, offset)
            if done < len(data):
                view = memoryview(data)
                while done < len(data):
                    done += os.pwrite(self._fd, view[done:], offset + done)
        except OSError as error:
            raise translate(error, self._path, "writing") from error

    def sync(self) -> None:
        try:
            # Includes the size of the file; only times are left out.
            os.fdatasync(self._fd)
        except OSError as error:
            raise translate(error, self._path, "syncing") from error

    def write_synced_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write all of `data` and make it durable, in one call. Earlier writes are not covered.

        A thread must reacquire the interpreter lock after every system call. If other threads hold it between a write and its
        sync, the disk is idle for that time.
        """
        try:
            done = os.pwritev(self._fd, [data], offset, os.RWF_DSYNC)
        except OSError as error:
            if error.errno not in UNSUPPORTED_ERRNOS:
                raise translate(error, self._path, "writing") from error
            done = 0
        if done < len(data):
            self.write_at(memoryview(data)[done:], offset + done)
            self.sync()

    def begin_write_back(self, size: int, offset: int) -> None:
        """Start write-back of bytes that will be synced soon. Makes nothing durable.

        The disk then works while the caller prepares its sync. The call does not wait, and does not consume a write-back error
        of the handle: the sync must report that. If the call itself fails, the error is raised as a failed write.
        """
        begin = _write_back_call()
        if begin is None or not (number := begin(self._fd, offset, size)) or number in ADVICE_ERRNOS:
            return
        raise translate(OSError(number, os.strerror(number)), self._path, "writing")

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        with translated(self._path, "truncating"):
            os.ftruncate(self._fd, size)

    def allocate(self, size: int) -> None:
        with translated(self._path, "reserving space"):
            os.posix_fallocate(self._fd, 0, size)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            # Before the call: a second `close` could hit a descriptor that another thread was just given.
            fd, self._fd = self._fd, -1
            os.close(fd)


class OsDisk:
    """The real file system."""

    __slots__ = ()

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> OsFile:
        flags = os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY)
        if create or exclusive:
            flags |= os.O_CREAT
        if exclusive:
            flags |= os.O_EXCL
        with translated(path, "opening"):
            return OsFile(os.open(path, flags, 0o644), path)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def names(self, path: str) -> list[str]:
        with translated(path, "listing"):
            return sorted(os.listdir(path))

    def make_dirs(self, path: str) -> None:
        path = os.path.abspath(path)
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            with translated(folder, "creating a directory"):
                try:
                    os.mkdir(folder)
                except FileExistsError:
                    if not os.path.isdir(folder):
                        raise
            # For each level: a directory survives power loss only if every name above it is durable.
            self.sync_dir(os.path.dirname(folder))

    def rename(self, source: str, target: str) -> None:
        with translated(target, "renaming"):
            os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        with translated(target, "linking"):
            os.link(source, target)

    def remove(self, path: str) -> None:
        with translated(path, "removing"):
            os.unlink(path)

    def remove_dir(self, path: str) -> None:
        with translated(path, "removing a directory"):
            os.rmdir(path)

    def sync_dir(self, path: str) -> None:
        with translated(path, "syncing the directory"):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def write_synced(file: File, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of `data` at `offset` and make it durable, in one call if the file supports it."""
    if isinstance(file, DirectFile):
        file.write_synced_at(data, offset)
    else:
        file.write_at(data, offset)
        file.sync()


def sync_file(disk: Disk, path: str) -> None:
    """Make a file that another process wrote durable. The sync also notifies disk layers that watch for complete files."""
    with closing(disk.open(path)) as file:
        file.sync()


def begin_write_back(file: File, size: int, offset: int) -> None:
    """Start write-back of bytes that will be synced soon; does nothing for files that do not support it."""
    if isinstance(file, DirectFile):
        file.begin_write_back(size, offset)


def drop_cached_pages(file: File) -> None:
    """Drop clean cached pages, so that reads return what is on disk.

    After a failed fsync, Linux keeps the pages but marks them clean: a reopened log would read records that are not on
    disk, and a second sync would report success. This is advice only; the kernel may ignore it.
    """
    own = getattr(file, "drop_cached_pages", None)
    if own is not None:
        own()
        return
    with suppress(OSError, AttributeError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@cache
def _write_back_call() -> Callable[[int, int, int], int] | None:
    """Return a function (descriptor, offset, size) → errno or 0; `None` if the system has no `sync_file_range`.

    Linux has it, but Python does not expose it.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is None:
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    call.restype = ctypes.c_int
    get_errno = ctypes.get_errno

    def begin(fd: int, offset: int, size: int) -> int:
        return get_errno() if call(fd, offset, size, SYNC_FILE_RANGE_WRITE) else 0

    return begin


def write_atomic(disk: Disk, path: str, data: bytes) -> None:
    """Replace the contents of `path` with `data`, so that a crash leaves the old contents or the new, never a mixture.

    Before: `<path>.tmp` is absent or garbage (swept by its owner) · during: the tmp file, synced · after: the new file.
    """
    temporary = path + ".tmp"
    # Synced under the temporary name: a rename that becomes durable before the contents would leave an empty file.
    write_new(disk, temporary, data, overwrite=True)
    disk.rename(temporary, path)
    disk.sync_dir(os.path.dirname(path) or ".")


def write_new(disk: Disk, path: str, data: bytes, *, overwrite: bool = False) -> None:
    """Create a file with synced contents. Its *name* is durable only after the caller syncs the directory."""
    with closing(disk.open(path, create=True, exclusive=not overwrite)) as file:
        # A file left by a crash may be longer than the new contents.
        file.truncate(0)
        file.write_at(data, 0)
        file.sync()


def read_all(disk: Disk, path: str) -> bytes:
    """Return the whole contents of a file."""
    with closing(disk.open(path, write=False)) as file:
        return file.read_at(file.size(), 0)


def remove_if_exists(disk: Disk, path: str) -> None:
    """Remove a file; do nothing if there is none."""
    with suppress(FileNotFoundError):
        disk.remove(path)


def remove_tree(disk: Disk, path: str) -> None:
    """Remove a file, or a directory and its contents; a missing path is not an error.

    Trying to unlink first, before treating `path` as a directory, keeps it from following a symbolic link.
    """
    with suppress(FileNotFoundError):
        try:
            disk.remove(path)
        except StorageFault as fault:
            if fault.where.get("errno") not in ("EISDIR", "EPERM"):
                raise
            for name in disk.names(path):
                remove_tree(disk, os.path.join(path, name))
            disk.remove_dir(path)


def preallocate(disk: Disk, path: str, size: int) -> File:
    """Create a file of `size` zero bytes, with its blocks written and its contents and name durable.

    Zero-filling (not only reserving) makes later fdatasyncs cheap: the extents are already written, so a sync after
    an overwrite moves data only, no metadata. ENOSPC surfaces here as `DiskFull`, and the file is removed again.
    """
    file = disk.open(path, exclusive=True)
    try:
        # Before anything is written: a full disk is found at once.
        file.allocate(size)
        zeros = bytes(min(ZERO_FILL_STEP, size))
        for offset in range(0, size, ZERO_FILL_STEP):
            file.write_at(memoryview(zeros)[: size - offset], offset)
        file.sync()
        disk.sync_dir(os.path.dirname(path) or ".")
    except BaseException:
        file.close()
        # A failed cleanup must not hide the original fault.
        with suppress(StorageFault, FileNotFoundError):
            disk.remove(path)
        raise
    return file
