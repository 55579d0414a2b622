"""All errors that quire raises, grouped by what the caller has to do.

Terms
  what   one sentence: what happened
  hint   one sentence: what to do next, often the command to run
  where  the coordinates of the error (file, offset, id …), kept as data so that programs need not parse text

Rules
  1. Everything raised on purpose derives from `QuireError`; callers catch a *group*, logs show the leaf.
  2. Errors can be pickled with all their coordinates: they cross process boundaries (Spark workers, the Flight service).
  3. Each group has one remedy: fix the call, pick another name, wait and retry, repair the machine, restore data, reopen.

    >>> error = UnknownDatabase("no database has this name", hint="`quire ls` lists them", name="shop")
    >>> print(error)
    no database has this name (name='shop'); `quire ls` lists them
    >>> import pickle
    >>> pickle.loads(pickle.dumps(error)).where
    {'name': 'shop'}
"""

from __future__ import annotations

from typing import Any, Self


class QuireError(Exception):
    """The base class: `except QuireError` catches everything that quire raises on purpose."""

    def __init__(self, what: str, *, hint: str = "", **where: Any) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.where = where

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += " (" + ", ".join(f"{name}={_shown(value)}" for name, value in self.where.items()) + ")"
        return f"{text}; {self.hint}" if self.hint else text

    def copied(self) -> Self:
        """Return an equal error, for each caller that meets the same failure: raising one object again would extend its
        traceback."""
        return type(self)(self.what, hint=self.hint, **self.where)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.hint, self.where)


LISTED_MAX = 10
"""Most values of a list that an error's text shows; `where` has all of them."""


def _shown(value: object) -> str:
    if isinstance(value, list) and len(value) > LISTED_MAX:
        return f"[{', '.join(map(repr, value[:LISTED_MAX]))}, … {len(value) - LISTED_MAX} more]"
    return repr(value)


def _rebuild(cls: type[QuireError], what: str, hint: str, where: dict[str, Any]) -> QuireError:
    return cls(what, hint=hint, **where)


# ── fix the call ──────────────────────────────────────────────────────────────────────────────────────────────────────
class InvalidInput(QuireError):
    """An argument cannot be accepted as it is."""


class OutOfRange(InvalidInput):
    """A number does not fit its field (u16, u32, u64) or lies outside its allowed range."""


class InvalidName(InvalidInput):
    """A name is empty, too long, or contains characters that are not allowed."""


class InvalidConfig(InvalidInput):
    """A setting in quire.toml, or one passed in code, is invalid."""


class WrongKind(InvalidInput):
    """The operation does not apply to this kind of database."""


class WrongThread(InvalidInput):
    """A blocking call was made on the manifest's writer thread, which would wait for itself."""


class ReadOnly(InvalidInput):
    """A write was attempted on something opened for reading."""


# ── look elsewhere ────────────────────────────────────────────────────────────────────────────────────────────────────
class NotFound(QuireError):
    """What was requested does not exist."""


class StoreNotFound(NotFound):
    """The directory contains no store."""


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
    """The requested version is no longer kept: a checkpoint has passed it."""


class EpochLost(NotFound):
    """The requested version was lost when the store was taken over; its number is never reused."""


class UnknownCursor(NotFound):
    """No change cursor has this id or name."""


class ObjectNotFound(NotFound):
    """The object store has no object with this name."""


# ── another change came first, or the state forbids it ────────────────────────────────────────────────────────────────
class Conflict(QuireError):
    """The state of the store forbids the change; no part of the batch was applied."""


class NameTaken(Conflict):
    """A database, snapshot or cursor with this name already exists."""


class AlreadyExists(Conflict):
    """An id or an object with this name already exists, with different contents."""


class DatabaseTombstoned(Conflict):
    """The database has been dropped and accepts no writes."""


class ArtifactGone(Conflict):
    """The artifact's reference count has reached zero: it is being deleted and cannot be referenced again."""


class ForeignObject(Conflict):
    """A deletion was requested for an object that does not belong to this store, or not yet."""


class StillReferenced(Conflict):
    """The row cannot be removed while something refers to it."""


class RefcountUnderflow(Conflict):
    """A reference count would fall below zero."""


class IllegalTransition(Conflict):
    """A state machine (WAL segment, job, database) has no such transition."""


class JobAlreadyPending(Conflict):
    """An exclusive job of this kind is already pending for the database."""


class LeaseExpired(Conflict):
    """The reader did not renew its lease in time; the version it read may be gone."""


class CursorLost(Conflict):
    """The cursor was abandoned, or the changes after it are no longer retained. A gap is never skipped silently."""


class WouldDropEverything(Conflict):
    """A retention policy would drop every snapshot, and the caller did not confirm that this is intended."""


class ArchiveAhead(Conflict):
    """The archive has changes that this directory lacks: a takeover by this directory would discard them."""


class StalePlan(Conflict):
    """The state on which the change was planned has changed since."""


# ── wait and try again ────────────────────────────────────────────────────────────────────────────────────────────────
class Unavailable(QuireError):
    """The operation cannot be done now; a later retry may succeed."""


class StoreLocked(Unavailable):
    """Another process owns the store."""


class TimedOut(Unavailable):
    """The timeout ended before the awaited event. The operation itself may still complete."""


class Overloaded(Unavailable):
    """A bounded queue stayed full until the caller's timeout."""


class QuotaExceeded(Unavailable):
    """A byte budget stayed exhausted until the caller's timeout; the error names what holds it."""


class NotArchived(Unavailable):
    """The change is committed on this disk but not in the bucket, which did not respond in time (archive.mode = "sync")."""


class SparkUnavailable(Unavailable):
    """Spark, or the Java that it needs, is not installed, or Spark does not respond."""


class ObjectStoreUnavailable(Unavailable):
    """The object store kept failing until the retries were exhausted."""


class TooManyReaders(Unavailable):
    """All reader slots of the manifest are in use."""


# ── repair the machine ────────────────────────────────────────────────────────────────────────────────────────────────
class StorageFault(QuireError):
    """The operating system or the object store refused the operation; the data of the store is unchanged."""


class DiskFull(StorageFault):
    """No space is left, or a quota or file-size limit was reached. No part of the change was kept."""


class NotWritable(StorageFault):
    """This process cannot write to the directory or file."""


class TooManyOpenFiles(StorageFault):
    """The process or the machine has reached its limit of open files. The disk is not at fault."""


class AccessDenied(StorageFault):
    """The credentials for the object store, or the caller's token, do not permit the operation."""


class Unauthenticated(StorageFault):
    """A token is required and is missing, invalid or expired."""


# ── restore or repair the data ────────────────────────────────────────────────────────────────────────────────────────
class Corruption(QuireError):
    """Bytes differ from what was written. Never skipped silently; the message names the location and the next command."""


class ManifestDamaged(Corruption):
    """The manifest is not an LMDB environment, is truncated, or breaks an invariant."""


class ManifestIntegrityError(Corruption):
    """A stream's manifest log is damaged: `where` has chunk, segment and offset. The stream is quarantined until repaired."""


class ChecksumMismatch(Corruption):
    """A checksum does not match the bytes it covers."""


class SnapshotChecksumMismatch(Corruption):
    """The snapshot of a key-value database's manifest has changed since it was written."""


# ── use another version ───────────────────────────────────────────────────────────────────────────────────────────────
class Incompatible(QuireError):
    """Versions or fixed settings are incompatible."""


class FormatTooNew(Incompatible):
    """The data was written by a newer version of quire."""


class ConfigMismatch(Incompatible):
    """A setting that is fixed for the lifetime of a database differs."""


# ── reopen ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class StoreUnusable(QuireError):
    """A sync with an unknown outcome, or a crash of the writer, has stopped all writes until the store is reopened."""


class StoreFenced(StoreUnusable):
    """Another owner has taken over the store or its bucket: this process writes nothing more. The message names that owner."""


class StoreClosed(QuireError):
    """The handle is closed, or belongs to the parent process of a fork()."""


class InternalError(QuireError):
    """A bug in quire. Please report it with the message."""


def poisoned_by(error: BaseException, what: str, *, hint: str, **where: Any) -> StoreUnusable:
    """Return the error that further calls raise after `error`: `StoreFenced` itself, or `StoreUnusable` caused by `error`."""
    if isinstance(error, StoreFenced):
        return error
    failure = StoreUnusable(what, hint=hint, **where)
    failure.__cause__ = error
    return failure
