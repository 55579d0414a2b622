"""What databases and snapshots are: the enumerations of records that are read without loading the records themselves.

Their numbers are on disk (M1). `quire.manifest.records` has them too; only who must be quick imports them from here.
"""

from __future__ import annotations

from enum import IntEnum


class DbKind(IntEnum):
    PAGES = 1
    STREAM = 2
    LSM = 3


class DbStatus(IntEnum):
    """ACTIVE ⇄ READ_ONLY → TOMBSTONED; a tombstone is removed once no artifact of the database is left."""

    ACTIVE = 1
    READ_ONLY = 2
    TOMBSTONED = 3


class SnapshotKind(IntEnum):
    NAMED = 1
    ANONYMOUS = 2
    LEASED = 3
