"""Looking at every byte of an artifact's copies, and comparing them with its row and with each other.

An artifact is VERIFIED if every copy that its row promises is there and is what the row says; MISSING if one is not there;
ALTERED if one differs. A copy that cannot be read now (the store does not answer, the disk fails) is neither good nor bad:
the finding carries the error, and no verdict. A row that knows no sha256 learns it: that of the copies, which must agree. Of
a chunk the bitmap of its pages must have the hash that its row says, too.

Files that are no artifacts (what is being written, tables of key-value databases) are read as their engine reads them; there
is no row to keep a verdict in, it is in the job's result.

Safe to run on an executor. Raises nothing about an artifact: it is all in the findings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Any

from quire.core.errors import Corruption, FormatTooNew, ObjectNotFound, OutOfRange, QuireError
from quire.durable.checksums import crc64, sha256
from quire.durable.failpoints import hit
from quire.durable.files import Disk, read_all
from quire.jobs.copies import CopyDigest, difference, look_at_file, look_at_object
from quire.jobs.locations import ArtifactLocation, AttemptFailures, OpenStore
from quire.jobs.runner import Tools
from quire.jobs.stream_verify.run import is_stream_segment, look_at_segment
from quire.lsm.sst_reader import SSTable
from quire.manifest.records import VerifyState
from quire.pages.chunk_format import load_footer
from quire.pages.segment_scan import open_damage, sealed_damage
from quire.stream.segment import scan


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """Artifacts to be looked at."""

    places: tuple[ArtifactLocation, ...]
    bitmaps: tuple[int, ...] = ()
    """The hash of each one's page bitmap, by its row; 0, or none at all, where that is not known."""


@dataclass(frozen=True, slots=True)
class ArtifactFinding:
    """What became of one artifact."""

    place: ArtifactLocation
    state: VerifyState = VerifyState.UNVERIFIED
    """UNVERIFIED: it could not be read."""
    sha256: bytes = b""
    """Of its bytes, where its row knows none and they were verified."""
    problems: tuple[str, ...] = ()
    """What is wrong with which copy."""
    error: QuireError | None = None

    @property
    def is_bad(self) -> bool:
        """Whether a copy is missing or altered."""
        return self.state in (VerifyState.MISSING, VerifyState.ALTERED)


def run_task(task: VerifyTask, tools: Tools) -> list[ArtifactFinding]:
    """`verify`, as a runner calls it."""
    return verify(task, disk=tools.disk, open_store=tools.open_store)


def verify(task: VerifyTask, *, disk: Disk, open_store: OpenStore) -> list[ArtifactFinding]:
    """Look at all of them; a store that does not answer is asked once."""
    trouble, findings = AttemptFailures(), []
    for place, bitmap in zip_longest(task.places, task.bitmaps, fillvalue=0):
        assert isinstance(place, ArtifactLocation), "there are at most as many bitmaps as places"
        spared = trouble.spares(place)
        finding = ArtifactFinding(place, error=trouble.first) if spared else _verify(place, bitmap, disk, open_store)
        if (
            finding.state is VerifyState.ALTERED
        ):  # read once more: what is recorded as damage was not garbled on the way
            finding = _verify(place, bitmap, disk, open_store)
        if finding.error is not None:
            trouble.add(place, finding.error)
        findings.append(finding)
    return findings


def _verify(place: ArtifactLocation, bitmap: int, disk: Disk, open_store: OpenStore) -> ArtifactFinding:
    if is_stream_segment(place):
        return _verify_segment(place, disk, open_store)
    copies: dict[str, CopyDigest] = {}
    missing: list[str] = []
    try:
        if place.has_local:
            try:
                copies["file"] = look_at_file(place, disk)
            except Corruption:
                missing.append("the file is not there")
        if place.has_remote:
            try:
                copies["object"] = look_at_object(place, open_store(place.url))
            except ObjectNotFound:
                missing.append("the object is not there")
    except QuireError as error:
        return ArtifactFinding(place, error=error)
    hit("jobs.verify.looked")
    altered = [
        f"the {name} is not what was written: {what}"
        for name, copy in copies.items()
        if (what := difference(place, copy, is_file=name == "file"))
    ]
    if not missing and not altered and place.is_page_segment and not (place.sha256 or place.crc64):
        try:
            altered += _segment_damage(place, copies, disk, open_store)
        except QuireError as error:
            return ArtifactFinding(place, error=error)
    if not altered and len({copy.sha256 for copy in copies.values()}) > 1:
        altered.append("file and object differ, and no digest says which one is right")
    try:
        if not missing and not altered and bitmap and _bitmap_hash(place, disk, open_store) != bitmap:
            altered.append("the bitmap of its pages is not the one that its row describes")
    except QuireError as error:
        return ArtifactFinding(place, error=error)
    if missing or altered:
        state = VerifyState.MISSING if missing else VerifyState.ALTERED
        return ArtifactFinding(place, state, problems=(*missing, *altered))
    learned = next((copy.sha256 for copy in copies.values()), b"") if not place.sha256 else b""
    return ArtifactFinding(place, VerifyState.VERIFIED, learned)


def _verify_segment(place: ArtifactLocation, disk: Disk, open_store: OpenStore) -> ArtifactFinding:
    """Of a stream: its copies differ in their bytes, and hold the same records."""
    try:
        missing, altered = look_at_segment(place, disk=disk, open_store=open_store)
    except QuireError as error:
        return ArtifactFinding(place, error=error)
    if missing or altered:
        state = VerifyState.MISSING if missing else VerifyState.ALTERED
        return ArtifactFinding(place, state, problems=(*missing, *altered))
    return ArtifactFinding(place, VerifyState.VERIFIED)


def _segment_damage(
    place: ArtifactLocation, copies: dict[str, CopyDigest], disk: Disk, open_store: OpenStore
) -> Iterator[str]:
    """What is wrong with the copies of a page-WAL segment: its digest is learned only if it reads as one."""
    ids: dict[str, Any] = {"path": place.local, "db_id": place.key.origin_db_id, "segment_id": place.key.id}
    if "file" in copies:
        file = disk.open(place.local, write=False)
        try:
            if what := sealed_damage(lambda at, size: file.read_at(size, at), place.size_bytes, **ids):
                yield f"the file is damaged: {what}"
        finally:
            file.close()
    if "object" in copies:
        store, end = open_store(place.url), place.size_bytes

        def read(at: int, size: int) -> bytes:
            return store.get_range(place.object_key, at, min(size, end - at)) if at < end else b""

        if what := sealed_damage(read, place.size_bytes, **ids):
            yield f"the object is damaged: {what}"


# ── files that are no artifacts ───────────────────────────────────────────────────────────────────────────────────────
class FileKind(StrEnum):
    """How a file that is no artifact is read."""

    PAGE_WAL = "page-WAL segment (open)"
    STREAM = "stream segment (open)"
    KV_TABLE = "key-value table"
    KV_BACKUP = "key-value backup"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file that is no artifact, and what is known of it elsewhere."""

    kind: FileKind
    path: str
    """Of the file; of a backup the key of its object."""
    db_id: int = 0
    number: int = 0
    """Of the segment or table."""
    upto: int = 0
    """What was synced: up to this lsn, or this record."""
    size_bytes: int = 0
    sha256: str = ""
    """Of an object, as its list has it."""
    url: str = ""
    """Of the object store that a backup is in."""


@dataclass(frozen=True, slots=True)
class FileFinding:
    """What is wrong with a file; nothing if `problems` is empty."""

    file: StoredFile
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesTask:
    """Files to be read."""

    url: str
    files: tuple[StoredFile, ...]


def check_files(task: FilesTask, tools: Tools) -> list[FileFinding]:
    """Read every byte of these files that somebody was promised. Raises what disk and object store raise."""
    return [
        FileFinding(file, tuple(_problems(file, task.url, tools) and _problems(file, task.url, tools)))
        for file in task.files
    ]


def _problems(file: StoredFile, url: str, tools: Tools) -> list[str]:
    try:
        if file.kind is FileKind.KV_BACKUP:
            data = tools.open_store(file.url or url).get(file.path)
            is_same = len(data) == file.size_bytes and sha256(data).hex() == file.sha256
            return [] if is_same else ["the object is not what was backed up"]
        if file.kind is FileKind.KV_TABLE:
            table = SSTable.open(tools.disk, file.path, file.number)
            try:
                return list(table.verify())
            finally:
                table.close()
        if file.kind is FileKind.STREAM:
            scan(read_all(tools.disk, file.path), durable_upto=file.upto, path=file.path)
            return []
        opened = tools.disk.open(file.path, write=False)
        try:
            ids: dict[str, Any] = {"path": file.path, "db_id": file.db_id, "segment_id": file.number}
            what = open_damage(lambda at, size: opened.read_at(size, at), synced_lsn=file.upto, **ids)
            return [what] if what else []
        finally:
            opened.close()
    except FileNotFoundError:
        return ["the file is not there"]
    except (Corruption, ObjectNotFound, OutOfRange, FormatTooNew) as error:
        return [error.what]


def _bitmap_hash(place: ArtifactLocation, disk: Disk, open_store: OpenStore) -> int:
    """Of a chunk whose bytes are as they should be: its footer is read again, and nothing else."""
    if place.has_local:
        file = disk.open(place.local, write=False)
        try:
            footer, _ = load_footer(lambda at, size: file.read_at(size, at), place.size_bytes, name=place.object_key)
        finally:
            file.close()
    else:
        store = open_store(place.url)
        footer, _ = load_footer(
            lambda at, size: store.get_range(place.object_key, at, size), place.size_bytes, name=place.object_key
        )
    return crc64(footer.bitmap)
