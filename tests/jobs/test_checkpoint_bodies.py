"""Page bodies of a slot: windows of any size yield the same pages, from frames, chains and zeros; a damaged frame is
reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.jobs.checkpoint import run
from quire.manifest.records import JobState
from tests.jobs.checkpoint_child import Owner, images
from tests.pages.engine_harness import PAGE, Model, write


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    yield owner
    owner.stop()


@pytest.mark.parametrize("pages", [1, 2, 3, 7, 1_000])
def test_windows_and_runs_of_any_size_give_the_same_pages(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """Frames that are not adjacent, in several segments, above a chain of a base and deltas, and pages of zeros."""
    monkeypatch.setattr(run, "WINDOW_BYTES", pages * PAGE)
    monkeypatch.setattr(run, "RUN_BYTES", pages * (PAGE + 64))
    store, model = owner.database(), Model()
    write(store, model, images(*range(0, 16, 2)))  # the odd pages are logged as zeros (P15)
    owner.checkpoint(store)
    for changed in ((3,), (5, 6), (15, 1, 8), tuple(range(0, 16, 3))):
        write(store, model, images(*changed))
        owner.engine.flush(1)
        write(store, model, images(changed[0]))
        owner.checkpoint(store)
        owner.assert_newest(model)
    owner.settle()
    owner.assert_newest(model)


def test_an_altered_frame_is_reported_and_nothing_is_written(owner: Owner) -> None:
    store, model = owner.database(), Model()
    written = images(*range(4))
    write(store, model, written)
    owner.engine.flush(1)
    (path,) = Path(owner.root, "pages", "00000001", "wal").glob("*.seg")
    data = bytearray(path.read_bytes())
    offset = data.index(bytes(written[2])[:64])
    data[offset + 100] ^= 1
    path.write_bytes(data)
    job_id = owner.enqueue()
    owner.worker().drain()
    assert owner.state(job_id) is JobState.FAILED_PERMANENT
    assert "a frame of the WAL differs from what was written" in owner.job(job_id).record.error
    assert "frame=2" in owner.job(job_id).record.error
    assert not owner.objects()
    data[offset + 100] ^= 1
    path.write_bytes(data)


@given(st.lists(st.integers(0, 40), unique=True, min_size=1).map(sorted), st.integers(1, 9))
def test_runs_are_consecutive_and_cover_all_numbers(numbers: list[int], longest: int) -> None:
    runs = [numbers[start:stop] for start, stop in run._runs(np.array(numbers, np.int64), longest)]
    assert [number for run in runs for number in run] == numbers
    assert all(len(run) <= longest and run == list(range(run[0], run[0] + len(run))) for run in runs)
