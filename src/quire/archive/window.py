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

A damaged log object does not stop trimming: what its header says is taken from the last one before it that can be read. Times
and bases in headers never fall within an epoch, so more may be kept than is needed, and never less.

Threads: any. Reads only the bucket. Raises `Corruption`, and the object store's errors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

from quire.archive.format import (
    NONE,
    ArtifactEvent,
    BaseEvent,
    Header,
    Kind,
    Position,
    archive_prefix,
    log_key,
    parse_archive_key,
)
from quire.archive.log_reader import (
    RestorePoint,
    base_events,
    base_named,
    find,
    find_abandoned,
    find_intact,
    header_of,
    log_events,
    owner_log,
)
from quire.core.errors import Corruption, InvalidInput, ObjectNotFound
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
        self.damaged: dict[Position, Corruption] = {}
        """Damaged log objects that were passed over so far."""
        self._is_cut = False
        """Whether the line ends too early: the object that names the next epoch is damaged."""
        epoch, bound = self._newest(), NONE
        # Parents come from a bucket: a forged one must not make this loop endless.
        while epoch and epoch in listing.epochs and epoch not in dict(self.epochs):
            numbers = self._owners_run(epoch, bound)
            self.epochs.append((epoch, numbers))
            if not numbers or numbers[0]:
                break
            try:
                parent = self.header(epoch, 0).parent
            except Corruption:
                self._is_cut = True
                break
            epoch, bound = parent.epoch, parent.number

    def _newest(self) -> int:
        """Return the newest epoch with a log object of its owner, or 0. Later ones were sealed before they had any."""
        logged = sorted((epoch for epoch, objects in self._listing.epochs.items() if objects.logs), reverse=True)
        return next((epoch for epoch in logged if self._owners_run(epoch, NONE)), 0)

    def _owners_run(self, epoch: int, bound: int) -> range:
        """Return the last gapless run of an owner's log objects up to `bound`, without seals."""
        numbers = _last_run(self._listing.epochs[epoch].logs, bound)
        while numbers and self._is_seal(epoch, numbers[-1]):  # several, if seals were put ahead
            numbers = _last_run(self._listing.epochs[epoch].logs, numbers[-1] - 1)
        return numbers

    def header(self, epoch: int, number: int) -> Header:
        """Return the header of a log object. Each is read once."""
        position = Position(epoch, number)
        if position not in self._headers:
            try:
                self._headers[position] = header_of(self._store, self._store_id, position)
            except Corruption as error:
                self.damaged[position] = error
                raise
        return self._headers[position]

    def _readable(self, epoch: int, numbers: range, number: int) -> Header | None:
        """Return the header of a log object, or of the last one before it that is not damaged; `None` if there is none."""
        for earlier in range(number, numbers[0] - 1, -1):
            with suppress(Corruption):
                return self.header(epoch, earlier)
        return None

    def _is_seal(self, epoch: int, number: int) -> bool:
        try:
            return self.header(epoch, number).kind is Kind.SEAL
        except Corruption:
            return False  # counts as the owner's, as in `owner_log`

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

            def time_of(number: int, epoch: int = epoch, numbers: range = numbers) -> int:
                header = self._readable(epoch, numbers, number)
                return header.at_ms if header is not None else 0

            place = bisect_right(numbers, before_ms, key=time_of)
            last = self._readable(epoch, numbers, numbers[place - 1]) if place else None
            if last is not None and last.base != NONE and last.base in numbers:
                return self._whole(epoch, numbers, last.base)
        return None

    def off_line(self) -> tuple[int, ...]:
        """Return the owner epochs that have a log and are not on the line. A log without object 0 was trimmed, and does not
        count."""
        if self._is_cut:  # epochs before it may be on the line, and must not be taken for abandoned
            raise self.damaged[Position(self.epochs[-1][0], 0)]
        named = dict(self.epochs)
        return tuple(
            sorted(epoch for epoch, objects in self._listing.epochs.items() if 0 in objects.logs and epoch not in named)
        )

    def abandoned(self) -> tuple[int, ...]:
        """Return the epochs that are not on the line and whose owners have archived anything: not those that were sealed before
        they did."""
        return tuple(epoch for epoch in self.off_line() if self._has_archived(epoch))

    def _has_archived(self, epoch: int) -> bool:
        objects = self._listing.epochs[epoch]
        return bool(objects.parts or objects.files or self._owners_run(epoch, NONE))

    def newest(self) -> Header | None:
        """Return the header of the newest log object that is not damaged, or `None`."""
        headers = (self._readable(epoch, numbers, numbers[-1]) for epoch, numbers in self.epochs if numbers)
        return next((header for header in headers if header is not None), None)

    def whole(self, epoch: int, named: int) -> Oldest | None:
        """Return the base that a log object of the line names, if everything needed to restore it is listed."""
        return self._whole(epoch, dict(self.epochs)[epoch], named)

    def _first_base(self, epoch: int, numbers: range, start: int) -> int | None:
        """Return the first log object at or after index `start` that names a base. Found by bisection: the `base` of headers
        never decreases within an epoch."""

        def last_named(number: int) -> int:
            header = self._readable(epoch, numbers, number)
            return -1 if header is None or header.base == NONE else header.base

        wanted = numbers[0] + start - 1 if numbers else 0
        place = bisect_right(numbers, wanted, key=last_named)
        return last_named(numbers[place]) if place < len(numbers) else None

    def _whole(self, epoch: int, numbers: range, named: int) -> Oldest | None:
        """Return the base that a log object names, if everything needed to restore it is listed and the object is intact."""
        try:
            base = base_named(self._store, self._store_id, Position(epoch, named))
        except Corruption as error:
            self.damaged[Position(epoch, named)] = error
            return None
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
        # Oldest first: an interrupted deletion leaves gaps only at the beginning of a log, which `_last_run` skips.
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
    """Return the numbers of the seals at the end of an epoch's log: one, or more if a takeover put seals ahead. A damaged
    object there may be a seal, and its name still stops the owner."""
    seals = set()
    for number in sorted(logs, reverse=True):
        with suppress(Corruption):
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
    """An owner epoch, or the end of one, that is not in the newest owner's history: an earlier moment was restored."""

    owner_epoch: int
    after: Position | None = None
    """The last log object that is in the history; `None` if the whole epoch is not."""
    objects: int
    """Objects of its archive and, of a whole epoch, of its databases."""
    size_bytes: int
    ended_at_ms: int
    """Time of its owner's last log object; 0 if it wrote none."""
    is_restorable: bool = True
    """Whether its owner completed a base; without one, only the state that it continued from can be restored."""


def abandoned_epochs(store: ObjectStore, store_id: str) -> list[AbandonedEpoch]:
    """Return the abandoned owner epochs of a store, oldest first. Reads only the bucket."""
    listing = list_archive(store, store_id)
    line = Line(store, listing)
    abandoned = [_abandoned_end(store, store_id, listing, epoch, numbers) for epoch, numbers in line.epochs[1:]]
    archived = line.abandoned()
    for epoch in line.off_line():
        objects = listing.epochs[epoch]
        put = list(list_objects(store, epoch_prefix(store_id, epoch)))
        if epoch not in archived and not put:
            continue  # only a seal
        headers = (line.header(epoch, number) for number in sorted(objects.logs, reverse=True))
        last = next((header for header in headers if header.kind is not Kind.SEAL), None)
        abandoned.append(
            AbandonedEpoch(
                owner_epoch=epoch,
                objects=objects.objects() + len(put),
                size_bytes=objects.size_bytes() + sum(info.size_bytes for info in put),
                ended_at_ms=last.at_ms if last is not None else 0,
                is_restorable=last is not None and last.restorable != NONE,
            )
        )
    return sorted((epoch for epoch in abandoned if epoch is not None), key=lambda epoch: epoch.owner_epoch)


def _abandoned_end(
    store: ObjectStore, store_id: str, listing: ArchiveListing, epoch: int, numbers: range
) -> AbandonedEpoch | None:
    """Return the log objects of an epoch of the line after those that belong to the line, or `None` if there are none."""
    last = numbers[-1] if numbers else -1
    later = [position for position in owner_log(store, store_id, epoch).positions if position.number > last]
    if not later or not numbers:
        return None
    return AbandonedEpoch(
        owner_epoch=epoch,
        after=Position(epoch, last),
        objects=len(later),
        size_bytes=sum(listing.epochs[epoch].logs.get(position.number, 0) for position in later),
        ended_at_ms=header_of(store, store_id, later[-1]).at_ms,
    )


def keys_in_order(objects: EpochObjects, store_id: str, epoch: int) -> list[str]:
    """Return the objects of an epoch's archive in the order of deletion, the log last: after an interruption, the epoch is
    still found by its log."""
    logs = [log_key(store_id, Position(epoch, number)) for number in sorted(objects.logs)]
    return [*objects.files, *objects.parts, *logs]


# ── one moment ────────────────────────────────────────────────────────────────────────────────────────────────────────
def require_in_window(store: ObjectStore, store_id: str, position: Position) -> None:
    """Raise `InvalidInput` if objects of a moment may be deleted already: a store that reads them would be damaged."""
    if not is_in_window(store, store_id, position):
        raise InvalidInput(
            "this moment is no longer in the archive's window: objects that it needs may be deleted",
            hint="nothing was claimed; choose a later moment, `quire archive status` shows the oldest",
            position=str(position),
        )


def is_in_window(store: ObjectStore, store_id: str, position: Position) -> bool:
    """Return whether the archive still keeps everything that a directory restored to a log object reads.

    A moment that is not on the line shares objects with the line. The line has retired some of them since it left the history
    of that moment, and keeps these while it reaches back to an owner before that.
    """
    line = Line(store, list_archive(store, store_id))
    on_line = {epoch: numbers for epoch, numbers in line.epochs if numbers}
    try:
        found = find(store, store_id, epoch=position.epoch, upto=position)
        if position not in (found.position, *found.damaged):  # its own object is not read any more
            return False
    except (InvalidInput, ObjectNotFound):
        return False
    except Corruption:
        # The object that names the base of this moment is damaged. A directory that was restored before reads on: what it needs
        # is kept until there is a later base that is intact.
        oldest = line.oldest()
        is_kept = oldest is None or oldest.position <= position
        return is_kept and position.number in on_line.get(position.epoch, ())
    later = [epoch for epoch in on_line if epoch > position.epoch]
    if not later or position.number in on_line.get(position.epoch, ()):
        return True
    oldest = line.oldest()
    return oldest is not None and oldest.position.epoch < min(later)


# ── points to restore ─────────────────────────────────────────────────────────────────────────────────────────────────
def point_at(store: ObjectStore, store_id: str, at_ms: int | None = None, *, epoch: int | None = None) -> RestorePoint:
    """Return what `find_intact` returns, and which other state of that time was abandoned. If the requested moment is before
    the window, the error names the oldest one."""
    try:
        point = find_intact(store, store_id, at_ms, epoch=epoch)
        other = find_abandoned(store, at_ms, point) if at_ms is not None and epoch is None else None
        if other is None:
            return point
        return msgspec.structs.replace(point, abandoned=other.position, abandoned_at_ms=other.at_ms)
    except InvalidInput as error:
        oldest = Line(store, list_archive(store, store_id)).oldest() if at_ms is not None and epoch is None else None
        if oldest is None:
            raise
        # rounded up: times are typed without milliseconds
        first = datetime.fromtimestamp(-(-oldest.at_ms // 1000), UTC)
        hint = f"the oldest moment that can be restored is {first:%Y-%m-%dT%H:%M:%S} UTC"
        raise InvalidInput(error.what, hint=hint, oldest_at_ms=oldest.at_ms, **error.where) from None


# ── restorable range ──────────────────────────────────────────────────────────────────────────────────────────────────
class RestorableRange(msgspec.Struct, frozen=True, kw_only=True):
    """The oldest and the newest moment to which a store can be restored."""

    newest: Position
    newest_at_ms: int
    oldest: Position
    oldest_at_ms: int
    objects: int
    size_bytes: int
    """Of the archive: log, bases and files. Chunks, segments and tables of the databases are not counted."""
    missing: str
    """A part of the newest base, or a log object after it, that the bucket lacks; empty if it has all of them."""


def restorable_range(store: ObjectStore, store_id: str) -> RestorableRange:
    """Return the newest and the oldest restorable moment on a store's line. Abandoned epochs do not count."""
    newest = find(store, store_id)
    listing = list_archive(store, store_id)
    oldest = Line(store, listing).oldest()
    objects = listing.epochs[newest.position.epoch]
    log = (Position(newest.position.epoch, n) for n in range(newest.base.first_log, newest.position.number))
    missing = [key for key, _, _ in newest.base.parts if key not in objects.parts]
    missing += [log_key(store_id, position) for position in log if position.number not in objects.logs]
    return RestorableRange(
        newest=newest.position,
        newest_at_ms=newest.at_ms,
        oldest=oldest.position if oldest is not None else newest.position,
        oldest_at_ms=oldest.at_ms if oldest is not None else newest.at_ms,
        objects=listing.objects(),
        size_bytes=listing.size_bytes(),
        missing=next(iter(missing), ""),
    )
