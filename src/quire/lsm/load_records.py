"""Records of bulk loads, so that a commit whose response was lost can be retried.

A record, `loads/<number>.json`, is written before the `Compaction` event of its load and marked `done` after it, with no other
compaction in between. So the manifest decides the outcome of a record that a crash left without `done`: either its tables are
live, or the load did not happen. Snapshots and forks do not copy records. This module does not import Arrow.

Threads: the holder of the compaction lock writes; any thread reads. Raises the disk's errors and `Corruption`."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import Corruption
from quire.durable.files import Disk, read_all, remove_if_exists, write_atomic
from quire.durable.names import TEMPORARY, LsmHome, load_number

RECORDS_KEPT = 1_024


class LoadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one load. `ids`: its tables."""

    number: int
    at_ms: int
    rows: int
    ids: tuple[int, ...]
    done: bool = False


def write_load_record(disk: Disk, home: LsmHome, record: LoadRecord) -> None:
    """Write a record durably, replacing an earlier one of the same load."""
    disk.make_dirs(f"{home.path}/loads")
    write_atomic(disk, home.load(record.number), msgspec.json.encode(record))


def remove_load_record(disk: Disk, home: LsmHome, number: int) -> None:
    """Remove the record of a load, if there is one."""
    remove_if_exists(disk, home.load(number))


def read_load_record(disk: Disk, home: LsmHome, number: int) -> LoadRecord | None:
    """Return the record of a load, or `None`."""
    path = home.load(number)
    try:
        data = read_all(disk, path)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=described(LoadRecord))
    except UNDECODABLE as error:
        hint = "remove the file if no client is waiting for this load"
        raise Corruption(
            "the record of a bulk load cannot be decoded", hint=hint, path=path, cause=str(error)
        ) from error


def resolve_load_records(disk: Disk, home: LsmHome, live: Collection[int]) -> None:
    """Resolve records that a crash left undecided; keep the newest `RECORDS_KEPT`. `live`: ids of the live tables."""
    try:
        names = disk.names(f"{home.path}/loads")
    except FileNotFoundError:
        return
    done: list[LoadRecord] = []
    for name in names:
        number = load_number(name)
        if number is None:
            if name.endswith(TEMPORARY):
                disk.remove(f"{home.path}/loads/{name}")
            continue
        record = read_load_record(disk, home, number)
        assert record is not None, "no other thread removes records"
        if not record.done:
            if not set(record.ids) <= set(live):
                remove_load_record(disk, home, number)
                continue
            record = msgspec.structs.replace(record, done=True)
            write_load_record(disk, home, record)
        done.append(record)
    for record in sorted(done, key=lambda record: record.at_ms)[:-RECORDS_KEPT]:
        remove_load_record(disk, home, record.number)
