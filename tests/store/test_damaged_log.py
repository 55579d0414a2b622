"""A damaged WAL makes one database unusable: runs over all databases, and restores, continue with the others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import Corruption
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.durable.names import WalSegmentFile
from quire.manifest.records import JobState
from tests.programs import run_program
from tests.rules.tree import SRC

SETTINGS = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
NAMES = ("first", "damaged", "last")
WRITER = """
import os, signal, sys, quire
from quire.core.settings import MaintenanceSettings, StoreSettings
with quire.open(sys.argv[1], settings=StoreSettings(maintenance=MaintenanceSettings(enabled=False))) as store:
    for name in sys.argv[2:]:
        db = store.sqlite(name, create=True)
        db.execute("create table t(a)")
        db.executemany("insert into t values (?)", [(n,) for n in range(100)])
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store whose owner was killed while it wrote; the open segment of one database has lost its header."""
    root = tmp_path / "store"
    run_program(["-c", WRITER, str(root), *NAMES], env={**os.environ, "PYTHONPATH": str(SRC)})
    segment = max((root / WalSegmentFile(db_id=2, segment_id=1).path).parent.glob("*.seg"))
    with segment.open("r+b") as file:
        file.write(os.urandom(64))
    return root


def counts(store: quire.Store) -> dict[str, Any]:
    """Rows by database, without the one that cannot be opened."""
    found = {}
    for name in NAMES:
        if name == "damaged":
            with pytest.raises(Corruption, match="does not start like a WAL segment"):
                store.sqlite(name)
        else:
            with store.sqlite(name) as db:
                found[name] = db.execute("select count(*) from t").fetchall()[0][0]
    return found


def test_a_checkpoint_of_all_databases_continues_with_the_others(root: Path) -> None:
    """Hazard: the databases were recovered before the run, and the first that could not be ended it for all others."""
    with quire.open(root, settings=SETTINGS) as store:
        results = store.heavy.checkpoint_all(runner="threads")
        states = {store.database(job.db_id).name: job.state for job in results}
        assert states == {
            "first": JobState.SUCCEEDED,
            "damaged": JobState.FAILED_PERMANENT,
            "last": JobState.SUCCEEDED,
        }
        assert "does not start like a WAL segment" in results.failures[0].error
        assert counts(store) == {"first": 100, "last": 100}


def test_a_restore_brings_back_the_others(root: Path, tmp_path: Path) -> None:
    """Hazard: one database that could not be recovered made the restore of the whole store fail."""
    with quire.open(root, settings=SETTINGS) as store:
        store.backup(str(tmp_path / "backup"))
    quire.restore(str(tmp_path / "backup"), tmp_path / "restored")
    with quire.open(tmp_path / "restored", settings=SETTINGS) as store:
        assert counts(store) == {"first": 100, "last": 100}
