"""The tasks of the verify job: read every byte of an artifact's copies, and compare them with its row and with each other.

An artifact is VERIFIED if every copy that its row promises exists and matches the row; MISSING if one does not exist; ALTERED
if one differs. A copy that cannot be read now (the store does not answer, the disk fails) is neither good nor bad: the finding
has the error, and no verdict. A row without a sha256 gets that of the copies, which must agree. For a chunk, the bitmap of its
pages must also have the hash that is in its row.

Files that are not artifacts (files being written, tables of key-value databases) are read as their engine reads them; no row
keeps a verdict about them, it is only in the job's result.

Safe to run on an executor. Raises nothing about an artifact: errors are in the findings.
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
from quire.jobs.copies import CopyDigest, difference, digest_file, digest_object
from quire.jobs.locations import ArtifactLocation, AttemptFailures, OpenStore
from quire.jobs.runner import Tools
from quire.jobs.stream_verify.run import digest_segment, is_stream_segment
from quire.lsm.sst_reader import SSTable
from quire.manifest.records import VerifyState
from quire.pages.chunk_format import load_footer
from quire.pages.segment_scan import open_damage, sealed_damage
from quire.stream.segment import scan


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """Artifacts to verify."""

    places: tuple[ArtifactLocation, ...]
    bitmaps: tuple[int, ...] = ()
    """The hash of each artifact's page bitmap from its row; 0, or no entry at the end, if it is not known."""


@dataclass(frozen=True, slots=True)
class ArtifactFinding:
    """The result for one artifact."""

    place: ArtifactLocation
    state: VerifyState = VerifyState.UNVERIFIED
    """UNVERIFIED if it could not be read."""
    sha256: bytes = b""
    """SHA-256 of its verified bytes, if its row has none."""
    problems: tuple[str, ...] = ()
    """What is wrong with which copy, as text."""
    error: QuireError | None = None

    @property
    def is_bad(self) -> bool:
        """Whether a copy is missing or altered."""
        return self.state in (VerifyState.MISSING, VerifyState.ALTERED)


def run_task(task: VerifyTask, tools: Tools) -> list[ArtifactFinding]:
    """Call `verify` with the tools of a runner."""
    return verify(task, disk=tools.disk, open_store=tools.open_store)


def verify(task: VerifyTask, *, disk: Disk, open_store: OpenStore) -> list[ArtifactFinding]:
    """Verify all artifacts of a task; an object store that does not answer is tried once."""
    trouble, findings = AttemptFailures(), []
    for place, bitmap in zip_longest(task.places, task.bitmaps, fillvalue=0):
        assert isinstance(place, ArtifactLocation), "there are at most as many bitmaps as places"
        skipped = trouble.should_skip(place)
        finding = ArtifactFinding(place, error=trouble.first) if skipped else _verify(place, bitmap, disk, open_store)
        if finding.state is VerifyState.ALTERED:
            # Read it again: the bytes may have been garbled in transit, and damage is recorded.
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
                copies["file"] = digest_file(place, disk)
            except Corruption:
                missing.append("the file is missing")
        if place.has_remote:
            try:
                copies["object"] = digest_object(place, open_store(place.url))
            except ObjectNotFound:
                missing.append("the object is not there")
    except QuireError as error:
        return ArtifactFinding(place, error=error)
    hit("jobs.verify.looked")
    altered = [
        f"the {name} differs from what was written: {what}"
        for name, copy in copies.items()
        if (what := difference(place, copy, is_file=name == "file"))
    ]
    try:
        if not missing and not altered and place.is_page_segment and not (place.sha256 or place.crc64):
            altered += _segment_damage(place, copies, disk, open_store)
        if not altered and len({copy.sha256 for copy in copies.values()}) > 1:
            altered.append("file and object differ, and no digest says which one is right")
        if not missing and not altered and bitmap and _bitmap_hash(place, disk, open_store) != bitmap:
            altered.append("its page bitmap does not match its row")
    except FileNotFoundError:  # evicted or deleted after it was digested, like the object below
        missing.append("the file is missing")
    except ObjectNotFound:
        missing.append("the object is not there")
    except QuireError as error:
        return ArtifactFinding(place, error=error)
    if missing or altered:
        state = VerifyState.MISSING if missing else VerifyState.ALTERED
        return ArtifactFinding(place, state, problems=(*missing, *altered))
    learned = next((copy.sha256 for copy in copies.values()), b"") if not place.sha256 else b""
    return ArtifactFinding(place, VerifyState.VERIFIED, learned)


def _verify_segment(place: ArtifactLocation, disk: Disk, open_store: OpenStore) -> ArtifactFinding:
    """Verify a segment of a stream, whose copies differ in their bytes but contain the same records."""
    try:
        missing, altered = digest_segment(place, disk=disk, open_store=open_store)
    except QuireError as error:
        return ArtifactFinding(place, error=error)
    if missing or altered:
        state = VerifyState.MISSING if missing else VerifyState.ALTERED
        return ArtifactFinding(place, state, problems=(*missing, *altered))
    return ArtifactFinding(place, VerifyState.VERIFIED)


def _segment_damage(
    place: ArtifactLocation, copies: dict[str, CopyDigest], disk: Disk, open_store: OpenStore
) -> Iterator[str]:
    """Yield damage in the copies of a page-WAL segment: its digest is recorded only if it parses as a segment."""
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


# ── files that are not artifacts ──────────────────────────────────────────────────────────────────────────────────────
class FileKind(StrEnum):
    """Kinds of files that are not artifacts, by the way they are read."""

    PAGE_WAL = "page-WAL segment (open)"
    STREAM = "stream segment (open)"
    KV_TABLE = "key-value table"
    KV_BACKUP = "key-value backup"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file that is not an artifact, and what is recorded about it elsewhere."""

    kind: FileKind
    path: str
    """Path of the file; for a backup, the key of its object."""
    db_id: int = 0
    number: int = 0
    """Id of the segment or table."""
    upto: int = 0
    """The last synced lsn or record."""
    size_bytes: int = 0
    sha256: str = ""
    """SHA-256 of a backup's object, from the list of the backup."""
    url: str = ""
    """URL of the object store that contains a backup."""


@dataclass(frozen=True, slots=True)
class FileFinding:
    """The problems of a file; it is good if there are none."""

    file: StoredFile
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesTask:
    """Files to read."""

    url: str
    files: tuple[StoredFile, ...]


def check_files(task: FilesTask, tools: Tools) -> list[FileFinding]:
    """Read every byte of these files that must be durable. Raises what disk and object store raise."""
    return [
        FileFinding(file, tuple(_problems(file, task.url, tools) and _problems(file, task.url, tools)))
        for file in task.files
    ]


def _problems(file: StoredFile, url: str, tools: Tools) -> list[str]:
    try:
        if file.kind is FileKind.KV_BACKUP:
            data = tools.open_store(file.url or url).get(file.path)
            is_same = len(data) == file.size_bytes and sha256(data).hex() == file.sha256
            return [] if is_same else ["the object differs from what was backed up"]
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
        return ["the file is missing"]
    except (Corruption, ObjectNotFound, OutOfRange, FormatTooNew) as error:
        return [error.what]


def _bitmap_hash(place: ArtifactLocation, disk: Disk, open_store: OpenStore) -> int:
    """Return the hash of a chunk's page bitmap. Its bytes are verified already, so only the footer is read again."""
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
