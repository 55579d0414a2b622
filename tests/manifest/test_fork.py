"""fork(): a child cannot use the manifest, does not end anything of its parent, and can end itself."""

from __future__ import annotations

import pytest

from tests.manifest.helpers import finish, python

PARENT = """
import gc, os, signal, sys, time
from quire.core.errors import QuireError, StoreClosed, StoreLocked
from quire.durable.failpoints import armed
from quire.manifest import tables as t
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import Hold, chunk, register

def forked(child):
    "The exit code of a child that calls this and then ends normally; 99 if it hangs."
    pid = os.fork()
    if pid == 0:
        sys.exit(child())
    for _ in range(2000):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 99

def slots():
    "The readers, from LMDB's shared table."
    return manifest.env._env.readers()

manifest = ManifestStore.open(sys.argv[1])
manifest.submit([register(1)]).result()
txn = manifest.read()
taken = slots()
assert str(os.getpid()) in taken and "-" not in taken, taken
"""


def run(path: str, script: str) -> str:
    return finish(python(PARENT + script, path))


ENDINGS = {
    "close": "txn.close()",
    "with": "[txn.__enter__(), txn.__exit__(None, None, None)]",
    "garbage": "[globals().pop('txn'), gc.collect()]",
    "an iterator": "[globals().pop('rows'), gc.collect()]",
    "everything": "[globals().pop(name) for name in ('txn', 'rows', 'manifest')] + [gc.collect()]",
    "the manifest": "manifest.close()",
    "nothing": "None",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_the_parents_snapshot_survives_whatever_a_child_closes(path: str, ending: str) -> None:
    """Hazard: LMDB's table of readers is shared memory. A child that closed an inherited transaction freed the parent's
    slot, and the pages of the parent's snapshot were overwritten."""
    script = f"""
rows = txn.raw_scan(t.DB)
def child():
    {ending}
print(forked(child))
assert slots() == taken, slots()
for n in range(1, 50):
    manifest.submit([chunk(n)]).result()
assert txn.count(t.CHUNK_CATALOG) == 0 and len(list(rows)) == 1
txn.close()
assert manifest.submit([chunk(99)]).result(30)
"""
    assert run(path, script) == "0\n"


def test_the_child_cannot_use_the_manifest_and_the_parent_is_unaffected(path: str) -> None:
    script = """
guard = manifest.submit([chunk(1)])
def child():
    uses = (
        manifest.read, manifest.check, lambda: manifest.submit([chunk(1)]).result(60), manifest.env.info,
        lambda: txn.get(t.DB, 1), lambda: list(txn.scan(t.DB)), lambda: txn.count(t.DB),
    )
    for use in uses:
        try:
            use()
        except StoreClosed:
            continue
        return 1
    return 0
print(forked(child))
txn.close()
manifest.submit([chunk(2)]).result()
assert not [p for p in manifest.check() if not p.leak]
manifest.close()
"""
    assert run(path, script) == "0\n"


def test_a_child_that_opens_the_manifest_again_gets_an_error_about_the_fork(path: str) -> None:
    script = """
def child():
    try:
        ManifestStore.open(sys.argv[1], mode="r")
    except StoreLocked as error:
        return 0 if "fork" in error.what and "spawn" in error.hint else 1
    return 2
print(forked(child))
"""
    assert run(path, script) == "0\n"


def test_locks_that_were_held_at_the_fork_do_not_hang_the_child(path: str) -> None:
    """Hazard: a thread was passing the gate; in the child nothing ever released the lock."""
    script = """
locks = [value for value in vars(manifest.env.gate).values() if hasattr(value, "acquire")]
assert locks
for lock in locks:
    lock.acquire()
def child():
    txn.close()
    manifest.close()
print(forked(child))
for lock in locks:
    lock.release()
assert slots() == taken
"""
    assert run(path, script) == "0\n"


@pytest.mark.parametrize("ending", ["None", "[globals().pop('txn'), globals().pop('manifest'), gc.collect()]"])
def test_a_child_of_a_busy_writer_can_end(path: str, ending: str) -> None:
    """LMDB's environment must not be closed when Python ends: that would wait for a transaction of the parent's
    writer."""
    script = f"""
hold = Hold()
with armed("manifest.commit.flushed", hold):
    guard = manifest.submit([chunk(1)])
    assert hold.reached.wait(60)
    def child():
        {ending}
    print(forked(child))
    hold.release()
assert guard.result(30)
assert slots() == taken
"""
    assert run(path, script) == "0\n"


def test_a_grandchild_behaves_like_a_child(path: str) -> None:
    script = """
def grandchild():
    txn.close()
    manifest.close()
def child():
    return forked(grandchild)
print(forked(child))
assert slots() == taken
"""
    assert run(path, script) == "0\n"
