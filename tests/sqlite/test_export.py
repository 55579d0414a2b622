"""Export: any version as a file that SQLite opens, written completely or not at all; import and export lose nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

import apsw
import pytest

import quire
from quire.core.errors import (
    AlreadyExists,
    Corruption,
    InvalidInput,
    OutOfRange,
    StorageFault,
    UnknownDatabase,
    UnknownSnapshot,
)
from quire.core.ids import Epoch
from quire.durable.files import OsDisk
from quire.sqlite import exporting
from quire.sqlite.exporting import Exported, export_file
from quire.sqlite.files import with_legacy_header
from quire.sqlite.importing import import_file
from quire.store.store import Store
from quire.testing.faults import Fault, PowerCut, each_fault
from tests.sqlite.sqlite_files import dump, fill, integrity, make


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store") as store:
        yield store
        assert store.manifest.check() == []


def put(store: Store, path: Path, name: str = "shop") -> int:
    return import_file(store.manifest, store.pages, path, name).lsn


def modified(path: Path, seed: int) -> None:
    with closing(apsw.Connection(str(path))) as connection, connection:
        fill(connection, 40, seed)
        connection.execute("DELETE FROM item WHERE id % 3 = 0")
        connection.execute("UPDATE price SET cents = cents + 1")


@pytest.mark.parametrize("page_size", [512, 1024, 4096, 65536])
@pytest.mark.parametrize("auto_vacuum", [0, 2], ids=["plain", "auto-vacuum"])
def test_import_modify_and_export_is_exact(store: Store, tmp_path: Path, page_size: int, auto_vacuum: int) -> None:
    file = make(tmp_path / "shop.db", page_size=page_size, auto_vacuum=auto_vacuum)
    put(store, file)
    modified(file, seed=2)
    put(store, file)
    store.checkpoint("shop")
    modified(file, seed=3)
    put(store, file)
    exported = export_file(store.pages, "shop", tmp_path / "out.db", check=True)
    assert (tmp_path / "out.db").read_bytes() == file.read_bytes()
    assert dump(tmp_path / "out.db") == dump(file)
    assert integrity(tmp_path / "out.db") == "ok"
    assert exported.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (exported.page_size, exported.size_pages, exported.checked) == (
        page_size,
        file.stat().st_size // page_size,
        True,
    )


def test_a_database_in_wal_mode_is_exported_without_a_log(store: Store, tmp_path: Path) -> None:
    file = make(tmp_path / "shop.db", wal=True)
    put(store, file)
    export_file(store.pages, "shop", tmp_path / "out.db")
    out = (tmp_path / "out.db").read_bytes()
    assert out[18:20] == b"\x01\x01"
    assert out == with_legacy_header(file.read_bytes())
    with closing(apsw.Connection(str(tmp_path / "out.db"))) as connection:
        assert connection.pragma("journal_mode") == "delete"
        connection.execute("INSERT INTO item (name) VALUES ('it is an ordinary file')")


def test_every_version_can_be_exported(store: Store, tmp_path: Path) -> None:
    file = make(tmp_path / "shop.db")
    versions: list[tuple[Exported, bytes]] = []
    for number in range(3):
        put(store, file)
        store.snapshot("shop", f"v{number}")
        versions.append((export_file(store.pages, "shop", tmp_path / f"now-{number}.db"), file.read_bytes()))
        modified(file, number + 5)
    put(store, file)
    out = tmp_path / "out.db"
    for number, (then, body) in enumerate(versions):
        segment, lsn = map(int, then.epoch.split(":"))
        moment = datetime.fromtimestamp(then.time_ms / 1000, UTC)
        for at in (then.lsn, Epoch(lsn, segment), moment):
            if isinstance(at, datetime) and number < 2 and versions[number + 1][0].time_ms == then.time_ms:
                continue  # of versions within one millisecond, the latest is chosen
            export_file(store.pages, "shop", out, at=at, force=True)
            assert out.read_bytes() == body
        export_file(store.pages, "shop", out, snapshot=f"v{number}", force=True)
        assert out.read_bytes() == body
    export_file(store.pages, "shop", out, force=True)
    assert out.read_bytes() == file.read_bytes()


def test_commits_that_are_not_synced_yet_are_exported(store: Store, tmp_path: Path) -> None:
    """Hazard: with `synchronous` below FULL the commits of the last second, which all connections see, were missing."""
    with closing(store.sqlite("shop", create=True)) as connection:
        connection.execute("pragma synchronous = off; create table t(a); insert into t values (1)")
        export_file(store.pages, "shop", tmp_path / "out.db")
        with closing(apsw.Connection(str(tmp_path / "out.db"))) as exported:
            assert exported.execute("select a from t").get == 1


def test_nothing_is_overwritten_without_force(store: Store, tmp_path: Path) -> None:
    put(store, make(tmp_path / "shop.db"))
    out = tmp_path / "out.db"
    out.write_text("mine")
    with pytest.raises(AlreadyExists, match="already exists"):
        export_file(store.pages, "shop", out)
    assert out.read_text() == "mine"
    Path(f"{out}-wal").write_text("a log")
    with pytest.raises(AlreadyExists, match="log of another database"):
        export_file(store.pages, "shop", out, force=True)
    Path(f"{out}-wal").unlink()
    export_file(store.pages, "shop", out, force=True)
    assert integrity(out) == "ok"


def test_failures_to_export_have_a_reason(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    store.create("raw", "pages")
    with pytest.raises(InvalidInput, match="no SQLite database"):
        export_file(store.pages, "raw", out)
    with store.pages.open("raw").begin() as txn:
        txn.write_page(0, b"a" * 4096)
    with pytest.raises(InvalidInput, match="no SQLite database"):
        export_file(store.pages, "raw", out)
    with pytest.raises(UnknownDatabase):
        export_file(store.pages, "nobody", out)
    put(store, make(tmp_path / "shop.db"))
    with pytest.raises(UnknownSnapshot):
        export_file(store.pages, "shop", out, snapshot="never")
    with pytest.raises(OutOfRange, match="does not exist yet"):
        export_file(store.pages, "shop", out, at=10**9)
    with pytest.raises(InvalidInput, match="does not exist"):
        export_file(store.pages, "shop", tmp_path / "nowhere" / "out.db")
    with pytest.raises(InvalidInput, match="a directory"):
        export_file(store.pages, "shop", tmp_path)
    with pytest.raises(InvalidInput, match="not both"):
        export_file(store.pages, "shop", out, snapshot="a", at=1)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("out")]


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.SHORT_WRITE, Fault.LOST_ANSWER, Fault.POWER_CUT])
def test_a_failed_export_leaves_no_partial_file(store: Store, tmp_path: Path, fault: Fault) -> None:
    """Every call to the disk fails in turn, until a run has no failure."""
    put(store, make(tmp_path / "shop.db", page_size=65536))
    out = tmp_path / "out.db"
    out.write_text("before")
    failed = 0
    for disk in each_fault(OsDisk, fault):
        with suppress(StorageFault, PowerCut):
            export_file(store.pages, "shop", out, force=True, disk=disk)
        failed += disk.fired
        assert out.read_text("latin-1") == "before" or integrity(out) == "ok", f"a partial file after {disk.calls[-1]}"
    assert failed > 5
    assert integrity(out) == "ok"
    assert not Path(f"{out}.tmp").exists(), "the next export replaces the temporary file"


def test_a_file_that_reads_back_differently_is_not_kept(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, make(tmp_path / "shop.db"))
    genuine = exporting._stream
    monkeypatch.setattr(exporting, "_stream", lambda *given: genuine(*given)[::-1])
    with pytest.raises(Corruption, match="does not match the database"):
        export_file(store.pages, "shop", tmp_path / "out.db")
    assert sorted(os.listdir(tmp_path)) == ["shop.db", "store"]


def test_a_check_by_sqlite_detects_damage(store: Store, tmp_path: Path) -> None:
    put(store, make(tmp_path / "shop.db"))
    with store.pages.open("shop").begin() as txn:
        txn.write_page(2, b"\xff" * 4096)
    export_file(store.pages, "shop", tmp_path / "unchecked #1?.db")
    with pytest.raises(Corruption, match="SQLite reports that the exported database is damaged"):
        export_file(store.pages, "shop", tmp_path / "checked #1?.db", check=True)
    assert sorted(os.listdir(tmp_path)) == ["shop.db", "store", "unchecked #1?.db"]
