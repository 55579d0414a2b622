"""One bad transfer from a bucket is no damage: every engine reads again before it says corruption."""

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
from tests.stream.streams import StreamWorld


class Line:
    """Garbles one of the bodies that come from the object store: the `garbled`-th, from 1."""

    def __init__(self) -> None:
        self.bodies = 0
        self.garbled = 0
        self.is_broken = False

    def through(self, body: bytes) -> bytes:
        self.bodies += 1
        if body and (self.bodies == self.garbled or self.is_broken):
            return bytes([body[0] ^ 0x40, *body[1:-1], body[-1] ^ 0x01]) if len(body) > 1 else bytes([body[0] ^ 0x40])
        return body


@contextmanager
def line() -> Iterator[Line]:
    made = Line()
    get, get_range = LocalStore.get, LocalStore.get_range
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "get", lambda store, key: made.through(get(store, key)))
        patch.setattr(
            LocalStore,
            "get_range",
            lambda store, key, offset, length: made.through(get_range(store, key, offset, length)),
        )
        yield made


def test_what_is_damaged_twice_is_damaged() -> None:
    answers = iter([Corruption("one"), "good", Corruption("one"), Corruption("two")])

    def read() -> object:
        answer = next(answers)
        if isinstance(answer, Corruption):
            raise answer
        return answer

    assert checked_read(read) == "good"
    with pytest.raises(Corruption, match="two"):
        checked_read(read)


@pytest.mark.parametrize("ranges", [True, False])
def test_records_of_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool) -> None:
    world = StreamWorld(tmp_path)
    written = world.fill(2)
    world.stream.upload()
    if ranges:
        monkeypatch.setattr(world.stream.tiers.__class__, "hydrate_if_room", lambda *_: False)
    with line() as wire:
        for garbled in count(1):
            world.stream.evict(warm=True)
            world.reopen()  # with empty caches
            wire.bodies, wire.garbled = 0, garbled
            assert world.payloads() == written
            if wire.bodies < garbled:
                break
        assert garbled > 2, "each body that is read was garbled once"
    wire.garbled = 0
    world.check()
    world.close()


def test_backups_of_a_key_value_database(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store") as store:
        cart = store.kv("cart", create=True)
        cart.put(b"ann", b"1")
        back_up(cart, store.objects, "cart")
        with line() as wire:
            for garbled in (1, 2):  # the list, the table
                wire.bodies, wire.garbled = 0, garbled
                backup = read_backup(store.objects, "cart")
                name = f"again-{garbled}"
                store.kvs.adopt(name, partial(restore, store.objects, backup, store._disk))
                assert store.kv(name).get(b"ann") == b"1"
            wire.is_broken = True
            with pytest.raises(Corruption):
                read_backup(store.objects, "cart")


def test_verification_records_no_damage_that_is_none(tmp_path: Path) -> None:
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
        with line() as wire:
            for garbled in count(1):
                wire.bodies, wire.garbled = 0, garbled
                result = store.heavy.verify(runner="threads").result or {}
                assert (result["altered"], result["missing"], result["damaged"]) == (0, 0, []), result
                if wire.bodies < garbled:
                    break
        assert garbled > 2
