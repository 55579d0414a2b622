"""The state of a key-value database's manifest, and the nine events that change it (the key-value manifest document).

Only `ManifestData.apply` changes the state, and it never fails: invalid events are refused before they are logged. Applying
is idempotent, so replaying any prefix of a log twice gives the same state; therefore frozen WALs and tables are ordered by
number, not by event. `last_lsn` and `next_sst_id` only rise, and `version` rises with every change.

Errors carry one of the design document's five kinds as `error.where["kind"]`; the class tells the caller how to react.

Threads: values; any. The encoding is in manifest_format.py."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from quire.core.errors import QuireError


class ErrorKind(StrEnum):
    """The design document's kinds of errors."""

    WAL = "Wal"
    IO = "Io"
    ENCODING = "Encoding"
    SNAPSHOT_CHECKSUM_MISMATCH = "SnapshotChecksumMismatch"
    INTERNAL = "Internal"


@contextmanager
def of_kind(kind: ErrorKind) -> Iterator[None]:
    """Set the design document's kind on errors that pass through, unless they have one."""
    try:
        yield
    except QuireError as error:
        error.where.setdefault("kind", kind.value)
        raise


def kind_of(error: QuireError) -> ErrorKind | None:
    """Return the design document's kind of an error, or `None` if it is not an error of the manifest."""
    kind = error.where.get("kind")
    return ErrorKind(kind) if kind is not None else None


class ManifestSstEntry(msgspec.Struct, frozen=True):
    """A live table. The path is relative to the database's directory, `lsm/<db_id:08x>/`."""

    id: int
    path: str


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Version(msgspec.Struct, frozen=True):
    """Sets the manifest's version. It precedes the events of every change."""

    version: int


class SetActiveWal(msgspec.Struct, frozen=True):
    """Makes a WAL the active one, and no longer frozen if it was."""

    wal: int


class AddFrozenWal(msgspec.Struct, frozen=True):
    """Freezes a WAL. No effect if it is already frozen."""

    wal: int


class RemoveFrozenWal(msgspec.Struct, frozen=True):
    """Removes a frozen WAL whose contents are in a table."""

    wal: int


class AddSst(msgspec.Struct, frozen=True):
    """Adds a live table. No effect if its id is already live."""

    entry: ManifestSstEntry


class RemoveSst(msgspec.Struct, frozen=True):
    """Removes a live table."""

    id: int


class UpdateLsn(msgspec.Struct, frozen=True):
    """Advances the last lsn. A lower one has no effect."""

    last_lsn: int


class AllocateSstId(msgspec.Struct, frozen=True):
    """Allocates a table id, and all below it."""

    id: int


class Compaction(msgspec.Struct, frozen=True):
    """Adds and removes tables atomically."""

    added: tuple[ManifestSstEntry, ...]
    removed: tuple[int, ...]


ManifestEvent = (
    Version
    | SetActiveWal
    | AddFrozenWal
    | RemoveFrozenWal
    | AddSst
    | RemoveSst
    | UpdateLsn
    | AllocateSstId
    | Compaction
)


# ── state ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(slots=True)
class ManifestData:
    """The tracked state. Changed only by `apply`."""

    version: int = 0
    last_lsn: int = 0
    active_wal: int = 0
    frozen_wals: list[int] = field(default_factory=list)
    """In ascending order."""
    tables: dict[int, ManifestSstEntry] = field(default_factory=dict)
    """By id; `sstables` lists them."""
    next_sst_id: int = 1
    dirty: bool = field(default=False, compare=False)

    @property
    def sstables(self) -> list[ManifestSstEntry]:
        """The live tables, in the order of their ids."""
        return [self.tables[number] for number in sorted(self.tables)]

    def apply(self, event: ManifestEvent) -> None:
        """Apply one event."""
        match event:
            case AddSst(entry):
                add_tables(self, (entry,))
            case Compaction(added, removed):
                add_tables(self, added)
                for sst_id in removed:
                    _remove_sst(self, sst_id)
            case _:
                (number,) = msgspec.structs.astuple(event)
                NUMBER_EFFECTS[type(event)](self, number)
        self.dirty = True

    def apply_all(self, events: Iterable[ManifestEvent]) -> ManifestData:
        """Apply events in order, and return `self`."""
        for event in events:
            self.apply(event)
        return self

    def copy(self) -> ManifestData:
        """Return an independent copy."""
        return ManifestData(
            version=self.version,
            last_lsn=self.last_lsn,
            active_wal=self.active_wal,
            frozen_wals=list(self.frozen_wals),
            tables=dict(self.tables),
            next_sst_id=self.next_sst_id,
            dirty=self.dirty,
        )


def _version(data: ManifestData, version: int) -> None:
    data.version = version


def _set_active(data: ManifestData, wal: int) -> None:
    data.active_wal = wal
    if wal in data.frozen_wals:
        data.frozen_wals.remove(wal)


def _add_frozen(data: ManifestData, wal: int) -> None:
    if wal not in data.frozen_wals:
        insort(data.frozen_wals, wal)


def _remove_frozen(data: ManifestData, wal: int) -> None:
    if wal in data.frozen_wals:
        data.frozen_wals.remove(wal)


def _remove_sst(data: ManifestData, sst_id: int) -> None:
    data.tables.pop(sst_id, None)


def _update_lsn(data: ManifestData, last_lsn: int) -> None:
    if last_lsn > data.last_lsn:
        data.last_lsn = last_lsn


def _allocate(data: ManifestData, sst_id: int) -> None:
    if sst_id >= data.next_sst_id:
        data.next_sst_id = sst_id + 1


NUMBER_EFFECTS: dict[type, Callable[[ManifestData, int], None]] = {
    Version: _version,
    SetActiveWal: _set_active,
    AddFrozenWal: _add_frozen,
    RemoveFrozenWal: _remove_frozen,
    RemoveSst: _remove_sst,
    UpdateLsn: _update_lsn,
    AllocateSstId: _allocate,
}
"""The effects of events that consist of one number; `apply` dispatches on it."""


def add_tables(data: ManifestData, entries: Iterable[ManifestSstEntry]) -> None:
    """Apply `AddSst`, or the first half of `Compaction`."""
    for entry in entries:
        data.tables.setdefault(entry.id, entry)
