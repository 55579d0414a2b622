"""Recovers a database's WAL before the owner writes to it: finds the last commit and discards everything after it.

What a crash can leave, and what recovery does
  a segment file without a row           garbage if it has no frame, because the row is committed before the first frame is
                                         written (P1): removed. With frames, either the manifest was restored from an older
                                         copy, or the file is damaged: quarantined, with a note about its contents
  an open segment without frames         discarded: its row ends, its file is deleted by the collector
  an open segment with commits           cut after its last complete transaction, sealed there, indexed; never appended to (P4)
  several open segments                  in order; once one is cut, the frames of later ones are discarded too
  a sealed segment that is not indexed   indexed from its contents
  frames without index entries           their entries are built from the frames and written, before they are published
  published rows without the seal        the same batch is repeated: rows are identical, marks only rise
  a sealed segment with unused zeros     truncated to its used bytes (`wal_files.trim`); stores of earlier versions have many

Every step can be repeated, so recovery also handles a crash during recovery. A torn tail is normal and logged as info; a bad
frame that had been synced is `Corruption` (P3), for this database alone, unless an operator requests *salvage*: to cut at
damage as if it were a torn tail. Nothing is removed that is not proven to be garbage: any other file without a row may have
acknowledged commits. A file with a row must be that segment, in the life that the row names (its salt); a sealed one that is
missing or too short is reported when the database is opened, and raises when its contents are read.

Threads: the opener's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import Corruption, FormatTooNew, QuireError, UnknownDatabase
from quire.core.events import emit
from quire.core.limits import MIB
from quire.durable import quarantine
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.durable.names import WalSegmentFile, pages_wal_dir, parse_path
from quire.manifest import tables as t
from quire.manifest.ops.base import Op
from quire.manifest.ops.pageindex import PublishPages
from quire.manifest.ops.wal import AdvanceWal, AppendWalChunk, DiscardSegment, MoveWalState
from quire.manifest.reads import ReadTxn
from quire.manifest.records import Residency, WalRecord, WalState, WalStateRecord
from quire.manifest.store import ManifestStore
from quire.pages.page_source import Mark
from quire.pages.publication import PUBLISH_ROWS
from quire.pages.segment import SegmentHeader
from quire.pages.segment_file import IndexWriter, SegmentFile
from quire.pages.segment_scan import CutReason, SegmentScan, as_rows, recover_segment
from quire.pages.wal import WalStart
from quire.pages.wal_files import SPARE, segment_crc, trim

ZEROS_BYTES = 1 * MIB
"""Bytes read at a time when a file is checked for anything but zeros."""

Rows = list[tuple[int, WalRecord]]
"""(segment, row), oldest first."""


@dataclass(slots=True)
class ScannedSegment:
    """One open segment and its scan."""

    segment_id: int
    scan: SegmentScan
    limit: int | None
    """How many frames it can have, from the first lsn of the next segment; `None` for the last one."""
    kept: int = 0
    """How many of its frames are kept; set by `_decide_kept`."""

    @property
    def entries(self) -> NDArray[np.void]:
        return np.concatenate([self.scan.entries, self.scan.unfinished])[: self.kept]

    @property
    def last_lsn(self) -> int:
        return self.scan.header.lsn(self.kept - 1)


def recover(manifest: ManifestStore, disk: Disk, root: str, db_id: int, *, salvage: bool = False) -> WalStart:
    """Recover a database's WAL and return where writing continues."""
    state, rows = _read(manifest, db_id)
    own = [(segment_id, row) for segment_id, row in rows if row.origin_db_id == db_id]
    _sweep(disk, root, db_id, {segment_id for segment_id, _ in own}, manifest.clock.now_ms())
    for segment_id, row in own:
        if row.state is WalState.SEALED:
            _index(manifest, disk, root, db_id, segment_id, row, state)
    scanned = _scan(disk, root, db_id, [item for item in own if item[1].state is WalState.OPEN], state, salvage=salvage)
    if scanned:
        _decide_kept(db_id, scanned)
        # Entries before rows: at or below `indexed_upto_lsn` the region is trusted without its frames (decision 008).
        for segment in scanned:
            _write_index(disk, root, db_id, segment.scan.header, segment.entries, state.indexed_upto_lsn)
        _apply_verdict(manifest, disk, root, db_id, scanned, state)
    state, rows = _read(manifest, db_id)
    _trim(disk, root, db_id, rows)
    with manifest.read() as txn:
        mark = published_mark(txn, disk, root, db_id)
        # After a takeover, lsns continue in its range: lower ones may belong to commits that were lost.
        # From the reservation, not from the last commit: frames above that may have been written before the crash and
        # cut just now (P5).
        next_lsn = max(state.lsn_reserved + 1, txn.first_number())
    return WalStart(next_lsn, state.next_segment_id, mark)


def published_mark(txn: ReadTxn, disk: Disk, root: str, db_id: int) -> Mark:
    """Return the newest published version, changing nothing."""
    state, rows = _rows(txn, db_id)
    lsn = state.last_applied_lsn
    # An open segment's row has no last lsn yet.
    begun = [item for item in rows if item[1].first_lsn <= lsn]
    segment_id, row = next(
        (item for item in reversed(begun) if item[1].state is WalState.OPEN or lsn <= item[1].last_lsn), (0, None)
    )
    commit_ms = state.last_commit_ms
    if lsn and not commit_ms:
        commit_ms = _estimated_commit_ms(txn, disk, root, db_id, state, segment_id, row)
    return Mark(lsn, state.size_pages, segment_id, commit_ms)


def _estimated_commit_ms(
    txn: ReadTxn, disk: Disk, root: str, db_id: int, state: WalStateRecord, segment_id: int, row: WalRecord | None
) -> int:
    """Return the time of the newest commit, or a later one, if the row in `wal_state` is older than its field for it.

    Never an earlier one: time travel would return this version for times at which it did not exist, and the next commit could
    get an earlier time (P14).
    """
    if row is not None:
        try:
            with _open(disk, root, row.origin_db_id, segment_id, row) as file:
                return file.read_head(state.last_applied_lsn - file.header.first_lsn).commit_ms
        except QuireError:
            return row.sealed_at_ms  # reading the page will raise the error
    # Its segment is gone: a checkpoint absorbed it, of this database or, before a fork, of its parent.
    database = txn.database(db_id)
    return max(state.last_success_at_ms, database.created_at_ms if database is not None else 0)


def _read(manifest: ManifestStore, db_id: int) -> tuple[WalStateRecord, Rows]:
    with manifest.read() as txn:
        return _rows(txn, db_id)


def _rows(txn: ReadTxn, db_id: int) -> tuple[WalStateRecord, Rows]:
    state = txn.wal_state(db_id)
    if state is None:
        raise UnknownDatabase("no database has this id", hint="`quire ls` lists the databases", db_id=db_id)
    return state, [(key[1], row) for key, row in txn.scan(t.WAL_CATALOG, db_id)]


def _sweep(disk: Disk, root: str, db_id: int, with_row: set[int], now_ms: int) -> None:
    """Remove files without a row that are garbage, and quarantine all others."""
    folder = os.path.join(root, pages_wal_dir(db_id))
    if not disk.exists(folder):
        return  # the database was never written: its first segment creates the directory
    for name in disk.names(folder):
        parsed = parse_path(f"{pages_wal_dir(db_id)}/{name}")
        if not isinstance(parsed, WalSegmentFile) or parsed.segment_id in with_row:
            continue
        holds = "" if parsed.segment_id == SPARE else _contents(disk, root, parsed)
        if holds:
            why = f"a WAL segment without a row in the manifest; {holds}"
            quarantine.move(disk, root, parsed.path, why=why, at_ms=now_ms, database=db_id)
        else:
            emit("info", "wal.file_without_row", db_id=db_id, segment_id=parsed.segment_id)
            disk.remove(os.path.join(root, parsed.path))


def _contents(disk: Disk, root: str, name: WalSegmentFile) -> str:
    """Describe the contents of a file without a row; empty if the file provably has none."""
    path = os.path.join(root, name.path)
    try:
        with SegmentFile.open(disk, path, db_id=name.db_id, segment_id=name.segment_id) as file:
            # Without a row nothing is known to be published, so frames alone decide.
            scan = recover_segment(file, indexed_upto_lsn=0)
    except (Corruption, FormatTooNew) as error:
        return "" if _is_zero(disk, path) else f"it cannot be read: {error.what}"
    # Damaged positions count if their lsn is of this life: they may be what is left of acknowledged commits.
    shown = scan.cut + scan.cut_frames
    if not shown:
        return ""
    first = scan.header.first_lsn
    return f"it has {shown} page versions from lsn {first} on, up to {first + shown - 1}"


def _is_zero(disk: Disk, path: str) -> bool:
    """Return whether a file is all zeros: a crash came before its header was written."""
    with closing(disk.open(path, write=False)) as file:
        size = file.size()
        return not any(any(file.read_at(ZEROS_BYTES, offset)) for offset in range(0, size, ZEROS_BYTES))


def _trim(disk: Disk, root: str, db_id: int, rows: Rows) -> None:
    """Free the unused space of sealed segments, and report those that are missing or incomplete."""
    for segment_id, row in rows:
        if row.origin_db_id != db_id or row.state in (WalState.OPEN, WalState.TRUNCATED) or not row.used_bytes:
            continue
        path = _path(root, db_id, segment_id)
        try:
            size = disk.size(path)
        except FileNotFoundError:
            if row.residency is Residency.LOCAL:
                emit("error", "wal.segment_missing", db_id=db_id, segment_id=segment_id, path=path)
            continue
        if size < row.used_bytes:
            where = {"db_id": db_id, "segment_id": segment_id, "path": path}
            emit("error", "wal.segment_cut_short", **where, size=size, sealed_bytes=row.used_bytes)
        elif row.used_bytes < row.file_bytes:  # a filled segment can be recycled as it is
            trim(disk, path, row.used_bytes)


def _path(root: str, db_id: int, segment_id: int) -> str:
    return os.path.join(root, WalSegmentFile(db_id=db_id, segment_id=segment_id).path)


def _open(disk: Disk, root: str, db_id: int, segment_id: int, row: WalRecord) -> SegmentFile:
    path = _path(root, db_id, segment_id)
    try:
        file = SegmentFile.open(disk, path, db_id=db_id, segment_id=segment_id)
    except FileNotFoundError as error:
        raise Corruption(
            "a WAL segment's file is missing",
            hint="restore it from a copy; the other databases of the store are not affected",
            path=path,
            db_id=db_id,
            segment_id=segment_id,
        ) from error
    # The name and ids of a file restored from another copy match; only the salt shows another life.
    if row.salt and file.header.salt.to_bytes(8, "little") != row.salt:
        file.close()
        raise Corruption(
            "a WAL segment's file does not match the manifest",
            hint="restore it from a copy taken together with the manifest",
            path=path,
            db_id=db_id,
            segment_id=segment_id,
        )
    return file


# ── scanning ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _scan(
    disk: Disk, root: str, db_id: int, rows: Rows, state: WalStateRecord, *, salvage: bool
) -> list[ScannedSegment]:
    """Scan open segments from the last to the first, because later ones prove what had been synced."""
    scanned: list[ScannedSegment] = []
    proven = state.indexed_upto_lsn
    following: int | None = None
    for segment_id, row in reversed(rows):
        with _open(disk, root, db_id, segment_id, row) as file:
            header = file.header
            if following is None:
                # No later segment limits this one, so no lsn beyond its capacity may be given as synced: the missing
                # frames would look like corruption (rule 5 of `segment_scan`).
                limit = None
                last = header.lsn(header.geometry.capacity - 1)
                indexed, known = min(state.indexed_upto_lsn, last), 0
            else:
                # The next segment begins where this one ended: lsns are consecutive while a database is open.
                limit = min(max(following - header.first_lsn, 0), header.geometry.capacity)
                indexed, known = state.indexed_upto_lsn, proven
            scan = _scan_one(file, indexed, known, limit, salvage=salvage)
        scanned.append(ScannedSegment(segment_id, scan, limit))
        proven, following = max(proven, scan.proven_lsn), row.first_lsn
    scanned.reverse()
    return scanned


def _scan_one(file: SegmentFile, indexed: int, proven: int, limit: int | None, *, salvage: bool) -> SegmentScan:
    try:
        return recover_segment(file, indexed_upto_lsn=indexed, proven_lsn=proven, limit=limit)
    except Corruption as damage:
        if not salvage or "frame" not in damage.where:
            raise
        emit("error", "wal.salvaged", error=str(damage), lost="everything from this frame on")
        # Up to the damage and without the proof that made it damage: everything from there on is given up.
        return recover_segment(file, indexed_upto_lsn=indexed, limit=damage.where["frame"])


def _decide_kept(db_id: int, scanned: Sequence[ScannedSegment]) -> None:
    """Decide, oldest first, how many frames of each segment are kept."""
    is_unbroken = True
    for number, segment in enumerate(scanned):
        scan, limit = segment.scan, segment.limit
        if is_unbroken:
            # A tail without a commit is kept only if later segments complete it; otherwise it never happened.
            goes_on = limit is not None and scan.good == limit and _is_finished_by(scanned[number + 1 :])
            segment.kept = scan.good if goes_on else scan.cut
        if scan.cut_reason is not CutReason.NOTHING and segment.kept < scan.cut + scan.cut_frames:
            emit(
                "info",
                "wal.torn_tail",
                db_id=db_id,
                segment_id=segment.segment_id,
                kept=segment.kept,
                forgotten=scan.cut + scan.cut_frames - segment.kept,
                why=scan.cut_reason.value,
            )
        # After a cut nothing later is kept: later transactions build on the lost one.
        is_unbroken = is_unbroken and (limit is None or segment.kept == limit)


def _is_finished_by(later: Sequence[ScannedSegment]) -> bool:
    """Return whether a transaction that began before these segments has its commit in them."""
    for segment in later:
        if segment.scan.cut:
            return True
        if segment.limit is None or segment.scan.good < segment.limit:
            return False
    return False


# ── applying the verdict ──────────────────────────────────────────────────────────────────────────────────────────────
def _apply_verdict(
    manifest: ManifestStore, disk: Disk, root: str, db_id: int, scanned: Sequence[ScannedSegment], state: WalStateRecord
) -> None:
    """Publish the rows of kept frames, then end all segments in one batch: a verdict that discards later segments because of an
    earlier one must not be applied in part."""
    kept = [segment for segment in scanned if segment.kept]
    for segment in kept:
        header = segment.scan.header
        for batch in _publications(db_id, as_rows(header, segment.entries), state.indexed_upto_lsn):
            manifest.submit(batch).result()
            hit("pages.recovery.published")
    ops: list[Op] = []
    sizes = _sizes(kept, state.size_pages)
    if kept:
        last, time = kept[-1].last_lsn, max(segment.scan.last_commit_ms for segment in kept)
        ops.append(AdvanceWal(db_id, 0, 0, last, last, sizes[-1], time))
    for segment, size in zip(kept, sizes):
        header, used = segment.scan.header, segment.scan.header.geometry.frame_offset(segment.kept)
        path, pages = _path(root, db_id, segment.segment_id), segment.entries["page"]
        ops += [
            AppendWalChunk(
                db_id,
                0,
                segment.segment_id,
                state.last_checkpoint_generation,
                header.first_lsn,
                segment.last_lsn,
                used,
                segment.kept,
                size,
                crc64=segment_crc(disk, path, used),
                first_page=int(pages.min()),
                last_page=int(pages.max()),
            ),
            MoveWalState(db_id, segment.segment_id, WalState.INDEXED),
        ]
    discarded = [segment.segment_id for segment in scanned if not segment.kept]
    if discarded:
        ops += [DiscardSegment(db_id, segment_id) for segment_id in discarded]
        ops += manifest.jobs.deletions([db_id])
    hit("pages.recovery.sealing")
    manifest.submit(ops).result()
    hit("pages.recovery.sealed")


def _sizes(kept: Sequence[ScannedSegment], before: int) -> list[int]:
    """Return the size in pages for each segment's row; `before` is the size before the first segment."""
    sizes: list[int] = []
    commits = [segment.entries["db_size"][segment.entries["db_size"] != 0].tolist() for segment in kept]
    for number, segment in enumerate(kept):
        before = commits[number][-1] if commits[number] else before
        is_within = not segment.entries["db_size"][-1]
        after = next((later[0] for later in commits[number + 1 :] if later), before) if is_within else before
        sizes.append(max(before, after))
    return sizes


def _index(
    manifest: ManifestStore, disk: Disk, root: str, db_id: int, segment_id: int, row: WalRecord, state: WalStateRecord
) -> None:
    with _open(disk, root, db_id, segment_id, row) as file:
        # Everything in a sealed segment was synced, so a bad frame in it is never a torn tail.
        scan = recover_segment(
            file, indexed_upto_lsn=state.indexed_upto_lsn, proven_lsn=row.last_lsn, limit=row.frame_count
        )
    entries = np.concatenate([scan.entries, scan.unfinished])
    _write_index(disk, root, db_id, scan.header, entries, state.indexed_upto_lsn)
    rows = as_rows(scan.header, entries)
    for ops in _publications(db_id, rows, state.indexed_upto_lsn):
        manifest.submit(ops).result()
    commits = np.flatnonzero(entries["db_size"])
    size = int(entries["db_size"][commits[-1]]) if len(commits) else None
    applied = int(entries["lsn"][commits[-1]]) if len(commits) else 0
    mark = AdvanceWal(db_id, 0, 0, row.last_lsn, applied, size, scan.last_commit_ms)
    manifest.submit([mark, MoveWalState(db_id, segment_id, WalState.INDEXED)]).result()
    hit("pages.recovery.indexed")


def _write_index(
    disk: Disk, root: str, db_id: int, header: SegmentHeader, entries: NDArray[np.void], indexed_upto_lsn: int
) -> None:
    """Write the entries above `indexed_upto_lsn`, which were built from frames."""
    fresh = entries[entries["lsn"] > np.uint64(indexed_upto_lsn)]
    if len(fresh):
        with IndexWriter(disk, _path(root, db_id, header.segment_id), header) as index:
            # Entries begin with frame 0 and are in frame order, so this is the number of the first fresh frame.
            index.write(len(entries) - len(fresh), fresh.tobytes())
        hit("pages.recovery.entries")


def _publications(db_id: int, rows: NDArray[np.void], indexed_upto_lsn: int) -> Iterator[list[Op]]:
    """Yield batches that publish these rows, omitting those already published."""
    fresh = rows[rows["lsn"] > np.uint64(indexed_upto_lsn)]
    for start in range(0, len(fresh), PUBLISH_ROWS):
        part = fresh[start : start + PUBLISH_ROWS]
        upto = int(part["lsn"][-1])
        yield [PublishPages(db_id, part.tobytes()), AdvanceWal(db_id, 0, lsn_reserved=upto, indexed_upto_lsn=upto)]
