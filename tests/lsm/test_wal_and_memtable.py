"""The records of the log, the versions of the memtable, and the merge, each compared with a slow and obvious
implementation.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import Corruption
from quire.durable.files import OsDisk
from quire.durable.log_writer import LogWriter
from quire.durable.names import (
    LsmHome,
    LsmManifestLogFile,
    LsmManifestSnapshotFile,
    LsmWalFile,
    SstFile,
    lsm_home,
    lsm_number,
    lsm_snapshot_dir,
    sst_entry_path,
)
from quire.lsm.compaction import VersionRetention
from quire.lsm.memtable import Memtable
from quire.lsm.merge import compacted, merged, retained, scan_parts, visible
from quire.lsm.wal import LOG_KIND, KvWal, WalBatch, batches_of, decode_batch, encode_batch, encode_carried
from quire.lsm.witnesses import Owner
from tests.lsm.tables import KEYS, ROWS, VALUES, Row, batch_of, in_order, make_table, newest, rows_of
from tests.rules.tree import ROOT

BATCHES = st.dictionaries(KEYS, VALUES, min_size=1, max_size=8)


# ── log ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
@given(st.integers(0, 2**64 - 1), BATCHES)
def test_batches_round_trip(lsn: int, items: dict[bytes, bytes | None]) -> None:
    record = encode_batch(lsn, items)
    assert decode_batch(record, "", 0) == WalBatch(lsn, items, len(record))
    keyed = encode_batch(lsn, items, 7)
    assert decode_batch(keyed, "", 0) == WalBatch(lsn, items, len(keyed), ((7, lsn),))


def test_keys_of_calls_are_carried_into_the_next_log() -> None:
    record = encode_carried(9, [(7, 3), (2**64 - 1, 4)])
    assert decode_batch(record, "", 0) == WalBatch(9, {}, len(record), ((7, 3), (2**64 - 1, 4)))
    with pytest.raises(Corruption, match="malformed"):
        decode_batch(record[:-1], "", 0)


@given(BATCHES, st.data())
def test_a_batch_that_was_cut_or_lengthened_is_corrupt(items: dict[bytes, bytes | None], data: st.DataObject) -> None:
    record = encode_batch(1, items)
    altered = record[: data.draw(st.integers(0, len(record) - 1))] if data.draw(st.booleans()) else record + b"\0"
    with pytest.raises(Corruption) as caught:
        decode_batch(altered, "p", 5)
    assert caught.value.where["offset"] == 5


def test_lsns_that_do_not_rise_are_corrupt(tmp_path: Path) -> None:
    path = str(tmp_path / "1.log")
    with LogWriter.create(OsDisk(), path, kind=LOG_KIND) as log:
        log.append_many([encode_batch(lsn, {b"k": b""}) for lsn in (3, 3)])
    wal, contents = KvWal.open(OsDisk(), path, 1, Owner())
    with pytest.raises(Corruption, match="is malformed"):
        list(batches_of(contents))
    wal.close()


def test_the_example_on_the_page_is_what_the_code_writes() -> None:
    page = (ROOT / "docs" / "formats" / "lsm-wal.md").read_text("utf-8")
    dump = re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?)+)$", page, re.MULTILINE)
    assert bytes.fromhex(" ".join(dump)) == encode_batch(7, {b"k": b"v", b"old": None})


def test_file_names_are_those_of_the_store() -> None:
    home = LsmHome(lsm_home(7))
    assert home.manifest_log == LsmManifestLogFile(db_id=7).path
    assert home.manifest_snapshot == LsmManifestSnapshotFile(db_id=7).path
    assert home.wal(31) == LsmWalFile(db_id=7, number=31).path
    assert home.sst(1_234_567) == SstFile(db_id=7, sst_id=1_234_567).path == f"{home.path}/{sst_entry_path(1_234_567)}"
    assert lsm_snapshot_dir(7, 3) == "lsm/00000007/snapshots/000003"
    assert [lsm_number(name, ".sst") for name in ("000007.sst", "7.sst", "000007.log", "0000007.sst", ".sst")] == [
        7,
        None,
        None,
        None,
        None,
    ]


# ── memtable ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@given(st.lists(st.tuples(BATCHES, st.booleans()), max_size=12), KEYS, st.one_of(st.none(), KEYS))
def test_a_memtable_keeps_what_snapshots_need(
    writes: list[tuple[dict[bytes, bytes | None], bool]], low: bytes, high: bytes | None
) -> None:
    table, rows, snapshot_lsn = Memtable(), list[Row](), 0
    needed = list[int]()
    for lsn, (items, hold) in enumerate(writes, 1):
        table.put_all(lsn, items, 0, snapshot_lsn)
        rows += [(key, lsn, value) for key, value in items.items()]
        if hold:
            snapshot_lsn = lsn
            needed.append(lsn)
    for lsn in (*needed, 2**64 - 1):
        for key in {key for key, _, _ in rows} | {low}:
            assert table.get(key, lsn) == newest(rows, key, lsn)
    for freeze in (False, True, True):
        if freeze:
            table.freeze()
        rows_found = rows_of(table.rows_between(low, high))
        assert rows_found == in_order(rows_found)
        assert all(low <= key and (high is None or key < high) for key, _, _ in rows_found)
        expected_keys = {key for key, _, _ in rows if low <= key and (high is None or key < high)}
        assert {key for key, _, _ in rows_found} == expected_keys
        for lsn in (*needed, 2**64 - 1):
            assert all(newest(rows_found, key, lsn) == newest(rows, key, lsn) for key in expected_keys)


# ── merge ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def split(rows: list[Row], table_count: int, directory: str) -> list[object]:
    """Divide the rows among several tables."""
    parts = [rows[start::table_count] for start in range(table_count)]
    return [make_table(directory, part, sst_id=number + 1) for number, part in enumerate(parts) if part]


@given(ROWS, st.integers(1, 4), st.integers(0, 2**64 - 1), st.booleans(), KEYS, st.one_of(st.none(), KEYS))
def test_a_scan_shows_the_newest_of_each_key(
    rows: list[Row], ways: int, lsn: int, reverse: bool, low: bytes, high: bytes | None
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        batches = scan_parts(split(rows, ways, directory), low, high, lsn, reverse=reverse)  # type: ignore[arg-type]
        pairs = [pair for batch in batches for pair in zip(*(column.to_pylist() for column in batch.columns))]
    expected = []
    for key in sorted({key for key, _, _ in rows if low <= key and (high is None or key < high)}):
        version = newest(rows, key, lsn)
        if version is not None and version[1] is not None:
            expected.append((key, version[1]))
    assert pairs == (expected[::-1] if reverse else expected)


@given(ROWS, st.integers(1, 4), st.lists(st.integers(0, 2**64 - 1), max_size=4), st.booleans())
def test_a_compaction_changes_no_visible_row(rows: list[Row], ways: int, snapshots: list[int], bottom: bool) -> None:
    points = tuple(sorted({*snapshots}))
    retention = VersionRetention(snapshots=points, drop_tombstones_below=2**64 - 1 if bottom else 0)
    with tempfile.TemporaryDirectory() as directory:
        kept_rows = rows_of(compacted(split(rows, ways, directory), retention, part_bytes=100))  # type: ignore[arg-type]
    assert kept_rows == in_order(kept_rows)
    assert set(kept_rows) <= set(rows)
    for lsn in (*points, 2**64 - 1):
        for key in {key for key, _, _ in rows}:
            before, after = newest(rows, key, lsn), newest(kept_rows, key, lsn)
            dead = before is None or before[1] is None
            assert after == before or (bottom and dead and (after is None or after[1] is None))
    keys = [key for key, _, _ in kept_rows]
    assert len(keys) <= len(set(keys)) * (len(points) + 1)
    if bottom and not points:
        assert all(value is not None for _, lsn, value in kept_rows if lsn < 2**64 - 1)


def test_hidden_rows_are_skipped() -> None:
    rows = batch_of([(b"a", 9, b"new"), (b"a", 5, b"hidden"), (b"a", 3, b"old"), (b"b", 5, None), (b"b", 2, b"x")])
    assert visible(rows, 8, frozenset({5})).to_pydict() == {"key": [b"a", b"b"], "value": [b"old", b"x"]}
    assert visible(rows, 8).to_pydict() == {"key": [b"a"], "value": [b"hidden"]}


def test_an_empty_merge_is_empty() -> None:
    nothing = merged([], b"", None)
    assert (
        nothing.num_rows
        == retained(nothing, VersionRetention(snapshots=(1,))).num_rows
        == visible(nothing, 5).num_rows
        == 0
    )
    assert isinstance(nothing, pa.RecordBatch)
