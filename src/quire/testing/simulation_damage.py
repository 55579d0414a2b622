"""Damages simulated stores: flipped bits, missing files, lost or misplaced writes, altered rows in LMDB.

Terms
  at rest   damage to a file of a closed store
  silent    damage by the disk while the store is open, without an error (`quire.testing.faults`)
  row       damage to a row of the manifest that determines what is kept and deleted

Every kind of file of a store is eligible. The kind is drawn first: otherwise the kind with the most files would get most of the
damage. LMDB's own pages are not eligible: they have no checksums, and a damaged one may kill the process. Its rows are.

Threads: one. Used by `quire.testing.simulation`.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from quire.durable.files import Disk
from quire.durable.names import MANIFEST
from quire.manifest import tables as t
from quire.manifest.store import ManifestStore
from quire.testing.faults import SILENT_WRITES, Fault, FaultyDisk

KINDS: dict[str, str] = {
    "WAL segment": r"store/pages/\w+/wal/.*\.seg",
    "chunk": r"bucket/.*(base|delta-\w+):\w+",
    "hot segment": r"store/streams/\d+/hot/.*",
    "warm segment": r"store/streams/\d+/warm/.*",
    "remote segment": r"bucket/.*wal:\w+",
    "manifest log": r"store/streams/\d+/manifest/\d+\.mlog",
    "manifest log snapshot": r"store/streams/\d+/manifest/snapshot_.*",
    "manifest log object": r"bucket/.*manifest/.*",
    "stream settings": r"store/streams/\d+/[^/]*\.json",
    "kv log": r"store/lsm/\w+/wal/.*",
    "kv table": r"store/lsm/\w+/sst/.*",
    "kv manifest": r"store/lsm/\w+/manifest/.*",
    "kv snapshot": r"store/lsm/\w+/snapshots/.*",
}
"""Kind of file → pattern of its paths below a simulated machine's root."""

WRITTEN: dict[str, str] = {
    "write of WAL segment": "*/pages/*/wal/*",
    "write of object": "*/bucket/.tmp/*",
    "write of hot segment": "*/streams/*/hot/*",
    "write of warm segment": "*/streams/*/warm/*",
    "write of manifest log": "*.mlog*",
    "write of manifest log snapshot": "*/manifest/snapshot_*",
    "write of stream settings": "*/streams/*.json*",
    "write of kv log": "*/lsm/*/wal/*",
    "write of kv table": "*/lsm/*/sst/*",
    "write of kv manifest": "*/lsm/*/manifest/*",
    "write of kv snapshot": "*/lsm/*/snapshots/*",
}
"""Kind of write → pattern of the paths of its files; objects do not have their final name while they are written."""

ROW = "row"
AT_REST = ("flip", "zero", "cut", "empty", "remove", "swap")
STEERING = (t.RETENTION, t.GC_REFCOUNTS, t.GC_ZERO, t.SNAPSHOT_INDEX, t.CHECKPOINT_PLAN, t.DB, t.LSM_ENDS)
"""Tables whose rows determine what is deleted, or what recovery trusts."""


@dataclass(frozen=True)
class Damage:
    """One way to damage a store."""

    how: str
    kind: str
    path: str
    """Path of the file below the root; for a row, the name of its table; for writes, a pattern."""

    @property
    def is_written(self) -> bool:
        """Whether it happens to a write while the store is open."""
        return self.how in {fault.name for fault in SILENT_WRITES}

    def __str__(self) -> str:
        return f"{self.how}, {self.kind}: {self.path}"


def files_by_kind(root: str) -> dict[str, list[str]]:
    """Return the files below a root that can be damaged, by kind."""
    kinds: dict[str, list[str]] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), root)
            for kind, pattern in KINDS.items():
                if re.fullmatch(pattern, path):
                    kinds.setdefault(kind, []).append(path)
    return {kind: sorted(kinds[kind]) for kind in sorted(kinds)}


def choose_damage(root: str, draw: random.Random, only: Collection[str] = ()) -> Damage:
    """Draw a way to damage the files below `root`; `only` of these kinds, if there are such files."""
    kinds = files_by_kind(root)
    chosen = sorted((kinds.keys() | WRITTEN.keys()) & set(only))
    if not chosen:
        chosen = sorted(kinds) if draw.random() < 0.7 else sorted(WRITTEN)
        if ROW in only or not kinds or (not only and draw.random() < 0.15):
            return Damage("flip", ROW, draw.choice(STEERING).name)
    kind = draw.choice(chosen)
    if kind in WRITTEN:
        return Damage(draw.choice(SILENT_WRITES).name, kind, WRITTEN[kind])
    path = draw.choice(kinds[kind])
    if draw.random() < 0.7:
        return Damage(draw.choice(AT_REST), kind, path)
    return Damage(draw.choice((Fault.STALE_READ, Fault.MISDIRECTED_READ)).name, kind, path)


def inflict(damage: Damage, root: str, draw: random.Random, disk: Disk) -> Disk:
    """Apply the damage and return the disk with which to open the store."""
    if damage.kind == ROW:
        flip_row(os.path.join(root, "store", MANIFEST), t.TABLES[damage.path], draw)
    elif damage.how in AT_REST:
        _damage_file(damage, root, draw)
    elif not damage.is_written:
        path = os.path.join(root, damage.path)
        return FaultyDisk(disk, Fault[damage.how], fail_at=draw.randint(1, 4), operation="read", path=path)
    return disk


def flip_row(manifest_path: str, table: t.Table[Any], draw: random.Random) -> None:
    """Flip one bit of one row's value, keeping its length, as a bad disk or a stray write would."""
    manifest = ManifestStore.open(manifest_path, create=False)
    try:
        with manifest.read() as txn:
            rows = [(bytes(key), bytes(value)) for key, value in txn.raw_scan(table)]
        if not rows:
            return
        key, value = draw.choice(rows)
        damaged = _flipped(value, draw)
        txn_write = manifest.env.begin_write()
        txn_write.put(key, damaged, db=manifest.env.handles[table.name])
        txn_write.commit()
    finally:
        manifest.close()


def _flipped(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


def _damage_file(damage: Damage, root: str, draw: random.Random) -> None:
    path = os.path.join(root, damage.path)
    with open(path, "rb") as file:
        data = file.read()
    os.unlink(path)  # not overwritten in place: hard links of a snapshot keep the bytes
    if damage.how == "remove":
        return
    if damage.how == "swap":
        siblings = [other for other in files_by_kind(root).get(damage.kind, []) if other != damage.path]
        if siblings:
            with open(os.path.join(root, draw.choice(siblings)), "rb") as file:
                data = file.read()
    elif damage.how == "empty":
        data = b""
    elif data:
        place = draw.randrange(len(data))
        if damage.how == "flip":
            data = data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
        elif damage.how == "zero":
            data = data[:place] + bytes(len(data[place : place + 512])) + data[place + 512 :]
        else:
            data = data[:place]
    with open(path, "wb") as file:
        file.write(data)
