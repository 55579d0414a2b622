"""Damage for simulated stores: bits that flip, files that vanish, writes that go astray, rows that change under LMDB.

Terms
  at rest   done to a file of a closed store
  silent    done by the disk while the store is open, without an error (`quire.testing.faults`)
  row       done to a row of the manifest that steers what is kept and deleted

Every kind of file of a store is eligible, by a draw over kinds first: else the many files of one kind would get all of it.
LMDB's own pages are not: they have no checksums, and a wrong one may end the process. Its rows are.

Thread: one. Used by `quire.testing.simulation`.
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
"""Kind of file → where such files are below a simulated machine's root."""

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
"""Kind of write → what matches the paths of its files; objects have no name of their own while they are written."""

ROW = "row"
AT_REST = ("flip", "zero", "cut", "empty", "remove", "swap")
STEERING = (t.RETENTION, t.GC_REFCOUNTS, t.GC_ZERO, t.SNAPSHOT_INDEX, t.CHECKPOINT_PLAN, t.DB, t.LSM_ENDS)
"""Tables whose rows decide what is deleted, or what a recovery believes."""


@dataclass(frozen=True)
class Damage:
    """What is done to a store."""

    how: str
    kind: str
    path: str
    """Of the file below the root; the name of the table for a row; a pattern for writes."""

    @property
    def is_written(self) -> bool:
        """Whether it happens while a store lives and writes."""
        return self.how in {fault.name for fault in SILENT_WRITES}

    def __str__(self) -> str:
        return f"{self.how}, {self.kind}: {self.path}"


def files_by_kind(root: str) -> dict[str, list[str]]:
    """The files below a root that can be damaged."""
    kinds: dict[str, list[str]] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), root)
            for kind, pattern in KINDS.items():
                if re.fullmatch(pattern, path):
                    kinds.setdefault(kind, []).append(path)
    return {kind: sorted(kinds[kind]) for kind in sorted(kinds)}


def choose_damage(root: str, draw: random.Random, only: Collection[str] = ()) -> Damage:
    """A way to damage what is below `root`; `only` of these kinds, where there are such files."""
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
    """Do it; the disk to open the store with."""
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
    os.unlink(path)  # the file may have other names: links of a snapshot keep their bytes
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
