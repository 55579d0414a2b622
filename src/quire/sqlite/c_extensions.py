"""Whether the parts in C are built, without loading SQLite: the VFS shim (`vfs_shim.c`), the leaf decoder (`leaf_columns.c`).

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
"""Version of `vfs_shim.c`; a library built from another version is not used."""

LEAVES_LIBRARY = Path(__file__).with_name("libquireleaves.so")
LEAVES_VERSION = 1
"""Version of `leaf_columns.c`."""

NEEDED = "install a C compiler and sqlite3ext.h (Debian: gcc, libsqlite3-dev)"
AGAIN = "install quire again"


class ShimBuild(NamedTuple):
    """The library, or the reason why there is none."""

    path: str = ""
    reason: str = ""
    remedy: str = ""


def shim_build() -> ShimBuild:
    """Return the state of the VFS shim. The switch is read on each call, the library once."""
    return _build(LIBRARY, "quire_shim_version", VERSION)


def leaves_build() -> ShimBuild:
    """Return the state of the decoder of leaves."""
    return _build(LEAVES_LIBRARY, "quire_leaves_version", LEAVES_VERSION)


def _build(library: Path, function: str, version: int) -> ShimBuild:
    if os.environ.get(SWITCH, "") not in ("", "0"):
        return ShimBuild(reason=f"switched off by {SWITCH}")
    return _examine(str(library), function, version)


@cache
def _examine(path: str, function: str, wanted: int) -> ShimBuild:
    if not os.path.exists(path):
        return ShimBuild(reason="the C extension is not built", remedy=f"{NEEDED}, then {AGAIN}")
    try:
        version = ctypes.CDLL(path)[function]()
    except (AttributeError, OSError) as error:
        return ShimBuild(reason=f"the C extension cannot be loaded: {error}", remedy=AGAIN)
    if version != wanted:
        return ShimBuild(reason="the C extension belongs to another version of quire", remedy=AGAIN)
    return ShimBuild(path)
