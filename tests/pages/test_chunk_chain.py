"""A chain reads as a dictionary that was updated delta by delta, and old images are not even fetched."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidInput
from quire.pages.chunk_chain import merge, read_newest
from quire.pages.chunk_reader import ChunkReader
from quire.pages.chunk_writer import ChunkWriter
from tests.pages.chunks import Blob, Pages, identity, image, some_pages, write_chunk


def chain_of(*layers: Pages, page_size: int = 512, limit: int = 80) -> list[ChunkReader]:
    chunks = []
    for number, pages in enumerate(layers):
        what = identity(page_size, limit, delta_id=number or None, covered_lsn=100 + number, generation=1 + number)
        chunks.append(Blob(write_chunk(pages, what)[0]).reader())
    return chunks


layers = st.lists(
    st.dictionaries(st.integers(0, 79), st.integers(0, 60).map(lambda flavour: image(512, flavour)), max_size=40),
    min_size=1,
    max_size=5,
)


@given(layers=layers, limit=st.none() | st.integers(0, 80))
def test_a_merge_is_the_dictionary_updated_delta_by_delta(layers: list[Pages], limit: int | None) -> None:
    model: Pages = {}
    for pages in layers:
        model.update(pages)
    if limit is not None:
        model = {offset: page for offset, page in model.items() if offset < limit}
    merged = list(merge(chain_of(*layers), pages_below=limit))
    assert merged == sorted(model.items())


@given(layers=layers)
def test_one_page_of_a_chain_is_the_newest(layers: list[Pages]) -> None:
    chain = chain_of(*layers)
    model: Pages = {}
    for pages in layers:
        model.update(pages)
    for offset in range(80):
        assert read_newest(chain, offset) == model.get(offset)


@given(layers=layers)
def test_a_merged_chain_written_as_a_base_reads_the_same(layers: list[Pages]) -> None:
    chain = chain_of(*layers)
    parts: list[bytes] = []
    writer = ChunkWriter(parts.append, identity(512, 80, generation=9))
    for offset, page in merge(chain):
        writer.add(offset, page)
    writer.finish()
    assert list(merge([Blob(b"".join(parts)).reader()])) == list(merge(chain))


def test_deltas_without_their_base_are_a_chain_too() -> None:
    _, one, two = chain_of({0: bytes(512)}, {1: b"a" * 512, 2: b"b" * 512}, {2: b"c" * 512})
    assert list(merge([one, two])) == [(1, b"a" * 512), (2, b"c" * 512)]
    assert read_newest([one, two], 0) is None


def test_a_delta_stays_valid_over_the_base_a_merge_put_under_it() -> None:
    """A merge replaces a prefix; the deltas behind it name a base that is gone, and must not be refused for it."""
    base, one, two = chain_of({0: b"a" * 512}, {1: b"b" * 512}, {0: b"c" * 512})
    parts: list[bytes] = []
    writer = ChunkWriter(parts.append, identity(512, 80, generation=50, covered_lsn=one.identity.covered_lsn))
    for offset, page in merge([base, one]):
        writer.add(offset, page)
    writer.finish()
    merged = Blob(b"".join(parts)).reader()
    assert two.identity.base_generation != merged.identity.key.generation
    assert list(merge([merged, two])) == [(0, b"c" * 512), (1, b"b" * 512)]


def test_images_that_a_delta_replaced_are_not_fetched() -> None:
    noise = {offset: image(4096, 2 + 4 * offset) for offset in range(4000)}
    base = Blob(write_chunk(noise, identity(4096))[0])
    newer = {offset: image(4096, 1) for offset in range(160, 3840)}
    delta = Blob(write_chunk(newer, identity(4096, delta_id=1, covered_lsn=101))[0])
    footer = base.reader().footer
    base.reads.clear()
    chain = [ChunkReader(base.read, len(base), footer=footer), delta.reader()]
    assert dict(merge(chain)) == noise | newer
    assert [length for _, length in base.reads] == [160 * 4096, 160 * 4096]


def test_a_merge_streams() -> None:
    """The chain holds 24 MiB of pages; what is in memory is a piece of each chunk."""
    flat = some_pages(4096, range(6000), seed=3)
    base = Blob(write_chunk(flat, identity(4096))[0])
    delta = Blob(
        write_chunk(some_pages(4096, range(0, 6000, 3), seed=4), identity(4096, delta_id=1, covered_lsn=101))[0]
    )
    tracemalloc.start()
    count = sum(1 for _ in merge([base.reader(), delta.reader()]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 6000
    assert peak < 14 << 20


def test_chunks_that_are_no_chain_are_refused() -> None:
    base, one, two = chain_of({0: bytes(512)}, {1: bytes(512)}, {2: bytes(512)})
    (other_size,) = chain_of({0: bytes(1024)}, page_size=1024)
    for wrong in ([], [one, base], [base, base], [base, two, one], [base, one, one], [other_size, one]):
        with pytest.raises(InvalidInput):
            merge(wrong)
