"""Seals the log of a deposed owner: in a takeover, the seal takes the number that this owner would write next (A2).

The deposed owner finds that name taken, and is fenced before it acknowledges any change that its successor does not have.

An owner that puts objects faster than the sealer reads them would win every number. So a sealer that has lost a number puts a
seal some numbers ahead, twice as many each time it loses: the owner uses its numbers in order, and stops there. The sealer then
continues with the next number, reads the objects that the owner has put until then, and seals the first number that the owner
has not used. The log ends before its first seal; a later seal is left in place.

What is in the bucket if a takeover dies, and what follows:
  a seal ahead     the owner may use the numbers before it and is stopped there   the next takeover seals after the last object
  a seal           the log has its end                                             the next takeover continues from there

Threads: any. Raises the object store's errors, and `StoreFenced` if another owner has taken over meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec

from quire.archive.format import (
    HELPED_BY,
    NO_DIGEST,
    NONE,
    AnyEvent,
    Header,
    Kind,
    Position,
    decode_header,
    encode_object,
    log_key,
)
from quire.archive.log_reader import digest_of, epochs, header_of, owner_log, read_object
from quire.archive.state_files import Origin, read_origin, write_origin
from quire.core.errors import AlreadyExists, Corruption, StoreFenced
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.objects.api import ExistingObject, ObjectStore
from quire.objects.ownership import READ_ONLY_COMMANDS, claimed_epochs, refuse_forged

Overtaken = Callable[[Header, bytes, list[AnyEvent]], None]
"""Called with (header, digest, events) of an object that the owner wrote before the seal."""


def owner_epochs(store: ObjectStore, store_id: str) -> list[int]:
    """Return the owner epochs that have an archive or may begin one at any moment, oldest first. An owner that has claimed the
    store puts its first log object later, without another look at who owns it."""
    archived = epochs(store, store_id)
    if not archived:
        return []
    return sorted({*archived, *(epoch for epoch in claimed_epochs(store, store_id) if epoch > archived[0])})


def highest_epoch(store: ObjectStore, store_id: str, epoch: int) -> int:
    """Return the highest owner epoch that was claimed or has an archive. `epoch` is the caller's own: `Corruption` is raised if
    the highest one is further above it than takeovers can explain."""
    highest = max((*epochs(store, store_id), *claimed_epochs(store, store_id)), default=0)
    refuse_forged(store, epoch, highest)
    return highest


def former_epoch(store: ObjectStore, store_id: str, epoch: int) -> int:
    """Return the newest owner epoch of the archive below `epoch`, or 0."""
    return max((former for former in owner_epochs(store, store_id) if former < epoch), default=0)


def seal_former(store: ObjectStore, store_id: str, successor: int, at_ms: int) -> tuple[Position, bytes]:
    """Seal the logs of the owners before `successor`, back to the newest one that wrote a log. Return the position and digest
    of that log's last object, or those of no object."""
    last, digest, epoch = Position(0, 0), NO_DIGEST, successor
    while not last.epoch and (epoch := former_epoch(store, store_id, epoch)):
        last, digest = seal(store, store_id, epoch, successor, at_ms)
    return last, digest


def seal_later(store: ObjectStore, store_id: str, epoch: int, successor: int, at_ms: int) -> None:
    """Seal the logs of the owners after `epoch`. None of them had completed a base, but each may be about to."""
    for later in owner_epochs(store, store_id):
        if epoch < later < successor:
            seal(store, store_id, later, successor, at_ms)


def seal(
    store: ObjectStore,
    store_id: str,
    epoch: int,
    successor: int,
    at_ms: int,
    *,
    known: tuple[Header, bytes] | None = None,
    overtaken: Overtaken | None = None,
) -> tuple[Position, bytes]:
    """Seal the log of `epoch`. Return the position and digest of its last object.

    `known`: the last object that the caller has, with its digest; `overtaken` is called with every later one, in order, unless
    the owner has trimmed them: the position that is returned is then later than that of the last call. Without `known`, the
    seal is put after the last object in the bucket.
    """
    header, digest = known or _last_object(store, store_id, epoch)
    lead, is_stopped = 0, False
    while True:
        number = header.position.number + 1 if header is not None else 0
        ending = Header(
            kind=Kind.SEAL,
            position=Position(epoch, number),
            parent=header.position if header is not None else Position(0, 0),
            parent_digest=digest,
            at_ms=at_ms,
            restorable=header.restorable if header is not None else NONE,
            base=header.base if header is not None else NONE,
            successor=successor,
        )
        if lead and not is_stopped:
            hit("archive.seal.ahead")
            is_stopped = _put_seal(store, store_id, _ahead_of(ending, lead))
            hit("archive.seal.stopped")
        hit("archive.seal.before")
        if header is not None and not lead and _is_trimmed_after(store, store_id, header.position):
            return seal(store, store_id, epoch, successor, at_ms)
        if _put_seal(store, store_id, ending):
            hit("archive.seal.put")
            break
        # the owner, or another takeover, was faster
        following, following_digest, events = read_object(store, store_id, ending.position)
        if following.kind is Kind.SEAL:
            # Of two takeovers the higher epoch wins. A lower one has ended the log at the same place.
            if following.successor > successor:
                raise _taken_over_by(following)
            break
        if header is not None and following.parent_digest != digest:
            key = log_key(store_id, ending.position)
            raise Corruption("the archive's log is not a single chain", hint=HELPED_BY, key=key)
        header, digest = following, following_digest
        if overtaken is not None:
            overtaken(header, digest, events)
        lead = 2 * lead or 1
    if any(positions_after(store, store_id, ending.position)):
        # The owner has just trimmed its log past `known`: the number was free, and this seal stops no owner.
        return seal(store, store_id, epoch, successor, at_ms)
    return ending.parent, digest


def _is_trimmed_after(store: ObjectStore, store_id: str, position: Position) -> bool:
    """Return whether the owner has removed log objects after `position`."""
    later = next(positions_after(store, store_id, position), None)
    return later is not None and later.number != position.number + 1


def _last_object(store: ObjectStore, store_id: str, epoch: int) -> tuple[Header | None, bytes]:
    """Return (header, digest) of the last object of an owner's log. A damaged object ends the log like any other: its header is
    that of the last object that can be read, with its number."""
    positions = owner_log(store, store_id, epoch).positions
    for position in reversed(positions):
        with suppress(Corruption):
            header = msgspec.structs.replace(header_of(store, store_id, position), position=positions[-1])
            return header, digest_of(store, store_id, positions[-1])
    return None, NO_DIGEST


def _ahead_of(ending: Header, lead: int) -> Header:
    """Return a seal `lead` numbers after `ending`. It has no parent digest: the object before it is not known yet."""
    number = ending.position.number + lead
    position, parent = (Position(ending.position.epoch, at) for at in (number, number - 1))
    return msgspec.structs.replace(ending, position=position, parent=parent, parent_digest=NO_DIGEST)


def _put_seal(store: ObjectStore, store_id: str, ending: Header) -> bool:
    """Put a seal. Return `False` if another object has its number."""

    def is_ours(existing: ExistingObject) -> bool:
        present = decode_header(existing.read_all(), existing.info.key)
        # Also a seal that this takeover has put ahead: the owner may have used all numbers before it.
        return present.kind is Kind.SEAL and present.successor == ending.successor

    try:
        key = log_key(store_id, ending.position)
        store.put(key, encode_object(ending, []), create_only=True, identity=is_ours)
    except AlreadyExists:
        return False
    return True


def fenced_by(header: Header, key: str) -> StoreFenced:
    """Return the error for an owner whose next number has been sealed."""
    what = f"owner epoch {header.successor} has taken this store over"
    hint = f"write to the new owner; {READ_ONLY_COMMANDS}"
    return StoreFenced(what, hint=hint, key=key, successor=f"{header.successor:08x}.00000000")


def _taken_over_by(header: Header) -> StoreFenced:
    what = f"owner epoch {header.successor} has taken this store over"
    return StoreFenced(what, hint="write to the new owner, or restore its archive", sealed=str(header.position))


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where an owner continues its log."""

    next: Position
    parent: Position
    """The object before the next one; for the first object of an epoch, one of an earlier epoch."""
    digest: bytes
    """Digest of the object before the next one."""
    restorable: int = NONE
    base: int = NONE
    at_ms: int = 0
    """Time of the last object, also of an earlier epoch; 0 if there is none."""


def end_of_log(store: ObjectStore, disk: Disk, root: str, store_id: str, epoch: int, now_ms: int) -> ResumePoint:
    """Return where the log of an owner's own epoch ends. Raises `StoreFenced` if it was sealed."""
    log = owner_log(store, store_id, epoch)
    if log.seal is not None:
        raise fenced_by(log.seal, log_key(store_id, log.seal.position))
    if not log.positions:
        parent, digest = begin_log(store, disk, root, store_id, epoch, now_ms)
        at_ms = _last_moment(store, store_id, epoch)
        return ResumePoint(next=Position(epoch, 0), parent=parent, digest=digest, at_ms=at_ms)
    # If that object is damaged, the owner continues after it, with a base.
    header, digest = _last_object(store, store_id, epoch)
    if header is None:
        raise Corruption(
            "no object of the archive's log can be read", hint=HELPED_BY, key=log_key(store_id, log.positions[-1])
        )
    return ResumePoint(
        next=Position(epoch, header.position.number + 1),
        parent=header.position,
        digest=digest,
        restorable=header.restorable,
        base=header.base,
        at_ms=header.at_ms,
    )


def _last_moment(store: ObjectStore, store_id: str, epoch: int) -> int:
    """Return the time of the last log object before an epoch; 0 if there is none.

    The clock of a new owner may be behind. Its objects must not be older than those of the owner before it: otherwise what it
    retires would be deleted while moments of that owner need it.
    """
    while former := former_epoch(store, store_id, epoch):
        if (header := _last_object(store, store_id, former)[0]) is not None:
            return header.at_ms
        epoch = former  # that owner wrote no log
    return 0


def begin_log(
    store: ObjectStore, disk: Disk, root: str, store_id: str, epoch: int, at_ms: int
) -> tuple[Position, bytes]:
    """Return the parent of the first object of an epoch: the object that its directory was restored to, or the last one of the
    log before.

    The logs before are sealed again here, because a takeover may have died before sealing them.
    """
    last, digest = seal_former(store, store_id, epoch, at_ms)
    origin = read_origin(disk, root)
    if (
        origin is not None
        and origin.store_id == store_id
        and origin.epoch in (0, epoch)
        and origin.position.epoch < epoch
    ):
        return origin.position, origin.digest
    return last, digest


def _end_of(store: ObjectStore, store_id: str, epoch: int) -> tuple[Position, bytes]:
    """Return (position, digest) of the last log object of an epoch, not counting seals."""
    positions = owner_log(store, store_id, epoch).positions
    if not positions:
        return Position(0, 0), NO_DIGEST
    return positions[-1], digest_of(store, store_id, positions[-1])


def note_parent(store: ObjectStore, disk: Disk, root: str, store_id: str, *, own: int, epoch: int) -> None:
    """Record the parent of a new epoch that a takeover of this directory has begun. The directory was the owner of epoch `own`,
    or was restored from it."""
    origin = read_origin(disk, root)
    if origin is not None and origin.epoch == 0:
        write_origin(disk, root, msgspec.structs.replace(origin, epoch=epoch))
        return
    position, digest = _end_of(store, store_id, own)
    if position.epoch:
        origin = Origin(store_id=store_id, url=store.url, position=position, digest=digest, at_ms=0, epoch=epoch)
        write_origin(disk, root, origin)


def newest_missing_position(store: ObjectStore, store_id: str, position: Position) -> Position | None:
    """Return the newest log object that a directory restored to `position` does not have, or `None`."""
    newest = None
    for epoch in epochs(store, store_id):
        if epoch == position.epoch:
            newest = max(positions_after(store, store_id, position), default=newest)
        elif epoch > position.epoch:
            last, _ = _end_of(store, store_id, epoch)
            newest = last if last.epoch == epoch else newest
    return newest


def positions_after(store: ObjectStore, store_id: str, position: Position) -> Iterator[Position]:
    """Yield the log objects after `position` in its epoch."""
    log = owner_log(store, store_id, position.epoch)
    yield from (later for later in log.positions if later > position)
