"""An owner that is killed while it applies a batch of a streaming query: the batch is applied once, by the process that
repeats it."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

import quire
from quire.service.tickets import QUERY_KEYS
from tests.programs import run_program
from tests.rules.tree import ROOT
from tests.service.killed_batches import QUIET


def run(path: Path, kind: str, *batches: int, failpoints: str = "") -> int:
    environment = {**os.environ, "QUIRE_FAILPOINTS": failpoints}
    command = ["-m", "tests.service.killed_batches", str(path), kind, *map(str, batches)]
    result = run_program(command, env=environment, cwd=ROOT, timeout=120, capture_output=True)
    assert result.returncode in (0, -signal.SIGKILL), result.stderr
    return result.returncode


def names_of(path: Path, kind: str) -> list[str]:
    with quire.open(path, settings=QUIET) as store:
        assert store.manifest.check() == []
        if kind == "sqlite":
            with closing(store.sqlite("sqlite")) as connection:
                return [name for (name,) in connection.execute("SELECT name FROM t ORDER BY rowid")]
        if kind == "kv":
            return [key.decode() for key, _ in store.kv("kv").scan() if not key.startswith(QUERY_KEYS)]
        return [record.payload.decode() for record in store.stream("stream").read()]


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        ("sqlite", "sqlite.load.written"),
        ("sqlite", "load.taken"),
        ("kv", "kv.batch.gathered"),
        ("kv", "load.taken"),
        ("stream", "stream.batch.announced"),
        ("stream", "stream.batch.appended"),
        ("stream", "load.taken"),
    ],
)
@pytest.mark.slow
def test_a_batch_is_applied_once_although_its_owner_is_killed(tmp_path: Path, kind: str, point: str) -> None:
    path = tmp_path / "store"
    with quire.open(path, settings=QUIET):
        pass
    assert run(path, kind, 0, 1, failpoints=f"{point}=1*off->kill") == -signal.SIGKILL
    assert run(path, kind, 1, 2, 0) == 0
    assert names_of(path, kind) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]


def test_a_batch_whose_record_was_not_written_is_found_by_its_key(tmp_path: Path) -> None:
    """The hardest case: the records are present, and `stream.json` says only that they are about to be written."""
    path = tmp_path / "store"
    with quire.open(path, settings=QUIET):
        pass
    assert run(path, "stream", 0, failpoints="stream.batch.appended=kill") == -signal.SIGKILL
    with quire.open(path, settings=QUIET) as store:
        assert store.stream("stream").has_batch("a-query", 0)
        assert not store.stream("stream").append_batch([b"again"], query="a-query", batch=0)
    assert names_of(path, "stream") == ["0-0", "0-1"]
