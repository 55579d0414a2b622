"""The parts of a store: each is created when it is first needed, once, and closed with the store."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.manifest.records import JobKind
from tests.manifest.helpers import eventually

QUIET = StoreSettings(maintenance=MaintenanceSettings(enabled=False))


def test_a_part_is_created_alone(path: Path) -> None:
    with quire.open(path, settings=QUIET) as store:
        store.kv("cart", create=True).put(b"ann", b"3")
        wiring = store._parts
        assert set(wiring._created) == {"files", "kv"}
        store.stream("clicks", create=True).append([b"one"]).result()
        assert set(wiring._created) <= {"files", "kv", "streams", "stores"}
        assert store.worker is wiring.worker, "there is one instance of each part"
        assert {"worker", "context", "pages"} <= set(wiring._created)
        assert "upkeep" not in wiring._created
        assert "sqlite" not in wiring._created


def test_many_threads_get_the_same_part(path: Path) -> None:
    with quire.open(path, settings=QUIET) as store:
        wiring = store._parts
        outcomes: list[object] = []
        threads = [threading.Thread(target=lambda: outcomes.append(wiring.worker)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 8
        assert len(set(map(id, outcomes))) == 1


def test_a_worker_without_background_maintenance_is_stopped_with_the_store(path: Path) -> None:
    before = threading.active_count()
    with quire.open(path, settings=QUIET) as store:
        store.worker.start()
        job_id = store.manifest.jobs.enqueue(JobKind.RETENTION, store.create("shop", "pages").db_id)
        eventually(lambda: store.manifest.jobs.get(job_id).record.finished_at_ms > 0)
        assert threading.active_count() > before
    assert threading.active_count() == before


def test_no_part_is_created_once_the_store_is_closed(path: Path) -> None:
    with quire.open(path, settings=QUIET) as store:
        wiring = store._parts
        pages = wiring.pages
    with pytest.raises(quire.StoreClosed):
        _ = wiring.worker
    with pytest.raises(quire.StoreClosed):
        _ = wiring.kv
    assert wiring.pages is pages, "a part that was obtained earlier reports that it is closed"
    assert wiring._created.keys() == {"files", "pages", "stores"}


def test_jobs_left_running_by_a_crash_are_recovered(path: Path) -> None:
    with quire.open(path, settings=QUIET) as store:
        queue = store.manifest.jobs
        claimed = queue.claim_job(queue.enqueue(JobKind.RETENTION, store.create("shop", "pages").db_id), "owner:gone")
        assert claimed is not None
    with quire.open(path, settings=QUIET) as store:
        job = store.manifest.jobs.get(claimed.job_id)
        assert (job.state.name, job.lease) == ("PENDING", None)
