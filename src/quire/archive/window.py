"""The window: how far back an archive reaches, and which of its objects no restorable moment needs any more (A8).

Terms
  line      the newest owner epoch and its ancestors, newest first, each with the last log object that belongs to the line:
            objects that a deposed owner wrote after that are on no line
  oldest    the oldest complete base: all its parts exist, and the log from its first object on has no gap. The moment of the
            log object that names it is the oldest one that can be restored

Trimming keeps the newest base that is older than the window, and the log from its first object on. So every moment of the
window can be restored, and the newest base is always kept. So is the seal of each former epoch, because it fences an owner.
Files are kept if that base, or the log up to the object that names it, names them: files that are named later were found later,
and have higher numbers.

What is in the bucket after each step of a trim, and what follows if the owner dies there:
  parts of older bases gone   a log whose beginning no base needs      `oldest` skips bases without parts; trimmed again
  log objects gone            files that no event names                the same: the gaps are before the oldest base
  files gone                  what the window needs                    nothing is left to do

Threads: any. Reads only the bucket. Raises `Corruption`, and the object store's errors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator

import msgspec

from quire.archive.format import (
    NONE,
    ArtifactEvent,
    BaseEvent,
    Header,
    Kind,
    Position,
    archive_prefix,
    decode_object,
    log_key,
    parse_archive_key,
)
from quire.archive.log_reader import base_events, find, header_of, log_events
from quire.core.errors import Corruption
from quire.durable.object_names import epoch_prefix
from quire.objects.api import ObjectStore, list_objects


class EpochObjects(msgspec.Struct):
    """The archive objects of an owner epoch, with sizes in bytes."""

    logs: dict[int, int] = {}
    parts: dict[str, tuple[int, int]] = {}
    """Part of a base → (the log object with which its replay begins, size)."""
    files: dict[str, tuple[int, int]] = {}
    """File → (the log object that was due when the file was found, size)."""

    def objects(self) -> int:
        return len(self.logs) + len(self.parts) + len(self.files)

    def size_bytes(self) -> int:
        sizes = (size for listed in (self.parts, self.files) for _, size in listed.values())
        return sum(self.logs.values()) + sum(sizes)


class ArchiveListing(msgspec.Struct):
    """Every object of a store's archive."""

    store_id: str
    epochs: dict[int, EpochObjects] = {}
    foreign: dict[str, int] = {}
    """Objects whose names are not those of an archive, with their sizes."""

    def objects(self) -> int:
        return sum(epoch.objects() for epoch in self.epochs.values())

    def size_bytes(self) -> int:
        return sum(epoch.size_bytes() for epoch in self.epochs.values())


class Oldest(msgspec.Struct, frozen=True, kw_only=True):
    """The oldest moment that can be restored, and the base for it."""

    position: Position
    """The log object that names the base."""
    at_ms: int
    base: BaseEvent


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """How far back an archive reaches, for reports."""

    oldest_at_ms: int
    """0 if nothing can be restored."""
    newest_at_ms: int
    log_objects: int
    objects: int
    size_bytes: int
    abandoned: tuple[int, ...]
    """Owner epochs that are not on the line; their objects are not trimmed."""


def list_archive(store: ObjectStore, store_id: str) -> ArchiveListing:
    """List every object of a store's archive."""
    listing = ArchiveListing(store_id)
    for page in store.list_pages(archive_prefix(store_id)):
        for info in page:
            parsed = parse_archive_key(info.key)
            if parsed is None:
                listing.foreign[info.key] = info.size_bytes
                continue
            position, part = parsed
            epoch = listing.epochs.setdefault(position.epoch, EpochObjects())
            if part == "log":
                epoch.logs[position.number] = info.size_bytes
            elif part == "base":
                epoch.parts[info.key] = (position.number, info.size_bytes)
            else:
                epoch.files[info.key] = (position.number, info.size_bytes)
    return listing


class Line:
    """The log objects that lead to the newest state, epoch by epoch."""

    def __init__(self, store: ObjectStore, listing: ArchiveListing) -> None:
        self._store = store
        self._store_id = listing.store_id
        self._listing = listing
        self._headers: dict[Position, Header] = {}
        self.epochs: list[tuple[int, range]] = []
        """(epoch, gapless range of its log numbers), newest first."""
        epoch, bound = max((number for number, objects in listing.epochs.items() if objects.logs), default=0), NONE
        while epoch and epoch in listing.epochs and epoch not in dict(self.epochs):
            numbers = _last_run(listing.epochs[epoch].logs, bound)
            while numbers and self.header(epoch, numbers[-1]).kind is Kind.SEAL:  # several, if seals were put ahead
                numbers = _last_run(listing.epochs[epoch].logs, numbers[-1] - 1)
            self.epochs.append((epoch, numbers))
            if not numbers or numbers[0]:
                break
            parent = self.header(epoch, 0).parent
            epoch, bound = parent.epoch, parent.number

    def header(self, epoch: int, number: int) -> Header:
        """Return the header of a log object. Each is read once."""
        position = Position(epoch, number)
        if position not in self._headers:
            self._headers[position] = header_of(self._store, self._store_id, position)
        return self._headers[position]

    def oldest(self) -> Oldest | None:
        """Return the oldest moment that can be restored, or `None`."""
        for epoch, numbers in reversed(self.epochs):
            start = 0
            while (named := self._first_base(epoch, numbers, start)) is not None:
                if (oldest := self._whole(epoch, numbers, named)) is not None:
                    return oldest
                start = named - numbers[0] + 1
        return None

    def kept(self, before_ms: int) -> Oldest | None:
        """Return the newest base that is older than a moment, which trimming keeps. `None`: everything is needed."""
        for epoch, numbers in self.epochs:
            place = bisect_right(numbers, before_ms, key=lambda number: self.header(epoch, number).at_ms)
            base = self.header(epoch, numbers[place - 1]).base if place else NONE
            if base != NONE and base in numbers:
                return self._whole(epoch, numbers, base)
        return None

    def abandoned(self) -> tuple[int, ...]:
        """Return the owner epochs that have a log and are not on the line. A log without object 0 was trimmed, and does not
        count."""
        named = dict(self.epochs)
        return tuple(
            sorted(epoch for epoch, objects in self._listing.epochs.items() if 0 in objects.logs and epoch not in named)
        )

    def newest(self) -> Header | None:
        """Return the header of the newest log object, or `None`."""
        return next((self.header(epoch, numbers[-1]) for epoch, numbers in self.epochs if numbers), None)

    def whole(self, epoch: int, named: int) -> Oldest | None:
        """Return the base that a log object of the line names, if everything needed to restore it is listed."""
        return self._whole(epoch, dict(self.epochs)[epoch], named)

    def _first_base(self, epoch: int, numbers: range, start: int) -> int | None:
        """Return the first log object at or after index `start` that names a base. Found by bisection: the `base` of headers
        never decreases within an epoch."""

        def last_named(number: int) -> int:
            base = self.header(epoch, number).base
            return -1 if base == NONE else base

        wanted = numbers[0] + start - 1 if numbers else 0
        place = bisect_right(numbers, wanted, key=last_named)
        return last_named(numbers[place]) if place < len(numbers) else None

    def _whole(self, epoch: int, numbers: range, named: int) -> Oldest | None:
        """Return the base that a log object names, if everything needed to restore it is listed."""
        base = base_named(self._store, self._store_id, Position(epoch, named))
        parts = self._listing.epochs[epoch].parts
        if base.first_log not in numbers or any(key not in parts for key, _, _ in base.parts):
            return None
        return Oldest(position=Position(epoch, named), at_ms=self.header(epoch, named).at_ms, base=base)


def _last_run(logs: Collection[int], bound: int) -> range:
    """Return the last gapless run of numbers up to `bound`. An interrupted trim leaves gaps at the beginning of a log."""
    end = max((number for number in logs if number <= bound), default=-1)
    first = end
    while first - 1 in logs:
        first -= 1
    return range(first, end + 1) if end >= 0 else range(0)


def base_named(store: ObjectStore, store_id: str, position: Position) -> BaseEvent:
    """Return the base that a log object names."""
    key = log_key(store_id, position)
    bases = [event for event in decode_object(store.get(key), key)[1] if isinstance(event, BaseEvent)]
    if not bases:
        raise Corruption("the log object does not name a base", key=key)
    return bases[-1]


def reach(store: ObjectStore, store_id: str) -> Reach:
    """Return how far back a store's archive reaches, and its size."""
    listing = list_archive(store, store_id)
    line = Line(store, listing)
    oldest, newest = line.oldest(), line.newest()
    return Reach(
        oldest_at_ms=oldest.at_ms if oldest is not None else 0,
        newest_at_ms=newest.at_ms if newest is not None else 0,
        log_objects=sum(len(numbers) for _, numbers in line.epochs),
        objects=listing.objects(),
        size_bytes=listing.size_bytes(),
        abandoned=line.abandoned(),
    )


# ── trimming ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class TrimPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Objects of an archive that no moment of the window needs. They are deleted in the order parts, logs, files."""

    parts: list[str]
    logs: list[str]
    files: list[str]
    size_bytes: int


def plan_trim(store: ObjectStore, listing: ArchiveListing, kept: Oldest, ancestors: Collection[int]) -> TrimPlan:
    """Return what can be deleted if `kept` is the oldest base that is kept. `ancestors`: the owner epochs before the current
    one in the manifest; other epochs may belong to another owner."""
    parts: list[str] = []
    logs: list[str] = []
    files: list[tuple[str, int]] = []
    size = 0
    first = Position(kept.position.epoch, kept.base.first_log)
    for epoch in sorted({*(ancestor for ancestor in ancestors if ancestor < first.epoch), first.epoch}):
        objects = listing.epochs.get(epoch)
        if objects is None:
            continue
        old_parts = [(key, taken) for key, (number, taken) in objects.parts.items() if Position(epoch, number) < first]
        # Without its seals, an owner that was suspended for longer than the window would continue to acknowledge writes.
        seals = _seals(store, listing.store_id, epoch, objects.logs) if epoch < first.epoch else ()
        old_logs = sorted(number for number in objects.logs if Position(epoch, number) < first and number not in seals)
        files += [(key, taken) for key, (number, taken) in objects.files.items() if Position(epoch, number) < first]
        parts += [key for key, _ in old_parts]
        logs += [log_key(listing.store_id, Position(epoch, number)) for number in old_logs]
        size += sum(taken for _, taken in old_parts) + sum(objects.logs[number] for number in old_logs)
    if files:
        named = set(files_of(store, listing.store_id, kept))
        files = [(key, taken) for key, taken in files if key not in named]
    size += sum(taken for _, taken in files)
    return TrimPlan(parts=parts, logs=logs, files=[key for key, _ in files], size_bytes=size)


def _seals(store: ObjectStore, store_id: str, epoch: int, logs: Collection[int]) -> set[int]:
    """Return the numbers of the seals at the end of an epoch's log: one, or more if a takeover put seals ahead."""
    seals = set()
    for number in sorted(logs, reverse=True):
        if header_of(store, store_id, Position(epoch, number)).kind is not Kind.SEAL:
            break
        seals.add(number)
    return seals


def files_of(store: ObjectStore, store_id: str, kept: Oldest) -> Iterator[str]:
    """Yield the files named by a base, or by the log up to the object that names the base."""
    first = Position(kept.position.epoch, kept.base.first_log)
    for events in base_events(store, kept.base):
        yield from (event.key for event in events if isinstance(event, ArtifactEvent))
    for _, _, events in log_events(store, store_id, first, kept.position):
        yield from (event.key for event in events if isinstance(event, ArtifactEvent))


# ── abandoned epochs ──────────────────────────────────────────────────────────────────────────────────────────────────
class AbandonedEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """An owner epoch that is not in the newest owner's history: the store was restored to a moment before it."""

    owner_epoch: int
    objects: int
    """Objects of its archive and of its databases."""
    size_bytes: int
    ended_at_ms: int
    """Time of its owner's last log object."""


def abandoned_epochs(store: ObjectStore, store_id: str) -> list[AbandonedEpoch]:
    """Return the abandoned owner epochs of a store, oldest first. Reads only the bucket."""
    listing = list_archive(store, store_id)
    line = Line(store, listing)
    abandoned = []
    for epoch in line.abandoned():
        objects = listing.epochs[epoch]
        put = list(list_objects(store, epoch_prefix(store_id, epoch)))
        headers = (line.header(epoch, number) for number in sorted(objects.logs, reverse=True))
        abandoned.append(
            AbandonedEpoch(
                owner_epoch=epoch,
                objects=objects.objects() + len(put),
                size_bytes=objects.size_bytes() + sum(info.size_bytes for info in put),
                ended_at_ms=next((header.at_ms for header in headers if header.kind is not Kind.SEAL), 0),
            )
        )
    return abandoned


def keys_in_order(objects: EpochObjects, store_id: str, epoch: int) -> list[str]:
    """Return the objects of an epoch's archive in the order of deletion, the log last: after an interruption, the epoch is
    still found by its log."""
    logs = [log_key(store_id, Position(epoch, number)) for number in sorted(objects.logs)]
    return [*objects.files, *objects.parts, *logs]


# ── restorable range ──────────────────────────────────────────────────────────────────────────────────────────────────
class RestorableRange(msgspec.Struct, frozen=True, kw_only=True):
    """The oldest and the newest moment to which a store can be restored."""

    newest: Position
    newest_at_ms: int
    oldest: Position
    oldest_at_ms: int


def restorable_range(store: ObjectStore, store_id: str) -> RestorableRange:
    """Return the newest and the oldest restorable moment on a store's line. Abandoned epochs do not count."""
    newest = find(store, store_id)
    oldest = Line(store, list_archive(store, store_id)).oldest()
    return RestorableRange(
        newest=newest.position,
        newest_at_ms=newest.at_ms,
        oldest=oldest.position if oldest is not None else newest.position,
        oldest_at_ms=oldest.at_ms if oldest is not None else newest.at_ms,
    )
