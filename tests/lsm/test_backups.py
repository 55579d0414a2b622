"""Backups that are superseded go, and nothing that a backup needs."""

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
from tests.lsm.worlds import assert_same

SETTINGS = StoreSettings(
    lsm=LsmSettings(level0_tables=50, level0_stop=60), maintenance=MaintenanceSettings(enabled=False)
)
LATER = 1 << 50
"""A moment at which nothing is under way any more."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        yield store


def filled(store: Store, count: int) -> list[dict[bytes, bytes]]:
    """So many backups, each after a compaction: tables of the older ones are no longer needed."""
    kv, states = store.kv("cart", create=True), []
    for n in range(count):
        kv.put(b"k%d" % n, b"v")
        kv.compact()
        back_up(kv, store.objects, "cart")
        states.append(dict(kv.scan()))
    return states


def tables(store: Store) -> set[str]:
    return {info.key for info in list_objects(store.objects) if info.key.endswith(".sst")}


def restored(store: Store, name: str, lsn: int) -> None:
    backup = read_backup(store.objects, "cart", lsn)
    store.kvs.adopt(name, lambda target: restore(store.objects, backup, store._disk, target))


def test_all_but_the_newest_go_and_those_can_be_restored(store: Store) -> None:
    states = filled(store, 5)
    there = backups(store.objects, "cart")
    dry = prune(store.objects, "cart", 2, now_ms=LATER, dry_run=True, delete=open_store(store.objects_url).delete_many)
    assert backups(store.objects, "cart") == there
    done = prune(store.objects, "cart", 2, now_ms=LATER, delete=open_store(store.objects_url).delete_many)
    assert dry == done
    assert (done.backups, done.kept, done.tables) == (tuple(there[:3]), 2, 3)
    assert backups(store.objects, "cart") == there[3:]
    assert len(tables(store)) == 2
    for number in (3, 4):
        restored(store, f"again{number}", there[number])
        assert_same(store.kv(f"again{number}"), states[number])


def test_a_table_that_a_kept_backup_shares_stays(store: Store) -> None:
    kv = store.kv("cart", create=True)
    for n in range(3):
        kv.put(b"k%d" % n, b"v")
        back_up(kv, store.objects, "cart")
    done = prune(store.objects, "cart", 1, now_ms=LATER, delete=open_store(store.objects_url).delete_many)
    assert (len(done.backups), done.tables) == (2, 0)
    assert len(tables(store)) == 3


def test_tables_of_a_backup_under_way_stay(store: Store) -> None:
    filled(store, 2)
    oldest = min(info.modified_ms for info in list_objects(store.objects) if info.key.endswith(".sst"))
    done = prune(
        store.objects, "cart", 0, now_ms=oldest + UNDER_WAY_MS - 1, delete=open_store(store.objects_url).delete_many
    )
    assert (len(done.backups), done.tables, len(tables(store))) == (2, 0, 2)
    assert prune(store.objects, "cart", 0, now_ms=LATER, delete=open_store(store.objects_url).delete_many).tables == 2
    assert tables(store) == set()


def test_no_table_goes_while_a_list_cannot_be_read(store: Store) -> None:
    filled(store, 3)
    key = max(info.key for info in list_objects(store.objects) if info.key.endswith(".json"))
    store.objects.put(key, b"{")
    done = prune(store.objects, "cart", 1, now_ms=LATER, delete=open_store(store.objects_url).delete_many)
    assert (len(done.backups), done.tables, len(tables(store))) == (2, 0, 3)


def test_a_pruning_that_was_cut_off_goes_on_the_next_time(store: Store) -> None:
    filled(store, 3)

    def stop(_name: str) -> None:
        raise KeyboardInterrupt

    with armed("lsm.backup.lists_removed", stop), pytest.raises(KeyboardInterrupt):
        prune(store.objects, "cart", 1, now_ms=LATER, delete=open_store(store.objects_url).delete_many)
    assert len(backups(store.objects, "cart")) == 1
    assert prune(store.objects, "cart", 1, now_ms=LATER, delete=open_store(store.objects_url).delete_many).tables == 2
    restored(store, "again", backups(store.objects, "cart")[0])
    assert len(list(store.kv("again").scan())) == 3


def test_what_makes_no_sense_is_refused(store: Store) -> None:
    with pytest.raises(InvalidInput):
        prune(store.objects, "cart", -1, now_ms=LATER, delete=open_store(store.objects_url).delete_many)
    assert (
        prune(store.objects, "nobody", 0, now_ms=LATER, delete=open_store(store.objects_url).delete_many).backups == ()
    )


def test_every_changed_byte_of_a_list_is_noticed_and_older_lists_are_read(store: Store) -> None:
    """Lists had no checksum: a flipped digit of an id or a size passed, or came up with a restore."""
    filled(store, 1)
    (lsn,) = backups(store.objects, "cart")
    (key,) = [info.key for info in list_objects(store.objects) if info.key.endswith(".json")]
    data, made = store.objects.get(key), read_backup(store.objects, "cart", lsn)
    assert made.crc64
    for at in range(len(data)):
        for bit in (0, 4):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            with pytest.raises(Corruption):
                decode_list(bytes(changed), key)
    former = {name: getattr(made, name) for name in made.__struct_fields__ if name != "crc64"}
    store.objects.put(key, msgspec.json.encode(former))
    assert read_backup(store.objects, "cart", lsn) == msgspec.structs.replace(made, crc64="")
    newer = data.replace(b'"lsn":', b'"more":1,"lsn":')
    zeroed = newer.replace(made.crc64.encode(), b"0" * 16)
    newer = zeroed.replace(b"0" * 16, f"{crc64(zeroed):016x}".encode())
    assert decode_list(newer, key).tables == made.tables, "fields that a newer quire appends are covered, and ignored"
