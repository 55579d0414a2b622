"""Answers to libSQL's embedded replicas: frames of a write-ahead log that lead from the version that a replica has to the
newest.

A frame is 24 bytes (page number from 1, size of the database in pages if it ends a transaction, and 16 bytes that the client
fills in itself), then the page. All frames that lead to a version are one transaction: the last one has the size. The client
takes as many frames as it gets, whatever it requested, and counts them.

What a replica gets
  nothing new              `EndOfFrames` with its own generation: it is done
  frames                   of the pages that may have changed, from one version
  its pair is not known    `EndOfFrames` with a higher generation. It enters that generation, asks again, and gets every page
                           there (`positions.py`, rules 2 and 4): a replica of another history never keeps a page of it.

An answer has at most `FRAMES_MAX` frames. A longer one is cut at a multiple of `STEP` at which no other answer is cut; the
version is held until the replica requests the rest. If the rest is gone, because the server was restarted, `Conflict` is
raised: the replica discards the frames of the unfinished transaction and begins again from what it has.

Threads: any; one lock. Raises `InvalidInput`, `Conflict`, and what opening a database raises.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct

from pyroaring import BitMap

from quire.core.errors import Conflict, InvalidInput
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.manifest.store import ManifestStore
from quire.pages.pagestore import PageStore
from quire.pages.snapshot import Snapshot
from quire.service.replicas.held_versions import HeldVersions, closed_on_failure
from quire.service.replicas.positions import GENERATION_MAX, STEP, Positions, next_generation
from quire.service.replicas.pulls import history_of, pages_since, require_pages
from quire.service.replicas.revisions import HistoryId

FRAME_HEAD = Struct(">II16x")
FRAME_HEAD_BYTES = 24
FRAMES_MAX = 64 * 256
"""64 MiB of pages: a client holds an answer in memory."""
TRANSFERS_MAX = 64
NUMBER_MAX = (1 << 32) - 1

assert FRAME_HEAD.size == FRAME_HEAD_BYTES
assert FRAMES_MAX % STEP == 0


@dataclass(frozen=True, slots=True)
class EndOfFrames:
    """There are no frames after the replica's frame number; `generation`: where to ask next, or its own."""

    generation: int


@dataclass(frozen=True, slots=True)
class FramesPlan:
    """Frames to send, of the version that a reader has open."""

    reader: Snapshot
    pages: array[int]
    """The page of each frame, from 0."""
    ends: bool
    """Whether the last frame ends the transaction."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    """The rest of an answer that was cut."""

    history: HistoryId
    lsn: int
    pages: array[int]


class FrameAnswers:
    """Plans answers, and remembers the rest of those that were cut."""

    def __init__(self, manifest: ManifestStore, held: HeldVersions, positions: Positions) -> None:
        self._manifest = manifest
        self._held = held
        self._positions = positions
        # guarded by _lock
        self._lock = threading.Lock()
        self._unsent_transfers: OrderedDict[tuple[int, int, int], _Transfer] = OrderedDict()
        """(database, generation, last frame sent) → the rest."""

    def plan(self, store: PageStore, generation: int, first: int) -> FramesPlan | EndOfFrames:
        """Plan the answer to a replica that requests the frames from `first` on."""
        if not (0 < generation <= GENERATION_MAX and 0 < first <= NUMBER_MAX):
            raise InvalidInput("a generation and a frame number must be positive", generation=generation, frame=first)
        history, frame = history_of(self._manifest, store.db_id), first - 1
        if frame and frame % STEP == 0:
            return self._resume_transfer(store, history, generation, frame)
        since = self._positions.find(history, generation, frame)
        if since is None:
            return EndOfFrames(next_generation(history, generation))
        with closed_on_failure(self._held.newest(store, hold=False)) as reader:
            pages = pages_since(store, since, reader)
            if pages is None:
                reader.close()
                return EndOfFrames(next_generation(history, generation))
            is_resync = not since and not frame and not self._positions.is_export(history, generation)
            if is_resync:
                require_pages(reader)
            if not pages:
                reader.close()
                return EndOfFrames(generation)
            if is_resync:
                emit("info", "replica.resync", db_id=store.db_id, had=generation, lsn=reader.lsn, pages=len(pages))
            plan = self._begin(store, history, generation, frame, reader, pages)
            if plan is None:
                reader.close()
                return EndOfFrames(next_generation(history, generation))
            return plan

    def _begin(
        self, store: PageStore, history: HistoryId, generation: int, frame: int, reader: Snapshot, pages: BitMap
    ) -> FramesPlan | None:
        """Return the first answer of a transaction; `None` if entering the next generation is cheaper than reaching a free
        frame number."""
        order = pages.to_array()
        frame_max = min(frame + len(order) + reader.size_pages, NUMBER_MAX - 1)
        # Committed before any frame is sent: a replica that has received the last one must find its number, even if
        # the server is killed right after that (decision 053).
        end = self._positions.reach(history, generation, frame + len(order), frame_max, reader.lsn)
        if end is None:
            return None
        hit("replicas.position")
        order.extend([order[-1]] * (end - frame - len(order)))  # up to a free number (`positions.py`, rule 1)
        return self._cut(store, _Transfer(history, reader.lsn, order), generation, frame, reader)

    def _resume_transfer(self, store: PageStore, history: HistoryId, generation: int, frame: int) -> FramesPlan:
        with self._lock:
            unsent = self._unsent_transfers.get((store.db_id, generation, frame))
        if unsent is not None and unsent.history == history:
            with closed_on_failure(self._held.at(store, unsent.lsn)) as reader:
                if reader.lsn == unsent.lsn:
                    return self._cut(store, unsent, generation, frame, reader)
            reader.close()
        raise Conflict("the sync was interrupted", hint="sync again", generation=generation, frame=frame)

    def _cut(self, store: PageStore, transfer: _Transfer, generation: int, frame: int, reader: Snapshot) -> FramesPlan:
        """Return the frames of one answer, and remember the rest under an unused frame number."""
        pages = transfer.pages
        if len(pages) <= FRAMES_MAX:
            return FramesPlan(reader, pages, ends=True)
        with self._lock:
            cut = (frame + FRAMES_MAX) // STEP * STEP
            # A replica that returns names only this number: two answers that are cut at the same one must have the
            # same rest.
            while (unsent := self._unsent_transfers.get((store.db_id, generation, cut))) is not None:
                if (unsent.lsn, unsent.pages) == (transfer.lsn, pages[cut - frame :]):
                    break
                cut -= STEP
                if cut <= frame:
                    raise Conflict("too many replicas are syncing", hint="sync again later")
            here, after = pages[: cut - frame], pages[cut - frame :]
            self._unsent_transfers[store.db_id, generation, cut] = _Transfer(transfer.history, transfer.lsn, after)
            self._unsent_transfers.move_to_end((store.db_id, generation, cut))
            while len(self._unsent_transfers) > TRANSFERS_MAX:
                self._unsent_transfers.popitem(last=False)
        self._held.at(store, transfer.lsn).close()  # renews the hold for the request of the rest
        return FramesPlan(reader, here, ends=False)


def encode_frames(plan: FramesPlan, images: dict[int, bytes], first: int, count: int) -> Iterator[bytes]:
    """Yield the frames `first` to `first + count` of a plan."""
    last = len(plan.pages) - 1
    for number in range(first, first + count):
        page = plan.pages[number]
        size_after = plan.reader.size_pages if plan.ends and number == last else 0
        yield FRAME_HEAD.pack(page + 1, size_after)
        yield images[page]


def with_log(page: bytes) -> bytes:
    """Return the first page with the header of a database in WAL mode, which libSQL's replicas use."""
    return page[:18] + b"\x02\x02" + page[20:]
