"""A store per test. Afterwards its manifest must be clean, its feed must replay, and every promised copy must exist."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.testing.manifest import assert_clean
from tests.jobs.job_store import JobStore

_names = itertools.count(1)


@pytest.fixture(params=["path", "memory"])
def job_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JobStore]:
    """A store whose objects are in a directory, and one whose objects are in memory."""
    url = str(tmp_path / "objects") if request.param == "path" else f"memory://jobs-{next(_names)}"
    yield from _checked_store(tmp_path, url)


@pytest.fixture
def local_store(tmp_path: Path) -> Iterator[JobStore]:
    """A store whose objects are in a directory."""
    yield from _checked_store(tmp_path, str(tmp_path / "objects"))


def _checked_store(tmp_path: Path, url: str) -> Iterator[JobStore]:
    job_store = JobStore(str(tmp_path), url)
    try:
        yield job_store
        if job_store.manifest.writer.failure is None:
            assert_clean(job_store.manifest, leaks=True)
            if not job_store.is_damaged:
                job_store.assert_sound()
            job_store.assert_replays()
    finally:
        job_store.close()
