"""Guards and waits: blocking and awaitable, with timeouts, with the error of the batch, and when the writer fails."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from quire.core.errors import (
    AlreadyExists,
    DiskFull,
    ManifestDamaged,
    QuireError,
    StorageFault,
    StoreClosed,
    StoreUnusable,
    TimedOut,
)
from quire.core.settings import ManifestSettings
from quire.durable.failpoints import armed
from quire.manifest import tables as t
from quire.manifest.checked_point import SUFFIX
from quire.manifest.guard import GenerationWait, ManifestGuard, Receipt
from quire.manifest.ops.base import Component
from quire.manifest.records import DbKind
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean, assert_replays
from tests.manifest.batches import outcome
from tests.manifest.helpers import Hold, chunk, eventually, held, register

Waitable = ManifestGuard | GenerationWait


# ── one guard ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_guard_is_not_done_before_its_commit_is(manifest: ManifestStore) -> None:
    for point in ("manifest.commit.applied", "manifest.commit.flushed"):
        with held(manifest, point):
            guard = manifest.submit([register(1)] if point.endswith("applied") else [chunk(1)])
            assert not guard.is_done()
            with pytest.raises(TimedOut):
                guard.result(0.01)
        assert guard.result(30).sequence


def test_a_guard_can_be_waited_for_again_after_a_timeout_and_by_many_threads(manifest: ManifestStore) -> None:
    results: list[Receipt | QuireError] = []
    with held(manifest):
        guard = manifest.submit([register(1)])
        for _ in range(3):
            with pytest.raises(TimedOut):
                guard.result(0.005)
        threads = [threading.Thread(target=lambda: results.append(outcome(guard))) for _ in range(8)]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(30)
    assert [getattr(result, "sequence", None) for result in results] == [1] * 8
    assert guard.result(0) == guard.result()


def test_a_wait_that_times_out_as_the_commit_ends_is_harmless(manifest: ManifestStore) -> None:
    """Hazard: the writer releases a waiter that has just timed out."""
    manifest.submit([register(1)]).result()
    deadline = time.monotonic() + 1.0
    number = 0
    while time.monotonic() < deadline:
        guards = [manifest.submit([chunk(number := number + 1)]) for _ in range(4)]
        for index, guard in enumerate(guards):
            try:
                guard.result(0.0002 * index)
            except TimedOut:
                pass
    assert manifest.writer.failure is None
    assert manifest.submit([chunk(number + 1)]).result(30)


def test_a_guard_keeps_no_wakeup_when_nothing_waits(manifest: ManifestStore) -> None:
    """Hazard: the guards of a pipeline kept descriptors of threads that had ended."""
    with held(manifest):
        guard = manifest.submit([register(1)])
        with pytest.raises(TimedOut):
            guard.result(0.005)
        assert guard.waiter is None
        thread = threading.Thread(target=guard.result, args=(30,))
        thread.start()
        assert eventually(lambda: guard.waiter is not None)
    thread.join(30)
    assert guard.waiter is None


def test_a_process_without_descriptors_can_still_wait(manifest: ManifestStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: a thread that waits for the first time needs a descriptor; at EMFILE, its commit failed with an
    OSError."""

    def fail(*_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "eventfd", fail)
    results: list[object] = []

    def wait() -> None:
        try:
            results.append(guard.result(30))
        except Exception as error:
            results.append(error)

    with held(manifest):
        guard = manifest.submit([register(1)])
        thread = threading.Thread(target=wait)
        thread.start()
        assert not eventually(lambda: bool(results), 0.05)
    thread.join(30)
    assert [type(result) for result in results] == [Receipt]


def test_every_wait_gets_the_error_of_the_batch(manifest: ManifestStore) -> None:
    manifest.submit([register(1)]).result()
    guard = manifest.submit([register(1)])
    for _ in range(2):
        with pytest.raises(AlreadyExists):
            guard.result(30)
    with pytest.raises(AlreadyExists):
        asyncio.run(_await(guard))


async def _await(waitable: object) -> object:
    return await waitable  # type: ignore[misc]  # guards and waits alike


# ── asyncio ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_many_guards_are_awaited_together(manifest: ManifestStore) -> None:
    async def run() -> list[object]:
        guards = [manifest.submit([register(n)]) for n in range(1, 301)]
        failing_at = manifest.submit([register(1)])
        return await asyncio.gather(*map(_await, guards), _await(failing_at), return_exceptions=True)

    *receipts, error = asyncio.run(run())
    assert [getattr(receipt, "sequence", None) for receipt in receipts] == list(range(1, 301))
    assert isinstance(error, AlreadyExists)


def test_awaiting_does_not_block_the_loop_and_can_be_cancelled(manifest: ManifestStore) -> None:
    async def run() -> int:
        ticks = 0
        with held(manifest) as hold:
            guard = manifest.submit([register(1)])
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(_await(guard), 0.02)
            task = asyncio.create_task(_await(guard))
            while ticks < 5:
                await asyncio.sleep(0.001)
                ticks += 1
            hold.release()
            await task
        return ticks

    assert asyncio.run(run()) == 5


def test_a_loop_that_was_closed_while_waiting_does_not_harm_the_writer(manifest: ManifestStore) -> None:
    with held(manifest):
        guard = manifest.submit([register(1)])

        async def give_up() -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(_await(guard), 0.01)

        asyncio.run(give_up())
    assert guard.result(30).sequence == 1
    assert manifest.submit([register(2)]).result(30).sequence == 2


# ── generations ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_generation_is_waited_for_with_a_timeout(manifest: ManifestStore) -> None:
    assert manifest.writer.when_generation(Component.DATABASE, 0).result(0) == 0
    with pytest.raises(TimedOut, match="generation 1 of DATABASE"):
        manifest.writer.when_generation(Component.DATABASE, 1).result(0.01)
    generations: list[int] = []
    thread = threading.Thread(
        target=lambda: generations.append(manifest.writer.when_generation(Component.DATABASE, 2).result(30))
    )
    thread.start()
    manifest.submit([register(1)]).result()
    assert not generations
    manifest.submit([register(2)]).result()
    thread.join(30)
    assert generations == [2]


def test_a_generation_is_awaited(manifest: ManifestStore) -> None:
    async def run() -> object:
        task = asyncio.create_task(_await(manifest.writer.when_generation(Component.CHUNK, 1)))
        await asyncio.sleep(0)
        await manifest.submit([register(1), chunk(1)])
        return await task

    assert asyncio.run(run()) == 1


def test_waiters_for_a_generation_are_notified_when_the_manifest_is_closed(path: str) -> None:
    manifest = ManifestStore.open(path)
    errors: list[QuireError] = []

    def wait() -> None:
        try:
            manifest.writer.when_generation(Component.JOB, 5).result(30)
        except QuireError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.02)
    manifest.close()
    thread.join(30)
    assert isinstance(errors[0], StoreClosed)


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_waiters_for_a_generation_are_notified_when_the_manifest_accepts_no_more_changes(
    manifest: ManifestStore,
) -> None:
    """Hazard: after a recount found a broken rule, waits for a change did not end before the manifest was closed."""
    errors: list[object] = []

    def wait(waitable: GenerationWait) -> None:
        try:
            waitable.result(30)
        except StoreUnusable as error:
            errors.append(error)

    waits = [manifest.writer.when_generation(Component.WAL, 9), manifest.writer.when_change(9)]
    threads = [threading.Thread(target=wait, args=(waitable,)) for waitable in waits]
    for thread in threads:
        thread.start()
    manifest.writer.stop_for(ManifestDamaged("a broken rule"))
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2


@contextmanager
def failing_at(number: int, point: str) -> Iterator[None]:
    def fail(_name: str) -> None:
        raise OSError(number, "injected failure")

    with armed(point, fail):
        yield


class FailingManifest:
    """A manifest whose next commit fails, with batches in the queue and threads that wait for guards and
    generations."""

    def __init__(self, path: str, settings: ManifestSettings | None = None) -> None:
        self.manifest = ManifestStore.open(path, settings=settings)
        self.path = path
        self.outcomes: list[Receipt | QuireError] = []
        self.threads: list[threading.Thread] = []

    def wait(self, waitable: Waitable) -> None:
        def wait_for_error() -> None:
            try:
                waitable.result(30)
            except QuireError as error:
                self.outcomes.append(error)

        self.threads.append(threading.Thread(target=wait_for_error))
        self.threads[-1].start()

    def provoke(self, number: int, point: str, batches: int = 200) -> None:
        """One commit succeeds; the next one, with everything that is queued, fails at `point`."""
        manifest = self.manifest
        manifest.submit([register(1)]).result()
        hold = Hold()
        with armed("manifest.commit.applied", hold):
            first = manifest.submit([chunk(1)])
            assert hold.reached.wait(60)
            guards = [manifest.submit([chunk(n)]) for n in range(2, batches)]
            for guard in (*guards[::20], guards[-1]):
                self.wait(guard)
            self.wait(manifest.writer.when_generation(Component.CHUNK, 10_000))
            time.sleep(0.02)
            with failing_at(number, point):
                hold.release()
                self.outcomes.append(outcome(first, 30) if point.endswith("durable") else outcome(guards[-1], 30))
                for thread in self.threads:
                    thread.join(30)
        assert not any(thread.is_alive() for thread in self.threads), "a waiter was never notified"
        assert all(guard.is_done() for guard in guards)

    def assert_unusable(self) -> None:
        assert all(isinstance(outcome, StoreUnusable) for outcome in self.outcomes), self.outcomes
        with pytest.raises(StoreUnusable, match="writer stopped") as caught:
            self.manifest.submit([chunk(500)])
        assert isinstance(caught.value.__cause__, StorageFault)
        assert self.manifest.writer.failure is caught.value
        self.manifest.close()

    def assert_reopens(self) -> None:
        with ManifestStore.open(self.path) as reopened:
            assert_clean(reopened, leaks=True)
            assert_replays(reopened)
            assert reopened.submit([chunk(1000)]).result(30)


@pytest.mark.parametrize("point", ["manifest.commit.flushed", "manifest.commit.durable"])
@pytest.mark.parametrize("seconds", [10.0, 1e-9], ids=["one group", "carried over"])
def test_a_doubtful_commit_stops_the_writer_and_every_waiter_gets_the_reason(
    path: str, point: str, seconds: float
) -> None:
    poisoned = FailingManifest(path, ManifestSettings(group_seconds_max=seconds, group_ops_max=4096))
    poisoned.provoke(errno.EIO, point)
    poisoned.assert_unusable()
    poisoned.assert_reopens()


def test_a_close_whose_last_commit_is_in_doubt_records_no_checked_point(path: str) -> None:
    """Hazard: the next open trusted the state that this commit left."""
    manifest = ManifestStore.open(path)
    manifest.submit([register(1)]).result()
    hold = Hold()
    with armed("manifest.commit.applied", hold):
        manifest.submit([chunk(1)])
        assert hold.reached.wait(60)
        before = checked_point(path)
        closing = threading.Thread(target=manifest.close)
        closing.start()
        assert eventually(lambda: manifest.writer.failure is not None)
        with failing_at(errno.EIO, "manifest.commit.flushed"):
            hold.release()
            closing.join(60)
    assert isinstance(manifest.writer.failure, StoreUnusable)
    assert checked_point(path) == before


def checked_point(path: str) -> bytes | None:
    file = Path(path + SUFFIX)
    return file.read_bytes() if file.exists() else None


def test_a_full_disk_reported_after_the_commit_is_a_doubtful_commit_too(path: str) -> None:
    poisoned = FailingManifest(path)
    poisoned.provoke(errno.ENOSPC, "manifest.commit.durable")
    poisoned.assert_unusable()
    poisoned.assert_reopens()


def test_a_full_disk_before_the_commit_fails_the_group_and_the_writer_continues(manifest: ManifestStore) -> None:
    manifest.submit([register(1)]).result()
    with held(manifest, "manifest.commit.durable") as hold, failing_at(errno.ENOSPC, "manifest.commit.flushed"):
        guards = [manifest.submit([chunk(n)]) for n in range(1, 10)]
        hold.release()
        for guard in guards:
            with pytest.raises(DiskFull):
                guard.result(30)
    with manifest.read() as txn:
        assert txn.count(t.CHUNK_CATALOG) == 0
    assert manifest.submit([chunk(1)]).result(30).sequence == 2


def test_every_waiter_is_notified_of_a_bug_in_the_writer(path: str) -> None:
    manifest = ManifestStore.open(path)

    def bug(_name: str) -> None:
        raise SystemExit("a bug that is no Exception")

    with armed("manifest.commit.applied", bug):
        guard = manifest.submit([register(1)])
        with pytest.raises(StoreUnusable, match="SystemExit"):
            guard.result(30)
    with pytest.raises(StoreUnusable):
        manifest.submit([register(2)])
    manifest.close()
    with ManifestStore.open(path) as reopened:
        assert reopened.register_db("x", DbKind.PAGES) == 1


def test_every_waiter_is_notified_even_if_logging_fails(path: str) -> None:
    """Hazard: a log processor raised while the writer was stopping, before it had notified the waiters."""
    poisoned = FailingManifest(path)
    structlog.configure(processors=[_broken_processor])
    try:
        poisoned.provoke(errno.EIO, "manifest.commit.flushed")
        poisoned.assert_unusable()
    finally:
        structlog.reset_defaults()
    poisoned.assert_reopens()


def _broken_processor(_logger: object, _level: str, _event: object) -> str:
    raise ZeroDivisionError("a bug of the application")


def test_a_doubtful_commit_stops_a_group_that_is_retried_batch_by_batch(path: str) -> None:
    manifest = ManifestStore.open(path)
    manifest.submit([register(1)]).result()
    errors = iter([ValueError("an unexpected error")])

    def raise_once(_: str) -> None:
        for error in errors:
            raise error

    with (
        held(manifest, "manifest.commit.durable") as hold,
        armed("manifest.commit.applied", raise_once),
        armed("manifest.commit.flushed", "1*off->raise:EIO"),
    ):
        guards = [manifest.submit([chunk(number)]) for number in (1, 2, 3, 4)]
        hold.release()
        kinds = [type(outcome(guard, 30)) for guard in guards]
    assert kinds == [Receipt, StoreUnusable, StoreUnusable, StoreUnusable]
    manifest.close()
    with ManifestStore.open(path) as reopened, reopened.read() as txn:
        assert {key[1] for key, _ in txn.scan(t.CHUNK_CATALOG)} <= {1, 2}, (
            "nothing is written after the doubtful commit"
        )
