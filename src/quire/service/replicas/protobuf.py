"""The part of protobuf's wire format that one message in each direction needs.

A field is a key (number << 3 | wire type), then a varint (0), eight bytes (1), a length and that many bytes (2) or four bytes
(5). Unknown fields are skipped, as protobuf requires; of a repeated field the last value counts.

Threads: any; pure functions. Raises `InvalidInput` for bytes that are not a message.
"""

from __future__ import annotations

from quire.core.errors import InvalidInput

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
VARINT_BYTES_MAX = 10
FIELDS_MAX = 1_024
"""The most fields of one message: ours have eight."""


def read_message(data: bytes) -> dict[int, int | bytes]:
    """Return number → value of each field.

    >>> read_message(bytes.fromhex("1a0161 2096 01".replace(" ", "")))
    {3: b'a', 4: 150}
    """
    fields: dict[int, int | bytes] = {}
    at = count = 0
    while at < len(data):
        key, at = _varint(data, at)
        count += 1
        number, kind = key >> 3, key & 7
        if not number or count > FIELDS_MAX:
            raise _damaged("a field has no number, or there are too many", at)
        if kind == VARINT:
            fields[number], at = _varint(data, at)
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(kind, -1)
        if kind == LENGTH:
            size, at = _varint(data, at)
        if not 0 <= size <= len(data) - at:
            raise _damaged("a field is longer than the message, or of no known type", at)
        fields[number] = data[at : at + size]
        at += size
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (value, offset after it)."""
    value = 0
    for length, byte in enumerate(data[at : at + VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * length
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + length + 1
    raise _damaged("a number does not end", at)


def _damaged(what: str, offset: int) -> InvalidInput:
    return InvalidInput(
        f"the request is not a protobuf message: {what}", hint="check that the whole request was sent", offset=offset
    )


def varint(value: int) -> bytes:
    """Encode a number.

    >>> varint(150).hex()
    '9601'
    """
    pieces = bytearray()
    while value > 0x7F:
        pieces.append(value & 0x7F | 0x80)
        value >>= 7
    pieces.append(value)
    return bytes(pieces)


def number_field(number: int, value: int) -> bytes:
    """Encode a field with a number; nothing for 0, as protobuf requires."""
    return varint(number << 3 | VARINT) + varint(value) if value else b""


def bytes_field(number: int, value: bytes) -> bytes:
    """Encode a field with bytes, text or a message, even if it is empty."""
    return varint(number << 3 | LENGTH) + varint(len(value)) + value


def delimited(message: bytes) -> bytes:
    """Prefix a message with its length, as in a stream of messages."""
    return varint(len(message)) + message
