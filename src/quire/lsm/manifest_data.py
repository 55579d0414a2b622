"""What a key-value database's manifest knows, and the nine events that change it (the key-value manifest document).

`ManifestData.apply` alone changes the state, and never fails: what must not be logged is refused before it is logged.
Applying is idempotent, so replaying any prefix of a log twice gives the same state; for that, frozen WALs and tables are
ordered by number, not by event. `last_lsn` and `next_sst_id` only rise, and `version` rises with every change.

Errors carry the design document's five kinds as `error.where["kind"]`; the class says what the caller can do about it.

Values; any thread. The bytes are in manifest_format.py."""

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
    """Give errors that pass through the design document's name, unless they have one."""
    try:
        yield
    except QuireError as error:
        error.where.setdefault("kind", kind.value)
        raise


def kind_of(error: QuireError) -> ErrorKind | None:
    """The design document's name of an error, if it is the manifest's."""
    kind = error.where.get("kind")
    return ErrorKind(kind) if kind is not None else None


class ManifestSstEntry(msgspec.Struct, frozen=True):
    """A live table. The path is relative to the database's directory, `lsm/<db_id:08x>/`."""

    id: int
    path: str


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Version(msgspec.Struct, frozen=True):
    """Sets the manifest's version; before every other change."""

    version: int


class SetActiveWal(msgspec.Struct, frozen=True):
    """Switches the active WAL; it is not frozen any more if it was."""

    wal: int


class AddFrozenWal(msgspec.Struct, frozen=True):
    """A WAL is frozen; one that is already stays so."""

    wal: int


class RemoveFrozenWal(msgspec.Struct, frozen=True):
    """A WAL is not needed any more: a table holds what it held."""

    wal: int


class AddSst(msgspec.Struct, frozen=True):
    """A table is live; one whose id is known is skipped."""

    entry: ManifestSstEntry


class RemoveSst(msgspec.Struct, frozen=True):
    """A table is not live any more."""

    id: int


class UpdateLsn(msgspec.Struct, frozen=True):
    """Advances the last lsn; a lower one changes nothing."""

    last_lsn: int


class AllocateSstId(msgspec.Struct, frozen=True):
    """An id was handed out: the next one is behind it."""

    id: int


class Compaction(msgspec.Struct, frozen=True):
    """Tables come and go in one step."""

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
    """The tracked state. Changed by `apply` alone."""

    version: int = 0
    last_lsn: int = 0
    active_wal: int = 0
    frozen_wals: list[int] = field(default_factory=list)
    """In rising order."""
    tables: dict[int, ManifestSstEntry] = field(default_factory=dict)
    """By id; `sstables` lists them."""
    next_sst_id: int = 1
    dirty: bool = field(default=False, compare=False)

    @property
    def sstables(self) -> list[ManifestSstEntry]:
        """The live tables, in the order of their ids."""
        return [self.tables[number] for number in sorted(self.tables)]

    def apply(self, event: ManifestEvent) -> None:
        """The effect of one event."""
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
        """The effect of several, in order; returns itself."""
        for event in events:
            self.apply(event)
        return self

    def copy(self) -> ManifestData:
        """A state of its own that begins as this one."""
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
"""What the events do that consist of one number; a replay calls these without making the event."""


def add_tables(data: ManifestData, entries: Iterable[ManifestSstEntry]) -> None:
    """The effect of `AddSst`, and the first half of `Compaction`."""
    for entry in entries:
        data.tables.setdefault(entry.id, entry)
