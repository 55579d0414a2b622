"""What the owner of a store has published of a database, as a file that SQLite reads in another process.

Rules
  1. Each read transaction sees one published version, the newest when it began: at most a second behind the owner (P6).
  2. The version is held (a lease) while it is read, and a moment longer for the next transaction; see `connect.py`, the keeper.
  3. SQLite's cached pages are dropped whenever the version has changed: the version it asks for is the lsn's (`live.py`, rule
     5).

Threads: one at a time, as SQLite's connections; `let_go` is called by the keeper's.
"""

# ruff: noqa: N802 - SQLite gives these names

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import apsw

from quire.core.errors import OutOfRange, QuireError
from quire.sqlite.error_codes import made, sqlite_error
from quire.sqlite.files import POWERSAFE, answer_pragma, read_part
from quire.sqlite.live import VERSION_BYTES, VERSION_OFFSET
from quire.sqlite.pragmas import EPOCH


class Published(Protocol):
    """One published version, held until it is closed; it keeps itself alive."""

    @property
    def lsn(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def size_pages(self) -> int: ...

    @property
    def is_open(self) -> bool: ...

    def read_page(self, page: int, /) -> bytes: ...

    def close(self) -> None: ...


class PublishedFile:
    """See the rules above."""

    def __init__(self, open_newest: Callable[[], Published], newest_lsn: Callable[[], int]) -> None:
        # constant after construction
        self._open_newest = open_newest
        self._newest_lsn = newest_lsn
        # the connection's
        self._pin: Published | None = None
        self._seen: tuple[int, bytes] = (-1, b"")
        # shared with the keeper: whoever takes a pin out has it
        self._idle: list[Published] = []

    xDeviceCharacteristics = staticmethod(POWERSAFE.conjugate)  # noqa: N815 - a call that returns a number and no Python runs

    # ── locks ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def xLock(self, level: int) -> None:
        """Pin the newest published version; more than that is the owner's."""
        if level > apsw.SQLITE_LOCK_SHARED:
            raise made(apsw.SQLITE_READONLY, "the store is open for reading; its owner writes")
        try:
            self._take_pin()
        except QuireError as error:
            raise sqlite_error(error) from error

    def _take_pin(self) -> Published:
        newest = self._newest_lsn()
        while self._idle:
            try:
                pin = self._idle.pop()
            except IndexError:
                break
            if pin.lsn == newest and pin.is_open:
                self._pin = pin
                return pin
            pin.close()
        self._pin = pin = self._open_newest()
        return pin

    def xUnlock(self, level: int) -> None:
        """Give the version back."""
        pin = self._pin
        if not level and pin is not None:
            self._pin = None
            self._idle.append(pin)

    def xCheckReservedLock(self) -> bool:
        """Nobody writes here."""
        return False

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def xRead(self, amount: int, offset: int) -> bytes:
        """The bytes at an offset."""
        pin = self._pin
        try:
            if pin is None:
                return self._read_unlocked(amount, offset)
            if amount == pin.page_size and offset:
                return pin.read_page(offset // amount)
            if amount == VERSION_BYTES and offset == VERSION_OFFSET:
                return self._version(pin)
            part = read_part(pin.read_page, pin.page_size, pin.size_pages, amount, offset)
            if not offset and len(part) >= VERSION_OFFSET + VERSION_BYTES:
                self._seen = (pin.lsn, part[VERSION_OFFSET : VERSION_OFFSET + VERSION_BYTES])
            return part
        except OutOfRange:
            return b""
        except QuireError as error:
            raise sqlite_error(error) from error

    def _version(self, pin: Published) -> bytes:
        """The version SQLite is shown: the lsn's, so that it drops its pages whenever that changes (rule 3)."""
        seen_lsn, seen = self._seen
        version = read_part(pin.read_page, pin.page_size, pin.size_pages, VERSION_BYTES, VERSION_OFFSET)
        self._seen = (pin.lsn, version)
        if version and version == seen and pin.lsn != seen_lsn:
            return bytes([version[0] ^ 0xFF]) + version[1:]
        return version

    def _read_unlocked(self, amount: int, offset: int) -> bytes:
        """SQLite looks at the header before it takes any lock."""
        pin = self._take_pin()
        try:
            return read_part(pin.read_page, pin.page_size, pin.size_pages, amount, offset)
        finally:
            self.xUnlock(0)

    def xFileSize(self) -> int:
        """The size of the version in bytes."""
        pin = self._pin
        return pin.size_pages * pin.page_size if pin is not None else 0

    # ── the rest ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def xFileControl(self, operation: int, pointer: int) -> bool:
        """Whether the operation was ours."""
        if operation != apsw.SQLITE_FCNTL_PRAGMA:
            return False
        name, value, verdict = answer_pragma(pointer, 0)
        if name.lower() == EPOCH and value is None:
            apsw.VFSFcntlPragma(pointer).result = str(self._pin.lsn if self._pin is not None else self._newest_lsn())
            return True
        return verdict.reply is not None

    def xWrite(self, _: bytes, __: int) -> None:
        """Refused."""
        raise made(apsw.SQLITE_READONLY, "the store is open for reading; its owner writes")

    def xTruncate(self, _: int) -> None:
        """Refused."""
        raise made(apsw.SQLITE_READONLY, "the store is open for reading; its owner writes")

    def xSync(self, _: int) -> None:
        """Nothing to do."""

    def xSectorSize(self) -> int:
        """SQLite's usual."""
        return 4096

    def xClose(self) -> None:
        """Give everything back."""
        self.xUnlock(0)
        self.let_go()

    # ── for the keeper ────────────────────────────────────────────────────────────────────────────────────────────────
    def renew(self) -> None:
        """Published versions keep themselves alive."""

    def let_go(self) -> None:
        """Close what nobody reads."""
        while self._idle:
            try:
                pin = self._idle.pop()
            except IndexError:
                return
            pin.close()
