"""Superseded backups are pruned, and nothing that a remaining backup needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import quire
from quire.core.errors import Corruption, InvalidInput
from quire.core.settings import LsmSettings, MaintenanceSettings, StoreSettings
from quire.durable.checksums import crc64
from quire.durable.failpoints import armed
from quire.lsm.backup import UNDER_WAY_MS, back_up, backups, decode_list, prune, read_backup, restore
from quire.objects.api import list_objects
from quire.objects.open import open_store
from quire.store.store import Store
from tests.lsm.kv_helpers import assert_same

SETTINGS = StoreSettings(
    lsm=LsmSettings(level0_tables=50, level0_stop=60), maintenance=MaintenanceSettings(enabled=False)
)
LATER = 1 << 50
"""A time at which no backup can be in progress any more."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        yield store


def filled(store: Store, count: int) -> list[dict[bytes, bytes]]:
    """Create `count` backups, each after a compaction, so that tables of older ones are no longer needed."""
    kv, states = store.kv("cart", create=True), []
    for n in range(count):
        kv.put(b"k%d" % n, b"v")
        kv.compact()
        back_up(kv, store.objects, "cart")
        states.append(dict(kv.scan()))
    return states


def tables(store: Store) -> set[str]:
    return {info.key for info in list_objects(store.objects) if info.key.endswith(".sst")}


def restore_as(store: Store, name: str, lsn: int) -> None:
    backup = read_backup(store.objects, "cart", lsn)
    store.kvs.adopt(name, lambda target: restore(store.objects, backup, store._disk, target))


def test_all_but_the_newest_backups_are_pruned_and_those_can_be_restored(store: Store) -> None:
    states = filled(store, 5)
    lsns = backups(store.objects, "cart")
    dry = prune(store.objects, "cart", 2, now_ms=LATER, dry_run=True, delete=open_store(store.objects_url).delete_many)
    assert backups(store.objects, "cart") == lsns
    pruned = prune(store.objects, "cart", 2, now_ms=LATER, delete=open_store(store.objects_url).delete_many)
    assert dry == pruned
    assert (pruned.backups, pruned.kept, pruned.tables) == (tuple(lsns[:3]), 2, 3)
    assert backups(store.objects, "cart") == lsns[3:]
    assert len(tables(store)) == 2
    for number in (3, 4):
        restore_as(store, f"again{number}", lsns[number])
        assert_same(store.kv(f"again{number}"), states[number])


def test_a_table_that_a_remaining_backup_shares_is_kept(store: Store) -> None:
    kv = store.kv("cart", create=True)
    for n in range(3):
        kv.put(b"k%d" % n, b"v")
        back_up(kv, store.objects, "cart")
    pruned = prune(store.objects, "cart", 1, now_ms=LATER, delete=open_store(store.objects_url).delete_many)
    assert (len(pruned.backups), pruned.tables) == (2, 0)
    assert len(tables(store)) == 3


def test_tables_of_a_backup_in_progress_are_kept(store: Store) -> None:
    filled(store, 2)
    oldest = min(info.modified_ms for info in list_objects(store.objects) if info.key.endswith(".sst"))
    pruned = prune(
        store.objects, "cart", 0, now_ms=oldest + UNDER_WAY_MS - 1, delete=open_store(store.objects_url).delete_many
    )
    assert (len(pruned.backups), pruned.tables, len(tables(store))) == (2, 0, 2)
    assert prune(store.objects, "cart", 0, now_ms=LATER, delete=open_store(store.objects_url).delete_many).tables == 2
    assert tables(store) == set()


def test_no_table_is_deleted_while_a_list_is_unreadable(store: Store) -> None:
    filled(store, 3)
    key = max(info.key for info in list_objects(store.objects) if info.key.endswith(".json"))
    store.objects.put(key, b"{")
    pruned = prune(store.objects, "cart", 1, now_ms=LATER, delete=open_store(store.objects_url).delete_many)
    assert (len(pruned.backups), pruned.tables, len(tables(store))) == (2, 0, 3)


def test_an_interrupted_pruning_is_resumed_by_the_next_one(store: Store) -> None:
    filled(store, 3)

    def stop(_name: str) -> None:
        raise KeyboardInterrupt

    with armed("lsm.backup.lists_removed", stop), pytest.raises(KeyboardInterrupt):
        prune(store.objects, "cart", 1, now_ms=LATER, delete=open_store(store.objects_url).delete_many)
    assert len(backups(store.objects, "cart")) == 1
    assert prune(store.objects, "cart", 1, now_ms=LATER, delete=open_store(store.objects_url).delete_many).tables == 2
    restore_as(store, "again", backups(store.objects, "cart")[0])
    assert len(list(store.kv("again").scan())) == 3


@pytest.mark.parametrize("name", ["manual-copy-0001.json", "0x00000000000001.json", "00000000000000AB.json", "notes"])
def test_foreign_objects_beside_the_lists_are_ignored(store: Store, name: str) -> None:
    """Hazard: an object with another name made every listing, restore and pruning of the label fail."""
    filled(store, 2)
    existing = backups(store.objects, "cart")
    store.objects.put(f"kv/cart/backups/{name}", b"{}")
    assert backups(store.objects, "cart") == existing
    assert read_backup(store.objects, "cart").lsn == existing[-1]


def test_invalid_arguments_are_refused(store: Store) -> None:
    with pytest.raises(InvalidInput):
        prune(store.objects, "cart", -1, now_ms=LATER, delete=open_store(store.objects_url).delete_many)
    assert (
        prune(store.objects, "nobody", 0, now_ms=LATER, delete=open_store(store.objects_url).delete_many).backups == ()
    )


def test_every_changed_byte_of_a_list_is_detected_and_older_lists_are_read(store: Store) -> None:
    """Lists had no checksum: a flipped digit in an id or a size was not detected, or only by a restore."""
    filled(store, 1)
    (lsn,) = backups(store.objects, "cart")
    (key,) = [info.key for info in list_objects(store.objects) if info.key.endswith(".json")]
    data, backup = store.objects.get(key), read_backup(store.objects, "cart", lsn)
    assert backup.crc64
    for at in range(len(data)):
        for bit in (0, 4):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises(Corruption):
                decode_list(bytes(damaged), key)
    old_fields = {name: getattr(backup, name) for name in backup.__struct_fields__ if name != "crc64"}
    store.objects.put(key, msgspec.json.encode(old_fields))
    assert read_backup(store.objects, "cart", lsn) == msgspec.structs.replace(backup, crc64="")
    newer = data.replace(b'"lsn":', b'"more":1,"lsn":')
    zeroed = newer.replace(backup.crc64.encode(), b"0" * 16)
    newer = zeroed.replace(b"0" * 16, f"{crc64(zeroed):016x}".encode())
    assert decode_list(newer, key).tables == backup.tables, (
        "fields that a newer version appends are part of the checksum, and ignored"
    )
