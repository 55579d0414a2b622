"""Short scans and reads of many keys: the same rows as Arrow's merge and as a linear search, wherever the rows are."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.limits import MIB
from quire.durable.log_reader import LogEnd
from quire.lsm import short_scan, view
from quire.lsm.block_cache import BlockCache
from quire.lsm.memtable import RECENT_KEYS, Memtable
from quire.lsm.sst_reader import SSTable
from quire.lsm.table_options import TableOptions
from quire.lsm.view import Frozen, KvView, Levels
from quire.manifest.keys import prefix_end
from tests.lsm.kv_helpers import TINY, open_kv
from tests.lsm.tables import Row, in_order, make_table, newest

TABLES, FROZEN, LIVE = range(1, 21), range(21, 26), range(26, 31)
"""The lsns in tables, in a frozen memtable, and in the memtable."""
KEYS = st.one_of(
    st.integers(0, 30).map(lambda n: b"k%02d" % n), st.sampled_from([b"", b"k", b"k0", b"\xff", b"\xff\xff"])
)
VALUES = st.one_of(st.none(), st.binary(max_size=40))
HISTORIES = st.dictionaries(st.tuples(KEYS, st.integers(1, 30)), VALUES, max_size=120)
BLOCKS = st.sampled_from([64, 256, 4096])


def layered(directory: str, rows: Sequence[Row], block_bytes: int, cache: BlockCache | None) -> KvView:
    """The rows in a possible layout: two tables of level 0, two deeper levels with disjoint tables, two memtables. As
    after bulk loads, the table of a row does not depend on its lsn.
    """
    options, tables = TableOptions(block_bytes=block_bytes), list[SSTable]()
    stored = [row for row in rows if row[1] in TABLES]
    for i in range(4):
        mine = in_order(row for row in stored if (row[1] + len(row[0])) % 4 == i)
        half = len(mine) // 2
        while 0 < half < len(mine) and mine[half][0] == mine[half - 1][0]:
            half += 1
        for part in (mine,) if i < 2 else (mine[:half], mine[half:]):
            if part:
                level = max(0, i - 1)
                number = len(tables) + 1
                tables.append(make_table(directory, part, sst_id=number, level=level, options=options, cache=cache))
    memtables = [Memtable(), Memtable()]
    for memtable, lsns in zip(memtables, (FROZEN, LIVE)):
        for lsn in lsns:
            if items := {key: value for key, at, value in rows if at == lsn}:
                memtable.put_all(lsn, items, 0, lsn - 1)
    return KvView(memtables[1], (Frozen(memtables[0], 1, LogEnd(salt=0, end=0, link=0)),), Levels(tables))


@given(
    HISTORIES,
    st.integers(0, 31),
    st.frozensets(st.sampled_from(TABLES), max_size=2),
    st.lists(st.tuples(KEYS, st.one_of(st.none(), KEYS)), min_size=1, max_size=4),
    st.integers(1, 9),
    BLOCKS,
    st.booleans(),
)
def test_all_ways_of_reading_return_the_same_rows(
    history: dict[tuple[bytes, int], bytes | None],
    lsn: int,
    hidden: frozenset[int],
    ranges: list[tuple[bytes, bytes | None]],
    first_rows: int,
    block_bytes: int,
    cached: bool,
) -> None:
    rows = [(key, at, value) for (key, at), value in history.items()]
    visible = [row for row in rows if row[1] not in hidden]
    names = sorted({key for key, _, _ in rows})
    state = {key: version[1] for key in names if (version := newest(visible, key, lsn)) and version[1] is not None}
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "FIRST_ROWS", first_rows)
        patch.setattr(view, "SHORT_ROWS", first_rows * 7)  # two windows, then Arrow
        database = layered(directory, rows, block_bytes, BlockCache(3_000) if cached else None)
        for low, high in [(b"", None), *ranges]:
            expected = [(key, state[key]) for key in sorted(state) if low <= key and (high is None or key < high)]
            for reverse in (False, True):
                pairs = list(chain(*database.pairs(low, high, lsn, hidden=hidden, reverse=reverse)))
                batches = database.scan(low, high, lsn, hidden=hidden, reverse=reverse)
                rows_of_arrow = [(row["key"], row["value"]) for batch in batches for row in batch.to_pylist()]
                assert pairs == rows_of_arrow == (expected[::-1] if reverse else expected)
        keys_read = [*names, b"nothing"]
        assert database.get_many(keys_read, lsn, hidden) == [state.get(key) for key in keys_read]
        assert [database.get(key, lsn, hidden) for key in keys_read] == [state.get(key) for key in keys_read]
        for table in database.levels:
            table.close()


@given(st.lists(KEYS), KEYS, st.one_of(st.none(), KEYS), st.integers(1, 5))
def test_a_span_has_all_rows_of_its_keys(names: list[bytes], low: bytes, high: bytes | None, rows: int) -> None:
    keys = sorted(names)
    expected_keys = [key for key in keys if low <= key and (high is None or key < high)]
    start, end, is_more = short_scan.span(keys, low, high, rows)
    assert (keys[start:end] + ([keys[end]] if is_more else [])) == expected_keys[: end - start + is_more]
    assert is_more == (end - start < len(expected_keys))
    assert not is_more or (end - start >= rows and keys[end] != keys[end - 1])
    start, end, is_more = short_scan.span_before(keys, low, high, rows)
    assert keys[start:end] == expected_keys[len(expected_keys) - (end - start) :]
    assert is_more == (end - start < len(expected_keys))
    assert not is_more or (end - start >= rows and keys[start] != keys[start - 1])


def test_a_short_scan_reads_a_block_and_no_arrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows come from windows, the others from Arrow."""
    scanned = list[tuple[bytes, bytes | None]]()
    original = KvView.scan

    def recording(self: KvView, low: bytes, high: bytes | None, *args: object, **options: object) -> object:
        scanned.append((low, high))
        return original(self, low, high, *args, **options)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(KvView, "scan", recording)
    settings = msgspec.structs.replace(TINY, block_bytes=4_096, table_bytes=20_000)
    with open_kv(tmp_path, settings=settings) as kv:
        kv.write({b"%05d" % n: b"v" for n in range(2_000)})
        kv.compact()
        assert len(list(kv.scan(prefix=b"0012"))) == 10
        assert [key for key, _ in islice(kv.scan(low=b"00500", reverse=False), 20)] == [
            b"%05d" % n for n in range(500, 520)
        ]
        assert next(kv.scan(reverse=True)) == (b"01999", b"v")
        assert len(list(kv.scan(high=b"00500"))) == 500
        assert scanned == []
        assert len(list(kv.scan())) == 2_000
        assert len(scanned) == 1
        assert kv.snapshots.lsns() == ()


def test_many_keys_are_read_from_one_version(tmp_path: Path) -> None:
    """A batch is atomic for `get_many`, as it is for scans."""
    with open_kv(tmp_path) as kv:
        names = [b"%03d" % n for n in range(50)]
        kv.write(dict.fromkeys(names, b"0"))
        stop = threading.Event()

        def write() -> None:
            for number in range(1, 10_000):
                kv.write(dict.fromkeys(names, b"%d" % number), sync=False)
                if number % 40 == 0:
                    kv.flush()
                if stop.is_set():
                    return

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(200):
                assert len(set(kv.get_many(names))) == 1
        finally:
            stop.set()
            writer.join()
        with kv.snapshot() as snapshot:
            kv.delete(names[0])
            assert kv.get_many([names[0], bytearray(names[1])])[0] is None
            assert snapshot.get_many(names[:1]) != [None]


def test_a_memtable_takes_keys_between_scans(tmp_path: Path) -> None:
    """A scan after each write includes it; the newest keys are kept in a separate list."""
    memtable, count = Memtable(), 3 * RECENT_KEYS
    for number in range(count):
        memtable.put_all(number + 1, {b"%05d" % (number * 7919 % count): b"v"}, 0, 0)
        if number % 50 == 0:
            windows = short_scan.RowWindows()
            memtable.window(windows, b"", None, count)
            assert len(windows.pairs(number + 1, frozenset(), None, reverse=False)) == number + 1
    assert memtable.sorted_keys() == [b"%05d" % number for number in range(count)]


# ── cache ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_used_block_stays_in_the_cache_longer_than_unused_ones(tmp_path: Path) -> None:
    rows: list[Row] = [(b"%05d" % n, n + 1, b"v" * 20) for n in range(2_000)]
    cache = BlockCache(40_000)
    table = make_table(tmp_path, rows, cache=cache)
    hot = table.block(0)
    for number in range(1, len(table.meta.blocks)):
        assert table.get(b"00000", 2**64 - 1) is not None
        assert table.block(number).keys
        assert cache.used_bytes <= cache.bytes_max
    assert table.block(0) is hot
    assert cache.admitted == len(table.meta.blocks)
    assert 1 < len(cache) < cache.admitted
    table.close()
    assert (len(cache), cache.used_bytes) == (0, 0)


def test_threads_that_load_the_same_block_cache_one(tmp_path: Path) -> None:
    cache = BlockCache(MIB)
    table = make_table(tmp_path, [(b"a", 1, b"v")], cache=cache)
    first, second = table.block(0), table.block(0)
    assert first is second
    assert cache.admit(table._slots, 0, type(first)(table.batch(0))) is first
    assert cache.used_bytes == first.charge
    table.close()


def test_missing_keys_need_no_block(tmp_path: Path) -> None:
    """The filter is used when the block is not in memory; only its false positives load a block."""
    with open_kv(tmp_path, settings=TINY) as kv:
        kv.write({b"%04d" % n: b"v" for n in range(0, 400, 2)})
        kv.compact()
        assert kv.get_many([b"%04d" % n for n in range(1, 400, 2)]) == [None] * 200
        assert kv.cache.admitted < 20
        assert prefix_end(b"0") == b"1"
