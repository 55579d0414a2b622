"""One garbled transfer from an object store is not damage: every engine reads again before it reports corruption."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import pytest

import quire
from quire.core.checked_read import checked_read
from quire.core.errors import Corruption
from quire.durable.object_names import kv_backups_prefix
from quire.lsm.backup import back_up, read_backup, restore
from quire.objects.local import LocalStore
from tests.stream.streams import StreamHarness


class GarbledTransfers:
    """Garbles one of the bodies that come from the object store: the `garbled`-th, counted from 1."""

    def __init__(self) -> None:
        self.bodies = 0
        self.garbled = 0
        self.is_broken = False

    def transfer(self, body: bytes) -> bytes:
        self.bodies += 1
        if body and (self.bodies == self.garbled or self.is_broken):
            return bytes([body[0] ^ 0x40, *body[1:-1], body[-1] ^ 0x01]) if len(body) > 1 else bytes([body[0] ^ 0x40])
        return body


@contextmanager
def garbled_transfers() -> Iterator[GarbledTransfers]:
    transfers = GarbledTransfers()
    get, get_range = LocalStore.get, LocalStore.get_range
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "get", lambda store, key: transfers.transfer(get(store, key)))
        patch.setattr(
            LocalStore,
            "get_range",
            lambda store, key, offset, length: transfers.transfer(get_range(store, key, offset, length)),
        )
        yield transfers


def test_a_read_that_fails_twice_is_corruption() -> None:
    results = iter([Corruption("one"), "good", Corruption("one"), Corruption("two")])

    def read() -> object:
        result = next(results)
        if isinstance(result, Corruption):
            raise result
        return result

    assert checked_read(read) == "good"
    with pytest.raises(Corruption, match="two"):
        checked_read(read)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_garbled_transfer_of_stream_records_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    harness = StreamHarness(tmp_path)
    written = harness.fill(2)
    harness.stream.upload()
    if ranges:
        monkeypatch.setattr(harness.stream.tiers.__class__, "hydrate_if_room", lambda *_: False)
    with garbled_transfers() as transfers:
        for garbled in count(1):
            harness.stream.evict(warm=True)
            harness.reopen()  # so that the caches are empty
            transfers.bodies, transfers.garbled = 0, garbled
            assert harness.payloads() == written
            if transfers.bodies < garbled:
                break
        assert garbled > 2, "every body should be garbled once"
    transfers.garbled = 0
    harness.check()
    harness.close()


def test_a_garbled_transfer_of_a_key_value_backup_is_read_again(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store") as store:
        cart = store.kv("cart", create=True)
        cart.put(b"ann", b"1")
        back_up(cart, store.objects, "cart")
        with garbled_transfers() as transfers:
            for garbled in (1, 2):  # the listing, the table
                transfers.bodies, transfers.garbled = 0, garbled
                backup = read_backup(store.objects, "cart")
                name = f"again-{garbled}"
                store.kvs.adopt(name, partial(restore, store.objects, backup, store._disk))
                assert store.kv(name).get(b"ann") == b"1"
            transfers.is_broken = True
            with pytest.raises(Corruption):
                read_backup(store.objects, "cart")


def test_verification_records_no_damage_for_a_garbled_transfer(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store") as store:
        with store.sqlite("shop", create=True) as db:
            db.execute("create table item(name)")
        store.checkpoint("shop")
        clicks = store.stream("clicks", create=True)
        clicks.append([b"x"]).result()
        clicks.seal()
        clicks.upload()
        clicks.evict(warm=True)
        cart = store.kv("cart", create=True)
        cart.put(b"ann", b"1")
        back_up(cart, store.objects, "cart", kv_backups_prefix(store.info().store_id))
        with garbled_transfers() as transfers:
            for garbled in count(1):
                transfers.bodies, transfers.garbled = 0, garbled
                result = store.heavy.verify(runner="threads").result or {}
                assert (result["altered"], result["missing"], result["damaged"]) == (0, 0, []), result
                if transfers.bodies < garbled:
                    break
        assert garbled > 2
