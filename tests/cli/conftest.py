"""Running commands in this process, on a store that is held to its rules when the test ends."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli import main
from quire.durable import names
from quire.manifest import tables as t
from quire.manifest.records import IndexRecord, WalStateRecord
from tests.programs import Program, run_program
from tests.rules.tree import SRC


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command left: its exit code and what it said."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ended]
Plant = Callable[..., None]

GARBAGE = (t.DB, (9,), b"\x01\x00garbage")
"""A row that does not decode: nothing can mend it."""
GHOST = (t.DB_NAMES, ("ghost",), t.DB_NAMES.codec.encode(IndexRecord(77)))
"""An index row that lies: it can be recomputed."""
ORPHAN = (t.WAL_STATE, (99, 0), t.WAL_STATE.codec.encode(WalStateRecord()))
"""A row of a database that does not exist: nothing can mend it, and it hides no other problem."""


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A store with two databases; sound when the test ends."""
    root = tmp_path / "store"
    with quire.open(root) as store:
        store.create("shop", "pages")
        store.create("clicks", "stream")
    yield root
    with quire.open(root) as store:
        assert store.manifest.check() == []


@pytest.fixture
def shop(path: Path) -> Path:
    """The store, with pages in shop: snapshot monday of version a, checkpointed; then four pages of version b."""
    with quire.open(path) as store:
        write_pages(store, "shop", range(16), b"a")
        store.checkpoint("shop")
        store.snapshot("shop", "monday", tags={"by": "ann"})
        write_pages(store, "shop", range(4), b"b")
    return path


def write_pages(store: quire.Store, database: str, numbers: range, fill: bytes) -> None:
    """One transaction that fills pages."""
    opened = store.pages.open(database)
    with opened.begin() as transaction:
        for number in numbers:
            transaction.write_page(number, fill * opened.page_size)


def first_byte(path: Path, database: str) -> bytes:
    """What page 0 of a database begins with."""
    with quire.open(path) as store, store.pages.open(database).open_snapshot() as reader:
        return reader.read_page(0)[:1]


@pytest.fixture
def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `quire` with arguments, by default on the store at `path`."""
    monkeypatch.delenv("QUIRE_STORE", raising=False)

    def invoke(*arguments: str, answer: str = "", at: Path | str | None = path, **env: str) -> Ended:
        where = ["--store", str(at)] if at is not None else []
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "stdin", io.StringIO(answer))
            for name, value in env.items():
                patch.setenv(name, value)
            code = main.run([*arguments, *where])
        return Ended(code, out.getvalue(), err.getvalue())

    return invoke


@pytest.fixture
def damage(path: Path) -> Iterator[Plant]:
    """Break rules of the manifest at `path`, by hand; what was there is put back when the test ends."""
    whole = (path / "manifest.lmdb").read_bytes()

    def plant(*rows: tuple[t.Table[Any], tuple[Any, ...], bytes]) -> None:
        with quire.open(path) as store:
            env = store.manifest.env
            txn = env.begin_write()
            for table, key, body in rows:
                txn.put(table.key.pack(*key), body, db=env.handles[table.name])
            txn.commit()
        (path / names.MANIFEST_CHECKED).unlink()  # closed well, it was remembered as sound: the next open checks all

    yield plant
    (path / "manifest.lmdb").write_bytes(whole)


def quire_program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m quire` as a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(SRC), **options.pop("env", {})}
    return run_program(["-m", "quire", *arguments], capture_output=True, env=env, **options)


def on_a_terminal(*arguments: str) -> list[str]:
    """The lines that `quire` shows on a terminal of 80 columns, without colours."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "80", "NO_COLOR": "1", "TERM": "xterm"}
    process = Program(["-m", "quire", *arguments], stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:
        pass  # how a terminal says that nobody is at its other end any more
    process.wait(60)
    os.close(ours)
    return shown.decode().replace("\r", "").splitlines()
