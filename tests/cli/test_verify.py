"""verify, restore and stats: for people, for programs, for cron."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as parquet

import quire
from quire.manifest.records import JobKind
from tests.cli.conftest import Run


def _checkpointed(run: Run, shop: Path) -> Path:
    """A store with a chunk; where its object is."""
    run("checkpoint", "shop")
    with quire.open(shop, "r") as store:
        return next(Path(store.objects_url).rglob("base:*"))


def test_all_is_well(run: Run, shop: Path) -> None:
    _checkpointed(run, shop)
    assert run("verify", "--dry-run", "--json").data["left"] > 0
    ended = run("verify", "--orphans")
    assert ended.code == 0
    assert "no damage found" in ended.out
    assert "orphaned objects" in ended.out
    data = run("verify", "--max-age", "7d", "--json").data
    assert (data["verified"], data["left"], data["complete"]) == (0, 0, True)
    assert run("verify", "--max-age", "7d", "--dry-run", "--json").data["left"] == 0


def test_damage_is_an_exit_code_and_a_report(run: Run, shop: Path, tmp_path: Path) -> None:
    chunk = _checkpointed(run, shop)
    body = chunk.read_bytes()
    chunk.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    report = tmp_path / "report.parquet"
    ended = run("verify", "--report", str(report))
    assert ended.code == 1
    assert "altered" in ended.out
    assert parquet.read_table(report).column("state").to_pylist() == ["ALTERED"]
    assert run("verify", "--max-age", "7d").code == 1, "it was found out earlier, and is so still"
    chunk.write_bytes(body)
    assert run("verify").code == 0


def test_orphans_are_swept(run: Run, shop: Path) -> None:
    chunk = _checkpointed(run, shop)
    with quire.open(shop) as store:
        generation = store.manifest.reserve_generation(1)
        stray = chunk.with_name(f"base:{generation:08x}")
        store.objects.put(str(stray.relative_to(store.objects_url)), b"left by a driver that died")
    stray_is_old(stray)
    assert run("verify", "--orphans", "--json").data["orphaned"] == 1
    assert stray.exists()
    data = run("verify", "--sweep", "--json").data
    assert (data["orphaned"], data["deleted"]) == (1, 1)
    assert not stray.exists()


def stray_is_old(path: Path) -> None:
    import os
    import time

    os.utime(path, (time.time() - 7_200,) * 2)


def test_a_snapshot_becomes_a_file(run: Run, shop: Path, tmp_path: Path) -> None:
    assert run("snapshot", "create", "shop", "today").code == 0
    target = tmp_path / "today.pages"
    data = run("restore", "shop", "today", str(target), "--json").data
    assert target.stat().st_size == data["bytes"] > 0
    assert target.read_bytes()[:1] == b"b"
    assert run("restore", "shop", "today", str(target)).code == 4
    assert run("restore", "shop", "today", str(target), "--replace").out.startswith(str(target))
    assert run("restore", "shop", "tomorrow", str(target)).code == 3


def test_where_the_bytes_are(run: Run, shop: Path) -> None:
    _checkpointed(run, shop)
    run("snapshot", "create", "shop", "monday")
    rows = run("stats", "--json").data
    (row,) = [each for each in rows if each["database"] == "shop"]
    assert row["size_bytes"] == row["exclusive_bytes"] + row["shared_bytes"] > 0
    assert row["tiers"]["remote_archived"] == row["chunk_bytes"]
    assert "monday" in run("stats", "--snapshots").out


def test_damage_of_a_file_that_is_no_artifact_is_told_by_verify_and_by_doctor(run: Run, path: Path) -> None:
    """Verify did not look at key-value tables, and doctor said that all is well about what was recorded."""
    with quire.open(path) as store:
        cart = store.kv("cart", create=True)
        cart.put(b"key", b"value")
        cart.flush()
    (table,) = path.glob("lsm/*/sst/*.sst")
    body = table.read_bytes()
    assert run("verify").code == 0
    assert "no damage found" in {each["check"]: each for each in run("doctor", "--json").data}["verification"]["detail"]
    wrong = bytearray(body)
    wrong[len(body) // 2] ^= 1
    table.write_bytes(wrong)
    ended = run("verify")
    assert ended.code == 1
    assert table.name in ended.out.replace("\n", "")
    data = run("verify", "--json").data
    assert [each["path"] for each in data["problems"]] == [str(table.relative_to(path))]
    assert data["kinds"]["key-value table"] == {"files": 1, "bytes": len(body), "problems": 1}
    ended = run("doctor", "--json")
    assert ended.code == 1
    told = {each["check"]: each for each in ended.data}["verification"]
    assert (told["state"], table.name in told["detail"]) == ("fail", True)
    table.write_bytes(body)
    assert run("verify").code == 0
    assert run("doctor").code == 0


def test_doctor_tells_of_damaged_artifacts_and_of_failed_jobs(run: Run, shop: Path) -> None:
    """Doctor tells what is recorded."""
    chunk = _checkpointed(run, shop)
    body = chunk.read_bytes()
    chunk.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    assert run("verify").code == 1
    with quire.open(shop) as store:
        job = store.manifest.jobs.claim_job(store.manifest.jobs.enqueue(JobKind.STATS), "test")
        assert job is not None
        store.manifest.jobs.fail(job, "as if", permanent=True)
    told = {each["check"]: each for each in run("doctor", "--json").data}
    assert told["verification"]["state"] == "fail"
    assert "base:" in told["verification"]["detail"]
    assert told["jobs"]["state"] == "warn"
    assert "as if" in told["jobs"]["detail"]
    chunk.write_bytes(body)
    assert run("verify").code == 0
    assert {each["check"]: each["state"] for each in run("doctor", "--json").data}["verification"] == "ok"


def test_metrics_are_shown_and_exported(run: Run, shop: Path) -> None:
    rows = {row["metric"]: row for row in run("metrics", "--json").data}
    assert rows["snapshots"]["record"]["last"] == 1
    assert rows["checkpoint_ms"]["record"]["count"] == rows["wal_lag"]["record"]["count"] == 1
    assert "shop" in run("metrics").out
    assert 'quire_rolling_snapshots_last{db="1",name="shop"} 1.0' in run("metrics", "--prometheus").out.splitlines()


def test_a_store_without_observations_says_so(run: Run) -> None:
    assert run("metrics").out == "no metrics yet\n"
