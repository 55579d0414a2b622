"""Hazard: a bulk call that ends early leaves its caller without knowing which databases exist."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import quire
from quire.core.errors import InvalidInput, InvalidName, NameTaken, UnknownDatabase
from quire.store import bulk


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[quire.Store]:
    monkeypatch.setattr(bulk, "OUTSTANDING", 20)
    with quire.open(tmp_path / "store") as opened:
        yield opened


def listed(store: quire.Store) -> list[str]:
    return [info.name for info in store.databases()]


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.create_many("ab"),
        lambda store: store.fork_many("a", "xy"),
        lambda store: store.drop_many("ab"),
        lambda store: store.drop_many(b"ab"),
    ],
)
def test_one_string_is_not_a_list_of_names(store: quire.Store, call: Callable[[quire.Store], object]) -> None:
    store.create_many(["a", "b"])
    with pytest.raises(InvalidInput, match="not one string"):
        call(store)
    assert listed(store) == ["a", "b"]
    assert store.database("a").snapshots == 0


def test_a_call_continues_after_the_names_that_were_read(store: quire.Store) -> None:
    wanted = [f"tenant-{number:03d}" for number in range(100)]
    store.create_many(["tenant-030", "tenant-033"])
    rest, refused = wanted, []
    while rest:
        try:
            store.create_many(rest)
            break
        except NameTaken as error:
            where = pickle.loads(pickle.dumps(error)).where
            assert where["done"] + len(where["refused"]) == where["read"]
            assert set(rest[: where["read"]]) <= set(listed(store))
            refused += where["refused"]
            rest = rest[where["read"] :]
    assert listed(store) == wanted
    assert refused == ["tenant-030", "tenant-033"]


def test_the_first_error_is_that_of_the_first_refused_name(store: quire.Store) -> None:
    store.create("taken", "pages")
    with pytest.raises(NameTaken) as taken:
        store.create_many(["fine", "taken", "not/fine", "later"])
    assert taken.value.where["refused"] == ["taken", "not/fine"]
    assert listed(store) == ["fine", "taken"]
    with pytest.raises(InvalidName):
        store.create_many(["", "later"])
    with pytest.raises(UnknownDatabase) as unknown:
        store.drop_many(["fine", "nobody", "taken"])
    assert (unknown.value.where["done"], unknown.value.where["read"]) == (1, 2)
    assert listed(store) == ["taken"]


def test_an_error_of_the_iterable_waits_for_what_was_submitted(store: quire.Store) -> None:
    def names() -> Iterator[str]:
        yield "one"
        yield "two"
        raise RuntimeError("the source of the names failed")

    with pytest.raises(RuntimeError, match="source of the names"):
        store.create_many(names())
    assert listed(store) == ["one", "two"]


def test_a_name_that_is_given_twice_is_dropped_once(store: quire.Store) -> None:
    first, second = store.create_many(["one", "two"])
    assert store.drop_many(["one", "one", "two"]) == [first, second]
    assert listed(store) == []


def test_a_long_list_of_refused_names_is_cut_in_the_text_only(store: quire.Store) -> None:
    wanted = [f"tenant-{number:03d}" for number in range(15)]
    store.create_many(wanted)
    with pytest.raises(NameTaken, match="5 more") as taken:
        store.create_many(wanted)
    assert taken.value.where["refused"] == wanted
