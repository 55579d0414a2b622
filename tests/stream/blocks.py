"""Segments built by hand, for the tests of the formats."""

from __future__ import annotations

from collections.abc import Sequence

from quire.stream.segment import Body, NextBlock, StreamSegmentHeader, body_of, encode_into

SALT = 0x0123456789ABCDEF


def encode_block(seed: int, next_block: NextBlock, body: Body, *, is_commit: bool) -> bytes:
    """Encode a block."""
    out = bytearray(body.block_bytes)
    encode_into(memoryview(out), seed, next_block, body, is_commit=is_commit)
    return bytes(out)


def new_header(base_record: int = 1000, salt: int = SALT) -> StreamSegmentHeader:
    """The header of segment 3 of stream 7, with its checksum."""
    return StreamSegmentHeader.decode(StreamSegmentHeader(7, 3, base_record, 1_700_000_000_000, salt).encode())


def segment_of(
    appends: Sequence[Sequence[Sequence[bytes]]], *, header: StreamSegmentHeader | None = None, durable: bool = True
) -> bytes:
    """A segment with these appends, each a list of blocks. If `durable`, each append is synced before the next."""
    header = header or new_header()
    raw, record, synced = bytearray(header.encode()), header.base_record, header.base_record
    for number, blocks in enumerate(appends):
        for block_number, payloads in enumerate(blocks):
            next_block = NextBlock(len(raw), record, header.created_at_ms + number, synced)
            last = block_number == len(blocks) - 1
            raw += encode_block(header.crc64, next_block, body_of(payloads), is_commit=last)
            record += len(payloads)
        if durable:
            synced = record
    return bytes(raw)
