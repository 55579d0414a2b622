"""Jobs that were in flight at the archived moment are pending after a restore, and no failure is counted. What is known of the
files of the former directory, such as their last verification, is forgotten (A10)."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.manifest.records import JobKind, JobState
from quire.manifest.verification import LastVerification, last_verification
from quire.store.standby import Standby
from quire.store.store import Store
from tests.archive.archived_store import ArchivedStore, archived_store, fill


def claim_a_job(archived: ArchivedStore, worker: str) -> int:
    store = archived.store
    db_id = store.create("pairs", "lsm").db_id
    job_id = store.manifest.jobs.enqueue(JobKind.VERIFY, db_id, max_attempts=1)
    assert store.manifest.jobs.claim(worker, [JobKind.VERIFY]) is not None
    archived.wait_archived()
    return job_id


def require_pending(path: Path, job_id: int) -> None:
    with quire.open(path, "r") as store:
        job = store.manifest.jobs.get(job_id)
    assert (job.state, job.record.failures, job.lease) == (JobState.PENDING, 0, None)


@pytest.mark.parametrize("takeover", [False, True])
@pytest.mark.parametrize("worker", ["owner:1:worker", "elsewhere"])
def test_after_a_restore(tmp_path: Path, worker: str, takeover: bool) -> None:
    with archived_store(tmp_path) as archived:
        job_id = claim_a_job(archived, worker)
        require_pending(archived.restore(takeover=takeover), job_id)


def test_after_a_clone(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        job_id = claim_a_job(archived, "elsewhere")
        quire.clone(str(archived.bucket), tmp_path / "clone")
        require_pending(tmp_path / "clone", job_id)


def test_after_a_promotion(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        job_id = claim_a_job(archived, "elsewhere")
        with Standby(str(archived.bucket), tmp_path / "standby") as standby:
            standby.promote()
        require_pending(tmp_path / "standby", job_id)


def test_after_a_backup_is_restored(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        job_id = claim_a_job(archived, "elsewhere")
        archived.store.backup(str(tmp_path / "backup"))
        quire.restore(str(tmp_path / "backup"), tmp_path / "restored")
        require_pending(tmp_path / "restored", job_id)


def verified(store: Store) -> LastVerification | None:
    with store.manifest.read() as txn:
        return last_verification(txn)


def test_a_copy_of_a_verified_store_is_not_verified(tmp_path: Path) -> None:
    """`doctor` said of files that had just been restored that no damage had been found in them."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        with Standby(str(archived.bucket), tmp_path / "standby") as standby:
            standby.poll()
            archived.store.heavy.verify(runner="threads")
            assert verified(archived.store) is not None
            archived.wait_archived()
            archived.store.backup(str(tmp_path / "backup"))
            archived.restore()
            quire.clone(str(archived.bucket), tmp_path / "clone")
            quire.restore(str(tmp_path / "backup"), tmp_path / "from-backup")
            standby.poll()
            standby.promote()
    for name in ("restored", "clone", "from-backup", "standby"):
        with quire.open(tmp_path / name, "r") as store:
            assert verified(store) is None, name
    with quire.open(tmp_path / "from-backup") as store:
        store.heavy.verify(runner="threads")
        assert verified(store) is not None
