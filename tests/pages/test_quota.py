"""WAL budgets: writers wait in `begin`, hear what blocks, and go on when bytes are given back."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from quire.core.errors import InvalidConfig, QuotaExceeded, StoreClosed
from quire.core.limits import MIB
from quire.core.settings import PagesSettings
from quire.pages.pagestore import PageStore
from tests.pages.world import Model, Pages, image, write

SIZE = 65536
PER_COMMIT = 100
"""About 6.5 MiB of WAL."""


@pytest.fixture
def tight(tmp_path: Path) -> Pages:
    return Pages(tmp_path, settings=PagesSettings(page_size=SIZE, wal_bytes_max=16 * MIB, store_wal_bytes_max=24 * MIB))


def _fill(store: PageStore, model: Model, commits: int) -> None:
    data = image("fill", SIZE)
    for _ in range(commits):
        write(store, model, dict.fromkeys(range(PER_COMMIT), data))


def test_a_writer_over_the_databases_budget_hears_what_blocks_and_goes_on_after_a_checkpoint(tight: Pages) -> None:
    store, model = tight.database(page_size=SIZE), Model(SIZE)
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
        assert "segment" in caught.value.where["blocking"], "the newest version blocks nobody"
        assert reader.is_open
    old = store.open_snapshot(tags={"who": "report"})
    store.readers.peek()[0].lsn = 1
    with pytest.raises(QuotaExceeded) as caught:
        store.begin(timeout=0)
    assert f"reader {old.reader_id}" in caught.value.where["blocking"]
    assert "who=report" in caught.value.where["blocking"]
    old.close()
    tight.checkpoint(store)
    _fill(store, model, 1)
    assert tight.engine.quota.used(store.db_id) <= 16 * MIB, "its open segment, with the zeros it has ahead"
    tight.stop()


def test_the_store_has_a_budget_of_its_own(tight: Pages) -> None:
    first, second = tight.database("one", page_size=SIZE), tight.database("two", page_size=SIZE)
    model = Model(SIZE)
    _fill(first, model, 2)
    _fill(second, Model(SIZE), 2)
    third = tight.database("three", page_size=SIZE)
    with pytest.raises(QuotaExceeded, match="store's WAL budget"):
        third.begin(timeout=0)
    tight.engine.close_database("one")
    with pytest.raises(QuotaExceeded), third.begin(timeout=0):
        pass  # what is not open counts too
    tight.checkpoint(tight.engine.open("one"))
    third.begin(timeout=0).rollback()
    tight.stop()


def test_what_a_fork_has_inherited_is_not_its_own(tight: Pages) -> None:
    store, model = tight.database(page_size=SIZE), Model(SIZE)
    _fill(store, model, 2)
    fork = tight.engine.open(tight.engine.fork("shop", "fork"))
    assert tight.engine.quota.used(fork.db_id) == 0
    fork.begin(timeout=0).rollback()
    tight.stop()


def test_a_waiting_writer_gets_in_as_soon_as_bytes_are_given_back(tight: Pages) -> None:
    store, model = tight.database(page_size=SIZE), Model(SIZE)
    _fill(store, model, 3)
    got_in = threading.Event()

    def begin() -> None:
        store.begin(timeout=1000).rollback()  # the clock stands still: it waits for ever
        got_in.set()

    waiter = threading.Thread(target=begin)
    waiter.start()
    assert not got_in.wait(0.2)
    tight.checkpoint(store)
    assert got_in.wait(30)
    waiter.join()
    tight.stop()


def test_closing_ends_the_wait(tight: Pages) -> None:
    store, model = tight.database(page_size=SIZE), Model(SIZE)
    _fill(store, model, 3)
    ended: list[BaseException] = []

    def begin() -> None:
        try:
            store.begin(timeout=1000)
        except StoreClosed as error:
            ended.append(error)

    waiter = threading.Thread(target=begin)
    waiter.start()
    time.sleep(0.1)
    tight.engine.close()
    waiter.join(30)
    assert ended
    tight.manifest.close()


def test_passing_asks_the_manifest_only_near_the_limit(tight: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tight.database(page_size=SIZE)
    measurements: list[int] = []
    real = tight.engine.quota._measure_all

    def measure() -> None:
        measurements.append(1)
        real()

    monkeypatch.setattr(tight.engine.quota, "_measure_all", measure)
    for _ in range(50):
        store.begin().rollback()
    assert len(measurements) <= 2
    tight.stop()


def test_a_store_budget_below_a_databases_makes_no_sense() -> None:
    with pytest.raises(InvalidConfig):
        PagesSettings(wal_bytes_max=64 * MIB, store_wal_bytes_max=32 * MIB)
