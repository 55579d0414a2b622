"""The environment: its map under readers, a full disk, reader slots, the translation of LMDB's errors."""

from __future__ import annotations

import errno
import os
import threading
import time

import lmdb
import pytest
import structlog
from structlog.testing import capture_logs

from quire.core import errors
from quire.core.errors import (
    DiskFull,
    FormatTooNew,
    InternalError,
    ManifestDamaged,
    NotWritable,
    QuireError,
    StorageFault,
    StoreClosed,
    TooManyReaders,
)
from quire.core.limits import MIB
from quire.core.settings import ManifestSettings
from quire.manifest import tables as t
from quire.manifest.env import ManifestEnv, translate
from quire.manifest.reads import ReadTxn
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean, assert_replays, difference, dump
from tests.manifest.batches import outcome
from tests.manifest.helpers import chunk, finish, python, register

# ── the map ───────────────────────────────────────────────────────────────────────────────────────────────────────────
SMALL_MAP = ManifestSettings(map_bytes=MIB, map_watermark=0.9)

READER = """
import sys
from quire.core.settings import ManifestSettings
from quire.manifest import tables as t
from quire.manifest.store import ManifestStore
manifest = ManifestStore.open(sys.argv[1], mode="r", settings=ManifestSettings(map_bytes=1 << 20))
print("ready", flush=True)
seen = 0
for line in sys.stdin:
    with manifest.read() as txn:
        now = sum(1 for _ in txn.scan(t.CHUNK_CATALOG))
    assert now >= seen, (now, seen)
    seen = now
    print(now, flush=True)
"""


def test_the_map_grows_while_threads_and_another_process_keep_reading(path: str) -> None:
    """The reader process gets a `MapResizedError`; no reader fails and nothing is lost."""
    with ManifestStore.open(path, settings=SMALL_MAP) as manifest:
        manifest.submit([register(1)]).result()
        child = python(READER, path)
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        stop, failures = threading.Event(), []

        def read() -> None:
            previous = 0
            while not stop.wait(0.001):  # a loop that never pauses keeps the GIL from the writer (docs/decisions/004)
                try:
                    with manifest.read() as txn:
                        count = sum(1 for _ in txn.scan(t.CHUNK_CATALOG))
                    assert count >= previous
                    previous = count
                except BaseException as error:
                    failures.append(error)
                    return

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        initial_size = manifest.env.info()["map_size"]
        for start in range(0, 20_000, 2_000):
            manifest.submit([chunk(start + n) for n in range(2_000)]).result(60)
            child.stdin.write("look\n")
            child.stdin.flush()
            assert child.stdout.readline() == f"{start + 2_000}\n"
        stop.set()
        for reader in readers:
            reader.join(30)
        finish(child)
        assert not failures
        assert manifest.env.info()["map_size"] >= 2 * initial_size
        assert_clean(manifest, leaks=True)
        assert_replays(manifest)


def test_a_full_map_of_maximum_size_is_reported_as_a_full_disk_and_nothing_is_written_partially(path: str) -> None:
    settings = ManifestSettings(map_bytes=MIB, map_bytes_max=MIB)
    with ManifestStore.open(path, settings=settings) as manifest:
        manifest.submit([register(1)]).result()
        before, written = dump(manifest), 0
        while not isinstance(result := outcome(manifest.submit([chunk(written + n) for n in range(500)])), QuireError):
            before, written = dump(manifest), written + 500
        assert isinstance(result, DiskFull)
        assert written
        assert not difference(before, dump(manifest))
        assert manifest.writer.failure is None, "a full map is not a doubtful commit"
        assert_clean(manifest, leaks=True)
    with ManifestStore.open(path, settings=ManifestSettings(map_bytes=4 * MIB)) as manifest:
        manifest.submit([chunk(200_000 + n) for n in range(500)]).result(60)
        assert_replays(manifest)


def test_a_long_reader_fails_a_batch_that_needs_a_larger_map_but_not_the_store(path: str) -> None:
    settings = ManifestSettings(map_bytes=MIB, grow_wait_seconds=0.05)
    with ManifestStore.open(path, settings=settings) as manifest:
        manifest.submit([register(1)]).result()
        with manifest.read():
            results = [outcome(manifest.submit([chunk(n * 1000 + m) for m in range(1000)])) for n in range(20)]
        assert isinstance(results[-1], errors.TimedOut)
        assert manifest.writer.failure is None
        assert manifest.submit([chunk(100_000)]).result(60)
        assert_clean(manifest, leaks=True)


# ── a full disk ───────────────────────────────────────────────────────────────────────────────────────────────────────
LIMITED = """
import resource, sys
from quire.core.errors import DiskFull
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean, assert_replays, difference, dump
from tests.manifest.helpers import chunk, finish, python, register

manifest = ManifestStore.open(sys.argv[1])
manifest.submit([register(1)]).result()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
before, full, number = dump(manifest), 0, 0
while full < 3:
    try:
        manifest.submit([chunk(number + n) for n in range(300)]).result(60)
        before = dump(manifest)
    except DiskFull as error:
        full += 1
        assert not difference(before, dump(manifest)), "half a batch was written"
        assert manifest.writer.failure is None
    number += 300
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
manifest.submit([chunk(number + n) for n in range(300)]).result(60)
assert_clean(manifest, leaks=True)
assert_replays(manifest)
manifest.close()
with ManifestStore.open(sys.argv[1]) as again:
    assert_clean(again, leaks=True)
print("ok")
"""


def test_a_full_disk_fails_the_batch_and_the_writer_continues_when_there_is_space(path: str) -> None:
    """The disk is really full: the kernel does not let the file grow."""
    assert finish(python(LIMITED, path)) == "ok\n"


# ── readers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_slots_of_killed_readers_are_cleared_when_a_manifest_is_opened(path: str) -> None:
    """Stale slots would prevent old pages from being reused for ever."""
    code = """
        import sys, time
        from quire.manifest.store import ManifestStore
        manifest = ManifestStore.open(sys.argv[1], mode="r")
        txn = manifest.read()
        print("ready", flush=True)
        time.sleep(60)
    """
    with ManifestStore.open(path) as manifest:
        manifest.submit([register(1)]).result()
        children = [python(code, path) for _ in range(2)]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            child.kill()
            child.communicate()
        finish(
            python("import sys; from quire.manifest.store import *; ManifestStore.open(sys.argv[1], mode='r')", path)
        )
        listing = manifest.env._env.readers()
        assert not any(str(child.pid) in listing for child in children), listing


def test_more_readers_than_slots_is_a_specific_error(path: str) -> None:
    with ManifestStore.open(path, settings=ManifestSettings(readers_max=3)) as manifest:
        transactions: list[ReadTxn] = []

        def read_on() -> None:
            while len(transactions) < 10:
                transactions.append(manifest.read())

        with pytest.raises(TooManyReaders, match="reader slots"):
            read_on()
        transactions.pop().close()
        manifest.read().close()
        for txn in transactions:
            txn.close()


def test_a_long_read_is_reported_once(path: str) -> None:
    settings = ManifestSettings(long_read_seconds=0.01)
    with ManifestStore.open(path, settings=settings) as manifest, capture_logs() as logs:
        with manifest.read():
            time.sleep(0.03)
            for n in range(1, 5):
                manifest.submit([register(n)]).result()
        manifest.submit([register(9)]).result()
        deadline = time.monotonic() + 60
        while manifest.writer.stats.commits < 5 and time.monotonic() < deadline:
            time.sleep(0.001)
    structlog.reset_defaults()
    (report,) = [log for log in logs if log["event"] == "manifest.long_read"]
    assert report["log_level"] == "warning"
    assert report["thread"] == threading.current_thread().name
    assert report["seconds"] >= 0


def test_a_second_process_reads_while_the_owner_writes(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        manifest.submit([register(1)]).result()
        child = python(READER, path)
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for n in range(1, 30):
            manifest.submit([chunk(n)]).result()
            child.stdin.write("look\n")
            child.stdin.flush()
            assert child.stdout.readline() == f"{n}\n"
        finish(child)


def test_a_read_only_manifest_rejects_writes(path: str) -> None:
    ManifestStore.open(path).close()
    with ManifestStore.open(path, mode="r") as manifest, pytest.raises(errors.ReadOnly):
        manifest.submit([register(1)])


# ── translation ───────────────────────────────────────────────────────────────────────────────────────────────────────
def lmdb_errors() -> list[type[lmdb.Error]]:
    kinds = [kind for kind in vars(lmdb).values() if isinstance(kind, type) and issubclass(kind, lmdb.Error)]
    return sorted(set(kinds), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", lmdb_errors(), ids=lambda kind: kind.__name__)
def test_every_error_of_lmdb_has_its_own_translation(kind: type[lmdb.Error]) -> None:
    """A new class in py-lmdb falls into the catch-all and fails here: add it to `translate`."""
    error = translate(kind("why"), "p")
    assert error.where["path"] == "p"
    if kind is lmdb.Error:
        assert type(error) is StorageFault
    else:
        assert type(error) is not StorageFault or kind is lmdb.MemoryError


@pytest.mark.parametrize(
    ("number", "kind"),
    [("ENOSPC", DiskFull), ("EDQUOT", DiskFull), ("EFBIG", DiskFull), ("EACCES", NotWritable), ("EROFS", NotWritable)],
)
def test_errnos_are_distinguished(number: str, kind: type[QuireError]) -> None:
    code = getattr(errno, number)
    assert type(translate(OSError(code, os.strerror(code)), "p")) is kind
    assert type(translate(lmdb.Error(f"mdb_txn_commit: {os.strerror(code)}"), "p")) is kind


def test_groups_of_translations() -> None:
    assert type(translate(lmdb.CorruptedError("x"), "p")) is ManifestDamaged
    assert type(translate(lmdb.VersionMismatchError("x"), "p")) is FormatTooNew
    assert type(translate(lmdb.BadTxnError("x"), "p")) is InternalError
    assert type(translate(lmdb.ReadersFullError("x"), "p")) is TooManyReaders


# ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_closed_environment_rejects_use_and_can_be_closed_again(path: str) -> None:
    env = ManifestEnv(path, ManifestSettings(), write=True)
    env.close()
    env.close()
    for use in (lambda: ReadTxn(env), env.begin_write, env.info, lambda: env.copy(path + ".copy")):
        with pytest.raises(StoreClosed):
            use()


def test_a_copy_is_a_complete_manifest(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        manifest.submit([register(1), chunk(1)]).result()
        manifest.env.copy(path + ".copy")
        rows = dump(manifest)
    with ManifestStore.open(path + ".copy") as copy:
        assert not difference(rows, dump(copy))
        assert_clean(copy, leaks=True)


def test_an_address_space_limit_shrinks_the_reservation_instead_of_failing(path: str) -> None:
    code = """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
        from quire.manifest.store import ManifestStore
        with ManifestStore.open(sys.argv[1]) as manifest:
            print(manifest.env.info()["map_size"] < 16 << 30)
    """
    assert finish(python(code, path)) == "True\n"
