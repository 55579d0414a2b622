"""WAL budgets: writers wait in `begin`, get an error that names what blocks, and continue when space is reclaimed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from quire.core.errors import InvalidConfig, QuotaExceeded, StoreClosed
from quire.core.limits import MIB
from quire.core.settings import PagesSettings
from quire.pages.pagestore import PageStore
from tests.pages.engine_harness import Model, Pages, image, write

SIZE = 65536
PER_COMMIT = 100
"""About 6.5 MiB of WAL."""


@pytest.fixture
def limited(tmp_path: Path) -> Pages:
    return Pages(tmp_path, settings=PagesSettings(page_size=SIZE, wal_bytes_max=16 * MIB, store_wal_bytes_max=24 * MIB))


def _fill(store: PageStore, model: Model, commits: int) -> None:
    data = image("fill", SIZE)
    for _ in range(commits):
        write(store, model, dict.fromkeys(range(PER_COMMIT), data))


def test_a_writer_over_the_databases_budget_gets_what_blocks_and_continues_after_a_checkpoint(limited: Pages) -> None:
    store, model = limited.database(page_size=SIZE), Model(SIZE)
    _fill(store, model, 3)
    with pytest.raises(QuotaExceeded) as caught:
        store.begin(timeout=0)
    assert "segment" in caught.value.where["blocking"]
    assert caught.value.where["used_bytes"] > caught.value.where["budget_bytes"] == 16 * MIB
    store.wal.seal()
    store.wal.publish()
    with store.open_snapshot(tags={"who": "report"}) as reader:
        with pytest.raises(QuotaExceeded) as caught:
            store.begin(timeout=0)
        assert "segment" in caught.value.where["blocking"], "a reader of the newest version does not block"
        assert reader.is_open
    old = store.open_snapshot(tags={"who": "report"})
    store.readers.peek()[0].lsn = 1
    with pytest.raises(QuotaExceeded) as caught:
        store.begin(timeout=0)
    assert f"reader {old.reader_id}" in caught.value.where["blocking"]
    assert "who=report" in caught.value.where["blocking"]
    old.close()
    limited.checkpoint(store)
    _fill(store, model, 1)
    assert limited.engine.quota.used(store.db_id) <= 16 * MIB, "its open segment, with its preallocated space"
    limited.stop()


def test_the_store_has_a_budget_of_its_own(limited: Pages) -> None:
    first, second = limited.database("one", page_size=SIZE), limited.database("two", page_size=SIZE)
    model = Model(SIZE)
    _fill(first, model, 2)
    _fill(second, Model(SIZE), 2)
    third = limited.database("three", page_size=SIZE)
    with pytest.raises(QuotaExceeded, match="store's WAL budget"):
        third.begin(timeout=0)
    limited.engine.close_database("one")
    with pytest.raises(QuotaExceeded), third.begin(timeout=0):
        pass  # closed databases count too
    limited.checkpoint(limited.engine.open("one"))
    third.begin(timeout=0).rollback()
    limited.stop()


def test_inherited_segments_do_not_count_for_a_fork(limited: Pages) -> None:
    store, model = limited.database(page_size=SIZE), Model(SIZE)
    _fill(store, model, 2)
    fork = limited.engine.open(limited.engine.fork("shop", "fork"))
    assert limited.engine.quota.used(fork.db_id) == 0
    fork.begin(timeout=0).rollback()
    limited.stop()


def test_a_waiting_writer_continues_as_soon_as_space_is_reclaimed(limited: Pages) -> None:
    store, model = limited.database(page_size=SIZE), Model(SIZE)
    _fill(store, model, 3)
    admitted = threading.Event()

    def begin() -> None:
        store.begin(timeout=1000).rollback()  # the clock stands still: it waits forever
        admitted.set()

    waiter = threading.Thread(target=begin)
    waiter.start()
    assert not admitted.wait(0.2)
    limited.checkpoint(store)
    assert admitted.wait(30)
    waiter.join()
    limited.stop()


def test_closing_ends_the_wait(limited: Pages) -> None:
    store, model = limited.database(page_size=SIZE), Model(SIZE)
    _fill(store, model, 3)
    errors: list[BaseException] = []

    def begin() -> None:
        try:
            store.begin(timeout=1000)
        except StoreClosed as error:
            errors.append(error)

    waiter = threading.Thread(target=begin)
    waiter.start()
    time.sleep(0.1)
    limited.engine.close()
    waiter.join(30)
    assert errors
    limited.manifest.close()


def test_admission_reads_the_manifest_only_near_the_limit(limited: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    store = limited.database(page_size=SIZE)
    measurements: list[int] = []
    original = limited.engine.quota._measure_all

    def measure() -> None:
        measurements.append(1)
        original()

    monkeypatch.setattr(limited.engine.quota, "_measure_all", measure)
    for _ in range(50):
        store.begin().rollback()
    assert len(measurements) <= 2
    limited.stop()


def test_a_store_budget_below_a_databases_is_refused() -> None:
    with pytest.raises(InvalidConfig):
        PagesSettings(wal_bytes_max=64 * MIB, store_wal_bytes_max=32 * MIB)
