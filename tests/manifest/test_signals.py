"""Exceptions of signal handlers (KeyboardInterrupt) can be raised anywhere: no lock stays held and no slot stays in
use."""

from __future__ import annotations

import pytest

from tests.manifest.helpers import finish, python

INTERRUPTED = """
import asyncio, gc, logging, random, signal, sys, threading, time
from quire.core.errors import Overloaded, QuireError, TimedOut
from quire.core.settings import ManifestSettings
from quire.manifest import tables as t
from quire.manifest.ops.base import Component
from quire.manifest.ops.local import RecordMetric
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import chunk, register

# Interrupted in its own code, Python's logging keeps its lock, and the next caller (asyncio, about a destroyed task) hangs.
logging.disable(logging.CRITICAL)

class Struck(KeyboardInterrupt):
    "Raised by the handler."

is_hot, struck, done = False, 0, 0

def strike(*_):
    "Raise, and set the next timer: often within microseconds, sometimes within the time of a sync."
    global is_hot
    signal.setitimer(signal.ITIMER_REAL, random.choice((0.00005, 0.0002, 0.001, 0.004)) * (0.5 + random.random()))
    if is_hot:
        is_hot = False
        raise Struck

def storm(use, seconds=1.5):
    "Call it repeatedly while signals interrupt it; it may raise only its documented errors."
    global is_hot, struck, done
    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            is_hot = True
            use()
            is_hot = False
            done += 1
        except Struck:
            struck += 1
        except (Overloaded, TimedOut):
            is_hot = False
            done += 1
    is_hot = False
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    assert struck > 20 and done, (struck, done)

settings = ManifestSettings(map_bytes=1 << 20, queue_ops_max=3, group_ops_max=3, grow_wait_seconds=5)
manifest = ManifestStore.open(sys.argv[1], settings=settings)
manifest.submit([register(1)]).result()
"""

AFTERWARDS = """
gc.collect()
manifest.env.gate.exclusive(5, lambda: None)  # no visitor is left inside
manifest.submit([chunk(1)]).result(30)
with manifest.read() as txn:
    assert txn.count(t.CHUNK_CATALOG) == 1
assert not manifest.env.gate._inside
assert not manifest.env.gate._leaving
assert not manifest.writer.notifier._threads and not manifest.writer.notifier._loops
assert not manifest.writer._queue._waiting_for_room
for lock in (manifest.env.gate._exclusive_lock, manifest.writer.notifier._joining):
    assert not lock.locked()
assert not manifest.writer._queue.lock._is_owned()
assert manifest.writer._queue._operations == 0 and not manifest.writer._queue._batches
assert manifest.writer.when_generation(Component.DATABASE, 1).result(5) == 1
manifest.close()
print("ok")
"""

USES = {
    "read": """
def use():
    with manifest.read() as txn:
        for _ in txn.scan(t.DB):
            txn.get(t.DB, 1)
""",
    "submit and wait": """
def use():
    manifest.submit([RecordMetric(1, 1, [1.0])]).result(60)
""",
    "submit to a full queue": """
def use():
    for _ in range(4):
        guard = manifest.submit([RecordMetric(1, 1, [1.0])] * 3, timeout=0.001)
    guard.result(0.0005)
""",
    "wait for a generation": """
def use():
    manifest.writer.when_generation(Component.JOB, 99).result(0.002)
""",
    "wait for one that others wait for": """
stop = threading.Event()
def others():
    while not stop.is_set():
        guard = manifest.submit([RecordMetric(2, 2, [1.0])])
        shared.append(guard)
        guard.result(60)
shared = [manifest.submit([RecordMetric(2, 2, [1.0])])]
threads = [threading.Thread(target=others) for _ in range(2)]
for thread in threads:
    thread.start()
def use():
    shared[-1].result(60)
""",
    "await": """
async def several():
    await asyncio.gather(*[manifest.submit([RecordMetric(1, 1, [1.0])], timeout=1) for _ in range(3)])
def use():
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(several())
    finally:
        loop.close()
""",
    "grow": """
# a thread that repeatedly needs exclusive access, so that readers find the gate closed
stop = threading.Event()
def alone():
    while not stop.is_set():
        manifest.env.gate.exclusive(5, lambda: time.sleep(0.0005))
        time.sleep(0.0005)
threads = [threading.Thread(target=alone)]
threads[0].start()
def use():
    with manifest.read() as txn, manifest.read() as again:
        again.get(t.DB, 1)
    manifest.env.info()
""",
    "exclusive": """
# as `close` does, while other threads read
stop = threading.Event()
def others():
    while not stop.is_set():
        with manifest.read() as txn:
            txn.get(t.DB, 1)
threads = [threading.Thread(target=others) for _ in range(2)]
for thread in threads:
    thread.start()
def use():
    manifest.env.gate.exclusive(0.01, lambda: None)
""",
}

JOIN_THREADS = """
if "stop" in globals():
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a thread hangs"
"""


HANDLER_COMMITS = """
import signal, sys, threading
from quire.durable.failpoints import armed
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import Hold, chunk, register

manifest = ManifestStore.open(sys.argv[1])
manifest.submit([register(1)]).result()
hold, handled = Hold(), []

def commit_and_wait(*_):
    hold.release()  # the interrupted wait's batch becomes durable while this handler waits
    handled.append(manifest.submit([chunk(2)]).result().sequence)

def strike():
    assert hold.reached.wait(60)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

signal.signal(signal.SIGUSR1, commit_and_wait)
with armed("manifest.commit.applied", hold):
    guard = manifest.submit([chunk(1)])
    threading.Timer(0.05, strike).start()
    assert guard.result().sequence == 2
assert handled == [3]
manifest.close()
print("ok")
"""


def test_a_signal_handler_may_commit_while_its_thread_waits_for_a_commit(path: str) -> None:
    """Hazard: both waits slept at one eventfd, and the handler consumed the wake-up of the wait that it had interrupted."""
    assert finish(python(HANDLER_COMMITS, path)).endswith("ok\n")


HANDLER_INTERRUPTS_A_COMMIT = """
import signal, sys
from quire.core.errors import InvalidInput
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import chunk, register

class Striking(list):
    "The batches of the queue; the signal arrives when one is added, under the queue's lock."
    def append(self, guard):
        manifest.writer._queue._batches = []
        signal.raise_signal(signal.SIGUSR1)
        manifest.writer._queue._batches.append(guard)

def handler(*_):
    for call in (lambda: manifest.submit([chunk(2)]).result(), manifest.close):
        try:
            call()
        except InvalidInput as error:
            refused.append(error)

refused = []
manifest = ManifestStore.open(sys.argv[1])
manifest.submit([register(1)]).result()
signal.signal(signal.SIGUSR1, handler)
manifest.writer._queue._batches = Striking()
assert manifest.submit([chunk(1)]).result().sequence == 2
assert len(refused) == 2 and "signal handler" in str(refused[0]), refused
assert manifest.submit([chunk(2)]).result().sequence == 3
manifest.close()
print("ok")
"""


def test_a_signal_handler_that_interrupts_a_commit_is_refused_its_own(path: str) -> None:
    """Hazard: it waited for the queue's lock, which its own thread held, and the whole store stood still."""
    assert finish(python(HANDLER_INTERRUPTS_A_COMMIT, path)).endswith("ok\n")


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_exceptions_raised_anywhere_leave_nothing_behind(path: str, use: str) -> None:
    """Hazard: `with condition:` is Python code; an exception in it leaves the lock held, or releases it twice."""
    assert finish(python(INTERRUPTED + use + "storm(use)" + JOIN_THREADS + AFTERWARDS, path)).endswith("ok\n")
