"""checkpoint and merge: one job each, run now."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.clock import SystemClock
from quire.core.errors import DiskFull
from quire.durable.files import OsDisk
from quire.jobs.checkpoint import many
from quire.jobs.checkpoint.run import join_slot
from quire.jobs.registry import HANDLERS
from quire.manifest.records import JobKind, JobState
from quire.manifest.tables import WAL_CATALOG
from quire.pages.leasefiles import FileLease
from tests.cli.conftest import Run, first_byte, write_pages


def test_a_checkpoint_absorbs_the_wal(run: Run, shop: Path) -> None:
    ended = run("checkpoint", "shop")
    assert ended.code == 0
    assert ended.out.startswith("checkpoint of shop: 1 slot written (4 pages, ")
    assert "1 WAL segment absorbed, generation 2, up to lsn 20" in ended.out
    assert run("checkpoint", "shop").out == "shop needs no checkpoint: the WAL is empty\n"
    assert first_byte(shop, "shop") == b"b"
    with quire.open(shop, "r") as store, store.manifest.read() as txn:
        assert {row.state.name for _, row in txn.scan(WAL_CATALOG, 1)} == {"TRUNCATED"}, (
            "the job it leads to was run too"
        )


def test_a_merge_rewrites_long_chains(run: Run, shop: Path) -> None:
    assert run("merge", "shop").out == "shop needs no merge: its chunks have no deltas\n"
    run("checkpoint", "shop")
    assert run("merge", "shop").out.startswith("merge of shop: 1 slot written (16 pages, ")
    with quire.open(shop, "r") as store, store.manifest.read() as txn:
        assert len(txn.chain(1, 0)) == 1


def test_programs_get_the_job(run: Run, shop: Path) -> None:
    data = run("checkpoint", "shop", "--json").data
    assert (data["kind"], data["state"], data["database"], data["result"]["slots"]) == (
        "checkpoint",
        "succeeded",
        "shop",
        1,
    )


@pytest.mark.parametrize(
    ("command", "database", "code"), [("checkpoint", "nothing", 3), ("merge", "nothing", 3), ("merge", "clicks", 2)]
)
def test_other_databases_are_refused_and_no_job_is_made(
    run: Run, path: Path, command: str, database: str, code: int
) -> None:
    ended = run(command, database)
    assert (ended.code, ended.out) == (code, "")
    assert run("jobs", "ls", "--json").data == []


def test_the_outstanding_job_is_the_one_that_runs(run: Run, shop: Path) -> None:
    """One that an interrupted command has put back, say: a second would be refused."""
    with quire.open(shop) as store:
        job_id = store.manifest.jobs.enqueue(JobKind.CHECKPOINT, 1, delay_seconds=3600)
    assert run("checkpoint", "shop", "--json").data["job_id"] == job_id


def test_a_job_that_fails_is_an_error_of_its_group(
    run: Run, shop: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise DiskFull("no space left", hint="make some", path="/x")

    monkeypatch.setitem(HANDLERS, JobKind.CHECKPOINT, full)
    ended = run("checkpoint", "shop")
    assert (ended.code, ended.out) == (6, "")
    told, then = ended.err.splitlines()[-2:]
    assert told == "error: the checkpoint of shop failed: no space left (path='/x') (job_id=4)"
    assert "the job will be retried" in then
    for _ in range(4):
        ended = run("checkpoint", "shop", "--json")
    error = json.loads(ended.err.splitlines()[-1])["error"]
    assert (error["kind"], error["exit_code"]) == ("DiskFull", 6)
    assert "`quire jobs retry 4`" in error["next"]
    assert run("jobs", "show", "4", "--json").data["state"] == "failed_permanent"


def test_a_bug_in_a_job_is_an_internal_error(
    run: Run, shop: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(HANDLERS, JobKind.CHECKPOINT, lambda *_, **__: 1 // 0)
    assert run("checkpoint", "shop").code == 70


def test_an_owner_that_crashed_left_commits(run: Run, shop: Path) -> None:
    from tests.cli.test_snapshots import crash_while_writing

    crash_while_writing(shop)
    assert "1 WAL segment absorbed" in run("checkpoint", "shop").out.replace("2 WAL segments", "1 WAL segment")
    assert first_byte(shop, "shop") == b"z"


def test_jobs_of_a_store_that_is_written_meanwhile(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        write_pages(store, "shop", range(8), b"c")
        assert store.checkpoint("shop").state is JobState.SUCCEEDED
    assert run("checkpoint", "shop").out.startswith("shop needs no checkpoint")


# ── many at once ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_all_databases_in_one_run(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.create("other", "pages")
        write_pages(store, "other", range(8), b"c")
    waiting = run("checkpoint", "--all", "--dry-run", "--json").data
    assert {each["database"] for each in waiting} == {"shop", "other"}
    ended = run("checkpoint", "--all", "--runner", "threads")
    assert ended.code == 0
    assert ended.out.startswith("checkpoint of 2 databases: 2 slots written (")
    assert run("checkpoint", "--all", "--dry-run").out == "nothing to checkpoint\n"
    data = run("checkpoint", "shop", "other", "--json").data
    assert (data["databases"], data["slots"], data["failed"]) == (2, 0, [])
    assert [each["database"] for each in run("merge", "--all", "--dry-run", "--json").data] == ["shop"]
    assert run("merge", "--all", "--json").data["slots"] == 1
    assert first_byte(shop, "shop") == b"b"


def test_databases_or_all_of_them_and_a_runner_that_is_one(run: Run, shop: Path) -> None:
    assert run("checkpoint").code == 2
    assert run("checkpoint", "shop", "--all").code == 2
    ended = run("checkpoint", "shop", "--runner", "cluster")
    assert (ended.code, ended.out) == (2, "")
    assert "auto, threads, spark" in ended.err


def test_those_that_fail_are_listed_below_the_others(
    run: Run, shop: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with quire.open(shop) as store:
        store.create("other", "pages")
        write_pages(store, "other", range(8), b"c")

    def join(key: Any, *more: Any) -> Any:
        if key[0] == 1:
            raise DiskFull("no space left", hint="make some", path="/x")
        return join_slot(key, *more)

    monkeypatch.setattr(many, "join_slot", join)
    ended = run("checkpoint", "--all", "--runner", "threads")
    assert ended.code == 1
    lines = [line for line in ended.out.splitlines() if line]
    assert lines[0].startswith("checkpoint of 2 databases: 1 slot written (")
    assert lines[1].split() == ["failed", "why"]
    assert lines[2].split(maxsplit=1)[0] == "shop"
    assert "DiskFull: no space left" in lines[2]
    assert "\\n" not in ended.out


def test_evict_and_hydrate_say_what_they_moved(run: Run, shop: Path) -> None:
    run("snapshot", "create", "shop", "before")
    run("checkpoint", "shop")
    assert run("evict", "shop").out.startswith("evict of shop: 1 artifact, ")
    assert run("hydrate", "shop", "--json").data["artifacts"] > 1
    assert run("evict", "clicks").code == 2, "a stream has tiers of its own"
    assert first_byte(shop, "shop") == b"b"


def test_a_reader_beside_the_owner_is_named_where_it_is_in_the_way(run: Run, shop: Path) -> None:
    """`checkpoint`, `why` and `info` used to say that nothing held the WAL."""
    with quire.open(shop) as store, store.manifest.read() as txn:
        wal = txn.wal_state(1)
    assert wal is not None
    tags = {"who": "report"}
    lease = FileLease.take(OsDisk(), SystemClock(), str(shop), db_id=1, lsn=wal.last_applied_lsn, tags=tags)
    with closing(lease):
        with quire.open(shop) as store:
            write_pages(store, "shop", range(1), b"z")
        run("checkpoint", "shop")
        who = f"(pid {os.getpid()} on {os.uname().nodename}, who=report, since "
        told = run("checkpoint", "shop").out
        assert told.startswith("shop was not checkpointed: 1 WAL segment (")
        assert who in told
        assert run("checkpoint", "shop", "--json").data["result"]["readers"][0]["pid"] == os.getpid()
        holders = run("why", "shop", "--json").data["holders"]
        assert any(each["kind"] == "reader" and who in each["what"] for each in holders)
        readers = run("info", "--json").data["page_readers"]
        assert [(each["pid"], each["tags"]) for each in readers] == [
            (os.getpid(), {"database": "shop", "who": "report"})
        ]
        assert f"pid {os.getpid()} on" in run("info").out
    assert run("checkpoint", "shop").out.startswith("checkpoint of shop: 1 slot written")
    assert run("info", "--json").data["page_readers"] == []
