"""A store per test, whose manifest is checked when the test ends, and programs that run in separate processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import quire
from quire.store.store import Store
from tests.programs import Program
from tests.rules.tree import SRC

Script = Callable[[str, str], subprocess.Popen[str]]


def assert_sound(path: Path | str) -> None:
    """The store opens as owner (which checks it) and as reader, and breaks no rule."""
    with quire.open(path) as store:
        assert store.manifest.check() == []
    with quire.open(path, "r") as store:
        assert store.manifest.check() == []


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The path of a test's store. When the test ends, the store is valid or absent."""
    root = tmp_path / "store"
    yield root
    if (root / "manifest.lmdb").exists():
        assert_sound(root)


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with quire.open(path) as opened:
        yield opened


@pytest.fixture
def script() -> Iterator[Script]:
    """Start a Python program with one argument; its stdin and stdout are pipes. All programs are killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(text: str, argument: str) -> subprocess.Popen[str]:
        process = Program(
            ["-c", text, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    """The next line of a program's output."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
