"""Stats: sums are those of a plain loop, however rows are cut into waves; what comes back is a line for each holder."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
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
from quire.jobs.stats.run import SUMS, TIER, WHOLE, Holder, join_shares
from quire.jobs.worker import Worker
from quire.manifest.records import JobKind, JobState, Residency
from quire.store.usage import usage_of
from tests.jobs.checkpoint_child import Owner, images
from tests.pages.world import Model, write

FACTS = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 5)),
    st.tuples(st.integers(0, 2**50), st.integers(0, 2**30), st.booleans(), st.sampled_from(Residency), st.booleans()),
    max_size=8,
)
HOLDINGS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 3), st.integers(0, 3)), max_size=30)


def by_hand(facts: dict[Any, Any], holdings: list[tuple[int, int, int, int]]) -> dict[Holder, dict[str, int]]:
    """What the words of `run.py` say, one by one."""
    holders: dict[tuple[int, int], set[Holder]] = defaultdict(set)
    for first, second, db_id, snapshot in holdings:
        holders[first, second].add((db_id, snapshot))
    shares: dict[Holder, Counter[str]] = defaultdict(Counter)
    for artifact, held_by in holders.items():
        if artifact not in facts:
            continue
        size, pages, is_young, residency, is_wal = facts[artifact]
        databases = {db_id for db_id, _ in held_by}
        for holder in [*(each for each in held_by if each[1]), *((db_id, WHOLE) for db_id in databases)]:
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


@given(FACTS, HOLDINGS, st.integers(1, 5))
def test_sums_are_those_of_a_plain_loop(facts: Any, holdings: Any, step: int) -> None:
    rows = {
        "fact": np.array([(*code, *map(int, fact)) for code, fact in facts.items()], np.uint64).reshape(-1, 7),
        "holding": np.array(holdings, np.uint64).reshape(-1, 4),
    }
    parts = [(sort, some[at : at + step]) for sort, some in rows.items() for at in range(0, len(some), step)]
    nothing: Any = None
    total = Totals()
    total.add(join_shares((0, 0), None, parts, nothing))
    found = {
        holder: {name: amount for name, amount in zip(SUMS, sums) if amount}
        for holder, sums in total.by_holder().items()
    }
    wanted = {
        holder: {name: amount for name, amount in sums.items() if amount}
        for holder, sums in by_hand(facts, holdings).items()
    }
    assert found == wanted


class Weighing:
    """A runner that weighs what it is given, and what it gives back."""

    def __init__(self, runner: Any, sent: list[int], answers: list[int]) -> None:
        self._runner, self._sent, self._answers = runner, sent, answers
        self.name = runner.name

    def regroup(self, split: Any, inputs: Sequence[Any], join: Any, *, tick: Any) -> Iterator[TaskResult[Any, Any]]:
        self._sent.append(sum(len(each.rows) for each in inputs))
        for answer in self._runner.regroup(split, inputs, join, tick=tick):
            self._answers.append(len(pickle.dumps(answer)))
            yield answer


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    """Two databases of twenty chunks and a fork, eight snapshots: many hold the same."""
    made = Owner(tmp_path)
    for name in ("shop", "blog"):
        store, model = made.database(name), Model()
        write(store, model, images(*range(160)))
        made.manifest.jobs.enqueue(JobKind.CHECKPOINT, store.db_id, None)
        made.worker(JobKind.CHECKPOINT).drain()
    for number in range(8):
        write(made.database("shop"), Model(), images(number * 8))
        made.engine.snapshot("shop", f"at {number}")
        made.ask()
        made.worker(JobKind.CHECKPOINT).drain()
    made.engine.fork("shop", "fork")
    yield made
    made.stop()


def stats(owner: Owner, runners: Runners) -> tuple[list[Any], dict[str, Any]]:
    found: list[Any] = []
    job_id = owner.manifest.jobs.enqueue(JobKind.STATS, 0)
    context = replace(owner.context(), runners=runners)
    Worker(context, {JobKind.STATS: partial(stats_job, into=found.extend)}).drain()
    job = owner.job(job_id)
    assert job.state is JobState.SUCCEEDED, job.record.error
    result: dict[str, Any] = job.result
    return found, result


@pytest.mark.parametrize("wave_rows", [1, 40, 1_000_000])
def test_the_driver_never_has_more_than_a_wave_and_gets_lines_of_sums(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, wave_rows: int
) -> None:
    whole, told = stats(owner, Runners())
    assert told["rows"] > 300, "many holdings of few artifacts"
    monkeypatch.setattr(stats_module, "WAVE_ROWS", wave_rows)
    monkeypatch.setattr(stats_module, "STEP_ROWS", 16)
    monkeypatch.setattr(audit_run, "ID_BITS", 1)
    largest_piece = 2 * (1 + 2 * 11) + 8  # two ids, each with its generations, held by two databases and nine snapshots
    sent, answers = list[int](), list[int]()
    make: Callable[[], Any] = lambda: Weighing(owner.context().thread_runner(), sent, answers)  # noqa: E731
    found, cut_up = stats(owner, Runners(make, "spark"))
    assert found == whole
    with owner.manifest.read() as txn:
        assert usage(txn, owner.clock.now_ms()) == whole, "without a runner, too"
    assert cut_up["rows"] == told["rows"] == sum(sent)
    assert max(sent) <= max(wave_rows, largest_piece)
    assert (len(sent) > 3) == (wave_rows < 1_000)
    assert max(answers) <= len(whole) * 8 * (2 + len(SUMS)) + 1_000, "a line for each holder, whatever it holds"


def test_one_database_alone_has_the_figures_of_the_sum(owner: Owner) -> None:
    now_ms = owner.manifest.clock.now_ms()
    with owner.manifest.read() as txn:
        alone = [row for db_id, record in txn.databases() for row in usage_of(txn, db_id, record, now_ms)]
        assert alone == usage(txn, now_ms)
    assert any(row.shared_bytes for row in alone)
    assert any(row.exclusive_bytes for row in alone)
