"""The checker of chunk objects: reads everything, yields all problems, and continues after each.

Rules, by number (cited in problems, tests and reviews)
  C1  the object ends with a trailer and a footer that match their checksums and describe a chunk of its size
  C2  the header matches its checksum and is equal to its copy in the footer
  C3  every frame matches its checksum and unpacks to its pages
  C4  every page matches its checksum
  C5  the object is the artifact, produced by the plan, that its catalog row names
  C6  its size, SHA-256, page count and bitmap are those of the row

Everything between header and trailer belongs to a frame or to the footer (`chunk_format` checks that), so every byte is
checked. Bytes that fail a check are read again before they are reported as damage. Memory is 4 MiB and one frame.

Threads: any; importable on executors (no lmdb). Format page: `docs/formats/chunk.md`.
Damage is yielded (`verify`) or raised as `Corruption` (`describe`); errors of the object store are raised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.core.errors import Corruption, Incompatible, QuireError
from quire.core.ids import ArtifactKey
from quire.durable.checksums import Bytes, crc64
from quire.pages.chunk_format import (
    HEADER_BYTES,
    HINT,
    PAGES_PER_FRAME,
    ChunkFooter,
    FramePlace,
    ReadRange,
    damaged,
    decode_header,
    load_footer,
    read_exactly,
    read_twice,
    unpack_frame,
)
from quire.pages.chunk_reader import PIECE_BYTES
from quire.pages.chunk_writer import ChunkInfo


@dataclass(frozen=True, slots=True)
class ChunkProblem:
    """One broken rule, and its location."""

    rule: str
    what: str
    where: dict[str, Any] = field(default_factory=dict)
    error: QuireError | None = field(default=None, repr=False, compare=False)
    """The error that a reader would have raised, if the problem was found through one."""

    def __str__(self) -> str:
        place = ", ".join(f"{name}={value}" for name, value in self.where.items())
        return f"{self.rule}: {self.what}" + (f" ({place})" if place else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedChunk:
    """The properties of an object according to its catalog row; `None` for those it does not have."""

    key: ArtifactKey | None = None
    plan_digest: bytes | None = None
    covered_lsn: int | None = None
    page_size: int | None = None
    size_bytes: int | None = None
    sha256: bytes | None = None
    page_count: int | None = None
    bitmap_hash: int | None = None


NOTHING = ExpectedChunk()


def verify(
    read_range: ReadRange, size_bytes: int, expected: ExpectedChunk = NOTHING, *, name: str = ""
) -> Iterator[ChunkProblem]:
    """Yield every broken rule of the object behind `read_range`. `size_bytes` is from its object store, not from its row."""
    return _Pass(read_range, size_bytes, expected, name).problems()


def describe(read_range: ReadRange, size_bytes: int) -> ChunkInfo:
    """Return what the writer of this object would have returned, after checking everything; raise the first problem.

    For the row of an object that was adopted (P11), whose bytes may differ from ours.
    """
    one_pass = _Pass(read_range, size_bytes, NOTHING, "")
    for problem in one_pass.problems():
        raise problem.error or Corruption(problem.what, hint=HINT, **problem.where)
    footer = one_pass.footer
    assert footer is not None, "no footer is a problem"
    return ChunkInfo(
        identity=footer.identity,
        compression=footer.compression,
        size_bytes=size_bytes,
        sha256=one_pass.sha256.digest(),
        page_count=footer.page_count,
        bitmap=footer.bitmap,
        bitmap_hash=crc64(footer.bitmap),
    )


class _Pass:
    """One pass over an object: the footer, then from the first byte to the last."""

    def __init__(self, read_range: ReadRange, size_bytes: int, expected: ExpectedChunk, name: str) -> None:
        self.read_range = read_range
        self.size_bytes = size_bytes
        self.expected = expected
        self.name = name
        self.footer: ChunkFooter | None = None
        self.sha256 = hashlib.sha256()

    def problems(self) -> Iterator[ChunkProblem]:
        try:
            self.footer, _ = load_footer(self.read_range, self.size_bytes, name=self.name)
        except (Corruption, Incompatible) as error:
            yield _problem("C1", error)
        try:
            yield from self._bytes()
        except Corruption as error:  # the object is shorter than its store said: nothing more can be read
            yield _problem("C1", error)
        yield from self._promises()

    def _bytes(self) -> Iterator[ChunkProblem]:
        if self.footer is None:
            self._hash(0, self.size_bytes)
            return
        footer = self.footer
        yield from self._header(footer)
        frame = 0
        while frame < footer.frame_count:
            until = _piece(footer, frame)
            begin, end = footer.frame(frame).offset, footer.frame(until - 1).offset + footer.frame(until - 1).length
            data = memoryview(read_exactly(self.read_range, begin, end - begin, self.name))
            for number in range(frame, until):
                place = footer.frame(number)
                yield from self._frame(footer, place, data[place.offset - begin : place.offset - begin + place.length])
            frame = until
        self._hash(footer.offset, self.size_bytes)

    def _header(self, footer: ChunkFooter) -> Iterator[ChunkProblem]:
        """Check that the header matches its checksum and its copy in the footer (C2)."""

        def checked() -> bytes:
            data = read_exactly(self.read_range, 0, HEADER_BYTES, self.name)
            decode_header(data, self.name)
            if data != footer.header:
                raise damaged("the header does not match its copy in the footer", self.name, part="header", offset=0)
            return data

        try:
            self.sha256.update(read_twice(checked))
        except (Corruption, Incompatible) as error:
            yield _problem("C2", error)
            # The hash covers what is there, damaged or not: C6 is a rule of its own.
            self._hash(0, HEADER_BYTES)

    def _frame(self, footer: ChunkFooter, place: FramePlace, stored: Bytes) -> Iterator[ChunkProblem]:
        """Check that a frame matches its checksum and unpacks to its pages, and each page matches its own (C3, C4)."""
        pages = footer.offsets_in(place.number)
        whose = {"first_page": pages[0], "last_page": pages[-1]}
        try:
            plain = unpack_frame(stored, place, self.name, **whose)
        except Corruption:
            stored = read_exactly(self.read_range, place.offset, place.length, self.name)
            try:
                plain = unpack_frame(stored, place, self.name, **whose)
            except Corruption as error:
                self.sha256.update(stored)
                yield _problem("C3", error)
                return
        self.sha256.update(stored)
        size = footer.identity.page_size
        for index, page in enumerate(pages):
            if crc64(memoryview(plain)[index * size : (index + 1) * size]) != footer.page_crc(
                place.number * PAGES_PER_FRAME + index
            ):
                where = {"page": page, "frame": place.number, "offset": place.offset}
                yield ChunkProblem("C4", "a page fails its checksum", {"object": self.name, **where})

    def _promises(self) -> Iterator[ChunkProblem]:
        """Check that the chunk is the artifact that its row names, with that size, hash and bitmap (C5, C6)."""
        expected, footer = self.expected, self.footer
        comparisons: list[tuple[str, str, object, object]] = [
            ("C6", "size_bytes", expected.size_bytes, self.size_bytes),
            ("C6", "sha256", expected.sha256, self.sha256.digest()),
        ]
        if footer is not None:
            identity = footer.identity
            comparisons += [
                ("C5", "key", expected.key, identity.key),
                ("C5", "plan_digest", expected.plan_digest, identity.plan_digest),
                ("C5", "covered_lsn", expected.covered_lsn, identity.covered_lsn),
                ("C5", "page_size", expected.page_size, identity.page_size),
                ("C6", "page_count", expected.page_count, footer.page_count),
                ("C6", "bitmap_hash", expected.bitmap_hash, crc64(footer.bitmap)),
            ]
        for rule, what, promised, actual in comparisons:
            if promised is not None and promised != actual:
                where = {"object": self.name, "expected": _plain(promised), "found": _plain(actual)}
                yield ChunkProblem(rule, f"the object's {what} does not match its row", where)

    def _hash(self, begin: int, end: int) -> None:
        while begin < end:
            length = min(PIECE_BYTES, end - begin)
            self.sha256.update(read_exactly(self.read_range, begin, length, self.name))
            begin += length


def _piece(footer: ChunkFooter, frame: int) -> int:
    """Return the number after the last frame that is read together with `frame`."""
    begin = footer.frame(frame).offset
    until = frame + 1
    while until < footer.frame_count:
        place = footer.frame(until)
        if place.offset + place.length - begin > PIECE_BYTES:
            break
        until += 1
    return until


def _problem(rule: str, error: QuireError) -> ChunkProblem:
    return ChunkProblem(rule, error.what, dict(error.where), error)


def _plain(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value
