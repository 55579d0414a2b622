"""Operations on the copies of an artifact, its file and its object: read, compare with the row, fetch, remove.

Copies are processed in steps, and only one step is in memory, whatever the size of the copy. `tick` receives the number of
bytes done so far and may raise, which ends the operation.

The state that a crash leaves after each step of `fetch`, and what repairs it:
  make the directories   empty directories                  the next fetch; the end of their database
  write `<file>.tmp`     garbage under that name            overwritten by the next fetch; removed with the artifact
  sync it                a complete copy under that name    the same
  rename                 the file, its name perhaps not     the next fetch takes it over and syncs again
  sync the directories   the file

Safe to run on an executor. Raises what the disk and the object store raise, `Corruption` for a file that is missing, and
`ChecksumMismatch`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from quire.core.errors import ChecksumMismatch, Corruption, StorageFault
from quire.durable.checksums import crc64
from quire.durable.failpoints import hit
from quire.durable.files import Disk, File
from quire.jobs.locations import ArtifactLocation
from quire.objects.api import ObjectStore
from quire.objects.guarded import path_store

STEP_BYTES = 8 << 20
"""Bytes per read over a network: large enough that requests do not dominate, small enough to be interrupted in between."""

FILE_STEP_BYTES = 1 << 20
"""Bytes per read from a file. Buffers of this size are reused; larger ones are mapped again for each step, which takes a third
of the time (1.3 ms per MiB with its digests, instead of 0.9)."""

Tick = Callable[[int], None]


def no_tick(_done: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class CopyDigest:
    """Size and digests of a copy."""

    size_bytes: int
    """Size of the whole copy. The digests cover only as many bytes as the artifact has, or all bytes if the copy is shorter."""
    sha256: bytes
    crc64: int


# ── reading and comparing ─────────────────────────────────────────────────────────────────────────────────────────────
def digest_file(place: ArtifactLocation, disk: Disk, tick: Tick = no_tick) -> CopyDigest:
    """Read an artifact's file and return its digest."""
    try:
        file = disk.open(place.local, write=False)
    except FileNotFoundError:
        raise Corruption(
            "a file that the catalog lists is missing",
            hint="hydrate the artifact if it has an object; otherwise restore the file from a backup",
            artifact=place.key,
            path=place.local,
        ) from None
    try:
        return _digest(file.size(), _of_file(file, place.size_bytes), tick)
    finally:
        file.close()


def digest_object(place: ArtifactLocation, store: ObjectStore, tick: Tick = no_tick) -> CopyDigest:
    """Read an artifact's object and return its digest."""
    size = store.head(place.object_key).size_bytes
    return _digest(size, _of_object(store, place.object_key, min(size, place.size_bytes)), tick)


def difference(place: ArtifactLocation, copy: CopyDigest, *, is_file: bool) -> str:
    """Describe how a copy differs from its row; empty if it does not differ."""
    longer_is_fine = is_file and place.may_be_longer
    if copy.size_bytes < place.size_bytes or (copy.size_bytes > place.size_bytes and not longer_is_fine):
        return f"it has {copy.size_bytes} bytes instead of {place.size_bytes}"
    if place.sha256 and copy.sha256 != place.sha256:
        return f"its sha256 is {copy.sha256.hex()} instead of {place.sha256.hex()}"
    if place.crc64 and copy.crc64 != place.crc64:
        return f"its crc64 is {copy.crc64:016x} instead of {place.crc64:016x}"
    return ""


def checked_file(place: ArtifactLocation, disk: Disk, tick: Tick = no_tick) -> CopyDigest:
    """Return the digest of an artifact's file; `ChecksumMismatch` if it differs from its row."""
    copy = digest_file(place, disk, tick)
    if difference(place, copy, is_file=True):  # read it again: the bytes may have been garbled in transit
        copy = digest_file(place, disk, tick)
    if what := difference(place, copy, is_file=True):
        raise damaged(place, f"the file is not the one that was written: {what}", path=place.local)
    return copy


def checked_object(place: ArtifactLocation, store: ObjectStore, tick: Tick = no_tick) -> CopyDigest:
    """Return the digest of an artifact's object; `ChecksumMismatch` if it differs from its row."""
    copy = digest_object(place, store, tick)
    if difference(place, copy, is_file=False):
        copy = digest_object(place, store, tick)
    if what := difference(place, copy, is_file=False):
        raise damaged(
            place, f"the object is not the one that was written: {what}", store=store.url, key=place.object_key
        )
    return copy


def damaged(place: ArtifactLocation, what: str, **where: str) -> ChecksumMismatch:
    """Return the error for a copy that differs from its row."""
    hint = "run `quire verify` to see which copies are good, and restore the bad one from a backup"
    return ChecksumMismatch(what, hint=hint, artifact=place.key, **where)


def _digest(size_bytes: int, steps: Iterable[bytes], tick: Tick) -> CopyDigest:
    sha, crc, done = hashlib.sha256(), 0, 0
    for step in steps:
        sha.update(step)
        crc = crc64(step, crc)
        done += len(step)
        tick(done)
    return CopyDigest(size_bytes, sha.digest(), crc)


def _of_file(file: File, size: int) -> Iterator[bytes]:
    done = 0
    while done < size and (step := file.read_at(min(FILE_STEP_BYTES, size - done), done)):
        yield step
        done += len(step)


def _of_object(store: ObjectStore, key: str, size: int) -> Iterator[bytes]:
    length = STEP_BYTES if path_store(store) is None else FILE_STEP_BYTES
    for start in range(0, size, length):
        yield store.get_range(key, start, min(length, size - start))


# ── fetching ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def fetch(place: ArtifactLocation, root: str, *, disk: Disk, store: ObjectStore, tick: Tick = no_tick) -> bool:
    """Create an artifact's file from its object; return False if the file already existed and matches its row.

    The file gets its name only when it is complete, matches its row and is synced. On return its name is durable, and so are
    those of the directories above it.
    """
    fetched = not _is_there(place, disk)
    if fetched:
        disk.make_dirs(os.path.dirname(place.local))
        copy = _copy(place, disk, store, tick)
        if difference(place, copy, is_file=False):
            copy = _copy(place, disk, store, tick)
        if what := difference(place, copy, is_file=False):
            # Report the damage, not a failed removal: garbage under this name is harmless.
            with suppress(StorageFault, FileNotFoundError):
                disk.remove(place.staged)
            what = f"the object is not the one that was written: {what}"
            raise damaged(place, what, store=store.url, key=place.object_key)
        hit("jobs.hydrate.staged")
        disk.rename(place.staged, place.local)
        hit("jobs.hydrate.renamed")
    _sync_up_to(root, place.local, disk)
    hit("jobs.hydrate.named")
    return fetched


def _is_there(place: ArtifactLocation, disk: Disk) -> bool:
    """Return whether an earlier attempt has renamed the file. Without a digest that cannot be verified: it is fetched again."""
    if not (place.sha256 or place.crc64) or not disk.exists(place.local):
        return False
    return not difference(place, digest_file(place, disk), is_file=True)


def _copy(place: ArtifactLocation, disk: Disk, store: ObjectStore, tick: Tick) -> CopyDigest:
    size = store.head(place.object_key).size_bytes
    file = disk.open(place.staged, create=True)
    try:
        # An attempt that died may have left a longer file under this name.
        file.truncate(0)
        hit("jobs.hydrate.begun")
        copy = _digest(size, _written(file, _of_object(store, place.object_key, min(size, place.size_bytes))), tick)
        file.sync()
    finally:
        file.close()
    return copy


def _written(file: File, steps: Iterable[bytes]) -> Iterator[bytes]:
    done = 0
    for step in steps:
        file.write_at(step, done)
        done += len(step)
        yield step


def _sync_up_to(root: str, path: str, disk: Disk) -> None:
    """Make the names of a file and of every directory above it durable: the process that made one may have died before its
    sync."""
    folder = os.path.dirname(path)
    while True:
        disk.sync_dir(folder)
        if folder in (root, os.path.dirname(folder)):
            return
        folder = os.path.dirname(folder)


# ── removing ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def remove_files(paths: Iterable[str], disk: Disk) -> dict[str, StorageFault]:
    """Remove files durably; return those that still exist, or may reappear after a crash, with the fault."""
    faults: dict[str, StorageFault] = {}
    folders: dict[str, list[str]] = {}
    for path in paths:
        try:
            disk.remove(path)
        except FileNotFoundError:
            pass  # removed by an earlier attempt, which may not have synced the directory
        except StorageFault as fault:
            faults[path] = fault
            continue
        folders.setdefault(os.path.dirname(path), []).append(path)
    for folder, inside in folders.items():
        try:
            disk.sync_dir(folder)
        except FileNotFoundError:
            pass  # the directory does not exist, so neither does any file in it
        except StorageFault as fault:
            faults.update(dict.fromkeys(inside, fault))
    return faults
