"""Framed logs with correct checksums and wrong numbers are rejected or read, with bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import QuireError
from quire.core.limits import MIB
from quire.durable.checksums import crc64
from quire.durable.log_format import HEAD, HEADER_BYTES, LINK, LogIdentity, decode_header, encode_header
from quire.durable.log_reader import LogEnd, find_frames, scan
from tests.hostile import memory_limit, numbers

BOUND = 64 * MIB


@given(
    frames=st.lists(st.tuples(st.none() | numbers(32), numbers(64), st.binary(max_size=40)), max_size=6),
    start=st.just(0) | st.integers(0, 400),
    vouched=st.none() | st.tuples(numbers(64), numbers(64)),
    named=st.booleans(),
    tail=st.binary(max_size=40),
)
def test_a_log_with_correct_links_is_rejected_or_read_within_bounds(
    frames: list[tuple[int | None, int, bytes]],
    start: int,
    vouched: tuple[int, int] | None,
    named: bool,
    tail: bytes,
) -> None:
    """With lengths beyond the end of the file, and positions before its beginning and after its end."""
    data = encode_header(b"demo", 7, LogIdentity(store=bytes(16), database=1, number=1) if named else None)
    header = decode_header(data, "demo")
    link = header.link
    for length, synced, payload in frames:
        head = HEAD.pack(len(payload) if length is None else length, header.tag, synced)
        link = crc64(payload, crc64(head, link))
        data += head + payload + LINK.pack(link)
    data += tail
    with memory_limit(BOUND):
        for frame in find_frames(data, header):
            assert HEADER_BYTES <= frame.offset < frame.end <= len(data)
        try:
            end = LogEnd(salt=7, end=vouched[0], link=vouched[1]) if vouched is not None else None
            contents = scan(data, "demo", kind=b"demo", start=start, vouched=end)
            assert sum(map(len, contents.payloads)) <= len(data)
        except QuireError:
            pass
