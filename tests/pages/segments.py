"""Transactions for tests of WAL segments: generated, written into memory, and compared with the result of a scan."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import strategies as st

from quire.durable.checksums import Bytes
from quire.pages.segment import (
    HEADER_BYTES,
    Encoded,
    Geometry,
    PageWrite,
    SegmentHeader,
    check_frame,
    encode,
)
from quire.pages.segment_scan import SegmentScan, entries_of, parse_heads, scan_segment

DB_ID, SEGMENT_ID, FIRST_LSN, SALT = 7, 31, 4711, 0x0123456789ABCDEF


@dataclass(frozen=True, slots=True)
class Transaction:
    """Pages with their fill bytes (`None`: all zeros), whether a sync follows, and whether publication follows the
    sync."""

    pages: tuple[tuple[int, int | None], ...]
    synced: bool = True
    published: bool = False

    def writes(self, page_size: int, salt: int = 0) -> list[PageWrite]:
        return [(page, image(page, fill, page_size, salt), page + 1, 3) for page, fill in self.pages]

    @property
    def db_size(self) -> int:
        return max(page for page, _ in self.pages) + 1

    @property
    def commit_ms(self) -> int:
        return 1_000_000 + len(self.pages)


def image(page: int, fill: int | None, page_size: int, salt: int = 0) -> bytes | None:
    """A page that differs in every sector, so that a lost sector is detected."""
    return None if fill is None else random.Random(f"{page} {fill} {salt}").randbytes(page_size)


FILLS = st.one_of(st.none(), st.integers(0, 3))
TRANSACTIONS = st.lists(
    st.builds(
        Transaction,
        pages=st.lists(st.tuples(st.integers(0, 5), FILLS), min_size=1, max_size=4).map(tuple),
        synced=st.booleans(),
        published=st.booleans(),
    ),
    max_size=6,
)


@dataclass(slots=True)
class Segment:
    """A segment in memory, and the transactions that were written into it."""

    page_size: int = 512
    capacity: int = 32
    salt: int = SALT
    first_lsn: int = FIRST_LSN
    data: bytearray = field(init=False)
    header: SegmentHeader = field(init=False)
    written_transactions: list[Transaction] = field(default_factory=list)
    used: int = 0
    durable_lsn: int = 0
    claims: list[int] = field(default_factory=list)
    """The durable_upto_lsn of each transaction's commit."""
    ends: list[int] = field(default_factory=lambda: [0])
    """The number of frames after each transaction."""

    def __post_init__(self) -> None:
        geometry = Geometry(self.page_size, self.capacity)
        self.header = SegmentHeader(
            geometry=geometry, db_id=DB_ID, segment_id=SEGMENT_ID, first_lsn=self.first_lsn, salt=self.salt
        )
        self.data = bytearray(geometry.file_bytes)
        self.data[:HEADER_BYTES] = self.header.encode()

    def write(self, transaction: Transaction) -> None:
        encoded = encode(
            self.header,
            self.used,
            transaction.writes(self.page_size),
            db_size=transaction.db_size,
            durable_upto_lsn=self.durable_lsn,
            commit_ms=transaction.commit_ms,
        )
        for offset, piece in encoded.pieces:
            self.data[offset : offset + len(piece)] = piece
        self.enter(encoded)
        self.used += encoded.frame_count
        self.written_transactions.append(transaction)
        self.claims.append(self.durable_lsn)
        self.ends.append(self.used)
        if transaction.synced:
            self.durable_lsn = encoded.last_lsn

    def enter(self, encoded: Encoded) -> None:
        """Write the entries of frames, as publication does; version 1 wrote them with each append."""
        start = self.header.geometry.entry_offset(encoded.first_frame)
        entries = entries_of(self.header, parse_heads(encoded.heads)).tobytes()
        self.data[start : start + len(entries)] = entries

    def write_all(self, transactions: list[Transaction]) -> Segment:
        for transaction in transactions:
            self.write(transaction)
        return self

    def index(self) -> bytes:
        return bytes(self.data[HEADER_BYTES : self.header.geometry.frames_offset])

    def read_raw(self, first: int, count: int) -> bytes:
        geometry = self.header.geometry
        return bytes(self.data[geometry.frame_offset(first) : geometry.frame_offset(first + count)])

    def frame(self, number: int) -> Bytes:
        return self.read_raw(number, 1)

    def scan(self, *, indexed_upto_lsn: int = 0, proven_lsn: int = 0, limit: int | None = None) -> SegmentScan:
        return scan_segment(
            self.header,
            self.index(),
            self.read_raw,
            path="x",
            indexed_upto_lsn=indexed_upto_lsn,
            proven_lsn=proven_lsn,
            limit=limit,
        )

    def lsn_after(self, count: int) -> int:
        """The last lsn of the first `count` transactions."""
        return self.first_lsn + self.ends[count] - 1


def count_scanned(segment: Segment, scan: SegmentScan) -> int:
    """The number of transactions in a scan; fails unless they are complete, the first ones, and as they were
    written."""
    assert scan.cut in segment.ends, "a transaction was split"
    count = segment.ends.index(scan.cut)
    scanned = segment.written_transactions[:count]
    written = [page for transaction in scanned for page, _ in transaction.pages]
    assert scan.entries["page"].tolist() == written
    assert scan.entries["lsn"].tolist() == list(range(segment.first_lsn, segment.first_lsn + scan.cut))
    assert scan.commits["lsn"].tolist() == [segment.lsn_after(i + 1) for i in range(count)]
    assert scan.commits["db_size"].tolist() == [transaction.db_size for transaction in scanned]
    assert scan.last_lsn == segment.lsn_after(count)
    assert scan.size_pages == (scanned[-1].db_size if count else 0)
    assert scan.last_commit_ms == (scanned[-1].commit_ms if count else 0)
    return count


def valid_frames(segment: Segment) -> list[bool]:
    """Which frames are valid by themselves, whatever the entries say."""
    return [check_frame(segment.header, number, segment.frame(number)) is not None for number in range(segment.used)]
