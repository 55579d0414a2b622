"""A slot's chain read as one: of each page the newest image in base and deltas.

Terms
  chain   the chunks that together hold a slot: a base (or, of a part of a chain, its oldest delta), then deltas, oldest first
  newest  of the chunks that have a page, the last in the chain: the others' images of it are never read

Rules
  1. All chunks of a chain are of one slot and one page size; only the first may be a base; `covered_lsn` rises.
  2. Pages come in rising order, each once, from its newest chunk; frames without such a page are not fetched.
  3. Memory is what one `ChunkReader` holds, for each chunk of the chain.
  4. A delta's `base_generation` says over which base it was written. It is not compared: a merge puts a new base under the
     deltas behind the prefix it replaced (P10).

Any thread; importable on executors (no lmdb). Format page: `docs/formats/chunk.md`.
Raises `InvalidInput` for chunks that are no chain, and what `ChunkReader` raises.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter

from pyroaring import BitMap

from quire.core.errors import InvalidInput
from quire.core.ids import ArtifactKind
from quire.pages.chunk_reader import ChunkReader


def merge(chain: Sequence[ChunkReader], *, pages_below: int | None = None) -> Iterator[tuple[int, bytes]]:
    """(offset, image) of every page of the chain, newest wins, in rising order.

    `pages_below` leaves out the pages at that offset and beyond: those that a shrunk database no longer has (P15).
    """
    check_chain(chain)
    taken = BitMap()
    if pages_below is not None:
        taken.add_range(pages_below, chain[0].identity.pages_per_chunk)
    walks: list[Iterator[tuple[int, bytes]]] = []
    for chunk in reversed(chain):
        owned = BitMap(chunk.pages) - taken
        if owned:
            walks.append(chunk.iter_pages(owned))
            taken |= owned
    return heapq.merge(*walks, key=itemgetter(0)) if len(walks) > 1 else (walks[0] if walks else iter(()))


def read_newest(chain: Sequence[ChunkReader], offset: int) -> bytes | None:
    """One page of the chain; `None` if no chunk has it."""
    for chunk in reversed(chain):
        image = chunk.read_page(offset)
        if image is not None:
            return image
    return None


def check_chain(chain: Sequence[ChunkReader]) -> None:
    """Refuse chunks that are not one slot's base and deltas with rising `covered_lsn` (rule 1)."""
    if not chain:
        raise InvalidInput("a chain has at least one chunk")
    for older, newer in pairwise(chain):
        one, two = older.identity, newer.identity
        if (one.key.id, one.page_size, one.pages_per_chunk) != (two.key.id, two.page_size, two.pages_per_chunk):
            raise InvalidInput("chunks of a chain are of one slot and page size", older=one.key, newer=two.key)
        if two.key.kind is not ArtifactKind.DELTA or one.covered_lsn >= two.covered_lsn:
            what = "a chain is one base, then deltas that cover rising lsns"
            raise InvalidInput(what, older=one.key, covered=one.covered_lsn, newer=two.key, next=two.covered_lsn)
