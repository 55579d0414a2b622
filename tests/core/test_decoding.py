"""JSON with a digest is read only if every byte is as it was written."""

from __future__ import annotations

from msgspec import Struct

from quire.core.decoding import decode_with_digest, encode_with_digest


class Record(Struct, frozen=True):
    name: str
    size: int = 0


def test_a_record_with_a_digest_is_read_only_as_it_was_written() -> None:
    data = encode_with_digest(Record("shop", 7))
    assert decode_with_digest(data, Record) == Record("shop", 7)
    for at in range(len(data)):
        assert decode_with_digest(data[:at], Record) is None
        assert decode_with_digest(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], Record) is None
