"""Segments made by hand, for the tests of the formats."""

from __future__ import annotations

from collections.abc import Sequence

from quire.stream.segment import Body, NextBlock, StreamSegmentHeader, body_of, encode_into

SALT = 0x0123456789ABCDEF


def encode_block(seed: int, place: NextBlock, body: Body, *, is_commit: bool) -> bytes:
    """A block as bytes."""
    out = bytearray(body.block_bytes)
    encode_into(memoryview(out), seed, place, body, is_commit=is_commit)
    return bytes(out)


def new_header(base_record: int = 1000, salt: int = SALT) -> StreamSegmentHeader:
    """Of segment 3 of stream 7, with its checksum."""
    return StreamSegmentHeader.decode(StreamSegmentHeader(7, 3, base_record, 1_700_000_000_000, salt).encode())


def segment_of(
    appends: Sequence[Sequence[Sequence[bytes]]], *, header: StreamSegmentHeader | None = None, durable: bool = True
) -> bytes:
    """A segment of these appends, each a row of blocks; `durable`: each append was synced before the next one."""
    header = header or new_header()
    raw, record, synced = bytearray(header.encode()), header.base_record, header.base_record
    for number, blocks in enumerate(appends):
        for place, payloads in enumerate(blocks):
            where = NextBlock(len(raw), record, header.created_at_ms + number, synced)
            last = place == len(blocks) - 1
            raw += encode_block(header.crc64, where, body_of(payloads), is_commit=last)
            record += len(payloads)
        if durable:
            synced = record
    return bytes(raw)
