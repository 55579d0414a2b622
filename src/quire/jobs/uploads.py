"""Have artifacts uploaded now, and wait for it: for who is about to send something that needs their objects (P16).

Rules
  1. The upload is the ordinary job: it announces the object before its first byte and is repeated after a crash (`tiers/`).
     Whoever gets there first runs it, this thread or a worker's; uploading what has an object already is a success.
  2. All are asked for before the first one is run, so that workers of the store help.
  3. A job that was given up is an error here; one that is tried again is waited for.

Threads: any but a worker's own. Raises `Unavailable` with the job's own words, `TimedOut`, `StoreClosed`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from quire.core.errors import TimedOut, Unavailable
from quire.core.ids import ArtifactKey
from quire.jobs.enqueue import request_upload
from quire.jobs.worker import Worker
from quire.manifest.records import TERMINAL_JOB_STATES, JobState
from quire.manifest.store import ManifestStore

WAIT_SECONDS = 600.0
LOOK_SECONDS = 0.02
"""Between two looks at a job that another thread has, or that waits for its next attempt."""


def upload_now(
    manifest: ManifestStore, worker: Worker, keys: Sequence[ArtifactKey], *, timeout: float = WAIT_SECONDS
) -> None:
    """Return when each of these artifacts has its object."""
    deadline = manifest.clock.monotonic() + timeout
    for job_id in [request_upload(manifest, key) for key in keys]:
        while not _is_done(manifest, worker, job_id):
            if manifest.clock.monotonic() >= deadline:
                raise TimedOut("an upload takes too long", hint="`quire jobs` shows why", job_id=job_id)
            threading.Event().wait(LOOK_SECONDS)


def _is_done(manifest: ManifestStore, worker: Worker, job_id: int) -> bool:
    worker.run(job_id)
    record = manifest.jobs.get(job_id).record
    if record.state in TERMINAL_JOB_STATES and record.state is not JobState.SUCCEEDED:
        hint = "`quire jobs` shows it; mend what it says, then try again"
        raise Unavailable("a WAL segment could not be uploaded", hint=hint, job_id=job_id, error=record.error)
    return record.state is JobState.SUCCEEDED
