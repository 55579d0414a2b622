"""The part of the VFS that is written in C: `vfs_shim.c`, built where there is a compiler and SQLite's header.

It answers what SQLite asks a live database at the start and end of every read transaction, as long as nobody has written in
between; without it `live.py` answers, slower. `QUIRE_PURE=1` switches it off. docs/decisions/066-vfs-shim.md has the reasons.

A *cell* is six numbers that a file of `live.py` shares with the shim: a state, and the version that the next read transaction
may take without asking Python. The states and who may change them are listed in `vfs_shim.c`.

Threads: any; a cell belongs to its connection, but for `claim` and `release`, which are the keeper's. Executor-safe.
"""

from __future__ import annotations

import ctypes
from array import array
from functools import cache

import apsw

from quire.core.events import emit
from quire.sqlite.c_extensions import AGAIN, shim_build

FCNTL_CELL = 0x51554952
"""How the shim asks a file for its cell."""

PLAIN, PARKED, READING, OLD, KEEPER = range(5)
_STATE, _LSN, _SIZE, _STAMP, _STAMP_END, _NEWEST = 0, 1, 2, 3, 5, 5
_WORDS = 6


class ShimLibrary:
    """The functions of the library; calling them keeps the interpreter's lock, since none takes longer than a few ns."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self.swap = library.quire_shim_swap
        self.swap.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int]
        self.register = library.quire_shim_register
        self.register.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        self.register.restype = ctypes.c_int64
        self.unregister = library.quire_shim_unregister
        self.unregister.argtypes = [ctypes.c_int64]
        self.unregister.restype = None


def shim_library() -> ShimLibrary | None:
    """What databases that are opened now use; none if it is not built, or switched off (`c_extensions.py` says why)."""
    build = shim_build()
    return _load(build.path) if build.path else None


@cache
def _load(path: str) -> ShimLibrary | None:
    try:
        connection = apsw.Connection(":memory:")
        try:
            connection.enable_load_extension(True)
            connection.load_extension(path, "sqlite3_vfsshim_init")
        finally:
            connection.close()
        return ShimLibrary(ctypes.PyDLL(path))  # the same copy: it is loaded already
    except (apsw.Error, OSError) as error:
        emit("warning", "sqlite.shim_not_loaded", error=str(error), hint=AGAIN)
        return None


class Cell:
    """What one file shares with the shim."""

    __slots__ = ("_library", "_newest", "_words", "address")

    def __init__(self, library: ShimLibrary) -> None:
        self._library = library
        self._words = array("q", [0] * _WORDS)
        self._newest = self._words
        self.address = self._words.buffer_info()[0]

    def answer(self, pointer: int) -> None:
        """Tell the shim where the cell is."""
        ctypes.c_int64.from_address(pointer).value = self.address

    # ── the connection's ──────────────────────────────────────────────────────────────────────────────────────────────
    def follow(self, newest: array[int]) -> None:
        """The database's newest lsn is there from now on."""
        self._newest = newest  # the shim has its address only
        self._words[_NEWEST] = newest.buffer_info()[0]

    def park(self, lsn: int, size_bytes: int, stamp: bytes) -> bool:
        """The next read transaction may have this version; whether the shim knows."""
        words = self._words
        words[_LSN], words[_SIZE] = lsn, size_bytes
        words[_STAMP:_STAMP_END] = array("q", stamp)
        return bool(self._library.swap(self.address, PLAIN, PARKED))

    def unpark(self) -> None:
        """It may not after all."""
        self._library.swap(self.address, PARKED, PLAIN)

    @property
    def state(self) -> int:
        """One of the five."""
        return self._words[_STATE]

    def take_over(self) -> None:
        """From now on the transaction that the shim has begun is Python's. REQUIRES the state READING or OLD."""
        self._words[_STATE] = PLAIN

    # ── the keeper's ──────────────────────────────────────────────────────────────────────────────────────────────────
    def claim(self) -> bool:
        """Whether what is parked may be closed: until `release` nobody takes it. What is being read is marked old."""
        swap, address = self._library.swap, self.address
        if swap(address, PARKED, KEEPER) or swap(address, PLAIN, KEEPER):
            return True
        swap(address, READING, OLD)
        return False

    def release(self) -> None:
        """The opposite of `claim`."""
        self._words[_STATE] = PLAIN
