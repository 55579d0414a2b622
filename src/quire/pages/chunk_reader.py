"""Reads pages of a chunk by ranged reads: one read per page, once the footer is loaded.

A page is returned only if its frame and the page itself match their checksums; `None` always means that the chunk does not have
the page. Opening costs one read, two if pages are below 4 KiB; a chunk that is smaller than that first read needs no other.
Pages share reads: frames at most 64 KiB apart are fetched together, up to 4 MiB at a time. A reader's memory is that, and one
unpacked frame. Bytes that fail a check are read again before they are reported as damage.

Threads: any; importable on executors (no lmdb). Format page: `docs/formats/chunk.md`. Raises `Corruption` and
`ChecksumMismatch` (object, page, frame, offset), `FormatTooNew`, `OutOfRange` for a page offset that no chunk of the database
has, and what reading raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise

from pyroaring import BitMap, FrozenBitMap

from quire.core.errors import Corruption, InvalidInput, OutOfRange
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import KIB, MIB
from quire.durable.checksums import Bytes, crc64
from quire.durable.names import object_key
from quire.objects.api import ExistingObject, Identity
from quire.pages.chunk_format import (
    PAGES_PER_FRAME,
    ChunkFooter,
    ChunkIdentity,
    FramePlace,
    ReadRange,
    Tail,
    check_expected,
    damaged,
    load_footer,
    mismatch,
    read_exactly,
    unpack_frame,
)

GAP_BYTES = 64 * KIB
"""Frames up to this far apart are fetched together: a request to an object store costs more than these bytes."""
PIECE_BYTES = 4 * MIB
"""The longest single read, which bounds the memory of a scan; longer reads would not be faster."""

_NO_TAIL = Tail(1 << 63, b"")


class ChunkReader:
    """A chunk read through `read_range`. With `footer`, from an earlier reader of the same object, opening fetches nothing.
    `expect` is the artifact it should be, `name` is used in errors."""

    def __init__(
        self,
        read_range: ReadRange,
        size_bytes: int,
        *,
        name: str = "",
        footer: ChunkFooter | None = None,
        expect: ArtifactKey | None = None,
    ) -> None:
        # Constant after construction.
        self._read_range = read_range
        self._size_bytes = size_bytes
        self._expect = expect
        self.name = name or (object_key(expect) if expect is not None else "")
        # Set without a lock: if two threads load it concurrently, the results are equal.
        self._loaded: tuple[ChunkFooter, Tail] | None = None
        if footer is not None:
            if footer.size_bytes != size_bytes:
                what = "the object's size does not match its footer"
                raise damaged(what, self.name, size_bytes=size_bytes, expected=footer.size_bytes)
            check_expected(footer.identity, expect, self.name)
            self._loaded = footer, _NO_TAIL

    @property
    def footer(self) -> ChunkFooter:
        """The chunk's footer; fetched and verified at first use."""
        return self._load()[0]

    @property
    def identity(self) -> ChunkIdentity:
        return self.footer.identity

    @property
    def pages(self) -> FrozenBitMap:
        """The offsets of the pages that the chunk has."""
        return self.footer.pages

    def read_page(self, offset: int) -> bytes | None:
        """Return the page at `offset` of the slot; `None` if this chunk does not have it."""
        footer = self.footer
        rank = footer.rank(offset)
        if rank is None:
            return None
        place = footer.frame(rank // PAGES_PER_FRAME)
        return self._page(footer, self._fetch(place, offset), rank, offset)

    def read_frame(self, offset: int) -> dict[int, bytes]:
        """Return the page at `offset` with all other pages of its frame, which cost no further read; for caches.

        Empty if the chunk does not have the page.
        """
        footer = self.footer
        rank = footer.rank(offset)
        if rank is None:
            return {}
        number = rank // PAGES_PER_FRAME
        plain = self._fetch(footer.frame(number), offset)
        first = number * PAGES_PER_FRAME
        return {
            page: self._page(footer, plain, first + index, page) for index, page in enumerate(footer.offsets_in(number))
        }

    def iter_pages(self, offsets: Iterable[int] | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, image) of those of these pages (default: all) that the chunk has, in ascending order."""
        footer = self.footer
        placed: Iterable[tuple[int, int]]
        if offsets is None:
            placed = enumerate(footer.pages)
        else:
            rank = footer.pages.rank
            placed = ((rank(offset) - 1, offset) for offset in footer.pages & _bitmap(offsets, footer))
        by_frame = groupby(placed, lambda page: page[0] // PAGES_PER_FRAME)
        wanted = [(footer.frame(number), list(pages)) for number, pages in by_frame]
        for (place, pages), stored in zip(wanted, self._stored([place for place, _ in wanted])):
            plain = self._plain(place, stored, pages[0][1])
            for rank_of_page, offset in pages:
                yield offset, self._page(footer, plain, rank_of_page, offset)

    def iter_frames(self, wanted: Sequence[tuple[int, Sequence[int]]]) -> Iterator[Bytes]:
        """Yield plain frames, for bulk copies. `wanted` has frame numbers in ascending order, each with indexes of its pages.

        A frame is yielded with all of its pages, of which only those at the indexes are verified.
        """
        footer = self.footer
        size = footer.identity.page_size
        places = [footer.frame(number) for number, _ in wanted]
        for place, (_, indexes), stored in zip(places, wanted, self._stored(places)):
            first = place.number * PAGES_PER_FRAME
            plain = memoryview(self._plain(place, stored, footer.pages[first + indexes[0]]))
            crcs = footer.page_crcs_in(place)
            for index in indexes:
                if crc64(plain[index * size : (index + 1) * size]) != crcs[index]:
                    self._page(footer, plain, first + index, footer.pages[first + index])  # raises with the location
            yield plain

    def _stored(self, places: Sequence[FramePlace]) -> Iterator[memoryview]:
        """Yield the stored form of frames in ascending order; nearby frames are read together."""
        for piece in _pieces(places):
            begin = piece[0].offset
            data = memoryview(self._read(begin, piece[-1].offset + piece[-1].length - begin))
            for place in piece:
                yield data[place.offset - begin : place.offset - begin + place.length]

    def _fetch(self, place: FramePlace, page: int) -> Bytes:
        return self._plain(place, self._read(place.offset, place.length), page)

    def _plain(self, place: FramePlace, stored: Bytes, page: int) -> Bytes:
        """Return the plain pages of a frame, reading it again if it is damaged."""
        try:
            return unpack_frame(stored, place, self.name, page=page)
        except Corruption:
            # Past the tail: the bytes fetched with the footer may be the damaged ones.
            again = read_exactly(self._read_range, place.offset, place.length, self.name)
            return unpack_frame(again, place, self.name, page=page)

    def _page(self, footer: ChunkFooter, plain: Bytes, rank: int, offset: int) -> bytes:
        size = footer.identity.page_size
        at = rank % PAGES_PER_FRAME * size
        image = bytes(plain[at : at + size])
        if crc64(image) != footer.page_crc(rank):
            frame = rank // PAGES_PER_FRAME
            where = {"page": offset, "frame": frame, "offset": footer.frame(frame).offset}
            raise mismatch("a page fails its checksum although its frame passes", self.name, **where)
        return image

    def _read(self, offset: int, length: int) -> bytes:
        tail = self._load()[1]
        if offset >= tail.offset:
            return tail.data[offset - tail.offset : offset - tail.offset + length]
        return read_exactly(self._read_range, offset, length, self.name)

    def _load(self) -> tuple[ChunkFooter, Tail]:
        if self._loaded is None:
            footer, tail = load_footer(self._read_range, self._size_bytes, name=self.name, expect=self._expect)
            self.name = self.name or footer.identity.name
            self._loaded = footer, tail
        return self._loaded


def _pieces(places: Sequence[FramePlace]) -> Iterator[list[FramePlace]]:
    """Group frames that are fetched together."""
    piece: list[FramePlace] = []
    for place in places:
        if piece:
            gap = place.offset - piece[-1].offset - piece[-1].length
            if gap > GAP_BYTES or place.offset + place.length - piece[0].offset > PIECE_BYTES:
                yield piece
                piece = []
        piece.append(place)
    if piece:
        yield piece


def _bitmap(offsets: Iterable[int], footer: ChunkFooter) -> BitMap:
    limit = footer.identity.pages_per_chunk
    try:
        pages = BitMap(offsets)
    except OverflowError as error:
        raise OutOfRange("a chunk has no such page offset", cause=str(error), pages_per_chunk=limit) from error
    if pages and pages.max() >= limit:
        raise OutOfRange("a chunk has no such page offset", value=pages.max(), pages_per_chunk=limit)
    return pages


def identity_of(existing: ExistingObject) -> ChunkIdentity:
    """Return the identity of an existing chunk, from its footer: one ranged read, two for a large footer."""
    footer, _ = load_footer(existing.read, existing.info.size_bytes, name=existing.info.key)
    return footer.identity


def same_artifact(wanted: ChunkIdentity) -> Identity:
    """Return a predicate for `ObjectStore.put(…, identity=…)`: true for the same artifact produced by the same plan."""

    def is_wanted(existing: ExistingObject) -> bool:
        existing_identity = identity_of(existing)
        if (existing_identity.key, existing_identity.plan_digest) != (wanted.key, wanted.plan_digest):
            return False
        if existing_identity != wanted:
            # A plan has one outcome. If the digests are equal and the identities differ, neither object can be trusted.
            raise damaged(
                "one plan produced two different chunks", existing.info.key, found=existing_identity, expected=wanted
            )
        return True

    return is_wanted


def check_chain(chain: Sequence[ChunkReader]) -> None:
    """Raise unless the chunks are one slot's base and deltas with ascending `covered_lsn`."""
    if not chain:
        raise InvalidInput("a chain must have at least one chunk")
    for older, newer in pairwise(chain):
        one, two = older.identity, newer.identity
        if (one.key.id, one.page_size, one.pages_per_chunk) != (two.key.id, two.page_size, two.pages_per_chunk):
            raise InvalidInput("chunks of a chain must have the same slot and page size", older=one.key, newer=two.key)
        if two.key.kind is not ArtifactKind.DELTA or one.covered_lsn >= two.covered_lsn:
            what = "a chain must be one base followed by deltas that cover rising lsns"
            raise InvalidInput(what, older=one.key, covered=one.covered_lsn, newer=two.key, next=two.covered_lsn)
