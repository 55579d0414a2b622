"""The state of a key-value database's manifest, and the nine events that change it (the key-value manifest document).

Only `ManifestData.apply` changes the state, and it never fails: invalid events are refused before they are logged. Applying
is idempotent, so replaying any prefix of a log twice gives the same state; therefore frozen WALs and tables are ordered by
number, not by event. `last_lsn` and `next_sst_id` only rise, and `version` rises with every change.

Errors carry one of the design document's five kinds as `error.where["kind"]`; the class shows the caller how to react.

Threads: values; any. The encoding is in manifest_format.py."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
            case Version(version):
                self.version = version
            case SetActiveWal(wal):
                self.active_wal = wal
                if wal in self.frozen_wals:
                    self.frozen_wals.remove(wal)
            case AddFrozenWal(wal):
                if wal not in self.frozen_wals:
                    insort(self.frozen_wals, wal)
            case RemoveFrozenWal(wal):
                if wal in self.frozen_wals:
                    self.frozen_wals.remove(wal)
            case AddSst(entry):
                self.tables.setdefault(entry.id, entry)
            case RemoveSst(sst_id):
                self.tables.pop(sst_id, None)
            case UpdateLsn(last_lsn):
                self.last_lsn = max(self.last_lsn, last_lsn)
            case AllocateSstId(sst_id):
                self.next_sst_id = max(self.next_sst_id, sst_id + 1)
            case Compaction(added, removed):
                for entry in added:
                    self.tables.setdefault(entry.id, entry)
                for sst_id in removed:
                    self.tables.pop(sst_id, None)
        self.dirty = True

    def apply_all(self, events: Iterable[ManifestEvent]) -> ManifestData:
        """Apply events in order, and return `self`."""
        for event in events:
            self.apply(event)
        return self

    def copy(self) -> ManifestData:
        """Return an independent copy."""
        return replace(self, frozen_wals=list(self.frozen_wals), tables=dict(self.tables))
