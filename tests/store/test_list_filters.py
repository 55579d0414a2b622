"""Hazard: a filter with a mistake in it lists nothing, and reads as an empty store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.core.errors import InvalidInput


@pytest.fixture
def store(tmp_path: Path) -> Iterator[quire.Store]:
    with quire.open(tmp_path / "store") as opened:
        opened.create_many(["shop-1", "shop-2", "shop-12", "other", "star*"], "sqlite")
        opened.create("cart", "key-value")
        opened.create("clicks", "stream")
        yield opened


def listed(store: quire.Store, **wanted: object) -> list[str]:
    return [info.name for info in store.databases(**wanted)]  # type: ignore[arg-type]


def test_kinds_have_the_names_that_users_know(store: quire.Store) -> None:
    assert listed(store, kind="kv") == listed(store, kind="key-value") == listed(store, kind="lsm") == ["cart"]
    assert listed(store, kind="sqlite") == listed(store, kind="pages")
    assert listed(store, kind="stream") == ["clicks"]


@pytest.mark.parametrize("wanted", [{"kind": "bogus"}, {"limit": -1}, {"sort": "age"}])
def test_what_no_list_can_have_is_refused(store: quire.Store, wanted: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        listed(store, **wanted)


def test_a_pattern_is_accepted_in_place_of_a_prefix(store: quire.Store) -> None:
    assert listed(store, prefix="shop-1*") == ["shop-1", "shop-12"]
    assert listed(store, prefix="shop-?") == ["shop-1", "shop-2"]
    assert listed(store, prefix="*-1*") == ["shop-1", "shop-12"]
    assert listed(store, prefix="star*") == ["star*"]
    assert listed(store, prefix="shop-*", after="shop-1", limit=1) == ["shop-12"]
    assert sorted(listed(store, prefix="shop-1*", sort="written")) == ["shop-1", "shop-12"]
