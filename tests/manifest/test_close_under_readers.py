"""Closing while others read: they finish, or get `StoreClosed`; never an error of LMDB, never a signal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from quire.core.errors import StoreClosed
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest import env as environment
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import chunk, eventually, finish, python, register

USES: dict[str, Callable[[ReadTxn], object]] = {
    "get": lambda txn: txn.get(t.DB, 1),
    "scan": lambda txn: list(txn.scan(t.DB)),
    "raw_scan": lambda txn: list(txn.raw_scan(t.DB)),
    "raw_scan of a prefix": lambda txn: list(txn.raw_scan(t.CHUNK_CATALOG, 1)),
    "raw_scan_back": lambda txn: list(txn.raw_scan_back(t.DB)),
    "steps": lambda txn: list(txn.steps(t.CHUNK_CATALOG, 10)),
    "count": lambda txn: txn.count(t.DB),
    "refcount": lambda txn: txn.refcount(ArtifactKey(1, ArtifactKind.BASE, 1, 1)),
    "feed_bounds": lambda txn: txn.feed_bounds(),
    "to_arrow": lambda txn: txn.to_arrow("db"),
}

ITERATIONS: dict[str, Callable[[ReadTxn], Iterator[object]]] = {
    "scan": lambda txn: txn.scan(t.CHUNK_CATALOG),
    "scan of a prefix": lambda txn: txn.scan(t.CHUNK_CATALOG, 1),
    "raw_scan": lambda txn: txn.raw_scan(t.CHUNK_CATALOG),
    "raw_scan of a prefix": lambda txn: txn.raw_scan(t.CHUNK_CATALOG, 1),
    "raw_scan_back": lambda txn: txn.raw_scan_back(t.CHUNK_CATALOG),
    "steps": lambda txn: txn.steps(t.CHUNK_CATALOG, 10),
    "changes": lambda txn: txn.changes(),
    "databases": lambda txn: txn.databases(),
}


@pytest.fixture
def filled(path: str) -> Iterator[ManifestStore]:
    manifest = ManifestStore.open(path)
    manifest.submit([register(1), register(2)]).result()
    for start in range(0, 100, 50):
        manifest.submit([chunk(start + n) for n in range(50)]).result()
    yield manifest
    manifest.close()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_transaction_that_outlives_the_manifest_rejects_use(
    filled: ManifestStore, use: Callable[[ReadTxn], object]
) -> None:
    txn = filled.read()
    use(txn)
    filled.close()
    with pytest.raises(StoreClosed):
        use(txn)
    txn.close()
    txn.close()


@pytest.mark.parametrize("ending", ["the manifest", "the transaction"])
@pytest.mark.parametrize("walk", ITERATIONS.values(), ids=ITERATIONS)
def test_an_iteration_ends_with_store_closed_when_the_manifest_or_transaction_is_closed(
    filled: ManifestStore, walk: Callable[[ReadTxn], Iterator[object]], ending: str
) -> None:
    """Hazard: an iterator that was already started raised LMDB's error."""
    txn = filled.read()
    rows = walk(txn)
    assert next(rows)
    (filled if ending == "the manifest" else txn).close()
    with pytest.raises(StoreClosed):
        list(rows)
    txn.close()


def test_statistics_of_a_closed_manifest_are_rejected(filled: ManifestStore) -> None:
    assert filled.env.info()["map_size"]
    filled.close()
    with pytest.raises(StoreClosed):
        filled.env.info()


def test_closing_waits_for_readers_of_other_threads(filled: ManifestStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "CLOSE_WAIT_SECONDS", 30.0)
    reading, may_end, counts = threading.Event(), threading.Event(), []

    def read() -> None:
        with filled.read() as txn:
            reading.set()
            may_end.wait(10)
            counts.append(txn.count(t.CHUNK_CATALOG))

    reader = threading.Thread(target=read)
    reader.start()
    assert reading.wait(60)
    closer = threading.Thread(target=filled.close)
    closer.start()
    assert eventually(lambda: filled.env._closed is not None)
    with pytest.raises(StoreClosed):
        filled.read()
    may_end.set()
    reader.join(60)
    closer.join(60)
    assert counts == [100]


def test_a_manifest_closed_under_a_reader_can_be_opened_again(path: str) -> None:
    manifest = ManifestStore.open(path)
    manifest.submit([register(1)]).result()
    txn = manifest.read()
    manifest.close()
    with ManifestStore.open(path) as reopened, reopened.read() as fresh:
        assert fresh.count(t.DB) == 1
        with pytest.raises(StoreClosed):
            txn.get(t.DB, 1)
        txn.close()
        assert fresh.count(t.DB) == 1, "closing the old transaction does not affect the new environment"


STORM = """
import sys, threading, time
from quire.core.errors import StoreClosed
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest import env as environment, tables as t
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import chunk, register
from tests.manifest.test_close_under_readers import USES

sys.setswitchinterval(1e-6)
path, seconds = sys.argv[1], float(sys.argv[2])
with ManifestStore.open(path) as manifest:
    manifest.submit([register(1)]).result()
    manifest.submit([chunk(n) for n in range(2000)]).result()
uses = [use for name, use in USES.items() if name != "to_arrow"]
failures, rounds, end = [], 0, time.monotonic() + seconds

def read(manifest, mine, keep):
    try:
        while True:
            with manifest.read() as txn:
                while True:
                    for use in mine:
                        use(txn)
                    for _ in txn.raw_scan(t.CHUNK_CATALOG):
                        pass
                    if not keep:
                        break
    except StoreClosed:
        pass
    except BaseException as error:
        failures.append(repr(error))

while time.monotonic() < end and not failures:
    environment.CLOSE_WAIT_SECONDS = (0.0, 0.003, 0.05)[rounds % 3]
    manifest = ManifestStore.open(path, mode="r")
    threads = [threading.Thread(target=read, args=(manifest, uses[n::4], n % 2 == 0)) for n in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.0007 * (rounds % 5))
    manifest.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a reader hangs"
    rounds += 1
print(failures or "ok")
assert rounds > 1
"""


def test_busy_readers_survive_the_close(path: str) -> None:
    """Hazard: py-lmdb's `close` unmaps the file while threads are reading it, and the process dies."""
    assert finish(python(STORM, path, "2")) == "ok\n"
