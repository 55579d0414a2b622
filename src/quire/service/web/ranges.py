"""Parses the header `Range` of a request for parts of a file (RFC 9110, section 14).

Threads: any; pure functions. Raises `UnsatisfiableRange`.
"""

from __future__ import annotations

from itertools import pairwise

RANGES_MAX = 16
"""The most ranges in one request: more, and ranges that overlap, only serve to keep the server busy."""
DIGITS_MAX = 18


class UnsatisfiableRange(Exception):
    """The ranges are malformed, too many, or outside the file."""


def parse_ranges(header: str, size: int) -> list[range]:
    """Return the requested bytes, each range as a `range`; none if the header is in another unit, which is ignored.

    >>> parse_ranges("bytes=0-3, -2", 10)
    [range(0, 4), range(8, 10)]
    >>> parse_ranges("bytes=4-", 10), parse_ranges("lines=1-2", 10)
    ([range(4, 10)], [])
    >>> parse_ranges("bytes=10-", 10)
    Traceback (most recent call last):
        ...
    quire.service.web.ranges.UnsatisfiableRange: the range is outside the file
    """
    unit, mark, specs = header.partition("=")
    if unit.strip().lower() != "bytes" or not mark:
        return []
    wanted = [_parse(spec.strip(), size) for spec in specs.split(",", RANGES_MAX)]
    if len(wanted) > RANGES_MAX:
        raise UnsatisfiableRange(f"a request can have at most {RANGES_MAX} ranges")
    satisfiable = [part for part in wanted if part]
    if not satisfiable:
        raise UnsatisfiableRange("the range is outside the file")
    ordered = sorted(satisfiable, key=lambda part: part.start)
    if any(after.start < before.stop for before, after in pairwise(ordered)):
        raise UnsatisfiableRange("the ranges overlap")
    return satisfiable


def _parse(spec: str, size: int) -> range:
    first, mark, last = (part.strip() for part in spec.partition("-"))
    if not mark or not (first or last) or not (_is_number(first) and _is_number(last)):
        raise UnsatisfiableRange("a range must be FIRST-LAST, FIRST- or -LENGTH")
    if not first:
        return range(max(size - int(last), 0), size) if int(last) else range(0)
    if last and int(last) < int(first):
        raise UnsatisfiableRange("a range ends before it starts")
    return range(int(first), min(int(last) + 1, size) if last else size) if int(first) < size else range(0)


def _is_number(text: str) -> bool:
    return not text or (text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX)
