"""Pages that connections share: whatever is committed, by any connection in any order, no connection reads a page of
another version.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import LeaseExpired, OutOfRange
from quire.pages.page_source import Mark, PageSource
from quire.pages.pagestore import PageStore
from quire.pages.readers import Readers
from quire.sqlite import connect as connect_module
from quire.sqlite import databases
from quire.sqlite.databases import NewestPages, ReadPin
from quire.sqlite.live import LiveFile
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.sqlite.conftest import Connect, count

PAGE = 4096


# ── a run of commits ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_run_continues_with_commits_based_on_it_and_ends_with_others() -> None:
    pages = NewestPages()
    pages.record_commit(3, 5, {0: b"a", 1: b"b"}, PAGE)
    pages.record_commit(5, 7, {1: b"c"}, PAGE)
    assert (pages.run.since, pages.run.upto) == (5, 7)
    assert pages.run.pages == {0: (5, b"a"), 1: (7, b"c")}
    pages.record_commit(8, 9, {2: b"d"}, PAGE)  # another writer has committed 8
    assert (pages.run.since, pages.run.pages) == (9, {2: (9, b"d")})
    pages.record_commit(9, 11, None, PAGE)
    assert (pages.run.since, pages.run.upto, pages.run.pages) == (11, 11, {})


def test_a_read_page_is_added_only_if_it_belongs_to_the_run_and_was_not_written() -> None:
    pages = NewestPages()
    pages.record_commit(3, 5, {0: b"written"}, PAGE)
    pages.record_commit(5, 7, {1: b"written"}, PAGE)
    run = pages.run
    for page, lsn in ((2, 4), (3, 8), (0, 6), (4, 5), (5, 7)):
        run.enter(page, lsn, b"read")
    assert {page: entry[0] for page, entry in run.pages.items()} == {0: 5, 1: 7, 4: 5, 5: 7}
    assert run.pages[0] == (5, b"written")


def test_the_cache_is_bounded_and_reads_leave_space_for_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "KEPT_BYTES", 8 * PAGE)
    pages = NewestPages()
    pages.record_commit(0, 1, {0: b"x"}, PAGE)
    for page in range(1, 8):
        pages.run.enter(page, 1, b"read")
    assert len(pages.run.pages) == 4
    pages.record_commit(1, 2, dict.fromkeys(range(10, 14), b"x"), PAGE)
    assert len(pages.run.pages) == 8
    pages.record_commit(2, 3, {20: b"x"}, PAGE)
    assert (pages.run.since, len(pages.run.pages)) == (3, 1)
    pages.record_commit(3, 4, dict.fromkeys(range(9), b"x"), PAGE)
    assert (pages.run.since, pages.run.upto, pages.run.pages) == (4, 4, {})


def test_pages_are_dropped_when_there_are_no_commits() -> None:
    pages = NewestPages()
    pages.record_commit(0, 1, {0: b"x"}, PAGE)
    pages.drop_if_idle()
    assert pages.run.pages
    pages.record_commit(1, 2, {0: b"y"}, PAGE)
    pages.drop_if_idle()
    assert pages.run.pages
    pages.drop_if_idle()
    assert not pages.run.pages
    pages.record_commit(2, 3, {1: b"z"}, PAGE)
    assert (pages.run.since, pages.run.pages) == (3, {1: (3, b"z")})


# ── against a model ───────────────────────────────────────────────────────────────────────────────────────────────────
class Model:
    """A page store that keeps every version, and can run a callback in the middle of a read."""

    def __init__(self) -> None:
        self.pages: dict[int, list[bytes]] = {0: [b"first"] * 3}
        self.db_id = 1
        self.page_size = PAGE
        self.wal = SimpleNamespace(written=Mark(0, 3))
        self.readers = Readers(1, ManualClock())
        self.sources = SimpleNamespace(cache=SimpleNamespace(resolved_hits=0))
        self.resolved: dict[int, object] = {}
        self.versions = self
        """The model is its own page source."""
        self.meanwhile: list[Callable[[], None]] = []
        self.newest = NewestPages()

    def read(self, page: int, lsn: int) -> bytes:
        image = self.pages[lsn][page]
        while self.meanwhile:
            self.meanwhile.pop()()
        return image

    def append(self, writes: dict[int, bytes], size: int) -> int:
        """A commit: new pages that were not written are zeros."""
        written: Mark = self.wal.written
        before, lsn = self.pages[written.lsn], written.lsn + len(writes) + 1
        self.pages[lsn] = [writes.get(page, before[page] if page < len(before) else b"zeros") for page in range(size)]
        self.wal.written = Mark(lsn, size)
        return lsn

    def pin(self) -> ReadPin:
        return ReadPin(cast(PageStore, self), self.newest)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from([*["move", "read", "read in between"] * 3, "commit", "append", "outside", "cut", "rest"]),
        st.integers(0, 3),
        st.integers(0, 1),
    ),
    min_size=40,
    max_size=120,
)


@given(actions=ACTIONS)
def test_a_pin_reads_its_version_under_any_interleaving(actions: list[tuple[str, int, int]]) -> None:
    model = Model()
    pins = [model.pin() for _ in range(2)]
    pending: list[Callable[[], None]] = []

    def commit(page: int, *, size: int = 0, is_cut: bool = False, later: bool = False) -> None:
        flush(pending)  # the holder of the writer slot records its commit before it releases the slot
        base = model.wal.written
        size = size or max(base.size_pages, page + 1)
        writes = {number_: f"{number_} of {base.lsn}".encode() for number_ in {0, page} if number_ < size}
        lsn = model.append(writes, size)
        pending.append(lambda: model.newest.record_commit(base.lsn, lsn, None if is_cut else writes, PAGE))
        if not later:
            flush(pending)

    def read(pin: ReadPin, page: int) -> None:
        expected = model.pages[pin.lsn]
        if page >= len(expected):
            with pytest.raises(OutOfRange):
                pin.read_page(page)
        else:
            assert pin.read_page(page) == expected[page]

    for action, page, number in actions:
        pin = pins[number]
        if action in ("commit", "append"):
            commit(page, later=action == "append")
        elif action == "outside":
            model.append({page: b"outside"}, max(model.wal.written.size_pages, page + 1))
        elif action == "cut":
            commit(0, size=1 + page // 2, is_cut=True)
        elif action == "move":
            pin.move(model.wal.written)
        elif action == "read in between":
            model.meanwhile.append(lambda page=page: commit(page))  # type: ignore[misc]
            read(pin, page)
        elif action == "read":
            read(pin, page)
        else:
            model.newest.drop_if_idle()
    model.meanwhile.clear()
    for pin in pins:
        for page in range(5):
            read(pin, page)


def flush(pending: list[Callable[[], None]]) -> None:
    while pending:
        pending.pop()()


# ── pins ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_pin_whose_lease_is_gone_reads_nothing_not_even_cached_pages() -> None:
    model = Model()
    pin = model.pin()
    model.newest.record_commit(0, model.append({0: b"new"}, 3), {0: b"new"}, PAGE)
    pin.move(model.wal.written)
    assert pin.read_page(0) == b"new"
    model.readers.retire_all()
    with pytest.raises(LeaseExpired):
        pin.read_page(0)
    pin.close()


@pytest.fixture
def idle_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper thread does nothing by itself."""
    monkeypatch.setattr(connect_module, "KEEPER_SECONDS", 1_000.0)


@pytest.mark.usefixtures("idle_keeper")
def test_a_connection_moves_its_lease_forward(store: Store, shop: apsw.Connection) -> None:
    pages = store.pages.open("shop")
    shop.execute("insert into t values (100, 'x')")
    (lease,) = pages.readers.peek()
    assert lease.lsn == pages.wal.written.lsn, "the lease does not hold back older versions"
    shop.execute("insert into t values (101, 'x')")
    (moved_lease,) = pages.readers.peek()
    assert moved_lease is lease
    assert lease.lsn == pages.wal.written.lsn


@pytest.mark.usefixtures("idle_keeper")
def test_a_busy_connection_does_not_look_like_a_long_reader(store: Store, shop: apsw.Connection) -> None:
    pages, databases = store.pages.open("shop"), store._parts.sqlite
    (lease,) = pages.readers.peek()
    shop.execute("begin")
    assert count(shop) == 10
    databases.run_keeper_round()
    assert pages.readers.peek() == [lease], "the lease is in use"
    shop.execute("commit")
    assert pages.readers.peek() == []
    assert count(shop) == 10
    assert pages.readers.peek() != [lease]


@pytest.mark.usefixtures("idle_keeper")
def test_connections_share_written_pages(
    store: Store, shop: apsw.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = connect()
    assert count(other) == 10
    pages, read = store.pages.open("shop"), []
    original = PageSource.read

    def recording_read(self: PageSource, page: int, lsn: int) -> bytes:
        read.append(page)
        return original(self, page, lsn)

    monkeypatch.setattr(PageSource, "read", recording_read)
    for number in range(20):
        shop.execute("update t set b = ? where id = 3", (f"shop {number}",))
        other.execute("update t set b = ? where id = 4", (f"other {number}",))
    assert shop.execute("select group_concat(b) from t where id in (3, 4)").get == "shop 19,other 19"
    assert len(read) <= 4, "each page once, although each commit outdates the pages of the other connection"
    with pages.begin() as txn:
        txn.write_page(0, txn.read_page(0))
    read.clear()
    shop.execute("update t set b = 'after' where id = 3")
    assert read, "pages changed outside of SQLite are read again"
    assert other.execute("select b from t where id = 3").get == "after"


def test_a_database_that_shrinks_and_grows_again(shop: apsw.Connection, connect: Connect) -> None:
    """Pages that are truncated and added again must not have their old content."""
    other, rng = connect(), random.Random(7)
    for number in range(12):
        with shop:
            shop.executemany("insert into t values (?, ?)", ((1_000 + number, "x" * 3_000) for number in range(40)))
        assert count(other) == 50
        other.execute("delete from t where id >= 1000")
        if number % 3:
            shop.execute("vacuum")
        with other:
            other.execute("insert into t(b) select zeroblob(?)", (rng.randint(1, 60_000),))
            other.execute("delete from t where id >= 10")
        for connection in (shop, other):
            assert connection.pragma("integrity_check") == "ok"
            assert count(connection) == 10


def test_a_large_transaction_goes_to_the_engine_in_parts(
    shop: apsw.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.sqlite.live.KEPT_BYTES", 5 * PAGE)
    writer = connect()
    writer.pragma("cache_size", 10)
    parts: list[int] = []
    original = LiveFile._flush_overlay

    def recording_append(self: LiveFile, more: Any) -> None:
        parts.append(len(self._overlay))
        original(self, more)

    monkeypatch.setattr(LiveFile, "_flush_overlay", recording_append)
    with writer:
        writer.executemany("insert into t values (?, ?)", ((1_000 + number, "x" * 3_000) for number in range(60)))
        assert writer.execute("select sum(length(b)) from t where id >= 1000").get == 180_000
        assert count(shop) == 10
    assert max(parts) == 5
    assert count(shop) == 70
    writer.execute("begin; update t set b = 'gone'; rollback")
    assert shop.execute("select sum(length(b)) from t where id >= 1000").get == 180_000
    assert shop.pragma("integrity_check") == "ok"
