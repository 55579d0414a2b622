"""The checker finds every flipped byte and every truncation, reports where, and compares the object with its row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import ChecksumMismatch, Corruption, FormatTooNew, ObjectStoreUnavailable
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.checksums import sha256
from quire.manifest.records import Compression
from quire.pages.chunk_format import encode_header
from quire.pages.chunk_verify import ChunkProblem, ExpectedChunk, describe, verify
from quire.pages.chunk_writer import ChunkInfo
from tests.pages.chunks import (
    Blob,
    Pages,
    compact_pages,
    footer_of,
    identity,
    page_sets,
    with_footer,
    with_trailer,
    write_chunk,
)

PAGES = compact_pages(512, [0, *range(3, 40), 900])
GOOD, INFO = write_chunk(PAGES, identity())


def problems(data: bytes, expected: ExpectedChunk | None = None) -> list[ChunkProblem]:
    return list(verify(Blob(data).read, len(data), expected or ExpectedChunk(), name="demo"))


def expected_chunk(info: ChunkInfo) -> ExpectedChunk:
    return ExpectedChunk(
        key=info.identity.key,
        plan_digest=info.identity.plan_digest,
        covered_lsn=info.identity.covered_lsn,
        page_size=info.identity.page_size,
        size_bytes=info.size_bytes,
        sha256=info.sha256,
        page_count=info.page_count,
        bitmap_hash=info.bitmap_hash,
    )


def test_a_good_object_has_no_problems() -> None:
    assert problems(GOOD) == []
    assert problems(GOOD, expected_chunk(INFO)) == []


def test_any_flipped_byte_is_located() -> None:
    footer = Blob(GOOD).reader().footer
    frames = [footer.frame(number) for number in range(footer.frame_count)]
    for position in range(len(GOOD)):
        damaged = bytearray(GOOD)
        damaged[position] ^= 1 << position % 8
        reported = problems(bytes(damaged))
        damaged_frames = [
            location.number for location in frames if location.offset <= position < location.offset + location.length
        ]
        if damaged_frames:
            assert [(problem.rule, problem.where["frame"]) for problem in reported] == [("C3", damaged_frames[0])]
            assert reported[0].where["first_page"] == footer.offsets_in(damaged_frames[0])[0]
        else:
            assert [problem.rule for problem in reported] == ["C1" if position >= footer.offset else "C2"]
        assert [problem.rule for problem in problems(bytes(damaged), ExpectedChunk(sha256=INFO.sha256))][-1] == "C6"
        assert problems(bytes(damaged), ExpectedChunk(sha256=sha256(damaged))) == reported


@given(case=page_sets(), draw=st.data())
def test_any_flipped_byte_of_any_chunk_is_found(case: tuple[int, int, Pages], draw: st.DataObject) -> None:
    page_size, limit, pages = case
    data = bytearray(write_chunk(pages, identity(page_size, limit))[0])
    data[draw.draw(st.integers(0, len(data) - 1))] ^= draw.draw(st.integers(1, 255))
    assert problems(bytes(data))


def test_every_truncation_is_found() -> None:
    for size in range(len(GOOD)):
        assert problems(GOOD[:size])[0].rule == "C1"
        assert next(verify(Blob(GOOD[:size]).read, len(GOOD))).rule == "C1"
    assert {problem.rule for problem in problems(GOOD + b"x")} == {"C1"}


def test_all_damage_is_found_not_just_the_first() -> None:
    footer = Blob(GOOD).reader().footer
    damaged = bytearray(GOOD)
    damaged[20] ^= 1
    for number in (0, 2):
        damaged[footer.frame(number).offset] ^= 1
    assert [problem.rule for problem in problems(bytes(damaged))] == ["C2", "C3", "C3"]


def test_a_page_that_differs_from_the_one_packed_is_found() -> None:
    footer = bytearray(footer_of(GOOD))
    footer[-8 * (len(PAGES) - 20)] ^= 1
    (problem,) = problems(with_footer(GOOD, bytes(footer)))
    assert (problem.rule, problem.where["page"], problem.where["frame"]) == ("C4", sorted(PAGES)[20], 1)


def test_a_header_of_another_chunk_is_found() -> None:
    other = encode_header(replace(INFO.identity, covered_lsn=101), Compression.ZSTD)
    (problem,) = problems(other + GOOD[len(other) :])
    assert problem.rule == "C2"
    assert "copy in the footer" in str(problem)


def test_the_object_is_compared_with_its_row() -> None:
    other = ArtifactKey(7, ArtifactKind.BASE, 2, 2)
    wrong_values: dict[str, Any] = {
        "key": other,
        "plan_digest": b"x" * 32,
        "covered_lsn": 99,
        "page_size": 1024,
        "size_bytes": 1,
        "sha256": b"x" * 32,
        "page_count": 1,
        "bitmap_hash": 1,
    }
    for name, value in wrong_values.items():
        reported = problems(GOOD, replace(expected_chunk(INFO), **{name: value}))
        assert [problem.rule for problem in reported] == [
            "C6" if name in ("size_bytes", "sha256", "page_count", "bitmap_hash") else "C5"
        ]
        assert name in reported[0].what
    assert problems(GOOD, ExpectedChunk(key=other))[0].where["found"] == INFO.identity.key


@pytest.mark.parametrize("garbled", [0, 1, 2])
def test_bytes_garbled_in_transit_are_not_a_problem(garbled: int) -> None:
    """The reads are: end, header, frames; and the end once more, for the SHA-256 of what was already compared."""
    blob = Blob(GOOD)

    def read(offset: int, length: int) -> bytes:
        blob.garbled_reads = int(len(blob.reads) == garbled)
        return blob.read(offset, length)

    assert list(verify(read, len(GOOD), expected_chunk(INFO))) == []
    assert len(blob.reads) == 5


def test_a_newer_version_is_a_problem_for_the_checker_and_format_too_new_for_readers() -> None:
    newer = with_trailer(GOOD, version=2)
    assert problems(newer)[0].rule == "C1"
    with pytest.raises(FormatTooNew):
        describe(Blob(newer).read, len(newer))


def test_an_unavailable_store_is_not_damage() -> None:
    def offline(offset: int, length: int) -> bytes:
        raise ObjectStoreUnavailable("no response")

    with pytest.raises(ObjectStoreUnavailable):
        list(verify(offline, len(GOOD)))


def test_describing_a_damaged_object_raises() -> None:
    assert describe(Blob(GOOD).read, len(GOOD)) == INFO
    damaged = bytearray(GOOD)
    damaged[100] ^= 1
    with pytest.raises(ChecksumMismatch):
        describe(Blob(bytes(damaged)).read, len(GOOD))
    footer = bytearray(footer_of(GOOD))
    footer[-1] ^= 1
    with pytest.raises(Corruption):
        describe(Blob(with_footer(GOOD, bytes(footer))).read, len(GOOD))
