"""How a simulated owner of an archived store, or its standby, dies: at one hit of one failpoint of the archive, drawn from the
seed.

Terms
  death   the failpoint, which of its hits, and how: the process is killed, or the machine loses power

The process is killed with SIGKILL by the thread that reaches the point, while all other threads are where they are. For a loss
of power, that thread first cuts the power of the disk and writes beside the directory what could be left of it (`CrashDisk`),
with a commit of LMDB's either whole or not begun. Of a standby, LMDB's files are taken when the process has ended
(`take_what_is_left`).

Threads: `Death.hit` runs in whichever thread reaches a failpoint.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from quire.durable.files import Disk, DiskLayer, File, OsDisk
from quire.durable.names import MANIFEST
from quire.store.standby import STAGED
from quire.store.store import Store
from quire.testing.crashdisk import Chooser, CrashDisk, CrashOutcome, keep_all
from quire.testing.faults import FaultyDisk

RESTORE_POINTS = (
    "archive.replay.synced",
    "archive.replay.files",
    "archive.replay.rows",
    "archive.replay.replaced",
    "restore.replayed",
    "archive.seal.ahead",
    "archive.seal.stopped",
    "archive.seal.before",
    "archive.seal.put",
)
"""Reached while the bucket is restored and its owner deposed."""

OWNER_POINTS = (
    "archive.cut.before",
    "archive.cut.taken",
    "archive.cut.encoded",
    "archive.spool.before",
    "archive.spool.written",
    "archive.artifact.before",
    "archive.artifact.put",
    "archive.log.before",
    "archive.log.put",
    "archive.base.begun",
    "archive.part.before",
    "archive.part.put",
    "archive.base.put",
    "archive.trim.before",
    "archive.trim.parts",
    "archive.trim.logs",
    "archive.trim.files",
    "archive.retired.before",
    "archive.retired.deleted",
    "archive.retired.forgotten",
    "archive.abandoned.before",
    "archive.abandoned.objects",
    "archive.abandoned.logs",
)
"""Reached while the store is in use."""

FOLLOW_POINTS = (
    "standby.emptied",
    "standby.staged",
    "standby.swapping",
    "standby.part_swapped",
    "standby.files_swapped",
    "standby.rows_swapped",
    "standby.swapped",
    "standby.applied",
    "standby.noted",
)
"""Reached while a standby follows. It also reaches those of a replay."""

PROMOTION_POINTS = (
    "standby.promoting",
    "standby.claimed",
    "standby.sealed",
    "standby.named",
    "standby.taken_over",
    "standby.opened",
)
"""Reached while a standby is promoted. It also reaches those of a seal, and those of a standby that follows."""

POINTS = (*RESTORE_POINTS, *OWNER_POINTS, *FOLLOW_POINTS, *PROMOTION_POINTS)
"""Every failpoint of the archive and of standbys; a test compares this with the sources."""

CLAIM_POINTS = tuple(f"objects.ownership.{step}" for step in ("recorded", "created", "epoch_begun", "confirmed"))
"""Reached while a takeover or a promotion claims its owner epoch."""

UNNAMED_BASE = "archive.log.put"
"""An owner that dies here in its first base has a log, but no base: nothing of its epoch can be restored."""
PROBABILITY = 0.7
"""Of a life to die at a failpoint, if it reaches that."""
FREQUENT = ("archive.cut.", "archive.log.", "archive.replay.", "standby.applied", "standby.noted")
"""Beginnings of the names of points that lives reach many times."""
RARE = "archive.abandoned."
"""Beginning of the names of points that few lives reach more than once."""
HITS, FREQUENT_HITS = (1, 1, 1, 2, 3), (1, 2, 5, 10, 25, 60)


@dataclass(frozen=True)
class Fate:
    """At which hit of which failpoint a life dies, and how."""

    point: str
    hits: int
    by_power_loss: bool

    def __str__(self) -> str:
        return f"{'power lost' if self.by_power_loss else 'killed'} at hit {self.hits} of {self.point}"


def draw_fate(draw: random.Random, points: Collection[str], groups: Sequence[tuple[str, ...]]) -> Fate | None:
    """Draw at which of the `points` a life dies, or that it does not. It reaches those of the groups, which are equally
    likely."""
    candidates = [[point for point in group if point in points] for group in groups]
    candidates = [group for group in candidates if group]
    if not candidates or draw.random() >= PROBABILITY:
        return None
    point = draw.choice(draw.choice(candidates))
    hits = draw.choice(FREQUENT_HITS if point.startswith(FREQUENT) else HITS)
    if point.startswith(RARE):
        hits = 1
    return Fate(point, hits, draw.random() < 0.4)


class Death:
    """Ends this process at the drawn failpoint. REQUIRES that `hit` is armed for every failpoint."""

    def __init__(self, fate: Fate | None, draw: random.Random) -> None:
        self._fate = fate
        self._hits = 0
        self._lock = threading.Lock()
        self._choose = draw_chooser(draw)
        self._lose_power: Callable[[], None] | None = None
        self.is_dying = False

    def hit(self, point: str) -> None:
        """Count a hit of a failpoint, and die if it is the drawn one."""
        if self._fate is None or point != self._fate.point:
            return
        with self._lock:
            self._hits += 1
            if self._hits != self._fate.hits:
                return
            # Before the crash is written: from now on, `stop` keeps other threads from reporting what they observe.
            self.is_dying = True
        try:
            if self._lose_power is not None:
                self._lose_power()
        finally:  # also if the store was closed meanwhile: then it is a kill, and nobody waits in `stop` forever
            os.kill(os.getpid(), signal.SIGKILL)

    def disk(self, root: str) -> Disk | None:
        """Return the disk to open a store in `root` with; `None` for the real one."""
        if self._fate is None or not self._fate.by_power_loss:
            return None
        self._crash_disk = CrashDisk(root)
        self._faulty_disk = FaultyDisk(_BucketBeside(self._crash_disk))
        return self._faulty_disk

    def endanger(self, store: Store, after: str) -> None:
        """From now on a loss of power affects this store, and leaves its directory as `after`."""
        if self._fate is not None and self._fate.by_power_loss:
            self._lose_power = partial(lose_power, self._faulty_disk, self._crash_disk, store, after, self._choose)

    def endanger_standby(self, after: str) -> None:
        """The same for the standby whose disk this is, if this thread, which follows or promotes it, reaches the failpoint. In
        another thread it is a kill: this one could still commit rows whose files are lost."""
        thread = threading.get_ident()

        def lose() -> None:
            if threading.get_ident() == thread:
                lose_power_of_standby(self._faulty_disk, self._crash_disk, after, self._choose)

        if self._fate is not None and self._fate.by_power_loss:
            self._lose_power = lose

    def stop(self) -> None:
        """Wait for the end if it has begun in another thread: what this thread observes meanwhile counts no more."""
        if self.is_dying:
            threading.Event().wait()


class _BucketBeside(DiskLayer):
    """A `Disk` over a `CrashDisk`, with a bucket outside its root that no power loss affects; LMDB syncs its file itself."""

    def __init__(self, crash_disk: CrashDisk) -> None:
        super().__init__(OsDisk())
        self._crash_disk = crash_disk

    def _at(self, path: str) -> Disk:
        is_inside = f"{os.path.abspath(path)}/".startswith(f"{self._crash_disk.root}/")
        # A standby moves LMDB's file, which the crash disk does not cover.
        return self._crash_disk if is_inside and os.path.basename(path) != MANIFEST else self._inner

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        return self._at(path).open(path, create=create, exclusive=exclusive, write=write)

    def make_dirs(self, path: str) -> None:
        self._at(path).make_dirs(path)

    def rename(self, source: str, target: str) -> None:
        self._at(target).rename(source, target)

    def link(self, source: str, target: str) -> None:
        self._at(target).link(source, target)

    def remove(self, path: str) -> None:
        self._at(path).remove(path)

    def remove_dir(self, path: str) -> None:
        self._at(path).remove_dir(path)

    def sync_dir(self, path: str) -> None:
        self._at(path).sync_dir(path)


def lose_power(disk: FaultyDisk, crash_disk: CrashDisk, store: Store, after: str, choose: Chooser) -> None:
    """Cut the power, and write the directory as it could be afterwards to `after`, which exists when it is complete."""
    disk.cut()
    # One commit that has begun may complete, and none begins after that: LMDB's file is copied between two commits.
    transaction = store.manifest.env.begin_write()
    crash_disk.crash(f"{after}.incomplete", choose)
    shutil.copyfile(os.path.join(crash_disk.root, MANIFEST), os.path.join(f"{after}.incomplete", MANIFEST))
    os.rename(f"{after}.incomplete", after)
    del transaction


def lose_power_of_standby(disk: FaultyDisk, crash_disk: CrashDisk, after: str, choose: Chooser) -> None:
    """The same for a standby's directory. LMDB's files follow when this process has ended: `take_what_is_left`."""
    disk.cut()
    crash_disk.crash(f"{after}.incomplete", choose)
    os.rename(f"{after}.incomplete", after)


def take_what_is_left(directory: str, after: str) -> None:
    """Replace a standby's directory by what a loss of power has left, if it lost power. REQUIRES that its processes have
    ended."""
    if not os.path.exists(after):
        return
    for folder in filter(os.path.isdir, (after, os.path.join(after, STAGED))):
        rows = os.path.join(folder, MANIFEST)
        source = os.path.join(directory, os.path.relpath(rows, after))
        if os.path.exists(source):
            shutil.copyfile(source, rows)
        elif os.path.exists(rows):  # as it was when the crash disk was made
            os.remove(rows)
    remove_directory(directory)
    os.rename(after, directory)


def remove_directory(directory: str) -> None:
    """Remove the directory of a killed process. Its probe of the manifest, a process of its own (`manifest/probe.py`), may
    outlive it for a moment, and create a file meanwhile."""
    for _ in range(100):
        with suppress(OSError):
            return shutil.rmtree(directory)
        time.sleep(0.1)
    raise TimeoutError(f"{directory} cannot be removed")


def draw_chooser(draw: random.Random) -> Chooser:
    """Draw how power loss treats pending changes: keeps all (a kill), chooses freely, or mostly keeps or mostly drops."""
    kind = draw.choice(("kill", "any", CrashOutcome.KEEP, CrashOutcome.DROP))
    if kind == "kill":
        return keep_all
    if kind == "any":
        return draw.choice
    return lambda options: draw.choice(options) if draw.random() < 0.1 or kind not in options else kind  # type: ignore[return-value]
