"""The part of the VFS that is written in C: `vfs_shim.c`, built where a compiler and SQLite's header are available.

It handles SQLite's calls on a live database at the start and end of every read transaction, provided there was no write in
between. Without it `live.py` handles them, more slowly. `QUIRE_PURE=1` disables it. docs/decisions/066-vfs-shim.md has the
reasons.

A *cell* is six numbers that a file of `live.py` shares with the shim: a state, and the version that the next read transaction
may take without calling Python. `vfs_shim.c` lists the states and which side may change them.

Threads: any; a cell belongs to its connection, except `claim` and `release`, which belong to the keeper. Executor-safe.
"""

from __future__ import annotations

import ctypes
from array import array
from contextlib import closing
from functools import cache

import apsw

from quire.core.events import emit
from quire.sqlite.c_extensions import AGAIN, shim_build

FCNTL_CELL = 0x51554952
"""The file control by which the shim requests a file's cell."""

PLAIN, PARKED, READING, OLD, KEEPER = range(5)
_STATE, _LSN, _SIZE, _STAMP, _STAMP_END, _NEWEST = 0, 1, 2, 3, 5, 5
_WORDS = 6


class ShimLibrary:
    """The functions of the library. Calls keep the interpreter's lock, since none takes longer than a few ns."""

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
    """Return the library for newly opened databases; None if it is not built or is disabled (reason: `c_extensions.py`)."""
    build = shim_build()
    return _load(build.path) if build.path else None


@cache
def _load(path: str) -> ShimLibrary | None:
    try:
        with closing(apsw.Connection(":memory:")) as connection:
            connection.enable_load_extension(True)
            connection.load_extension(path, "sqlite3_vfsshim_init")
        return ShimLibrary(ctypes.PyDLL(path))  # the same copy: SQLite has already loaded it
    except (apsw.Error, OSError) as error:
        emit("warning", "sqlite.shim_not_loaded", error=str(error), hint=AGAIN)
        return None


class Cell:
    """State that one file shares with the shim."""

    __slots__ = ("_library", "_newest", "_words", "address")

    def __init__(self, library: ShimLibrary) -> None:
        self._library = library
        self._words = array("q", [0] * _WORDS)
        self._newest = self._words
        self.address = self._words.buffer_info()[0]

    def answer(self, pointer: int) -> None:
        """Write the address of the cell to `pointer`, for the shim."""
        ctypes.c_int64.from_address(pointer).value = self.address

    # ── called by the connection ──────────────────────────────────────────────────────────────────────────────────────
    def follow(self, newest: array[int]) -> None:
        """Use `newest` as the location of the database's newest lsn from now on."""
        self._newest = newest  # keeps the array alive: the shim has only its address
        self._words[_NEWEST] = newest.buffer_info()[0]

    def park(self, lsn: int, size_bytes: int, stamp: bytes) -> bool:
        """Offer this version to the next read transaction; return whether the shim accepted it."""
        words = self._words
        # Before the swap, which publishes them to the shim.
        words[_LSN], words[_SIZE] = lsn, size_bytes
        words[_STAMP:_STAMP_END] = array("q", stamp)
        return bool(self._library.swap(self.address, PLAIN, PARKED))

    def unpark(self) -> None:
        """Withdraw the parked version."""
        self._library.swap(self.address, PARKED, PLAIN)

    @property
    def state(self) -> int:
        """One of the five states."""
        return self._words[_STATE]

    def take_over(self) -> None:
        """Take over the transaction that the shim has begun. REQUIRES the state READING or OLD."""
        self._words[_STATE] = PLAIN

    # ── called by the keeper ──────────────────────────────────────────────────────────────────────────────────────────
    def claim(self) -> bool:
        """Return whether the parked version may be closed; the shim cannot take it until `release`. Mark a version being read
        OLD."""
        swap, address = self._library.swap, self.address
        if swap(address, PARKED, KEEPER) or swap(address, PLAIN, KEEPER):
            return True
        swap(address, READING, OLD)
        return False

    def release(self) -> None:
        """Undo `claim`."""
        self._words[_STATE] = PLAIN
