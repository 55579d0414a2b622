"""The migration ledger: ordered, once, whole or not at all, and closed to what is newer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from quire.core.errors import FormatTooNew, StorageFault
from quire.core.settings import ManifestSettings
from quire.durable.failpoints import VARIABLE, armed
from quire.manifest import tables as t
from quire.manifest.env import ManifestEnv
from quire.manifest.migrations import BASE_SCHEMA, SCHEMA, STORE_ID, Step, migrate
from quire.manifest.records import MetaRecord, MigrationRecord
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from tests.manifest.helpers import register

COUNT = t.META.key.pack("count")
POINTS = ("manifest.migration.ran", "manifest.migration.recorded", "manifest.migration.durable")


def count_up(env: ManifestEnv, txn: lmdb.Transaction) -> None:
    """A step that must not be carried out twice: each time it runs it counts."""
    raw = txn.get(COUNT, db=env.handles["meta"])
    number = t.META.codec.decode(bytes(raw)).number if raw is not None else 0
    txn.put(COUNT, t.META.codec.encode(MetaRecord(number=number + 1)), db=env.handles["meta"])


STEPS = [Step("001-first", count_up), Step("002-second", count_up), Step("003-third", count_up)]


@contextmanager
def environment(path: str) -> Iterator[ManifestEnv]:
    env = ManifestEnv(path, ManifestSettings(), write=True)
    try:
        yield env
    finally:
        env.close()


def state(env: ManifestEnv) -> tuple[int, int, list[str]]:
    """(times counted, schema, ledger)."""
    txn, ticket = env.begin_read()
    try:
        numbers = []
        for key in (COUNT, SCHEMA):
            raw = txn.get(key, db=env.handles["meta"])
            numbers.append(t.META.codec.decode(bytes(raw)).number if raw is not None else 0)
        with txn.cursor(db=env.handles["migrations"]) as cursor:
            ledger = [bytes(key).decode() for key in cursor.iternext(values=False)]
        return numbers[0], numbers[1], ledger
    finally:
        env.end_read(txn, ticket)


def test_a_new_store_is_born_with_every_step_done(path: str) -> None:
    with environment(path) as env:
        assert migrate(env, ManualClock(), STEPS) == []
        assert state(env) == (0, BASE_SCHEMA + 3, [step.name for step in STEPS])


def test_steps_are_carried_out_in_order_and_once(path: str) -> None:
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
        assert counted == len(ledger) == schema - BASE_SCHEMA, "step and ledger row are one"
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
@pytest.mark.parametrize("before", [0, 1])
def test_killed_in_the_middle_it_is_repaired_by_opening_again(path: str, point: str, before: int) -> None:
    with environment(path) as env:
        migrate(env, ManualClock(), [])
    variables = {**os.environ, VARIABLE: f"{point}={before}*off->kill", "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", CHILD, path], env=variables, capture_output=True, timeout=60)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    with environment(path) as env:
        counted, schema, ledger = state(env)
        assert counted == len(ledger) == schema - BASE_SCHEMA
        assert counted == before + point.endswith("durable")
        migrate(env, ManualClock(), STEPS)
        assert state(env) == (3, BASE_SCHEMA + 3, [step.name for step in STEPS])


@pytest.mark.parametrize("mode", ["rw", "r"])
@pytest.mark.parametrize("newer", ["schema", "step"])
def test_a_store_written_by_a_newer_quire_is_refused_and_stays_as_it_was(path: str, mode: str, newer: str) -> None:
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
    found = set()
    for _ in range(3):
        with ManifestStore.open(path) as manifest, manifest.read() as txn:
            row = txn.get(t.META, t.META.key.unpack(STORE_ID)[0])
            assert row is not None
            found.add(row.text)
    assert len(found) == 1
