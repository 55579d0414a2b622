"""The reader's verdict: clean, torn or corrupt, for every way in which bytes can be wrong."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quire.core.errors import Corruption, OutOfRange
from quire.durable.log_format import (
    HEADER_BYTES,
    OVERHEAD_BYTES,
    decode_header,
    encode_frames,
    encode_header,
    encode_mark,
)
from quire.durable.log_reader import LogEnd, find_frames, scan

SALT = 0x1122334455667789
GROUPS = st.lists(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=4), max_size=6)


def build(groups: list[list[bytes]], *, salt: int = SALT, closed: bool = False) -> tuple[bytes, list[int]]:
    """A log of groups with a sync after each, and the end of each group (preceded by the end of the header)."""
    data = encode_header(b"test", salt)
    header = decode_header(data, "built")
    link = header.link
    ends = [len(data)]
    for group in groups:
        frames, link = encode_frames(group, tag=header.tag, link=link, synced=len(data))
        data += frames
        ends.append(len(data))
    if closed:
        data += encode_mark(tag=header.tag, link=link, synced=len(data))[0]
    return data, ends


def flat(groups: list[list[bytes]]) -> list[bytes]:
    return [payload for group in groups for payload in group]


@given(groups=GROUPS, closed=st.booleans())
def test_a_log_reads_as_it_was_written(groups: list[list[bytes]], closed: bool) -> None:
    data, ends = build(groups, closed=closed)
    contents = scan(data, "x", kind=b"test")
    assert contents.payloads == flat(groups)
    assert (contents.end, contents.torn_bytes) == (len(data), 0)
    assert contents.ends_with_mark is closed
    assert contents.proven == (ends[-1] if closed else ends[-2] if groups else 0)


@given(groups=GROUPS, data=st.data())
def test_reading_can_start_at_any_frame(groups: list[list[bytes]], data: st.DataObject) -> None:
    log, _ = build(groups)
    complete = scan(log, "x")
    index = data.draw(st.integers(0, len(complete.offsets)))
    start = [*complete.offsets, complete.end][index]
    rest = scan(log, "x", start=start)
    assert rest.payloads == complete.payloads[index:]
    assert rest.link == complete.link


@given(groups=GROUPS.filter(bool), data=st.data())
def test_a_log_truncated_anywhere_yields_a_prefix(groups: list[list[bytes]], data: st.DataObject) -> None:
    log, _ = build(groups)
    size = data.draw(st.integers(HEADER_BYTES, len(log)))
    contents = scan(log[:size], "x")
    assert contents.payloads == flat(groups)[: len(contents.payloads)]
    assert contents.end + contents.torn_bytes == size
    assert contents.torn_bytes < OVERHEAD_BYTES + 60


@given(groups=GROUPS.filter(bool), closed=st.booleans(), flip=st.integers(1, 255), data=st.data())
def test_a_damaged_byte_is_corruption_if_synced_and_a_torn_tail_otherwise(
    groups: list[list[bytes]], closed: bool, flip: int, data: st.DataObject
) -> None:
    log, ends = build(groups, closed=closed)
    position = data.draw(st.integers(HEADER_BYTES, len(log) - 1))
    damaged = bytearray(log)
    damaged[position] ^= flip
    frame_starts = [*scan(log, "x").offsets, *([ends[-1]] if closed else [])]
    damaged_start = max(start for start in frame_starts if start <= position)
    # If a link was hit, the next frame has lost its seed as well, so only the frames after it can prove the damage.
    is_link = any(position in range(end - 8, end) for end in [*frame_starts[1:], len(log)])
    later_starts = [start for start in frame_starts if start > damaged_start][1 if is_link else 0 :]
    proofs = [max(end for end in ends if end <= start) for start in later_starts]
    if any(proof > damaged_start for proof in proofs):
        with pytest.raises(Corruption) as caught:
            scan(bytes(damaged), "some/path")
        assert caught.value.where["path"] == "some/path"
        assert caught.value.where["offset"] == damaged_start
        assert caught.value.where["bytes_lost"] > 0
        assert "quire kv repair" in caught.value.hint
    else:
        contents = scan(bytes(damaged), "x")
        assert contents.end == damaged_start
        assert contents.payloads == flat(groups)[: len(contents.payloads)]


@given(groups=GROUPS.filter(bool), data=st.data())
def test_bytes_that_the_caller_knows_to_be_durable_are_never_a_torn_tail(
    groups: list[list[bytes]], data: st.DataObject
) -> None:
    log, ends = build(groups)
    size = data.draw(st.integers(HEADER_BYTES, len(log) - 1))
    with pytest.raises(Corruption):
        scan(log[:size], "x", vouched=LogEnd(salt=SALT, end=ends[-1], link=0))


@given(groups=GROUPS.filter(bool), flip=st.integers(1, 255), data=st.data())
def test_a_damaged_end_is_corruption_if_the_end_is_recorded_elsewhere(
    groups: list[list[bytes]], flip: int, data: st.DataObject
) -> None:
    """Hazard: a flipped bit in the last record, or in the mark, dropped a synced write after a clean close."""
    log, _ = build(groups, closed=True)
    vouched = LogEnd(salt=SALT, end=len(log), link=scan(log, "x").link)
    assert scan(log, "x", vouched=vouched).payloads == flat(groups)
    damaged = bytearray(log)
    damaged[data.draw(st.integers(HEADER_BYTES, len(log) - 1))] ^= flip
    with pytest.raises(Corruption):
        scan(bytes(damaged), "x", vouched=vouched)


@given(groups=GROUPS.filter(bool), others=GROUPS.filter(bool))
def test_an_intact_log_that_is_not_the_recorded_one_is_rejected(
    groups: list[list[bytes]], others: list[list[bytes]]
) -> None:
    """The log of another database, or another history of the same one."""
    log, ends = build(groups)
    vouched = LogEnd(salt=SALT, end=ends[-1], link=scan(log, "x").link)
    with pytest.raises(Corruption, match="not the recorded log"):
        scan(build(groups, salt=SALT + 2)[0], "x", vouched=vouched)
    other, _ = build(others)
    if other[: ends[-1]] != log:
        with pytest.raises(Corruption):
            scan(other, "x", vouched=vouched)
    longer, _ = build([*groups, *others])
    assert scan(longer, "x", vouched=vouched).payloads == flat([*groups, *others])


@given(groups=GROUPS, tail=st.binary(max_size=200))
def test_garbage_or_zeros_after_the_end_are_a_torn_tail(groups: list[list[bytes]], tail: bytes) -> None:
    log, _ = build(groups)
    for garbage in (tail, bytes(len(tail))):
        contents = scan(log + garbage, "x")
        assert contents.payloads == flat(groups)
        assert contents.torn_bytes == len(garbage)


@given(groups=GROUPS, former=GROUPS.filter(bool), salt=st.integers(0, 2**64 - 1))
def test_frames_of_a_former_log_are_never_read(groups: list[list[bytes]], former: list[list[bytes]], salt: int) -> None:
    log, _ = build(groups)
    old, _ = build(former, salt=salt)
    assume(old[:HEADER_BYTES] != log[:HEADER_BYTES])
    assert scan(log + old[HEADER_BYTES:], "x").payloads == flat(groups)


@given(before=GROUPS, old=st.lists(st.binary(min_size=1, max_size=60), min_size=1), new=GROUPS.filter(bool))
def test_frames_after_a_truncation_are_never_read(
    before: list[list[bytes]], old: list[bytes], new: list[list[bytes]]
) -> None:
    """The second crash: the truncated group may reappear after the new frames, and must not be reported as
    corruption."""
    first, _ = build([*before, old])
    second, _ = build(before + new)
    assume(not first.startswith(second))
    assert scan(second + first[len(second) :], "x").payloads == flat(before + new)


@given(data=st.binary(max_size=300))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    header = encode_header(b"test", 3)
    contents = scan(header + data, "x")
    assert contents.end + contents.torn_bytes == len(header + data)


@given(groups=GROUPS, closed=st.booleans())
def test_frames_are_found_without_the_chain(groups: list[list[bytes]], closed: bool) -> None:
    log, _ = build(groups, closed=closed)
    header = decode_header(log, "x")
    frames = list(find_frames(log, header))
    assert [frame.payload for frame in frames if frame.payload] == flat(groups)
    assert list(find_frames(memoryview(log), header, HEADER_BYTES + 1)) == frames[1:]


def test_salvage_finds_the_frames_on_both_sides_of_a_hole() -> None:
    log, ends = build([[b"one"], [b"two"], [b"three"], [b"four"]])
    damaged = bytearray(log)
    damaged[ends[1] + 16] ^= 1
    frames = list(find_frames(bytes(damaged), decode_header(log, "x")))
    assert [frame.payload for frame in frames] == [b"one", b"three", b"four"]
    with pytest.raises(Corruption) as caught:
        scan(bytes(damaged), "x")
    assert caught.value.where["offset"] == ends[1]
    assert caught.value.where["bytes_lost"] == ends[2] - ends[1]


def test_a_start_outside_the_log_is_rejected() -> None:
    log, _ = build([[b"one"]])
    with pytest.raises(Corruption):
        scan(log, "x", start=len(log) + 1)
    with pytest.raises(OutOfRange):
        scan(log, "x", start=3)
