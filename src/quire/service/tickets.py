"""What executors ask an owner for: rows of tables, and to keep rows that are to be written.

Apart from `messages.py`, whose answers are made of a manifest's values: this module imports where `import lmdb` fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec


class Access(Enum):
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
    access: Access = Access.ADMIN
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


LEASE_RENEW = Action("lease.renew", OfLease, None, Access.READ)


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
