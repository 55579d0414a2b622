"""Renewal of the leases of the jobs that this process works on, by one thread.

A lease is renewed when a third of it has passed, or when progress has been made, at most once a second: not every report of
progress is a commit (M10). A lease that was taken away, because the job was cancelled or given to another worker, is marked as
lost; the thread that works on the job is interrupted at its next step, or when it commits something, which then fails (P10).

Threads: the thread that works on a job sets `done` and `total`; the keeper's thread does the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.core.errors import IllegalTransition, UnknownJob
from quire.core.events import emit
from quire.jobs.handler import commit_each
from quire.manifest.jobqueue import Job
from quire.manifest.ops.jobs import RenewJobLease
from quire.manifest.records import JobState
from quire.manifest.store import ManifestStore

PROGRESS_SECONDS = 1.0
"""Progress is written at most this often."""


@dataclass(slots=True, eq=False)
class LeasedJob:
    """A job that a thread of this process works on."""

    job: Job
    holder: str = ""
    """The name that its lease carries."""
    done: int = 0
    total: int = 0
    lost: bool = False
    renewed_at: float = field(default_factory=time.monotonic)
    written: tuple[int, int] = (0, 0)
    """(done, total) as last written to the manifest."""

    @property
    def db_id(self) -> int:
        return self.job.db_id

    def is_due(self, lease_seconds: float) -> bool:
        """Return whether the lease must be renewed now."""
        waited = time.monotonic() - self.renewed_at
        moved = (self.done, self.total) != self.written
        return not self.lost and (waited >= lease_seconds / 3 or (moved and waited >= PROGRESS_SECONDS))


class LeaseKeeper:
    """Renews the leases of the jobs that `held` returns, from `start` to `stop`."""

    def __init__(
        self, manifest: ManifestStore, held: Callable[[], Sequence[LeasedJob]], lease_seconds: float, *, label: str
    ) -> None:
        self._manifest = manifest
        self._held = held
        self._lease_seconds = lease_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=label, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def expires_at_ms(self) -> int:
        """Return when a lease that is taken or renewed now expires, in milliseconds since the Unix epoch."""
        return self._manifest.clock.now_ms() + int(self._lease_seconds * 1000)

    def renewal(self, leased: LeasedJob) -> RenewJobLease:
        """Return the operation that renews a lease; its batch fails if the job is no longer this holder's."""
        return RenewJobLease(leased.job.job_id, leased.holder, self.expires_at_ms(), leased.done, leased.total)

    def beat(self) -> None:
        """Renew the leases that are due."""
        due = [leased for leased in self._held() if leased.is_due(self._lease_seconds)]
        renewals: dict[LeasedJob, RenewJobLease] = {}

        def renew(leased: LeasedJob) -> RenewJobLease:
            # Built once: the working thread moves `done` and `total` meanwhile, and `written` must be what was committed.
            # Not before it is submitted: with very many jobs, the time at the start of the beat may be long ago.
            renewals[leased] = self.renewal(leased)
            return renewals[leased]

        for leased, error in commit_each(self._manifest, ((leased, [renew(leased)]) for leased in due)):
            if error is None:
                leased.renewed_at, leased.written = time.monotonic(), (renewals[leased].done, renewals[leased].total)
            elif isinstance(error, (IllegalTransition, UnknownJob)):
                if not self._has_ended(leased):
                    leased.lost = True
                    emit("warning", "job.lease_taken", job_id=leased.job.job_id, worker=leased.holder)
            else:
                # The lease stays due, so the next beat tries again.
                emit("warning", "worker.cannot_renew", job_id=leased.job.job_id, error=str(error))

    def _has_ended(self, leased: LeasedJob) -> bool:
        """Return whether this attempt has ended: its result may be committed just before the renewal."""
        record = leased.job.record
        try:
            job = self._manifest.jobs.get(leased.job.job_id)
        except UnknownJob:
            return False
        return job.state in (JobState.SUCCEEDED, JobState.FAILED_PERMANENT) and job.record.attempt == record.attempt

    def _run(self) -> None:
        # At most a sixth of a lease between two looks: a renewal that is due after a third is sent before half has
        # passed.
        while not self._over.wait(min(self._lease_seconds / 6, PROGRESS_SECONDS)):
            try:
                self.beat()
            except Exception as error:  # without this thread every lease would be lost
                emit("error", "worker.beat_failed", error=error)
