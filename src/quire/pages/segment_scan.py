"""Reads the contents of a WAL segment and determines how it ends: clean, torn, or corrupt.

Terms
  good     how many leading frames are intact: at or below `indexed_upto_lsn` those with a valid entry, above it those that
           are valid themselves
  cut      the end of the last commit among the good frames: recovery keeps everything before it. Frames from `cut` to `good`
           are a transaction without its commit; either the next segment continues it, or it never happened
  limit    how many frames the segment can have, as known from elsewhere: its capacity, or fewer if it was sealed or a
           later segment continues from there
  proven   the lsn up to which frames are known to have been synced: the largest of the caller's `indexed_upto_lsn` and
           `proven_lsn`, and the `durable_upto_lsn` of every valid commit frame, *also of those after the bad frame*
  shown    a position whose entry or head has the expected lsn: it was written in this life of the file

Rules (the verdict, P2 and P3)
  1. The first bad frame is at or below `proven`: `Corruption`. A sync that covered it had succeeded.
  2. Otherwise it is a torn tail left by a crash: everything after the cut is discarded, whatever it contains.
  3. At or below `indexed_upto_lsn` entries alone decide, so recovery reads 1 % of the WAL: they were synced before that lsn
     was committed. Above it frames alone decide, and their entries are rebuilt from their heads: the entries in the region
     were not published there, and are not read (docs/decisions/008).
  4. Nothing is appended after a cut (P4): with the same salt, discarded frames would become valid again.
  5. An lsn of a later segment, as `indexed_upto_lsn` or as a proof, may be given only together with `limit`: frames that
     were never written to this segment are not missing.

Why rule 1 raises no false alarm: a frame has `durable_upto_lsn` = D only after a sync of every frame up to D returned, and
in one life of a file no position is written twice. Why rule 2 may be silent: power loss keeps, drops or garbles any unsynced
sector, so a bad frame followed by good ones is normal among unsynced frames.

A body costs one crc64 call, an entry no Python at all. Publication uses `entries_of`; executors use `sealed_entries`, `as_rows`
and `page_map`. Threads: any; pure functions over bytes, with numpy. Format page: `docs/formats/segment.md`.
Raises `Corruption` (path, segment, frame, lsn, offset), `OutOfRange`, and what reading raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import Corruption, FormatTooNew, OutOfRange
from quire.core.limits import MIB
from quire.durable.checksums import Bytes, crc64, crc64_rows
from quire.pages.segment import (
    ENTRY_BYTES,
    ENTRY_CHECKED_BYTES,
    FRAME_CHECKED_BYTES,
    FRAME_HEAD_BYTES,
    HEADER_BYTES,
    HINT,
    ZERO,
    SegmentHeader,
    decode_header,
)
from quire.pages.segment_file import SegmentFile

_SHARED = [
    ("page", "<u4"), ("db_size", "<u4"), ("lsn", "<u8"), ("prev_lsn", "<u8"), ("prev_segment", "<u4"), ("flags", "<u4"),
]  # fmt: skip
ENTRY_DTYPE = np.dtype([*_SHARED, ("frame_crc64", "<u8"), ("entry_crc64", "<u8")])
HEAD_DTYPE = np.dtype(
    [*_SHARED, ("durable_upto_lsn", "<u8"), ("commit_ms", "<u8"), ("reserved", "<u8"), ("crc64", "<u8")]
)
ROW_DTYPE = np.dtype(
    [
        ("page", "<u4"), ("frame_no", "<u4"), ("lsn", "<u8"), ("prev_lsn", "<u8"), ("frame_crc64", "<u8"),
        ("segment_id", "<u4"), ("origin_db_id", "<u4"), ("flags", "<u4"), ("reserved", "<u4"),
    ]
)  # fmt: skip
"""A page version in the packed form that the manifest's `PublishPages` takes; a test compares the two."""
COMMIT_DTYPE = np.dtype([("frame_no", "<u4"), ("db_size", "<u4"), ("lsn", "<u8"), ("commit_ms", "<u8")])
"""`commit_ms` is 0 for frames that were not read: those at or below `indexed_upto_lsn`, except the last commit."""

READ_BYTES = 4 * MIB
"""How much is read and checked at a time."""

if (ENTRY_DTYPE.itemsize, HEAD_DTYPE.itemsize, ROW_DTYPE.itemsize) != (ENTRY_BYTES, FRAME_HEAD_BYTES, 48):
    raise AssertionError("the numpy types disagree with the segment's structs")

Entries = NDArray[np.void]
ReadFrames = Callable[[int, int], Bytes]
"""(first frame, count) → their bytes, fewer at the end of the file."""


class CutReason(Enum):
    """Why a segment ends at its cut."""

    NOTHING = "nothing was cut"
    UNFINISHED = "the frames after the cut have no commit"
    BAD_FRAME = "a frame is missing or damaged"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentScan:
    """The contents of a segment up to the cut, and how it ended."""

    header: SegmentHeader
    entries: Entries
    """`ENTRY_DTYPE`, up to the cut: whole transactions only."""
    unfinished: Entries
    """From the cut to `good`: frames whose commit is not in this segment."""
    commits: NDArray[np.void]
    """`COMMIT_DTYPE`."""
    last_lsn: int
    """The lsn of the last commit; if there is none, the lsn before the segment's first."""
    size_pages: int
    """The database's size in pages after the last commit; 0 if there is none."""
    last_commit_ms: int
    proven_lsn: int
    cut_frames: int
    """How many frames after the cut are discarded, counted up to the last position written in this life of the file."""
    cut_reason: CutReason

    @property
    def cut(self) -> int:
        """How many frames are kept; also the number of the first frame that is not."""
        return len(self.entries)

    @property
    def good(self) -> int:
        return len(self.entries) + len(self.unfinished)

    @property
    def used_bytes(self) -> int:
        """The bytes of the file up to the end of the kept frames."""
        return self.header.geometry.frame_offset(self.cut)


def recover_segment(
    file: SegmentFile, *, indexed_upto_lsn: int = 0, proven_lsn: int = 0, limit: int | None = None
) -> SegmentScan:
    """Scan a segment whose writer is gone: sync the file, drop its cached pages, then read it; see `scan_segment`."""
    file.sync_and_drop_cache()
    return scan_segment(
        file.header,
        file.read_index(),
        file.read_raw,
        path=file.path,
        indexed_upto_lsn=indexed_upto_lsn,
        proven_lsn=proven_lsn,
        limit=limit,
    )


def scan_segment(
    header: SegmentHeader,
    index: Bytes,
    read_frames: ReadFrames,
    *,
    path: str,
    indexed_upto_lsn: int = 0,
    proven_lsn: int = 0,
    limit: int | None = None,
) -> SegmentScan:
    """Return the contents of the segment, after applying rules 1 to 5.

    `index` is the region of entries. `limit` and `proven_lsn` come from other sources: the row of a sealed segment, the first
    lsn of the next one.
    """
    region = parse_entries(index)
    limit = _limit(header, region, limit)
    start = min(max(indexed_upto_lsn - header.first_lsn + 1, 0), limit)
    frames = _Frames(header, region[:limit], start)
    frames.read(read_frames)
    good, entries = frames.good(), frames.entries
    proven = max(indexed_upto_lsn, proven_lsn, frames.durable_upto_lsn)
    # At `limit` nothing is missing: the segment never had more frames (rule 5).
    if good < limit and header.lsn(good) <= proven:
        what = "a frame's index entry" if good < start else "a frame"
        raise _corruption(header, path, good, f"{what} that had been synced is missing or damaged", frames.page(good))
    sizes = entries["db_size"][:good]
    commit_frames = np.flatnonzero(sizes)
    cut = int(commit_frames[-1]) + 1 if len(commit_frames) else 0
    if 0 < cut <= start:
        frames.read_trusted_commit(cut - 1, read_frames, path)
    commits = np.zeros(len(commit_frames), COMMIT_DTYPE)
    commits["frame_no"], commits["db_size"] = commit_frames, sizes[commit_frames]
    commits["lsn"], commits["commit_ms"] = entries["lsn"][commit_frames], frames.commit_ms[commit_frames]
    shown = frames.shown_behind(cut)
    return SegmentScan(
        header=header,
        entries=entries[:cut],
        unfinished=entries[cut:good],
        commits=commits,
        last_lsn=header.lsn(cut - 1),
        size_pages=int(sizes[cut - 1]) if cut else 0,
        last_commit_ms=int(frames.commit_ms[cut - 1]) if cut else 0,
        proven_lsn=proven,
        cut_frames=shown,
        cut_reason=_reason(shown, behind_cut=good - cut),
    )


def sealed_entries(header: SegmentHeader, index: Bytes, frame_count: int, *, path: str) -> Entries:
    """Return the first `frame_count` entries of a segment that is known to have them; `index` may end there.

    Frames are not read here: each is verified when it is read. For snapshots, forks and executors (P12, K2).
    """
    entries = parse_entries(index)
    entries = entries[: _limit(header, entries, frame_count)]
    good = _leading(valid_entries(header, entries))
    if good < frame_count:
        raise _corruption(header, path, good, "a sealed segment's index entry is missing or damaged")
    return entries


def parse_entries(index: Bytes) -> Entries:
    """Return the bytes of an index region as an array, without a copy and unverified; a partial entry is omitted."""
    return np.frombuffer(index, ENTRY_DTYPE, count=len(index) // ENTRY_BYTES)


def valid_entries(header: SegmentHeader, entries: Entries) -> NDArray[np.bool_]:
    """Return which entries, the first being that of frame 0, are valid in this segment at their position."""
    numbers = np.arange(len(entries), dtype=np.uint64)
    checksums = crc64_rows(_bytes_of(entries)[:, :ENTRY_CHECKED_BYTES], np.uint64(header.crc64) ^ numbers)
    valid: NDArray[np.bool_] = checksums == entries["entry_crc64"]
    valid &= entries["lsn"] == numbers + np.uint64(header.first_lsn)
    return valid


def entries_of(header: SegmentHeader, heads: NDArray[np.void]) -> Entries:
    """Return the entries of frames, built from their heads (`HEAD_DTYPE`); frame numbers follow from the lsns of the heads."""
    entries = np.empty(len(heads), ENTRY_DTYPE)
    for name, _ in _SHARED:
        entries[name] = heads[name]
    entries["frame_crc64"] = heads["crc64"]
    seeds = np.uint64(header.crc64) ^ (entries["lsn"] - np.uint64(header.first_lsn))
    entries["entry_crc64"] = crc64_rows(_bytes_of(entries)[:, :ENTRY_CHECKED_BYTES], seeds)
    return entries


def parse_heads(heads: Bytes) -> NDArray[np.void]:
    """Return consecutive frame heads as an array, without a copy and unverified."""
    return np.frombuffer(heads, HEAD_DTYPE)


def as_rows(header: SegmentHeader, entries: Entries) -> NDArray[np.void]:
    """Return entries of one segment as `ROW_DTYPE`; `tobytes()` of it is the input of `PublishPages`."""
    rows = np.zeros(len(entries), ROW_DTYPE)
    for name in ("page", "lsn", "prev_lsn", "frame_crc64", "flags"):
        rows[name] = entries[name]
    rows["frame_no"] = entries["lsn"] - np.uint64(header.first_lsn)
    rows["segment_id"], rows["origin_db_id"] = header.segment_id, header.db_id
    return rows


def page_map(versions: NDArray[np.void], upto_lsn: int) -> NDArray[np.void]:
    """Return the newest version of each page at or below `upto_lsn`, sorted by page.

    `versions` are entries, or rows from several segments.
    """
    versions = versions[versions["lsn"] <= np.uint64(upto_lsn)]
    lsns = versions["lsn"]
    if np.any(lsns[1:] < lsns[:-1]):
        versions = versions[np.argsort(lsns, kind="stable")]
    pages = versions["page"]
    if np.all(pages[1:] > pages[:-1]):  # each page written once, in order, as by bulk loads
        return versions
    # Counted from the end, the first version of each page is its newest.
    _, places = np.unique(pages[::-1], return_index=True)
    newest: NDArray[np.void] = versions[::-1][places]
    return newest


class _Frames:
    """The state of each frame: up to `start` from the region of entries, from there on from the frames (rule 3)."""

    def __init__(self, header: SegmentHeader, region: Entries, start: int) -> None:
        self._header = header
        self._start = start
        # A copy, because the region is a read-only view of the bytes that were read.
        self.entries = region.copy()
        """Up to `start` from the region; from there on built from valid frames, and undefined for others."""
        self._valid = np.zeros(len(region), np.bool_)
        self._valid[:start] = valid_entries(header, region[:start])
        self._shown = region["lsn"] == np.arange(len(region), dtype=np.uint64) + np.uint64(header.first_lsn)
        self._pages = np.full(len(region), -1, np.int64)
        self.commit_ms = np.zeros(len(region), np.uint64)
        self.durable_upto_lsn = 0

    def read(self, read_frames: ReadFrames) -> None:
        """Read and check all frames from `start` on, a few MiB at a time."""
        step = max(1, READ_BYTES // self._header.geometry.stride)
        for first in range(self._start, len(self.entries), step):
            heads, numbers = self._check(first, read_frames(first, min(step, len(self.entries) - first)))
            self._valid[numbers] = True
            self.entries[numbers] = entries_of(self._header, heads)

    def read_trusted_commit(self, frame_no: int, read_frames: ReadFrames, path: str) -> None:
        """Read one commit frame below `start`, for its time."""
        heads, _ = self._check(frame_no, read_frames(frame_no, 1))
        if entries_of(self._header, heads).tobytes() != self.entries[frame_no : frame_no + 1].tobytes():
            what = "the last commit that had been published is damaged"
            raise _corruption(self._header, path, frame_no, what, int(self.entries["page"][frame_no]))

    def good(self) -> int:
        """Return the number of leading frames that are intact."""
        return _leading(self._valid)

    def page(self, frame_no: int) -> int | None:
        """Return the page of a bad frame, if its head is still of this life of the file; for error messages."""
        page = int(self._pages[frame_no])
        return page if page >= 0 else None

    def shown_behind(self, cut: int) -> int:
        """Return the number of positions after the cut, up to the last one written in this life of the file."""
        places = np.flatnonzero(self._shown[cut:])
        return int(places[-1]) + 1 if len(places) else 0

    def _check(self, first: int, data: Bytes) -> tuple[NDArray[np.void], NDArray[np.uint64]]:
        """Return the heads of the valid frames in `data`, and their numbers."""
        stride = self._header.geometry.stride
        count = len(data) // stride  # fewer than requested at the end of the file: the rest do not exist
        heads = np.ndarray((count,), HEAD_DTYPE, data, strides=(stride,)) if count else np.empty(0, HEAD_DTYPE)
        numbers = np.arange(first, first + count, dtype=np.uint64)
        shown = heads["lsn"] == numbers + np.uint64(self._header.first_lsn)
        self._shown[first : first + count] |= shown
        places = np.flatnonzero(shown)
        self._pages[first + places] = heads["page"][places]
        checksums = self._checksums(data, heads[places], places, numbers[places])
        places = places[heads["crc64"][places] == checksums]
        heads, numbers = heads[places], numbers[places]
        commits = heads["db_size"] != 0
        self.commit_ms[numbers[commits]] = heads["commit_ms"][commits]
        # Commits after a bad frame count too: an intact later one may prove that the bad one had been synced (rule 1).
        self.durable_upto_lsn = max(self.durable_upto_lsn, int(np.max(heads["durable_upto_lsn"][commits], initial=0)))
        return heads, numbers

    def _checksums(
        self, data: Bytes, heads: NDArray[np.void], places: NDArray[np.intp], numbers: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        stride, view = self._header.geometry.stride, memoryview(data)
        checksums = crc64_rows(_bytes_of(heads)[:, :FRAME_CHECKED_BYTES], np.uint64(self._header.crc64) ^ numbers)
        bodies = np.flatnonzero((heads["flags"] & np.uint32(ZERO)) == 0)
        starts = (places[bodies] * stride + FRAME_HEAD_BYTES).tolist()
        size = stride - FRAME_HEAD_BYTES
        running = zip(starts, checksums[bodies].tolist(), strict=True)
        checksums[bodies] = np.fromiter((crc64(view[start : start + size], seed) for start, seed in running), np.uint64)
        return checksums


def _bytes_of(array: NDArray[np.void]) -> NDArray[np.uint8]:
    """Return a structured array as rows of bytes, one per element."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), array.dtype.itemsize)


def _leading(flags: NDArray[np.bool_]) -> int:
    """Return the number of leading true values."""
    return len(flags) if flags.all() else int(np.argmin(flags))


def _limit(header: SegmentHeader, entries: Entries, limit: int | None) -> int:
    capacity = header.geometry.capacity
    limit = capacity if limit is None else limit
    if not 0 <= limit <= capacity:
        raise OutOfRange("the segment cannot hold that many frames", frames=limit, capacity=capacity)
    if len(entries) < limit:
        raise OutOfRange("entries are missing", hint="pass the region of entries", entries=len(entries), frames=limit)
    return limit


def _reason(shown: int, *, behind_cut: int) -> CutReason:
    if not shown:
        return CutReason.NOTHING
    return CutReason.UNFINISHED if shown == behind_cut else CutReason.BAD_FRAME


def _corruption(header: SegmentHeader, path: str, frame: int, what: str, page: int | None = None) -> Corruption:
    return Corruption(
        what,
        hint=HINT,
        path=path,
        db_id=header.db_id,
        segment_id=header.segment_id,
        frame=frame,
        page=page,
        lsn=header.lsn(frame),
        offset=header.geometry.frame_offset(frame),
    )


ReadAt = Callable[[int, int], Bytes]
"""(offset, size) → that many bytes, or fewer at the end."""


def sealed_damage(read: ReadAt, used_bytes: int, *, path: str, db_id: int, segment_id: int) -> str:
    """Return what is wrong with a sealed segment of `used_bytes` bytes; empty if it is intact."""
    try:
        header = decode_header(read(0, HEADER_BYTES), path, db_id=db_id, segment_id=segment_id)
        geometry = header.geometry
        frames, remainder = divmod(used_bytes - geometry.frames_offset, geometry.stride)
        if frames < 0 or remainder:
            return f"{used_bytes} bytes are not a whole number of frames"
        return _damage(read, header, frames, path)
    except (Corruption, FormatTooNew) as error:
        return error.what


def open_damage(read: ReadAt, *, path: str, db_id: int, segment_id: int, synced_lsn: int) -> str:
    """Return what is wrong with an open segment up to `synced_lsn`, which was synced and published; empty if it is intact."""
    try:
        header = decode_header(read(0, HEADER_BYTES), path, db_id=db_id, segment_id=segment_id)
        frames = min(max(synced_lsn - header.first_lsn + 1, 0), header.geometry.capacity)
        return _damage(read, header, frames, path)
    except (Corruption, FormatTooNew) as error:
        return error.what


def _damage(read: ReadAt, header: SegmentHeader, frames: int, path: str) -> str:
    geometry = header.geometry

    def read_frames(first: int, count: int) -> Bytes:
        data = read(geometry.frame_offset(first), count * geometry.stride)
        return data[: len(data) // geometry.stride * geometry.stride]

    index = read(geometry.entry_offset(0), frames * ENTRY_BYTES)
    if len(index) < frames * ENTRY_BYTES:
        return "the file ends within its index"
    region = parse_entries(index)
    # The whole range is given as proven, so that any bad frame is damage and not a torn tail. `indexed_upto_lsn` stays
    # 0: frames are to be read, not trusted.
    scanned = scan_segment(header, index, read_frames, path=path, proven_lsn=header.lsn(frames - 1), limit=frames)
    expected = b"".join((scanned.entries.tobytes(), scanned.unfinished.tobytes()))
    if expected != region.tobytes():
        place = next(at for at in range(frames) if expected[at * ENTRY_BYTES :][:ENTRY_BYTES] != region[at].tobytes())
        return f"the index entry of frame {place} does not match the frame"
    return _lineage_damage(header, region)


def _lineage_damage(header: SegmentHeader, entries: Entries) -> str:
    """Return what is wrong with the predecessors of versions: each is older than its version, and in this segment exactly if
    its lsn is; empty if nothing is."""
    lsns, segments = entries["prev_lsn"], entries["prev_segment"]
    is_here = lsns >= np.uint64(header.first_lsn)
    wrong = (lsns >= entries["lsn"]) | (segments > header.segment_id) | ((segments == header.segment_id) != is_here)
    wrong |= (lsns == 0) != (segments == 0)
    if not wrong.any():
        return ""
    place = int(np.argmax(wrong))
    return f"the predecessor of frame {place} is recorded as lsn {lsns[place]} in segment {segments[place]}, which cannot be"
