"""The newest version of a database as a file that SQLite reads and writes: the lock ladder, and commit.

  SHARED      pins the newest written version. All reads use it.
  RESERVED    takes the writer slot and begins the page engine's transaction, whatever others are reading. Raises
              `SQLITE_BUSY_SNAPSHOT` if another connection has written since SHARED, `SQLITE_BUSY` if one is writing.
  EXCLUSIVE   does nothing more: readers never block a writer.
  unlocking   from RESERVED or above drops uncommitted pages; to NONE releases the pin.

The *overlay* holds the pages that a transaction has written until they are passed to the page engine. A transaction is one
commit of the engine, made in `COMMIT_PHASETWO`, SQLite's last step (Q1). Syncs and truncations before it affect the
transaction only: SQLite may still roll back after them by writing the old pages over the new ones. With `synchronous=FULL` or
higher the commit waits for the disk; below that the engine syncs it within a second (Q2).

Readers see written commits. A transaction never becomes durable before one that it has read from, because the log has one
order. After a commit, a connection that is still reading (a cursor is open) reads exactly the version it committed: its pin
moves there.

With the shim (`vfs_shim.py`) a version is *parked* when it is released. While it is the newest, the shim begins and ends
further read transactions on it without Python, and `xLock` is called only when SQLite needs more than its own cache has. The
version is then taken over unchanged, since SQLite has begun to read it. The pin stays in `_idle` all that time.

Threads: one at a time, as for SQLite's connections; `renew` and `release_idle` are called by the keeper.
"""

# ruff: noqa: N802 - SQLite gives these names

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import apsw

from quire.core.errors import QuireError, QuotaExceeded, TimedOut
from quire.pages.transaction import PageGuard
from quire.sqlite import pragmas
from quire.sqlite.databases import KEPT_BYTES, BusyWaiter, ReadPin, SharedDatabase
from quire.sqlite.files import SHARED, STAMP, DatabaseFile, no_pages
from quire.sqlite.vfs import apsw_error, commit_error, sqlite_error
from quire.sqlite.vfs_shim import FCNTL_CELL, OLD, READING, Cell, ShimLibrary

if TYPE_CHECKING:
    from quire.pages.pagestore import PageStore
    from quire.pages.transaction import WriteTxn
    from quire.sqlite.vfs import QuireVfs

ROOM_SECONDS = 10.0
"""Seconds a writer waits for a checkpoint to free WAL budget before it gets `SQLITE_FULL`."""

RESERVED = apsw.SQLITE_LOCK_RESERVED
PHASE_TWO = apsw.SQLITE_FCNTL_COMMIT_PHASETWO


class LiveFile(DatabaseFile[ReadPin]):
    """The newest version of a database as a file. Created by the opener of a store."""

    def __init__(self, database: SharedDatabase, vfs: QuireVfs, shim: ShimLibrary | None = None) -> None:
        super().__init__()
        # constant after construction
        self._database = database
        self._vfs = vfs
        self._cell = Cell(shim) if shim is not None else None
        self._busy_waiter = BusyWaiter(database.writer_slot)
        # owned by the connection
        self._store: PageStore | None = None
        self._txn: WriteTxn | None = None
        self._overlay: dict[int, bytes] = {}
        self._overlay_max = 1
        self._overlay_is_complete = True
        """Whether the overlay holds everything that the transaction has changed."""
        self._size_pages = 0
        """Size of the database in the transaction, in pages; valid while there is one."""
        self.synchronous = pragmas.FULL
        self.connection: Callable[[], apsw.Connection | None] = _unknown
        """Returns the connection whose main database this is; set by the caller that opened it."""
        self._use_current_store()

    @property
    def is_usable(self) -> bool:
        """Whether the database has not failed since this file was opened, and its store was not closed."""
        return self._database.closed is None and (self._store is None or self._store.wal.failure is None)

    def newest_commit(self) -> PageGuard | None:
        """Return the newest commit of the database, as the handle that this file uses has it; None while it is unborn.

        Of this handle, not of the database: one that was opened anew after a failed sync would report lost commits as durable
        (decision 048)."""
        wal = self._store.wal if self._store is not None else None
        return None if wal is None else PageGuard(wal, wal.written)

    # ── locks ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def xLock(self, level: int) -> None:
        """Raise the lock level."""
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
        """Lower the lock level, dropping uncommitted pages."""
        if self._level >= RESERVED:
            self._drop()
        if level:
            self._level = level
            return
        self._level = 0
        if self._pin is not None:
            self._put_pin()
        elif self._cell is not None and self._cell.state in (READING, OLD):
            # The keeper marked a transaction that only the shim had begun: its version must be closed.
            self._cell.take_over()
            self.release_idle()

    def xCheckReservedLock(self) -> bool:
        """Return whether a connection is writing."""
        return self._database.writer_slot.is_held

    def _take_pin(self) -> None:
        if self._cell is not None and self._cell.state in (READING, OLD):
            self._take_over(self._cell)
            return
        store = self._store
        if store is None or store.wal.failure is not None:
            store = self._use_current_store()
            if store is None:
                return
        try:
            pin = self._idle.pop()
        except IndexError:
            pin = ReadPin(store, self._database.newest)
        else:
            # Move first, check the mark afterwards: `Readers._lowest` does it in the opposite order, so at least one of
            # the two notices the other.
            if pin.is_open:
                pin.move(store.wal.written)
            if not pin.is_open or pin.is_set_aside:
                pin.close()
                pin = ReadPin(store, self._database.newest)
        self._pin = pin
        self._read = pin.read_page

    def _take_over(self, cell: Cell) -> None:
        """Take over the parked version, which the shim has begun to read."""
        pin = self._idle[-1]
        pin.is_old = cell.state == OLD
        cell.take_over()
        # The shim does not see that the store was closed: it may have begun to read the parked version before.
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
        # Idle before it is parked: the shim may read it at once, and `_take_over` finds it there.
        self._idle.append(pin)
        lsn, stamp = self._seen
        # Without the stamp of exactly this version SQLite would keep cached pages of another one.
        if self._cell is not None and stamp and lsn == pin.lsn:
            self._cell.park(lsn, pin.size_pages * self._page_size, stamp)
            if not self._idle:  # the keeper closed the pin in between
                self._cell.unpark()

    def _use_current_store(self) -> PageStore | None:
        """Use the current handle of the database: the first one, the one after its birth, or one opened after a failure.
        Return None while the database is unborn."""
        store = self._database.current()
        if store is not None and store is not self._store:
            self.release_idle()  # pins of the former handle
            self._attach_store(store)
        return store

    def _attach_store(self, store: PageStore) -> None:
        self._store, self._page_size = store, store.page_size
        if self._cell is not None:
            self._cell.follow(store.wal.newest_lsn)
        self._overlay_max = max(KEPT_BYTES // store.page_size, 1)

    def _reserve(self) -> None:
        """Begin to write: acquire the writer slot, and require that this connection has read the newest version."""
        store, slot, here = self._store, self._database.writer_slot, self._pinned_lsn()
        # Before the slot: a connection with an old snapshot needs a new one and would wait for nothing.
        if store is not None and store.wal.written.lsn != here:
            raise self._stale()
        if not slot.try_acquire(self):
            self._vfs.refused.wait = self._busy_waiter.sleep
            raise apsw_error(apsw.SQLITE_BUSY, "another connection is writing")
        try:
            if store is None:
                if self._database.current() is not None:
                    raise self._stale()  # created by another connection in the meantime
                return
            txn = self._begin(store)
            # Compared again under the engine's write lock: writers that bypass SQLite do not take the slot.
            if txn.base_lsn != here:
                txn.rollback()
                raise self._stale()
        except BaseException:
            slot.release(self)
            raise
        self._write_in(txn)

    def _write_in(self, txn: WriteTxn) -> None:
        self._txn, self._size_pages, self._read = txn, txn.size_pages, self._read_changed
        self._overlay, self._overlay_is_complete = {}, True

    def _begin(self, store: PageStore) -> WriteTxn:
        try:
            # Without waiting: SQLite's busy handler decides how long a connection waits.
            return store.begin(0)
        except TimedOut as error:
            raise apsw_error(apsw.SQLITE_BUSY, str(error)) from error  # a writer that bypasses SQLite
        except QuotaExceeded:
            return store.begin(ROOM_SECONDS)

    def _stale(self) -> Exception:
        self._vfs.refused.wait = _at_once
        return apsw_error(
            apsw.SQLITE_BUSY_SNAPSHOT, "another connection has written since this transaction began to read"
        )

    def _drop(self) -> None:
        """Drop uncommitted pages and release the writer slot."""
        txn, self._txn = self._txn, None
        if txn is not None:
            txn.rollback()
            self._overlay = {}
        self._read = self._pin.read_page if self._pin is not None else no_pages
        self._database.writer_slot.release(self)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _stamp(self) -> bytes:
        if self._txn is None or self._pin is None:
            return super()._stamp()
        return self._read(0)[STAMP] if self._size() else b""

    def _note_stamp(self, stamp: bytes) -> None:
        if self._txn is None:
            super()._note_stamp(stamp)

    def _read_changed(self, page: int) -> bytes:
        """Read a page from the overlay, the transaction, or the version that the transaction builds on."""
        image = self._overlay.get(page)
        if image is not None:
            return image
        if self._overlay_is_complete and self._pin is not None:
            return self._pin.read_page(page)
        assert self._txn is not None, "a transaction is open"
        return self._txn.read_page(page)

    def _size(self) -> int:
        return super()._size() if self._txn is None else self._size_pages

    def xFileSize(self) -> int:
        """Return the size in bytes; without a lock, that of the newest version: VACUUM INTO checks whether its target is
        empty."""
        if self._pin is None and self._txn is None and self._store is not None:
            return self._store.wal.written.size_pages * self._page_size
        return super().xFileSize()

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def xWrite(self, data: bytes, offset: int) -> None:
        """Write a page. It is part of the transaction until that is committed or dropped."""
        try:
            if self._txn is None:
                self._begin_implicitly(len(data))
            page, overlay = offset // self._page_size, self._overlay
            if len(data) != self._page_size or len(overlay) >= self._overlay_max:
                self._flush_overlay({page: data})
            else:
                overlay[page] = data
            if page >= self._size_pages:
                self._size_pages = page + 1
        except QuireError as error:
            raise sqlite_error(error) from error

    def _flush_overlay(self, more: Mapping[int, bytes]) -> None:
        """Pass the overlay, and then `more` pages, to the engine's transaction."""
        assert self._txn is not None, "a transaction is open"
        # From here on, reads must go through the engine's transaction, which has the pages that leave the overlay.
        self._overlay_is_complete = False
        self._txn.write_pages(self._overlay)
        self._overlay = {}
        self._txn.write_pages(more)

    def xTruncate(self, size: int) -> None:
        """Truncate the database in the transaction, or grow it with zeros."""
        try:
            txn = self._txn
            if txn is None and self._store is None:
                return  # the database stays unborn
            txn = txn or self._begin_implicitly(self._page_size)
            if size:
                self._flush_overlay({})
                txn.truncate(size // self._page_size)
                self._size_pages = txn.size_pages
            else:
                self._empty(txn)
        except QuireError as error:
            raise sqlite_error(error) from error

    def _empty(self, txn: WriteTxn) -> None:
        """Roll back the first transaction of a database: it was empty and is empty again."""
        txn.rollback()
        self._txn = None
        assert self._store is not None, "there was a transaction"
        txn = self._begin(self._store)
        self._write_in(txn)
        if txn.size_pages:
            raise apsw_error(apsw.SQLITE_IOERR_TRUNCATE, "a database that has pages keeps at least one")

    def _begin_implicitly(self, page_size: int) -> WriteTxn:
        """Return a transaction where SQLite has not requested one: at birth, or because it never released its lock."""
        if self._store is None:
            store = self._database.open(page_size)  # the first page written fixes the page size
            if store.wal.written.size_pages:
                raise self._stale()
            self._attach_store(store)
            self._take_pin()
        self._reserve()
        assert self._txn is not None, "reserved"
        return self._txn

    def _commit(self) -> None:
        """Commit the overlay to the page engine, and wait for the disk if `synchronous` requires it."""
        txn, pin, images, database = self._txn, self._pin, self._overlay, self._database
        if txn is None or pin is None or (not images and self._overlay_is_complete):
            return
        appended = False
        try:
            for page, image in images.items():
                txn.write_page(page, image)
            # Before the commit: an error of this read after it would be reported as an unknown outcome.
            version = (images.get(0) or txn.read_page(0))[STAMP]
            self._txn, self._overlay = None, {}
            guard = txn.commit()
            appended = True
            # While the slot is held: the next commit must find the run at the version it builds on.
            database.newest.record_commit(
                pin.lsn, guard.lsn, images if self._overlay_is_complete else None, self._page_size
            )
            pin.move(guard.mark)
            self._seen, self._read = (guard.lsn, version), pin.read_page
            # Before the sync (P7): the next transaction is built in the meantime.
            database.writer_slot.release(self)
            if self.synchronous >= pragmas.FULL:
                wal = guard.wal
                wal.wait_durable(guard.lsn)
                if wal.barrier is not None:
                    # The wait is at the end of the statement: SQLite would take an error here for a rollback.
                    wal.barrier.note()
        except BaseException as error:  # interrupts too: SQLite must see only commit errors here
            txn.rollback()
            self._drop()
            raise commit_error(error, appended=appended) from error

    # ── other calls ───────────────────────────────────────────────────────────────────────────────────────────────────
    def xFileControl(self, operation: int, pointer: int) -> bool:
        """Handle a file control; return whether it was recognised."""
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
        """Return whether a transaction is open; SQLite then refuses to change `synchronous`. For an attached database only
        its lock level shows it."""
        connection = self.connection()
        return bool(self._level) or (connection is not None and connection.in_transaction)

    def _current_lsn(self) -> int:
        if self._level or self._store is None:
            return self._pinned_lsn()
        return self._store.wal.written.lsn

    def xClose(self) -> None:
        """Release the transaction and all pins."""
        self._drop()
        self._put_pin()
        # No claim is needed: the shim starts no more reads. A claim of the keeper stays, for the keeper to release.
        super().release_idle()

    # ── called by the keeper ──────────────────────────────────────────────────────────────────────────────────────────
    def renew(self) -> None:
        """Renew the lease of the read transaction in progress."""
        for pin in (self._pin, *self._idle):  # a version that the shim reads is among the idle ones
            if pin is not None and pin.is_open:
                with suppress(QuireError):  # it was released concurrently
                    pin.renew()

    def release_idle(self) -> None:
        """Close pins that are not in use. A pin in use is marked, and closed when its transaction ends."""
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
    """Return None: the connection is not known yet."""


def _at_once(_: float) -> None:
    """Return immediately: the retry needs only a new snapshot, and there is nothing to wait for."""
