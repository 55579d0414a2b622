"""The actions that executors call: rows of tables, leases, parts of loads, streams.

Apart from `messages.py`, whose answers are made of a manifest's values: this module imports where `import lmdb` fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from quire.stream.remote_read import SharedStream


class Role(Enum):
    """Who may ask."""

    READ = "read"
    ADMIN = "admin"


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Base of all requests."""


@dataclass(frozen=True, slots=True)
class Action:
    """An action of the service."""

    name: str
    request: type[Request]
    answer: Any
    access: Role = Role.ADMIN
    keyed: bool = False
    local: bool = False
    """Only through the Unix socket."""


class TableTicket(Request, frozen=True):
    """Rows of a manifest table, as a Flight ticket. Keys are the values of their fields, in order."""

    table: str
    prefix: tuple[Any, ...] = ()
    start: tuple[Any, ...] | None = None
    stop: tuple[Any, ...] | None = None
    columns: tuple[str, ...] | None = None
    rows_max: int = 0
    """0: all."""
    after: bytes = b""
    """The key of the last row that the client has: where a broken stream goes on."""
    raw: bool = False
    """Rows as they are on disk: `key` and `value`. Whoever reads them decodes them."""


class PutPart(Request, frozen=True):
    """Bytes of a part of a load, at an offset; the same bytes may be sent again."""

    load: int
    part: str
    offset: int
    body: bytes


LOAD_PUT = Action("load.put", PutPart, None)


class OfLease(Request, frozen=True):
    """A lease on versions that were lent."""

    lease_id: int


LEASE_RENEW = Action("lease.renew", OfLease, None, Role.READ)


class TakeIds(Request, frozen=True):
    """Ids for tables of a load into a key-value database; the first such call begins the load. Asking again gives others."""

    load: int
    database: str
    count: int
    create: bool = False


class Shelf(Request, frozen=True):
    """Where a task writes tables of a load, and how: the database's directory, ids, the lsn of every row."""

    directory: str
    lsn: int
    ids: tuple[int, ...]
    table_bytes: int
    block_bytes: int
    compression: str
    bloom_bits_per_key: int


KV_IDS = Action("kv.load.ids", TakeIds, Shelf)


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Records do not travel here: whoever wants them reads files and objects (`stream/remote_read.py`). Registering leaves an
# existing consumer where it is, and an acknowledgement only moves forward: both may be repeated.
class OfStream(Request, frozen=True):
    """`upload`: have the records in objects first, for readers that share no disk."""

    name: str
    start: int | None = None
    stop: int | None = None
    upload: bool = False


class WaitForRecord(Request, frozen=True):
    name: str
    record: int
    seconds: float


class OfConsumer(Request, frozen=True):
    name: str
    consumer: str


class RegisterConsumer(Request, frozen=True):
    """`start`: `oldest`, `latest`, or the id of the first record that it wants."""

    name: str
    consumer: str
    start: int | str = "oldest"


class AckRecords(Request, frozen=True):
    """A consumer has read everything below `position`."""

    name: str
    consumer: str
    position: int


class LogMode(Request, frozen=True):
    """How much manifest logs are believed: `off`, `shadow` or `on`; empty only asks."""

    mode: str = ""


STREAM_LOG_MODE = Action("stream.log_mode", LogMode, str)
STREAM_SHARE = Action("stream.share", OfStream, SharedStream, Role.READ)
STREAM_WAIT = Action("stream.wait", WaitForRecord, int, Role.READ)
STREAM_POSITION = Action("stream.position", OfConsumer, int, Role.READ)
STREAM_REGISTER = Action("stream.register", RegisterConsumer, int)
STREAM_ACK = Action("stream.ack", AckRecords, None)

STREAM_ACTIONS = (STREAM_SHARE, STREAM_WAIT, STREAM_POSITION, STREAM_REGISTER, STREAM_ACK, STREAM_LOG_MODE)
