"""Reads a framed append log and determines how it ends: clean, torn, or corrupt.

Terms
  cut     where the walk from the header stops: the end of the last frame that is valid after its predecessor
  vouched a durable end that the log's user recorded outside the file: salt, offset, and the link at that offset
  proven  how many leading bytes are known to have been durable: the largest of the vouched end and the `synced` of every
          valid frame, *also of frames after the cut*
  torn    the bytes from the cut to the end of the file, when the cut is at or beyond `proven`

Rules (the verdict, P3 and P4)
  1. cut = size of the file: clean.
  2. cut ≥ proven: a torn tail. The writer died; nothing after the cut was ever acknowledged as durable.
  3. cut < proven: `Corruption`. A sync that covered the bad bytes had succeeded, so no crash explains them.
  4. Frames after the cut are never delivered, whatever they contain.
  5. A log of another life than the vouched one, or with another link at the vouched end, is `Corruption`: the log is intact,
     but it is not the one that was acknowledged (an old copy, or another file). Links are chained, so the vouched link
     covers every byte before it.

Why rule 3 raises no false alarm: a frame has `synced` = S only after a sync of the first S bytes returned. If it is
valid, it was written with this salt; the bytes below S were durable then and are never rewritten, except by the
recovery of a torn tail, which cuts at or above every S that it finds and syncs before it writes. A frame left from before
such a recovery therefore proves nothing that is not still true. Why rule 2 may be silent: power loss keeps, drops or
garbles any unsynced sector, so a bad frame followed by good ones is normal in the last, unsynced group.
What the file alone cannot show: damage to the *last* synced group, if nothing was written after it, looks like a torn tail.
A closing mark moves that gap to the mark itself; only an end recorded elsewhere, passed as `vouched`, closes it.

Threads: any; pure functions over bytes. Format page: `docs/formats/framed-log.md`.
Raises `Corruption` (path, offset, bytes_lost), `FormatTooNew`, `WrongKind`, and what reading the file raises.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.core.errors import Corruption, OutOfRange
from quire.durable.checksums import Bytes, crc64
from quire.durable.files import Disk, File, read_all
from quire.durable.log_format import (
    HEAD,
    HEAD_BYTES,
    HEADER_BYTES,
    LINK,
    LINK_BYTES,
    OVERHEAD_BYTES,
    PAYLOAD_BYTES_MAX,
    TAG_OFFSET,
    LogHeader,
    decode_header,
)


class LogEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A durable end of a log, to be recorded outside the file. It remains valid as the log grows."""

    salt: int
    end: int
    link: int


class LogContents(msgspec.Struct, frozen=True, kw_only=True):
    """The records of a log up to the cut, in order, and how the log ended."""

    path: str
    header: LogHeader
    payloads: list[bytes]
    offsets: list[int]
    """Where each payload's frame starts: valid as `start` of a later read; errors should name it."""
    end: int
    """The cut: where the next frame is appended."""
    link: int
    """The link that seeds the next frame."""
    proven: int
    """How many leading bytes of the file are known to have been durable."""
    torn_bytes: int
    """Bytes after the cut, left by a writer that died; 0 for a clean end."""
    ends_with_mark: bool
    """Whether the last frame is a mark that covers everything before it: the writer was closed."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One valid frame, found independently of the chain."""

    offset: int
    end: int
    synced: int
    payload: bytes


def read_log(disk: Disk, path: str, *, kind: bytes | None = None, vouched: LogEnd | None = None) -> LogContents:
    """Read the log at `path`; see `scan`."""
    return scan(read_all(disk, path), path, kind=kind, vouched=vouched)


def scan(
    data: bytes, path: str, *, kind: bytes | None = None, start: int = 0, vouched: LogEnd | None = None
) -> LogContents:
    """Return the records of a log from the frame at `start` on, after applying rules 1 to 5.

    `start` is a frame's offset or an end from an earlier read, or 0 for all records: replay after a snapshot need not begin at
    the header. `vouched` is an end that the caller recorded elsewhere.
    """
    header = decode_header(data, path, kind)
    start = start or header.size
    if start < header.size:
        raise OutOfRange("frames start after the header", start=start, min=header.size)
    if vouched is not None and vouched.salt != header.salt:
        raise _corruption(path, "this is not the recorded log", offset=0, lost=len(data))
    if start > len(data):
        raise _corruption(path, "the log ends before the requested offset", offset=len(data), lost=start - len(data))
    payloads: list[bytes] = []
    offsets: list[int] = []
    cut, link, proven, last_is_mark = _walk(data, header.tag, start, payloads, offsets)
    if vouched is not None:
        proven = max(proven, vouched.end)
    if cut < len(data):
        # Every valid frame after the cut counts, although none is delivered: its `synced` was true when it was written.
        for frame in find_frames(data, header, cut + 1):
            proven = max(proven, frame.synced)
            if proven > cut:
                break
    if cut < proven:
        resumed = next((frame.offset for frame in find_frames(data, header, cut + 1)), max(len(data), proven))
        raise _corruption(path, "a record that had been synced is damaged", offset=cut, lost=resumed - cut)
    if vouched is not None and not _has_link(data, vouched, header.size):
        raise _corruption(path, "the log's records are not the recorded ones", offset=vouched.end, lost=vouched.end)
    return LogContents(
        path=path,
        header=header,
        payloads=payloads,
        offsets=offsets,
        end=cut,
        link=link,
        proven=proven,
        torn_bytes=len(data) - cut,
        ends_with_mark=last_is_mark,
    )


def read_on(file: File, header: LogHeader, end: int) -> tuple[list[bytes], list[int], int]:
    """Return the records appended since `end`, a previously read end; their offsets; and the new end.

    For readers concurrent with the writer: an incomplete frame counts as not yet written, and no verdict is given.
    """
    head = file.read_at(HEAD_BYTES, end)
    if len(head) < HEAD_BYTES or HEAD.unpack(head)[1] != header.tag:
        return [], [], end
    # The link before `end` seeds the checksum of the first new frame.
    start = end - LINK_BYTES
    payloads: list[bytes] = []
    offsets: list[int] = []
    data = file.read_at(max(file.size() - start, 0), start)
    cut, _, _, _ = _walk(data, header.tag, LINK_BYTES, payloads, offsets, base=start)
    return payloads, [start + offset for offset in offsets], start + cut


def find_frames(data: Bytes, header: LogHeader, start: int = HEADER_BYTES) -> Iterator[Frame]:
    """Yield every frame at or after `start` that is valid on its own (see `log_format`), whatever surrounds it.

    For verdicts and for salvage: a frame after the cut was written once, but is not part of the log.
    """
    view = memoryview(data)
    raw = data if isinstance(data, bytes) else bytes(data)
    tag = header.tag.to_bytes(4, "little")
    position = max(start, header.size)
    while (tag_at := raw.find(tag, position + TAG_OFFSET)) >= 0:
        position = tag_at - TAG_OFFSET
        frame = _frame_at(raw, view, position)
        if frame is not None:
            yield frame
            position = frame.end
        else:
            position += 1


def _walk(
    data: bytes, tag: int, offset: int, payloads: list[bytes], offsets: list[int], *, base: int = 0
) -> tuple[int, int, int, bool]:
    """Follow the chain from `offset`, filling the lists; return (cut, link, proven, whether the last frame is a full mark).

    `base` is the offset in the file at which `data` begins.
    """
    size = len(data)
    view = memoryview(data)
    # Locals, because this loop accounts for all of replay's cost.
    crc, unpack_head, unpack_link = crc64, HEAD.unpack_from, LINK.unpack_from
    add_payload, add_offset = payloads.append, offsets.append
    (link,) = unpack_link(data, offset - LINK_BYTES)
    synced = 0
    last_is_mark = False
    last_start = size - OVERHEAD_BYTES
    while offset <= last_start:
        length, found_tag, claimed = unpack_head(data, offset)
        body = offset + HEAD_BYTES
        end = body + length
        if found_tag != tag or end > size - LINK_BYTES or length > PAYLOAD_BYTES_MAX:
            break
        (found_link,) = unpack_link(data, end)
        if crc(view[offset:end], link) != found_link or not HEADER_BYTES <= claimed <= offset + base:
            break
        # Not the maximum: along a chain `synced` only rises.
        synced = claimed
        link = found_link
        if length:
            add_offset(offset)
            add_payload(data[body:end])
            last_is_mark = False
        else:
            last_is_mark = synced == offset + base
        offset = end + LINK_BYTES
    return offset, link, synced, last_is_mark


def _has_link(data: bytes, vouched: LogEnd, first: int) -> bool:
    """Return whether the eight bytes before the vouched end are the vouched link. REQUIRES that the file contains them."""
    return vouched.end >= first and LINK.unpack_from(data, vouched.end - LINK_BYTES)[0] == vouched.link


def _frame_at(data: bytes, view: memoryview, offset: int) -> Frame | None:
    if offset + OVERHEAD_BYTES > len(data):
        return None
    length, _, synced = HEAD.unpack_from(data, offset)
    end = offset + HEAD_BYTES + length
    if length > PAYLOAD_BYTES_MAX or end + LINK_BYTES > len(data) or not HEADER_BYTES <= synced <= offset:
        return None
    (before,) = LINK.unpack_from(data, offset - LINK_BYTES)
    (link,) = LINK.unpack_from(data, end)
    if crc64(view[offset:end], before) != link:
        return None
    return Frame(offset=offset, end=end + LINK_BYTES, synced=synced, payload=data[offset + HEAD_BYTES : end])


def _corruption(path: str, what: str, *, offset: int, lost: int) -> Corruption:
    hint = "`quire kv repair` shows what can be recovered"
    return Corruption(what, hint=hint, path=path, offset=offset, bytes_lost=lost)
