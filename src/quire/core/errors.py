"""Every error quire raises, grouped by what the caller will do about it.

Terms
  what   one sentence: what happened
  hint   one sentence: what to do next, often the command to run
  where  the coordinates of the trouble (file, offset, id …), kept as data so that programs need not parse text

Rules
  1. Everything raised on purpose derives from `QuireError`; callers catch a *group*, logs show the leaf.
  2. Errors pickle, with all their coordinates: they cross process borders (Spark workers, the Flight service).
  3. A group says what to do: fix the call, pick another name, wait and retry, repair the machine, restore data, reopen.

    >>> error = UnknownDatabase("no database has this name", hint="`quire ls` lists them", name="shop")
    >>> print(error)
    no database has this name (name='shop'); `quire ls` lists them
    >>> import pickle
    >>> pickle.loads(pickle.dumps(error)).where
    {'name': 'shop'}
"""

from __future__ import annotations

from typing import Any


class QuireError(Exception):
    """The root: `except QuireError` catches everything quire raises on purpose."""

    def __init__(self, what: str, *, hint: str = "", **where: Any) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.where = where

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += " (" + ", ".join(f"{name}={value!r}" for name, value in self.where.items()) + ")"
        return f"{text}; {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.hint, self.where)


def _rebuild(cls: type[QuireError], what: str, hint: str, where: dict[str, Any]) -> QuireError:
    return cls(what, hint=hint, **where)


# ── fix the call ──────────────────────────────────────────────────────────────────────────────────────────────────────
class InvalidInput(QuireError):
    """An argument cannot be accepted as it is."""


class OutOfRange(InvalidInput):
    """A number does not fit its field (u16, u32, u64) or lies outside its allowed range."""


class InvalidName(InvalidInput):
    """A name is empty, too long or has characters that names may not have."""


class InvalidConfig(InvalidInput):
    """quire.toml, or a setting passed in code, does not make sense."""


class WrongKind(InvalidInput):
    """The operation is for another kind of database."""


class WrongThread(InvalidInput):
    """A blocking call was made from the manifest's writer thread, which would wait for itself."""


class ReadOnly(InvalidInput):
    """A write was asked of something opened for reading."""


# ── look elsewhere ────────────────────────────────────────────────────────────────────────────────────────────────────
class NotFound(QuireError):
    """What was asked for is not there."""


class StoreNotFound(NotFound):
    """The directory holds no store."""


class UnknownDatabase(NotFound):
    """No database has this id or name."""


class UnknownArtifact(NotFound):
    """No catalog row has this key."""


class UnknownNamespace(NotFound):
    """No remote namespace has this id."""


class UnknownSnapshot(NotFound):
    """No snapshot has this id or name."""


class UnknownJob(NotFound):
    """No job has this id."""


class UnknownReader(NotFound):
    """No reader has this id."""


class SnapshotGone(NotFound):
    """The version that was asked for is no longer kept: a checkpoint has gone beyond it."""


class EpochLost(NotFound):
    """The version that was asked for was lost when the store was taken over; its number is never given to another."""


class UnknownCursor(NotFound):
    """No change cursor has this id or name."""


class ObjectNotFound(NotFound):
    """The object store has no object of this name."""


# ── someone else was first, or the state forbids it ───────────────────────────────────────────────────────────────────
class Conflict(QuireError):
    """The state of the store forbids the change; nothing of the batch was applied."""


class NameTaken(Conflict):
    """A database, snapshot or cursor of this name exists already."""


class AlreadyExists(Conflict):
    """An id or an object of this name exists already, with other contents."""


class DatabaseTombstoned(Conflict):
    """The database has been dropped and takes no writes."""


class ArtifactGone(Conflict):
    """The artifact's reference count has reached zero: it is being deleted and cannot be referenced again."""


class ForeignObject(Conflict):
    """An object that is not this store's, or not yet, was to be deleted."""


class StillReferenced(Conflict):
    """The row cannot go while something refers to it."""


class RefcountUnderflow(Conflict):
    """A reference count would fall below zero."""


class IllegalTransition(Conflict):
    """A state machine (WAL segment, job, database) has no such step."""


class JobAlreadyPending(Conflict):
    """An exclusive job of this kind is already outstanding for the database."""


class LeaseExpired(Conflict):
    """The reader was silent for too long; what it read may be gone."""


class CursorLost(Conflict):
    """The cursor was given up, or what it asks for is no longer retained: never a silent gap."""


class WouldDropEverything(Conflict):
    """A retention policy would leave no snapshot, and nobody said that this is meant."""


class ArchiveAhead(Conflict):
    """The archive has changes that this directory lacks: taking over from it would give them up."""


class StalePlan(Conflict):
    """What the change was planned on is no longer so."""


# ── wait and try again ────────────────────────────────────────────────────────────────────────────────────────────────
class Unavailable(QuireError):
    """Not now: retrying later may succeed."""


class StoreLocked(Unavailable):
    """Another process owns the store."""


class TimedOut(Unavailable):
    """The wait ended before what was waited for happened. The operation itself may still complete."""


class Overloaded(Unavailable):
    """A bounded queue stayed full for as long as the caller was willing to wait."""


class QuotaExceeded(Unavailable):
    """A byte budget stayed used up for as long as the caller was willing to wait; the error names what holds it."""


class NotArchived(Unavailable):
    """Committed on this disk, and not in the bucket: it did not answer in time (archive.mode = "sync")."""


class SparkUnavailable(Unavailable):
    """There is no Spark, or no Java that it runs on, or it does not answer."""


class ObjectStoreUnavailable(Unavailable):
    """The object store kept failing until the retries ran out."""


class TooManyReaders(Unavailable):
    """All reader slots of the manifest are taken."""


# ── repair the machine ────────────────────────────────────────────────────────────────────────────────────────────────
class StorageFault(QuireError):
    """The operating system or the object store refused; the store's own data is as it was."""


class DiskFull(StorageFault):
    """No space left (or a quota or file-size limit was hit). Nothing of the change was kept."""


class NotWritable(StorageFault):
    """The directory or file cannot be written by this process."""


class TooManyOpenFiles(StorageFault):
    """The process, or the machine, may open no more files. Nothing is wrong with the disk."""


class AccessDenied(StorageFault):
    """The credentials do not allow it: the object store's, or the token that a caller shows."""


class Unauthenticated(StorageFault):
    """No token was shown where one is needed, or one that is wrong or has expired."""


# ── restore or repair the data ────────────────────────────────────────────────────────────────────────────────────────
class Corruption(QuireError):
    """Bytes are not what was written. Never skipped silently; the message names the place and the next command."""


class ManifestDamaged(Corruption):
    """The manifest is not an LMDB environment, is truncated, or breaks an invariant."""


class ManifestIntegrityError(Corruption):
    """A stream's manifest log is damaged: `where` has chunk, segment and offset. The stream is quarantined until mended."""


class ChecksumMismatch(Corruption):
    """A checksum does not match the bytes it covers."""


class SnapshotChecksumMismatch(Corruption):
    """The snapshot of a key-value database's manifest was changed since it was written."""


# ── use another version ───────────────────────────────────────────────────────────────────────────────────────────────
class Incompatible(QuireError):
    """Versions or fixed settings do not fit together."""


class FormatTooNew(Incompatible):
    """Written by a newer quire."""


class ConfigMismatch(Incompatible):
    """A setting that is fixed for the life of a database differs."""


# ── reopen ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class StoreUnusable(QuireError):
    """After a doubtful sync or a crash of the writer nothing more is accepted until the store is reopened."""


class StoreFenced(StoreUnusable):
    """Another owner has the store, or its bucket: this process writes nothing more. The message names the successor."""


class StoreClosed(QuireError):
    """The handle was closed, or belongs to the parent of a fork()."""


class InternalError(QuireError):
    """A bug in quire. Please report it with the message."""


def poisoned_by(error: BaseException, what: str, *, hint: str, **where: Any) -> StoreUnusable:
    """Why nothing more is taken after `error`. That the store has another owner stays what it is, whoever met it first."""
    if isinstance(error, StoreFenced):
        return error
    failure = StoreUnusable(what, hint=hint, **where)
    failure.__cause__ = error
    return failure
