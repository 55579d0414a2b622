"""Who may write a store's objects: sessions in the bucket, each seen by every other owner (A2). Formats:
docs/formats/owner.md.

Two directories with one identity (a copy, a restored backup) share a bucket. The lock file of each says nothing about the
other; a small object does: whoever puts first creates `{store_id}/owner/{epoch}.{session}`, and nobody goes on under a lower
one. A *claim* records a session with a new nonce in the directory (`owner.json`), synced, and then creates its object: so an
object of ours is always recognised, and nobody is locked out after a crash or a lost answer. The bucket is looked at before
the claim, from the last session on that was seen there as ours, and again after it: two who claim at once cannot both go on.
An owner is *fenced* when the bucket has a session above its own, or its own number under another nonce. It puts and deletes
nothing more, and remembers that in the file.

What is on disk and in the bucket if a claim stops, and what the next opening does:
  looked          nothing                              looks and claims
  recorded        owner.json with a session            no object above the last: claims the next number
  created         + its object                         recognises it by its nonce, claims the next number
  confirmed       owner.json says so                   looks from there on

Threads: any; the usual check is two clocks and no lock. Raises `StoreFenced`, `StorageFault` for a store that creates one name
twice, `Corruption`, `FormatTooNew`, and what the object store raises: unreachable is `ObjectStoreUnavailable`, and the next
put tries again.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

import msgspec
from msgspec.structs import replace

from quire.core.clock import Clock
from quire.core.errors import (
    AlreadyExists,
    Corruption,
    FormatTooNew,
    ObjectNotFound,
    StorageFault,
    StoreFenced,
    Unavailable,
)
from quire.core.events import emit
from quire.core.ids import U32_MAX
from quire.durable.checksums import crc64
from quire.durable.failpoints import hit
from quire.durable.files import Disk, read_all, write_atomic
from quire.durable.object_names import LEGACY_OWNER, OWNER_FILE, owner_key, owner_prefix, parse_owner_key
from quire.objects.api import DeletableStore, ExistingObject, ObjectStore

FORMAT = 1
FILE_BYTES_MAX = 4096
OBJECT_BYTES_MAX = 4096
"""More than ten times what either needs."""
NONCE_CHARACTERS = 32


class OwnerFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """The session that this directory claims, and the last one of its own that it has seen in the bucket."""

    format: int = FORMAT
    store_id: str
    epoch: int
    session: int
    nonce: str
    confirmed: int = 0
    """The newest session of this epoch that was seen in the bucket under a nonce of ours; 0 if none was."""
    successor: str = ""
    """The owner object that showed this directory to be behind; empty while none has."""
    successor_text: str = ""
    """The same for people: host, process and time of the other owner."""


class OwnerObject(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner object says: whose it is, and for people who that was."""

    format: int = FORMAT
    store_id: str
    nonce: str
    host: str = ""
    pid: int = 0
    created_at_ms: int = 0


class OwnerState(msgspec.Struct, frozen=True):
    """Where a store stands, for people and for metrics."""

    state: str
    """`not needed`, `unconfirmed`, `confirmed` or `fenced`."""
    epoch: int
    session: int = 0
    """0 before the first put of a life."""
    successor: str = ""


def encode_file(record: OwnerFile) -> bytes:
    """The bytes of owner.json."""
    line = msgspec.json.encode(record)
    return line + b"\n" + f"{crc64(line):016x}".encode() + b"\n"


def decode_file(data: bytes, path: str) -> OwnerFile:
    """What owner.json says."""
    line, _, rest = data.partition(b"\n")
    if len(data) > FILE_BYTES_MAX or rest != f"{crc64(line):016x}\n".encode():
        raise _damaged(path, "its checksum is not that of its contents")
    try:
        record = msgspec.json.decode(line, type=OwnerFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if record.format > FORMAT:
        raise FormatTooNew("owner.json was written by a newer quire", hint="upgrade quire", path=path)
    numbers = (record.epoch, record.session, record.confirmed)
    if not all(0 <= number <= U32_MAX for number in numbers) or record.confirmed > record.session:
        raise _damaged(path, "its numbers make no sense")
    return record


def read_file(disk: Disk, root: str) -> OwnerFile | None:
    """What a store's directory knows of its right to write; `None` if it never claimed one."""
    path = os.path.join(root, OWNER_FILE)
    try:
        if disk.size(path) > FILE_BYTES_MAX:
            raise _damaged(path, "it is too long")
        return decode_file(read_all(disk, path), path)
    except FileNotFoundError:
        return None


def write_file(disk: Disk, root: str, record: OwnerFile) -> None:
    """Replace owner.json, durably."""
    write_atomic(disk, os.path.join(root, OWNER_FILE), encode_file(record))


def recorded_state(disk: Disk, root: str, epoch: int) -> OwnerState:
    """Where a store stands by its directory alone: for readers, who ask no bucket."""
    record = read_file(disk, root)
    if record is None or record.epoch != epoch:
        return OwnerState("unconfirmed", epoch)
    if record.successor:
        return OwnerState("fenced", epoch, record.session, record.successor)
    confirmed = record.session and record.confirmed == record.session
    return OwnerState("confirmed" if confirmed else "unconfirmed", epoch, record.session)


def encode_object(record: OwnerObject) -> bytes:
    """The bytes of an owner object."""
    return msgspec.json.encode(record) + b"\n"


def decode_object(data: bytes) -> OwnerObject | None:
    """What an owner object says; `None` if it is none of ours: then it is somebody else's."""
    if len(data) > OBJECT_BYTES_MAX:
        return None
    try:
        return msgspec.json.decode(data, type=OwnerObject)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _damaged(path: str, cause: str) -> Corruption:
    hint = "`quire takeover` writes a new one, once you are sure that no other copy of the store is in use"
    return Corruption("owner.json is damaged", hint=hint, path=path, cause=cause)


CHECK_SECONDS = 60.0
"""A put believes a look that is younger."""

EPOCHS_PER_TAKEOVER = 1_000
"""More than this many takeovers that a directory knows nothing of are a forged name, not a history."""

TAKE_OVER = "to go on from this directory `quire takeover` makes it the owner; to look, open it with mode='r'"


class Ownership:
    """The right of one opened store to put and delete."""

    def __init__(
        self,
        *,
        store_id: str,
        epoch: int,
        root: str,
        disk: Disk,
        clock: Clock,
        place: Callable[[], DeletableStore],
        fence: Callable[[StoreFenced], None],
        first_epoch: Callable[[], int] | None = None,
        legacy: bool = False,
    ) -> None:
        # constant after construction
        self._store_id = store_id
        self._root = root
        self._disk = disk
        self._clock = clock
        self._place = place
        self._fence = fence
        self._first_epoch = first_epoch
        """Begins the first owner epoch, if there was none when the store was opened; its number."""
        self._legacy = legacy
        # replaced whole under _lock, read by all
        self._lock = threading.Lock()
        self._epoch = epoch
        self._record: OwnerFile | None = None
        """What this life has recorded."""
        self._looked: tuple[float, int] | None = None
        """When the bucket was last seen to be ours, by both clocks; `None` before the claim."""
        self._fenced: StoreFenced | None = None
        self._has_legacy = not legacy

    @property
    def state(self) -> OwnerState:
        """Where the store stands now."""
        record, fenced = self._record, self._fenced
        session = record.session if record is not None else 0
        if fenced is not None:
            return OwnerState("fenced", self._epoch, session, str(fenced.where.get("successor", "")))
        return OwnerState("unconfirmed" if self._looked is None else "confirmed", self._epoch, session)

    # ── before something is written ───────────────────────────────────────────────────────────────────────────────────
    def check(self) -> None:
        """Before a put: claims with the first one, looks again once a minute."""
        if self._fenced is not None:
            raise self._fenced.with_traceback(None)
        if not self._is_fresh():
            with self._lock:
                if self._fenced is not None:
                    raise self._fenced.with_traceback(None)
                if not self._is_fresh():  # somebody else has looked meanwhile
                    self._look()

    def confirm(self) -> None:
        """Before a batch of deletions: always looks."""
        with self._lock:
            if self._fenced is not None:
                raise self._fenced.with_traceback(None)
            self._look()

    def depose(self, error: StoreFenced) -> None:
        """Remember a successor whose seal was met: its owner object, which a look would find, comes after the seal."""
        with self._lock:
            if self._fenced is None:
                self._fenced = error
                self._mark(self._record, str(error.where.get("successor", "")), error.what)

    def owns_legacy(self) -> bool:
        """Whether objects below no store's prefix, at the root of the place, are this store's to delete."""
        self.check()
        return self._has_legacy

    def _is_fresh(self) -> bool:
        if self._looked is None:
            return False
        monotonic, wall_ms = self._looked
        # Both clocks: the monotonic one of a machine that slept did not move.
        gone = abs(self._clock.now_ms() - wall_ms)  # one that was set back says nothing about how long ago it was
        return self._clock.monotonic() - monotonic < CHECK_SECONDS and gone < CHECK_SECONDS * 1000

    # ── under the lock ────────────────────────────────────────────────────────────────────────────────────────────────
    def _look(self) -> None:
        """See that nobody came after us; with the first look, claim."""
        now = (self._clock.monotonic(), self._clock.now_ms())  # before the request: what it says is at least so old
        if self._looked is None:
            self._claim()
        else:
            assert self._record is not None
            self._refuse_successor(self._record.session)
        self._looked = now

    def _claim(self) -> None:
        if not self._epoch:
            assert self._first_epoch is not None, "a store that puts has an epoch"
            self._epoch = self._first_epoch()
        if self._record is None:
            self._record = self._recorded()
            hit("objects.ownership.recorded")
        self._create(self._record)
        if self._legacy:
            self._claim_legacy()
        confirmed = replace(self._record, confirmed=self._record.session)
        write_file(self._disk, self._root, confirmed)
        hit("objects.ownership.confirmed")
        self._forget_session(self._record.confirmed)
        self._record = confirmed
        emit("info", "objects.session_claimed", epoch=self._epoch, session=confirmed.session)

    def _recorded(self) -> OwnerFile:
        """The next session, in the directory."""
        known = read_file(self._disk, self._root)
        if known is not None and (known.store_id, known.epoch) != (self._store_id, self._epoch):
            known = None  # of an epoch that a takeover has ended
        confirmed = known.confirmed if known is not None else 0
        newest = self._newest(after=confirmed)
        if newest is not None:
            epoch, session, owner = newest
            is_ours = known is not None and (epoch, session) == (known.epoch, known.session)
            if not is_ours or owner is None or known is None or owner.nonce != known.nonce:
                raise self._end(epoch, session, owner, known)
            confirmed = session
        record = OwnerFile(
            store_id=self._store_id,
            epoch=self._epoch,
            session=(known.session if known is not None else 0) + 1,
            nonce=secrets.token_hex(NONCE_CHARACTERS // 2),
            confirmed=confirmed,
        )
        write_file(self._disk, self._root, record)
        return record

    def _create(self, record: OwnerFile) -> None:
        """The object of a recorded session."""
        store, key = self._place(), owner_key(self._store_id, record.epoch, record.session)
        body = encode_object(
            OwnerObject(
                store_id=self._store_id,
                nonce=record.nonce,
                host=os.uname().nodename,
                pid=os.getpid(),
                created_at_ms=self._clock.now_ms(),
            )
        )

        def is_ours(existing: ExistingObject) -> bool:
            return (owner := _read(existing.store, key)) is not None and owner.nonce == record.nonce

        try:
            store.put(key, body, create_only=True, identity=is_ours)
        except AlreadyExists:
            raise self._end(record.epoch, record.session, _read(store, key), record) from None
        hit("objects.ownership.created")
        try:
            store.put(key, body, create_only=True)  # the same bytes: where it is no create, it does no harm
        except AlreadyExists:
            pass
        else:
            raise StorageFault(
                "the object store replaced an object that was to be created once: two owners would not see each other there",
                hint="use one that honours `If-None-Match: *` (docs/objects.md), or a path",
                store=store.url,
                key=key,
            )
        self._refuse_successor(record.session)

    def _claim_legacy(self) -> None:
        """Objects below no store's prefix belong to the first store that says so; the others only report them."""
        store = self._place()
        body = encode_object(OwnerObject(store_id=self._store_id, nonce="", created_at_ms=self._clock.now_ms()))

        def is_ours(existing: ExistingObject) -> bool:
            return (owner := _read(existing.store, LEGACY_OWNER)) is not None and owner.store_id == self._store_id

        try:
            store.put(LEGACY_OWNER, body, create_only=True, identity=is_ours)
            self._has_legacy = True
        except AlreadyExists:
            owner = _read(store, LEGACY_OWNER)
            other = owner.store_id if owner is not None else "unknown"
            emit("warning", "objects.legacy_owned_elsewhere", store=store.url, owner=other)

    def _forget_session(self, session: int) -> None:
        """Remove the object of our own earlier session: the newest one fences as well as all of them."""
        assert self._record is not None
        if 0 < session < self._record.session:
            with suppress(Unavailable, StorageFault):  # it costs a name in a listing, and nothing else
                self._place().delete(owner_key(self._store_id, self._epoch, session))

    def _newest(self, *, after: int) -> tuple[int, int, OwnerObject | None] | None:
        """(epoch, session, what it says) of the newest owner object behind a session of this epoch."""
        start = owner_key(self._store_id, self._epoch, after)
        return newest_owner(self._place(), self._store_id, start_after=start)

    def _refuse_successor(self, session: int) -> None:
        newest = self._newest(after=session)
        if newest is not None:
            raise self._end(*newest, self._record)

    def _end(self, epoch: int, session: int, owner: OwnerObject | None, known: OwnerFile | None) -> StoreFenced:
        """This directory is behind: the store is told, and the file remembers, so that the next opening is refused at once."""
        successor = f"{epoch:08x}.{session:08x}"
        self._fenced = error = superseded_owner(self._root, self._epoch, known, successor, _told(owner))
        self._mark(known, successor, _told(owner))
        self._fence(error)
        return error

    def _mark(self, known: OwnerFile | None, successor: str, text: str) -> None:
        """Have owner.json name the successor."""
        record = known or OwnerFile(store_id=self._store_id, epoch=self._epoch, session=0, nonce="")
        with suppress(StorageFault):  # the next life finds out for itself
            write_file(self._disk, self._root, replace(record, successor=successor, successor_text=text))

    def _claimed(self, newest: tuple[int, int, OwnerObject | None] | None) -> OwnerFile | None:
        """The epoch that this directory has claimed and not begun yet (`claim_epoch`), if nobody came after it."""
        try:
            known = read_file(self._disk, self._root)
        except Corruption:
            return None  # a takeover writes it anew
        if known is None or newest is None or newest[2] is None or known.store_id != self._store_id:
            return None
        is_ours = (known.epoch, known.session, known.nonce) == (newest[0], newest[1], newest[2].nonce)
        return known if is_ours and known.epoch > self._epoch else None

    # ── a new owner ───────────────────────────────────────────────────────────────────────────────────────────────────
    def take_over(self, begin_epoch: Callable[[int], int]) -> OwnerState:
        """Begin an owner epoch above all that the bucket has, and its first session: whoever wrote before is fenced.

        `begin_epoch(at_least)` begins one in the manifest, and says which.
        """
        with self._lock:
            newest = newest_owner(self._place(), self._store_id)
            highest = newest[0] if newest is not None else 0
            if highest - self._epoch > EPOCHS_PER_TAKEOVER:
                what = "the bucket has an owner of an epoch far above this store's"
                hint = "see who put it there; if nobody did, remove that object"
                where = {"epoch": self._epoch, "found": highest, "store": self._place().url}
                raise Corruption(what, hint=hint, **where)
            claimed = self._claimed(newest)
            self._epoch = begin_epoch(claimed.epoch if claimed is not None else highest + 1)
            hit("objects.ownership.epoch_begun")
            nonce = claimed.nonce if claimed is not None else secrets.token_hex(NONCE_CHARACTERS // 2)
            self._record = OwnerFile(store_id=self._store_id, epoch=self._epoch, session=1, nonce=nonce)
            write_file(self._disk, self._root, self._record)
            hit("objects.ownership.recorded")
            self._look()
        return self.state


def claim_epoch(store: ObjectStore, disk: Disk, root: str, store_id: str, epoch: int, now_ms: int) -> bool:
    """Claim an owner epoch for a directory that is not a store yet; whether it is ours. `take_over` goes on with it.

    Recorded before it is created: after a kill in between, the claim is recognised by its nonce.
    """
    record = read_file(disk, root)
    if record is None or (record.store_id, record.epoch, record.session) != (store_id, epoch, 1) or record.successor:
        nonce = secrets.token_hex(NONCE_CHARACTERS // 2)
        record = OwnerFile(store_id=store_id, epoch=epoch, session=1, nonce=nonce)
        write_file(disk, root, record)
        hit("objects.ownership.recorded")
    key, nonce = owner_key(store_id, epoch, 1), record.nonce
    owner = OwnerObject(store_id=store_id, nonce=nonce, host=os.uname().nodename, pid=os.getpid(), created_at_ms=now_ms)

    def is_ours(existing: ExistingObject) -> bool:
        present = _read(existing.store, key)
        return present is not None and present.nonce == nonce

    try:
        store.put(key, encode_object(owner), create_only=True, identity=is_ours)
    except AlreadyExists:
        return False
    hit("objects.ownership.created")
    return True


def newest_owner(
    store: ObjectStore, store_id: str, *, start_after: str = ""
) -> tuple[int, int, OwnerObject | None] | None:
    """(epoch, session, what it says) of the newest owner object in a place; `None` if there is none."""
    last = None
    for page in store.list_pages(owner_prefix(store_id), start_after=start_after):
        for info in page:
            if (name := parse_owner_key(info.key)) is not None:
                last = (name[1], name[2], info.key)
    return None if last is None else (last[0], last[1], _read(store, last[2]))


def newer_owner(store: ObjectStore, store_id: str, epoch: int, disk: Disk, root: str) -> str:
    """Who has claimed a place after this directory, for people; empty if nobody has. Claims nothing."""
    known = read_file(disk, root)
    known = known if known is not None and known.epoch == epoch else None
    start = owner_key(store_id, epoch, known.confirmed if known is not None else 0)
    newest = newest_owner(store, store_id, start_after=start)
    if newest is None or (known is not None and newest[2] is not None and newest[2].nonce == known.nonce):
        return ""
    return f"{newest[0]:08x}.{newest[1]:08x} ({_told(newest[2])})"


def superseded_owner(
    root: str, epoch: int, known: OwnerFile | None, successor: str, successor_text: str
) -> StoreFenced:
    """The error for a directory that is not the newest owner of its bucket."""
    session = known.session if known is not None else 0
    which = "this directory is a copy, an old backup, or was copied"
    what = f"another owner has claimed the store's objects ({successor_text}); {which}"
    return StoreFenced(what, hint=TAKE_OVER, path=root, epoch=epoch, session=session, successor=successor)


def refuse_fenced(disk: Disk, root: str, epoch: int) -> None:
    """Raise `StoreFenced` if the directory remembers that it is behind."""
    record = read_file(disk, root)
    if record is not None and record.epoch == epoch and record.successor:
        raise superseded_owner(root, epoch, record, record.successor, record.successor_text)


def _read(store: ObjectStore, key: str) -> OwnerObject | None:
    """What an owner object says; `None` if it is gone, or says nothing that makes sense."""
    try:
        if store.head(key).size_bytes > OBJECT_BYTES_MAX:
            return None
        return decode_object(store.get(key))
    except ObjectNotFound:
        return None


def _told(owner: OwnerObject | None) -> str:
    if owner is None or not owner.host:
        return "it does not say who"
    when = datetime.fromtimestamp(min(owner.created_at_ms, 253_402_300_799_000) / 1000, UTC)
    host = "".join(char for char in owner.host[:64] if char.isprintable())
    return f"process {owner.pid} on {host}, {when:%Y-%m-%d %H:%M:%S} UTC"
