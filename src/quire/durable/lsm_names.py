"""The names below a key-value database's directory: built and parsed here, as `names.py` does for the whole store.

The layout is the same for a database (`lsm/<db_id:08x>/`) and for a snapshot of one (`…/snapshots/<number>/`), and the
paths in a database's manifest are relative to it: a copy of the manifest beside links to the tables is a database.

    >>> LsmHome(lsm_home(7)).wal(31), lsm_number("000031.log", ".log")
    ('lsm/00000007/wal/000031.log', 31)

Pure functions and values, any thread; importable on executors. Raises `OutOfRange` for a number that does not fit.
"""

from __future__ import annotations

import re

import msgspec

from quire.core.ids import U64_MAX, some_u32, u64
from quire.durable.names import LSM

_NUMBER = re.compile("([0-9]{6}|[1-9][0-9]{6,19})")
_LOAD = re.compile("([0-9a-f]{16})\\.json")


def lsm_home(db_id: int) -> str:
    """The directory of a key-value database: what the paths in its manifest are relative to."""
    return f"{LSM}/{some_u32('db_id', db_id):08x}"


class LsmHome(msgspec.Struct, frozen=True):
    """The files of a key-value database, or of a snapshot of one, below the directory `path`."""

    path: str

    @property
    def manifest_log(self) -> str:
        return f"{self.path}/manifest/000000.log"

    @property
    def manifest_snapshot(self) -> str:
        return f"{self.path}/manifest/MANIFEST-000001"

    def wal(self, number: int) -> str:
        return f"{self.path}/wal/{u64('number', number):06d}.log"

    def sst(self, sst_id: int) -> str:
        return f"{self.path}/{sst_entry_path(sst_id)}"

    def load(self, number: int) -> str:
        """The note about a bulk load."""
        return f"{self.path}/loads/{u64('number', number):016x}.json"


def sst_entry_path(sst_id: int) -> str:
    """A table's path as the manifest of its database has it, relative to the database's directory."""
    return f"sst/{u64('sst_id', sst_id):06d}.sst"


def lsm_number(name: str, suffix: str) -> int | None:
    """The number in the name of a WAL (`.log`) or a table (`.sst`) of a key-value database; `None` if it is foreign."""
    match = _NUMBER.fullmatch(name.removesuffix(suffix)) if name.endswith(suffix) else None
    return int(match[1]) if match is not None and int(match[1]) <= U64_MAX else None


def load_number(name: str) -> int | None:
    """The number in the name of a note about a bulk load; `None` if it is foreign."""
    match = _LOAD.fullmatch(name)
    return int(match[1], 16) if match is not None else None


def lsm_snapshot_dir(db_id: int, number: int) -> str:
    """Where a snapshot of a key-value database keeps its links."""
    return f"{lsm_home(db_id)}/snapshots/{u64('number', number):06d}"
