"""Retention over many databases, in one call: each has a job of its own."""

from __future__ import annotations

from pathlib import Path

import quire
from quire.manifest import tables as t
from quire.manifest.records import JobState, RetentionRecord


def test_all_policies_are_applied(tmp_path: Path) -> None:
    with quire.open(str(tmp_path / "store")) as store:
        for name in ("a", "b", "c", "free"):
            store.create(name, "pages")
            for number in range(4):
                store.snapshot(name, f"s{number}")
        for name in ("a", "b"):
            store.manifest.retention.set(name, RetentionRecord(keep_last=1, keep_named=False))
        store.manifest.retention.set("c", RetentionRecord(keep_last=3, keep_named=False))
        jobs = store.heavy.retention_all()
        assert [(job.state, job.result["dropped"]) for job in jobs] == [
            (JobState.SUCCEEDED, 3),
            (JobState.SUCCEEDED, 3),
            (JobState.SUCCEEDED, 1),
        ]
        assert [job.result["dropped"] for job in store.heavy.retention_all(["a", "c"])] == [0, 0]
        with store.manifest.read() as txn:
            kept = [len(list(txn.scan(t.SNAPSHOT_INDEX, txn.database_id(name)))) for name in ("a", "b", "c", "free")]
        assert kept == [1, 1, 3, 4], "without a policy nothing goes"
