"""Checkpoints over an object store that fails, loses responses, or has a different object under a name (P11)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ObjectStoreUnavailable
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.jobs.residency import request_evict, request_upload
from quire.manifest.records import JobKind, JobState
from quire.objects.api import ObjectStore
from quire.testing.faults import Fault, FaultyDisk
from tests.jobs.checkpoint_child import Owner, images
from tests.jobs.job_store import epoch_name
from tests.pages.engine_harness import Model, write


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    yield owner
    owner.stop()


class FailingStore:
    """An object store whose next puts fail, before or after they take effect."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.failures_before = 0
        self.failures_after = 0

    def put(self, key: str, data: Any, **options: Any) -> Any:
        if self.failures_before:
            self.failures_before -= 1
            raise ObjectStoreUnavailable("no response", key=key)
        result = self.inner.put(key, data, **options)
        if self.failures_after:
            self.failures_after -= 1
            raise ObjectStoreUnavailable("the response was lost", key=key)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _failing_store(owner: Owner) -> FailingStore:
    failing = FailingStore(owner.stores(owner.objects_url))
    owner.stores = lambda _: failing
    return failing


def test_an_object_store_that_fails_for_a_while_only_delays_the_checkpoint(owner: Owner) -> None:
    store, model = owner.database(), Model()
    write(store, model, images(*range(20)))
    objects = _failing_store(owner)
    objects.failures_before = 3
    job_id = owner.enqueue()
    for _ in range(4):
        owner.retry()
        owner.assert_newest(model)
    job = owner.job(job_id)
    assert job.state is JobState.SUCCEEDED
    assert 1 <= job.record.failures <= 3
    owner.settle()


def test_a_put_whose_response_is_lost_is_adopted(owner: Owner) -> None:
    store, model = owner.database(), Model()
    write(store, model, images(*range(20)))
    objects = _failing_store(owner)
    objects.failures_after = 1
    job_id = owner.enqueue()
    owner.worker().drain()
    objects_before, (generation,) = owner.objects(), owner.plans()
    assert objects_before
    owner.retry()
    assert owner.job(job_id).result["generation"] == generation
    assert {key: owner.objects()[key] for key in objects_before} == objects_before, "not written again"
    owner.settle()
    owner.assert_newest(model)


@pytest.mark.parametrize(
    "fault",
    [
        Fault.LOST_ANSWER,
        pytest.param(Fault.EIO, marks=pytest.mark.slow),
        pytest.param(Fault.SHORT_WRITE, marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_fails_at_any_call_of_a_put_leaves_a_checkpoint_that_can_be_repeated(
    tmp_path: Path, fault: Fault
) -> None:
    for fail_at in range(1, 40):
        disk = FaultyDisk(OsDisk(), fault, fail_at=fail_at, path="*/objects/*")
        base = tmp_path / str(fail_at)
        base.mkdir()
        owner = Owner(base, disk=disk)
        store, model = owner.database(), Model()
        write(store, model, images(*range(12)))
        job_id = owner.enqueue()
        owner.worker(JobKind.CHECKPOINT).drain()
        is_clean = not disk.fired
        disk.fired, disk._fail_at = True, 0
        owner.assert_newest(model)
        owner.retry()
        assert owner.state(job_id) is JobState.SUCCEEDED, owner.job(job_id).record.error
        owner.settle()
        owner.assert_newest(model)
        owner.stop()
        if is_clean:
            assert fail_at > 10
            return
    raise AssertionError("there was no clean pass")


def test_segments_that_are_only_in_the_object_store_are_absorbed_from_there(owner: Owner) -> None:
    store, model = owner.database(), Model()
    write(store, model, images(*range(20)))
    owner.engine.flush(1)
    segment = ArtifactKey(1, ArtifactKind.WAL, 1, 0)
    for request in (request_upload, request_evict):
        job_id = request(owner.manifest, segment)
        owner.worker().drain()
        assert owner.state(job_id) is JobState.SUCCEEDED
    write(store, model, images(1, 9))
    owner.checkpoint(store)
    assert owner.chain(0)
    owner.settle()
    owner.assert_newest(model)


@pytest.mark.parametrize("content", ["another's chunk", "no chunk at all", "damaged"])
def test_a_foreign_object_under_a_planned_name_is_neither_adopted_nor_overwritten(owner: Owner, content: str) -> None:
    store, model = owner.database(), Model()
    write(store, model, images(*range(20)))
    job_id = owner.enqueue()
    with armed("jobs.checkpoint.written", "1*raise:EIO"):
        owner.worker().drain()
    (generation,) = owner.plans()
    keys = [ArtifactKey(1, ArtifactKind.BASE, slot, generation) for slot in (0, 1)]
    first, second = (epoch_name(owner.manifest, key) for key in keys)
    path = Path(owner.objects_url) / first
    body = bytearray(path.read_bytes())
    if content == "another's chunk":
        body = bytearray((Path(owner.objects_url) / second).read_bytes())
    elif content == "no chunk at all":
        body = bytearray(b"hello" * 100)
    else:
        body[-40] ^= 1
    path.unlink()
    path.write_bytes(body)
    for _ in range(5):
        owner.retry()
        owner.assert_newest(model)
    assert owner.state(job_id) is JobState.FAILED_PERMANENT
    assert owner.chain(0) == []
    assert path.read_bytes() == body
    owner.checkpoint(store)  # makes a new plan, with another name
    assert owner.chain(0) == [("BASE", generation + 1)]
    owner.settle()
    owner.assert_newest(model)
