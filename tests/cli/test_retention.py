"""retention show, set, clear, plan, apply: for one database and for all."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli.output import width_of
from quire.jobs import retention as jobs_retention
from quire.manifest.jobqueue import Job
from quire.manifest.records import JobKind, RetentionRecord
from quire.manifest.store import ManifestStore
from tests.cli.conftest import Run, on_a_terminal, quire_program, write_pages

EVERYTHING_OFF = {
    "keep_last": 0,
    "keep_generations": 0,
    "hourly": 0,
    "daily": 0,
    "weekly": 0,
    "keep_seconds": 0,
    "keep_named": True,
    "schedules": [],
}


@pytest.fixture
def with_snapshots(path: Path) -> Path:
    """Five snapshots of shop, one of them with a name."""
    with quire.open(path) as store:
        for name in ("", "", "monday", "", ""):
            store.snapshot("shop", name)
    return path


def snapshots(run: Run) -> list[int]:
    return [row["snapshot_id"] for row in run("snapshot", "ls", "shop", "--json").data]


def test_without_a_policy_everything_is_kept(run: Run, with_snapshots: Path) -> None:
    data = run("retention", "show", "shop", "--json").data
    assert (data["database"], data["policy"], data["snapshots"], data["would_drop"]) == ("shop", None, 5, 0)
    text = run("retention", "show", "shop").out
    assert "every snapshot (no rules)" in text
    assert "no automatic snapshots" in text
    assert run("retention", "apply", "shop", "--yes").out == "nothing to drop: 5 snapshots, all kept\n"


def test_set_changes_only_the_named_rules(run: Run, with_snapshots: Path) -> None:
    """Hazard: setting one rule removes another, and snapshots with it."""
    options = "--keep-last 2 --keep-generations 3 --hourly 24 --daily 7 --weekly 4 --keep 30d --schedule hourly,daily"
    policy = run("retention", "set", "shop", *options.split(), "--json").data["policy"]
    assert policy == {
        "keep_last": 2,
        "keep_generations": 3,
        "hourly": 24,
        "daily": 7,
        "weekly": 4,
        "keep_seconds": 30 * 86_400,
        "keep_named": True,
        "schedules": ["hourly", "daily"],
    }
    changed = run("retention", "set", "shop", "--keep", "1h30m", "--no-keep-named", "--json").data["policy"]
    assert changed == {**policy, "keep_seconds": 5_400, "keep_named": False}
    text = run("retention", "show", "shop").out
    assert "the newest 2; snapshots of the last 3 generations; snapshots younger than 90m" in text
    assert "snapshots hourly, daily" in text
    off = "--keep-last 0 --keep-generations 0 --hourly 0 --daily 0 --weekly 0 --keep 0 --keep-named --schedule none"
    assert run("retention", "set", "shop", *off.split(), "--json").data["policy"] == EVERYTHING_OFF
    assert snapshots(run) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["shop"], 2, "no rule was given"),
        (["shop", "--keep-last", "-1"], 2, "'--keep-last': -1 is"),
        (["shop", "--keep", "30"], 2, "`--keep` takes a duration (given='30')"),
        (["shop", "--keep", "2h3"], 2, "`--keep` takes a duration"),
        (["shop", "--keep", "999999999d"], 2, "at most a thousand years"),
        (["shop", "--schedule", "yearly"], 2, "unknown schedule"),
        (["shop", "--schedule", "daily,daily at 03:00"], 2, "two schedules are of the same kind"),
        (["shop", "--schedule", "daily at 03:00 Mars/Base"], 2, "unknown time zone"),
        (["shop", "--keep-last", str(2**70)], 2, "is too large"),
        (["nothing", "--keep-last", "1"], 3, "no database has this name"),
    ],
)
def test_set_refuses_and_changes_nothing(
    run: Run, with_snapshots: Path, arguments: list[str], code: int, message: str
) -> None:
    result = run("retention", "set", *arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert run("retention", "show", "shop", "--json").data["policy"] is None


def test_clear(run: Run, with_snapshots: Path) -> None:
    run("retention", "set", "shop", "--keep-last", "1")
    assert run("retention", "clear", "shop", "--json").data["cleared"]["keep_last"] == 1
    assert run("retention", "clear", "shop").out == "shop had no retention policy\n"
    assert run("retention", "clear", "nothing").code == 3


def test_plan_lists_what_is_dropped_and_why(run: Run, with_snapshots: Path) -> None:
    run("retention", "set", "shop", "--keep-last", "2")
    before = run("info", "--json").data["newest_change"]
    data = run("retention", "plan", "shop", "--json").data
    assert [(decision["snapshot_id"], decision["keep"], decision["why"]) for decision in data["decisions"]] == [
        (1, False, "no rule keeps it"),
        (2, False, "no rule keeps it"),
        (3, True, "named"),
        (4, True, "among the last 2"),
        (5, True, "among the last 2"),
    ]
    assert (data["would_drop"], data["drops_everything"], data["share"]["artifacts"]) == (2, False, 0)
    lines = run("retention", "plan", "shop").out.splitlines()
    assert lines[0].split() == ["id", "snapshot", "created", "verdict", "why"]
    assert lines[3].split()[-2:] == ["keep", "named"]
    assert lines[-1] == "Drop them now: `quire retention apply shop`."
    assert run("info", "--json").data["newest_change"] == before, "plan is a dry run"
    run("retention", "set", "shop", "--keep", "7d")
    assert "younger than 7d" in run("retention", "plan", "shop").out
    assert max(map(width_of, on_a_terminal("retention", "plan", "shop", "--store", str(with_snapshots)))) <= 80
    assert run("retention", "plan", "clicks").out == "clicks has no snapshots\n"


def test_apply_asks_and_drops_what_the_plan_lists(run: Run, with_snapshots: Path) -> None:
    run("retention", "set", "shop", "--keep-last", "2")
    refused = run("retention", "apply", "shop", answer="n\n")
    assert (refused.code, refused.out) == (1, "nothing was dropped\n")
    assert refused.err == "drop 2 snapshots of shop (#1, #2), which share all their chunks and segments? [y/N] "
    assert run("retention", "apply", "shop", answer="").code == 2
    assert snapshots(run) == [1, 2, 3, 4, 5]
    result = run("retention", "apply", "shop", "--yes", "--json").data
    assert result.keys() == {"database", "dropped", "share", "job_id"}
    assert [snapshot["snapshot_id"] for snapshot in result["dropped"]] == [1, 2]
    assert snapshots(run) == [3, 4, 5]
    job = run("jobs", "show", str(result["job_id"]), "--json").data
    assert (job["kind"], job["database"], job["state"], job["result"]["dropped"]) == (
        "retention",
        "shop",
        "succeeded",
        2,
    )
    assert run("retention", "apply", "shop", "--yes", "--json").data == {"database": "shop", "dropped": []}


def test_the_last_snapshots_are_dropped_only_with_force(run: Run, with_snapshots: Path) -> None:
    run("snapshot", "drop", "shop", "monday", "--now", "--yes")
    run("retention", "set", "shop", "--no-keep-named", "--keep", "1s")
    time.sleep(1.1)  # now the newest is older than the rule
    refused = run("retention", "apply", "shop", "--yes")
    assert (refused.code, "use `--force`" in refused.err) == (4, True)
    assert snapshots(run) == [1, 2, 4, 5]
    assert "`quire retention apply shop --force`" in run("retention", "plan", "shop").out
    prompt = run("retention", "apply", "shop", "--force", answer="n\n").err
    assert prompt.startswith("drop EVERY snapshot of shop (#1, #2, #4, #5), ")
    assert run("retention", "apply", "shop", "--force", "--yes").out == "dropped 4 of 4 snapshots of shop\n"
    assert snapshots(run) == []


def test_the_announced_size_is_the_freed_size(run: Run, shop: Path) -> None:
    """Leaves, chunks, deltas and WAL that several snapshots share, and nothing else holds."""
    with quire.open(shop) as store:
        for fill in (b"c", b"d", b"e"):
            store.snapshot("shop")
            store.snapshot("shop")
            store.checkpoint("shop")
            write_pages(store, "shop", range(8), fill)
        store.checkpoint("shop")
        store.manifest.jobs.enqueue(JobKind.MERGE, 1)
    assert run("gc", "--now", "--yes").code == 0
    run("retention", "set", "shop", "--no-keep-named", "--keep-last", "1")
    share = run("retention", "plan", "shop", "--json").data["share"]
    assert share["chunks"] + share["deltas"] > 1
    assert share["wal_segments"] > 1
    assert run("retention", "apply", "shop", "--yes", "--json").data["share"] == share
    done = run("gc", "--now", "--yes", "--json").data
    assert (done["deleted"], done["freed_bytes"]) == (share["artifacts"], share["size_bytes"])


def test_a_confirmation_names_a_few_snapshots(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        for _ in range(9):
            store.snapshot("shop")
    run("retention", "set", "shop", "--keep-last", "1")
    assert "(#1, #2, #3, #4, #5 and 3 more)" in run("retention", "apply", "shop", answer="n\n").err


def test_a_dry_run_is_the_plan(run: Run, with_snapshots: Path) -> None:
    run("retention", "set", "shop", "--keep-last", "2")
    planned = run("retention", "plan", "shop", "--json").data
    assert run("retention", "apply", "shop", "--dry-run", "--yes", "--json").data == planned
    assert run("retention", "apply", "shop", "--dry-run").out == run("retention", "plan", "shop").out
    assert snapshots(run) == [1, 2, 3, 4, 5]
    assert run("jobs", "ls", "--json").data == []


@pytest.mark.parametrize("arguments", [[], ["shop", "--all"], ["--dry-run"], [""]])
def test_apply_needs_a_database_or_all(run: Run, with_snapshots: Path, arguments: list[str]) -> None:
    result = run("retention", "apply", *arguments, "--yes")
    assert (result.code, result.out) == (2, "")
    assert "name a database, or use `--all`" in result.err


def test_snapshots_that_expire_during_the_confirmation_are_kept(
    run: Run, with_snapshots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The confirmation was for two snapshots."""
    run("retention", "set", "shop", "--keep-last", "2")

    real = jobs_retention.apply_many

    def late(manifest: ManifestStore, *rest: Any, **more: Any) -> list[Job]:
        manifest.retention.set("shop", RetentionRecord(keep_last=1, keep_named=False))
        return real(manifest, *rest, **more)

    monkeypatch.setattr(jobs_retention, "apply_many", late)
    assert run("retention", "apply", "shop", answer="y\n").out.startswith("dropped 2 of 5 snapshots of shop")
    assert snapshots(run) == [3, 4, 5]


def test_a_concurrent_retention_job_is_reported(run: Run, with_snapshots: Path) -> None:
    run("retention", "set", "shop", "--keep-last", "2")
    with quire.open(with_snapshots) as store:
        job_id = store.manifest.jobs.enqueue(JobKind.RETENTION, 1)
        store.manifest.jobs.claim_job(job_id, "remote:far-away")
    result = run("retention", "apply", "shop", "--yes")
    assert (result.code, result.out) == (4, "")
    assert "another job is applying" in result.err
    assert "remote:far-away" in result.err
    assert f"`quire jobs show {job_id}`" in result.err
    everything = run("retention", "apply", "--all", "--yes", "--json")
    assert everything.data["taken"] == [{"database": "shop", "job_id": job_id, "worker": "remote:far-away"}]
    assert (everything.code, everything.data["dropped"]) == (0, 0)
    assert f"shop      left     job {job_id} is applying it" in run("retention", "apply", "--all", "--yes").out
    assert snapshots(run) == [1, 2, 3, 4, 5]
    run("jobs", "cancel", str(job_id))
    assert run("retention", "apply", "--all", "--yes", "--json").data["dropped"] == 2


def test_a_pending_job_is_run(run: Run, with_snapshots: Path) -> None:
    run("retention", "set", "shop", "--keep-last", "2")
    with quire.open(with_snapshots) as store:
        job_id = store.manifest.jobs.enqueue(JobKind.RETENTION, 1, delay_seconds=3600)
    assert run("retention", "apply", "shop", "--yes", "--json").data["job_id"] == job_id


def test_a_failed_job_is_an_error_with_its_code(run: Run, with_snapshots: Path) -> None:
    run("retention", "set", "shop", "--keep-last", "2")
    with quire.open(with_snapshots) as store:
        store.manifest.jobs.enqueue(JobKind.RETENTION, 1, {"forced": True})
    result = run("retention", "apply", "shop", "--yes")
    assert (result.code, result.out) == (2, "")
    assert "the retention of shop failed: the job does not support this payload" in result.err
    assert snapshots(run) == [1, 2, 3, 4, 5]


# ── --all ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def with_policies(with_snapshots: Path) -> Path:
    """In addition to shop: four databases with a policy, one of which would lose all its snapshots; and one without a
    policy."""
    with quire.open(with_snapshots) as store:
        for name in ("a", "b", "bare", "calm", "free"):
            store.create(name, "pages")
            for _ in range(3):
                store.snapshot(name)
        for name in ("shop", "a", "b"):
            store.manifest.retention.set(name, RetentionRecord(keep_last=1))
        store.manifest.retention.set("bare", RetentionRecord(keep_seconds=1))
        store.manifest.retention.set("calm", RetentionRecord(keep_last=9))
    time.sleep(1.1)  # now the newest of bare is older than its rule
    return with_snapshots


def counts(path: Path) -> dict[str, int]:
    with quire.open(path, mode="r") as store:
        return {database.name: len(store.manifest.snapshots.of(database.name)) for database in store.databases()}


def test_all_is_every_database_that_has_a_policy(run: Run, with_policies: Path) -> None:
    result = run("retention", "apply", "--all", "--yes", "--json")
    assert result.code == 1, "one database was refused"
    data = result.data
    assert [(job["database"], job["dropped"], job["kept"]) for job in data["jobs"]] == [
        ("shop", 3, 2),
        ("a", 2, 1),
        ("b", 2, 1),
    ]
    assert (data["databases"], data["dropped"], data["failed"], data["taken"]) == (5, 7, [], [])
    assert data["refused"] == [{"database": "bare", "snapshots": 3}]
    assert data["share"]["artifacts"] == 0
    assert counts(with_policies) == {"shop": 2, "clicks": 0, "a": 1, "b": 1, "bare": 3, "calm": 3, "free": 3}
    rows = {row["database"]: row for row in run("jobs", "ls", "--json").data if row["kind"] == "retention"}
    assert {name: row["job_id"] for name, row in rows.items()} == {
        row["database"]: row["job_id"] for row in data["jobs"]
    }
    repeated = run("retention", "apply", "--all", "--yes")
    assert (repeated.code, repeated.out.splitlines()) == (
        1,
        [
            "nothing was dropped",
            "",
            "database  verdict  why",
            "bare      refused  no rule keeps any of its snapshots: use `--force`",
        ],
    )
    forced = run("retention", "apply", "--all", "--force", "--yes")
    assert (forced.code, forced.out) == (0, "dropped 3 snapshots of 1 database\n")
    assert run("retention", "apply", "--all").out == "nothing to drop: 5 databases with a policy, all snapshots kept\n"


def test_all_asks_once(run: Run, with_policies: Path) -> None:
    before = counts(with_policies)
    refused = run("retention", "apply", "--all", answer="n\n")
    assert (refused.code, refused.out.splitlines()[0]) == (1, "nothing was dropped")
    assert refused.err == (
        "drop 7 snapshots of 3 databases, skipping 1 that would have none left, "
        "which share all their chunks and segments? [y/N] "
    )
    forced = run("retention", "apply", "--all", "--force", answer="n\n").err
    assert forced.startswith("drop 10 snapshots of 4 databases (EVERY snapshot of 1 of them), ")
    assert run("retention", "apply", "--all", answer="").code == 2
    assert counts(with_policies) == before
    assert run("jobs", "ls", "--json").data == []


def test_a_dry_run_of_all_is_a_table(run: Run, with_policies: Path) -> None:
    before = run("info", "--json").data["newest_change"]
    with quire.open(with_policies):  # while another process owns the store
        other_process = quire_program(
            "retention", "apply", "--all", "--dry-run", "--json", "--store", str(with_policies)
        )
    result = run("retention", "apply", "--all", "--dry-run")
    data = run("retention", "apply", "--all", "--dry-run", "--json").data
    assert json.loads(other_process.stdout) == data
    assert [line.split() for line in result.out.splitlines()[:5]] == [
        ["database", "snapshots", "would", "drop", "exclusive"],
        ["shop", "5", "3", "0", "B"],
        ["a", "3", "2", "0", "B"],
        ["b", "3", "2", "0", "B"],
        ["bare", "3", "3", "(all)", "0", "B"],
    ]
    assert "4 of 5 databases with a policy would lose 10 snapshots." in result.out
    assert "1 database would have none left and need `--force`." in result.out
    assert [(row["database"], row["would_drop"], row["drops_everything"]) for row in data] == [
        ("shop", 3, False),
        ("a", 2, False),
        ("b", 2, False),
        ("bare", 3, True),
    ]
    assert data[0].keys() >= {"db_id", "policy", "snapshots", "share"}
    assert run("info", "--json").data["newest_change"] == before
    assert (
        max(map(width_of, on_a_terminal("retention", "apply", "--all", "--dry-run", "--store", str(with_policies))))
        <= 80
    )


def test_the_announced_size_of_all_is_the_freed_size(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.create("other", "pages")
        for fill in (b"c", b"d", b"e"):
            for name in ("shop", "other"):
                write_pages(store, name, range(8), fill)
                store.snapshot(name)
                store.checkpoint(name)
        for name in ("shop", "other"):
            store.manifest.retention.set(name, RetentionRecord(keep_last=1, keep_named=False))
    assert run("gc", "--now", "--yes").code == 0
    with quire.open(shop) as store:
        for name in ("shop", "other"):
            write_pages(store, name, range(8), b"f")
            store.snapshot(name)
            store.checkpoint(name)
    rows = run("retention", "apply", "--all", "--dry-run", "--json").data
    done = run("retention", "apply", "--all", "--yes", "--json").data
    assert done["share"]["size_bytes"] == sum(row["share"]["size_bytes"] for row in rows) > 0
    deleted = run("gc", "--now", "--yes", "--json").data
    assert (deleted["deleted"], deleted["freed_bytes"]) == (done["share"]["artifacts"], done["share"]["size_bytes"])


def test_a_failure_among_all_is_reported(run: Run, with_policies: Path) -> None:
    with quire.open(with_policies) as store:
        job_id = store.manifest.jobs.enqueue(JobKind.RETENTION, store.database("a").db_id, {"forced": True})
    run("retention", "set", "bare", "--keep-last", "9")
    result = run("retention", "apply", "--all", "--yes")
    assert result.code == 1
    first, _, _, row = result.out.splitlines()
    assert first == "dropped 5 snapshots of 2 databases"
    assert row.startswith("a         failed   InvalidInput: the job does not support this payload")
    assert run("jobs", "show", str(job_id), "--json").data["state"] == "failed_permanent"
    assert counts(with_policies)["a"] == 3


def test_without_a_policy_there_is_nothing_to_apply(run: Run, with_snapshots: Path) -> None:
    for more in (["--yes"], ["--dry-run"]):
        result = run("retention", "apply", "--all", *more)
        assert (result.code, result.out) == (
            0,
            "no database has a retention policy: set one with `quire retention set`\n",
        )


def test_a_schedule_has_an_hour_and_a_time_zone(run: Run, shop: Path) -> None:
    result = run("retention", "set", "shop", "--schedule", "hourly, daily at 03:00 Europe/Zurich")
    assert "daily at 03:00 Europe/Zurich" in result.out
    assert run("gc").code == 0
    schedules = [snapshot["tags"].get("schedule") for snapshot in run("snapshot", "ls", "shop", "--json").data]
    assert sorted(filter(None, schedules)) == ["daily", "hourly"]
