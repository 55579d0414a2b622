"""The newest version of a database as a file that SQLite reads and writes: the lock ladder, and what a commit is.

Terms
  pin       the snapshot that a connection reads from its SHARED lock on, with a lease; kept a moment longer for the next one
  unborn    a database that nobody has written to: its page size is still open, its size is 0
  version   the sixteen bytes by which SQLite knows whether its cached pages are still good (change counter, sizes)

The ladder
  SHARED      pins the newest written version. Everything is read from that.
  RESERVED    takes the turn to write (`locks.py`) and begins the page engine's transaction, whatever others read. If somebody
              has written since SHARED, `SQLITE_BUSY_SNAPSHOT`; if somebody is writing, `SQLITE_BUSY`.
  EXCLUSIVE   nothing more: nobody who reads is in the way.
  unlocking   from RESERVED or above drops what was not committed; to NONE gives the pin back.

Rules
  1. A transaction is one commit of the page engine, in `COMMIT_PHASETWO`, the last thing SQLite does (Q1). Syncs and
     truncations before it touch the transaction only: SQLite may still roll back after them, by writing the old pages over
     the new ones.
  2. From `synchronous=FULL` on, the commit waits for the disk. Below, the engine syncs it within a second (Q2).
  3. Readers see what is written. A transaction never becomes durable before one that it has read from: the log has one order.
  4. After its commit a connection that still reads (a cursor is open) reads exactly the version it has committed; the older pin
     keeps that one too.
  5. SQLite's cached pages are dropped whenever the version changes by other hands, even if those left the change counter alone
     (`sqlite follow` copies pages as they are): the version is then shown changed.

Threads: one at a time, as SQLite's connections; `renew` and `let_go` are called by the keeper's.
"""

# ruff: noqa: N802 - SQLite gives these names

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import apsw

from quire.core.errors import OutOfRange, QuireError, QuotaExceeded, TimedOut
from quire.sqlite import pragmas
from quire.sqlite.databases import TAGS, Database
from quire.sqlite.files import POWERSAFE, answer_pragma, read_part
from quire.sqlite.trouble import commit_error, made, sqlite_error

if TYPE_CHECKING:
    from quire.pages.pagestore import PageStore
    from quire.pages.snapshot import Snapshot
    from quire.pages.transaction import WriteTxn
    from quire.sqlite.vfs import QuireVfs

ROOM_SECONDS = 10.0
"""How long a writer waits for a checkpoint to make room in the WAL budget before it hears `SQLITE_FULL`."""

SHARED, RESERVED = apsw.SQLITE_LOCK_SHARED, apsw.SQLITE_LOCK_RESERVED
PRAGMA, PHASE_TWO = apsw.SQLITE_FCNTL_PRAGMA, apsw.SQLITE_FCNTL_COMMIT_PHASETWO

VERSION_OFFSET, VERSION_BYTES = 24, 16
_VERSION = slice(VERSION_OFFSET, VERSION_OFFSET + VERSION_BYTES)


class LiveFile:
    """See the rules above. Made by the opener of a store."""

    def __init__(self, database: Database, vfs: QuireVfs) -> None:
        # constant after construction
        self._database = database
        self._vfs = vfs
        # the connection's
        self._level = 0
        self._store: PageStore | None = None
        self._page_size = 0
        self._pin: Snapshot | None = None
        self._txn: WriteTxn | None = None
        self._changed = False
        self._after: tuple[int, int] | None = None
        """(lsn, size) of what this connection has committed and still reads (rule 4)."""
        self._read: Callable[[int], bytes] = _nothing
        self._seen: tuple[int, bytes] = (-1, b"")
        """(lsn, version) that SQLite's cached pages are of (rule 5)."""
        self.synchronous = pragmas.FULL
        self.connection: Callable[[], apsw.Connection | None] = _unknown
        """Whose main database this is; set by who opened it."""
        # shared with the keeper: whoever takes a pin out has it
        self._idle: list[Snapshot] = []
        self._adopt()

    xDeviceCharacteristics = staticmethod(POWERSAFE.conjugate)  # noqa: N815 - a call that returns a number and no Python runs

    # ── locks ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def xLock(self, level: int) -> None:
        """Climb the ladder."""
        try:
            if level == SHARED:
                self._take_pin()
            elif self._txn is None and self._level < RESERVED:
                self._reserve()
        except QuireError as error:
            raise sqlite_error(error) from error
        self._level = level

    def xUnlock(self, level: int) -> None:
        """Climb down; what was not committed is dropped."""
        if self._level >= RESERVED:
            self._drop()
        if not level:
            self._level = 0
            self._put_pin()
        else:
            self._level = level

    def xCheckReservedLock(self) -> bool:
        """Whether somebody writes."""
        return self._database.turn.is_taken

    def _take_pin(self) -> None:
        store = self._store
        if store is None or store.wal.failure is not None:
            store = self._adopt()
            if store is None:
                return
        try:
            pin = self._idle.pop()
        except IndexError:
            pin = store.open_snapshot(written=True, tags=TAGS)
        else:
            if pin.lsn != store.wal.written.lsn or not pin.is_open:
                pin.close()
                pin = store.open_snapshot(written=True, tags=TAGS)
        self._pin = pin
        self._read = pin.read_page

    def _put_pin(self) -> None:
        pin, after = self._pin, self._after
        self._pin, self._after, self._read = None, None, _nothing
        if pin is None:
            return
        if after is None:
            self._idle.append(pin)
        else:
            pin.close()  # older than what this connection has committed: nobody can use it

    def _adopt(self) -> PageStore | None:
        """The opened database: at first, after its birth, or after it was opened anew; none while it is unborn."""
        store = self._database.current()
        if store is not None and store is not self._store:
            self.let_go()  # pins of a former life
            self._store, self._page_size = store, store.page_size
        return store

    def _reserve(self) -> None:
        """Begin to write: it is this connection's turn, and what it has read is the newest."""
        store, turn, here = self._store, self._database.turn, self._here()
        if store is not None and store.wal.written.lsn != here:
            raise self._stale()
        if not turn.take(self):
            self._vfs.refused.wait = turn.wait
            raise made(apsw.SQLITE_BUSY, "another connection is writing")
        try:
            if store is None:
                if self._database.current() is not None:
                    raise self._stale()  # born meanwhile
                return
            txn = self._begin(store)
            if txn.base_lsn != here:
                txn.rollback()
                raise self._stale()
        except BaseException:
            turn.give(self)
            raise
        self._txn, self._changed, self._read = txn, False, txn.read_page

    def _begin(self, store: PageStore) -> WriteTxn:
        try:
            return store.begin(0)
        except TimedOut as error:
            raise made(apsw.SQLITE_BUSY, str(error)) from error  # somebody writes past SQLite
        except QuotaExceeded:
            return store.begin(ROOM_SECONDS)

    def _here(self) -> int:
        """The version that this connection reads."""
        if self._after is not None:
            return self._after[0]
        return self._pin.lsn if self._pin is not None else 0

    def _stale(self) -> Exception:
        self._vfs.refused.wait = _at_once
        return made(apsw.SQLITE_BUSY_SNAPSHOT, "somebody has written since this transaction began to read")

    def _drop(self) -> None:
        """Drop what was not committed, and give the turn back."""
        txn, self._txn = self._txn, None
        if txn is not None:
            txn.rollback()
        if self._after is not None:
            self._read = self._read_committed
        else:
            self._read = self._pin.read_page if self._pin is not None else _nothing
        self._database.turn.give(self)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def xRead(self, amount: int, offset: int) -> bytes:
        """The bytes at an offset of the version, or of the transaction."""
        try:
            if amount == self._page_size and offset:
                return self._read(offset // amount)
            if amount == VERSION_BYTES and offset == VERSION_OFFSET:
                return self._version()
            return self._read_part(amount, offset)
        except OutOfRange:
            return b""
        except QuireError as error:
            raise sqlite_error(error) from error

    def _version(self) -> bytes:
        """Rule 5."""
        here, seen = self._here(), self._seen
        if here == seen[0] and self._txn is None:
            return seen[1]
        version = self._read_part(VERSION_BYTES, VERSION_OFFSET)
        if self._txn is not None:
            return version
        self._seen = (here, version)
        if version == seen[1] and here != seen[0]:
            return bytes([version[0] ^ 0xFF]) + version[1:] if version else version
        return version

    def _read_part(self, amount: int, offset: int) -> bytes:
        if self._pin is None and not self._level:
            return self._read_unlocked(amount, offset)
        part = read_part(self._read, self._page_size or 1, self._size(), amount, offset)
        if self._txn is None and not offset and len(part) >= 40:
            self._seen = (self._here(), part[_VERSION])
        return part

    def _read_unlocked(self, amount: int, offset: int) -> bytes:
        """SQLite looks at the header before it takes any lock."""
        self._take_pin()
        try:
            return read_part(self._read, self._page_size or 1, self._size(), amount, offset)
        finally:
            self._put_pin()

    def xFileSize(self) -> int:
        """The size in bytes of the version, or of the transaction."""
        return self._size() * self._page_size

    def _size(self) -> int:
        if self._txn is not None:
            return self._txn.size_pages
        if self._after is not None:
            return self._after[1]
        return self._pin.size_pages if self._pin is not None else 0

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def xWrite(self, data: bytes, offset: int) -> None:
        """Write a page; it is part of the transaction until that is committed or dropped (rule 1)."""
        try:
            txn = self._txn or self._writing(len(data))
            self._changed = True
            txn.write_page(offset // self._page_size, data)
        except QuireError as error:
            raise sqlite_error(error) from error

    def xTruncate(self, size: int) -> None:
        """Cut the transaction's database off, or grow it with zeros."""
        try:
            txn = self._txn
            if txn is None and self._store is None:
                return  # unborn, and it stays so
            txn = txn or self._writing(self._page_size)
            self._changed = True
            if size:
                txn.truncate(size // self._page_size)
            else:
                self._empty(txn)
        except QuireError as error:
            raise sqlite_error(error) from error

    def _empty(self, txn: WriteTxn) -> None:
        """A first transaction is rolled back: the database was empty, and is again."""
        txn.rollback()
        self._txn = None
        assert self._store is not None, "there was a transaction"
        self._txn = txn = self._begin(self._store)
        self._changed, self._read = False, txn.read_page
        if txn.size_pages:
            raise made(apsw.SQLITE_IOERR_TRUNCATE, "a database that has pages keeps at least one")

    def _writing(self, page_size: int) -> WriteTxn:
        """The transaction, where SQLite has not asked for one: at birth, or because it never gave its lock back."""
        if self._store is None:
            store = self._database.open(page_size)  # the first page written decides
            if store.wal.written.size_pages:
                raise self._stale()
            self._store, self._page_size = store, store.page_size
            self._take_pin()
        self._reserve()
        assert self._txn is not None, "reserved"
        return self._txn

    def xSync(self, _: int) -> None:
        """Nothing: SQLite may still roll back after it (rule 1)."""

    def _commit(self) -> None:
        """Rules 1 and 2."""
        txn, before = self._txn, self._after
        if txn is None or not self._changed:
            return
        try:
            version = read_part(txn.read_page, self._page_size, txn.size_pages, VERSION_BYTES, VERSION_OFFSET)
            self._txn = None
            guard = txn.commit()
            self._seen, self._after = (guard.lsn, version), (guard.lsn, guard.size_pages)
            self._read = self._read_committed
            self._database.turn.give(self)
            if self.synchronous >= pragmas.FULL:
                guard.result()
        except BaseException as error:  # an interrupt too: SQLite must hear of no other kind of failure here
            txn.rollback()
            self._drop()
            raise commit_error(error, appended=self._after is not before) from error

    def _read_committed(self, page: int) -> bytes:
        """Rule 4."""
        assert self._store is not None, "somebody committed"
        assert self._after is not None, "somebody committed"
        lsn, size = self._after
        if page >= size:
            raise OutOfRange("the database has no such page", page=page, size_pages=size)
        return self._store.read(page, lsn)

    # ── the rest ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def xFileControl(self, operation: int, pointer: int) -> bool:
        """Whether the operation was ours."""
        if operation == PHASE_TWO:
            self._commit()
            return True
        if operation != PRAGMA:
            return False
        name, value, verdict = answer_pragma(pointer, self._page_size)
        if name.lower() == "synchronous" and value is not None and not self._in_transaction():
            self.synchronous = pragmas.synchronous(value)
        if name.lower() == pragmas.EPOCH and value is None:
            apsw.VFSFcntlPragma(pointer).result = str(self._newest())
            return True
        return verdict.reply is not None

    def _in_transaction(self) -> bool:
        """Then SQLite refuses to change how it syncs. Of an attached database only its locks tell."""
        connection = self.connection()
        return bool(self._level) or (connection is not None and connection.in_transaction)

    def _newest(self) -> int:
        """The version that this connection reads, or would read now."""
        if self._level or self._store is None:
            return self._here()
        return self._store.wal.written.lsn

    def xSectorSize(self) -> int:
        """SQLite's usual."""
        return 4096

    def xClose(self) -> None:
        """Give everything back."""
        self._drop()
        self._put_pin()
        self.let_go()

    # ── for the keeper ────────────────────────────────────────────────────────────────────────────────────────────────
    def renew(self) -> None:
        """A read transaction is under way: its lease lives on."""
        pin = self._pin
        if pin is not None and pin.is_open:
            with suppress(QuireError):  # it was given back just now
                pin.renew()

    def let_go(self) -> None:
        """Close pins that nobody reads: they would hold back checkpoints."""
        while self._idle:
            try:
                pin = self._idle.pop()
            except IndexError:
                return
            pin.close()


def _nothing(page: int) -> bytes:
    raise OutOfRange("the database has no pages yet", page=page)


def _unknown() -> None:
    """Nobody has said whose it is."""


def _at_once(_: float) -> None:
    """A new snapshot is all that is needed: there is nothing to wait for."""
