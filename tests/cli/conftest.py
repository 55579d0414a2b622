"""Running commands in this process, on a store whose manifest is checked when the test ends."""

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
class CommandResult:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., CommandResult]
Damage = Callable[..., None]

GARBAGE = (t.DB, (9,), b"\x01\x00garbage")
"""A row that does not decode and cannot be repaired."""
GHOST = (t.DB_NAMES, ("ghost",), t.DB_NAMES.codec.encode(IndexRecord(77)))
"""A wrong index row, which can be recomputed."""
ORPHAN = (t.WAL_STATE, (99, 0), t.WAL_STATE.codec.encode(WalStateRecord()))
"""A row of a database that does not exist: it cannot be repaired, and hides no other problem."""


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A store with two databases. Its manifest is checked when the test ends."""
    root = tmp_path / "store"
    with quire.open(root) as store:
        store.create("shop", "pages")
        store.create("clicks", "stream")
    yield root
    with quire.open(root) as store:
        assert store.manifest.check() == []


@pytest.fixture
def shop(path: Path) -> Path:
    """The store with pages in shop: snapshot monday of version a, checkpointed; then four pages of version b."""
    with quire.open(path) as store:
        write_pages(store, "shop", range(16), b"a")
        store.checkpoint("shop")
        store.snapshot("shop", "monday", tags={"by": "ann"})
        write_pages(store, "shop", range(4), b"b")
    return path


def write_pages(store: quire.Store, database: str, numbers: range, fill: bytes) -> None:
    """Fill pages in one transaction."""
    opened = store.pages.open(database)
    with opened.begin() as transaction:
        for number in numbers:
            transaction.write_page(number, fill * opened.page_size)


def first_byte(path: Path, database: str) -> bytes:
    """The first byte of page 0 of a database."""
    with quire.open(path) as store, store.pages.open(database).open_snapshot() as reader:
        return reader.read_page(0)[:1]


@pytest.fixture
def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `quire` with arguments, by default on the store at `path`."""
    monkeypatch.delenv("QUIRE_STORE", raising=False)

    def invoke(*arguments: str, answer: str = "", at: Path | str | None = path, **env: str) -> CommandResult:
        store_option = ["--store", str(at)] if at is not None else []
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "stdin", io.StringIO(answer))
            for name, value in env.items():
                patch.setenv(name, value)
            code = main.run([*arguments, *store_option])
        return CommandResult(code, out.getvalue(), err.getvalue())

    return invoke


@pytest.fixture
def damage(path: Path) -> Iterator[Damage]:
    """Writes invalid rows into the manifest at `path`; the original is restored when the test ends."""
    whole = (path / "manifest.lmdb").read_bytes()

    def write_rows(*rows: tuple[t.Table[Any], tuple[Any, ...], bytes]) -> None:
        with quire.open(path) as store:
            env = store.manifest.env
            txn = env.begin_write()
            for table, key, body in rows:
                txn.put(table.key.pack(*key), body, db=env.handles[table.name])
            txn.commit()
        (
            path / names.MANIFEST_CHECKED
        ).unlink()  # a clean close recorded the manifest as valid: without the record, the next open checks everything

    yield write_rows
    (path / "manifest.lmdb").write_bytes(whole)


def quire_program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m quire` in a separate process."""
    env = {**os.environ, "PYTHONPATH": str(SRC), **options.pop("env", {})}
    return run_program(["-m", "quire", *arguments], capture_output=True, env=env, **options)


def on_a_terminal(*arguments: str) -> list[str]:
    """The lines that `quire` shows on a terminal of 80 columns, without colours."""
    terminal_fd, program_fd = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "80", "NO_COLOR": "1", "TERM": "xterm"}
    process = Program(["-m", "quire", *arguments], stdout=program_fd, stderr=program_fd, env=env)
    os.close(program_fd)
    shown = b""
    try:
        while part := os.read(terminal_fd, 4096):
            shown += part
    except OSError:
        pass  # how a terminal reports that its other end was closed
    process.wait(60)
    os.close(terminal_fd)
    return shown.decode().replace("\r", "").splitlines()
