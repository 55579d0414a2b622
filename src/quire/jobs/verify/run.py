"""Looking at every byte of an artifact's copies, and comparing them with its row and with each other.

Rules
  1. An artifact is VERIFIED if every copy that its row promises is there and is what the row says; MISSING if one is not there;
     ALTERED if one differs.
  2. A row that knows no sha256 learns it: that of the copies, which must agree. Of a chunk the bitmap of its pages must have
     the hash that its row says, too.
  3. A copy that cannot be read now (the store does not answer, the disk fails) is neither good nor bad: the finding carries the
     error, and no verdict.

Safe to run on an executor. Raises nothing about an artifact: it is all in the findings.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from quire.core.errors import Corruption, ObjectNotFound, QuireError
from quire.durable.checksums import crc64
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.jobs.copies import Found, difference, look_at_file, look_at_object
from quire.jobs.places import OpenStore, Place
from quire.jobs.runner import Tools
from quire.jobs.stream_verify.run import is_stream_segment, look_at_segment
from quire.jobs.trouble import Trouble
from quire.manifest.records import VerifyState
from quire.pages.chunk_footer import load_footer


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """Artifacts to be looked at."""

    places: tuple[Place, ...]
    bitmaps: tuple[int, ...] = ()
    """The hash of each one's page bitmap, by its row; 0, or none at all, where that is not known."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one artifact."""

    place: Place
    state: VerifyState = VerifyState.UNVERIFIED
    """UNVERIFIED: it could not be read (rule 3)."""
    sha256: bytes = b""
    """Of its bytes, where its row knows none and they were verified."""
    problems: tuple[str, ...] = ()
    """What is wrong with which copy."""
    error: QuireError | None = None

    @property
    def is_bad(self) -> bool:
        """Whether a copy is missing or altered."""
        return self.state in (VerifyState.MISSING, VerifyState.ALTERED)


def run_task(task: VerifyTask, tools: Tools) -> list[Finding]:
    """`verify`, as a runner calls it."""
    return verify(task, disk=tools.disk, open_store=tools.open_store)


def verify(task: VerifyTask, *, disk: Disk, open_store: OpenStore) -> list[Finding]:
    """Look at all of them; a store that does not answer is asked once."""
    trouble, findings = Trouble(), []
    for place, bitmap in zip_longest(task.places, task.bitmaps, fillvalue=0):
        assert isinstance(place, Place), "there are at most as many bitmaps as places"
        spared = trouble.spares(place)
        finding = Finding(place, error=trouble.first) if spared else _verify(place, bitmap, disk, open_store)
        if finding.error is not None:
            trouble.add(place, finding.error)
        findings.append(finding)
    return findings


def _verify(place: Place, bitmap: int, disk: Disk, open_store: OpenStore) -> Finding:
    if is_stream_segment(place):
        return _verify_segment(place, disk, open_store)
    copies: dict[str, Found] = {}
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
        return Finding(place, error=error)
    hit("jobs.verify.looked")
    altered = [
        f"the {name} is not what was written: {what}"
        for name, found in copies.items()
        if (what := difference(place, found, is_file=name == "file"))
    ]
    if not altered and len({found.sha256 for found in copies.values()}) > 1:
        altered.append("file and object differ, and no digest says which one is right")
    try:
        if not missing and not altered and bitmap and _bitmap_hash(place, disk, open_store) != bitmap:
            altered.append("the bitmap of its pages is not the one that its row describes")
    except QuireError as error:
        return Finding(place, error=error)
    if missing or altered:
        state = VerifyState.MISSING if missing else VerifyState.ALTERED
        return Finding(place, state, problems=(*missing, *altered))
    learned = next((found.sha256 for found in copies.values()), b"") if not place.sha256 else b""
    return Finding(place, VerifyState.VERIFIED, learned)


def _verify_segment(place: Place, disk: Disk, open_store: OpenStore) -> Finding:
    """Of a stream: its copies differ in their bytes, and hold the same records."""
    try:
        missing, altered = look_at_segment(place, disk=disk, open_store=open_store)
    except QuireError as error:
        return Finding(place, error=error)
    if missing or altered:
        state = VerifyState.MISSING if missing else VerifyState.ALTERED
        return Finding(place, state, problems=(*missing, *altered))
    return Finding(place, VerifyState.VERIFIED)


def _bitmap_hash(place: Place, disk: Disk, open_store: OpenStore) -> int:
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
