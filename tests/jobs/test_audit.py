"""The audit recomputes reference counts, heads and floors from rows; every planted difference is reported with its
name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import ObjectStoreUnavailable
from quire.core.ids import ArtifactKind
from quire.jobs.audit import job as audit_module
from quire.jobs.audit import run
from quire.jobs.audit.job import audit_job
from quire.jobs.audit.run import join_blocks, split_block
from quire.jobs.runner import ThreadRunner
from quire.jobs.sweep import job as sweep_module
from quire.jobs.worker import Worker
from quire.manifest import check, holders
from quire.manifest import tables as t
from quire.manifest.records import JobKind, JobState, LeafRecord, RefcountRecord
from quire.manifest.store import ManifestStore
from tests.jobs.checkpoint_child import Owner, images
from tests.manifest.test_check import Vandal
from tests.pages.engine_harness import Model, write

Damage = Callable[[Vandal], None]


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    """Two databases with chunks, a snapshot, a fork, and versions that are only in the WAL."""
    owner = Owner(tmp_path)
    for name in ("shop", "blog"):
        store, model = owner.database(name), Model()
        write(store, model, images(*range(20)))
        owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, store.db_id, None)
        owner.worker(JobKind.CHECKPOINT).drain()
    owner.engine.snapshot("shop", "early")
    owner.engine.fork("shop", "fork")
    write(owner.database("blog"), Model(), images(3, 4))
    owner.engine.flush(2)
    return owner


def audit(owner: Owner) -> dict[str, Any]:
    """Run an audit now; returns its result."""
    job_id = owner.manifest.jobs.enqueue(JobKind.AUDIT)
    Worker(owner.context(), {JobKind.AUDIT: audit_job}).drain()
    job = owner.job(job_id)
    assert job.state is JobState.SUCCEEDED, job.record.error
    result: dict[str, Any] = job.result
    return result


def test_a_sound_store_has_no_differences(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    result = audit(owner)
    assert (result["differences"], result["found"]) == (0, [])
    assert result["rows"] > 40
    monkeypatch.setattr(audit_module, "STEP_ROWS", 3)
    assert audit(owner)["differences"] == 0, "for any step size"
    owner.stop()


@pytest.mark.parametrize("rows", [1, 5, 1_000])
def test_versions_and_heads_of_a_page_are_compared_together_for_any_wave_size(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Pages of several databases, far apart. A wave ends between two pieces, wherever it has enough rows."""
    for name, pages in (("blog", (0, 1, 9, 10, 30, 31, 32)), ("more", (2, 3, 17)), ("shop", (5, 40, 41))):
        store = owner.database(name)
        for _ in range(3):
            write(store, Model(), images(*pages))
        owner.engine.flush(store.db_id)
    complete = audit(owner)
    assert (complete["differences"], complete["found"]) == (0, [])
    monkeypatch.setattr(audit_module, "STEP_ROWS", 4)
    monkeypatch.setattr(audit_module, "WAVE_ROWS", rows)
    for module in (audit_module, run):
        monkeypatch.setattr(module, "PIECE_BITS", 3)
    result = audit(owner)
    assert (result["differences"], result["rows"]) == (0, complete["rows"])
    with owner.manifest.read() as txn:
        waves = list(audit_module.waves(txn))
    assert (len(waves) > 5) == (rows < 10)
    assert [wave.done for wave in waves] == sorted(wave.done for wave in waves)
    assert rows > 10 or max(sum(len(block.rows) for block in wave.blocks) for wave in waves) <= 60
    owner.stop()


def test_references_are_compared_in_waves_that_keep_a_piece_together(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver holds a bounded number of references at a time, however many exist."""
    for number in range(6):
        owner.engine.snapshot("shop", f"at {number}")
    complete = audit(owner)
    monkeypatch.setattr(audit_module, "REFERENCE_ROWS", 10)
    monkeypatch.setattr(run, "ID_BITS", 0)
    batch_rows: list[int] = []
    regroup = ThreadRunner.regroup

    def count_rows(self: Any, split: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batch_rows.append(sum(len(part.rows) for part in inputs))
        return regroup(self, split, inputs, *args, **kwargs)

    monkeypatch.setattr(ThreadRunner, "regroup", count_rows)
    result = audit(owner)
    assert (result["differences"], result["rows"]) == (0, complete["rows"])
    with owner.manifest.read() as txn:
        waves = [
            wave for wave in audit_module.waves(txn) if wave.blocks and wave.blocks[0].sort not in ("version", "head")
        ]
    assert len(waves) > 3
    assert len(batch_rows) >= len(waves)
    assert max(len(block.rows) for wave in waves for block in wave.blocks) <= 10
    assert max(sum(len(block.rows) for block in wave.blocks) for wave in waves) <= 14, (
        "all kinds of an id are in one piece"
    )
    owner.stop()


def test_unreadable_rows_are_differences_and_the_rest_is_compared(owner: Owner) -> None:
    path = str(owner.base / "manifest.lmdb")
    owner.stop()
    vandal = Vandal(path)
    vandal.put(t.GC_REFCOUNTS, b"\x01\x00", 1, ArtifactKind.BASE, 0, 1, 0)
    vandal.delete(t.PAGE_VERSION_HEAD, 2, 4)
    vandal.done()
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        (unread,) = (wave.unread for wave in audit_module.waves(txn) if wave.unread)
        assert unread.startswith("references cannot be compared")
        assert [difference.rule for difference in _differences(txn)] == ["P1"]
    vandal = Vandal(path)
    vandal.put(t.PAGE_VERSION_HEAD, b"\x01\x00", 2, 3)
    vandal.done()
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        descriptions = [audit_module.described_unread(wave) for wave in audit_module.waves(txn) if wave.unread]
    assert [(row["state"], row["what"].split()[0]) for row in descriptions] == [("K1", "references"), ("K1", "pages")]


def test_an_audit_counts_nothing_on_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner counts; the driver only checks the other rules, such as those of chains."""

    def fail(*_: Any) -> Any:
        raise AssertionError("the driver counted")

    with quire.open(tmp_path / "store") as store:
        store.create("shop", "pages")
        with store.pages.open("shop").begin() as txn:
            txn.write_pages({page: bytes([page]) * 4_096 for page in range(8)})
        store.checkpoint("shop", runner="threads")
        for module, name in ((holders, "count_holders"), (check, "_newest_versions")):
            monkeypatch.setattr(module, name, fail)
        assert store.heavy.audit(runner="threads").num_rows == 0
        env = store.manifest.env
        damage: Any = env.begin_write()
        key = t.SLOT_LEAF.key.pack(1, 0, 1)
        sound = damage.get(key, db=env.handles["slot_leaf"])
        entries = t.SLOT_LEAF.rows.decode(key, sound).entries
        twice = t.SLOT_LEAF.rows.encode(key, LeafRecord(entries * 2))
        damage.put(key, twice, db=env.handles["slot_leaf"])
        damage.commit()
        states = store.heavy.audit(runner="threads").column("state").to_pylist()
        assert sorted(states) == ["R1", "S4"], "a chain of two bases, each of which is a reference"
        damage = env.begin_write()
        damage.put(key, sound, db=env.handles["slot_leaf"])
        damage.commit()


def test_an_audit_without_a_listing_is_an_error_not_an_empty_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: Any) -> Any:
        raise ObjectStoreUnavailable("the store is unavailable", url="test")

    with quire.open(tmp_path / "store") as store:
        store.create("shop", "pages")
        monkeypatch.setattr(sweep_module, "list_range", unavailable)
        with pytest.raises(ObjectStoreUnavailable):
            store.heavy.audit(runner="threads")
        assert [job.state for job in store.manifest.jobs.jobs() if job.kind is JobKind.SWEEP] == [JobState.CANCELLED]


DAMAGES: dict[str, tuple[str, str, Damage]] = {
    "a count too high": (
        "R1", "its reference count is 7, but it is held ",
        lambda v: v.change(t.GC_REFCOUNTS, 1, ArtifactKind.BASE, 0, 1, 0, in_use=7),
    ),
    "a count that is missing": (
        "R1", "its reference count is 0, but it is held ",
        lambda v: v.delete(t.GC_REFCOUNTS, 1, ArtifactKind.BASE, 1, 1, 0),
    ),
    "a count of nothing": (
        "R1", "its reference count is 1, but it is held 0 times",
        lambda v: v.put(t.GC_REFCOUNTS, RefcountRecord(1), 9, ArtifactKind.BASE, 5, 5, 0),
    ),
    "a chunk without its row": ("S2", "not in the catalog", lambda v: v.delete(t.CHUNK_CATALOG, 1, 1, 1)),
    "an old head": (
        "P1", "database 2, page 3: the head of a page is (1, ", lambda v: v.change(t.PAGE_VERSION_HEAD, 2, 3, lsn=1),
    ),
    "no head": ("P1", "database 2, page 4: the head of a page is missing", lambda v: v.delete(t.PAGE_VERSION_HEAD, 2, 4)),
    "a head of nothing": (
        "P1", "page 99: the head of a page is (9, 9), its newest version missing",
        lambda v: v.put(t.PAGE_VERSION_HEAD, t.PAGE_VERSION_HEAD.codec.record_type(9, 9), 2, 99),
    ),
    "a floor above what is published": (
        "L1", f"database 1: the floor of a database is {1 << 40}",
        lambda v: v.change(t.SNAPSHOT_FLOOR, 1, min_snapshot_lsn=1 << 40),
    ),
    "a floor below what is absorbed": (
        "L1", "database 2: the floor of a database is 0", lambda v: v.change(t.SNAPSHOT_FLOOR, 2, min_snapshot_lsn=0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_every_difference_is_found_by_its_rule(owner: Owner, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, text, damage = DAMAGES[name]
    path = str(owner.base / "manifest.lmdb")
    owner.stop()
    vandal = Vandal(path)
    damage(vandal)
    vandal.done()
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        described = [
            audit_module.described(difference) for difference in (*_differences(txn), *audit_module.floors(txn))
        ]
        for setting, small in (("STEP_ROWS", 2), ("WAVE_ROWS", 1), ("REFERENCE_ROWS", 1), ("PIECE_BITS", 1)):
            monkeypatch.setattr(audit_module, setting, small)
        for setting in ("PIECE_BITS", "ID_BITS"):
            monkeypatch.setattr(run, setting, 1)
        again = [audit_module.described(difference) for difference in (*_differences(txn), *audit_module.floors(txn))]
    assert sorted(map(str, again)) == sorted(map(str, described)), "for any wave size"
    if rule == "S2":  # the row also held its object's namespace, which has no object itself
        (namespace_row,) = (row for row in described if "NAMESPACE" in row.get("artifact", ""))
        assert namespace_row["state"] == "R1"
        described.remove(namespace_row)
    assert [row["state"] for row in described] == [rule]
    assert text in described[0]["what"]
    assert rule in ("P1", "L1") or described[0]["artifact"]


def _differences(txn: Any) -> Iterator[Any]:
    unused: Any = None
    for wave in audit_module.waves(txn):
        grouped: dict[Any, list[Any]] = {}
        for key, part in chain.from_iterable(split_block(block, unused) for block in wave.blocks):
            grouped.setdefault(key, []).append(part)
        for key, parts in grouped.items():
            yield from join_blocks(key, None, parts, unused)
