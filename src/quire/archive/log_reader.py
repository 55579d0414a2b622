"""Navigates an archive: finds the last object of an epoch, the object of a moment, and the base that it needs (A4, A10).

Nothing is written. What is read is checked: each log object contains the digest of the one before it.

A damaged log object ends what can be restored after its base: every later object needs it. Moments before it do not, so none of
the searches for a moment fails because of it.

Threads: any; there is no state. Raises `NotFound`, `Corruption`, and the object store's errors.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import msgspec

from quire.archive.format import (
    HEADER_BYTES,
    HELPED_BY,
    NONE,
    AnyEvent,
    BaseEvent,
    BreakEvent,
    Header,
    Kind,
    Position,
    archive_prefix,
    decode_header,
    decode_object,
    log_key,
    parse_log_key,
    part_prefix,
)
from quire.core.background import thread_pool
from quire.core.errors import Corruption, InvalidInput, ObjectNotFound, OutOfRange, QuireError
from quire.core.events import emit
from quire.objects.api import ObjectStore

STORE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Other prefixes of a bucket are backups, objects of older stores, or unrelated."""
EPOCH = re.compile(r"[0-9a-f]{8}")
"""Other prefixes of an archive are not ours."""


class RestorePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A state that can be restored, and the objects needed."""

    store_id: str
    position: Position
    """The last log object to apply."""
    at_ms: int
    base: BaseEvent
    newest: Position
    """The newest log object of the epoch. Objects in between are not restorable, or were not requested."""
    damaged: tuple[Position, ...] = ()
    """Objects after `position` that were requested and are damaged."""
    abandoned: Position | None = None
    """A newer state at the requested time, which is not in the newest owner's history (`find_abandoned`)."""
    abandoned_at_ms: int = 0


def store_ids(store: ObjectStore) -> list[str]:
    """Return the ids of the stores with objects in this bucket."""
    names = (prefix.strip("/") for prefix in store.list_prefixes(""))
    return [name for name in names if STORE_ID.fullmatch(name)]


def epochs(store: ObjectStore, store_id: str) -> list[int]:
    """Return the owner epochs that have an archive, oldest first."""
    names = (prefix.rstrip("/").rsplit("/", 1)[-1] for prefix in store.list_prefixes(archive_prefix(store_id)))
    return sorted(int(name, 16) for name in names if EPOCH.fullmatch(name))


def log_positions(store: ObjectStore, store_id: str, epoch: int, *, after: Position | None = None) -> list[Position]:
    """List the log objects of an epoch, optionally only those after a position."""
    start = log_key(store_id, after) if after is not None else ""
    positions = []
    for page in store.list_pages(part_prefix(store_id, epoch, "log"), start_after=start):
        positions += [position for info in page if (position := parse_log_key(info.key)) is not None]
    return positions


class OwnerLog(msgspec.Struct, frozen=True, kw_only=True):
    """The log of an owner epoch, as it is listed."""

    positions: list[Position]
    """The objects that the owner has put."""
    seal: Header | None
    """The first seal after them. If it leaves a gap of numbers, a takeover is in progress (sealing.py), and the owner may still
    use those numbers."""


def owner_log(store: ObjectStore, store_id: str, epoch: int) -> OwnerLog:
    """Return the log objects of an epoch and its first seal. An owner puts nothing after a seal. A damaged object counts as the
    owner's."""
    positions, seal = log_positions(store, store_id, epoch), None
    while positions and (header := _readable_header(store, store_id, positions[-1])) and header.kind is Kind.SEAL:
        seal = header
        positions.pop()
    return OwnerLog(positions=positions, seal=seal)


def read_object(store: ObjectStore, store_id: str, position: Position) -> tuple[Header, bytes, list[AnyEvent]]:
    """Return (header, digest, events) of a log object."""
    key = log_key(store_id, position)
    data = store.get(key)
    header, events = decode_object(data, key)
    return header, hashlib.sha256(data).digest(), events


def digest_of(store: ObjectStore, store_id: str, position: Position) -> bytes:
    """Return the SHA-256 of a log object, which the next one contains. The object may be damaged."""
    return hashlib.sha256(store.get(log_key(store_id, position))).digest()


def header_of(store: ObjectStore, store_id: str, position: Position) -> Header:
    """Return the header of a log object."""
    key = log_key(store_id, position)
    try:
        begin = store.get_range(key, 0, HEADER_BYTES)
    except OutOfRange:  # the object is shorter than a header
        begin = b""
    header = decode_header(begin, key)
    if header.position != position:
        raise Corruption("an archive object has the wrong name", key=key, says=str(header.position))
    return header


def _readable_header(store: ObjectStore, store_id: str, position: Position) -> Header | None:
    try:
        return header_of(store, store_id, position)
    except Corruption:
        return None


def no_archive(store: ObjectStore) -> ObjectNotFound:
    """Return the error for a bucket without an archive of the store."""
    hint = "check the URL, or run `quire archive on` on the store first"
    return ObjectNotFound("this bucket has no archive of the store", hint=hint, store=store.url)


def find(
    store: ObjectStore,
    store_id: str,
    at_ms: int | None = None,
    *,
    epoch: int | None = None,
    upto: Position | None = None,
) -> RestorePoint:
    """Return the newest state that can be restored, or the newest one not after `at_ms`.

    It is a state of the newest owner or of the owners before it, from which it continued; of `epoch` instead, if that is given.
    `upto`: no state after this log object.
    """
    archived_epochs = epochs(store, store_id)
    if not archived_epochs:
        raise no_archive(store)
    if epoch is not None and epoch not in archived_epochs:
        hint = f"the archive has the owner epochs {', '.join(map(str, archived_epochs))}"
        raise ObjectNotFound("this bucket has no archive of that owner epoch", hint=hint, owner_epoch=epoch)
    bound = upto
    current = archived_epochs[-1] if epoch is None else epoch
    while current:
        usable = owner_log(store, store_id, current).positions
        if bound is not None:
            usable = [position for position in usable if position <= bound]
        parent: Position | None = None
        if usable:
            index, damaged = _newest_not_after(store, store_id, usable, at_ms)
            if index is not None:
                header = header_of(store, store_id, usable[index])
                # Trimming removes the beginning of a log: both the object that names the base and the one with which
                # its replay begins must still be there.
                if header.restorable != NONE and header.base >= usable[0].number:
                    point = _point(store, store_id, Position(current, header.restorable), usable[-1], damaged)
                    if point.base.first_log >= usable[0].number:
                        return point
            if usable[0].number:
                break  # trimmed: earlier objects are out of the window
            # What the owner before has put after this object is not part of the history.
            try:
                parent = bound = header_of(store, store_id, usable[0]).parent
            except Corruption:
                if at_ms is None:
                    raise
                # Where the history continues is not known. The owner before had the state that is looked for at that moment,
                # even if it was abandoned later.
        current = (
            parent.epoch
            if parent is not None
            else max((older for older in archived_epochs if older < current), default=0)
        )
    what = (
        "nothing in this archive can be restored yet"
        if at_ms is None
        else "the archive does not reach back to that moment"
    )
    raise InvalidInput(what, hint="`quire archive status` shows the oldest moment", store=store.url)


def find_intact(
    store: ObjectStore,
    store_id: str,
    at_ms: int | None = None,
    *,
    epoch: int | None = None,
    upto: Position | None = None,
) -> RestorePoint:
    """Return what `find` returns, or the newest state before it whose last log object is not damaged."""
    point = find(store, store_id, at_ms, epoch=epoch, upto=upto)
    newest, damaged = point.newest, point.damaged
    while True:
        try:
            read_object(store, store_id, point.position)
        except Corruption as error:
            if not point.position.number:
                raise  # it alone names the object before it
            damaged = (point.position, *damaged)
            before = Position(point.position.epoch, point.position.number - 1)
            try:
                point = find(store, store_id, at_ms, epoch=point.position.epoch, upto=before)
            except InvalidInput:
                raise error from None  # nothing before it can be restored
        else:
            return msgspec.structs.replace(point, newest=newest, damaged=damaged)


def find_abandoned(store: ObjectStore, at_ms: int, chosen: RestorePoint) -> RestorePoint | None:
    """Return the state that the store had at a moment, if `chosen`, which `find` returned for it, is an older one.

    The store was then restored to an earlier moment and taken over there: the newest owner's history does not contain what was
    archived in between.
    """
    newest = chosen
    for epoch in epochs(store, chosen.store_id):
        if epoch >= chosen.position.epoch:
            with suppress(InvalidInput, Corruption):
                point = find_intact(store, chosen.store_id, at_ms, epoch=epoch)
                newest = point if point.at_ms > newest.at_ms else newest
    return None if newest is chosen else newest


def _newest_not_after(
    store: ObjectStore, store_id: str, positions: list[Position], at_ms: int | None
) -> tuple[int | None, tuple[Position, ...]]:
    """Return the index of the last object that was cut at or before a moment, and the damaged objects that were passed over.
    Times in the headers of an epoch never fall."""

    def time_of(index: int) -> int:
        while index >= 0:
            if (header := _readable_header(store, store_id, positions[index])) is not None:
                return header.at_ms
            index -= 1  # a damaged object is not older than the one before it
        return 0

    last = len(positions) if at_ms is None else bisect_right(range(len(positions)), at_ms, key=time_of)
    index = last
    while index and _readable_header(store, store_id, positions[index - 1]) is None:
        index -= 1
    return index - 1 if index else None, tuple(positions[index:last])


def _point(
    store: ObjectStore, store_id: str, position: Position, newest: Position, damaged: tuple[Position, ...]
) -> RestorePoint:
    header = header_of(store, store_id, position)
    base = base_named(store, store_id, Position(position.epoch, header.base))
    return RestorePoint(
        store_id=store_id, position=position, at_ms=header.at_ms, base=base, newest=newest, damaged=damaged
    )


AHEAD = 3
"""Objects that are read and decompressed ahead of the one that is applied; an object has at most 32 MiB of events."""

Wanted = TypeVar("Wanted")
Read = TypeVar("Read")


def _ahead(read: Callable[[Wanted], Read], wanted: Iterable[Wanted]) -> Iterator[Read]:
    """Yield `read` of each item in order, reading a few ahead: requests overlap, and digests and zstd release the GIL."""
    with thread_pool(AHEAD, "quire-archive-read") as pool:
        under_way: deque[Future[Read]] = deque()
        for one in wanted:
            under_way.append(pool.submit(read, one))
            if len(under_way) >= AHEAD:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


def base_named(store: ObjectStore, store_id: str, position: Position) -> BaseEvent:
    """Return the base that a log object names."""
    key = log_key(store_id, position)
    # A base that began earlier may be named in the same object; the last one counts.
    bases = [event for event in decode_object(store.get(key), key)[1] if isinstance(event, BaseEvent)]
    if not bases:
        raise Corruption("the log object does not name a base", key=key)
    return bases[-1]


def with_base_before(store: ObjectStore, point: RestorePoint, error: QuireError) -> RestorePoint:
    """Return the same state with the base before, which needs more of the log. Raises `error` if it is not about a part of the
    point's base, or if there is no such base.

    The log after a base contains everything that the next base does, unless the chain of changes was broken in between.
    """
    if error.where.get("key") not in {key for key, _, _ in point.base.parts}:
        raise error
    epoch, is_passed = point.position.epoch, False
    try:
        named = header_of(store, point.store_id, point.position).base
        while True:
            base = base_named(store, point.store_id, Position(epoch, named))
            if is_passed:
                break
            is_passed = base == point.base
            named = header_of(store, point.store_id, Position(epoch, named - 1)).base if named else NONE
            if named == NONE:
                raise error
        for header, _, events in log_events(store, point.store_id, Position(epoch, base.first_log), point.position):
            if header.position.number > named and not is_continuous(header, events):
                raise error
    except (Corruption, ObjectNotFound):
        raise error from None
    emit("warning", "archive.base_passed_over", key=error.where["key"], error=str(error))
    return msgspec.structs.replace(point, base=base)


def base_events(store: ObjectStore, base: BaseEvent) -> Iterator[list[AnyEvent]]:
    """Yield the events of a base, part by part."""

    def read(part: tuple[str, int, bytes]) -> list[AnyEvent]:
        key, size, digest = part  # as given in the log
        try:
            data = store.get_verified(key, size_bytes=size, sha256=digest)
        except ObjectNotFound:
            raise ObjectNotFound("a part of the archive's base is missing", hint=HELPED_BY, key=key) from None
        return decode_object(data, key)[1]

    yield from _ahead(read, base.parts)


def is_continuous(header: Header, events: list[AnyEvent]) -> bool:
    """Return whether an object contains every change since the one before it. After a break, only a base does."""
    return header.restorable == header.position.number and not any(isinstance(event, BreakEvent) for event in events)


def log_events(
    store: ObjectStore, store_id: str, first: Position, last: Position
) -> Iterator[tuple[Header, bytes, list[AnyEvent]]]:
    """Yield (header, digest, events) of log objects in order, each checked against the one before."""

    def read(number: int) -> tuple[int, str, bytes, Header, list[AnyEvent]]:
        key = log_key(store_id, Position(first.epoch, number))
        try:
            data = store.get(key)
        except ObjectNotFound:  # in a replica of the bucket it may arrive later
            what = "an object is missing in the middle of the archive's log"
            raise ObjectNotFound(what, hint="wait for it, or restore an earlier moment with --at", key=key) from None
        return number, key, hashlib.sha256(data).digest(), *decode_object(data, key)

    before: bytes | None = None
    for number, key, digest, header, events in _ahead(read, range(first.number, last.number + 1)):
        if header.position.number != number or (before is not None and header.parent_digest != before):
            raise Corruption(
                "the archive's log is not a single chain", hint="restore an earlier moment with --at", key=key
            )
        before = digest
        yield header, digest, events
