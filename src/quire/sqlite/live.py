"""The newest version of a database as a file that SQLite reads and writes: the lock ladder, and what a commit is.

  SHARED      pins the newest written version. Everything is read from that.
  RESERVED    takes the turn to write and begins the page engine's transaction, whatever others read. If another connection has
              written since SHARED, `SQLITE_BUSY_SNAPSHOT`; if one is writing, `SQLITE_BUSY`.
  EXCLUSIVE   nothing more: readers are never in the way.
  unlocking   from RESERVED or above drops what was not committed; to NONE releases the pin.

The *overlay* holds the pages that a transaction has written, until it hands them to the page engine. A transaction is one
commit of the engine, made in `COMMIT_PHASETWO`, the last thing SQLite does (Q1). Syncs and truncations before it touch the
transaction only: SQLite may still roll back after them by writing the old pages over the new ones. From `synchronous=FULL` on
the commit waits for the disk; below, the engine syncs it within a second (Q2).

Readers see what is written. A transaction never becomes durable before one that it has read from: the log has one order. After
its commit a connection that still reads (a cursor is open) reads exactly the version that it committed: its pin moves there.

With the shim (`vfs_shim.py`) a version is *parked* when it is given back: the shim begins and ends the next read transactions
on it by itself while it is the newest, and calls `xLock` only when SQLite wants more than its own cache has. Then the version
is taken as it stands, for SQLite has begun to read it. The pin is in `_idle` all that time.

Threads: one at a time, as SQLite's connections; `renew` and `release_idle` are called by the keeper's.
"""

# ruff: noqa: N802 - SQLite gives these names

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import apsw

from quire.core.errors import QuireError, QuotaExceeded, TimedOut
from quire.sqlite import pragmas
from quire.sqlite.databases import KEPT_BYTES, ReadPin, SharedDatabase, Sleeper
from quire.sqlite.files import SHARED, STAMP, DatabaseFile, no_pages
from quire.sqlite.vfs import apsw_error, commit_error, sqlite_error
from quire.sqlite.vfs_shim import FCNTL_CELL, OLD, READING, Cell, ShimLibrary

if TYPE_CHECKING:
    from quire.pages.pagestore import PageStore
    from quire.pages.transaction import PageGuard, WriteTxn
    from quire.sqlite.vfs import QuireVfs

ROOM_SECONDS = 10.0
"""How long a writer waits for a checkpoint to make room in the WAL budget before it hears `SQLITE_FULL`."""

RESERVED = apsw.SQLITE_LOCK_RESERVED
PHASE_TWO = apsw.SQLITE_FCNTL_COMMIT_PHASETWO


class LiveFile(DatabaseFile[ReadPin]):
    """The live mode. Made by the opener of a store."""

    def __init__(self, database: SharedDatabase, vfs: QuireVfs, shim: ShimLibrary | None = None) -> None:
        super().__init__()
        # constant after construction
        self._database = database
        self._vfs = vfs
        self._cell = Cell(shim) if shim is not None else None
        self._sleeper = Sleeper(database.turn)
        # the connection's
        self._store: PageStore | None = None
        self._txn: WriteTxn | None = None
        self._overlay: dict[int, bytes] = {}
        self._overlay_max = 1
        self._is_whole = True
        """Whether the overlay is all that the transaction has changed."""
        self._size_pages = 0
        """Of the transaction, while there is one."""
        self.synchronous = pragmas.FULL
        self.unsynced: PageGuard | None = None
        """The last commit that did not wait for the disk; those before it are durable with it, the log has one order."""
        self.connection: Callable[[], apsw.Connection | None] = _unknown
        """Whose main database this is; set by who opened it."""
        self._adopt()

    @property
    def is_usable(self) -> bool:
        """Whether nothing has made the database unusable since this file was opened."""
        return self._store is None or self._store.wal.failure is None

    # ── locks ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def xLock(self, level: int) -> None:
        """Climb the ladder."""
        try:
            if level == SHARED:
                self._take_pin()
            elif self._txn is None and self._level < RESERVED:
                if self._cell is not None and self._cell.state in (READING, OLD):
                    self._take_over(self._cell)
                    self._level = SHARED
                self._reserve()
        except QuireError as error:
            raise sqlite_error(error) from error
        self._level = level

    def xUnlock(self, level: int) -> None:
        """Climb down; what was not committed is dropped."""
        if self._level >= RESERVED:
            self._drop()
        if level:
            self._level = level
            return
        self._level = 0
        if self._pin is not None:
            self._put_pin()
        elif self._cell is not None and self._cell.state in (READING, OLD):
            # The keeper has seen a transaction that was the shim's alone, and wants its version closed.
            self._cell.take_over()
            self.release_idle()

    def xCheckReservedLock(self) -> bool:
        """Whether somebody writes."""
        return self._database.turn.is_taken

    def _take_pin(self) -> None:
        if self._cell is not None and self._cell.state in (READING, OLD):
            self._take_over(self._cell)
            return
        store = self._store
        if store is None or store.wal.failure is not None:
            store = self._adopt()
            if store is None:
                return
        try:
            pin = self._idle.pop()
        except IndexError:
            pin = ReadPin(store, self._database.newest)
        else:
            if pin.is_open:
                pin.move(store.wal.written)
            if not pin.is_open or pin.is_set_aside:
                pin.close()
                pin = ReadPin(store, self._database.newest)
        self._pin = pin
        self._read = pin.read_page

    def _take_over(self, cell: Cell) -> None:
        """The shim has begun to read the parked version."""
        pin = self._idle[-1]
        pin.is_old = cell.state == OLD
        cell.take_over()
        if self._database.closed is not None:
            raise self._database.closed
        self._pin, self._read = pin, pin.read_page
        self._idle.pop()

    def _put_pin(self) -> None:
        pin = self._pin
        if pin is None:
            return
        self._pin, self._read = None, no_pages
        if pin.is_old or pin.is_set_aside:
            pin.close()
            return
        self._idle.append(pin)
        lsn, stamp = self._seen
        if self._cell is not None and stamp and lsn == pin.lsn:
            self._cell.park(lsn, pin.size_pages * self._page_size, stamp)
            if not self._idle:  # the keeper was quicker
                self._cell.unpark()

    def _adopt(self) -> PageStore | None:
        """The opened database: at first, after its birth, or after it was opened anew; none while it is unborn."""
        store = self._database.current()
        if store is not None and store is not self._store:
            self.release_idle()  # pins of a former life
            self._settle(store)
        return store

    def _settle(self, store: PageStore) -> None:
        self._store, self._page_size = store, store.page_size
        if self._cell is not None:
            self._cell.follow(store.wal.newest_lsn)
        self._overlay_max = max(KEPT_BYTES // store.page_size, 1)

    def _reserve(self) -> None:
        """Begin to write: it is this connection's turn, and what it has read is the newest."""
        store, turn, here = self._store, self._database.turn, self._pinned_lsn()
        if store is not None and store.wal.written.lsn != here:
            raise self._stale()
        if not turn.take(self):
            self._vfs.refused.wait = self._sleeper.sleep
            raise apsw_error(apsw.SQLITE_BUSY, "another connection is writing")
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
        self._write_in(txn)

    def _write_in(self, txn: WriteTxn) -> None:
        self._txn, self._size_pages, self._read = txn, txn.size_pages, self._read_changed
        self._overlay, self._is_whole = {}, True

    def _begin(self, store: PageStore) -> WriteTxn:
        try:
            return store.begin(0)
        except TimedOut as error:
            raise apsw_error(apsw.SQLITE_BUSY, str(error)) from error  # somebody writes past SQLite
        except QuotaExceeded:
            return store.begin(ROOM_SECONDS)

    def _stale(self) -> Exception:
        self._vfs.refused.wait = _at_once
        return apsw_error(apsw.SQLITE_BUSY_SNAPSHOT, "somebody has written since this transaction began to read")

    def _drop(self) -> None:
        """Drop what was not committed, and give the turn back."""
        txn, self._txn = self._txn, None
        if txn is not None:
            txn.rollback()
            self._overlay = {}
        self._read = self._pin.read_page if self._pin is not None else no_pages
        self._database.turn.give(self)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _stamp(self) -> bytes:
        if self._txn is None or self._pin is None:
            return super()._stamp()
        return self._read(0)[STAMP] if self._size() else b""

    def _note_stamp(self, stamp: bytes) -> None:
        if self._txn is None:
            super()._note_stamp(stamp)

    def _read_changed(self, page: int) -> bytes:
        """Read a page of the overlay, of the transaction, or of the version that it builds on."""
        image = self._overlay.get(page)
        if image is not None:
            return image
        if self._is_whole and self._pin is not None:
            return self._pin.read_page(page)
        assert self._txn is not None, "somebody writes"
        return self._txn.read_page(page)

    def _size(self) -> int:
        return super()._size() if self._txn is None else self._size_pages

    def xFileSize(self) -> int:
        """The size in bytes. Without a lock that of the newest version: VACUUM INTO asks so whether there is something that it
        would overwrite."""
        if self._pin is None and self._txn is None and self._store is not None:
            return self._store.wal.written.size_pages * self._page_size
        return super().xFileSize()

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def xWrite(self, data: bytes, offset: int) -> None:
        """Write a page; it is part of the transaction until that is committed or dropped."""
        try:
            if self._txn is None:
                self._writing(len(data))
            page, overlay = offset // self._page_size, self._overlay
            if len(data) != self._page_size or len(overlay) >= self._overlay_max:
                self._hand_over({page: data})
            else:
                overlay[page] = data
            if page >= self._size_pages:
                self._size_pages = page + 1
        except QuireError as error:
            raise sqlite_error(error) from error

    def _hand_over(self, more: Mapping[int, bytes]) -> None:
        """Have the overlay in the engine's transaction, and some pages more."""
        assert self._txn is not None, "somebody writes"
        self._is_whole = False
        self._txn.write_pages(self._overlay)
        self._overlay = {}
        self._txn.write_pages(more)

    def xTruncate(self, size: int) -> None:
        """Cut the transaction's database off, or grow it with zeros."""
        try:
            txn = self._txn
            if txn is None and self._store is None:
                return  # unborn, and it stays so
            txn = txn or self._writing(self._page_size)
            if size:
                self._hand_over({})
                txn.truncate(size // self._page_size)
                self._size_pages = txn.size_pages
            else:
                self._empty(txn)
        except QuireError as error:
            raise sqlite_error(error) from error

    def _empty(self, txn: WriteTxn) -> None:
        """A first transaction is rolled back: the database was empty, and is again."""
        txn.rollback()
        self._txn = None
        assert self._store is not None, "there was a transaction"
        txn = self._begin(self._store)
        self._write_in(txn)
        if txn.size_pages:
            raise apsw_error(apsw.SQLITE_IOERR_TRUNCATE, "a database that has pages keeps at least one")

    def _writing(self, page_size: int) -> WriteTxn:
        """The transaction, where SQLite has not asked for one: at birth, or because it never gave its lock back."""
        if self._store is None:
            store = self._database.open(page_size)  # the first page written decides
            if store.wal.written.size_pages:
                raise self._stale()
            self._settle(store)
            self._take_pin()
        self._reserve()
        assert self._txn is not None, "reserved"
        return self._txn

    def _commit(self) -> None:
        """Commit the overlay to the page engine, and wait for the disk if `synchronous` says so."""
        txn, pin, images, database = self._txn, self._pin, self._overlay, self._database
        if txn is None or pin is None or (not images and self._is_whole):
            return
        appended = False
        try:
            for page, image in images.items():
                txn.write_page(page, image)
            version = (images.get(0) or txn.read_page(0))[STAMP]
            self._txn, self._overlay = None, {}
            guard = txn.commit()
            appended = True
            database.newest.note(pin.lsn, guard.lsn, images if self._is_whole else None, self._page_size)
            pin.move(guard.mark)
            self._seen, self._read = (guard.lsn, version), pin.read_page
            database.turn.give(self)
            if self.synchronous >= pragmas.FULL:
                wal = guard.wal
                wal.until(guard.lsn)
                if wal.barrier is not None:
                    wal.barrier.note()  # waiting is for the end of the statement: an error here would read as a rollback
            else:
                self.unsynced = guard
        except BaseException as error:  # an interrupt too: SQLite must hear of no other kind of failure here
            txn.rollback()
            self._drop()
            raise commit_error(error, appended=appended) from error

    # ── the rest ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def xFileControl(self, operation: int, pointer: int) -> bool:
        """Whether the operation was ours."""
        if operation == PHASE_TWO:
            self._commit()
            return True
        if operation == FCNTL_CELL and self._cell is not None:
            self._cell.answer(pointer)
            return True
        return super().xFileControl(operation, pointer)

    def _pragma_set(self, name: str, value: str) -> None:
        if name == "synchronous" and not self._in_transaction():
            self.synchronous = pragmas.synchronous(value)

    def _in_transaction(self) -> bool:
        """Then SQLite refuses to change how it syncs. Of an attached database only its locks tell."""
        connection = self.connection()
        return bool(self._level) or (connection is not None and connection.in_transaction)

    def _current_lsn(self) -> int:
        if self._level or self._store is None:
            return self._pinned_lsn()
        return self._store.wal.written.lsn

    def xClose(self) -> None:
        """Give everything back."""
        if self._cell is not None:
            self._cell.take_over()
        self._drop()
        self._put_pin()
        self.release_idle()

    # ── for the keeper ────────────────────────────────────────────────────────────────────────────────────────────────
    def renew(self) -> None:
        """A read transaction is under way: its lease lives on."""
        for pin in (self._pin, *self._idle):  # what the shim reads is among the idle ones
            if pin is not None and pin.is_open:
                with suppress(QuireError):  # it was given back just now
                    pin.renew()

    def release_idle(self) -> None:
        """Close pins that nobody reads. The one in use is marked, and closed when its transaction ends."""
        pin = self._pin
        if pin is not None:
            pin.is_old = True
        cell = self._cell
        if cell is None:
            super().release_idle()
        elif cell.claim():
            try:
                super().release_idle()
            finally:
                cell.release()


def _unknown() -> None:
    """Nobody has said whose it is."""


def _at_once(_: float) -> None:
    """A new snapshot is all that is needed: there is nothing to wait for."""
