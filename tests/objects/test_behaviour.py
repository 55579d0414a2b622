"""What every object store guarantees (rules of `quire.objects.api`). A new implementation must pass these tests
first."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.core.errors import AlreadyExists, ChecksumMismatch, InvalidInput, InvalidName, ObjectNotFound, OutOfRange
from quire.durable.checksums import crc64
from quire.objects.api import DeletableStore, ExistingObject, ObjectInfo, Range, list_objects

KEY = "00000001/0000002a/base:00000003"


def keys_of(store: DeletableStore, prefix: str = "", start_after: str = "") -> list[str]:
    return [info.key for info in list_objects(store, prefix, start_after=start_after)]


# ── put and get ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 300], ids=["empty", "one byte", "75 KiB"])
def test_put_and_get_round_trip(store: DeletableStore, data: bytes) -> None:
    result = store.put(KEY, data)
    assert (result.key, result.size_bytes, result.adopted) == (KEY, len(data), False)
    assert store.get(KEY) == data


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_stored_and_later_changes_to_it_are_not(
    store: DeletableStore, kind: type[bytes] | type[bytearray] | type[memoryview]
) -> None:
    original = bytearray(b"before")
    store.put(KEY, original if kind is bytearray else kind(original))
    original[:] = b"after!"
    assert store.get(KEY) == b"before"


def test_put_replaces_unless_create_only(store: DeletableStore) -> None:
    store.put(KEY, b"old, and longer")
    store.put(KEY, b"new")
    assert store.get(KEY) == b"new"


@pytest.mark.parametrize("key", ["a", "a b/c", "größe/☃", "a%20b", "x/a:b@c~d#e?f&g+h=i", "a.tmp", "a/.tmp"])
def test_printable_names_are_preserved_exactly(store: DeletableStore, key: str) -> None:
    store.put(key, b"1")
    assert store.get(key) == b"1"
    assert keys_of(store) == [key]


BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "a/../b",
    "./a",
    "a\nb",
    "a\x00b",
    "a\x7fb",
    "a\\b",
    "\ud800",
    ".tmp/a",
    ".tmp",
    "x" * 256,
]


@pytest.mark.parametrize("key", [*BAD_KEYS, "/".join(["y" * 200] * 6)])
def test_names_that_any_store_would_change_or_refuse_are_refused_by_all(store: DeletableStore, key: str) -> None:
    for call in (
        lambda: store.put(key, b"1"),
        lambda: store.get(key),
        lambda: store.get_range(key, 0, 0),
        lambda: store.get_ranges(key, []),
        lambda: store.head(key),
        lambda: store.delete(key),
        lambda: store.delete_many([key]),
    ):
        with pytest.raises(InvalidName):
            call()


def test_a_missing_object_is_object_not_found(store: DeletableStore) -> None:
    store.put("folder/object", b"1")
    for key in ("missing", "folder", "folder/object2", "folder/object/below"):
        for call in (
            lambda key=key: store.get(key),
            lambda key=key: store.get_range(key, 0, 1),
            lambda key=key: store.get_ranges(key, [Range(offset=0, length=1)]),
            lambda key=key: store.head(key),
        ):
            with pytest.raises(ObjectNotFound) as caught:
                call()
            assert caught.value.where["key"] == key


def test_a_file_is_put_like_its_bytes(store: DeletableStore, tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_bytes(bytes(range(256)) * 100)
    assert store.put_file(KEY, str(path)).size_bytes == 25_600
    assert store.get(KEY) == path.read_bytes()
    with pytest.raises(AlreadyExists):
        store.put_file(KEY, str(path), create_only=True)


# ── create-only ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_create_only_creates_a_new_object(store: DeletableStore) -> None:
    assert store.put(KEY, b"mine", create_only=True).adopted is False
    assert store.get(KEY) == b"mine"


def test_create_only_without_identity_never_adopts_even_equal_bytes(store: DeletableStore) -> None:
    store.put(KEY, b"same")
    with pytest.raises(AlreadyExists) as caught:
        store.put(KEY, b"same", create_only=True)
    assert caught.value.where["key"] == KEY


def test_create_only_adopts_an_object_of_the_same_identity_and_keeps_its_bytes(store: DeletableStore) -> None:
    store.put(KEY, b"first body|plan-7")

    def same_plan(existing: ExistingObject) -> bool:
        assert existing.info.key == KEY
        assert existing.read(0, 5) == b"first"
        assert existing.read_all() == b"first body|plan-7"
        assert existing.read_tail(10_000) == b"first body|plan-7"
        return existing.read_tail(6) == b"plan-7"

    result = store.put(KEY, b"second|plan-7", create_only=True, identity=same_plan)
    assert result.adopted is True
    assert result.size_bytes == len(b"first body|plan-7")
    assert store.get(KEY) == b"first body|plan-7"


def test_create_only_refuses_another_identity_and_overwrites_nothing(store: DeletableStore) -> None:
    store.put(KEY, b"theirs")
    with pytest.raises(AlreadyExists, match="not the one being written"):
        store.put(KEY, b"mine", create_only=True, identity=lambda _: False)
    assert store.get(KEY) == b"theirs"


def test_exactly_one_of_many_creators_succeeds(store: DeletableStore) -> None:
    def create(number: int) -> bool:
        return not store.put(KEY, b"%d" % number, create_only=True, identity=lambda _: True).adopted

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(create, range(16)))
    assert sum(outcomes) == 1
    assert store.get(KEY) == b"%d" % outcomes.index(True)


def test_a_create_that_finds_the_name_free_again_creates(store: DeletableStore) -> None:
    """The object is deleted between our "exists" response and our read of it."""
    store.put(KEY, b"short-lived")

    def delete_then_read(existing: ExistingObject) -> bool:
        store.delete(KEY)
        return existing.read(0, 1) == b"s"

    assert store.put(KEY, b"mine", create_only=True, identity=delete_then_read).adopted is False
    assert store.get(KEY) == b"mine"


# ── ranges ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_ranges_return_exactly_the_requested_bytes(store: DeletableStore) -> None:
    data = bytes(range(256)) * 16
    store.put(KEY, data)
    assert store.get_range(KEY, 0, len(data)) == data
    assert store.get_range(KEY, 4095, 1) == data[4095:]
    wanted = [(4000, 96), (0, 1), (10, 0), (100, 200), (150, 10)]
    assert store.get_ranges(KEY, [Range(offset=o, length=n) for o, n in wanted]) == [data[o : o + n] for o, n in wanted]
    assert store.get_ranges(KEY, []) == []


@pytest.mark.parametrize(("offset", "length"), [(9, 2), (10, 1), (11, 1), (500, 5), (0, 11)])
def test_a_range_past_the_end_is_an_error_not_a_short_read(store: DeletableStore, offset: int, length: int) -> None:
    store.put(KEY, b"0123456789")
    with pytest.raises(OutOfRange, match="quire verify"):
        store.get_range(KEY, offset, length)
    with pytest.raises(OutOfRange):
        store.get_ranges(KEY, [Range(offset=0, length=2), Range(offset=offset, length=length)])


def test_impossible_ranges_are_refused(store: DeletableStore) -> None:
    store.put(KEY, b"0123456789")
    for offset, length in ((-1, 2), (0, -1)):
        with pytest.raises(OutOfRange):
            store.get_range(KEY, offset, length)
        with pytest.raises(OutOfRange):
            store.get_ranges(KEY, [Range(offset=offset, length=length)])


# ── verified ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_verified_read_returns_only_what_matches_size_and_digests(store: DeletableStore) -> None:
    data = b"precious"
    digest = hashlib.sha256(data).digest()
    store.put(KEY, data, sha256=digest)
    assert store.get_verified(KEY, size_bytes=8, sha256=digest) == data
    assert store.get_verified(KEY, size_bytes=8, crc64=crc64(data)) == data
    assert store.get_verified(KEY, size_bytes=8, sha256=digest, crc64=crc64(data)) == data
    for size, sha, crc in ((9, digest, None), (8, bytes(32), None), (8, None, 1), (8, digest, 1)):
        with pytest.raises(ChecksumMismatch, match="quire verify") as caught:
            store.get_verified(KEY, size_bytes=size, sha256=sha, crc64=crc)
        assert caught.value.where["key"] == KEY
    with pytest.raises(InvalidInput):
        store.get_verified(KEY, size_bytes=8)


def test_data_that_does_not_match_its_digest_is_not_stored(store: DeletableStore) -> None:
    with pytest.raises(ChecksumMismatch):
        store.put(KEY, b"garbled", sha256=hashlib.sha256(b"intended").digest())
    assert keys_of(store) == []


# ── head, list, delete ────────────────────────────────────────────────────────────────────────────────────────────────
def test_head_returns_size_and_time(store: DeletableStore) -> None:
    store.put(KEY, b"12345")
    info = store.head(KEY)
    assert (info.key, info.size_bytes) == (KEY, 5)
    assert info.modified_ms > 1_600_000_000_000


def test_listing_is_sorted_by_whole_key_and_bounded_in_pages(store: DeletableStore) -> None:
    keys = ["a", "b/c", "b.d", "b0", "b/c2/x", "B", "ü", "b/a:1"]
    for key in keys:
        store.put(key, key.encode())
    assert keys_of(store) == sorted(keys)
    pages = list(store.list_pages(page_objects=3))
    assert [info.key for page in pages for info in page] == sorted(keys)
    assert max(len(page) for page in pages) <= 3
    assert all(page for page in pages)
    assert all(info.size_bytes == len(info.key.encode()) for page in pages for info in page)
    with pytest.raises(OutOfRange):
        store.list_pages(page_objects=0)
    with pytest.raises(InvalidName):
        store.list_pages(start_after="b/")


def test_a_prefix_matches_whole_segments(store: DeletableStore) -> None:
    for key in ("x/a", "x/b/c", "xy/a", "w"):
        store.put(key, b"1")
    assert keys_of(store, "x") == keys_of(store, "x/") == ["x/a", "x/b/c"]
    assert keys_of(store, "x/b") == ["x/b/c"]
    assert keys_of(store, "w") == keys_of(store, "nothing") == []
    with pytest.raises(InvalidName):
        keys_of(store, "../x")


def test_a_listing_continues_after_any_key(store: DeletableStore) -> None:
    keys = sorted(["a", "b/c", "b.d", "b/c2/x", "b/c2/y", "z"])
    for key in keys:
        store.put(key, b"1")
    for start_after in [*keys, "b", "b/c2/xx", "0", "zz"]:
        assert keys_of(store, "", start_after) == [key for key in keys if key > start_after]
    assert keys_of(store, "b", "b/c2/x") == ["b/c2/y"]


def test_prefixes_are_the_direct_children_that_hold_objects(store: DeletableStore) -> None:
    for key in ("top", "1/a", "1/b/c", "2/x/y/z"):
        store.put(key, b"1")
    assert store.list_prefixes() == ["1", "2"]
    assert store.list_prefixes("1") == ["1/b"]
    assert store.list_prefixes("2/x") == ["2/x/y"]
    assert store.list_prefixes("3") == store.list_prefixes("top") == []


def test_an_empty_store_lists_nothing(store: DeletableStore) -> None:
    assert list(store.list_pages()) == []
    assert store.list_prefixes() == []


def test_delete_is_idempotent(store: DeletableStore) -> None:
    store.put("a/b", b"1")
    store.put("a/c", b"1")
    store.delete("a/b")
    store.delete("a/b")
    store.delete("a")
    store.delete("a/c/d")
    assert keys_of(store) == ["a/c"]


def test_delete_many_removes_all_and_ignores_missing_ones(store: DeletableStore) -> None:
    keys = [f"{n % 3}/{n}" for n in range(30)]
    for key in keys:
        store.put(key, b"1")
    store.delete_many([*keys[:20], "missing", "0/missing", keys[0]])
    assert keys_of(store) == sorted(keys[20:])
    store.delete_many([])
    store.delete_many(iter(keys))
    assert keys_of(store) == []


# ── comparison with a model ───────────────────────────────────────────────────────────────────────────────────────────
KEYS = st.sampled_from(["a/1", "a/2", "a/b/1", "c", "d/e/f"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, st.binary(max_size=20)),
        st.tuples(st.just("create"), KEYS, st.binary(max_size=20)),
        st.tuples(st.just("delete"), KEYS, st.just(b"")),
    ),
    max_size=25,
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_a_store_behaves_like_a_dict(store: DeletableStore, steps: list[tuple[str, str, bytes]]) -> None:
    store.delete_many([info.key for info in list_objects(store)])
    model: dict[str, bytes] = {}
    for operation, key, data in steps:
        if operation == "put":
            store.put(key, data)
            model[key] = data
        elif operation == "delete":
            store.delete(key)
            model.pop(key, None)
        elif key in model:
            with pytest.raises(AlreadyExists):
                store.put(key, data, create_only=True)
        else:
            store.put(key, data, create_only=True)
            model[key] = data
    listed: list[ObjectInfo] = list(list_objects(store))
    assert [(info.key, info.size_bytes) for info in listed] == [(key, len(model[key])) for key in sorted(model)]
    assert {key: store.get(key) for key in model} == model
