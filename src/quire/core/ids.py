"""Identifiers that all packages share, their widths, and range checks for arguments.

Ids of databases, chunks, snapshots and segments, and generations, are u32 with 0 reserved for "none"; job ids, cursor ids, lsns
and change sequences are u64 (M1).

    >>> u32("db_id", 7)
    7
    >>> u32("db_id", 2**32)
    Traceback (most recent call last):
        ...
    quire.core.errors.OutOfRange: db_id does not fit an unsigned 32-bit field (value=4294967296, max=4294967295)
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from quire.core.errors import OutOfRange

U16_MAX = 2**16 - 1
U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1


def u16(name: str, value: int) -> int:
    """Return `value` if it fits an unsigned 16-bit field; raise `OutOfRange` otherwise."""
    return _unsigned(name, value, U16_MAX, 16)


def u32(name: str, value: int) -> int:
    """Return `value` if it fits an unsigned 32-bit field; raise `OutOfRange` otherwise."""
    return _unsigned(name, value, U32_MAX, 32)


def u64(name: str, value: int) -> int:
    """Return `value` if it fits an unsigned 64-bit field; raise `OutOfRange` otherwise."""
    return _unsigned(name, value, U64_MAX, 64)


def some_u32(name: str, value: int) -> int:
    """Return `value` if it is a u32 identifier other than 0, which is reserved for "none"; raise `OutOfRange` otherwise."""
    if value == 0:
        raise OutOfRange(f"{name} may not be 0: ids start at 1", value=value)
    return _unsigned(name, value, U32_MAX, 32)


def _unsigned(name: str, value: int, largest: int, bits: int) -> int:
    if type(value) is not int:
        raise OutOfRange(f"{name} must be a whole number", value=value, type=type(value).__name__)
    if not 0 <= value <= largest:
        raise OutOfRange(f"{name} does not fit an unsigned {bits}-bit field", value=value, max=largest)
    return value


class ArtifactKind(IntEnum):
    """The type of an immutable, reference-counted artifact. The first three have objects, the last two only rows."""

    BASE = 0
    DELTA = 1
    WAL = 2
    LEAF = 3
    NAMESPACE = 4


KINDS_WITH_OBJECTS = frozenset({ArtifactKind.BASE, ArtifactKind.DELTA, ArtifactKind.WAL})


class ArtifactKey(msgspec.Struct, frozen=True, order=True):
    """Permanent identity of one immutable artifact (M6): origin database, kind, slot or segment, generation.

    `delta_id` is 0 except for deltas. WAL segments have generation 0: a segment is written once.
    """

    origin_db_id: int
    kind: ArtifactKind
    id: int
    generation: int
    delta_id: int = 0


class Epoch(msgspec.Struct, frozen=True, order=True):
    """A version of a page database: the lsn gives the order (P5), the segment the location.

    >>> str(Epoch(lsn=4711, segment_id=3))
    '3:4711'
    """

    lsn: int
    segment_id: int

    def __str__(self) -> str:
        return f"{self.segment_id}:{self.lsn}"
