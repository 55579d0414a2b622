"""Whether the C part of the VFS (`vfs_shim.c`) is built, for who wants to know without loading SQLite.

Threads: any. Executor-safe.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

LIBRARY = Path(__file__).with_name("libquirevfs.so")
SWITCH = "QUIRE_PURE"
VERSION = 1
"""Of `vfs_shim.c`: a library that was built from another one is not used."""

NEEDED = "install a C compiler and sqlite3ext.h (Debian: gcc, libsqlite3-dev)"
AGAIN = "install quire again"


class ShimBuild(NamedTuple):
    """The library, or why there is none."""

    path: str = ""
    reason: str = ""
    remedy: str = ""


def shim_build() -> ShimBuild:
    """As of now: the switch is read each time, the library once."""
    if os.environ.get(SWITCH, "") not in ("", "0"):
        return ShimBuild(reason=f"switched off by {SWITCH}")
    return _examine(str(LIBRARY))


@cache
def _examine(path: str) -> ShimBuild:
    if not os.path.exists(path):
        return ShimBuild(reason="the C part is not built", remedy=f"{NEEDED}, then {AGAIN}")
    try:
        version = ctypes.CDLL(path).quire_shim_version()
    except (AttributeError, OSError) as error:
        return ShimBuild(reason=f"the C part cannot be loaded: {error}", remedy=AGAIN)
    if version != VERSION:
        return ShimBuild(reason="the C part is of another version of quire", remedy=AGAIN)
    return ShimBuild(path)
