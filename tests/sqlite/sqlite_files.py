"""Ordinary SQLite database files for tests of import, export and follow, created by SQLite itself."""

from __future__ import annotations

import os
import random
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import apsw

from quire.sqlite.walfile import FRAME_HEAD_BYTES, HEADER_BYTES, WalHeader, checksum_of, newest_pages, parse_header


def fill(connection: apsw.Connection, rows: int = 200, seed: int = 1) -> None:
    """Create and fill tables of every kind: rows, blobs with overflow pages, WITHOUT ROWID, an index, FTS5."""
    rng = random.Random(seed)
    connection.execute(
        """
        CREATE TABLE IF NOT EXISTS item (id INTEGER PRIMARY KEY, name TEXT, picture BLOB);
        CREATE INDEX IF NOT EXISTS item_name ON item (name);
        CREATE TABLE IF NOT EXISTS price (shop TEXT, item INTEGER, cents INTEGER, PRIMARY KEY (shop, item)) WITHOUT ROWID;
        CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (body);
        """
    )
    for number in range(rows):
        picture = rng.randbytes(rng.choice((0, 40, 900, 9_000)))
        connection.execute("INSERT INTO item (name, picture) VALUES (?, ?)", (f"item {rng.random()}", picture))
        connection.execute("INSERT OR REPLACE INTO price VALUES (?, ?, ?)", (f"shop {number % 7}", number, seed))
        connection.execute("INSERT INTO words VALUES (?)", (" ".join(f"w{rng.randrange(500)}" for _ in range(9)),))


def make(path: Path, *, page_size: int = 4096, wal: bool = False, auto_vacuum: int = 0, rows: int = 200) -> Path:
    """Create a database and close it: there is no log beside it."""
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute(f"PRAGMA page_size={page_size}; PRAGMA auto_vacuum={auto_vacuum}")
        connection.execute(f"PRAGMA journal_mode={'wal' if wal else 'delete'}")
        with connection:
            fill(connection, rows)
    return path


@contextmanager
def writing(path: Path, *, page_size: int = 512) -> Iterator[apsw.Connection]:
    """A database in WAL mode that stays open and keeps its whole log."""
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute(f"PRAGMA page_size={page_size}; PRAGMA synchronous=off; PRAGMA cache_size=-200")
        connection.pragma("journal_mode", "wal")
        connection.pragma("wal_autocheckpoint", 0)
        yield connection


def copy_of(path: Path, folder: Path, wal: bytes | None = None) -> Path:
    """A copy of a database with this log, or with its own, that no process has open."""
    folder.mkdir(exist_ok=True)
    target = folder / path.name
    target.write_bytes(path.read_bytes())
    log = Path(f"{path}-wal").read_bytes() if wal is None and os.path.exists(f"{path}-wal") else wal
    for ending in ("-wal", "-shm", "-journal"):
        Path(f"{target}{ending}").unlink(missing_ok=True)
    if log is not None:
        Path(f"{target}-wal").write_bytes(log)
    return target


def as_sqlite_reads(path: Path) -> bytes:
    """The content of a database as SQLite reads it, including its log: the reference."""
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        return connection.serialize("main")


def dump(path: Path | str) -> list[str]:
    """The output of `.dump` for a database."""
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as connection:
        connection.execute("PRAGMA writable_schema=1")  # otherwise FTS5's own tables are refused
        return list(connection.iterdump())


def integrity(path: Path | str) -> str:
    with closing(
        apsw.Connection(f"file:{path}?immutable=1", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    ) as connection:
        return str(connection.pragma("integrity_check"))


def in_big_endian(wal: bytes, page_size: int) -> bytes:
    """A log as a big-endian machine writes it: only the checksums differ."""
    data = bytearray(wal)
    struct.pack_into(">I", data, 0, 0x377F0683)
    running = checksum_of(bytes(data[:24]), big_endian=True)
    struct.pack_into(">II", data, 24, *running)
    salts = bytes(data[16:24])
    for offset in range(HEADER_BYTES, len(data) - page_size - FRAME_HEAD_BYTES + 1, FRAME_HEAD_BYTES + page_size):
        if data[offset + 8 : offset + 16] != salts:
            break
        body = bytes(
            data[offset : offset + 8] + data[offset + FRAME_HEAD_BYTES : offset + FRAME_HEAD_BYTES + page_size]
        )
        running = checksum_of(body, big_endian=True, start=running)
        struct.pack_into(">II", data, offset + 16, *running)
    return bytes(data)


def append_commit(path: Path, image: bytes) -> None:
    """Append a transaction of page 1 to the log of an open database without updating the shared memory: SQLite does not
    count it.
    """
    log = Path(f"{path}-wal")
    data = log.read_bytes()
    header = parse_header(data)
    assert isinstance(header, WalHeader)
    known = newest_pages(lambda size, at: data[at : at + size], header)
    head = struct.pack(">II", 1, known.size_pages)
    checksum = checksum_of(head + image, big_endian=header.big_endian, start=known.end.checksum)
    with log.open("r+b") as file:
        file.seek(header.offset(known.end.frame + 1))
        file.write(head + header.salts + struct.pack(">II", *checksum) + image)


def program(text: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program that uses the standard library's sqlite3, with pipes as stdin and stdout."""
    return subprocess.Popen(
        [sys.executable, "-c", text, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line of a program's output."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def send_line(process: subprocess.Popen[str], line: str) -> str:
    """Send a line to a program, and return its answer."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return read_line(process)
