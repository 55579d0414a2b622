"""How far back an archive reaches, and which of its objects no restorable moment needs any more (A8).

Terms
  line      the owner epochs that the newest one came from, itself first, each with the last log object that belongs to it:
            what a deposed owner wrote after that is on no line
  oldest    the oldest base that is whole: its parts are there, and the log from its first object on has no gap. The moment of
            the log object that names it is the oldest one that can be restored

Trimming keeps the newest base that is older than the window, and the log from its first object on. So every moment of the
window can be restored, and the newest base always stays. So does the seal of each former epoch: it is what fences an owner.
Files are kept if that base, or the log up to the object that names it, names them: whatever is named later was met later, and
has a higher number.

What is in the bucket after each step of a trim, and what comes next if the owner dies there:
  parts of older bases gone   a log whose beginning no base needs      `oldest` passes over bases without parts; trimmed again
  log objects gone            files that no event names                the same: the gaps lie before the oldest base
  files gone                  what the window needs                    nothing is left to do

Reads nothing but the bucket. Any thread. Raises `Corruption`, and what the object store raises.
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
    """What an owner epoch has in the bucket, with sizes."""

    logs: dict[int, int] = {}
    parts: dict[str, tuple[int, int]] = {}
    """Part of a base → (the log object that its replay begins with, size)."""
    files: dict[str, tuple[int, int]] = {}
    """File → (the log object that was due when it was met, size)."""

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
    """Names that no archive has, with their sizes."""

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
    """How far back an archive reaches, for people."""

    oldest_at_ms: int
    """0: nothing can be restored."""
    newest_at_ms: int
    log_objects: int
    objects: int
    size_bytes: int
    abandoned: tuple[int, ...]
    """Owner epochs that are on no line: nothing of them is trimmed."""


def list_archive(store: ObjectStore, store_id: str) -> ArchiveListing:
    """One listing of everything below a store's archive."""
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
        """(epoch, numbers of its log objects without a gap), the newest first."""
        epoch, bound = max((number for number, objects in listing.epochs.items() if objects.logs), default=0), NONE
        while epoch and epoch in listing.epochs and epoch not in dict(self.epochs):
            numbers = _last_run(listing.epochs[epoch].logs, bound)
            while numbers and self.header(epoch, numbers[-1]).kind is Kind.SEAL:  # several, of a takeover that was hard
                numbers = _last_run(listing.epochs[epoch].logs, numbers[-1] - 1)
            self.epochs.append((epoch, numbers))
            if not numbers or numbers[0]:
                break
            parent = self.header(epoch, 0).parent
            epoch, bound = parent.epoch, parent.number

    def header(self, epoch: int, number: int) -> Header:
        """The header of a log object; each is read once."""
        position = Position(epoch, number)
        if position not in self._headers:
            self._headers[position] = header_of(self._store, self._store_id, position)
        return self._headers[position]

    def oldest(self) -> Oldest | None:
        """The oldest moment that can be restored."""
        for epoch, numbers in reversed(self.epochs):
            start = 0
            while (named := self._first_base(epoch, numbers, start)) is not None:
                if (oldest := self._whole(epoch, numbers, named)) is not None:
                    return oldest
                start = named - numbers[0] + 1
        return None

    def kept(self, before_ms: int) -> Oldest | None:
        """The newest base that is older than a moment: what trimming keeps. `None`: everything is needed."""
        for epoch, numbers in self.epochs:
            place = bisect_right(numbers, before_ms, key=lambda number: self.header(epoch, number).at_ms)
            base = self.header(epoch, numbers[place - 1]).base if place else NONE
            if base != NONE and base in numbers:
                return self._whole(epoch, numbers, base)
        return None

    def abandoned(self) -> tuple[int, ...]:
        """The owner epochs that have a log and are on no line. Of one that was trimmed the beginning is gone."""
        named = dict(self.epochs)
        return tuple(
            sorted(epoch for epoch, objects in self._listing.epochs.items() if 0 in objects.logs and epoch not in named)
        )

    def newest(self) -> Header | None:
        """The newest log object."""
        return next((self.header(epoch, numbers[-1]) for epoch, numbers in self.epochs if numbers), None)

    def whole(self, epoch: int, named: int) -> Oldest | None:
        """The base that a log object of the line names, if everything that its restore needs is listed."""
        return self._whole(epoch, dict(self.epochs)[epoch], named)

    def _first_base(self, epoch: int, numbers: range, start: int) -> int | None:
        """The first log object from a place on that names a base: `base` of headers never falls within an epoch."""

        def last_named(number: int) -> int:
            base = self.header(epoch, number).base
            return -1 if base == NONE else base

        wanted = numbers[0] + start - 1 if numbers else 0
        place = bisect_right(numbers, wanted, key=last_named)
        return last_named(numbers[place]) if place < len(numbers) else None

    def _whole(self, epoch: int, numbers: range, named: int) -> Oldest | None:
        """The base that a log object names, if everything that its restore needs is listed."""
        base = base_named(self._store, self._store_id, Position(epoch, named))
        parts = self._listing.epochs[epoch].parts
        if base.first_log not in numbers or any(key not in parts for key, _, _ in base.parts):
            return None
        return Oldest(position=Position(epoch, named), at_ms=self.header(epoch, named).at_ms, base=base)


def _last_run(logs: Collection[int], bound: int) -> range:
    """The numbers up to a bound that end without a gap: a trim that was killed leaves gaps at the beginning."""
    end = max((number for number in logs if number <= bound), default=-1)
    first = end
    while first - 1 in logs:
        first -= 1
    return range(first, end + 1) if end >= 0 else range(0)


def base_named(store: ObjectStore, store_id: str, position: Position) -> BaseEvent:
    """The base that a log object names."""
    key = log_key(store_id, position)
    bases = [event for event in decode_object(store.get(key), key)[1] if isinstance(event, BaseEvent)]
    if not bases:
        raise Corruption("the object that should name a base does not", key=key)
    return bases[-1]


def reach(store: ObjectStore, store_id: str) -> Reach:
    """How far back a store's archive reaches, and how much it is."""
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
    """Objects of an archive that no moment of the window needs, in the order in which they go."""

    parts: list[str]
    logs: list[str]
    files: list[str]
    size_bytes: int


def plan_trim(store: ObjectStore, listing: ArchiveListing, kept: Oldest, ancestors: Collection[int]) -> TrimPlan:
    """What goes when `kept` is the oldest base that stays. `ancestors` are the owner epochs before the current one, by the
    manifest: others may be somebody's."""
    parts: list[str] = []
    logs: list[str] = []
    files: list[tuple[str, int]] = []
    size = 0
    first = Position(kept.position.epoch, kept.base.first_log)
    for epoch in sorted({*(known for known in ancestors if known < first.epoch), first.epoch}):
        objects = listing.epochs.get(epoch)
        if objects is None:
            continue
        old_parts = [(key, taken) for key, (number, taken) in objects.parts.items() if Position(epoch, number) < first]
        # Without its seals, an owner that was suspended for longer than the window would write on, and acknowledge it.
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
    """The numbers of the seals that an epoch's log ends with: one, or more of a takeover that was hard."""
    seals = set()
    for number in sorted(logs, reverse=True):
        if header_of(store, store_id, Position(epoch, number)).kind is not Kind.SEAL:
            break
        seals.add(number)
    return seals


def files_of(store: ObjectStore, store_id: str, kept: Oldest) -> Iterator[str]:
    """The files that a base names, or the log up to the object that names it."""
    first = Position(kept.position.epoch, kept.base.first_log)
    for events in base_events(store, kept.base):
        yield from (event.key for event in events if isinstance(event, ArtifactEvent))
    for _, _, events in log_events(store, store_id, first, kept.position):
        yield from (event.key for event in events if isinstance(event, ArtifactEvent))


# ── abandoned epochs ──────────────────────────────────────────────────────────────────────────────────────────────────
class AbandonedEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """An owner epoch that the newest owner's history does not contain: somebody went back to a moment before it."""

    owner_epoch: int
    objects: int
    """Of its archive, and those that its databases put."""
    size_bytes: int
    ended_at_ms: int
    """When its owner archived the last time."""


def abandoned_epochs(store: ObjectStore, store_id: str) -> list[AbandonedEpoch]:
    """The abandoned owner epochs of a store, oldest first. Reads the bucket alone."""
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
    """The objects of an epoch's archive, in the order in which they may go: while its log is there, the rest is found again."""
    logs = [log_key(store_id, Position(epoch, number)) for number in sorted(objects.logs)]
    return [*objects.files, *objects.parts, *logs]


# ── for people ────────────────────────────────────────────────────────────────────────────────────────────────────────
class RestorableRange(msgspec.Struct, frozen=True, kw_only=True):
    """How far back, and how far on, a store can be restored."""

    newest: Position
    newest_at_ms: int
    oldest: Position
    oldest_at_ms: int


def restorable_range(store: ObjectStore, store_id: str) -> RestorableRange:
    """The newest and the oldest restorable moment of a store: of the line that leads to the newest, not of abandoned epochs."""
    newest = find(store, store_id)
    oldest = Line(store, list_archive(store, store_id)).oldest()
    return RestorableRange(
        newest=newest.position,
        newest_at_ms=newest.at_ms,
        oldest=oldest.position if oldest is not None else newest.position,
        oldest_at_ms=oldest.at_ms if oldest is not None else newest.at_ms,
    )
