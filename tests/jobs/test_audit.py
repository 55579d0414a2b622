"""Audits: reference counts, heads and floors computed again from rows; every difference that is planted is found, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from quire.core.ids import ArtifactKind
from quire.jobs.audit import plan, run
from quire.jobs.audit.handler import audit_job
from quire.jobs.audit.run import join_blocks, split_block
from quire.jobs.worker import Worker
from quire.manifest import tables as t
from quire.manifest.records import JobKind, JobState, RefcountRecord
from quire.manifest.store import ManifestStore
from tests.jobs.checkpoint_child import Owner, images
from tests.manifest.test_check import Vandal
from tests.pages.world import Model, write

Damage = Callable[[Vandal], None]


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    """Two databases with chunks, a snapshot, a fork, and versions that are only in the WAL."""
    made = Owner(tmp_path)
    for name in ("shop", "blog"):
        store, model = made.database(name), Model()
        write(store, model, images(*range(20)))
        made.manifest.enqueue_job(JobKind.CHECKPOINT, store.db_id, None)
        made.worker(JobKind.CHECKPOINT).drain()
    made.engine.snapshot("shop", "early")
    made.engine.fork("shop", "fork")
    write(made.database("blog"), Model(), images(3, 4))
    made.engine.flush(2)
    return made


def audit(owner: Owner) -> dict[str, Any]:
    """Run an audit now; its result."""
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
    monkeypatch.setattr(plan, "STEP_ROWS", 3)
    assert audit(owner)["differences"] == 0, "however rows are cut"
    owner.stop()


@pytest.mark.parametrize("rows", [1, 5, 1_000])
def test_versions_and_heads_of_a_page_are_compared_together_however_waves_are_cut(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Pages of several databases, far apart; a wave ends between two pieces, wherever its rows run out."""
    for name, pages in (("blog", (0, 1, 9, 10, 30, 31, 32)), ("more", (2, 3, 17)), ("shop", (5, 40, 41))):
        store = owner.database(name)
        for _ in range(3):
            write(store, Model(), images(*pages))
        owner.engine.flush(store.db_id)
    whole = audit(owner)
    assert (whole["differences"], whole["found"]) == (0, [])
    monkeypatch.setattr(plan, "STEP_ROWS", 4)
    monkeypatch.setattr(plan, "WAVE_ROWS", rows)
    for module in (plan, run):
        monkeypatch.setattr(module, "PIECE_BITS", 3)
    result = audit(owner)
    assert (result["differences"], result["rows"]) == (0, whole["rows"])
    with owner.manifest.read() as txn:
        cut = list(plan.waves(txn))
    assert (len(cut) > 5) == (rows < 10)
    assert rows > 10 or max(sum(len(block.rows) for block in wave) for wave in cut[1:]) <= 60
    owner.stop()


DAMAGES: dict[str, tuple[str, str, Damage]] = {
    "a count too high": (
        "R1", "its reference count is 7, it is held ",
        lambda v: v.change(t.GC_REFCOUNTS, 1, ArtifactKind.BASE, 0, 1, 0, in_use=7),
    ),
    "a count that is missing": (
        "R1", "its reference count is 0, it is held ",
        lambda v: v.delete(t.GC_REFCOUNTS, 1, ArtifactKind.BASE, 1, 1, 0),
    ),
    "a count of nothing": (
        "R1", "its reference count is 1, it is held 0 times",
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
    rule, words, damage = DAMAGES[name]
    path = str(owner.base / "manifest.lmdb")
    owner.stop()
    vandal = Vandal(path)
    damage(vandal)
    vandal.done()
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        found = [plan.told(each) for each in (*_differences(txn), *plan.floors(txn))]
        for module, setting, small in ((plan, "STEP_ROWS", 2), (plan, "WAVE_ROWS", 1), (plan, "PIECE_BITS", 1)):
            monkeypatch.setattr(module, setting, small)
        monkeypatch.setattr(run, "PIECE_BITS", 1)
        assert [plan.told(each) for each in (*_differences(txn), *plan.floors(txn))] == found, "however waves are cut"
    assert [each["state"] for each in found] == [rule]
    assert words in found[0]["what"]
    assert rule in ("P1", "L1") or found[0]["artifact"]


def _differences(txn: Any) -> Iterator[Any]:
    nothing: Any = None
    for wave in plan.waves(txn):
        grouped: dict[Any, list[Any]] = {}
        for key, part in chain.from_iterable(split_block(block, nothing) for block in wave):
            grouped.setdefault(key, []).append(part)
        for key, parts in grouped.items():
            yield from join_blocks(key, None, parts, nothing)
