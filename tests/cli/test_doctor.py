"""doctor: a verdict for every check, nothing is created, and a failed check does not end it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import apsw
import pytest

import quire
from quire.cli.output import width_of
from quire.manifest.ops.jobs import ForgetJob
from quire.manifest.ops.local import RecordVerification
from quire.manifest.verification import last_verification
from quire.testing.clock import ManualClock
from tests.cli.conftest import GARBAGE, GHOST, Damage, Run, on_a_terminal

ROWS = [
    "quire", "python", "platform", "lmdb", "sqlite", "java", "spark", "disk", "store", "owner", "quarantine", "manifest",
    "verification", "jobs", "readers", "map", "clock", "session", "archive", "objects",
]  # fmt: skip


def rows(run: Run, *arguments: str, **options: Any) -> dict[str, dict[str, str]]:
    result = run("doctor", "--json", *arguments, **options)
    checks = {row["check"]: row for row in result.data}
    assert result.code == (1 if any(row["state"] == "fail" for row in checks.values()) else 0)
    assert {row["state"] for row in checks.values()} <= {"ok", "warn", "fail"}
    assert all(row["next"] for row in checks.values() if row["state"] == "fail"), "a failed check says what to do"
    return checks


def test_a_healthy_store_passes_every_check(run: Run) -> None:
    checks = rows(run)
    assert list(checks) == ROWS
    assert {row["state"] for row in checks.values()} == {"ok"}
    assert run("doctor").out.splitlines()[-1] == "no problems found"


def test_doctor_creates_nothing(run: Run, path: Path) -> None:
    before = sorted(os.listdir(path))
    checks = rows(run)
    assert "does not exist yet" in checks["objects"]["detail"]
    assert sorted(os.listdir(path)) == before
    (path / "quire.toml").write_text('object_store = "elsewhere"')
    assert rows(run)["objects"]["state"] == "warn"
    assert sorted(os.listdir(path)) == before
    (path / "quire.toml").write_text("")


def test_an_existing_object_store_gets_a_round_trip(run: Run, path: Path) -> None:
    (path / "objects").mkdir()
    check = rows(run)["objects"]
    assert (check["state"], "put, get, delete" in check["detail"]) == ("ok", True)
    assert not [file for file in (path / "objects").rglob("*") if file.is_file()]
    (path / "quire.toml").write_text('object_store = "memory://doctor"')
    assert "put, get, delete" in rows(run)["objects"]["detail"]
    assert "objects" not in rows(run, "--no-objects")
    (path / "quire.toml").write_text("")


def test_a_failed_check_is_a_row_and_the_others_follow(run: Run, path: Path, tmp_path: Path) -> None:
    (path / "objects").write_text("a file in the way")
    assert rows(run)["objects"]["state"] == "fail"
    assert run("doctor").out.splitlines()[-1] == "1 problem found"
    (path / "objects").unlink()
    (path / "quire.toml").write_text("not toml")
    checks = rows(run)
    assert (checks["store"]["state"], checks["manifest"]["state"]) == ("fail", "ok")
    (path / "quire.toml").write_text("")
    missing = rows(run, at=tmp_path / "no" / "where")
    assert (missing["disk"]["state"], missing["store"]["state"]) == ("ok", "fail")


@pytest.mark.parametrize("row", [GHOST, GARBAGE], ids=["repairable", "garbage"])
def test_the_manifest_is_checked(run: Run, damage: Damage, row: Any) -> None:
    damage(row)
    checks = rows(run)
    assert checks["manifest"]["state"] == "fail"
    assert "quire manifest check" in checks["manifest"]["next"]
    assert list(checks) == ROWS, "the other checks still run"


@pytest.mark.parametrize("error", [ValueError("odd"), OSError(5, "odd"), AssertionError("odd"), quire.DiskFull("odd")])
@pytest.mark.parametrize(
    "probe",
    [
        "_disk",
        "_store",
        "_owner",
        "_rules",
        "_verification",
        "_jobs",
        "_readers",
        "_map",
        "_clock",
        "_objects",
        "_java",
        "_spark",
        "_version",
    ],
)
def test_no_check_can_end_the_command(run: Run, monkeypatch: pytest.MonkeyPatch, probe: str, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(f"quire.cli.doctor.{probe}", fail)
    failed = [name for name, row in rows(run).items() if row["state"] == "fail" and "odd" in row["detail"]]
    assert failed == {"_version": ["quire", "lmdb", "sqlite"], "_rules": ["manifest"]}.get(probe, [probe[1:]])


def test_java_and_spark_are_optional(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.doctor.installed_version", lambda _: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("shutil.which", lambda _: None)
    checks = rows(run)
    assert (checks["java"]["state"], checks["spark"]["state"]) == ("ok", "ok")
    assert ".[spark]" in checks["spark"]["next"]
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    broken = rows(run)["java"]
    assert (broken["state"], "JAVA_HOME" in broken["detail"] + broken["next"]) == ("fail", True)


def test_a_clock_that_went_back_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows(run)["clock"]["state"] == "ok"
    monkeypatch.setattr("quire.cli.doctor.CLOCK", ManualClock(1_000))
    assert rows(run)["clock"]["state"] == "warn"


def test_doctor_fits_80_columns(path: Path) -> None:
    shown = on_a_terminal("doctor", "--store", str(path))
    assert max(map(width_of, shown)) <= 80 + len(str(path)), "only a path may be longer"


def test_findings_of_a_verification_outlive_its_job(run: Run, path: Path) -> None:
    """Findings that concern no artifact were forgotten with the job."""
    with quire.open(path) as store:
        store.manifest.submit([RecordVerification(["kv log x: damaged"])]).result()
    assert "known damage: kv log x: damaged" in " ".join(run("doctor", "--no-objects").out.split())
    with quire.open(path) as store:
        job = store.heavy.verify(runner="threads")
        store.manifest.submit([ForgetJob(job.job_id)]).result()
        with store.manifest.read() as txn:
            last = last_verification(txn)
    assert last is not None
    assert last.problems == []
    assert "damage is recorded" not in run("doctor", "--no-objects").out


def test_object_stores_of_namespaces_get_a_round_trip_too(run: Run, path: Path, tmp_path: Path) -> None:
    (tmp_path / "cold").mkdir()
    with quire.open(path) as store:
        store.namespaces.create("cold", str(tmp_path / "cold"))
        store.namespaces.create("far", str(tmp_path / "not-mounted"))
    states = {check: row["state"] for check, row in rows(run).items()}
    assert (states["namespace cold"], states["namespace far"]) == ("ok", "warn")


def test_a_failing_followed_file_is_reported(run: Run, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "app.db"
    apsw.Connection(str(file)).execute("pragma journal_mode=wal; create table t(x); insert into t values (1)")
    with quire.open(path) as store:
        store.followers.follow(file, "app")
    assert rows(run)["followed files"]["state"] == "ok"
    file.unlink()
    check = rows(run)["followed files"]
    assert (check["state"], str(file) in check["detail"], "unfollow" in check["next"]) == ("warn", True, True)
