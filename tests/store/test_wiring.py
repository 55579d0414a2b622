"""The parts of a store: each made when it is first needed, alone, and closed with the store."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.manifest.records import JobKind
from tests.manifest.helpers import eventually

QUIET = StoreSettings(maintenance=MaintenanceSettings(enabled=False))


def test_a_part_is_made_alone(path: Path) -> None:
    with quire.open(path, settings=QUIET) as store:
        store.kv("cart", create=True).put(b"ann", b"3")
        wiring = store._parts
        assert set(wiring._created) == {"files", "kv"}
        store.stream("clicks", create=True).append([b"one"]).result()
        assert set(wiring._created) <= {"files", "kv", "streams", "stores"}
        assert store.worker is wiring.worker, "there is one of each"
        assert {"worker", "context", "pages"} <= set(wiring._created)
        assert "upkeep" not in wiring._created
        assert "sqlite" not in wiring._created


def test_many_threads_get_one_room(path: Path) -> None:
    with quire.open(path, settings=QUIET) as store:
        wiring = store._parts
        found: list[object] = []
        threads = [threading.Thread(target=lambda: found.append(wiring.worker)) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(found) == 8
        assert len(set(map(id, found))) == 1


def test_a_worker_without_upkeep_is_stopped_with_the_store(path: Path) -> None:
    before = threading.active_count()
    with quire.open(path, settings=QUIET) as store:
        store.worker.start()
        job_id = store.manifest.jobs.enqueue(JobKind.RETENTION, store.create("shop", "pages").db_id)
        eventually(lambda: store.manifest.jobs.get(job_id).record.finished_at_ms > 0)
        assert threading.active_count() > before
    assert threading.active_count() == before


def test_nothing_is_made_once_the_store_is_closed(path: Path) -> None:
    with quire.open(path, settings=QUIET) as store:
        wiring = store._parts
        pages = wiring.pages
    with pytest.raises(quire.StoreClosed):
        _ = wiring.worker
    with pytest.raises(quire.StoreClosed):
        _ = wiring.kv
    assert wiring.pages is pages, "who has it may ask it, and hears that it is closed"
    assert wiring._created.keys() == {"files", "pages", "stores"}


def test_jobs_that_a_crash_left_running_are_taken_back(path: Path) -> None:
    with quire.open(path, settings=QUIET) as store:
        queue = store.manifest.jobs
        taken = queue.claim_job(queue.enqueue(JobKind.RETENTION, store.create("shop", "pages").db_id), "owner:gone")
        assert taken is not None
    with quire.open(path, settings=QUIET) as store:
        found = store.manifest.jobs.get(taken.job_id)
        assert (found.state.name, found.lease) == ("PENDING", None)
