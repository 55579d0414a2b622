"""A guarded store asks before each put and each deletion, and never before a read."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.core.errors import StoreFenced
from quire.objects.api import DeletableStore, Range
from quire.objects.guarded import GuardedStore, path_store
from quire.objects.local import LocalStore


def test_each_put_and_each_deletion_asks_first(store: DeletableStore, tmp_path: Path) -> None:
    asked: list[str] = []
    guarded = GuardedStore(store, lambda: asked.append("put"), lambda: asked.append("delete"))
    (tmp_path / "file").write_bytes(b"hello")
    guarded.put("a/b", b"hello", create_only=True)
    guarded.put_file("a/c", str(tmp_path / "file"))
    assert asked == ["put", "put"]
    assert guarded.get("a/b") == guarded.get_range("a/c", 0, 5) == b"hello"
    assert guarded.get_ranges("a/b", [Range(offset=1, length=2)]) == [b"el"]
    assert guarded.head("a/c").size_bytes == 5
    assert [info.key for page in guarded.list_pages() for info in page] == ["a/b", "a/c"]
    assert len(guarded.list_prefixes()) == 1
    assert guarded.url == store.url
    assert asked == ["put", "put"], "reading asks nobody"
    guarded.delete("a/b")
    guarded.delete_many(["a/c", "a/d"])
    assert asked == ["put", "put", "delete", "delete"], "a batch asks once"


def test_who_may_not_changes_nothing(store: DeletableStore) -> None:
    def refuse() -> None:
        raise StoreFenced("another owner")

    store.put("a/b", b"hello")
    guarded = GuardedStore(store, refuse, refuse)
    for change in (
        lambda: guarded.put("a/b", b"other"),
        lambda: guarded.put_file("a/b", __file__),
        lambda: guarded.delete("a/b"),
        lambda: guarded.delete_many(["a/b"]),
    ):
        with pytest.raises(StoreFenced):
            change()
    assert store.get("a/b") == b"hello"


def test_a_store_below_a_path_is_still_known_as_one(tmp_path: Path) -> None:
    """Sweeps of what crashed puts left need to know."""
    with quire.open(tmp_path / "store") as opened:
        found = path_store(opened.objects)
    assert isinstance(found, LocalStore)
    assert found.url == str(tmp_path / "store" / "objects")
