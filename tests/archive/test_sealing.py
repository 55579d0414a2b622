"""A takeover has everything that its predecessor acknowledged, however late that was written."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.archive.format import Kind, Position
from quire.archive.log_reader import find, header_of, last_object
from quire.archive.sealing import seal
from quire.objects.open import open_store


def owner(tmp_path: Path) -> quire.Store:
    archive = quire.ArchiveSettings(mode="sync", interval_seconds=0.05)
    settings = quire.StoreSettings(object_store=str(tmp_path / "bucket"), archive=archive)
    return quire.open(tmp_path / "owner", settings=settings)


def test_a_takeover_includes_what_was_archived_while_it_was_reading(tmp_path: Path) -> None:
    store = owner(tmp_path)
    cart = store.kv("cart", create=True)
    cart.put(b"first", b"1")
    store.archive.wait()  # type: ignore[union-attr]
    written: list[bytes] = []

    def while_reading(step: str, done: int, total: int) -> None:
        if step == "log" and done == total and not written:  # the restore believes that it has everything
            for number in range(3):
                cart.put(b"late %d" % number, b"2")
                store.archive.wait()  # type: ignore[union-attr]
                written.append(b"late %d" % number)

    quire.restore(str(tmp_path / "bucket"), tmp_path / "successor", takeover=True, progress=while_reading)
    with quire.open(tmp_path / "successor") as successor:
        assert [successor.kv("cart").get(key) for key in [b"first", *written]] == [b"1", b"2", b"2", b"2"]
    with pytest.raises(quire.QuireError):
        put_and_wait(store, b"after")
    store.close()


def put_and_wait(store: quire.Store, key: bytes) -> None:
    store.kv("cart").put(key, b"3")
    store.archive.wait()  # type: ignore[union-attr]


def test_a_seal_hands_over_everything_behind_the_known_object(tmp_path: Path) -> None:
    with owner(tmp_path) as store:
        store.kv("cart", create=True).put(b"a", b"1")
        store.archive.wait()  # type: ignore[union-attr]
        store_id = store.info().store_id
    bucket = open_store(str(tmp_path / "bucket"))
    point = find(bucket, store_id)
    first = Position(point.position.epoch, 0)
    key_digest = header_of(bucket, store_id, Position(first.epoch, 1)).parent_digest
    passed: list[Position] = []
    last, _ = seal(
        bucket,
        store_id,
        first.epoch,
        first.epoch + 1,
        0,
        known=(header_of(bucket, store_id, first), key_digest),
        overtaken=lambda header, _digest, _events: passed.append(header.position),
    )
    assert passed == [Position(first.epoch, number) for number in range(1, point.position.number + 1)]
    assert last == point.position
    sealed = last_object(bucket, store_id, first.epoch)
    assert sealed is not None
    assert sealed[1].kind is Kind.SEAL
    bucket.close()
