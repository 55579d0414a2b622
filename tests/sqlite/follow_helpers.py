"""Programs that write a SQLite file while it is followed: child processes that use the standard library's sqlite3."""

from __future__ import annotations

import subprocess
from pathlib import Path

from quire.sqlite.follow import Follower
from quire.store.store import Store
from tests.sqlite.sqlite_files import as_sqlite_reads, copy_of, program, read_line, send_line

SQL_PROGRAM = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA synchronous=off")
print("ready", flush=True)
for line in sys.stdin:
    try:
        for statement in line.split(";"):
            connection.execute(statement).fetchall()
        print("ok", flush=True)
    except sqlite3.Error as error:
        print(error, flush=True)
"""
"""Runs the statements of each line."""


class SqlProgram:
    """A child process that runs SQL on request; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process: subprocess.Popen[str] = program(SQL_PROGRAM, str(path))
        assert read_line(self.process) == "ready"

    def run_sql(self, *statements: str) -> None:
        for statement in statements:
            assert send_line(self.process, statement) == "ok"

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        """End the program cleanly: it closes its connection."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.communicate(timeout=120)

    def __enter__(self) -> SqlProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def follower(store: Store, path: Path, name: str = "copy") -> Follower:
    return Follower(manifest=store.manifest, pages=store.pages, root=store.path, path=path, name=name)


def content(store: Store, name: str = "copy") -> bytes:
    with store.pages.open(name).open_snapshot() as reader:
        return b"".join(image for _, image in reader.scan())


def sqlite_content(path: Path) -> bytes:
    """The content of the file as SQLite reads it. No program may be writing."""
    folder = path.parent / "truth"
    return as_sqlite_reads(copy_of(path, folder))
