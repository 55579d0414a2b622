"""The writer's queue: order, limits, and how long it waits."""

from __future__ import annotations

import threading
import time

import pytest

from quire.core.errors import InternalError, Overloaded, StoreClosed
from quire.manifest.guard import CommitNotifier, ManifestGuard
from quire.manifest.queue import BatchQueue
from tests.manifest.helpers import chunk

NOTIFIER = CommitNotifier()


def batch() -> ManifestGuard:
    return ManifestGuard((chunk(1),), None, NOTIFIER)


def test_queued_batches_are_taken_at_once_and_in_order() -> None:
    queue, batches = BatchQueue(10), [batch() for _ in range(3)]
    for guard in batches:
        queue.put(guard, 1, None)
    taken = queue.take(0, 0)
    assert taken is not None
    assert [id(guard) for guard in taken] == [id(guard) for guard in batches]


def test_a_full_queue_blocks_and_then_rejects() -> None:
    queue = BatchQueue(2)
    queue.put(batch(), 2, None)
    with pytest.raises(Overloaded):
        queue.put(batch(), 1, 0.01)


def test_blocked_producers_are_admitted_by_admit() -> None:
    queue = BatchQueue(1)
    queue.put(batch(), 1, None)
    producer = threading.Thread(target=queue.put, args=(batch(), 1, 30))
    producer.start()
    while not queue._waiting_for_room:
        time.sleep(0.001)
    assert len(queue.take(0, 0) or ()) == 1
    producer.join(0.02)
    assert producer.is_alive(), "not before the writer calls `admit`, just before its sync"
    queue.admit()
    producer.join(30)
    assert len(queue.take(0, 0) or ()) == 1


def test_taking_from_an_empty_queue_admits_blocked_producers() -> None:
    """Hazard: a group that fails before its sync never calls `admit`; producers and writer would wait for each
    other."""
    queue = BatchQueue(1)
    queue.put(batch(), 1, None)
    producer = threading.Thread(target=queue.put, args=(batch(), 1, 30))
    producer.start()
    while not queue._waiting_for_room:
        time.sleep(0.001)
    assert len(queue.take(0, 0) or ()) == 1
    assert len(queue.take(0, 0) or ()) == 1
    producer.join(30)


def test_callers_that_were_answered_together_are_taken_together() -> None:
    """Hazard: the first caller to return is committed alone, and all others wait for the next sync."""
    queue = BatchQueue(100)

    def submit_again() -> None:
        for _ in range(3):
            time.sleep(0.005)
            queue.put(batch(), 1, None)

    callers = threading.Thread(target=submit_again)
    callers.start()
    assert len(queue.take(3, 10) or ()) == 3
    callers.join()


def test_waiting_for_more_batches_ends() -> None:
    queue = BatchQueue(100)
    queue.put(batch(), 1, None)
    started = time.monotonic()
    assert len(queue.take(5, 0.02) or ()) == 1
    assert time.monotonic() - started < 5


def test_a_queue_that_rejects_is_drained_and_then_ends() -> None:
    queue, refusal = BatchQueue(10), StoreClosed("closed")
    queue.put(batch(), 1, None)
    assert queue.refuse(refusal, drain=False) == []
    with pytest.raises(StoreClosed):
        queue.put(batch(), 1, None)
    assert len(queue.take(0, 0) or ()) == 1
    assert queue.take(0, 0) is None


def test_draining_returns_queued_batches_and_wakes_blocked_producers() -> None:
    queue, raised = BatchQueue(1), threading.Event()
    queue.put(batch(), 1, None)

    def wait() -> None:
        with pytest.raises(StoreClosed):
            queue.put(batch(), 1, 30)
        raised.set()

    producer = threading.Thread(target=wait)
    producer.start()
    while not queue._waiting_for_room:
        time.sleep(0.001)
    assert len(queue.refuse(StoreClosed("closed"), drain=True)) == 1
    assert raised.wait(30)
    producer.join()


def test_the_taker_must_not_wait_for_itself() -> None:
    queue = BatchQueue(1, threading.current_thread())
    queue.put(batch(), 1, None)
    with pytest.raises(InternalError):
        queue.put(batch(), 1, None)
