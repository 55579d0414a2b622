"""What every heavy job has: a dry run that changes nothing, a summary for programs, progress, and a row in the queue."""

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
    """A page database with pages in its WAL, a snapshot and a policy that would drop it."""
    path = tmp_path / "store"
    with quire.open(path) as store:
        store.create("shop", "pages")
        with store.pages.open("shop").begin() as txn:
            txn.write_pages({page: bytes([page]) * 4_096 for page in range(8)})
        store.snapshot("shop", "monday")
        store.manifest.retention.set("shop", RetentionRecord(keep_last=1))
    return path


def test_every_dry_run_tells_programs_and_changes_nothing(store_path: Path, tmp_path: Path) -> None:
    def newest() -> int:
        with quire.open(store_path, mode="r") as store:
            return store.info().newest_change

    def dry(*words: str) -> Any:
        out = io.StringIO()
        with redirect_stdout(out):
            assert main.run([*words, "--dry-run", "--json", "--store", str(store_path)]) == 0
        return json.loads(out.getvalue())

    before = newest()
    assert [each["database"] for each in dry("checkpoint", "--all")] == ["shop"]
    assert dry("merge", "--all") == []
    assert dry("verify")["left"] >= 1
    assert dry("gc")["dry_run"] is True
    assert dry("retention", "apply", "--all") == []
    assert dry("retention", "apply", "shop")["would_drop"] == 0
    assert dry("restore", "shop", "monday", str(tmp_path / "file"))["pages"] == 8
    assert dry("stats")["references"] >= dry("stats")["artifacts"] >= 1
    assert newest() == before
    assert not (tmp_path / "file").exists()


def test_every_job_is_a_row_of_the_queue_with_a_result_and_tells_how_far_it_is(
    store_path: Path, tmp_path: Path
) -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    def progress(name: str) -> Any:
        heard = told[name] = []
        return lambda done, total: heard.append((done, total))

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
    assert told.keys() == of_jobs | {"whole audit"}
    for name, heard in told.items():
        need_steady(name, heard)


def need_steady(name: str, heard: list[tuple[int, int]]) -> None:
    """It begins at nothing, never goes back, and ends where everything is done."""
    assert heard[0][0] == 0, name
    assert heard[-1][0] == heard[-1][1] > 0, (name, heard)
    assert heard == sorted(heard), (name, heard)
    assert all(0 <= done <= total for done, total in heard), (name, heard)


def test_a_store_without_databases_has_nothing_to_do_and_says_so(tmp_path: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    def progress(name: str) -> Any:
        heard = told[name] = []
        return lambda done, total: heard.append((done, total))

    with quire.open(tmp_path / "store") as store:
        heavy = store.heavy
        assert heavy.checkpoint_all(runner="threads", progress=progress("checkpoint")) == []
        assert heavy.merge_all(runner="threads", progress=progress("merge")) == []
        swept = heavy.sweep(delete=True, runner="threads", progress=progress("sweep")).result
        assert (swept["objects"], swept["orphaned"], swept["lost"]) == (0, 0, 0)
        assert heavy.verify(runner="threads", progress=progress("verify")).result["verified"] == 0
        assert heavy.stats(runner="threads", progress=progress("stats")) == []
        assert heavy.audit(runner="threads", progress=progress("whole audit")).num_rows == 0
        assert heavy.recount(runner="threads", progress=progress("audit")) == []
    for name, heard in told.items():
        need_steady(name, heard)
