"""A `Disk` whose n-th call fails, so that a test can fail the first, second, … last call, until one pass has no failure.

A test is a loop: `for disk in each_fault(new_disk, Fault.EIO): …`, which expects a typed error whenever `disk.fired`. A call is
any method of `Disk` and `File` except `exists`, `fileno`, `path` and `close`. Faults are raised as `OsDisk` would raise them,
and everything before the failing call really happens. `POWER_CUT` raises `PowerCut`, which no `except Exception` catches, at
that call and at every later one; crash the underlying `CrashDisk` next. Silent faults raise nothing, and affect only writes or
reads (`operation` "write" or "read"). `FaultyStore` is an object store below a path, one call of which fails.

Threads: any; the counter is guarded by a lock. Raises `StorageFault`, `DiskFull`, `PowerCut`, `ObjectStoreUnavailable`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from fnmatch import fnmatch
from functools import partial
from typing import Any, TypeVar

from quire.core.errors import ObjectNotFound, ObjectStoreUnavailable
from quire.durable.files import Disk, File, FileLayer, translate
from quire.objects import open as opening
from quire.objects.local import LocalStore

T = TypeVar("T")


class PowerCut(BaseException):
    """The machine has lost power: nothing more happens on this disk."""


class Fault(Enum):
    """How a call fails."""

    ENOSPC = "no space left"
    EIO = "input/output error, nothing done"
    SHORT_WRITE = "half of a write, then no space left; other calls: no space left"
    LOST_ANSWER = "done, but reported as an input/output error"
    POWER_CUT = "the power goes off just before the call"
    LOST_WRITE = "a write that is acknowledged and never done"
    MISDIRECTED_WRITE = "a write that lands one sector behind its place"
    STALE_READ = "a read that is answered with what was there before the last write"
    MISDIRECTED_READ = "a read that is answered with the bytes one sector behind its place"


SILENT_WRITES = (Fault.LOST_WRITE, Fault.MISDIRECTED_WRITE)
SILENT_READS = (Fault.STALE_READ, Fault.MISDIRECTED_READ)
LOUD = tuple(fault for fault in Fault if fault not in (*SILENT_WRITES, *SILENT_READS))
"""Faults that are reported to the caller; the others can be detected only by checksums and witnesses."""
SECTOR_BYTES = 512


class FaultyDisk:
    """A `Disk` around another one that fails one chosen call."""

    def __init__(
        self, inner: Disk, fault: Fault = Fault.EIO, *, fail_at: int = 0, operation: str = "*", path: str = "*"
    ) -> None:
        """Fail the `fail_at`-th (from 1; 0 for none) of the calls whose operation and path match the patterns."""
        self.inner = inner
        self.fault = fault
        self._fail_at = fail_at
        self._operation = operation
        self._path = path
        self._lock = threading.Lock()
        self.calls: list[tuple[str, str]] = []
        """The matching calls so far: (operation, path)."""
        self.fired = False
        """Whether the fault has happened."""
        self.overwritten: dict[str, list[tuple[int, bytes]]] = {}
        """For stale reads: path → bytes that writes have replaced, with their offsets, newest last."""

    def arm(self, fault: Fault, *, fail_at: int, operation: str = "*", path: str = "*") -> None:
        """Restart counting, and fail the `fail_at`-th of the matching calls; 0 for none."""
        self.calls.clear()
        self.fired = False
        self.fault, self._operation, self._path, self._fail_at = fault, operation, path, fail_at

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> FaultyFile:
        def step() -> File:
            return self.inner.open(path, create=create, exclusive=exclusive, write=write)

        return FaultyFile(self.run("open", path, step), self)

    def exists(self, path: str) -> bool:
        return self.inner.exists(path)

    def size(self, path: str) -> int:
        return self.run("size", path, lambda: self.inner.size(path))

    def names(self, path: str) -> list[str]:
        return self.run("names", path, lambda: self.inner.names(path))

    def make_dirs(self, path: str) -> None:
        self.run("make_dirs", path, lambda: self.inner.make_dirs(path))

    def rename(self, source: str, target: str) -> None:
        self.run("rename", target, lambda: self.inner.rename(source, target))

    def link(self, source: str, target: str) -> None:
        self.run("link", target, lambda: self.inner.link(source, target))

    def remove(self, path: str) -> None:
        self.run("remove", path, lambda: self.inner.remove(path))

    def remove_dir(self, path: str) -> None:
        self.run("remove_dir", path, lambda: self.inner.remove_dir(path))

    def sync_dir(self, path: str) -> None:
        self.run("sync_dir", path, lambda: self.inner.sync_dir(path))

    def fail_in(self, calls: int) -> None:
        """Fail the `calls`-th matching call from now on."""
        with self._lock:
            self._fail_at = len(self.calls) + calls

    def cut(self) -> None:
        """Cut the power now: every later call raises `PowerCut`."""
        with self._lock:
            self.fault, self.fired = Fault.POWER_CUT, True

    @property
    def has_power_cut(self) -> bool:
        """Whether the power is off."""
        return self.fired and self.fault is Fault.POWER_CUT

    def fails(self, operation: str, path: str) -> Fault | None:
        """Count a call, and return the fault if this call is to fail."""
        with self._lock:
            if self.has_power_cut:
                raise PowerCut(operation, path)
            if not (fnmatch(operation, self._operation) and fnmatch(path, self._path)):
                return None
            self.calls.append((operation, path))
            if len(self.calls) != self._fail_at:
                return None
            self.fired = True
            return self.fault

    def run(self, operation: str, path: str, step: Callable[[], T], half: Callable[[], object] | None = None) -> T:
        """Count a call, and run `step` or fail. `half` is what a short write does before it fails."""
        if self.fails(operation, path) is None:
            return step()
        if self.fault is Fault.POWER_CUT:
            raise PowerCut(operation, path)
        if self.fault is Fault.LOST_ANSWER:
            step()
        if self.fault is Fault.SHORT_WRITE and half is not None:
            half()
        full = self.fault in (Fault.ENOSPC, Fault.SHORT_WRITE)
        number = errno.ENOSPC if full else errno.EIO
        raise translate(OSError(number, os.strerror(number)), path, f"{operation} (injected)")


class FaultyFile(FileLayer):
    """A `File` of a `FaultyDisk`."""

    __slots__ = ("_disk",)

    def __init__(self, inner: File, disk: FaultyDisk) -> None:
        super().__init__(inner)
        self._disk = disk

    def read_at(self, size: int, offset: int) -> bytes:
        if self._disk.fault not in SILENT_READS:
            return self._disk.run("read", self.path, lambda: self._inner.read_at(size, offset))
        fault = self._disk.fails("read", self.path)
        if fault is Fault.MISDIRECTED_READ:
            elsewhere = self._inner.read_at(size, offset + SECTOR_BYTES)
            return elsewhere if len(elsewhere) == size else self._inner.read_at(size, max(0, offset - SECTOR_BYTES))
        current = bytearray(self._inner.read_at(size, offset))
        if fault is Fault.STALE_READ:
            for start, old in self._disk.overwritten.get(self.path, [])[-1:]:
                low, high = max(start, offset), min(start + len(old), offset + len(current))
                if low < high:
                    current[low - offset : high - offset] = old[low - start : high - start]
        return bytes(current)

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        if self._disk.fault in SILENT_WRITES:
            fault = self._disk.fails("write", self.path)
            if fault is not Fault.LOST_WRITE:
                self._inner.write_at(data, offset + (SECTOR_BYTES if fault is Fault.MISDIRECTED_WRITE else 0))
            return
        if self._disk.fault is Fault.STALE_READ:
            self._disk.overwritten.setdefault(self.path, []).append((offset, self._inner.read_at(len(data), offset)))
        head = memoryview(data)[: len(data) // 2]
        self._disk.run(
            "write",
            self.path,
            lambda: self._inner.write_at(data, offset),
            half=lambda: self._inner.write_at(head, offset),
        )

    def size(self) -> int:
        return self._disk.run("size", self.path, self._inner.size)

    def truncate(self, size: int) -> None:
        self._disk.run("truncate", self.path, lambda: self._inner.truncate(size))

    def allocate(self, size: int) -> None:
        self._disk.run("allocate", self.path, lambda: self._inner.allocate(size))

    def sync(self) -> None:
        self._disk.run("sync", self.path, self._inner.sync)

    def __enter__(self) -> FaultyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def each_fault(
    inner: Callable[[], Disk], fault: Fault, *, operation: str = "*", path: str = "*"
) -> Iterator[FaultyDisk]:
    """Yield disks that fail the 1st, 2nd, … matching call, each around a new `inner()`. The last one does not fail."""
    fail_at = 0
    while True:
        fail_at += 1
        disk = FaultyDisk(inner(), fault, fail_at=fail_at, operation=operation, path=path)
        yield disk
        if not disk.fired:
            return


# ── object stores ─────────────────────────────────────────────────────────────────────────────────────────────────────
class ObjectFault(Enum):
    """How a call of an object store fails."""

    UNAVAILABLE = "retries have run out, nothing done"
    LOST_ANSWER = "done, and told as if it were not known"
    STALE_LIST = "a list without the newest objects, and with those that were deleted last"
    STALE_READ = "an object is said not to be there that was put just now"
    SHORT_READ = "half of what was asked for, without an error"


_READS = ("get", "get_range", "get_ranges", "get_verified")
_CALLS: dict[ObjectFault, tuple[str, ...]] = {
    ObjectFault.UNAVAILABLE: ("put", "put_file", *_READS, "head", "list_pages", "list_prefixes", "delete_many"),
    ObjectFault.LOST_ANSWER: ("put", "put_file", "delete_many"),
    ObjectFault.STALE_LIST: ("list_pages",),
    ObjectFault.STALE_READ: (*_READS, "head"),
    ObjectFault.SHORT_READ: ("get", "get_range", "get_ranges"),
}
"""Fault → the calls that it may affect."""
RECENT = 8
"""Number of latest puts and deletions that a stale answer does not include."""


class ObjectFaults:
    """Counts the calls of all object stores of a process, and fails one of them."""

    def __init__(self, fault: ObjectFault) -> None:
        self.fault = fault
        self.fired = False
        """Whether the fault has happened."""
        self._fail_at = 0
        self._calls = 0
        self._lock = threading.Lock()
        self.put: list[str] = []
        """The keys of the last puts."""
        self.deleted: list[Any] = []
        """Listing entries of the objects that were deleted last."""

    def fail_in(self, calls: int) -> None:
        """Fail the `calls`-th call from now on that the fault may affect; 0 for none."""
        with self._lock:
            self._fail_at = self._calls + calls if calls else 0

    def install(self) -> None:
        """Apply this to every object store below a path that this process opens from now on. There is no way to undo it: for
        processes that end with their test."""
        vars(opening)["LocalStore"] = partial(FaultyStore, self)

    def fails(self, call: str) -> bool:
        """Count a call, and return whether it is to fail."""
        with self._lock:
            if call not in _CALLS[self.fault]:
                return False
            self._calls += 1
            if self._calls != self._fail_at:
                return False
            self.fired = True
            return True


class FaultyStore(LocalStore):
    """An object store below a path, one call of which fails."""

    __slots__ = ("_faults",)

    def __init__(self, faults: ObjectFaults, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._faults = faults

    def put(self, key: str, *given: Any, **more: Any) -> Any:
        return self._put_one("put", key, lambda: super(FaultyStore, self).put(key, *given, **more))

    def put_file(self, key: str, *given: Any, **more: Any) -> Any:
        return self._put_one("put_file", key, lambda: super(FaultyStore, self).put_file(key, *given, **more))

    def get(self, key: str) -> bytes:
        return self._read_one("get", key, lambda: super(FaultyStore, self).get(key))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._read_one("get_range", key, lambda: super(FaultyStore, self).get_range(key, offset, length))

    def get_ranges(self, key: str, ranges: Any) -> list[bytes]:
        return self._read_one("get_ranges", key, lambda: super(FaultyStore, self).get_ranges(key, ranges))

    def get_verified(self, key: str, **more: Any) -> bytes:
        return self._read_one("get_verified", key, lambda: super(FaultyStore, self).get_verified(key, **more))

    def head(self, key: str) -> Any:
        return self._read_one("head", key, lambda: super(FaultyStore, self).head(key))

    def list_prefixes(self, prefix: str = "") -> list[str]:
        if self._faults.fails("list_prefixes"):
            raise self._unavailable("list_prefixes", prefix)
        return super().list_prefixes(prefix)

    def list_pages(self, prefix: str = "", *, start_after: str = "", **more: Any) -> Iterator[Any]:
        fails = self._faults.fails("list_pages")
        if fails and self._faults.fault is ObjectFault.UNAVAILABLE:
            raise self._unavailable("list_pages", prefix)
        pages = super().list_pages(prefix, start_after=start_after, **more)
        return self._stale(pages, prefix, start_after) if fails else pages

    def delete_many(self, keys: Any) -> None:
        keys = list(keys)
        fails = self._faults.fails("delete_many")
        if fails and self._faults.fault is ObjectFault.UNAVAILABLE:
            raise self._unavailable("delete_many", keys[0] if keys else "")
        for key in keys:
            try:
                self._faults.deleted.append(super().head(key))
            except ObjectNotFound:
                continue
        del self._faults.deleted[:-RECENT]
        super().delete_many(keys)
        if fails:
            raise self._unavailable("delete_many", keys[0] if keys else "")

    def _put_one(self, call: str, key: str, step: Callable[[], T]) -> T:
        fails = self._faults.fails(call)
        if fails and self._faults.fault is ObjectFault.UNAVAILABLE:
            raise self._unavailable(call, key)
        done = step()
        self._faults.put.append(key)
        del self._faults.put[:-RECENT]
        if fails:
            raise self._unavailable(call, key)
        return done

    def _read_one(self, call: str, key: str, step: Callable[[], T]) -> T:
        if not self._faults.fails(call):
            return step()
        if self._faults.fault is ObjectFault.UNAVAILABLE:
            raise self._unavailable(call, key)
        if self._faults.fault is ObjectFault.STALE_READ and key in self._faults.put:
            raise ObjectNotFound("no such object (injected)", key=key)
        whole: Any = step()
        if self._faults.fault is not ObjectFault.SHORT_READ:
            return whole  # type: ignore[no-any-return]
        short: Any = [part[: len(part) // 2] for part in whole] if isinstance(whole, list) else whole[: len(whole) // 2]
        return short  # type: ignore[no-any-return]

    def _stale(self, pages: Iterator[Any], prefix: str, start_after: str) -> Iterator[Any]:
        known = [info for page in pages for info in page if info.key not in self._faults.put]
        back = [info for info in self._faults.deleted if info.key.startswith(prefix) and info.key > start_after]
        listed = {info.key: info for info in [*back, *known]}
        if listed:
            yield [listed[key] for key in sorted(listed)]

    @staticmethod
    def _unavailable(call: str, key: str) -> ObjectStoreUnavailable:
        return ObjectStoreUnavailable("the object store does not answer (injected)", call=call, key=key)
