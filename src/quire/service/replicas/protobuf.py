"""As much of protobuf's wire format as one message in each direction needs.

A field is a key (number << 3 | wire type), then a varint (0), eight bytes (1), a length and so many bytes (2) or four bytes
(5). Fields that nobody asks for are skipped, as protobuf wants it; of a field that comes twice the last one counts.

Pure functions. Raises `InvalidInput` for bytes that are no message.
"""

from __future__ import annotations

from quire.core.errors import InvalidInput

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
VARINT_BYTES_MAX = 10
FIELDS_MAX = 1_024
"""Of one message: ours have eight."""


def read_message(data: bytes) -> dict[int, int | bytes]:
    """Number → value of each field.

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
    """(value, where the next thing begins)."""
    value = 0
    for length, byte in enumerate(data[at : at + VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * length
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + length + 1
    raise _damaged("a number does not end", at)


def _damaged(what: str, offset: int) -> InvalidInput:
    return InvalidInput(f"the request is no protobuf message: {what}", hint="was it cut short?", offset=offset)


def varint(value: int) -> bytes:
    """A number.

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
    """A field with a number; nothing for 0, as protobuf wants it."""
    return varint(number << 3 | VARINT) + varint(value) if value else b""


def bytes_field(number: int, value: bytes) -> bytes:
    """A field with bytes, text or a message; also if it is empty."""
    return varint(number << 3 | LENGTH) + varint(len(value)) + value


def delimited(message: bytes) -> bytes:
    """A message behind its length, as it stands in a stream of messages."""
    return varint(len(message)) + message
