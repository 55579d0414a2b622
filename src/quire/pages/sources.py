"""Reads the bytes of pages from WAL segments and chunks, which are opened once and read through the cache.

Terms
  version  a page in a WAL segment, found by (origin, segment, lsn): its frame follows from the lsn. A page of a chunk is
           found by (artifact, offset in the slot)
  place    the location of an artifact's object: everything needed to read it without a manifest
  cold     reads that bypass the cache and are subject to the bandwidth limit, for scans that must not disturb other readers

Local copies come first: a segment's or chunk's own file, the file of an object with a path URL, then the object store. Bytes
are verified when they are read (salted frame checksum, chunk's page checksum) and then cached by location.

A bounded number of handles and footers is kept. A handle may outlive the life of its file: a recycled segment fails its salted
check, and `forget_segment` drops the handle, so that the next read opens the current file (P8).

Threads: any. Executor-safe: no manifest is read; locations come with the places, or through `locate`. Raises `Corruption` for
missing or altered bytes, and what disks and object stores raise.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.core.clock import Clock
from quire.core.errors import Corruption, ObjectNotFound, ReadOnly
from quire.core.ids import ArtifactKey
from quire.durable.files import Disk, File
from quire.durable.names import CachedChunkFile, WalSegmentFile, object_key
from quire.objects.api import ObjectStore
from quire.pages.cache import PageCache
from quire.pages.chunk_format import PAGES_PER_FRAME
from quire.pages.chunk_reader import ChunkReader
from quire.pages.segment import FRAME_HEAD_BYTES, ZERO
from quire.pages.segment_file import SegmentFile, read_header

H = TypeVar("H")


class Handles(Generic[H]):
    """At most `limit` handles by key."""

    __slots__ = ("_kept", "_limit", "_lock", "_used")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, H] = OrderedDict()
        self._used: set[Hashable] = set()
        """Keys of `_kept` that were used since the last `drop_unused`."""

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> H | None:
        """Return the handle, `None` if it is not kept."""
        with self._lock:
            handle = self._kept.get(key)
            if handle is not None:
                self._kept.move_to_end(key)
                self._used.add(key)
        return handle

    def peek(self, key: Hashable) -> H | None:
        """Do the same without the lock and without counting as a use; for keys of plain numbers, on hot paths."""
        return self._kept.get(key)

    def keep(self, key: Hashable, opener: Callable[[], H]) -> H:
        """Return the handle, opening it if necessary."""
        handle = self.get(key)
        if handle is not None:
            return handle
        # Outside the lock, since it may read an object store. If two threads open the same one, the first is kept.
        opened = opener()
        given_up: list[H] = []  # released outside the lock, because closing is a system call
        with self._lock:
            handle = self._kept.setdefault(key, opened)
            self._used.add(key)
            while len(self._kept) > self._limit:
                oldest, given = self._kept.popitem(last=False)
                self._used.discard(oldest)
                given_up.append(given)
        return handle

    def drop(self, key: Hashable) -> None:
        """Release a handle."""
        with self._lock:
            self._kept.pop(key, None)
            self._used.discard(key)

    def drop_unused(self) -> None:
        """Release handles that were not used since the last call; one that is only peeked at is reopened now and then."""
        with self._lock:
            unused = [self._kept.pop(key) for key in list(self._kept) if key not in self._used]
            self._used = set()
        unused.clear()  # outside the lock, because closing is a system call

    def clear(self) -> None:
        """Release all handles."""
        with self._lock:
            kept, self._kept = self._kept, OrderedDict()
            self._used.clear()
        kept.clear()


class ReadSegment(SegmentFile):
    """A read-only segment that closes its file when it is garbage-collected."""

    __slots__ = ()

    def __del__(self) -> None:
        self.close()


class ReadFile:
    """A read-only file that is closed when it is garbage-collected."""

    __slots__ = ("_file",)

    def __init__(self, file: File) -> None:
        self._file = file

    def read_at(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes; fewer at the end of the file."""
        return self._file.read_at(size, offset)

    def __del__(self) -> None:
        self._file.close()


class ObjectFile:
    """An object as a read-only `File`, for segments without a local file."""

    __slots__ = ("_key", "_size", "_store")

    def __init__(self, store: ObjectStore, key: str, size_bytes: int) -> None:
        self._store = store
        self._key = key
        self._size = size_bytes

    @property
    def path(self) -> str:
        return self._key

    def read_at(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes; fewer at the end of the object."""
        size = min(size, self._size - offset)
        return self._store.get_range(self._key, offset, size) if size > 0 else b""

    def size(self) -> int:
        return self._size

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        raise ReadOnly("an object cannot be written in place", object=self._key, offset=offset, bytes=len(data))

    def truncate(self, size: int) -> None:
        raise ReadOnly("an object cannot be truncated", object=self._key, size=size)

    def allocate(self, size: int) -> None:
        raise ReadOnly("an object cannot be enlarged", object=self._key, size=size)

    def sync(self) -> None:
        """Do nothing: nothing is ever written."""

    def fileno(self) -> int:
        raise ReadOnly("an object has no file descriptor", object=self._key)

    def close(self) -> None:
        """Do nothing: there is no descriptor."""


class Throttle:
    """A limit on bytes per second; 0 means none. Tests replace `sleep`."""

    def __init__(self, bytes_per_second: int, clock: Clock, sleep: Callable[[float], None] = time.sleep) -> None:
        self.bytes_per_second = bytes_per_second
        self.waited_seconds = 0.0
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._left = float(bytes_per_second)
        self._at = clock.monotonic()

    def take(self, size: int) -> None:
        """Wait until `size` more bytes may be read."""
        rate = self.bytes_per_second
        if not rate:
            return
        with self._lock:
            now = self._clock.monotonic()
            self._left = min(self._left + (now - self._at) * rate, float(rate)) - size
            self._at = now
            wait = -self._left / rate
            if wait > 0:
                self.waited_seconds += wait
        # Sleeps without the lock: the debt in `_left` makes later callers wait longer.
        if wait > 0:
            self._sleep(wait)


SEGMENTS_MAX = 64
FILES_MAX = 64
"""Descriptors kept for segments, and for files of chunks: a process has 1,024 by default."""
CHUNKS_MAX = 256
"""Footers kept in memory: that of a full chunk of 4 KiB pages takes about 150 KiB."""
UNUSED_LOOKS = 8
"""Handles that were not used during this many ticks of the engine, about two seconds, are released."""
RUN_BYTES = 4 << 20
"""How much of consecutive frames is read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlace:
    """The location of a chunk's object; small and picklable."""

    key: ArtifactKey
    url: str
    object_key: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlace:
    """The location of a sealed segment's object; `object_key` is empty if it was never uploaded."""

    origin_db_id: int
    segment_id: int
    url: str = ""
    object_key: str = ""
    used_bytes: int = 0


Locate = Callable[[int, int], SegmentPlace | None]
"""(origin, segment) → its place, supplied by a caller with access to the manifest."""


class Sources:
    """Opens and reads segments and chunks of one store."""

    def __init__(
        self,
        *,
        root: str,
        disk: Disk,
        open_store: Callable[[str], ObjectStore],
        cache: PageCache,
        locate: Locate = lambda _origin, _segment: None,
        throttle: Throttle | None = None,
    ) -> None:
        self.cache = cache
        self.throttle = throttle
        self._root = root
        self._disk = disk
        self._open_store = open_store
        self._locate = locate
        self._segments: Handles[ReadSegment] = Handles(SEGMENTS_MAX)
        self._chunks: Handles[ChunkReader] = Handles(CHUNKS_MAX)
        self._files: Handles[ReadFile] = Handles(FILES_MAX)
        self._looks = 0
        self._last_groups: dict[ArtifactKey, int] = {}
        """Chunk → the group of `PAGES_PER_FRAME` offsets of its last cache miss."""

    def drop_unused(self) -> None:
        """Release handles that have not been used for `UNUSED_LOOKS` calls, so that an idle database holds none.

        Footers of chunks are memory only, and stay. The engine calls it at each tick.
        """
        self._looks += 1
        if self._looks % UNUSED_LOOKS == 0:
            self._segments.drop_unused()
            self._files.drop_unused()

    def close(self) -> None:
        """Release all handles; running reads complete."""
        self._segments.clear()
        self._chunks.clear()
        self._files.clear()

    # ── frames ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def version(self, origin: int, segment_id: int, lsn: int, page: int, *, place: SegmentPlace | None = None) -> bytes:
        """Return the page in the frame of this lsn, through the cache."""
        # An lsn is never used twice (P5), so it identifies the bytes without the segment.
        cache, location = self.cache, (origin, lsn)
        image = cache.get(location)
        if image is None:
            segment = self._segments.peek((origin, segment_id)) or self.segment(origin, segment_id, place)
            image = segment.read_frame(lsn - segment.header.first_lsn, page=page)
            cache.put(location, image)
        return image

    def versions(
        self,
        origin: int,
        segment_id: int,
        wanted: Iterable[tuple[int, int]],
        *,
        place: SegmentPlace | None = None,
        cold: bool = False,
    ) -> dict[int, bytes]:
        """Return page → image for (page, lsn) pairs of one segment, reading consecutive frames together.

        Raises if a frame is not of the given page.
        """
        cache, images, missing = self.cache, dict[int, bytes](), list[tuple[int, int]]()
        for page, lsn in wanted:
            cached = cache.get((origin, lsn))
            if cached is None:
                missing.append((lsn, page))
            else:
                images[page] = cached
        if not missing:
            return images
        segment = self.segment(origin, segment_id, place)
        header, stride = segment.header, segment.header.geometry.stride
        zeros = cache.zeros(header.geometry.page_size)
        for run in _runs(sorted(missing), max(RUN_BYTES // stride, 1)):
            first = run[0][0] - header.first_lsn
            if cold:
                self._slow_down(len(run) * stride)
            data = memoryview(segment.read_raw(first, len(run)))
            for number, (lsn, page) in enumerate(run):
                frame = data[number * stride : (number + 1) * stride]
                head = segment.checked(first + number, frame, page)
                image = images[page] = zeros if head.flags & ZERO else bytes(frame[FRAME_HEAD_BYTES:])
                if not cold:
                    cache.put((origin, lsn), image)
        return images

    def segment(self, origin: int, segment_id: int, place: SegmentPlace | None = None) -> ReadSegment:
        """Return a segment opened for reading, from its object if there is no local file."""
        return self._segments.keep((origin, segment_id), lambda: self._open_segment(origin, segment_id, place))

    def _open_segment(self, origin: int, segment_id: int, place: SegmentPlace | None) -> ReadSegment:
        path = os.path.join(self._root, WalSegmentFile(db_id=origin, segment_id=segment_id).path)
        try:
            file = ReadSegment.open(self._disk, path, db_id=origin, segment_id=segment_id)
            assert isinstance(file, ReadSegment), "`open` makes one of the class it is called on"
            return file
        except FileNotFoundError as error:
            place = place if place is not None and place.object_key else self._locate(origin, segment_id)
            if place is None or not place.object_key:
                raise _missing(
                    "a WAL segment's file is missing", path=path, db_id=origin, segment_id=segment_id
                ) from error
        remote = ObjectFile(self._open_store(place.url), place.object_key, place.used_bytes)
        try:
            return ReadSegment(remote, read_header(remote, db_id=origin, segment_id=segment_id), writable=False)
        except ObjectNotFound as error:
            where = {"object": place.object_key, "path": path, "db_id": origin, "segment_id": segment_id}
            raise _missing("a WAL segment has neither its file nor its object", **where) from error

    def forget_segment(self, origin: int, segment_id: int) -> None:
        """Drop the handle of a segment whose file is gone or was recycled."""
        self._segments.drop((origin, segment_id))

    # ── chunks ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def chunk(self, place: ChunkPlace, *, cold: bool = False) -> ChunkReader:
        """Return a chunk's reader, whose footer is loaded once."""
        if cold:
            # A scan uses a footer that is in memory but adds none: it would push out those of other readers.
            kept = self._chunks.get(place.key)
            return kept if kept is not None else self._open_chunk(place, cold=True)
        return self._chunks.keep(place.key, lambda: self._open_chunk(place, cold=False))

    def _open_chunk(self, place: ChunkPlace, *, cold: bool) -> ChunkReader:
        return ChunkReader(self._range_of(place, cold=cold), place.size_bytes, expect=place.key)

    def forget_chunk(self, key: ArtifactKey) -> None:
        """Drop the handles of a chunk whose object or local copy is gone."""
        self._chunks.drop(key)
        self._files.drop(key)

    def chunk_page(self, place: ChunkPlace, offset: int, *, cold: bool = False) -> bytes | None:
        """Return one page of a chunk, through the cache; `None` if the chunk does not have it."""
        key = place.key
        cached = self.cache.get((key, offset))
        if cached is not None:
            return cached
        reader = self.chunk(place, cold=cold)
        if cold:
            return reader.read_page(offset)
        # A page is cached alone at first: most of its frame's 16 pages are never read. If the next miss is next to it, the
        # access is sequential: then the whole frame is cached.
        group = offset // PAGES_PER_FRAME
        if self._last_groups.get(key) != group:
            if len(self._last_groups) >= CHUNKS_MAX:
                self._last_groups.clear()
            self._last_groups[key] = group
            cached = reader.read_page(offset)
            if cached is not None:
                self.cache.put((key, offset), cached)
            return cached
        pages = reader.read_frame(offset)
        for neighbour, image in pages.items():
            self.cache.put((key, neighbour), image)
        return pages.get(offset)

    def chunk_pages(self, place: ChunkPlace, offsets: Sequence[int], *, cold: bool = False) -> dict[int, bytes]:
        """Return offset → image for those of these pages that the chunk has; nearby frames are read together."""
        images, missing = {}, []
        for offset in offsets:
            cached = self.cache.get((place.key, offset))
            if cached is None:
                missing.append(offset)
            else:
                images[offset] = cached
        if missing:
            for offset, image in self.chunk(place, cold=cold).iter_pages(missing):
                images[offset] = image
                if not cold:
                    self.cache.put((place.key, offset), image)
        return images

    def chain_page(self, chain: Sequence[ChunkPlace], offset: int) -> bytes | None:
        """Return one page of a chain, from its last chunk that has it."""
        for place in reversed(chain):
            image = self.chunk_page(place, offset)
            if image is not None:
                return image
        return None

    def chain_pages(
        self, chain: Sequence[ChunkPlace], offsets: Sequence[int], *, cold: bool = False
    ) -> dict[int, bytes]:
        """Return offset → image for those of these pages that the chain has."""
        images: dict[int, bytes] = {}
        for place in reversed(chain):
            missing = [offset for offset in offsets if offset not in images]
            if not missing:
                break
            images.update(self.chunk_pages(place, missing, cold=cold))
        return images

    def _range_of(self, place: ChunkPlace, *, cold: bool) -> Callable[[int, int], bytes]:
        def read(offset: int, length: int) -> bytes:
            if cold:
                self._slow_down(length)
            file = self._file_of(place)
            if file is not None:
                return file.read_at(length, offset)
            try:
                return self._open_store(place.url).get_range(place.object_key, offset, length)
            except ObjectNotFound as error:
                where = {"object": place.object_key, "chunk": object_key(place.key), "store": place.url}
                raise _missing("a chunk's object is missing", **where) from error

        return read

    def _file_of(self, place: ChunkPlace) -> ReadFile | None:
        """Return the chunk's local file: its hot copy, or the object itself if objects are local files (O2)."""
        file = self._files.get(place.key)
        if file is not None:
            return file
        paths = [os.path.join(self._root, CachedChunkFile(db_id=place.key.origin_db_id, key=place.key).path)]
        if "://" not in place.url:
            paths.append(os.path.join(place.url, place.object_key))
        for path in paths:
            if self._disk.exists(path):
                try:
                    opened = ReadFile(self._disk.open(path, write=False))
                except FileNotFoundError:
                    continue  # evicted in the meantime: reading the object either works or raises
                return self._files.keep(place.key, lambda opened=opened: opened)  # type: ignore[misc]
        return None

    def _slow_down(self, size: int) -> None:
        if self.throttle is not None:
            self.throttle.take(size)


def _runs(versions: list[tuple[int, int]], longest: int) -> Iterable[list[tuple[int, int]]]:
    """Group ascending (lsn, page) pairs into runs of consecutive lsns.

    >>> list(_runs([(1, 9), (2, 8), (4, 7), (5, 6), (6, 5)], 2))
    [[(1, 9), (2, 8)], [(4, 7), (5, 6)], [(6, 5)]]
    """
    run: list[tuple[int, int]] = []
    for version in versions:
        if run and (version[0] != run[-1][0] + 1 or len(run) >= longest):
            yield run
            run = []
        run.append(version)
    if run:
        yield run


def _missing(what: str, **where: object) -> Corruption:
    return Corruption(what, hint="restore it from a copy; `quire verify` shows what is affected", **where)
