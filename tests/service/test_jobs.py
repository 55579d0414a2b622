"""Remote workers and readers: leases, zombies, and killed processes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import quire
from quire.manifest.records import JobKind, JobState
from quire.service.client import Client
from quire.service.remote_jobs import RemotePageReader
from quire.store.store import Store
from tests.service.owners import end, line, process, reserve

WORKER = """
import sys, quire
client = quire.connect(sys.argv[1])
from quire.manifest.records import JobKind
job = client.jobs.claim("remote-1", [JobKind.VERIFY], lease_seconds=1.0)
reader = client.reader("shop", ttl_seconds=1.0)
print(job.job_id, reader.reader_id, reader.lsn, flush=True)
sys.stdin.read()
"""


def test_a_remote_worker_claims_renews_and_completes_with_effects(client: Client, store: Store) -> None:
    job_id = client.jobs.enqueue(JobKind.VERIFY, payload={"deep": True})
    assert client.jobs.claim("w", [JobKind.MERGE]) is None
    job = client.jobs.claim("w", [JobKind.VERIFY], lease_seconds=20)
    assert job is not None
    assert (job.job_id, job.payload, job.state) == (job_id, {"deep": True}, JobState.IN_FLIGHT)
    assert client.jobs.claim("other") is None
    client.jobs.renew(job, "w", done=3, total=9)
    stored = client.jobs.get(job_id)
    assert stored == store.manifest.jobs.get(job_id)
    assert stored.lease is not None
    assert (stored.lease.done, stored.lease.total) == (3, 9)
    client.jobs.complete(job, {"problems": 0}, ops=reserve(77))
    done = client.jobs.get(job_id)
    assert (done.state, done.result) == (JobState.SUCCEEDED, {"problems": 0})
    assert client.reserve_job_id() == 2


def test_failures_are_counted_and_jobs_cancelled_and_retried(client: Client) -> None:
    job_id = client.jobs.enqueue(JobKind.VERIFY, max_attempts=2)
    job = client.jobs.claim_job(job_id, "w")
    assert job is not None
    assert client.jobs.fail(job, "first") is JobState.PENDING
    with pytest.raises(quire.IllegalTransition):
        client.jobs.complete(job)
    second_claim = client.jobs.claim_job(job_id, "w")
    assert second_claim is not None
    with pytest.raises(quire.IllegalTransition):
        client.jobs.complete(job)  # the first attempt has become a zombie
    assert client.jobs.fail(second_claim, "second") is JobState.FAILED_PERMANENT
    retried = client.jobs.retry(job_id)
    client.jobs.cancel(retried)
    assert [job.job_id for job in client.jobs.jobs(JobState.CANCELLED)] == [retried]
    assert client.jobs.outstanding(0, JobKind.DELETE) == 0


def test_a_remote_worker_cannot_use_an_owners_name(client: Client) -> None:
    client.jobs.enqueue(JobKind.VERIFY)
    for name in ("owner:worker", ""):
        with pytest.raises(quire.InvalidInput, match="unique name"):
            client.jobs.claim(name)


def test_leases_of_a_killed_client_expire(client: Client, store: Store, server: object) -> None:
    store.create("shop", "pages")
    opened = store.pages.open("shop")
    with opened.begin() as transaction:
        transaction.write_page(0, b"a" * opened.page_size)
    job_id = client.jobs.enqueue(JobKind.VERIFY)
    worker = process(WORKER, client.uri)
    try:
        claimed, reader_id, lsn = map(int, line(worker).split())
        assert claimed == job_id
        worker.kill()
        worker.wait()
        with opened.begin() as transaction:
            transaction.write_page(0, b"b" * opened.page_size)
        assert store.pages.floor(opened.db_id) == lsn, "the client may be alive: its lease protects it"
        deadline = time.monotonic() + 30
        while store.pages.floor(opened.db_id) == lsn or not store.manifest.jobs.expire():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert store.manifest.jobs.get(job_id).state is JobState.PENDING
        with pytest.raises((quire.LeaseExpired, quire.UnknownReader)):
            store.pages.renew_reader("shop", reader_id)
    finally:
        end(worker)


def test_a_reader_that_lost_its_lease_is_notified(client: Client, store: Store, path: Path) -> None:
    store.create("shop", "pages")
    opened = store.pages.open("shop")
    with opened.begin() as transaction:
        transaction.write_page(0, b"a" * opened.page_size)
    with client.reader("shop", ttl_seconds=1.0) as reader:
        store.pages.close_reader("shop", reader.reader_id)
        with pytest.raises((quire.LeaseExpired, quire.UnknownReader)):
            check_for(reader, 30)


def check_for(reader: RemotePageReader, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        reader.check()
        time.sleep(0.05)
