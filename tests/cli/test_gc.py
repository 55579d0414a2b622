"""gc: dry run, normal run, and immediate deletion."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.cli.gc import at_zero
from quire.cli.output import width_of
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import object_key
from quire.manifest import tables as t
from tests.cli.conftest import Run, on_a_terminal, quire_program, write_pages


@pytest.fixture
def garbage(shop: Path) -> Path:
    """What a checkpoint absorbed is at zero, and so is what a dropped snapshot held."""
    with quire.open(shop) as store:
        store.snapshot("shop", "pinned")
        store.checkpoint("shop")
        store.maintain()
        store.manifest.snapshots.drop("shop", "pinned")
    return shop


def test_a_dry_run_lists_what_waits_and_until_when(run: Run, garbage: Path) -> None:
    before = run("info", "--json").data
    data = run("gc", "--dry-run", "--json").data
    assert data["dry_run"] is True
    assert data["artifacts"] == before["unreferenced"] > 0
    assert data["size_bytes"] == sum(artifact["size_bytes"] for artifact in data["waiting"]) > 0
    for artifact in data["waiting"]:
        assert artifact["due_at_ms"] >= artifact["zero_since_ms"]
        assert (artifact["database"], artifact["artifact"]["origin_db_id"]) == ("shop", 1)
    lines = run("gc", "--dry-run").out.splitlines()
    assert lines[0].split() == ["artifact", "size", "unreferenced", "deleted"]
    assert "wal 1 of shop" in run("gc", "--dry-run").out
    assert run("gc", "--dry-run", "--limit", "1").out.splitlines()[3].endswith("more: `--limit 0` shows all")
    assert run("info", "--json").data["newest_change"] == before["newest_change"]
    assert max(map(width_of, on_a_terminal("gc", "--dry-run", "--store", str(garbage)))) <= 80


def test_a_dry_run_lists_what_retention_and_jobs_would_do(run: Run, path: Path) -> None:
    assert run("gc", "--dry-run").out.splitlines()[0] == "nothing is waiting to be deleted"
    with quire.open(path) as store:
        store.snapshot("shop")
        store.snapshot("shop")
    run("retention", "set", "shop", "--keep-last", "1")
    assert run("gc", "--dry-run", "--json").data["would_drop"] == {"shop": 1}
    assert "would drop 1 snapshot of shop" in run("gc", "--dry-run").out


def test_a_dry_run_needs_no_owner(garbage: Path) -> None:
    with quire.open(garbage):
        assert quire_program("gc", "--dry-run", "--store", str(garbage)).returncode == 0
        assert quire_program("gc", "--store", str(garbage)).returncode == 5


def test_a_run_leaves_artifacts_within_the_grace_period(run: Run, garbage: Path) -> None:
    run("retention", "set", "shop", "--keep-last", "1", "--no-keep-named", "--schedule", "hourly")
    data = run("gc", "--json").data
    assert (data["dry_run"], data["round"]["snapshots"], data["round"]["dropped"]) == (False, 1, 1)
    assert data["deleted"] == 0
    assert data["waiting"] > 0
    assert data["next_due_at_ms"] > 0
    text = run("gc").out
    assert text.startswith("deleted  nothing\n")
    assert "; the first is deleted in " in text


def test_now_asks_and_deletes_everything_at_zero(run: Run, garbage: Path) -> None:
    waiting = run("gc", "--dry-run", "--json").data
    refused = run("gc", "--now", answer="n\n")
    assert (refused.code, refused.out) == (1, "nothing was done\n")
    assert "delete at once, even if another process is reading it: " in refused.err
    assert run("gc", "--now", answer="").code == 2
    assert run("gc", "--dry-run", "--json").data["artifacts"] == waiting["artifacts"]
    done = run("gc", "--now", "--yes", "--json").data
    assert done["deleted"] > 0
    assert done["freed_bytes"] >= waiting["size_bytes"]
    assert (done["waiting"], run("info", "--json").data["unreferenced"]) == (0, 0)
    assert {job["kind"] for job in done["jobs"]} >= {"delete"}
    assert not list((garbage / "pages" / "00000001" / "wal").glob("00000001.seg")), "the objects are deleted"
    assert run("gc", "--now", "--yes").out == "deleted  nothing\nwaiting  nothing\n"


def test_the_next_run_deletes_after_the_grace_period(run: Run, garbage: Path) -> None:
    (garbage / "quire.toml").write_text("[maintenance]\ndelete_grace_seconds = 0.0\n")
    with quire.open(garbage) as store:
        write_pages(store, "shop", range(2), b"c")
        store.checkpoint("shop")
        store.fork("shop", "copy")
        store.drop("copy")
    done = run("gc", "--json").data
    assert done["round"]["jobs"] >= 1
    assert done["deleted"] == len(
        [entry for entry in run("audit", "--limit", "0", "--json").data if entry["action"] == "deleted"]
    )


def test_a_failed_job_is_reported(run: Run, path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from quire.manifest.records import JobKind

    with quire.open(path) as store:
        store.manifest.jobs.enqueue(JobKind.VERIFY, 1, {"nonsense": 1})
    ended = run("gc")
    text = ended.out
    assert ended.code == 1
    assert "InvalidInput: the job does not support this payload" in text
    assert "`quire jobs show ID` shows the details" in text


def test_a_chunk_can_be_kept_and_released_again(run: Run, shop: Path) -> None:
    """Hazard: `purge_after_ms` was never set."""

    def purge_after() -> set[int]:
        with quire.open(shop) as store, store.manifest.read() as txn:
            return {row.purge_after_ms for _, row in txn.scan(t.CHUNK_CATALOG)}

    with quire.open(shop) as store, store.manifest.read() as txn:
        (origin, slot, generation), _ = next(iter(txn.scan(t.CHUNK_CATALOG)))
    name = object_key(ArtifactKey(origin, ArtifactKind.BASE, slot, generation))
    deferred = run("gc", "--keep", name, "--until", "7d", "--json").data
    assert deferred["kept"] == name
    assert deferred["purge_after_ms"] in purge_after()
    assert run("gc", "--keep", name, "--until", "0").out == f"{name} is deleted when nothing refers to it\n"
    assert purge_after() == {0}
    assert run("gc", "--keep", "nonsense", "--until", "7d").code == 2
    assert run("gc", "--keep", name).code == 2
    assert run("gc", "--keep", "00000001/00000000/wal:00000000", "--until", "7d").code == 2


def test_leases_of_the_owner_are_part_of_due_times(garbage: Path) -> None:
    """Due times were computed from the grace period alone."""
    with quire.open(garbage) as store:
        by_grace = {zero.artifact: zero.due_at_ms for zero in at_zero(store.manifest, 60_000, 0).first}
        leases = store.manifest.leases
        until_ms = store.manifest.clock.now_ms() + 10**7
        leases.kept_since = lambda _: (0, until_ms)  # type: ignore[method-assign,assignment]
        due_at_ms = {zero.artifact: zero.due_at_ms for zero in at_zero(store.manifest, 60_000, 0).first}
    assert by_grace
    assert {due for artifact, due in due_at_ms.items() if artifact.kind is not ArtifactKind.LEAF} == {until_ms}
    assert max(by_grace.values()) < until_ms
