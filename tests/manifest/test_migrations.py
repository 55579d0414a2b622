"""The migration ledger: steps run in order, once, completely or not at all, and a newer ledger is rejected."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from quire.core.errors import FormatTooNew, StorageFault
from quire.core.settings import ManifestSettings
from quire.durable.failpoints import VARIABLE, armed, hit
from quire.manifest import tables as t
from quire.manifest.env import ManifestEnv
from quire.manifest.migrations import BASE_SCHEMA, SCHEMA, STORE_ID, Step, migrate
from quire.manifest.reads import ReadTxn
from quire.manifest.records import MetaRecord, MigrationRecord
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from tests.manifest.helpers import register
from tests.programs import run_program

COUNT = t.META.key.pack("count")
POINTS = ("manifest.migration.ran", "manifest.migration.recorded", "manifest.migration.durable")


def count_up(env: ManifestEnv, txn: lmdb.Transaction) -> None:
    """A step that must not run twice: it counts its runs."""
    raw = txn.get(COUNT, db=env.handles["meta"])
    number = t.META.rows.decode(COUNT, bytes(raw)).number if raw is not None else 0
    txn.put(COUNT, t.META.rows.encode(COUNT, MetaRecord(number=number + 1)), db=env.handles["meta"])


STEPS = [Step("001-first", count_up), Step("002-second", count_up), Step("003-third", count_up)]


@contextmanager
def environment(path: str) -> Iterator[ManifestEnv]:
    env = ManifestEnv(path, ManifestSettings(), write=True)
    try:
        yield env
    finally:
        env.close()


def state(env: ManifestEnv) -> tuple[int, int, list[str]]:
    """(runs, schema, ledger)."""
    with ReadTxn(env) as txn:
        count, schema = txn.get(t.META, "count"), txn.get(t.META, "schema")
        ledger = [name for (name,), _ in txn.scan(t.MIGRATIONS)]
        return count.number if count else 0, schema.number if schema else 0, ledger


def test_a_new_store_has_every_step_recorded(path: str) -> None:
    with environment(path) as env:
        assert migrate(env, ManualClock(), STEPS) == []
        assert state(env) == (0, BASE_SCHEMA + 3, [step.name for step in STEPS])


def test_steps_run_in_order_and_once(path: str) -> None:
    with environment(path) as env:
        migrate(env, ManualClock(), [])
        assert migrate(env, ManualClock(), STEPS[:1]) == ["001-first"]
        assert migrate(env, ManualClock(), STEPS) == ["002-second", "003-third"]
        assert migrate(env, ManualClock(), STEPS) == []
        assert state(env) == (3, BASE_SCHEMA + 3, [step.name for step in STEPS])


@pytest.mark.parametrize("point", POINTS)
def test_a_step_that_fails_leaves_nothing_and_can_be_repeated(path: str, point: str) -> None:
    with environment(path) as env:
        migrate(env, ManualClock(), [])
        with armed(point, "1*off->raise:EIO"), pytest.raises((OSError, StorageFault)):
            migrate(env, ManualClock(), STEPS)
        counted, schema, ledger = state(env)
        assert counted == len(ledger) == schema - BASE_SCHEMA, "a step and its ledger row are one transaction"
        migrate(env, ManualClock(), STEPS)
        assert state(env)[0] == 3


CHILD = """
import sys
from quire.testing.clock import ManualClock
from quire.manifest.migrations import migrate
from tests.manifest.test_migrations import STEPS, environment
with environment(sys.argv[1]) as env:
    migrate(env, ManualClock(), STEPS)
"""


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("completed", [0, 1])
def test_a_migration_that_is_killed_is_completed_by_the_next_open(path: str, point: str, completed: int) -> None:
    with environment(path) as env:
        migrate(env, ManualClock(), [])
    variables = {**os.environ, VARIABLE: f"{point}={completed}*off->kill", "PYTHONPATH": os.pathsep.join(sys.path)}
    child = run_program(["-c", CHILD, path], env=variables, capture_output=True, timeout=60)
    assert child.returncode == -signal.SIGKILL, child.stderr
    with environment(path) as env:
        counted, schema, ledger = state(env)
        assert counted == len(ledger) == schema - BASE_SCHEMA
        assert counted == completed + point.endswith("durable")
        migrate(env, ManualClock(), STEPS)
        assert state(env) == (3, BASE_SCHEMA + 3, [step.name for step in STEPS])


# ── steps of several transactions ─────────────────────────────────────────────────────────────────────────────────────
BETWEEN = ("test.migration.first", "test.migration.second", "manifest.migration.prepared", *POINTS)
MARKS = {name: t.META.key.pack(name) for name in ("mark-1", "mark-2", "mark-3")}


def mark(env: ManifestEnv, txn: lmdb.Transaction, name: str) -> None:
    txn.put(MARKS[name], t.META.codec.encode(MetaRecord(text=name)), db=env.handles["meta"])


def prepare(env: ManifestEnv) -> None:
    """Two separate transactions; repeating them changes nothing."""
    for name, point in (("mark-1", "test.migration.first"), ("mark-2", "test.migration.second")):
        with env.begin_write() as txn:
            mark(env, txn, name)
        hit(point)


def last(env: ManifestEnv, txn: lmdb.Transaction) -> None:
    """The third transaction is that of the ledger."""
    assert all(txn.get(MARKS[name], db=env.handles["meta"]) is not None for name in ("mark-1", "mark-2"))
    mark(env, txn, "mark-3")
    count_up(env, txn)


LONG = [STEPS[0], Step("002-long", last, prepare), STEPS[2]]


def marks(env: ManifestEnv) -> list[str]:
    with ReadTxn(env) as txn:
        return [name for name in MARKS if txn.get(t.META, name) is not None]


def assert_the_step_is_complete_or_resumable(env: ManifestEnv) -> None:
    counted, schema, ledger = state(env)
    assert counted == len(ledger) == schema - BASE_SCHEMA, "the ledger row is in the last transaction"
    assert ("mark-3" in marks(env)) == ("002-long" in ledger)
    migrate(env, ManualClock(), LONG)
    assert marks(env) == list(MARKS)
    assert state(env) == (3, BASE_SCHEMA + 3, [step.name for step in LONG])
    assert migrate(env, ManualClock(), LONG) == []


def test_a_step_may_use_several_transactions(path: str) -> None:
    """Hazard: a step was called with the write transaction already open, and could not begin its own."""
    with environment(path) as env:
        migrate(env, ManualClock(), [])
        assert migrate(env, ManualClock(), LONG) == [step.name for step in LONG]
        assert marks(env) == list(MARKS)
        assert_the_step_is_complete_or_resumable(env)


@pytest.mark.parametrize("point", BETWEEN)
def test_a_step_that_fails_between_two_transactions_is_resumed(path: str, point: str) -> None:
    with environment(path) as env:
        migrate(env, ManualClock(), [])
        with (
            armed(point, "raise:EIO" if point not in POINTS else "1*off->raise:EIO"),
            pytest.raises(OSError, match=point),
        ):
            migrate(env, ManualClock(), LONG)
        assert state(env)[2][0] == "001-first"
        assert_the_step_is_complete_or_resumable(env)


@pytest.mark.parametrize("point", BETWEEN)
def test_a_step_that_is_killed_between_two_transactions_is_resumed(path: str, point: str) -> None:
    with environment(path) as env:
        migrate(env, ManualClock(), [])
    script = f"{point}=kill" if point not in POINTS else f"{point}=1*off->kill"
    variables = {**os.environ, VARIABLE: script, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = CHILD.replace("STEPS", "LONG")
    child = run_program(["-c", code, path], env=variables, capture_output=True, timeout=60)
    assert child.returncode == -signal.SIGKILL, child.stderr
    with environment(path) as env:
        assert_the_step_is_complete_or_resumable(env)


# ── newer stores ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("mode", ["rw", "r"])
@pytest.mark.parametrize("newer", ["schema", "step"])
def test_a_store_written_by_a_newer_quire_is_rejected_and_unchanged(path: str, mode: str, newer: str) -> None:
    with ManifestStore.open(path) as manifest:
        manifest.submit([register(1)]).result()
    with environment(path) as env, env.begin_write() as txn:
        if newer == "schema":
            txn.put(SCHEMA, t.META.codec.encode(MetaRecord(number=999)), db=env.handles["meta"])
        else:
            row = t.MIGRATIONS.codec.encode(MigrationRecord(1, "9.9"))
            txn.put(t.MIGRATIONS.key.pack("999-future"), row, db=env.handles["migrations"])
    before = Path(path).read_bytes()
    with pytest.raises(FormatTooNew, match="newer quire") as caught:
        ManifestStore.open(path, mode=mode)
    assert "upgrade" in caught.value.hint
    if mode == "r":
        assert Path(path).read_bytes() == before


def test_a_store_keeps_its_identity(path: str) -> None:
    identities = set()
    for _ in range(3):
        with ManifestStore.open(path) as manifest, manifest.read() as txn:
            row = txn.get(t.META, t.META.key.unpack(STORE_ID)[0])
            assert row is not None
            identities.add(row.text)
    assert len(identities) == 1
