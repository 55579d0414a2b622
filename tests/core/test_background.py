"""Thread pools: work starts when it is requested, and what the end of a generator's pool waits for."""

from __future__ import annotations

import ast
import gc
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from quire.core import background
from quire.core.background import thread_pool
from tests.rules.tree import SRC

SECONDS = 60.0


def test_work_is_not_left_waiting_while_a_thread_waits_for_the_end_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: the wake-up for an idle thread of the pool went to the thread that waited in `stop`."""
    monkeypatch.setattr(background, "LINGER_SECONDS", SECONDS)
    pool = background.Background("test", threads_max=2)
    running, may_end, ran = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        running.set()
        may_end.wait(SECONDS)

    long = pool.task(run)
    long.ask()
    assert running.wait(SECONDS)
    later = pool.task(lambda: None)
    later.ask(0.2)  # an idle thread waits for it
    stopping = threading.Thread(target=long.stop)
    stopping.start()
    while not long.is_stopped:
        time.sleep(0.001)
    later.stop()  # the idle thread now waits behind the one in `stop`
    time.sleep(0.3)
    pool.task(ran.set).ask()
    assert ran.wait(SECONDS / 4)
    may_end.set()
    stopping.join(SECONDS)
    assert not stopping.is_alive()
    pool.stop()


def results(*calls: Callable[[], object]) -> Iterator[object]:
    with thread_pool(2, "test-pool") as pool:
        for future in [pool.submit(call) for call in calls]:
            yield future.result()


def test_a_generator_that_ends_has_waited_for_its_calls() -> None:
    assert list(results(lambda: 1, lambda: 2, lambda: 3)) == [1, 2, 3]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-pool")]


def test_a_failure_waits_for_the_calls_that_are_running() -> None:
    running, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def fail() -> None:
        running.wait(SECONDS)
        threading.Timer(0.05, may_end.set).start()
        raise ValueError("planted")

    def run() -> None:
        running.set()
        may_end.wait(SECONDS)
        ended.set()

    with pytest.raises(ValueError, match="planted"):
        list(results(fail, run))
    assert ended.is_set()


def test_the_collector_closes_an_abandoned_generator_without_waiting_for_its_calls() -> None:
    """A generator that an exception had abandoned was collected in a thread that was starting, which waits for no thread: the
    process stopped there for ever."""
    running, may_end = threading.Event(), threading.Event()

    def run() -> None:
        running.set()
        may_end.wait(SECONDS)

    generator = results(lambda: 1, run)
    assert next(generator) == 1
    running.wait(SECONDS)
    cycle = SimpleNamespace(generator=generator)  # as the traceback of an exception has it
    cycle.itself = cycle
    del generator, cycle
    collecting = threading.Thread(target=gc.collect)
    collecting.start()
    try:
        collecting.join(SECONDS / 2)
        assert not collecting.is_alive()
    finally:
        may_end.set()
        collecting.join()


def test_no_generator_holds_an_executor_whose_end_joins_threads() -> None:
    def joins(block: ast.With) -> bool:
        return any("ThreadPoolExecutor(" in ast.unparse(item.context_expr) for item in block.items)

    blocks = [
        (path.name, node.lineno, node)
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.With) and joins(node)
    ]
    assert len(blocks) > 3
    yielding = (ast.Yield, ast.YieldFrom)
    assert [place for *place, block in blocks if any(isinstance(node, yielding) for node in ast.walk(block))] == []
