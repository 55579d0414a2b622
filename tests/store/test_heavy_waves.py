"""Jobs over very many databases: in waves, and only for databases with work to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.manifest.records import JobState, RetentionRecord
from quire.store import heavy


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[quire.Store]:
    monkeypatch.setattr(heavy, "WAVE", 2)
    with quire.open(tmp_path / "store") as store:
        with store.sqlite("template", create=True) as connection:
            connection.execute("CREATE TABLE t(x)")
        store.fork_many("template", [f"tenant-{number}" for number in range(5)])
        for number in range(3):
            with store.sqlite(f"tenant-{number}") as connection:
                connection.execute("INSERT INTO t VALUES (1)")
        yield store


def test_databases_with_their_own_wal_are_checkpointed_in_waves(store: quire.Store) -> None:
    progress: list[tuple[int, int]] = []
    jobs = store.heavy.checkpoint_all(runner="threads", progress=lambda done, total: progress.append((done, total)))
    checkpointed = {store.database(job.db_id).name for job in jobs}
    assert checkpointed == {"template", "tenant-0", "tenant-1", "tenant-2"}, (
        "a fork that was never written has nothing to absorb"
    )
    assert {job.state for job in jobs} == {JobState.SUCCEEDED}
    assert progress == sorted(progress), "progress does not go back from wave to wave"
    assert progress[-1] == (6, 6), "and ends with everything done"
    assert not store.heavy.checkpoint_all(runner="threads")
    (job,) = store.heavy.checkpoint_all(["tenant-4"], runner="threads")
    assert job.result["slots"] == 1


def test_policies_are_applied_in_waves(store: quire.Store) -> None:
    for number in range(5):
        name = f"tenant-{number}"
        store.manifest.retention.set(name, RetentionRecord(keep_last=1))
        store.snapshot(name)
        store.snapshot(name)
    assert len(store.heavy.retention_all()) == 5
    assert [len(store.manifest.snapshots.of(f"tenant-{number}")) for number in range(5)] == [1] * 5
