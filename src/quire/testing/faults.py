"""A `Disk` whose n-th call fails, so that a test can fail the first, second, … last call until a clean pass.

Terms
  call   one operation that can fail: every method of `Disk` and `File` except `exists`, `fileno`, `path` and `close`
  fault  how it fails

A test is a loop: `for disk in each_fault(new_disk, Fault.EIO): …`, expecting a typed error whenever `disk.fired`.

Rules
  1. Faults look as `OsDisk` would show them: translated, typed, with path and errno.
  2. Everything before the failing call really happens; `SHORT_WRITE` also writes half of its data, `LOST_ANSWER` does
     the whole thing and then fails, as a sync may.
  3. `POWER_CUT` raises a `PowerCut`, which no `except Exception` stops, at that call and at every later one: handlers
     that would clean up do not get to. Crash the `CrashDisk` below next.
  4. Silent faults raise nothing: a write that is acknowledged and lost or lands elsewhere in its file, a read that is
     answered with what was there before or with the bytes of another place. They happen to calls of their kind only
     (`operation` "write" or "read"), and not to bytes that are read through a mapping.

Threads: any; the counter is under a lock. Raises `StorageFault`, `DiskFull`, `PowerCut`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from fnmatch import fnmatch
from typing import TypeVar

from quire.durable.files import Disk, File, translate

T = TypeVar("T")


class PowerCut(BaseException):
    """The machine is off: nothing more happens on this disk."""


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
"""Those that the caller is told of: after the others, only checksums and witnesses can tell."""
SECTOR_BYTES = 512


class FaultyDisk:
    """A `Disk` around another one that fails one chosen call."""

    def __init__(
        self, inner: Disk, fault: Fault = Fault.EIO, *, fail_at: int = 0, operation: str = "*", path: str = "*"
    ) -> None:
        """Fail the `fail_at`-th (from 1; 0: none) of the calls whose operation and path match the patterns."""
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
        """For stale reads: what writes have replaced, by path, the newest last."""

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
        """The power goes off now: every later call raises `PowerCut`."""
        with self._lock:
            self.fault, self.fired = Fault.POWER_CUT, True

    @property
    def has_power_cut(self) -> bool:
        """Whether the power is off."""
        return self.fired and self.fault is Fault.POWER_CUT

    def fails(self, operation: str, path: str) -> Fault | None:
        """Count a call; the fault, if this is the one that it happens to."""
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
        """Count a call and do `step`, or fail; `half` is what a short write still does."""
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


class FaultyFile:
    """A `File` of a `FaultyDisk`."""

    __slots__ = ("_disk", "_inner")

    def __init__(self, inner: File, disk: FaultyDisk) -> None:
        self._inner = inner
        self._disk = disk

    @property
    def path(self) -> str:
        return self._inner.path

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

    def fileno(self) -> int:
        return self._inner.fileno()

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> FaultyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def each_fault(
    inner: Callable[[], Disk], fault: Fault, *, operation: str = "*", path: str = "*"
) -> Iterator[FaultyDisk]:
    """Disks that fail the 1st, 2nd, … matching call, each around a new `inner()`; the last one is the clean pass."""
    fail_at = 0
    while True:
        fail_at += 1
        disk = FaultyDisk(inner(), fault, fail_at=fail_at, operation=operation, path=path)
        yield disk
        if not disk.fired:
            return
