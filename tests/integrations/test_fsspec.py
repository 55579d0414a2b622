"""The fsspec file system: versions as files."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import fsspec
import pytest

import quire
from quire.core.errors import ReadOnly
from quire.integrations.fsspec import QuireFileSystem
from quire.sqlite import dbapi


@pytest.fixture
def files() -> QuireFileSystem:
    fsspec.register_implementation("quire", QuireFileSystem, clobber=True)
    return QuireFileSystem(skip_instance_cache=True)


def items(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
        return [item for (item,) in connection.execute("select item from orders order by id")]


def test_a_store_is_a_directory_of_versions(shop: Path, files: QuireFileSystem, tmp_path: Path) -> None:
    assert files.ls(f"quire://{shop}", detail=False) == [f"{shop}/shop.sqlite", f"{shop}/shop@monday.sqlite"]
    assert files.glob(f"{shop}/*@*.sqlite") == [f"{shop}/shop@monday.sqlite"]
    assert files.isdir(str(shop))
    assert not files.exists(f"{shop}/nosuch.sqlite")
    assert not files.exists(f"{shop}/shop@nosuch.sqlite")
    assert not files.exists(str(tmp_path / "nosuch"))
    for name, expected in (("shop", ["tea", "milk"]), ("shop@monday", ["tea"])):
        files.get(f"{shop}/{name}.sqlite", str(tmp_path / name))
        assert items(tmp_path / name) == expected
        listed = {entry["name"]: entry["size"] for entry in files.ls(str(shop))}
        assert listed[f"{shop}/{name}.sqlite"] == (tmp_path / name).stat().st_size
    with quire.open(shop) as store:
        lsn = store.pages.open("shop").wal.durable.lsn
    files.get(f"{shop}/shop@{lsn}.sqlite", str(tmp_path / "epoch"))
    assert items(tmp_path / "epoch") == ["tea", "milk"]


def test_ranges_and_seeking(shop: Path, files: QuireFileSystem) -> None:
    path = f"{shop}/shop@monday.sqlite"
    whole = files.cat_file(path)
    assert files.info(path)["size"] == len(whole)
    assert files.cat_file(path, 4090, 4200) == whole[4090:4200]
    assert files.cat_file(path, -10) == whole[-10:]
    with fsspec.open(f"quire://{path}", "rb", block_size=512) as file:
        assert (file.seek(5000), file.read(100)) == (5000, whole[5000:5100])
        assert (file.seek(-3, 2), file.read()) == (len(whole) - 3, whole[-3:])
    with pytest.raises(ReadOnly, match="read-only files"):
        files.open(path, "wb")


def test_commits_that_are_not_synced_yet_are_in_the_file(shop: Path, files: QuireFileSystem, tmp_path: Path) -> None:
    """Hazard: with `synchronous` below FULL the commits of the last second, which all connections see, were missing."""
    with quire.open(shop), closing(dbapi.connect(shop / "shop")) as connection:
        connection.execute("pragma synchronous = off")
        connection.execute("delete from orders")
        connection.commit()
        files.get(f"{shop}/shop.sqlite", str(tmp_path / "new"))
        assert items(tmp_path / "new") == []


def test_an_open_file_keeps_its_version(shop: Path, files: QuireFileSystem, tmp_path: Path) -> None:
    with quire.open(shop), closing(dbapi.connect(shop / "shop")) as connection:
        before = files.ukey(f"{shop}/shop.sqlite")
        with files.open(f"{shop}/shop.sqlite") as file:
            connection.execute("delete from orders")
            connection.commit()
            (tmp_path / "old").write_bytes(file.read())
        assert items(tmp_path / "old") == ["tea", "milk"]
        files.get(f"{shop}/shop.sqlite", str(tmp_path / "new"))
        assert items(tmp_path / "new") == []
        assert files.ukey(f"{shop}/shop.sqlite") != before


def test_closing_a_file_twice_leaves_other_files_open(shop: Path, files: QuireFileSystem) -> None:
    """Hazard: the second `close` gave up the store a second time, and it was closed although another file was open."""
    path = f"{shop}/shop.sqlite"
    whole = files.cat_file(path)
    with files.open(path, "rb", cache_type="none") as other:
        file = files.open(path, "rb")
        file.close()
        file.close()
        assert other.read() == whole


def test_duckdb_reads_it(shop: Path) -> None:
    code = (
        "import duckdb; from quire.integrations.fsspec import QuireFileSystem\n"
        "connection = duckdb.connect(); connection.register_filesystem(QuireFileSystem())\n"
        f"print(connection.execute(\"select size from read_blob('quire://{shop}/*.sqlite')\").fetchall())"
    )
    # In a separate process: DuckDB prints an error at exit when it was imported by pytest.
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert result.stdout == "[(8192,), (8192,)]\n"
