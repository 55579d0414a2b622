"""Files with unexpected content: each gives a typed error that names the file, never a signal, and is never changed."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import pytest

from quire.core.errors import ManifestDamaged, QuireError, StorageFault, StoreNotFound
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest import tables as t
from quire.manifest.records import DbKind
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import chunk, finish, python, register


def test_a_file_that_is_not_lmdb_is_damage_and_unchanged(path: str) -> None:
    for content in (b"x" * 10_000, b"\x00" * 8192, b"SQLite format 3\x00" + b"\x01" * 5000, b"short"):
        Path(path).write_bytes(content)
        for mode in ("rw", "r"):
            with pytest.raises((ManifestDamaged, StorageFault)) as caught:
                ManifestStore.open(path, mode=mode)
            assert caught.value.where["path"] == path
            assert Path(path).read_bytes() == content


def test_an_empty_file_is_an_empty_store_for_its_owner(path: str) -> None:
    """A crash between creation and the first write leaves an empty file."""
    Path(path).touch()
    with pytest.raises(QuireError):
        ManifestStore.open(path, mode="r")
    with ManifestStore.open(path) as manifest:
        assert manifest.register_db("x", DbKind.PAGES) == 1


TRUNCATED = """
import os, shutil, sys
from quire.core.errors import ManifestDamaged, QuireError
from quire.manifest.store import ManifestStore
from quire.testing.manifest import dump
source, copy, size = sys.argv[1], sys.argv[2], os.path.getsize(sys.argv[1])
whole = ManifestStore.open(source, mode="r")
rows = dump(whole)
whole.close()
lengths = sorted({*range(1, 9000, 1700), *range(4096, size, 4096 * 7), size - 4096, size - 1})
for length in lengths:
    for mode in ("r", "rw"):
        shutil.copy(source, copy)
        os.truncate(copy, length)
        try:
            manifest = ManifestStore.open(copy, mode=mode)
        except QuireError as error:
            assert str(error)
            continue
        assert dump(manifest) == rows, length
        manifest.close()
print("ok", len(lengths))
"""


def test_a_truncated_file_is_damage_and_never_a_signal(path: str) -> None:
    """Reading beyond the end of a mapped file raises SIGBUS, which would kill the child."""
    with ManifestStore.open(path) as manifest:
        manifest.submit([register(1)]).result()
        for start in range(0, 3000, 500):
            manifest.submit([chunk(start + n) for n in range(500)]).result()
    assert finish(python(TRUNCATED, path, path + ".cut")).startswith("ok")


def test_a_directory_instead_of_the_file_is_rejected(path: str) -> None:
    os.mkdir(path)
    for mode in ("rw", "r"):
        with pytest.raises(QuireError) as caught:
            ManifestStore.open(path, mode=mode)
        assert path in str(caught.value)


def test_a_path_that_cannot_be_created_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(QuireError) as caught:
        ManifestStore.open(str(tmp_path / "file" / "manifest.lmdb"))
    assert "manifest.lmdb" in str(caught.value)
    with pytest.raises(QuireError):
        ManifestStore.open(str(tmp_path / "nowhere" / "manifest.lmdb"))


def test_reading_a_missing_manifest_raises_not_found_and_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound):
        ManifestStore.open(str(tmp_path / "manifest.lmdb"), mode="r")
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_an_older_store_lacks_reads_as_empty(path: str) -> None:
    ManifestStore.open(path).close()
    with lmdb.open(path, subdir=False, max_dbs=96) as raw, raw.begin(write=True) as txn:
        txn.drop(raw.open_db(b"metrics", txn=txn))
        txn.drop(raw.open_db(b"gc_refcounts", txn=txn))
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as read_txn:
        assert manifest.env.handles["metrics"] is None
        assert list(read_txn.scan(t.METRICS)) == []
        assert read_txn.get(t.METRICS, 1, 1) is None
        assert read_txn.count(t.METRICS) == 0
        assert read_txn.to_arrow("metrics").num_rows == 0
        assert read_txn.refcount(ArtifactKey(1, ArtifactKind.BASE, 1, 1)) is None
    with ManifestStore.open(path) as manifest, manifest.read() as read_txn:
        assert read_txn.count(t.METRICS) == 0
