"""checkpoint and merge: each runs one job immediately."""

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
    result = run("checkpoint", "shop")
    assert result.code == 0
    assert result.out.startswith("checkpoint of shop: 1 slot written (4 pages, ")
    assert "1 WAL segment absorbed, generation 2, up to lsn 20" in result.out
    assert run("checkpoint", "shop").out == "shop needs no checkpoint: the WAL is empty\n"
    assert first_byte(shop, "shop") == b"b"
    with quire.open(shop, "r") as store, store.manifest.read() as txn:
        assert {row.state.name for _, row in txn.scan(WAL_CATALOG, 1)} == {"TRUNCATED"}, "the follow-up job was run too"


def test_a_merge_rewrites_long_chains(run: Run, shop: Path) -> None:
    assert run("merge", "shop").out == "shop needs no merge: its chunks have no deltas\n"
    run("checkpoint", "shop")
    assert run("merge", "shop").out.startswith("merge of shop: 1 slot written (16 pages, ")
    with quire.open(shop, "r") as store, store.manifest.read() as txn:
        assert len(txn.chain(1, 0)) == 1


def test_json_shows_the_job(run: Run, shop: Path) -> None:
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
def test_other_databases_are_refused_and_no_job_is_created(
    run: Run, path: Path, command: str, database: str, code: int
) -> None:
    result = run(command, database)
    assert (result.code, result.out) == (code, "")
    assert run("jobs", "ls", "--json").data == []


def test_a_pending_job_is_run_instead_of_a_new_one(run: Run, shop: Path) -> None:
    """For instance a job that an interrupted command has put back: a second one would be refused."""
    with quire.open(shop) as store:
        job_id = store.manifest.jobs.enqueue(JobKind.CHECKPOINT, 1, delay_seconds=3600)
    assert run("checkpoint", "shop", "--json").data["job_id"] == job_id


def test_a_failed_job_is_an_error_of_its_group(
    run: Run, shop: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise DiskFull("no space left", hint="make some", path="/x")

    monkeypatch.setitem(HANDLERS, JobKind.CHECKPOINT, full)
    result = run("checkpoint", "shop")
    assert (result.code, result.out) == (6, "")
    message, hint = result.err.splitlines()[-2:]
    assert message == "error: the checkpoint of shop failed: no space left (path='/x') (job_id=4)"
    assert "the job will be retried" in hint
    for _ in range(4):
        result = run("checkpoint", "shop", "--json")
    error = json.loads(result.err.splitlines()[-1])["error"]
    assert (error["kind"], error["exit_code"]) == ("DiskFull", 6)
    assert "`quire jobs retry 4`" in error["next"]
    assert run("jobs", "show", "4", "--json").data["state"] == "failed_permanent"


def test_a_bug_in_a_job_is_an_internal_error(
    run: Run, shop: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(HANDLERS, JobKind.CHECKPOINT, lambda *_, **__: 1 // 0)
    assert run("checkpoint", "shop").code == 70


def test_commits_of_a_crashed_owner_are_checkpointed(run: Run, shop: Path) -> None:
    from tests.cli.test_snapshots import crash_while_writing

    crash_while_writing(shop)
    assert "1 WAL segment absorbed" in run("checkpoint", "shop").out.replace("2 WAL segments", "1 WAL segment")
    assert first_byte(shop, "shop") == b"z"


def test_checkpoint_after_another_checkpoint_finds_nothing(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        write_pages(store, "shop", range(8), b"c")
        assert store.checkpoint("shop").state is JobState.SUCCEEDED
    assert run("checkpoint", "shop").out.startswith("shop needs no checkpoint")


# ── many databases ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_all_databases_in_one_run(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.create("other", "pages")
        write_pages(store, "other", range(8), b"c")
    waiting = run("checkpoint", "--all", "--dry-run", "--json").data
    assert {row["database"] for row in waiting} == {"shop", "other"}
    result = run("checkpoint", "--all", "--runner", "threads")
    assert result.code == 0
    assert result.out.startswith("checkpoint of 2 databases: 2 slots written (")
    assert run("checkpoint", "--all", "--dry-run").out == "nothing to checkpoint\n"
    data = run("checkpoint", "shop", "other", "--json").data
    assert (data["databases"], data["slots"], data["failed"]) == (2, 0, [])
    assert [row["database"] for row in run("merge", "--all", "--dry-run", "--json").data] == ["shop"]
    assert run("merge", "--all", "--json").data["slots"] == 1
    assert first_byte(shop, "shop") == b"b"


def test_checkpoint_needs_databases_or_all_and_a_known_runner(run: Run, shop: Path) -> None:
    assert run("checkpoint").code == 2
    assert run("checkpoint", "shop", "--all").code == 2
    result = run("checkpoint", "shop", "--runner", "cluster")
    assert (result.code, result.out) == (2, "")
    assert "auto, threads, spark" in result.err


def test_failed_databases_are_listed_below_the_others(
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
    result = run("checkpoint", "--all", "--runner", "threads")
    assert result.code == 1
    lines = [line for line in result.out.splitlines() if line]
    assert lines[0].startswith("checkpoint of 2 databases: 1 slot written (")
    assert lines[1].split() == ["failed", "why"]
    assert lines[2].split(maxsplit=1)[0] == "shop"
    assert "DiskFull: no space left" in lines[2]
    assert "\\n" not in result.out


def test_evict_and_hydrate_report_what_they_moved(run: Run, shop: Path) -> None:
    run("snapshot", "create", "shop", "before")
    run("checkpoint", "shop")
    assert run("evict", "shop").out.startswith("evict of shop: 1 artifact, ")
    assert run("hydrate", "shop", "--json").data["artifacts"] > 1
    assert run("evict", "clicks").code == 2, "a stream has its own tiers"
    assert first_byte(shop, "shop") == b"b"


def test_a_reader_beside_the_owner_that_blocks_a_checkpoint_is_named(run: Run, shop: Path) -> None:
    """`checkpoint`, `why` and `info` reported that nothing held the WAL."""
    with quire.open(shop) as store, store.manifest.read() as txn:
        wal = txn.wal_state(1)
    assert wal is not None
    tags = {"who": "report"}
    lease = FileLease.take(OsDisk(), SystemClock(), str(shop), db_id=1, lsn=wal.last_applied_lsn, tags=tags)
    with closing(lease):
        with quire.open(shop) as store:
            write_pages(store, "shop", range(1), b"z")
        run("checkpoint", "shop")
        holder_text = f"(pid {os.getpid()} on {os.uname().nodename}, who=report, since "
        output = run("checkpoint", "shop").out
        assert output.startswith("shop was not checkpointed: 1 WAL segment (")
        assert holder_text in output
        assert run("checkpoint", "shop", "--json").data["result"]["readers"][0]["pid"] == os.getpid()
        holders = run("why", "shop", "--json").data["holders"]
        assert any(holder["kind"] == "reader" and holder_text in holder["what"] for holder in holders)
        readers = run("info", "--json").data["page_readers"]
        assert [(reader["pid"], reader["tags"]) for reader in readers] == [
            (os.getpid(), {"database": "shop", "who": "report"})
        ]
        assert f"pid {os.getpid()} on" in run("info").out
    assert run("checkpoint", "shop").out.startswith("checkpoint of shop: 1 slot written")
    assert run("info", "--json").data["page_readers"] == []
