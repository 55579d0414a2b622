"""Restores and stats as jobs: each has a row in the queue, continues after a crash, and overwrites no file of the
user."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import StorageFault
from quire.core.settings import MaintenanceSettings
from quire.durable.failpoints import armed
from quire.jobs.restore import job as restore_module
from quire.manifest.records import JobKind, JobState
from quire.pages.view_build import view_of
from tests.jobs.checkpoint_child import RETRY_SECONDS, Owner, images
from tests.pages.engine_harness import Model, write

PAGES = 20


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    store, model = owner.database(), Model()
    write(store, model, images(*range(PAGES)))
    owner.checkpoint(store)
    owner.engine.snapshot("shop", "early")
    yield owner
    owner.stop()


def run_restore(owner: Owner, path: Path, **options: Any) -> int:
    payload = {"snapshot": 1, "path": str(path), **options}
    job_id: int = owner.manifest.jobs.enqueue(JobKind.RESTORE, 1, payload)
    owner.worker(JobKind.RESTORE).drain()
    return job_id


def content(owner: Owner) -> bytes:
    with owner.database().open_snapshot() as reader:
        pages = reader.read_pages(range(PAGES))
    return b"".join(pages[page] for page in range(PAGES))


def test_a_snapshot_is_restored_to_a_file_and_the_job_reports_it(owner: Owner, tmp_path: Path) -> None:
    job = owner.job(run_restore(owner, tmp_path / "early.db"))
    assert job.state is JobState.SUCCEEDED, job.record.error
    assert job.result["pages"] == PAGES
    assert (tmp_path / "early.db").read_bytes() == content(owner)


def test_an_existing_file_is_left_and_the_job_is_not_tried_again(owner: Owner, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"precious")
    job = owner.job(run_restore(owner, tmp_path / "mine"))
    assert job.state is JobState.FAILED_PERMANENT
    assert "already" in job.record.error
    assert (tmp_path / "mine").read_bytes() == b"precious"
    assert owner.state(run_restore(owner, tmp_path / "mine", replace=True)) is JobState.SUCCEEDED
    assert (tmp_path / "mine").read_bytes() == content(owner)


@pytest.mark.parametrize("point", ["jobs.restore.written", "jobs.worker.worked"])
def test_a_later_attempt_completes_a_failed_one(owner: Owner, tmp_path: Path, point: str) -> None:
    """The attempt fails before or after the file gets its name; the second attempt adopts its own file."""
    with armed(point, "1*raise:EIO"):
        job_id = run_restore(owner, tmp_path / "early.db")
    assert owner.state(job_id) is JobState.PENDING
    assert (tmp_path / "early.db").exists() is (point == "jobs.worker.worked")
    owner.clock.advance(RETRY_SECONDS)
    owner.worker(JobKind.RESTORE).drain()
    assert owner.state(job_id) is JobState.SUCCEEDED, owner.job(job_id).record.error
    assert (tmp_path / "early.db").read_bytes() == content(owner)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_later_attempt_does_not_adopt_a_foreign_file(owner: Owner, tmp_path: Path) -> None:
    with armed("jobs.restore.written", "1*raise:EIO"):
        job_id = run_restore(owner, tmp_path / "early.db")
    (tmp_path / "early.db").write_bytes(bytes(len(content(owner))))
    owner.clock.advance(RETRY_SECONDS)
    owner.worker(JobKind.RESTORE).drain()
    assert owner.state(job_id) is JobState.FAILED_PERMANENT
    assert (tmp_path / "early.db").read_bytes() == bytes(len(content(owner)))


def test_a_failed_attempt_has_ended_when_its_error_is_raised(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a task of the failed attempt went on writing into `<file>.tmp`, which the next attempt overwrites and names."""
    halves = [(0, PAGES // 2), (PAGES // 2, PAGES)]
    whole = restore_module.parts
    monkeypatch.setattr(
        restore_module,
        "parts",
        lambda view, path: [replace(whole(view, path)[0], first=first, stop=stop) for first, stop in halves],
    )
    turns, second_began, ended = count(), threading.Event(), list[bool]()

    def fail_or_linger(_: str) -> None:
        if next(turns) == 0:
            second_began.wait(10)
            raise StorageFault("the disk failed")
        second_began.set()
        time.sleep(0.5)
        ended.append(True)

    with owner.manifest.read() as txn:
        snapshot_id, record = txn.require_snapshot(1, 1)
        view = view_of(txn, 1, snapshot_id, record, owner.objects_url)
    owner.maintenance = MaintenanceSettings(workers=2)
    runner = owner.context().thread_runner()
    with armed("jobs.restore.written", fail_or_linger), pytest.raises(StorageFault, match="the disk failed"):
        restore_module.restore(view, str(tmp_path / "early.db"), 1, runner, owner.disk)
    assert ended == [True]


def test_two_jobs_with_the_same_target_do_not_write_into_one_file(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a second job emptied the unfinished file of the first, which then named it and reported success."""
    halves, orders = [(0, PAGES // 2), (PAGES // 2, PAGES)], iter([1, -1, -1])
    whole = restore_module.parts
    monkeypatch.setattr(
        restore_module,
        "parts",
        lambda view, path: [
            replace(whole(view, path)[0], first=first, stop=stop) for first, stop in halves[:: next(orders)]
        ],
    )
    second = list[int]()

    def begin_second(_: str) -> None:
        if not second:
            payload = {"snapshot": 1, "path": str(tmp_path / "early.db")}
            second.append(owner.manifest.jobs.enqueue(JobKind.RESTORE, 1, payload))
            owner.worker(JobKind.RESTORE).run(second[0])
        elif len(second) == 1:
            second.append(0)
            raise StorageFault("the disk failed")

    with armed("jobs.restore.written", begin_second):
        job_id = run_restore(owner, tmp_path / "early.db")
    assert owner.state(job_id) is JobState.SUCCEEDED, owner.job(job_id).record.error
    assert (tmp_path / "early.db").read_bytes() == content(owner)


def test_a_file_that_appears_during_a_restore_is_not_replaced(owner: Owner, tmp_path: Path) -> None:
    """Hazard: the file was looked for only before the restore, which may take hours."""

    def appear(_: str) -> None:
        (tmp_path / "mine").write_bytes(b"precious")

    with armed("jobs.restore.written", appear):
        job_id = run_restore(owner, tmp_path / "mine")
    assert owner.state(job_id) is JobState.FAILED_PERMANENT
    assert (tmp_path / "mine").read_bytes() == b"precious"
    assert not list(tmp_path.glob("*.tmp"))


def test_stats_are_a_job_with_a_result(owner: Owner) -> None:
    job_id = owner.manifest.jobs.enqueue(JobKind.STATS)
    owner.worker(JobKind.STATS).drain()
    job = owner.job(job_id)
    assert job.state is JobState.SUCCEEDED, job.record.error
    assert [row["snapshot"] for row in job.result["usage"]] == ["", "early"]
    assert job.result["usage"][0]["size_bytes"] > 0
