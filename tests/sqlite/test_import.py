"""Import: the database has exactly what SQLite reads; a file that is not a complete SQLite database is refused with a
reason.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import apsw
import pytest

import quire
from quire.core.errors import ConfigMismatch, Corruption, InvalidInput, NotFound, Unavailable, WrongKind
from quire.durable.failpoints import armed
from quire.sqlite import dbfile, importing
from quire.sqlite.dbfile import open_source
from quire.sqlite.importing import Imported, import_file
from quire.store.store import Store
from tests.sqlite.sqlite_files import append_commit, as_sqlite_reads, copy_of, fill, make, program, read_line, writing

DYING = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size=5")
connection.execute("BEGIN")
connection.execute("UPDATE item SET name = 'half', picture = randomblob(3000)")
print("dirty", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

LOCKING = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
input()
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store") as store:
        yield store
        assert store.manifest.check() == []


def import_path(store: Store, path: Path, name: str = "", *, lock: bool = True) -> Imported:
    return import_file(store.manifest, store.pages, path, name, lock=lock)


def content(store: Store, name: str) -> bytes:
    """All pages of a database."""
    with store.pages.open(name).open_snapshot() as reader:
        return b"".join(image for _, image in reader.scan())


@pytest.mark.parametrize("page_size", [512, 1024, 4096, 65536])
@pytest.mark.parametrize("wal", [False, True], ids=["rollback", "wal"])
def test_a_closed_file_is_imported_byte_for_byte(store: Store, tmp_path: Path, page_size: int, wal: bool) -> None:
    file = make(tmp_path / "shop.db", page_size=page_size, wal=wal)
    imported = import_path(store, file)
    assert content(store, "shop") == file.read_bytes(), "including header bytes 18 and 19 (Q3)"
    assert (imported.name, imported.created, imported.page_size, imported.note) == ("shop", True, page_size, "")
    assert imported.changed_pages == imported.size_pages == file.stat().st_size // page_size
    assert sorted(os.listdir(tmp_path)) == ["shop.db", "store"], "no file is left beside it"


def test_the_log_of_an_open_database_is_imported(store: Store, tmp_path: Path) -> None:
    with writing(tmp_path / "shop.db", page_size=1024) as connection:
        fill(connection, 50)
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        fill(connection, 20, seed=2)
        connection.execute("BEGIN; DELETE FROM item")  # spilled into the log but not committed
        imported = import_path(store, tmp_path / "shop.db")
        connection.execute("ROLLBACK")
        assert content(store, "shop") == as_sqlite_reads(copy_of(tmp_path / "shop.db", tmp_path / "copy"))
    assert imported.wal_frames > 0


def test_a_commit_that_sqlite_does_not_count_is_ignored(store: Store, tmp_path: Path) -> None:
    """It is in the log, but its writer died before it counted: the next writer overwrites it."""
    with writing(tmp_path / "shop.db") as connection:
        fill(connection, 10)
        expected = as_sqlite_reads(copy_of(tmp_path / "shop.db", tmp_path / "copy"))
        append_commit(tmp_path / "shop.db", b"\xee" * 512)
        import_path(store, tmp_path / "shop.db")
        assert content(store, "shop") == expected


def test_a_log_that_was_checkpointed_is_not_needed(store: Store, tmp_path: Path) -> None:
    with writing(tmp_path / "shop.db") as connection:
        fill(connection, 30)
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        imported = import_path(store, tmp_path / "shop.db")
        assert content(store, "shop") == as_sqlite_reads(copy_of(tmp_path / "shop.db", tmp_path / "copy"))
    assert (imported.wal_frames, imported.note) == (0, "")


def test_without_a_lock_the_log_is_read_up_to_its_last_commit(store: Store, tmp_path: Path) -> None:
    with writing(tmp_path / "shop.db") as connection:
        fill(connection, 30)
        copied = copy_of(tmp_path / "shop.db", tmp_path / "copy")
    expected = as_sqlite_reads(copy_of(copied, tmp_path / "again"))
    imported = import_path(store, copied, lock=False)
    assert content(store, "shop") == expected
    assert imported.wal_frames > 0
    assert sorted(os.listdir(copied.parent)) == ["shop.db", "shop.db-wal"], "no file was created beside it"


def test_a_new_version_has_only_the_pages_that_differ(store: Store, tmp_path: Path) -> None:
    file = make(tmp_path / "shop.db", rows=400)
    first = import_path(store, file)
    store.snapshot("shop", "first")
    before = content(store, "shop")
    with closing(apsw.Connection(str(file))) as connection:
        connection.execute("UPDATE item SET name = 'changed' WHERE id = 7")
    second = import_path(store, file)
    assert not second.created
    assert 0 < second.changed_pages < 12 < first.changed_pages
    assert content(store, "shop") == file.read_bytes()
    with store.pages.open_view("shop", "first") as reader:
        assert b"".join(image for _, image in reader.scan()) == before
    again = import_path(store, file)
    assert (again.changed_pages, again.lsn) == (0, second.lsn), "no difference, no new version"


def test_a_file_that_shrank_becomes_a_smaller_version(store: Store, tmp_path: Path) -> None:
    file = make(tmp_path / "shop.db")
    first = import_path(store, file)
    with closing(apsw.Connection(str(file))) as connection:
        connection.execute("DELETE FROM item; VACUUM")
    second = import_path(store, file)
    assert second.size_pages < first.size_pages
    assert content(store, "shop") == file.read_bytes()


def test_a_program_may_write_while_its_file_is_imported(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two steps there are transactions, checkpoints and restarts of the log: the import has one consistent
    version.
    """
    monkeypatch.setattr(importing, "STEP_BYTES", 4 * 512)
    with writing(tmp_path / "shop.db") as connection:
        connection.execute("CREATE TABLE pair (a, b, fill)")
        connection.execute("INSERT INTO pair VALUES (0, 0, 0)")
        fill(connection, 20)
        number = 0

        def write_concurrently(*_: object) -> None:
            nonlocal number
            number += 1
            with connection:
                connection.execute("UPDATE pair SET a = ?", (number,))
                connection.execute("UPDATE item SET picture = randomblob(1500) WHERE id % 5 = ?", (number % 5,))
                connection.execute("UPDATE pair SET b = ?", (number,))
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

        write_concurrently()
        import_file(store.manifest, store.pages, tmp_path / "shop.db", progress=write_concurrently)
        assert number > 20
    imported_file = tmp_path / "found.db"
    imported_file.write_bytes(content(store, "shop"))
    with closing(apsw.Connection(f"file:{imported_file}?immutable=1", flags=0x1 | apsw.SQLITE_OPEN_URI)) as copy:
        assert copy.pragma("integrity_check") == "ok"
        assert copy.execute("SELECT a = b FROM pair").fetchall() == [(1,)]


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def assert_no_database_is_left(store: Store) -> None:
    assert store.databases() == []


@pytest.mark.parametrize(
    "body", [os.urandom(8192), b"SQLite format 2\x00" * 40, b"short"], ids=["encrypted", "older", "short"]
)
def test_a_file_that_is_not_an_sqlite_database_is_refused(store: Store, tmp_path: Path, body: bytes) -> None:
    (tmp_path / "odd.db").write_bytes(body)
    with pytest.raises(InvalidInput, match=r"does not start like a SQLite database.*encrypted"):
        import_path(store, tmp_path / "odd.db")
    assert_no_database_is_left(store)


def test_an_empty_or_missing_file_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    with pytest.raises(InvalidInput, match="the file is empty"):
        import_path(store, tmp_path / "empty.db")
    with pytest.raises(NotFound, match="does not exist"):
        import_path(store, tmp_path / "missing.db")
    assert_no_database_is_left(store)


@pytest.mark.parametrize("cut", [1, 4096, 10_000])
def test_a_truncated_file_is_refused(store: Store, tmp_path: Path, cut: int) -> None:
    file = make(tmp_path / "shop.db")
    os.truncate(file, file.stat().st_size - cut)
    for lock in (True, False):
        with pytest.raises(Corruption, match="truncated: it is shorter than its header states"):
            import_path(store, file, lock=lock)
    assert_no_database_is_left(store)


def test_a_truncated_file_under_a_log_is_refused(store: Store, tmp_path: Path) -> None:
    with writing(tmp_path / "shop.db", page_size=4096) as connection:
        fill(connection, 100)
        connection.execute("PRAGMA wal_checkpoint(RESTART)")
        connection.execute("UPDATE item SET name = 'late' WHERE id = 3")
        copied = copy_of(tmp_path / "shop.db", tmp_path / "copy")
    os.truncate(copied, copied.stat().st_size - 8192)
    with pytest.raises(Corruption, match="truncated: a page is missing"):
        import_path(store, copied)
    assert_no_database_is_left(store)


def test_a_hot_journal_must_be_rolled_back_by_sqlite(store: Store, tmp_path: Path) -> None:
    file = make(tmp_path / "shop.db")
    with program(DYING, str(file)) as process:
        assert read_line(process) == "dirty"
        assert process.wait(120) == -signal.SIGKILL
    assert Path(f"{file}-journal").stat().st_size > 512
    for lock in (True, False):
        with pytest.raises(Unavailable, match=r"needs recovery.*open it once with SQLite"):
            import_path(store, file, lock=lock)
    assert_no_database_is_left(store)
    as_sqlite_reads(file)
    import_path(store, file)
    assert content(store, "shop") == file.read_bytes()


def test_a_locked_file_is_reported(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dbfile, "BUSY_MS", 50)
    file = make(tmp_path / "shop.db")
    with program(LOCKING, str(file)) as process:
        assert read_line(process) == "locked"
        with pytest.raises(Unavailable, match="cannot be locked for reading now"):
            import_path(store, file)
        process.communicate("\n", 20)
    import_path(store, file)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (apsw.SQLITE_READONLY_ROLLBACK, "needs recovery"),
        (apsw.SQLITE_READONLY_RECOVERY, "needs recovery"),
        (apsw.SQLITE_READONLY_CANTINIT, "--no-lock"),
        (apsw.SQLITE_CANTOPEN, "--no-lock"),
        (apsw.SQLITE_BUSY_RECOVERY, "cannot be locked for reading now"),
        (apsw.SQLITE_NOTADB, "may be encrypted"),
        (apsw.SQLITE_CORRUPT, "reports that the database is damaged"),
        (apsw.SQLITE_IOERR_READ, "cannot read the database"),
    ],
)
def test_errors_of_sqlite_are_translated(code: int, expected: str) -> None:
    assert expected in str(dbfile._translated(cast(apsw.Error, apsw.exception_for(code)), "shop.db"))


def test_a_log_with_wrong_salts_is_ignored_with_a_note(store: Store, tmp_path: Path) -> None:
    with writing(tmp_path / "shop.db") as connection:
        fill(connection, 10)
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        connection.execute("UPDATE item SET name = 'lost'")
        wal = bytearray(Path(f"{tmp_path}/shop.db-wal").read_bytes())
        wal[32 + 8] ^= 1  # the first frame's salts
        copied = copy_of(tmp_path / "shop.db", tmp_path / "copy", bytes(wal))
    expected = copied.read_bytes()
    for lock in (False, True):
        imported = import_path(store, copied, lock=lock)
        assert content(store, "shop") == expected
        assert lock or "holds no committed transaction with its own salts" in imported.note


def test_an_invalid_log_is_ignored_with_a_note(store: Store, tmp_path: Path) -> None:
    file = make(tmp_path / "shop.db", wal=True)
    Path(f"{file}-wal").write_bytes(b"something else" * 20)
    imported = import_path(store, file)
    assert imported.note == "the -wal file was not used: it does not start like a write-ahead log"
    assert content(store, "shop") == file.read_bytes()


def test_another_page_size_needs_another_name(store: Store, tmp_path: Path) -> None:
    import_path(store, make(tmp_path / "small.db", page_size=1024), "shop")
    with pytest.raises(ConfigMismatch, match="page size of the file differs"):
        import_path(store, make(tmp_path / "large.db", page_size=4096), "shop")


def test_only_page_databases_accept_imports(store: Store, tmp_path: Path) -> None:
    store.create("clicks", "stream")
    with pytest.raises(WrongKind):
        import_path(store, make(tmp_path / "shop.db"), "clicks")


def test_an_import_that_fails_leaves_no_database(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make(tmp_path / "shop.db")
    with armed("pages.segment.frames", "raise:ENOSPC"), pytest.raises(quire.QuireError):
        import_path(store, file)
    assert_no_database_is_left(store)
    monkeypatch.setattr(importing, "hash_of", lambda *_: "another")
    with pytest.raises(Corruption, match="does not match the file"):
        import_path(store, file)
    assert_no_database_is_left(store)


def test_pages_beyond_the_file_that_only_the_log_knows_are_zeros(tmp_path: Path) -> None:
    """A transaction may grow the database and never write pages that it freed again: SQLite reads zeros there."""
    with writing(tmp_path / "shop.db") as connection:
        connection.execute("BEGIN; CREATE TABLE t (x); INSERT INTO t VALUES (randomblob(90000)); DELETE FROM t; COMMIT")
        with open_source(str(tmp_path / "shop.db")) as source:
            assert source.map is not None
            images = source.read(0, source.size_pages)
        assert b"".join(images.values()) == as_sqlite_reads(copy_of(tmp_path / "shop.db", tmp_path / "copy"))
