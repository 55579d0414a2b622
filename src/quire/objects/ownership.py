"""Decides which directory may write a store's objects, by session objects in the bucket that every owner can see (A2).

Two directories with one identity (a copy, a restored backup) share a bucket. Their lock files do not exclude each other, so
ownership is an object: an owner creates `{store_id}/owner/{epoch}.{session}` before its first put, and stops writing when a
higher one exists. A *claim* records a session with a new nonce in the directory (`owner.json`), synced, and then creates its
object: so an owner always recognises its own object, and a crash or a lost response locks no owner out. The claim lists the
bucket before it starts, from the last session that was confirmed as its own, and again at the end: of two concurrent claims at
most one succeeds. An owner is *fenced* when the bucket has a session above its own, or its own number under another nonce. It
puts and deletes nothing more, and records that in the file.

The state that an interrupted claim leaves on disk and in the bucket, and what the next opening does:
  looked          nothing                              lists and claims
  recorded        owner.json with a session            no object above the last: claims the next number
  created         + its object                         recognises it by its nonce, claims the next number
  confirmed       owner.json has it as confirmed       lists from that session on

A takeover claims the first session of an epoch that the manifest does not have yet (`claim_epoch`), and then begins the epoch:
  recorded        owner.json is ahead of the manifest  opens only for reading; another takeover claims the same number
  created         + the epoch's first object           opens only for reading; another takeover continues with the claim
  epoch_begun     + the epoch in the manifest          recognises the session as its own, claims the next number

Threads: any; the usual check reads two clocks and takes no lock. Formats: docs/formats/owner.md. Raises: `StoreFenced`,
`StorageFault` for an object store that creates one name twice, `Corruption`, `FormatTooNew`, and what the object store raises:
if it cannot be reached, `ObjectStoreUnavailable`, and the next put tries again.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from quire.core.clock import Clock, moment
from quire.core.decoding import UNDECODABLE, described
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
"""Both limits are more than ten times the usual size."""
NONCE_CHARACTERS = 32


class OwnerFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """The session that this directory claims, and the last of its sessions that it has seen in the bucket."""

    format: int = FORMAT
    store_id: str
    epoch: int
    session: int
    nonce: str
    confirmed: int = 0
    """The newest session of this epoch that was seen in the bucket with this directory's nonce; 0 if none was."""
    former_nonce: str = ""
    """While a takeover of this directory is not complete: the nonce of the session that it had before."""
    successor: str = ""
    """`EPOCH.SESSION` of the owner object that fenced this directory; empty if none did."""
    successor_text: str = ""
    """The same in readable form: host, process and time of the other owner."""


class OwnerObject(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of an owner object. Host, process and time are informational."""

    format: int = FORMAT
    store_id: str
    nonce: str
    host: str = ""
    pid: int = 0
    created_at_ms: int = 0


class OwnerState(msgspec.Struct, frozen=True):
    """The ownership state of a store, for display and metrics."""

    state: str
    """`not needed`, `unconfirmed`, `confirmed` or `fenced`. From the directory alone also `standby`, and `restored`: it can be
    read, and has no owner yet."""
    epoch: int
    session: int = 0
    """0 before the first put since the store was opened."""
    successor: str = ""


def encode_file(record: OwnerFile) -> bytes:
    """Return the bytes of owner.json."""
    line = msgspec.json.encode(record)
    return line + b"\n" + f"{crc64(line):016x}".encode() + b"\n"


def decode_file(data: bytes, path: str) -> OwnerFile:
    """Decode owner.json."""
    line, _, rest = data.partition(b"\n")
    if len(data) > FILE_BYTES_MAX or rest != f"{crc64(line):016x}\n".encode():
        raise _damaged(path, "its checksum does not match its contents")
    try:
        record = msgspec.json.decode(line, type=described(OwnerFile))
    except UNDECODABLE as error:
        raise _damaged(path, str(error)) from error
    if record.format > FORMAT:
        raise FormatTooNew("owner.json was written by a newer quire", hint="upgrade quire", path=path)
    numbers = (record.epoch, record.session, record.confirmed)
    if not all(0 <= number <= U32_MAX for number in numbers) or record.confirmed > record.session:
        raise _damaged(path, "its numbers are invalid")
    return record


def read_file(disk: Disk, root: str) -> OwnerFile | None:
    """Read owner.json of a store's directory; `None` if the directory never claimed a session."""
    path = os.path.join(root, OWNER_FILE)
    try:
        if disk.size(path) > FILE_BYTES_MAX:
            raise _damaged(path, "it is too long")
        return decode_file(read_all(disk, path), path)
    except FileNotFoundError:
        return None


def write_file(disk: Disk, root: str, record: OwnerFile) -> None:
    """Replace owner.json durably."""
    write_atomic(disk, os.path.join(root, OWNER_FILE), encode_file(record))


def recorded_state(disk: Disk, root: str, epoch: int) -> OwnerState:
    """Return the ownership state that the directory records. Readers use it: they do not query the bucket."""
    record = read_file(disk, root)
    if record is not None and record.epoch > epoch:  # a takeover was interrupted
        return OwnerState("fenced", epoch, 0, f"{record.epoch:08x}.{record.session:08x}")
    if record is None or record.epoch != epoch:
        return OwnerState("unconfirmed", epoch)
    if record.successor:
        state = "restored" if _is_restored(record) else "fenced"
        return OwnerState(state, epoch, record.session, record.successor)
    confirmed = record.session and record.confirmed == record.session
    return OwnerState("confirmed" if confirmed else "unconfirmed", epoch, record.session)


def no_successor(epoch: int) -> str:
    """Return what a restored directory records as its successor: a session that no owner has, because theirs begin at 1."""
    return f"{epoch:08x}.{0:08x}"


def _is_restored(record: OwnerFile) -> bool:
    return record.successor == no_successor(record.epoch)


def encode_object(record: OwnerObject) -> bytes:
    """Return the bytes of an owner object."""
    return msgspec.json.encode(record) + b"\n"


def decode_object(data: bytes) -> OwnerObject | None:
    """Decode an owner object. An object that does not decode is `None`, and treated as foreign."""
    if len(data) > OBJECT_BYTES_MAX:
        return None
    try:
        return msgspec.json.decode(data, type=described(OwnerObject))
    except UNDECODABLE:
        return None


def _damaged(path: str, cause: str) -> Corruption:
    hint = "`quire takeover` writes a new one, once you are sure that no other copy of the store is in use"
    return Corruption("owner.json is damaged", hint=hint, path=path, cause=cause)


CHECK_SECONDS = 60.0
"""A put lists the bucket again if the last check is older than this."""

EPOCHS_PER_TAKEOVER = 1_000
"""A bucket whose epoch is further ahead than this has a forged name, not that many unseen takeovers."""

READ_ONLY_COMMANDS = "`quire sqlite shell`, `kv get`, `stream read` and others read it (in Python: mode='r')"

TAKE_OVER = f"to continue from this directory, run `quire takeover`; {READ_ONLY_COMMANDS}"


class Ownership:
    """The right of one open store to put and delete objects."""

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
        """Begins the first owner epoch, if the store had none when it was opened, and returns its number."""
        self._legacy = legacy
        # replaced as a whole under _lock, read by any thread
        self._lock = threading.Lock()
        self._epoch = epoch
        self._record: OwnerFile | None = None
        """What has been recorded since the store was opened."""
        self._verified_at: tuple[float, int] | None = None
        """When the last check of the bucket succeeded: monotonic seconds, wall-clock milliseconds. `None` before the claim."""
        self._fenced: StoreFenced | None = None
        self._has_legacy = not legacy

    @property
    def state(self) -> OwnerState:
        """The current ownership state."""
        record, fenced = self._record, self._fenced
        session = record.session if record is not None else 0
        if fenced is not None:
            return OwnerState("fenced", self._epoch, session, str(fenced.where.get("successor", "")))
        return OwnerState("unconfirmed" if self._verified_at is None else "confirmed", self._epoch, session)

    # ── checks before writes ──────────────────────────────────────────────────────────────────────────────────────────
    def check(self) -> None:
        """Check ownership before a put: the first call claims a session, later ones list the bucket at most once a minute."""
        if self._fenced is not None:
            raise self._fenced.with_traceback(None)
        if not self._is_fresh():
            with self._lock:
                if self._fenced is not None:
                    raise self._fenced.with_traceback(None)
                if not self._is_fresh():  # another thread may have checked meanwhile
                    self._verify()

    def confirm(self) -> None:
        """Check ownership before a batch of deletions: always lists the bucket."""
        with self._lock:
            if self._fenced is not None:
                raise self._fenced.with_traceback(None)
            self._verify()

    def depose(self, error: StoreFenced) -> None:
        """Record that the archiver met a successor's seal."""
        with self._lock:
            if self._fenced is None:
                self._fenced = error
                self._record_successor(self._record, str(error.where.get("successor", "")), error.what)

    def owns_legacy(self) -> bool:
        """Return whether this store may delete the objects without a store prefix at the root of the location."""
        self.check()
        return self._has_legacy

    def _is_fresh(self) -> bool:
        if self._verified_at is None:
            return False
        monotonic, wall_ms = self._verified_at
        # Both clocks: the monotonic clock does not advance while the machine sleeps.
        gone = abs(self._clock.now_ms() - wall_ms)  # `abs`: a wall clock that was set back must not look fresh
        return self._clock.monotonic() - monotonic < CHECK_SECONDS and gone < CHECK_SECONDS * 1000

    # ── claiming (under the lock) ─────────────────────────────────────────────────────────────────────────────────────
    def _verify(self) -> None:
        """Check that no owner came after this one; the first call claims a session."""
        now = (self._clock.monotonic(), self._clock.now_ms())  # before the request: the answer is at least this old
        if self._verified_at is None:
            self._claim()
        else:
            assert self._record is not None
            self._refuse_successor(self._record.session)
        self._verified_at = now

    def _claim(self) -> None:
        if not self._epoch:
            assert self._first_epoch is not None, "a store that puts has an epoch"
            self._epoch = self._first_epoch()
        if self._record is None:
            self._record = self._record_next_session()
            hit("objects.ownership.recorded")
        # After a failure the next put repeats this with the same record: the object is recognised by its nonce.
        self._create(self._record)
        if self._legacy:
            self._claim_legacy()
        confirmed = replace(self._record, confirmed=self._record.session, former_nonce="")
        write_file(self._disk, self._root, confirmed)
        hit("objects.ownership.confirmed")
        self._forget_session(self._record.confirmed)
        self._record = confirmed
        emit("info", "objects.session_claimed", epoch=self._epoch, session=confirmed.session)

    def _record_next_session(self) -> OwnerFile:
        """Record the next session in the directory."""
        recorded = read_file(self._disk, self._root)
        if recorded is not None and (recorded.store_id, recorded.epoch) != (self._store_id, self._epoch):
            recorded = None  # its epoch was ended by a takeover
        confirmed = recorded.confirmed if recorded is not None else 0
        # From the last session seen in the bucket as this directory's own: whatever follows it is the recorded one, if
        # its object was created, or belongs to another owner.
        newest = self._newest(after=confirmed)
        if newest is not None:
            epoch, session, owner = newest
            is_ours = recorded is not None and (epoch, session) == (recorded.epoch, recorded.session)
            if not is_ours or owner is None or recorded is None or owner.nonce != recorded.nonce:
                raise self._fence_self(epoch, session, owner, recorded)
            confirmed = session
        record = OwnerFile(
            store_id=self._store_id,
            epoch=self._epoch,
            session=(recorded.session if recorded is not None else 0) + 1,
            nonce=secrets.token_hex(NONCE_CHARACTERS // 2),
            confirmed=confirmed,
        )
        write_file(self._disk, self._root, record)
        return record

    def _create(self, record: OwnerFile) -> None:
        """Create the object of a recorded session."""
        store, key = self._place(), owner_key(self._store_id, record.epoch, record.session)
        try:
            body = _put_session(store, record, self._clock.now_ms())
        except AlreadyExists:
            raise self._fence_self(record.epoch, record.session, _read(store, key), record) from None
        hit("objects.ownership.created")
        try:
            # Tests that the store honours create-only puts. The bytes are the same, so a store that replaces loses nothing.
            store.put(key, body, create_only=True)
        except AlreadyExists:
            pass
        else:
            raise StorageFault(
                "the object store replaced an object that was to be created once: two owners would not see each other there",
                hint="use one that supports `If-None-Match: *` (docs/objects.md), or a path",
                store=store.url,
                key=key,
            )
        # Last: an owner that appeared since the first listing is found before this session counts as confirmed.
        self._refuse_successor(record.session)

    def _claim_legacy(self) -> None:
        """Claim the objects without a store prefix: they belong to the first store that claims them. Other stores only report
        them."""
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
        """Delete the object of this directory's earlier session: the newest one alone fences other owners."""
        assert self._record is not None
        if 0 < session < self._record.session:
            with suppress(Unavailable, StorageFault):  # a leftover only costs one name in a listing
                self._place().delete(owner_key(self._store_id, self._epoch, session))

    def _newest(self, *, after: int) -> tuple[int, int, OwnerObject | None] | None:
        """Return (epoch, session, contents) of the newest owner object after a session of this epoch."""
        start = owner_key(self._store_id, self._epoch, after)
        return newest_owner(self._place(), self._store_id, start_after=start)

    def _refuse_successor(self, session: int) -> None:
        newest = self._newest(after=session)
        if newest is not None:
            raise self._fence_self(*newest, self._record)

    def _fence_self(
        self, epoch: int, session: int, owner: OwnerObject | None, recorded: OwnerFile | None
    ) -> StoreFenced:
        """Fence this directory: notify the store, and record it in owner.json so that the next opening is refused at once."""
        successor = f"{epoch:08x}.{session:08x}"
        self._fenced = error = superseded_owner(self._root, self._epoch, recorded, successor, _owner_text(owner))
        self._record_successor(recorded, successor, _owner_text(owner))
        self._fence(error)
        return error

    def _record_successor(self, recorded: OwnerFile | None, successor: str, text: str) -> None:
        """Record the successor in owner.json."""
        record = recorded or OwnerFile(store_id=self._store_id, epoch=self._epoch, session=0, nonce="")
        with suppress(StorageFault):  # without the record, the next claim after an open finds the successor
            write_file(self._disk, self._root, replace(record, successor=successor, successor_text=text))

    def _claimed(self, newest: tuple[int, int, OwnerObject | None] | None) -> OwnerFile | None:
        """Return the epoch that this directory has claimed and not begun yet (`claim_epoch`), unless a newer owner exists."""
        try:
            recorded = read_file(self._disk, self._root)
        except Corruption:
            return None  # a takeover replaces the file
        if recorded is None or newest is None or newest[2] is None or recorded.store_id != self._store_id:
            return None
        is_ours = (recorded.epoch, recorded.session, recorded.nonce) == (newest[0], newest[1], newest[2].nonce)
        return recorded if is_ours and recorded.epoch > self._epoch else None

    # ── takeover ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def take_over(self, begin_epoch: Callable[[int], int]) -> OwnerState:
        """Claim an owner epoch above all in the bucket, begin it, confirm its first session. All previous owners are fenced.

        `begin_epoch(number)` begins the epoch in the manifest and returns its number.
        """
        with self._lock:
            newest = newest_owner(self._place(), self._store_id)
            highest = newest[0] if newest is not None else 0
            refuse_forged(self._place(), self._epoch, highest)
            claimed = self._claimed(newest)
            epoch = claimed.epoch if claimed is not None else max(highest, self._epoch) + 1
            # The bucket first: an epoch that only this directory's manifest has would depose, when the directory is opened
            # again, an owner that could not be warned.
            if not claim_epoch(self._place(), self._disk, self._root, self._store_id, epoch, self._clock.now_ms()):
                what = f"another directory has claimed owner epoch {epoch} at the same moment"
                raise StoreFenced(what, hint=TAKE_OVER, path=self._root, epoch=self._epoch)
            self._epoch = begin_epoch(epoch)
            assert self._epoch == epoch, "the claimed epoch is the one that is begun"
            hit("objects.ownership.epoch_begun")
            self._record = read_file(self._disk, self._root)
            self._verify()
        return self.state


def refuse_forged(store: ObjectStore, epoch: int, highest: int) -> None:
    """Raise `Corruption` if the highest owner epoch in a bucket is further above this store's than takeovers can explain."""
    if highest - epoch > EPOCHS_PER_TAKEOVER:
        what = "the bucket has an owner whose epoch is far above this store's"
        hint = "find the process that wrote it; if there is none, remove that object"
        raise Corruption(what, hint=hint, epoch=epoch, found=highest, store=store.url)


def claim_epoch(store: ObjectStore, disk: Disk, root: str, store_id: str, epoch: int, now_ms: int) -> bool:
    """Claim an owner epoch that this directory's manifest does not have yet, and return whether it succeeded. `take_over`
    continues with the claimed epoch.

    The claim is recorded before its object is created: after a kill in between, it is recognised by its nonce.
    """
    try:
        record = read_file(disk, root)
    except Corruption:
        record = None  # a takeover replaces the file
    if record is None or (record.store_id, record.epoch, record.session) != (store_id, epoch, 1) or record.successor:
        # If the object is never created, the owner of the former session goes on (`newer_owner`).
        former = (record.former_nonce or record.nonce) if record is not None and record.store_id == store_id else ""
        nonce = secrets.token_hex(NONCE_CHARACTERS // 2)
        record = OwnerFile(store_id=store_id, epoch=epoch, session=1, nonce=nonce, former_nonce=former)
        write_file(disk, root, record)
        hit("objects.ownership.recorded")
    try:
        _put_session(store, record, now_ms)
    except AlreadyExists:
        return False
    hit("objects.ownership.created")
    # The name is free also if another owner has begun the epoch since the claim was recorded, and was opened again: it has then
    # replaced its first session by a later one.
    return newest_owner(store, store_id, start_after=owner_key(store_id, epoch, 1)) is None


def _put_session(store: ObjectStore, record: OwnerFile, now_ms: int) -> bytes:
    """Create the object of a recorded session, or recognise it by its nonce, and return its bytes. Raises `AlreadyExists` if it
    is another owner's."""
    key = owner_key(record.store_id, record.epoch, record.session)
    host, pid = os.uname().nodename, os.getpid()
    owner = OwnerObject(store_id=record.store_id, nonce=record.nonce, host=host, pid=pid, created_at_ms=now_ms)

    def is_ours(existing: ExistingObject) -> bool:
        return (present := _read(existing.store, key)) is not None and present.nonce == record.nonce

    body = encode_object(owner)
    store.put(key, body, create_only=True, identity=is_ours)
    return body


def newest_owner(
    store: ObjectStore, store_id: str, *, start_after: str = ""
) -> tuple[int, int, OwnerObject | None] | None:
    """Return (epoch, session, contents) of the newest owner object in a location; `None` if it has none."""
    last = max(_owners(store, store_id, start_after), default=None)
    return None if last is None else (last[0], last[1], _read(store, last[2]))


def claimed_epochs(store: ObjectStore, store_id: str) -> list[int]:
    """Return the owner epochs that were ever claimed in a location, oldest first."""
    return sorted({epoch for epoch, _, _ in _owners(store, store_id)})


def newer_owner(store: ObjectStore, store_id: str, epoch: int, disk: Disk, root: str) -> str:
    """Return a description of the owner that claimed a location after this directory; empty if none did. Claims nothing.

    What this directory has claimed itself does not count. If it has claimed an epoch that it has not begun, and the claim's
    object exists, other sessions of its present epoch do not count either: that takeover has decided about them. Without the
    object nobody could know of that takeover, so a session that followed this directory's counts.
    """
    recorded = read_file(disk, root)
    seen = recorded.confirmed if recorded is not None and recorded.epoch == epoch else 0
    is_claim = recorded is not None and recorded.epoch > epoch
    start_after = owner_key(store_id, epoch, seen) if epoch else ""  # before its first put a store has no epoch
    for newer, session, key in reversed(list(_owners(store, store_id, start_after))):
        owner, nonce = _read(store, key), ""
        if recorded is not None:
            nonce = recorded.former_nonce if is_claim and newer == epoch else recorded.nonce
        if owner is None or not nonce or owner.nonce != nonce:
            return f"{newer:08x}.{session:08x} ({_owner_text(owner)})"
        if is_claim:
            break  # its claim, or its session before the claim: what is older does not count
    return ""


def _owners(store: ObjectStore, store_id: str, start_after: str = "") -> Iterator[tuple[int, int, str]]:
    """Yield (epoch, session, key) of the owner objects in a location, oldest first."""
    for page in store.list_pages(owner_prefix(store_id), start_after=start_after):
        for info in page:
            if (name := parse_owner_key(info.key)) is not None:
                yield name[1], name[2], info.key


def superseded_owner(
    root: str, epoch: int, recorded: OwnerFile | None, successor: str, successor_text: str
) -> StoreFenced:
    """Return the error for a directory that is not the newest owner of its bucket."""
    if successor == no_successor(epoch):
        what = f"{successor_text} and has no owner: it can only be read"
        hint = f"{READ_ONLY_COMMANDS}; `quire takeover` makes it the owner, or shows which changes only the archive has"
        return StoreFenced(what, hint=hint, path=root, epoch=epoch)
    session = recorded.session if recorded is not None else 0
    which = "this directory is a copy of the store, or the store was copied or restored elsewhere"
    what = f"another owner has claimed the store's objects ({successor_text}); {which}"
    return StoreFenced(what, hint=TAKE_OVER, path=root, epoch=epoch, session=session, successor=successor)


def refuse_fenced(disk: Disk, root: str, epoch: int) -> None:
    """Raise `StoreFenced` if the directory has recorded a successor, or that it has claimed an epoch that it has not begun."""
    record = read_file(disk, root)
    if record is not None and record.epoch == epoch and record.successor:
        raise superseded_owner(root, epoch, record, record.successor, record.successor_text)
    if record is not None and record.epoch > epoch:
        hint = f"`quire takeover` completes it, or `quire promote` if this is a standby; {READ_ONLY_COMMANDS}"
        what = "a takeover of this directory was interrupted"
        raise StoreFenced(what, hint=hint, path=root, epoch=epoch, claimed=record.epoch)


def _read(store: ObjectStore, key: str) -> OwnerObject | None:
    """Read an owner object; `None` if it does not exist, is too large or does not decode."""
    try:
        if store.head(key).size_bytes > OBJECT_BYTES_MAX:
            return None
        return decode_object(store.get(key))
    except ObjectNotFound:
        return None


def _owner_text(owner: OwnerObject | None) -> str:
    if owner is None or not owner.host:
        return "unknown"
    # Bounded on both sides: a time that cannot be shown must not keep an owner from fencing itself.
    when = moment(min(max(owner.created_at_ms, 1), 253_402_300_799_000))
    host = "".join(char for char in owner.host[:64] if char.isprintable())
    return f"process {owner.pid} on {host}, {when}"
