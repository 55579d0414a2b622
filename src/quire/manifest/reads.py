"""Read the manifest: short snapshot transactions with typed access.

A transaction shows the state at its beginning, whatever is committed meanwhile. Keep it short: while it is open, LMDB
cannot reuse the pages it may see, and long transactions are reported. Records are immutable and outlive the
transaction; iterators do not. A table that an older store does not have reads as empty.

Threads: a transaction belongs to the thread that opened it. Any number may be open, in any process. Every LMDB error
becomes a quire error, during an iteration too: `StoreClosed` (the transaction or its environment has ended),
`ManifestDamaged`, `FormatTooNew`, `OutOfRange` for a key that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

import lmdb
import msgspec
from msgspec.structs import astuple

from quire.core.closing import ClosedOnExit
from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import (
    DatabaseTombstoned,
    InvalidInput,
    ManifestDamaged,
    QuireError,
    StoreClosed,
    UnknownDatabase,
    UnknownNamespace,
    UnknownSnapshot,
    WrongKind,
)
from quire.core.events import emit
from quire.core.ids import KINDS_WITH_OBJECTS, U32_MAX
from quire.core.timeline import Gap
from quire.durable.checksums import crc32
from quire.durable.object_names import epoch_prefix
from quire.manifest import tables as t
from quire.manifest.codec import R
from quire.manifest.env import CHANGE_LOG_NAME, ManifestEnv
from quire.manifest.env_gate import Ticket
from quire.manifest.keys import KeyCodec, prefix_end
from quire.manifest.ops.base import LOCAL_COUNTERS
from quire.manifest.records import (
    HIDDEN,
    DbKind,
    DbRecord,
    DbStatus,
    JobRecord,
    NamespaceRecord,
    RefcountRecord,
    SnapshotRecord,
    TimelineRecord,
    WalStateRecord,
)
from quire.manifest.rows import RESIDUE
from quire.manifest.slots import EMPTY, Chain, place, unpack_leaf

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.core.ids import ArtifactKey
    from quire.manifest.change import ChangeRecord
    from quire.manifest.ops.base import Counter

KIND_WORDS = {DbKind.PAGES: "page database", DbKind.STREAM: "stream", DbKind.LSM: "key-value database"}


class ParentStore(msgspec.Struct, frozen=True, kw_only=True):
    """A store from which this one was cloned."""

    store_id: str
    last_epoch: int
    """Owner epochs up to this one, and above those of the previous parent, belong to it."""
    at_ms: int
    """The parent's clock at the cloned moment."""
    position: str


BORN_WITH_EPOCHS = "born_with_epochs"
"""The row of `meta` that marks a store whose objects are all below its own prefixes."""

_SEQUENCE = KeyCodec(("sequence", "u64"))
"""Key of the change log, as change.py declares it."""


class ReadTxn(ClosedOnExit):
    """One snapshot of the manifest. Use as a context manager."""

    __slots__ = ("__weakref__", "_damage", "_env", "_get", "_handles", "_ticket", "_txn", "refused")

    def __init__(self, env: ManifestEnv) -> None:
        self._env = env
        self._ticket: Ticket | None = None
        self._txn: Any  # the stubs allow memoryviews, which are never requested here
        self._txn, self._ticket = env.begin_read(self)
        self._handles = env.handles
        self._get: Any = self._txn.get
        self.refused = env.refused
        self._damage: lmdb.Error | None = None
        """The error of a page that LMDB found damaged; from then on LMDB refuses every call of the transaction."""

    def close(self) -> None:
        """End the snapshot; further reads raise `StoreClosed`. If the call is interrupted, call it again."""
        if self._ticket is not None:
            self._get = _closed
            self._env.end_read(self._txn, self._ticket)
            self._ticket = None

    def abandon(self) -> None:
        """End in the child of a fork(), without touching the parent's transaction."""
        self._get = _closed
        self._ticket = None

    def _explain(self, error: lmdb.Error) -> QuireError:
        if self._ticket is None:
            return _ended()
        if self._damage is not None and isinstance(error, lmdb.BadTxnError):
            error = self._damage
        explained = self._env.explain(error)
        if isinstance(explained, ManifestDamaged):
            self._damage = error
        return explained

    # ── any table ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def get(self, table: t.Table[R], *key: Any) -> R | None:
        """Return one record by its key, or `None`."""
        handle = self._handles[table.name]
        if handle is None:
            return None
        try:
            packed = table.key.pack(*key)
            raw = self._get(packed, db=handle)
        except lmdb.Error as error:
            raise self._explain(error) from error
        return None if raw is None else table.rows.decode(packed, raw)

    def scan(
        self, table: t.Table[R], *prefix: Any, start: tuple[Any, ...] | None = None
    ) -> Iterator[tuple[tuple[Any, ...], R]]:
        """Yield (key, record) of all rows whose key begins with `prefix`, in key order, starting at `start` if given."""
        unpack, decode, marked, salt = table.key.fast_unpack, table.rows.decode, table.rows.marked, table.rows.salt
        body = table.codec.decode_body
        for key, raw in self.raw_scan(table, *prefix, start=start):
            if body is None or raw[:2] != marked or crc32(raw, crc32(key, salt)) != RESIDUE:
                try:
                    row = decode(key, raw)
                except ManifestDamaged:
                    if prefix or not self.is_refused(table, key):
                        raise
                    continue  # a scan over all databases skips closed ones
                yield unpack(key), row
            else:  # `decode` inlined: saves a call per row
                try:
                    record = body(raw[2:-4])
                except UNDECODABLE:
                    record = decode(key, raw)
                yield unpack(key), record

    def is_refused(self, table: t.Table[Any], key: bytes) -> bool:
        """Return whether a row belongs to a database that is closed for breaking a rule."""
        return table in t.OWNED and ("database", int.from_bytes(key[:4], "big")) in self.refused

    def refused_databases(self) -> set[int]:
        """Return the databases closed for breaking a rule. What they own is unknown, so nothing of theirs is garbage."""
        return {number for kind, number in self.refused if kind == "database"}

    def require_not_refused(self, db_id: int) -> None:
        """Raise `ManifestDamaged` if the database is closed for breaking a rule."""
        self._env.require_not_refused("database", db_id, self.refused)

    def raw_scan(
        self, table: t.Table[Any], *prefix: Any, start: tuple[Any, ...] | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Return the rows of `scan` as stored, unchecked: for exports, which decode many at once (`Table.rows`)."""
        first = table.key.prefix(*prefix)
        try:
            cursor = self._cursor(table.name)
            if cursor is None or not cursor.set_range(table.key.pack(*start) if start is not None else first):
                return iter(())
            return self._rows(cursor.iternext(), prefix_end(first) if prefix else None)
        except lmdb.Error as error:
            raise self._explain(error) from error

    def raw_scan_back(self, table: t.Table[Any], *prefix: Any) -> Iterator[tuple[bytes, bytes]]:
        """Return the rows of `raw_scan` in reverse order."""
        first = table.key.prefix(*prefix)
        end = prefix_end(first) if prefix else None
        try:
            cursor = self._cursor(table.name)
            if cursor is None:
                return iter(())
            is_after = end is not None and cursor.set_range(end)
            if not (cursor.prev() if is_after else cursor.last()):
                return iter(())
            rows = self._rows(cursor.iterprev(), None)
            return takewhile(lambda row: row[0].startswith(first), rows) if prefix else rows
        except lmdb.Error as error:
            raise self._explain(error) from error

    def _cursor(self, table: str) -> Any:
        """Return a cursor, or `None` if the store does not have the table."""
        if self._ticket is None:
            _closed()
        handle = self._handles[table]
        return None if handle is None else self._txn.cursor(db=handle)

    def _rows(self, rows: Iterator[tuple[bytes, bytes]], end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows before the key `end`; translate an LMDB error that occurs during the walk."""
        try:
            if end is None:
                yield from rows
            else:
                for row in rows:
                    if row[0] >= end:
                        return
                    yield row
        except lmdb.Error as error:
            raise self._explain(error) from error

    def steps(self, table: t.Table[Any], rows: int, *, start: bytes = b"") -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Yield all rows from the key `start` on as bytes, `rows` at a time: a list of keys and a list of values.

        Two parallel cursors are twice as fast as one that makes a pair per row, which the garbage collector then visits.
        """
        try:
            first, second = self._cursor(table.name), self._cursor(table.name)
            if first is None or not (first.set_range(start) and second.set_range(start)):
                return
            keys, values = first.iternext(keys=True, values=False), second.iternext(keys=False, values=True)
            while step := list(islice(keys, rows)):
                yield step, list(islice(values, rows))
        except lmdb.Error as error:
            raise self._explain(error) from error

    def count(self, table: t.Table[Any] | str) -> int:
        """Return the number of rows of a table; reads one page."""
        if self._ticket is None:
            _closed()
        handle = self._handles[table if isinstance(table, str) else table.name]
        try:
            return 0 if handle is None else int(self._txn.stat(db=handle)["entries"])
        except lmdb.Error as error:
            raise self._explain(error) from error

    def to_arrow(self, table: str | t.Table[Any]) -> pa.Table:
        """Return a whole table as Arrow, keys and fields as columns. Memory: the result, plus one step of 8 Ki rows."""
        from quire.manifest.arrow import to_arrow

        return to_arrow(self, table_named(table) if isinstance(table, str) else table)

    # ── common queries ────────────────────────────────────────────────────────────────────────────────────────────────
    def database(self, db_id: int) -> DbRecord | None:
        """Return a database by id; dropped databases are included while anything of theirs is left."""
        return self.get(t.DB, db_id)

    def database_id(self, name: str) -> int:
        """Return the id of a live database; raises `UnknownDatabase` if none has this name."""
        row = self.get(t.DB_NAMES, name) if name else None
        if row is None:
            raise UnknownDatabase("no database has this name", hint="`quire ls` lists the databases", name=name)
        return row.value

    def require_database(self, db: int | str) -> tuple[int, DbRecord]:
        """Return (id, record) of a database by id or name; raises `UnknownDatabase` if there is none."""
        db_id = self.database_id(db) if isinstance(db, str) else db
        record = self.database(db_id)
        if record is None:
            raise UnknownDatabase("no database has this id", hint="`quire ls` lists the databases", db_id=db_id)
        return db_id, record

    def live(self, db: int | str, kind: DbKind) -> tuple[int, DbRecord]:
        """Return (id, record) of a database of this kind that was not dropped, by id or name."""
        db_id = self.database_id(db) if isinstance(db, str) else db
        self.require_not_refused(db_id)
        (_, record), what = self.require_database(db_id), KIND_WORDS[kind]
        if record.kind is not kind:
            raise WrongKind(
                f"not a {what}",
                hint="`quire ls` shows the kinds",
                name=record.name,
                db_id=db_id,
                kind=record.kind.name.lower(),
            )
        if record.status is DbStatus.TOMBSTONED:
            raise DatabaseTombstoned(
                f"the {what.split()[-1]} was dropped", hint="create a new one", db_id=db_id, name=record.name
            )
        return db_id, record

    def databases(self) -> Iterator[tuple[int, DbRecord]]:
        """Yield (id, record) of every database whose row is intact; the others are reported (`damaged_databases`).

        Code that deletes what no row names must use `every_database`: an unreadable row may name it.
        """
        for key, raw in self.raw_scan(t.DB):
            (db_id,) = t.DB.key.unpack(key)
            try:
                record = t.DB.rows.decode(key, raw)
            except ManifestDamaged as error:
                self.report_damage(db_id, error)
                continue
            yield db_id, record

    def every_database(self) -> Iterator[tuple[int, DbRecord]]:
        """Yield (id, record) of every database; a damaged row raises `ManifestDamaged`, unless its database is closed."""
        for (db_id,), record in self.scan(t.DB):
            yield db_id, record

    def damaged_databases(self) -> dict[int, str]:
        """Return id → name of the databases that are closed for breaking a rule, or whose row is damaged."""
        damaged = self.refused_databases() - {0}  # 0 stands for namespaces, not for a database
        for key, raw in self.raw_scan(t.DB):
            try:
                t.DB.rows.decode(key, raw)
            except ManifestDamaged as error:
                damaged.add(db_id := int(t.DB.key.unpack(key)[0]))
                self.report_damage(db_id, error)
        return {db_id: self.indexed_name(db_id) for db_id in sorted(damaged)}

    def dropped_id(self, name: str | int) -> int:
        """Return the id of a dropped database that can be undropped, by id (7, #7) or name; 0 if there is none.

        If several had the name, the one that was dropped last.
        """
        digits = name[1:] if isinstance(name, str) and name.startswith("#") else ""
        wanted = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= 10 else name
        rows = (
            (record.dropped_at_ms, db_id) for db_id, record in self.dropped() if wanted in (db_id, record.former_name)
        )
        return max(rows, default=(0, 0))[1]

    def dropped(self) -> Iterator[tuple[int, DbRecord]]:
        """Yield (id, record) of the dropped databases that can be undropped, found by their hidden names."""
        for key, raw in self.raw_scan(t.DB_NAMES, start=(HIDDEN,)):
            if not key.startswith(HIDDEN.encode()):
                return
            with suppress(ManifestDamaged):  # `quire manifest check` reports it
                db_id = t.DB_NAMES.rows.decode(key, raw).value
                if (record := self.database(db_id)) is not None and record.former_name:
                    yield db_id, record

    def database_names(self, db_ids: Iterable[int]) -> dict[int, str]:
        """Return id → name of these databases, dropped ones included while anything of theirs is left. Reads no other rows."""
        names: dict[int, str] = {}
        for db_id in dict.fromkeys(db_ids):
            try:
                record = self.database(db_id)
            except ManifestDamaged as error:
                self.report_damage(db_id, error)
                names[db_id] = self.indexed_name(db_id)
                continue
            if record is not None:
                names[db_id] = record.title
        return names

    def report_damage(self, db_id: int, error: ManifestDamaged) -> None:
        """Report a database that is left out because its rows are damaged: once per process."""
        # The owner reported the databases it closed when it opened the store.
        if db_id not in self.refused_databases() and db_id not in self._env.reported:
            self._env.reported.add(db_id)
            hint = "it is skipped; `quire manifest check` shows what to do"
            name = self.indexed_name(db_id)
            emit("error", "database.row_damaged", db_id=db_id, name=name, error=error.what, hint=hint)

    def indexed_name(self, db_id: int) -> str:
        """Return the name of a live database from the index of names; empty if it has none, or that row is damaged too."""
        for key, raw in self.raw_scan(t.DB_NAMES):
            with suppress(ManifestDamaged):
                if t.DB_NAMES.rows.decode(key, raw).value == db_id:
                    return str(t.DB_NAMES.key.unpack(key)[0])
        return ""

    def wal_state(self, db_id: int, shard: int = 0) -> WalStateRecord | None:
        """Return the progress marks of a database's WAL."""
        return self.get(t.WAL_STATE, db_id, shard)

    def refcount(self, artifact: ArtifactKey) -> RefcountRecord | None:
        """Return the references to an artifact; `None` if nothing ever referred to it, or it is gone."""
        return self.get(t.GC_REFCOUNTS, *astuple(artifact))

    def artifact(self, artifact: ArtifactKey) -> Any:
        """Return the catalog row of a chunk, a delta or a WAL segment; `None` if there is none.

        A fork's row of an inherited segment does not count: the bytes are described once, at the origin (M6).
        """
        if artifact.kind not in KINDS_WITH_OBJECTS:
            return None
        table, key = t.catalog_key(artifact)
        row = self.get(table, *key)
        return row if getattr(row, "origin_db_id", artifact.origin_db_id) == artifact.origin_db_id else None

    def namespace(self, namespace_id: int) -> NamespaceRecord | None:
        """Return a remote namespace by id."""
        return self.get(t.REMOTE_NAMESPACE, namespace_id)

    def store_id(self) -> str:
        """Return the identity of the store."""
        row = self.get(t.META, "store_id")
        return row.text if row is not None else ""

    def parents(self) -> tuple[ParentStore, ...]:
        """Return the stores from which this one was cloned, oldest first; usually none (A12)."""
        row = self.get(t.META, t.PARENTS)
        return msgspec.json.decode(row.text, type=described(tuple[ParentStore, ...])) if row is not None else ()

    def store_of_epoch(self, epoch: int) -> str:
        """Return the identity of the store that had this owner epoch: in a clone, earlier epochs belong to its parents."""
        return next((parent.store_id for parent in self.parents() if epoch <= parent.last_epoch), self.store_id())

    def log_store_id(self) -> str:
        """Return the identity used in manifest logs of streams: a clone continues the logs of its first parent."""
        parents = self.parents()
        return parents[0].store_id if parents else self.store_id()

    def owner_epoch(self) -> int:
        """Return how often the store was taken over, its creation included; 0 if it is older than owner epochs."""
        return max((row.owner_epoch for _, row in self.scan(t.REMOTE_NAMESPACE)), default=0)

    def current_namespace(self, place_id: int = 0) -> tuple[int, NamespaceRecord]:
        """Return (id, record) of the namespace for new objects: that of the newest owner epoch in this place, 0 being
        the store's own.

        A place may be given by the id of any of its namespaces. Without an epoch the result is the place itself, and
        for the store's own place the id 0, which has no row.
        """
        spaces = [(key[0], row) for key, row in self.scan(t.REMOTE_NAMESPACE) if row.owner_epoch]
        newest = max((row.owner_epoch for _, row in spaces), default=0)
        place_id = next((row.place_id for namespace_id, row in spaces if namespace_id == place_id), place_id)
        for namespace_id, row in spaces:
            if row.owner_epoch == newest and row.place_id == place_id:
                return namespace_id, row
        place = (
            self.namespace(place_id)
            if place_id
            else NamespaceRecord("", legacy=self.get(t.META, BORN_WITH_EPOCHS) is None)
        )
        if place is None:
            raise UnknownNamespace("no remote namespace has this id", namespace_id=place_id)
        return place_id, place

    def object_prefixes(self, namespace_id: int = 0) -> tuple[str, ...]:
        """Return the prefixes of a place below which this store may have objects: the current epoch's, then earlier ones.

        Only in its own place, namespace 0, an older store has objects without a prefix.
        """
        _, space = self.current_namespace()
        epochs = (space.owner_epoch, *reversed(space.ancestors)) if space.owner_epoch else ()
        prefixes = tuple(epoch_prefix(self.store_of_epoch(epoch), epoch) for epoch in epochs)
        if namespace_id:
            return prefixes or (epoch_prefix(self.store_id(), 1),)
        return (*prefixes, "") if space.legacy or not epochs else prefixes

    def place_of(self, db_id: int, objects_url: str) -> tuple[int, str]:
        """Return (namespace id, URL) of the place with all objects of a stream or key-value database, below
        `object_prefixes`.

        The store's own place, `objects_url`, is namespace 0, which has no row.
        """
        record = self.database(db_id)
        if record is None or not record.namespace_id:
            return 0, objects_url
        row = self.namespace(record.namespace_id)
        if row is None:
            raise UnknownNamespace("no remote namespace has this id", namespace_id=record.namespace_id)
        place_id, place = (
            (row.place_id, self.namespace(row.place_id)) if row.owner_epoch else (record.namespace_id, row)
        )
        if place is None or not place.name:
            return 0, objects_url  # older than names of namespaces, when only page databases used them
        return place_id, place.url or objects_url

    def snapshot(self, db_id: int, snapshot_id: int) -> SnapshotRecord | None:
        """Return a snapshot by id."""
        return self.get(t.SNAPSHOT_INDEX, db_id, snapshot_id)

    def require_snapshot(self, db_id: int, snapshot: int | str) -> tuple[int, SnapshotRecord]:
        """Return (id, record) of a snapshot by id or name; raises `UnknownSnapshot` if the database does not have it."""
        snapshot_id = snapshot
        if isinstance(snapshot, str):
            index = self.get(t.SNAPSHOT_NAMES, db_id, snapshot) if snapshot else None
            snapshot_id = index.value if index is not None else 0
        record = self.snapshot(db_id, int(snapshot_id))
        if record is None:
            hint = "`quire snapshot ls` lists them"
            database = self.database_names([db_id]).get(db_id) or f"#{db_id}"
            raise UnknownSnapshot("the database has no such snapshot", hint=hint, database=database, snapshot=snapshot)
        return int(snapshot_id), record

    def job(self, job_id: int) -> JobRecord | None:
        """Return a job by id."""
        return self.get(t.JOB_QUEUE, job_id)

    def chain(self, db_id: int, slot: int) -> Chain:
        """Return the artifacts that hold a slot of a live database; empty if there are none."""
        leaf, offset = place(slot)
        held = self.get(t.LIVE_LEAF, db_id, leaf)
        if held is None:
            return EMPTY
        row = self.get(t.SLOT_LEAF, held.origin_db_id, leaf, held.generation)
        return EMPTY if row is None else unpack_leaf(row.entries).get(offset, EMPTY)

    def at_or_below(self, table: t.Table[R], *key: Any) -> tuple[tuple[Any, ...], R] | None:
        """Return the last row at or below `key` that differs only in the last field: the newest version of something."""
        if not self._ticket:
            _closed()
        handle = self._handles[table.name]
        if handle is None:
            return None
        raw = table.key.pack(*key)
        try:
            with self._txn.cursor(db=handle) as cursor:
                if not (cursor.set_range(raw) and cursor.key() == raw) and not cursor.prev():
                    return None
                raw_key, value = cursor.item()
        except lmdb.Error as error:
            raise self._explain(error) from error
        if not raw_key.startswith(table.key.prefix(*key[:-1])):
            return None
        return table.key.unpack(raw_key), table.rows.decode(raw_key, value)

    def owners(self, table: t.Table[Any], *, start: int = 0) -> Iterator[int]:
        """Yield the databases, from `start` on, with rows in a table whose key begins with a database id; one seek each."""
        try:
            cursor = self._cursor(table.name)
            while cursor is not None and start <= U32_MAX and cursor.set_range(start.to_bytes(4, "big")):
                owner = int.from_bytes(cursor.key()[:4], "big")  # not unpacked: the rest of the key may be damaged
                yield owner
                start = owner + 1
        except lmdb.Error as error:
            raise self._explain(error) from error

    def next_id(self, counter: Counter) -> int:
        """Return the next id that a counter will assign."""
        if (name := LOCAL_COUNTERS.get(counter)) is not None:
            mark = self.get(t.META, name)
            return mark.number if mark else 1
        row = self.get(t.ID_WATERMARKS, counter)
        return row.next_id if row else 1

    def feed_bounds(self) -> tuple[int, int]:
        """Return (oldest retained, last assigned) change sequence; the log is empty if the second is below the first.

        The last assigned sequence is never lost: it is the last key of the log, and trimming the log to nothing moves
        the oldest sequence just above it (M5).
        """
        row = self.get(t.META, "oldest_sequence")
        oldest = row.number if row else 1
        try:
            cursor = self._cursor(CHANGE_LOG_NAME)
            last = _SEQUENCE.unpack(cursor.key())[0] if cursor is not None and cursor.last() else 0
        except lmdb.Error as error:
            raise self._explain(error) from error
        return oldest, max(last, oldest - 1)

    def timelines(self) -> Iterator[tuple[int, TimelineRecord]]:
        """Yield (first number, record) of every range that a takeover or a restore began, in order."""
        for (first_number,), row in self.scan(t.TIMELINE):
            yield first_number, row

    def gaps(self) -> tuple[Gap, ...]:
        """Return the gaps in the sequences that takeovers left, in order."""
        return tuple([Gap(row.last_sequence, first) for first, row in self.timelines()])

    def first_number(self) -> int:
        """Return the first number of the current range; 0 if the store was never taken over."""
        return max([first for first, _ in self.timelines()], default=0)

    def changes(self, start: int = 1) -> Iterator[ChangeRecord]:
        """Yield change records from sequence `start` on, in order."""
        for _, record in self.scan(table_named(CHANGE_LOG_NAME), start=(start,)):
            yield record


def table_named(name: str) -> t.Table[Any]:
    """Return the table of this name; raises `InvalidInput` with the existing names."""
    if name == CHANGE_LOG_NAME:
        from quire.manifest.change import CHANGE_LOG

        return CHANGE_LOG
    try:
        return t.TABLES[name]
    except KeyError:
        hint = f"tables: {', '.join(dict.fromkeys((*t.TABLES, CHANGE_LOG_NAME)))}"
        raise InvalidInput("the manifest has no such table", hint=hint, name=name) from None


def _closed(*_: object, **__: object) -> Any:
    raise _ended()


def _ended() -> StoreClosed:
    return StoreClosed("this read transaction has ended", hint="open another one")
