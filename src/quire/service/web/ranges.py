"""Parts of a file: what the header `Range` asks for (RFC 9110, section 14).

Pure functions. Raises `UnsatisfiableRange`.
"""

from __future__ import annotations

from itertools import pairwise

RANGES_MAX = 16
"""In one request: more, and ranges that overlap, serve nobody but whoever wants to keep the server busy."""
DIGITS_MAX = 18


class UnsatisfiableRange(Exception):
    """The ranges cannot be read, are too many, or lie outside of the file."""


def parse_ranges(header: str, size: int) -> list[range]:
    """The bytes that are asked for, each range as a `range`; none if the header is in another unit: then it is ignored.

    >>> parse_ranges("bytes=0-3, -2", 10)
    [range(0, 4), range(8, 10)]
    >>> parse_ranges("bytes=4-", 10), parse_ranges("lines=1-2", 10)
    ([range(4, 10)], [])
    >>> parse_ranges("bytes=10-", 10)
    Traceback (most recent call last):
        ...
    quire.service.web.ranges.UnsatisfiableRange: no byte of the file is in the range
    """
    unit, mark, specs = header.partition("=")
    if unit.strip().lower() != "bytes" or not mark:
        return []
    wanted = [_parse(spec.strip(), size) for spec in specs.split(",", RANGES_MAX)]
    if len(wanted) > RANGES_MAX:
        raise UnsatisfiableRange(f"a request has at most {RANGES_MAX} ranges")
    satisfiable = [part for part in wanted if part]
    if not satisfiable:
        raise UnsatisfiableRange("no byte of the file is in the range")
    ordered = sorted(satisfiable, key=lambda part: part.start)
    if any(after.start < before.stop for before, after in pairwise(ordered)):
        raise UnsatisfiableRange("the ranges overlap")
    return satisfiable


def _parse(spec: str, size: int) -> range:
    first, mark, last = (part.strip() for part in spec.partition("-"))
    if not mark or not (first or last) or not (_is_number(first) and _is_number(last)):
        raise UnsatisfiableRange("a range is FIRST-LAST, FIRST- or -LENGTH")
    if not first:
        return range(max(size - int(last), 0), size) if int(last) else range(0)
    if last and int(last) < int(first):
        raise UnsatisfiableRange("a range ends before it begins")
    return range(int(first), min(int(last) + 1, size) if last else size) if int(first) < size else range(0)


def _is_number(text: str) -> bool:
    return not text or (text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX)
