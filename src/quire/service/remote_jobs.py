"""The job queue and the reader leases of an owner, over a channel.

Rules
  1. A remote worker claims, renews and ends jobs as a worker of the owner does. If it dies, its lease expires and another
     worker claims the job (M10). Only the running attempt ends a job: an outdated one is refused with `IllegalTransition`.
  2. Each open reader has a thread that renews its lease every `BEAT_SECONDS`.
  3. A failed renewal is retried; once the lease has expired, `check` raises.

Threads: any. Raises what the queue raises, `LeaseExpired`, and what a channel raises.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from quire.core.closing import ClosedOnExit
from quire.core.errors import LeaseExpired, QuireError, StoreClosed, Unavailable, UnknownReader
from quire.core.events import emit
from quire.core.ids import ArtifactKey
from quire.manifest.jobqueue import ATTEMPTS, LEASE_SECONDS, Job
from quire.manifest.ops.base import Op
from quire.manifest.records import JobKind, JobState
from quire.pages.remote import RemoteReader
from quire.service import messages as m
from quire.service.channel import Channel

BEAT_SECONDS = 5.0
"""The longest interval between two renewals of a reader's lease (M10); a quarter of the ttl if that is shorter."""


class RemoteJobs:
    """`client.jobs`: the job queue of a remote store (rule 1)."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def enqueue(
        self,
        kind: JobKind,
        db_id: int = 0,
        payload: Any = None,
        *,
        artifact: ArtifactKey | None = None,
        max_attempts: int = ATTEMPTS,
        delay_seconds: float = 0,
        job_id: int = 0,
    ) -> int:
        """Add a job and return its id, which may be one that was reserved."""
        about = (
            (artifact.origin_db_id, int(artifact.kind), artifact.id, artifact.generation, artifact.delta_id)
            if artifact
            else None
        )
        packed = b"" if payload is None else msgspec.msgpack.encode(payload)
        request = m.Enqueue(kind, db_id, packed, max_attempts, float(delay_seconds), about, job_id)
        return self._channel.call("jobs.enqueue", request)

    def claim(
        self, worker: str, kinds: Collection[JobKind] | None = None, *, lease_seconds: float = LEASE_SECONDS
    ) -> Job | None:
        """Lease the oldest job that is due to `worker` and return it; `None` if there is none."""
        wanted = None if kinds is None else tuple(kinds)
        return self._channel.call("jobs.claim", m.Claim(worker, wanted, lease_seconds))

    def claim_job(self, job_id: int, worker: str, *, lease_seconds: float = LEASE_SECONDS) -> Job | None:
        """Lease this job to `worker` and return it; `None` if it is not pending."""
        return self._channel.call("jobs.claim", m.Claim(worker, None, lease_seconds, job_id))

    def renew(
        self, job: Job, worker: str, *, done: int = 0, total: int = 0, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        """Renew the worker's lease and report its progress. Raises `IllegalTransition` if it no longer holds the job."""
        self._channel.call("jobs.renew", m.RenewJob(job.job_id, worker, done, total, lease_seconds))

    def complete(self, job: Job, result: Any = None, *, ops: Iterable[Op] = (), after: Iterable[Op] = ()) -> None:
        """End the attempt as successful, in one batch with its effects."""
        packed = b"" if result is None else msgspec.msgpack.encode(result)
        effects: Any = tuple(ops)
        later: Any = tuple(after)
        self._channel.call("jobs.complete", m.Complete(job.job_id, job.record.attempt, packed, effects, later))

    def fail(self, job: Job, error: str, *, permanent: bool = False) -> JobState:
        """End the attempt as failed; return the job's state: pending for another attempt, or failed permanently."""
        return self._channel.call("jobs.fail", m.Fail(job.job_id, job.record.attempt, error, permanent))

    def defer(self, job: Job, until_ms: int) -> None:
        """Put the job off until a moment, without counting a failure."""
        self._channel.call("jobs.defer", m.Defer(job.job_id, job.record.attempt, until_ms))

    def cancel(self, job_id: int) -> None:
        """Cancel a job that has not ended. Its worker notices at the next renewal."""
        self._channel.call("jobs.cancel", m.OfJob(job_id))

    def retry(self, job_id: int) -> int:
        """Enqueue again a job that failed or was cancelled; return the new job's id."""
        return self._channel.call("jobs.retry", m.OfJob(job_id))

    def get(self, job_id: int) -> Job:
        """Return a job by id."""
        return self._channel.call("jobs.get", m.OfJob(job_id))

    def jobs(self, state: JobState | None = None) -> list[Job]:
        """Return all jobs, or those in one state, oldest first."""
        return self._channel.call("jobs.list", m.ListJobs(state))

    def outstanding(self, db_id: int, kind: JobKind) -> int:
        """Return the outstanding job of an exclusive kind for a database; 0 if there is none."""
        return self._channel.call("jobs.outstanding", m.Outstanding(db_id, kind))


class RemotePageReader(ClosedOnExit):
    """Reads one version of a database through its owner. Use it as a context manager: it renews its lease until closed."""

    def __init__(self, channel: Channel, lease: RemoteReader) -> None:
        # constant after construction
        self.db_id = lease.db_id
        self.reader_id = lease.reader_id
        self.lsn = lease.lsn
        self.size_pages = lease.size_pages
        self.page_size = lease.page_size
        self._channel = channel
        self._ttl_seconds = lease.ttl_seconds
        self._over = threading.Event()
        self._lost: QuireError | None = None
        self._thread = threading.Thread(target=self._beat, name="quire-remote-reader", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if the lease has been lost: pages of this version may have been deleted."""
        if self._lost is not None:
            raise self._lost.with_traceback(None)

    def read_page(self, page: int) -> bytes:
        """Return a page as of this version."""
        return self.read_pages([page])[page]

    def read_pages(self, pages: Iterable[int]) -> dict[int, bytes]:
        """Return several pages, as page → image."""
        self.check()
        wanted = list(dict.fromkeys(pages))
        images: list[bytes] = []
        for start in range(0, len(wanted), m.READ_PAGES_MAX):
            part = tuple(wanted[start : start + m.READ_PAGES_MAX])
            images += self._channel.call("reader.read", m.ReadPages(self.db_id, self.reader_id, part))
        return dict(zip(wanted, images, strict=True))

    def renew(self) -> RemoteReader:
        """Renew the lease."""
        return self._channel.call("reader.renew", m.OfReader(self.db_id, self.reader_id))

    def _beat(self) -> None:
        while not self._over.wait(min(BEAT_SECONDS, self._ttl_seconds / 4)):
            try:
                self.renew()
            except (LeaseExpired, UnknownReader, StoreClosed) as error:
                self._lost = error
                emit("warning", "client.lease_lost", db_id=self.db_id, reader_id=self.reader_id, error=str(error))
                return
            except QuireError as error:
                emit("warning", "client.cannot_renew", reader_id=self.reader_id, error=str(error))

    def close(self) -> None:
        """Release the lease; if the owner cannot be reached, it expires. Idempotent."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        try:
            self._channel.call("reader.close", m.OfReader(self.db_id, self.reader_id))
        except (Unavailable, StoreClosed) as error:
            emit("debug", "client.lease_left", reader_id=self.reader_id, error=str(error))
