"""A directory becomes a store completely or not at all: what is refused, and what an interrupted creation leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.core.errors import ManifestDamaged
from quire.durable.files import OsDisk
from quire.store.info import StoreReader
from quire.store.layout import DirectoryState, directory_state
from quire.testing.faults import LOUD, Fault, FaultyDisk, PowerCut
from tests.store.conftest import assert_sound


def each_creation(tmp_path: Path, fault: Fault) -> Iterator[tuple[Path, FaultyDisk]]:
    """A directory and a disk whose 1st, 2nd, … call fails; the last disk does not fail."""
    fail_at = 0
    while True:
        fail_at += 1
        disk = FaultyDisk(OsDisk(), fault, fail_at=fail_at)
        yield tmp_path / f"{fault.name}-{fail_at}" / "store", disk
        if not disk.fired:
            return


@pytest.mark.parametrize("fault", LOUD, ids=lambda fault: fault.name)
def test_a_creation_that_fails_at_any_step_can_be_repeated(tmp_path: Path, fault: Fault) -> None:
    """Layout, rules 1 and 2: before the end there is no store for readers, and the next open creates it."""
    steps = 0
    for root, disk in each_creation(tmp_path, fault):
        steps += 1
        try:
            quire.open(root, disk=disk).close()
        except PowerCut:
            assert fault is Fault.POWER_CUT
        except quire.StorageFault:
            assert disk.fired
        if directory_state(OsDisk(), str(root)) is not DirectoryState.STORE:
            assert disk.fired
            with pytest.raises(quire.StoreNotFound):
                quire.open(root, "r")
        with quire.open(root) as store:
            store.create("shop", "pages")
        assert_sound(root)
        names = ["manifest.lmdb", "manifest.lmdb-checked", "manifest.lmdb-lock", "quire.toml", "store.lock"]
        assert sorted(os.listdir(root)) == names
    assert steps > 10, "every step went through the disk"


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.POWER_CUT], ids=lambda fault: fault.name)
def test_opening_an_existing_store_survives_a_fault_at_any_step(tmp_path: Path, fault: Fault) -> None:
    """A failed sweep only warns; the next open repeats it."""
    for root, disk in each_creation(tmp_path, fault):
        with quire.open(root) as store:
            store.create("shop", "pages")
        (root / "scratch" / "7" / "deep").mkdir(parents=True)
        (root / "scratch" / "7" / "deep" / "file").write_bytes(b"x")
        (root / "manifest.lmdb.tmp").write_bytes(b"garbage")
        try:
            quire.open(root, disk=disk).close()
        except (PowerCut, quire.StorageFault):
            assert disk.fired
        with quire.open(root) as store:
            assert [database.name for database in store.databases()] == ["shop"]
        assert os.listdir(root / "scratch") == []
        assert not (root / "manifest.lmdb.tmp").exists()


@pytest.mark.parametrize("garbage", [b"", b"\0" * 8192, os.urandom(100_000)], ids=["empty", "zeros", "noise"])
def test_an_unfinished_manifest_is_never_read(path: Path, garbage: bytes) -> None:
    path.mkdir()
    (path / "quire.toml").write_text("")
    (path / "manifest.lmdb.tmp").write_bytes(garbage)
    quire.open(path).close()


def test_scratch_is_swept_without_following_links(path: Path, tmp_path: Path) -> None:
    quire.open(path).close()
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_bytes(b"x")
    (path / "scratch" / "12" / "a" / "b").mkdir(parents=True)
    (path / "scratch" / "12" / "a" / "b" / "file").write_bytes(b"x")
    (path / "scratch" / "link").symlink_to(outside)
    quire.open(path).close()
    assert os.listdir(path / "scratch") == []
    assert (outside / "file").exists()


@pytest.mark.parametrize(
    "present", [[], ["lost+found/"], ["store.lock"], ["store.lock", "quire.toml.tmp"], ["quire.toml"]]
)
def test_directories_that_can_become_a_store(path: Path, present: list[str]) -> None:
    _fill(path, present)
    quire.open(path).close()


@pytest.mark.parametrize(
    ("present", "error"),
    [
        (["letter.txt"], quire.InvalidInput),
        (["store.lock", "src/"], quire.InvalidInput),
        (["manifest.lmdb"], quire.InvalidConfig),
        (["quire.toml", "pages/"], quire.ManifestDamaged),
        (["quire.toml", "objects/"], quire.ManifestDamaged),
    ],
)
def test_other_directories_are_refused_and_left_unchanged(
    tmp_path: Path, present: list[str], error: type[quire.QuireError]
) -> None:
    root = tmp_path / "store"
    _fill(root, present)
    for mode in ("rw", "r"):
        # A reader finds no store among unrelated files; only creating one there is an error.
        nothing_to_read = mode == "r" and error is quire.InvalidInput
        with pytest.raises(quire.StoreNotFound if nothing_to_read else error) as caught:
            quire.open(root, mode)
        assert caught.value.hint
    assert sorted(os.listdir(root)) == sorted(name.strip("/") for name in present)


def _fill(root: Path, present: list[str]) -> None:
    root.mkdir()
    for name in present:
        if name.endswith("/"):
            (root / name).mkdir()
        else:
            (root / name).touch()


def test_a_file_is_refused_as_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for location in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(quire.InvalidInput, match="directory"):
            quire.open(location)


@pytest.mark.parametrize(
    "text", [b"object_store = ", b"[manifest]\nunknown = 1", b"[manifest]\nreaders_max = 0", b"\xff\xfe", b"feed = 3"]
)
def test_an_invalid_configuration_is_reported_and_nothing_is_created(tmp_path: Path, text: bytes) -> None:
    root = tmp_path / "store"
    root.mkdir()
    (root / "quire.toml").write_bytes(text)
    with pytest.raises(quire.InvalidConfig):
        quire.open(root)
    assert not (root / "manifest.lmdb").exists()
    (root / "quire.toml").write_bytes(b"")
    quire.open(root).close()  # the lock was released
    (root / "quire.toml").write_bytes(text)
    for mode in ("rw", "r"):
        with pytest.raises(quire.InvalidConfig):
            quire.open(root, mode)


def test_an_invalid_manifest_is_damage_not_a_new_store(tmp_path: Path) -> None:
    root = tmp_path / "store"
    quire.open(root).close()
    (root / "manifest.lmdb").write_bytes(b"no LMDB file at all" * 1000)
    with pytest.raises(quire.ManifestDamaged):
        quire.open(root)
    assert (root / "manifest.lmdb").read_bytes().startswith(b"no LMDB")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
def test_another_users_directory_is_not_writable(tmp_path: Path, existing: bool) -> None:
    root = tmp_path / "store"
    root.mkdir()
    if existing:
        quire.open(root).close()
    for directory in (root, *list(root.parents)[:4]):
        if directory.is_relative_to(tmp_path.parents[2]):
            directory.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(quire.NotWritable):
            quire.open(root)
    finally:
        os.seteuid(0)
    if existing:
        assert_sound(root)


def test_an_invalid_manifest_page_is_damage_to_readers(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with quire.open(root) as store:
        for number in range(5):
            store.create(f"db-{number}", "pages")
    manifest = root / "manifest.lmdb"
    whole, page, damaged = manifest.read_bytes(), 4096, 0
    for start in range(2 * page, len(whole), page):  # after LMDB's two meta pages
        manifest.write_bytes(whole[:start] + bytes(page) + whole[start + page :])
        try:
            with StoreReader(str(root)) as reader:
                reader.databases()
                reader.info()
        except ManifestDamaged:
            damaged += 1
    assert damaged > 1
