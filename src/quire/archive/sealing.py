"""A takeover ends the log of the owner before it: the seal takes the number that owner would write next (A2).

The deposed owner meets a name that is taken, and is fenced before it acknowledges anything that its successor does not have.

Threads: any. Raises what the object store raises, and `StoreFenced` where somebody else has taken over meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

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
    decode_object,
    encode_object,
    log_key,
)
from quire.archive.log_reader import epochs, last_object
from quire.archive.state_files import Origin, read_origin, write_origin
from quire.core.errors import AlreadyExists, Corruption, StoreFenced
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.objects.api import ExistingObject, ObjectStore

Overtaken = Callable[[Header, bytes, list[AnyEvent]], None]
"""(header, digest, events) of an object that the owner wrote before the seal."""


def former_epoch(store: ObjectStore, store_id: str, epoch: int) -> int:
    """The newest archived owner epoch below this one; 0 if there is none."""
    return max((known for known in epochs(store, store_id) if known < epoch), default=0)


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
    """Seal the log of `epoch`; position and digest of its last object.

    `known` is the last object that the caller has, with its digest; `overtaken` is given every later one, in order. Without
    `known` the seal goes behind whatever is there.
    """
    header, digest = (None, NO_DIGEST) if known is None else known
    if known is None and (last := last_object(store, store_id, epoch)) is not None:
        _, header, digest = last
    while True:
        if header is not None and header.kind is Kind.SEAL:
            return _sealed_already(header, successor)
        number = header.position.number + 1 if header is not None else 0
        key = log_key(store_id, Position(epoch, number))
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

        def is_ours(existing: ExistingObject) -> bool:
            present = decode_header(existing.read_all(), existing.info.key)
            return present.kind is Kind.SEAL and present.successor == successor

        hit("archive.seal.before")
        try:
            store.put(key, encode_object(ending, []), create_only=True, identity=is_ours)
        except AlreadyExists:  # the owner was quicker
            data = store.get(key)
            following, events = decode_object(data, key)
            if header is not None and following.parent_digest != digest:
                raise Corruption("the archive's log is not one chain", hint=HELPED_BY, key=key) from None
            header, digest = following, hashlib.sha256(data).digest()
            if header.kind is not Kind.SEAL and overtaken is not None:
                overtaken(header, digest, events)
            continue
        hit("archive.seal.put")
        return ending.parent, digest


def fenced_by(header: Header, key: str) -> StoreFenced:
    """The error of an owner whose next name a seal has."""
    what = f"owner epoch {header.successor} has taken this store over"
    hint = "write to the new owner; this directory opens with mode='r'"
    return StoreFenced(what, hint=hint, key=key, successor=f"{header.successor:08x}.00000000")


def _sealed_already(header: Header, successor: int) -> tuple[Position, bytes]:
    if header.successor > successor:
        raise StoreFenced(
            f"owner epoch {header.successor} has taken this store over",
            hint="restore its archive, or write to it",
            sealed=str(header.position),
        )
    return header.parent, header.parent_digest


def begin_log(
    store: ObjectStore, disk: Disk, root: str, store_id: str, epoch: int, at_ms: int
) -> tuple[Position, bytes]:
    """What the first object of an epoch comes after: the object its directory was restored to, or the end of the log before.

    That log is sealed here again: a takeover may have died before it did.
    """
    last, digest = Position(0, 0), NO_DIGEST
    former = former_epoch(store, store_id, epoch)
    if former:
        last, digest = seal(store, store_id, former, epoch, at_ms)
    while former and not last.epoch:  # an owner that wrote no log
        former = former_epoch(store, store_id, former)
        last, digest = _end_of(store, store_id, former)
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
    """(position, digest) of the last log object of an epoch, its seal aside."""
    last = last_object(store, store_id, epoch)
    if last is None:
        return Position(0, 0), NO_DIGEST
    _, header, digest = last
    return (header.parent, header.parent_digest) if header.kind is Kind.SEAL else (header.position, digest)


def note_parent(store: ObjectStore, disk: Disk, root: str, store_id: str, *, own: int, epoch: int) -> None:
    """A takeover of this directory, the owner of epoch `own` until now or restored from it, has begun an epoch."""
    origin = read_origin(disk, root)
    if origin is not None and origin.epoch == 0:
        write_origin(disk, root, msgspec.structs.replace(origin, epoch=epoch))
        return
    position, digest = _end_of(store, store_id, own)
    if position.epoch:
        origin = Origin(store_id=store_id, url=store.url, position=position, digest=digest, at_ms=0, epoch=epoch)
        write_origin(disk, root, origin)


def changes_elsewhere(store: ObjectStore, store_id: str, position: Position) -> Position | None:
    """The newest log object of the archive that a directory restored to a position does not have."""
    newest = None
    for epoch in epochs(store, store_id):
        if epoch == position.epoch:
            newest = max(missed(store, store_id, position), default=newest)
        elif epoch > position.epoch:
            last, _ = _end_of(store, store_id, epoch)
            newest = last if last.epoch == epoch else newest
    return newest


def missed(store: ObjectStore, store_id: str, position: Position) -> Iterator[Position]:
    """The log objects of an epoch behind a position: what a directory restored to it does not have."""
    last = last_object(store, store_id, position.epoch)
    if last is not None:
        end = last[1].position.number - (last[1].kind is Kind.SEAL)
        yield from (Position(position.epoch, number) for number in range(position.number + 1, end + 1))
