"""Stats: sums equal those of a plain loop, however rows are split into waves; the result has one row per holder."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.jobs.audit import run as audit_run
from quire.jobs.runner import Runners, TaskResult
from quire.jobs.stats import job as stats_module
from quire.jobs.stats.job import Totals, stats_job, usage
from quire.jobs.stats.run import SUMS, TIER, WHOLE, join_shares
from quire.jobs.worker import Worker
from quire.manifest.kv_tables import table_holders
from quire.manifest.records import JobKind, JobState, Residency
from quire.store.usage import usage_of
from tests.jobs.checkpoint_child import Owner, images
from tests.pages.engine_harness import Model, write

Holder = tuple[int, int]
"""(database, snapshot)."""

FACTS = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 5)),
    st.tuples(st.integers(0, 2**50), st.integers(0, 2**30), st.booleans(), st.sampled_from(Residency), st.booleans()),
    max_size=8,
)
HOLDINGS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 3), st.integers(0, 3)), max_size=30)


def plain_sums(facts: dict[Any, Any], holdings: list[tuple[int, int, int, int]]) -> dict[Holder, dict[str, int]]:
    """The definitions of `run.py`, computed one artifact at a time."""
    holders: dict[tuple[int, int], set[Holder]] = defaultdict(set)
    for first, second, db_id, snapshot in holdings:
        holders[first, second].add((db_id, snapshot))
    shares: dict[Holder, Counter[str]] = defaultdict(Counter)
    for artifact, held_by in holders.items():
        if artifact not in facts:
            continue
        size, pages, is_young, residency, is_wal = facts[artifact]
        databases = {db_id for db_id, _ in held_by}
        for holder in [*(entry for entry in held_by if entry[1]), *((db_id, WHOLE) for db_id in databases)]:
            alone = len(databases if holder[1] == WHOLE else held_by) == 1
            shares[holder].update(
                {
                    "artifacts": 1,
                    "size_bytes": size,
                    "exclusive_bytes" if alone else "shared_bytes": size,
                    "wal_bytes" if is_wal else "chunk_bytes": size,
                    "plain_pages": pages,
                    "churn_bytes": size * is_young,
                    TIER + residency.name.lower(): size,
                }
            )
    return {holder: dict(sums) for holder, sums in shares.items()}


def by_holder(total: Totals, databases: Iterable[int]) -> dict[Holder, list[int]]:
    sums_of = total.by_database()
    return {(db_id, snapshot): sums for db_id in databases for snapshot, sums in sums_of(db_id).items()}


@given(FACTS, HOLDINGS, st.integers(1, 5))
def test_sums_equal_those_of_a_plain_loop(facts: Any, holdings: Any, step: int) -> None:
    rows = {
        "fact": np.array([(*code, *map(int, fact)) for code, fact in facts.items()], np.uint64).reshape(-1, 7),
        "holding": np.array(holdings, np.uint64).reshape(-1, 4),
    }
    parts = [
        (sort, table[start : start + step]) for sort, table in rows.items() for start in range(0, len(table), step)
    ]
    unused: Any = None
    total = Totals()
    total.add(join_shares((0, 0), None, parts, unused))
    sums_by_holder = {
        holder: {name: amount for name, amount in zip(SUMS, sums) if amount}
        for holder, sums in by_holder(total, {row[2] for row in holdings}).items()
    }
    expected = {
        holder: {name: amount for name, amount in sums.items() if amount}
        for holder, sums in plain_sums(facts, holdings).items()
    }
    assert sums_by_holder == expected


class MeasuringRunner:
    """A runner that records the size of its inputs and outputs."""

    def __init__(self, runner: Any, input_rows: list[int], result_bytes: list[int]) -> None:
        self._runner, self._input_rows, self._result_bytes = runner, input_rows, result_bytes
        self.name = runner.name

    def regroup(self, split: Any, inputs: Sequence[Any], join: Any, *, tick: Any) -> Iterator[TaskResult[Any, Any]]:
        self._input_rows.append(sum(len(block.rows) for block in inputs))
        for result in self._runner.regroup(split, inputs, join, tick=tick):
            self._result_bytes.append(len(pickle.dumps(result)))
            yield result


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    """Two databases of twenty chunks and a fork, with eight snapshots: many hold the same artifacts."""
    owner = Owner(tmp_path)
    for name in ("shop", "blog"):
        store, model = owner.database(name), Model()
        write(store, model, images(*range(160)))
        owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, store.db_id, None)
        owner.worker(JobKind.CHECKPOINT).drain()
    for number in range(8):
        write(owner.database("shop"), Model(), images(number * 8))
        owner.engine.snapshot("shop", f"at {number}")
        owner.enqueue()
        owner.worker(JobKind.CHECKPOINT).drain()
    owner.engine.fork("shop", "fork")
    yield owner
    owner.stop()


def stats(owner: Owner, runners: Runners) -> tuple[list[Any], dict[str, Any]]:
    rows: list[Any] = []
    job_id = owner.manifest.jobs.enqueue(JobKind.STATS, 0)
    context = replace(owner.context(), runners=runners)
    Worker(context, {JobKind.STATS: partial(stats_job, into=rows.extend)}).drain()
    job = owner.job(job_id)
    assert job.state is JobState.SUCCEEDED, job.record.error
    result: dict[str, Any] = job.result
    return rows, result


@pytest.mark.parametrize("wave_rows", [1, 40, 1_000_000])
def test_the_driver_never_has_more_than_a_wave_and_receives_only_sums(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, wave_rows: int
) -> None:
    expected, summary = stats(owner, Runners())
    assert summary["rows"] > 300, "many holdings of few artifacts"
    monkeypatch.setattr(stats_module, "WAVE_ROWS", wave_rows)
    monkeypatch.setattr(stats_module, "STEP_ROWS", 16)
    monkeypatch.setattr(audit_run, "ID_BITS", 1)
    largest_piece = 2 * (1 + 2 * 11) + 8  # two ids with their generations, held by two databases and nine snapshots
    input_rows, result_bytes = list[int](), list[int]()
    make_runner: Callable[[], Any] = lambda: MeasuringRunner(owner.context().thread_runner(), input_rows, result_bytes)  # noqa: E731
    rows, wave_summary = stats(owner, Runners(make_runner, "spark"))
    assert rows == expected
    with owner.manifest.read() as txn:
        assert list(usage(txn, owner.clock.now_ms())) == expected, "without a runner the result is the same"
    assert wave_summary["rows"] == summary["rows"] == sum(input_rows)
    assert max(input_rows) <= max(wave_rows, largest_piece)
    assert (len(input_rows) > 3) == (wave_rows < 1_000)
    assert max(result_bytes) <= len(expected) * 8 * (2 + len(SUMS)) + 1_000, "one row per holder, however much it holds"


def test_figures_of_single_databases_add_up_to_those_of_the_store(owner: Owner) -> None:
    now_ms = owner.manifest.clock.now_ms()
    with owner.manifest.read() as txn:
        alone = [
            row for db_id, record in txn.databases() for row in usage_of(txn, db_id, record, now_ms, table_holders(txn))
        ]
        assert alone == list(usage(txn, now_ms))
    assert any(row.shared_bytes for row in alone)
    assert any(row.exclusive_bytes for row in alone)
