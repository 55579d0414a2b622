"""The actions that executors call: rows of tables, leases, parts of loads, streams.

They are separate from `messages.py`, whose responses contain values of the manifest: this module imports where `import lmdb`
fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from quire.pages.view import SnapshotView
from quire.service.values import Request
from quire.stream.remote_read import PolledStream, SharedStream


class Role(Enum):
    """The role that an action requires."""

    READ = "read"
    ADMIN = "admin"


class Scope(Enum):
    """The rights that an action requires."""

    STORE = "store"
    """Rights to the whole store: a token for reading it or for everything."""
    DATABASE = "database"
    """Rights to the database that the request, a `DatabaseRequest`, names: to read it, or to write it if the action writes."""
    HELD = "held"
    """Rights that were checked when the caller opened the resource; or none."""


class DatabaseRequest(Request, frozen=True):
    """Base of requests on one database; `name` is its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Action:
    """An action of the service."""

    name: str
    request: type[Request]
    answer: Any
    access: Role = Role.ADMIN
    keyed: bool = False
    local: bool = False
    """Whether it is accepted through the Unix socket only."""
    scope: Scope = Scope.STORE

    @property
    def writes(self) -> bool:
        """Whether it needs more than the role `READ`."""
        return self.access is not Role.READ


def on_database(
    name: str, request: type[DatabaseRequest], answer: Any, access: Role = Role.ADMIN, *, keyed: bool = False
) -> Action:
    """Return an action on the database that its request names."""
    return Action(name, request, answer, access, keyed, scope=Scope.DATABASE)


class TableTicket(Request, frozen=True):
    """Selects rows of a manifest table, as a Flight ticket. Keys are the values of their fields, in order."""

    table: str
    prefix: tuple[Any, ...] = ()
    start: tuple[Any, ...] | None = None
    stop: tuple[Any, ...] | None = None
    columns: tuple[str, ...] | None = None
    rows_max: int = 0
    """The most rows; 0: all."""
    after: bytes = b""
    """The key of the last row that the client has: a broken stream resumes after it."""
    raw: bool = False
    """Rows as stored, as `key` and `value`. The reader decodes them."""


class PutPart(Request, frozen=True):
    """Bytes of a part of a load, at an offset. Sending the same bytes again has no effect."""

    load: int
    part: str
    offset: int
    body: bytes


LOAD_PUT = Action("load.put", PutPart, None)


class LoadPairs(Request, frozen=True):
    """Write the parts of a load, a batch of a streaming query, to a key-value set, in one batch and once.

    `columns` are the names of the parts' columns: `key`, `value`, and that of the flag `delete` if there is one.
    """

    load: int
    database: str
    parts: tuple[str, ...]
    columns: tuple[str, ...]
    query: str
    batch: int
    delete: str = ""
    overwrite: bool = False
    create: bool = False


class LoadRecords(Request, frozen=True):
    """Append the parts of a load to a stream, in one append and once; with `query` they are a batch of a streaming query."""

    load: int
    stream: str
    parts: tuple[str, ...]
    query: str = ""
    batch: int = 0
    create: bool = False


LOAD_PAIRS = Action("load.pairs", LoadPairs, int)

QUERY_KEYS = b"\0quire/query/"
"""The prefix of keys that, followed by a query's id, hold the number of the last batch that the query wrote to a set."""

LOAD_RECORDS = Action("load.records", LoadRecords, int)


class OfLease(Request, frozen=True):
    """A lease on lent versions."""

    lease_id: int


LEASE_RENEW = Action("lease.renew", OfLease, None, Role.READ)


class OfLentRange(Request, frozen=True):
    """Request the versions kept with a lease, of databases after one name up to another; the first ones, if there are many."""

    lease_id: int
    after: str
    last: str


LEASE_RANGE = Action("lease.range", OfLentRange, list[tuple[str, SnapshotView]], Role.READ)


class TakeIds(Request, frozen=True):
    """Allocate ids for tables of a load into a key-value database; the first call begins the load. Each returns new ids."""

    load: int
    database: str
    count: int
    create: bool = False


class TableDestination(Request, frozen=True):
    """Where and how a task writes tables of a load: the database's directory, ids, the lsn of every row."""

    directory: str
    lsn: int
    ids: tuple[int, ...]
    table_bytes: int
    block_bytes: int
    compression: str
    bloom_bits_per_key: int


KV_IDS = Action("kv.load.ids", TakeIds, TableDestination)


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# These actions carry no records: readers fetch them from files and objects (`stream/remote_read.py`). Registering leaves an
# existing consumer at its position, and an acknowledgement only moves forward, so both may be repeated.
class OfStream(DatabaseRequest, frozen=True):
    """`upload`: first upload the records to objects, for readers that share no disk."""

    start: int | None = None
    stop: int | None = None
    upload: bool = False


class WaitForRecord(DatabaseRequest, frozen=True):
    record: int
    seconds: float


class OfConsumer(DatabaseRequest, frozen=True):
    consumer: str


class RegisterConsumer(DatabaseRequest, frozen=True):
    """`start`: `oldest`, `latest`, or the id of the first record to read."""

    consumer: str
    start: int | str = "oldest"


class AckRecords(DatabaseRequest, frozen=True):
    """Acknowledge everything below `position` for a consumer."""

    consumer: str
    position: int


class PollStreams(Request, frozen=True):
    """Acknowledge everything below a position for a consumer of several streams, given as (id, position), and return where
    they end. Position 0 renews the consumer's hold; an empty consumer changes nothing."""

    consumer: str
    positions: tuple[tuple[int, int], ...]


class LogMode(Request, frozen=True):
    """How far manifest logs are relied on: `off`, `shadow` or `on`; empty only queries the mode."""

    mode: str = ""


STREAM_LOG_MODE = Action("stream.log_mode", LogMode, str)
STREAM_SHARE = Action("stream.share", OfStream, SharedStream, Role.READ)
STREAM_WAIT = on_database("stream.wait", WaitForRecord, int, Role.READ)
STREAM_POSITION = on_database("stream.position", OfConsumer, int, Role.READ)
STREAM_REGISTER = on_database("stream.register", RegisterConsumer, int)
STREAM_ACK = on_database("stream.ack", AckRecords, None)
STREAM_POLL = Action("stream.poll", PollStreams, list[PolledStream | None])

STREAM_ACTIONS = (
    *(STREAM_SHARE, STREAM_WAIT, STREAM_POSITION, STREAM_REGISTER, STREAM_ACK, STREAM_POLL),
    STREAM_LOG_MODE,
)
