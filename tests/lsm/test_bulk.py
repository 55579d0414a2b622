"""Rows in any order become the tables of a load; a load is applied completely, once, at the right level, whatever is
killed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import DiskFull, InvalidInput, OutOfRange, StorageFault, StoreUnusable
from quire.core.limits import KIB, MIB
from quire.core.settings import LsmSettings
from quire.durable import failpoints
from quire.durable.files import Disk, OsDisk
from quire.durable.names import LsmHome, load_number
from quire.lsm import load_records
from quire.lsm.bulk import BulkWriter, Load, LoadTarget, begin_load, published
from quire.lsm.compaction import LEVELS_MAX, level_for
from quire.lsm.kv import Kv
from quire.lsm.load_records import LoadRecord, read_load_record, write_load_record
from quire.lsm.sst_reader import SSTable
from quire.lsm.table_options import TableOptions
from quire.lsm.verify import problems
from quire.lsm.view import Levels
from tests.fork_server import ForkServer
from tests.lsm.kv_helpers import TINY

SMALL = LsmSettings(table_bytes=8 * KIB, level0_tables=4)


@pytest.fixture
def kv(tmp_path: Path) -> Iterator[Kv]:
    with Kv.open(OsDisk(), str(tmp_path / "db"), SMALL, background=False) as kv:
        yield kv
        assert list(problems(kv)) == []


def writer_for(load: Load, kv: Kv, *, buffer_bytes: int = 64 * KIB) -> BulkWriter:
    target = LoadTarget(directory=kv.home.path, lsn=load.lsn, table_bytes=8 * KIB, options=TableOptions())
    return BulkWriter(kv.disk, target, load.allocate, buffer_bytes=buffer_bytes)


def column(values: list[bytes | None]) -> pa.Array:
    return pa.array(values, pa.binary())


def loaded(kv: Kv, rows: dict[bytes, bytes | None], *, number: int = 0, buffer_bytes: int = 64 * KIB) -> int:
    """Load rows in the given order."""
    with begin_load(kv) as load:
        writer = writer_for(load, kv, buffer_bytes=buffer_bytes)
        for start in range(0, len(rows), 100):
            keys = list(rows)[start : start + 100]
            writer.add(column([*keys]), column([rows[key] for key in keys]))
        return load.publish(writer.finish(), number=number)


def numbered(amount: int, seed: int = 1) -> dict[bytes, bytes | None]:
    order = list(range(amount))
    Random(seed).shuffle(order)
    return {b"%06d" % number: b"v%d" % number * 5 for number in order}


# ── rows become tables ────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("buffer_bytes", [1, 4 * KIB, 1 * MIB])
def test_tables_of_one_writer_are_disjoint_whatever_the_order(kv: Kv, buffer_bytes: int) -> None:
    rows = numbered(2_000)
    assert loaded(kv, rows, buffer_bytes=buffer_bytes) == 2_000
    assert dict(kv.scan()) == rows
    assert kv.stats().levels[0] == 0, "the tables do not overlap: no compaction is needed"


@given(
    rows=st.dictionaries(st.binary(max_size=6), st.none() | st.binary(max_size=20), max_size=60),
    size=st.integers(1, 400),
)
def test_any_rows_can_be_loaded_and_read(
    tmp_path_factory: pytest.TempPathFactory, rows: dict[bytes, bytes | None], size: int
) -> None:
    with Kv.open(OsDisk(), str(tmp_path_factory.mktemp("bulk")), SMALL, background=False) as kv:
        kv.put(b"k", b"old")
        loaded(kv, rows, buffer_bytes=size)
        expected = {key: value for key, value in {b"k": b"old", **rows}.items() if value is not None}
        assert dict(kv.scan()) == expected
        assert all(kv.get(key) == rows[key] for key in rows)
        assert list(problems(kv)) == []


def test_rows_in_order_are_written_once(kv: Kv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BulkWriter, "_merge", None)
    assert loaded(kv, dict(sorted(numbered(2_000).items())), buffer_bytes=4 * KIB) == 2_000


@pytest.mark.parametrize("buffer_bytes", [1, 1 * MIB])
def test_a_duplicate_key_of_a_writer_is_refused(kv: Kv, buffer_bytes: int) -> None:
    with begin_load(kv) as load:
        writer = writer_for(load, kv, buffer_bytes=buffer_bytes)
        with pytest.raises(InvalidInput, match="occurs twice"):  # noqa: PT012 - whichever step finds it
            for keys in ([b"b", b"a"], [b"c", b"b"]):
                writer.add(column([*keys]), column([b"1", b"2"]))
            writer.finish()
    assert kv.stats().tables == 0


def test_a_duplicate_key_of_two_writers_is_refused_and_nothing_is_loaded(kv: Kv) -> None:
    with begin_load(kv) as load:
        ids = []
        for keys in ([b"a", b"m"], [b"k", b"m", b"z"]):
            writer = writer_for(load, kv)
            writer.add(column([*keys]), column([b"x"] * len(keys)))
            ids += writer.finish()
        with pytest.raises(InvalidInput, match=r"occurs twice.*b'm'"):
            load.publish(ids)
    assert list(kv.scan()) == []
    assert kv.disk.names(f"{kv.home.path}/sst") == []


@pytest.mark.parametrize(
    ("keys", "values", "error"),
    [
        (pa.array([None], pa.binary()), pa.array([b""]), "a key is null"),
        (pa.array([b"k" * 70_000]), pa.array([b""]), "a key is too long"),
        (pa.array([1]), pa.array([b""]), "binary or string"),
        (pa.array(["k"]), pa.array([1.5]), "binary or string"),
    ],
)
def test_invalid_pairs_are_refused(kv: Kv, keys: pa.Array, values: pa.Array, error: str) -> None:
    with begin_load(kv) as load, pytest.raises((InvalidInput, OutOfRange), match=error):
        writer_for(load, kv).add(keys, values)


def test_text_is_stored_as_utf8(kv: Kv) -> None:
    with begin_load(kv) as load:
        writer = writer_for(load, kv)
        writer.add(pa.array(["é", "z"]), pa.array(["ü", None], pa.large_string()))
        load.publish(writer.finish())
    assert dict(kv.scan()) == {"é".encode(): "ü".encode()}


# ── levels ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_load_goes_to_the_first_level_without_overlap(kv: Kv) -> None:
    loaded(kv, {b"%06d" % n: b"1" for n in range(100)})
    assert kv.stats().levels == (0, 1)
    loaded(kv, {b"%06d" % n: b"2" for n in range(100, 200)})
    assert kv.stats().levels == (0, 2), "in the same level"
    loaded(kv, {b"%06d" % n: b"3" for n in range(50, 150)})
    assert kv.stats().levels == (0, 2, 1), "in a deeper level, although it is newer"
    pairs = dict(kv.scan())
    assert [pairs[b"%06d" % n] for n in (0, 60, 120, 170)] == [b"1", b"3", b"3", b"2"]
    assert [kv.get(b"%06d" % n) for n in (0, 60, 120, 170)] == [b"1", b"3", b"3", b"2"]
    kv.put(b"000060", b"4")
    kv.flush()
    assert kv.get(b"000060") == b"4"
    kv.compact()
    assert dict(kv.scan())[b"000060"] == b"4"


def test_a_load_without_a_suitable_level_goes_to_level_0(kv: Kv) -> None:
    loaded(kv, numbered(500))
    tables = list(kv.view.levels)
    total = sum(table.size_bytes for table in tables)
    assert level_for(Levels(), tables, LsmSettings(level_bytes=total)) == 1
    assert level_for(Levels(), tables, LsmSettings(level_bytes=total - 1)) == 2
    full = Levels(tables)
    assert level_for(full, tables, SMALL) == 2
    assert level_for(Levels(), [*tables, *tables], SMALL) == 0, "they overlap each other"
    huge = [cast(SSTable, SimpleNamespace(meta=tables[0].meta, size_bytes=10**LEVELS_MAX * total))]
    assert level_for(Levels(), huge, LsmSettings(level_bytes=total)) == 0


def test_overlapping_tables_go_to_level_0_and_are_compacted(kv: Kv) -> None:
    rows = numbered(1_000)
    with begin_load(kv) as load:
        ids = []
        for part in (0, 1):
            writer = writer_for(load, kv)
            keys = [key for at, key in enumerate(rows) if at % 2 == part]
            writer.add(column([*keys]), column([rows[key] for key in keys]))
            ids += writer.finish()
        load.publish(ids)
    assert kv.stats().levels[0] == len(ids)
    assert dict(kv.scan()) == rows
    while kv.upkeep.compact_due():
        pass
    assert kv.stats().levels[0] < 4
    assert dict(kv.scan()) == rows


def test_the_level_in_a_loaded_file_is_the_one_it_has_after_the_next_open(tmp_path: Path) -> None:
    with Kv.open(OsDisk(), str(tmp_path / "db"), SMALL, background=False) as kv:
        loaded(kv, numbered(1_000))
        levels = kv.stats().levels
    with Kv.open(OsDisk(), str(tmp_path / "db"), SMALL, background=False) as kv:
        assert kv.stats().levels == levels == (0, levels[1])
        assert list(problems(kv)) == []
        for table, next_table in pairwise(kv.view.levels.deeper[0]):
            assert table.meta.key_max < next_table.meta.key_min


# ── once ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_numbered_load_is_recorded_even_after_its_tables_are_gone(tmp_path: Path) -> None:
    path = str(tmp_path / "db")
    with Kv.open(OsDisk(), path, SMALL, background=False) as kv:
        assert published(kv, 7) is None
        loaded(kv, numbered(300), number=7)
        assert published(kv, 7) == 300
        kv.write(dict.fromkeys(numbered(300)))
        kv.compact()
        assert kv.stats().tables == 0
    with Kv.open(OsDisk(), path, SMALL, background=False) as kv:
        assert published(kv, 7) == 300
        assert published(kv, 8) is None


def test_a_load_whose_event_could_not_be_written_is_not_applied(kv: Kv) -> None:
    with begin_load(kv) as load:
        writer = writer_for(load, kv)
        writer.add(column([b"a"]), column([b"1"]))
        ids = writer.finish()
        with failpoints.armed("lsm.manifest.appended", "raise:ENOSPC"), pytest.raises(StorageFault):
            load.publish(ids, number=5)
    assert published(kv, 5) is None
    assert list(kv.scan()) == []
    assert loaded(kv, {b"a": b"2"}, number=5) == 1


def test_a_load_that_could_not_be_recorded_stops_the_database_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables are live when the record fails: closing the load must not delete them as leftovers."""

    def full(disk: Disk, home: LsmHome, record: LoadRecord) -> None:
        if record.done:
            raise DiskFull("no space", path=home.path)
        write_load_record(disk, home, record)

    path = str(tmp_path / "db")
    kv = Kv.open(OsDisk(), path, SMALL, background=False)
    with monkeypatch.context() as patched:
        patched.setattr("quire.lsm.maintenance.write_load_record", full)
        with pytest.raises(DiskFull):
            loaded(kv, {b"a": b"1"}, number=5)
    with pytest.raises(StoreUnusable):
        kv.put(b"b", b"2")
    kv.abandon()
    with Kv.open(OsDisk(), path, SMALL, background=False) as kv:
        assert published(kv, 5) == 1
        assert dict(kv.scan()) == {b"a": b"1"}


def test_the_number_of_recorded_loads_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_records, "RECORDS_KEPT", 3)
    path, disk = str(tmp_path / "db"), OsDisk()
    Kv.open(disk, path, SMALL, background=False).close()
    for number in range(1, 7):
        write_load_record(disk, LsmHome(path), LoadRecord(number=number, at_ms=number, rows=1, ids=(), done=True))
    (Path(path) / "loads" / "0000000000000009.json.tmp").write_bytes(b"half")
    with Kv.open(disk, path, SMALL, background=False) as kv:
        assert [number for number in range(1, 10) if read_load_record(disk, kv.home, number)] == [4, 5, 6]
    assert sorted(load_number(entry.name) or 0 for entry in (Path(path) / "loads").iterdir()) == [4, 5, 6]


def test_late_files_of_a_finished_load_are_swept(kv: Kv) -> None:
    load = begin_load(kv)
    writer = writer_for(load, kv)
    writer.add(column([b"a"]), column([b"1"]))
    allocated = list(load.allocate(2))
    load.close()
    writer._take_ids = lambda _: allocated  # ids that it allocated before
    (sst_id, *_) = writer.finish()
    with pytest.raises(InvalidInput, match="do not belong to this load"):
        load.publish([sst_id])
    assert kv.disk.exists(kv.home.sst(sst_id))
    kv.upkeep.collect()
    assert not kv.disk.exists(kv.home.sst(sst_id))


POINTS = ("lsm.load.flushed", "lsm.load.announced", "lsm.load.recorded", "lsm.load.remembered")


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("tests.lsm.killed_load:run", warm_up="tests.lsm.killed_load:warm_up") as fork_server:
        yield fork_server


@pytest.mark.parametrize("point", [*POINTS, "lsm.sst.written", "lsm.manifest.appended", "lsm.manifest.synced"])
def test_a_killed_load_is_atomic_and_repeating_it_applies_it_once(
    fork_server: ForkServer, tmp_path: Path, point: str
) -> None:
    path = str(tmp_path / "db")
    with fork_server.spawn() as child:
        child.channel.send(json.dumps({"path": path, "failpoints": f"{point}=kill", "number": 9}).encode())
        assert child.wait() == -9, fork_server.errors()
    with Kv.open(OsDisk(), path, TINY, background=False) as kv:
        loaded_pairs, rows = dict(kv.scan(prefix=b"load")), published(kv, 9)
        assert kv.get(b"before") == b"1", "acknowledged writes survive"
        assert list(problems(kv)) == []
        assert (rows is not None) == bool(loaded_pairs), "recorded if and only if it was applied"
        if point in ("lsm.load.recorded", "lsm.load.remembered"):
            assert rows == 500
        if rows is None:
            assert point != "lsm.load.remembered"
            loaded(kv, {b"load%04d" % number: b"x" for number in range(500)}, number=9)
        assert dict(kv.scan(prefix=b"load")) == {b"load%04d" % number: b"x" for number in range(500)}
        assert published(kv, 9) == 500


def test_tables_are_opened_by_arrow_after_their_level_was_set(kv: Kv) -> None:
    loaded(kv, numbered(400))
    for table in kv.view.levels:
        assert isinstance(table, SSTable)
        with pa.ipc.open_file(table.path) as reader:
            assert reader.read_all().num_rows == table.meta.rows
        assert list(table.verify()) == []


def test_all_rows_of_a_load_have_one_lsn(kv: Kv) -> None:
    loaded(kv, numbered(400))
    lsns = {int(lsn) for table in kv.view.levels for batch in table.batches() for lsn in np.unique(batch.column(2))}
    assert lsns == {kv.last_lsn}
