"""A guarded store checks permission before each put and each deletion, and never before a read."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.core.errors import StoreFenced
from quire.objects.api import DeletableStore, Range
from quire.objects.guarded import GuardedStore, path_store
from quire.objects.local import LocalStore


def test_each_put_and_each_deletion_is_checked_first(store: DeletableStore, tmp_path: Path) -> None:
    checks: list[str] = []
    guarded = GuardedStore(store, lambda: checks.append("put"), lambda: checks.append("delete"))
    (tmp_path / "file").write_bytes(b"hello")
    guarded.put("a/b", b"hello", create_only=True)
    guarded.put_file("a/c", str(tmp_path / "file"))
    assert checks == ["put", "put"]
    assert guarded.get("a/b") == guarded.get_range("a/c", 0, 5) == b"hello"
    assert guarded.get_ranges("a/b", [Range(offset=1, length=2)]) == [b"el"]
    assert guarded.head("a/c").size_bytes == 5
    assert [info.key for page in guarded.list_pages() for info in page] == ["a/b", "a/c"]
    assert len(guarded.list_prefixes()) == 1
    assert guarded.url == store.url
    assert checks == ["put", "put"], "reads are not checked"
    guarded.delete("a/b")
    guarded.delete_many(["a/c", "a/d"])
    assert checks == ["put", "put", "delete", "delete"], "a batch is checked once"


def test_a_refused_change_has_no_effect(store: DeletableStore) -> None:
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


def test_a_guarded_path_store_is_still_recognized_as_one(tmp_path: Path) -> None:
    """Sweeps of the leftovers of crashed puts depend on it."""
    with quire.open(tmp_path / "store") as store:
        local_store = path_store(store.objects)
    assert isinstance(local_store, LocalStore)
    assert local_store.url == str(tmp_path / "store" / "objects")
