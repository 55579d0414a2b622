"""Growing the map: attempted at the watermark, required when it is full, and never during a copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from quire.core.errors import TimedOut
from quire.core.limits import MIB
from quire.core.settings import ManifestSettings
from quire.manifest import tables as t
from quire.manifest.env import ManifestEnv
from quire.manifest.row_image import RowImage, image
from quire.manifest.store import ManifestStore
from quire.manifest.writer import EARLY_GROWTH_PAUSE_SECONDS
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean, assert_replays, difference, dump
from tests.manifest.batches import outcome
from tests.manifest.helpers import chunk, register

LOW = ManifestSettings(map_bytes=2 * MIB, map_watermark=0.01, grow_wait_seconds=0.05)


@contextmanager
def captured() -> Iterator[list[Any]]:
    with capture_logs() as logs:
        yield logs
    structlog.reset_defaults()


def test_a_long_reader_does_not_fail_commits_that_fit(path: str) -> None:
    """Hazard: at the watermark, with most of the map still free, every commit failed because a reader prevented
    growth."""
    clock = ManualClock()
    with captured() as logs, ManifestStore.open(path, settings=LOW, clock=clock) as manifest:
        with manifest.read():
            for n in range(20):
                manifest.submit([register(1) if n == 0 else chunk(n)]).result(30)
        reports = [log for log in logs if log["event"] == "manifest.map_nearly_full"]
        assert len(reports) == 1, "once, not at every commit"
        assert threading.current_thread().name in reports[0]["error"], "the report names the thread of the reader"
        before = manifest.env.info()["map_size"]
        manifest.submit([chunk(100)]).result(30)
        assert manifest.env.info()["map_size"] == before, "it is not attempted again at once …"
        clock.advance(EARLY_GROWTH_PAUSE_SECONDS)
        manifest.submit([chunk(101)]).result(30)
        assert manifest.env.info()["map_size"] > before, "… but after a while"
        assert_clean(manifest, leaks=True)


def test_a_copy_made_of_rows_grows_as_its_original_did(path: str) -> None:
    """Hazard: restoring a manifest whose map had grown failed with `DiskFull`, far below `map_bytes_max`."""
    settings = ManifestSettings(map_bytes=MIB)
    with ManifestStore.open(path, settings=settings) as manifest, RowImage(path + "2", settings) as copy:
        for n in range(20_000):
            guard = manifest.submit([register(1) if n == 0 else chunk(n)])
        guard.result(30)
        assert manifest.env.info()["map_size"] > MIB
        copy.replace(lambda: image(manifest.read, 0))
        with manifest.read() as ours, copy.read() as theirs:
            assert list(ours.raw_scan(t.CHUNK_CATALOG)) == list(theirs.raw_scan(t.CHUNK_CATALOG))
        with RowImage(path + "3", settings) as second:
            second.apply([list(image(copy.read, 0))])
            with copy.read() as ours, second.read() as theirs:
                assert list(ours.raw_scan(t.CHUNK_CATALOG)) == list(theirs.raw_scan(t.CHUNK_CATALOG))


def test_early_growth_is_not_attempted_at_every_commit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt briefly blocks new readers."""
    attempts: list[float | None] = []
    grow = ManifestEnv.grow

    def record_and_grow(env: ManifestEnv, wait_seconds: float | None = None) -> None:
        attempts.append(wait_seconds)
        grow(env, wait_seconds)

    monkeypatch.setattr(ManifestEnv, "grow", record_and_grow)
    with ManifestStore.open(path, settings=LOW, clock=ManualClock()) as manifest, manifest.read():
        for n in range(20):
            manifest.submit([register(1) if n == 0 else chunk(n)]).result(30)
    assert len(attempts) == 1


def test_a_full_map_waits_for_the_reader_and_fails_only_then(path: str) -> None:
    settings = ManifestSettings(map_bytes=MIB, map_watermark=1.0, grow_wait_seconds=0.05)
    with ManifestStore.open(path, settings=settings) as manifest:
        manifest.submit([register(1)]).result()
        with manifest.read():
            results = [outcome(manifest.submit([chunk(n * 1000 + m) for m in range(1000)])) for n in range(20)]
        assert not isinstance(results[0], Exception)
        assert isinstance(results[-1], TimedOut)
        manifest.submit([chunk(100_000)]).result(60)
        assert_clean(manifest, leaks=True)
        assert_replays(manifest)


def test_a_garbage_collected_transaction_does_not_prevent_growth(path: str) -> None:
    settings = ManifestSettings(map_bytes=MIB, grow_wait_seconds=0.05)
    with ManifestStore.open(path, settings=settings) as manifest:
        manifest.read()
        manifest.submit([register(1)]).result()
        for start in range(0, 20_000, 1000):
            manifest.submit([chunk(start + n) for n in range(1000)]).result(60)
        assert manifest.env.info()["map_size"] > MIB


class SlowCopy:
    """LMDB's environment, with a copy that takes as long as a test requires."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def copy(self, path: str, compact: bool) -> None:
        self.begun.set()
        assert self.may_end.wait(30)
        self._env.copy(path, compact=compact)


def test_the_map_does_not_grow_during_a_copy(path: str) -> None:
    """Hazard: py-lmdb makes growth wait for the copy, and meanwhile rejects every transaction of the process."""
    with ManifestStore.open(path, settings=ManifestSettings(map_bytes=MIB)) as manifest:
        manifest.submit([register(1), chunk(1)]).result()
        rows = dump(manifest)
        slow: Any = SlowCopy(manifest.env._env)
        manifest.env._env = slow
        copier = threading.Thread(target=manifest.env.copy, args=(path + ".copy",))
        copier.start()
        assert slow.begun.wait(60)
        with pytest.raises(TimedOut):
            manifest.env.grow(0.01)
        slow.may_end.set()
        copier.join(30)
        manifest.env.grow(1)
        assert manifest.env.info()["map_size"] == 2 * MIB
    with ManifestStore.open(path + ".copy") as copy:
        assert not difference(rows, dump(copy))
