"""What every heavy job provides: a dry run that changes nothing, a JSON summary, progress, and a row in the queue."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli import main
from quire.manifest.records import JobKind, JobState, RetentionRecord


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """A page database with pages in its WAL, a snapshot, and a policy that would drop it."""
    path = tmp_path / "store"
    with quire.open(path) as store:
        store.create("shop", "pages")
        with store.pages.open("shop").begin() as txn:
            txn.write_pages({page: bytes([page]) * 4_096 for page in range(8)})
        store.snapshot("shop", "monday")
        store.manifest.retention.set("shop", RetentionRecord(keep_last=1))
    return path


def test_every_dry_run_prints_json_and_changes_nothing(store_path: Path, tmp_path: Path) -> None:
    def newest() -> int:
        with quire.open(store_path, mode="r") as store:
            return store.info().newest_change

    def dry_run(*arguments: str) -> Any:
        out = io.StringIO()
        with redirect_stdout(out):
            assert main.run([*arguments, "--dry-run", "--json", "--store", str(store_path)]) == 0
        return json.loads(out.getvalue())

    before = newest()
    assert [row["database"] for row in dry_run("checkpoint", "--all")] == ["shop"]
    assert dry_run("merge", "--all") == []
    assert dry_run("verify")["left"] >= 1
    assert dry_run("gc")["dry_run"] is True
    assert dry_run("retention", "apply", "--all") == []
    assert dry_run("retention", "apply", "shop")["would_drop"] == 0
    assert dry_run("restore", "shop", "monday", str(tmp_path / "file"))["pages"] == 8
    assert dry_run("stats")["references"] >= dry_run("stats")["artifacts"] >= 1
    assert newest() == before
    assert not (tmp_path / "file").exists()


def test_every_job_is_a_row_of_the_queue_with_a_result_and_reports_progress(store_path: Path, tmp_path: Path) -> None:
    reports: dict[str, list[tuple[int, int]]] = {}

    def progress(name: str) -> Any:
        counts = reports[name] = []
        return lambda done, total: counts.append((done, total))

    with quire.open(store_path) as store:
        heavy = store.heavy
        heavy.checkpoint_all(runner="threads", progress=progress("checkpoint"))
        heavy.merge_all(runner="threads", progress=progress("merge"))
        heavy.retention_all(["shop"], progress=progress("retention"))
        heavy.sweep(runner="threads", progress=progress("sweep"))
        heavy.recount(runner="threads", progress=progress("audit"))
        heavy.audit(runner="threads", progress=progress("whole audit"))
        heavy.verify(runner="threads", progress=progress("verify"))
        heavy.restore("shop", "monday", str(tmp_path / "file"), runner="threads", progress=progress("restore"))
        heavy.stats(runner="threads", progress=progress("stats"))
        rows = {job.kind: job for job in store.manifest.jobs.jobs()}
    kinds = "CHECKPOINT MERGE RETENTION SWEEP AUDIT VERIFY RESTORE STATS"
    for kind in (JobKind[name] for name in kinds.split()):
        assert rows[kind].state is JobState.SUCCEEDED, rows[kind].record.error
        assert isinstance(rows[kind].result, dict), kind
    of_jobs = {"checkpoint", "merge", "retention", "sweep", "audit", "verify", "restore", "stats"}
    assert reports.keys() == of_jobs | {"whole audit"}
    for name, counts in reports.items():
        assert_monotonic(name, counts)


def assert_monotonic(name: str, counts: list[tuple[int, int]]) -> None:
    """Progress begins at zero, never decreases, and ends at its total."""
    assert counts[0][0] == 0, name
    assert counts[-1][0] == counts[-1][1] > 0, (name, counts)
    assert counts == sorted(counts), (name, counts)
    assert all(0 <= done <= total for done, total in counts), (name, counts)


def test_jobs_of_a_store_without_databases_do_nothing_and_report_progress(tmp_path: Path) -> None:
    reports: dict[str, list[tuple[int, int]]] = {}

    def progress(name: str) -> Any:
        counts = reports[name] = []
        return lambda done, total: counts.append((done, total))

    with quire.open(tmp_path / "store") as store:
        heavy = store.heavy
        assert list(heavy.checkpoint_all(runner="threads", progress=progress("checkpoint"))) == []
        assert list(heavy.merge_all(runner="threads", progress=progress("merge"))) == []
        swept = heavy.sweep(delete=True, runner="threads", progress=progress("sweep")).result
        assert (swept["objects"], swept["orphaned"], swept["lost"]) == (0, 0, 0)
        assert heavy.verify(runner="threads", progress=progress("verify")).result["verified"] == 0
        assert list(heavy.stats(runner="threads", progress=progress("stats"))) == []
        assert heavy.audit(runner="threads", progress=progress("whole audit")).num_rows == 0
        assert heavy.recount(runner="threads", progress=progress("audit")) == []
    for name, counts in reports.items():
        assert_monotonic(name, counts)
