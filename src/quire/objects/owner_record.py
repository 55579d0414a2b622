"""Two small records: what a store's directory knows of its right to write (owner.json), and what an owner object says.

Both are one line of JSON; the file has a second one, the checksum of the first. The page: docs/formats/owner.md.

Rules
  1. The file is replaced whole (`write_atomic`): a crash leaves the old one or the new one.
  2. What is read is bounded first and checked: an owner object comes from a bucket, where anybody may have put it.
  3. Unknown fields are ignored, missing ones have defaults: fields are only ever added.

Threads: any. Raises `Corruption`, `FormatTooNew`, and what the disk raises.

    >>> encode_file(OwnerFile(store_id="s", epoch=1, session=2, nonce="n"))[:60]
    b'{"format":1,"store_id":"s","epoch":1,"session":2,"nonce":"n"'
"""

from __future__ import annotations

import os

import msgspec

from quire.core.errors import Corruption, FormatTooNew
from quire.core.ids import U32_MAX
from quire.durable.checksums import crc64
from quire.durable.files import Disk, read_all, write_atomic
from quire.durable.object_names import OWNER_FILE

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
    """Replace owner.json, durably (rule 1)."""
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
    """What an owner object says; `None` if it is none of ours (rule 2): then it is somebody else's."""
    if len(data) > OBJECT_BYTES_MAX:
        return None
    try:
        return msgspec.json.decode(data, type=OwnerObject)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _damaged(path: str, cause: str) -> Corruption:
    hint = "`quire takeover` writes it anew, once you are sure that no other copy of the store is in use"
    return Corruption("owner.json is damaged", hint=hint, path=path, cause=cause)
