"""Running commands in this process, on a store that is held to its rules when the test ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import quire
from quire.cli.main import app
from tests.house.tree import SRC


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command left: its exit code, what it said, and what went wrong inside."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ended]


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
def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `quire` with arguments, by default on the store at `path`."""
    monkeypatch.delenv("QUIRE_STORE", raising=False)

    def invoke(*arguments: str, answer: str = "", at: Path | str | None = path, **env: str) -> Ended:
        where = ["--store", str(at)] if at is not None else []
        ended = CliRunner().invoke(app, [*arguments, *where], input=answer, env=env)
        if ended.exception is not None and not isinstance(ended.exception, SystemExit):
            raise ended.exception
        return Ended(ended.exit_code, ended.stdout, ended.stderr)

    return invoke


def quire_program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m quire` as a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(SRC), **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "quire", *arguments], capture_output=True, text=True, timeout=60, env=env, **options
    )
