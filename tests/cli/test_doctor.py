"""doctor: a verdict for every probe, nothing made, no end before the last row."""

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
from tests.cli.conftest import GARBAGE, GHOST, Plant, Run, on_a_terminal

ROWS = [
    "quire", "python", "platform", "lmdb", "sqlite", "java", "spark", "disk", "store", "owner", "quarantine", "manifest",
    "verification", "jobs", "readers", "map", "clock", "session", "archive", "objects",
]  # fmt: skip


def rows(run: Run, *arguments: str, **options: Any) -> dict[str, dict[str, str]]:
    ended = run("doctor", "--json", *arguments, **options)
    found = {each["check"]: each for each in ended.data}
    assert ended.code == (1 if any(each["state"] == "fail" for each in found.values()) else 0)
    assert {each["state"] for each in found.values()} <= {"ok", "warn", "fail"}
    assert all(each["next"] for each in found.values() if each["state"] == "fail"), "what to do"
    return found


def test_all_is_well(run: Run) -> None:
    found = rows(run)
    assert list(found) == ROWS
    assert {each["state"] for each in found.values()} == {"ok"}
    assert run("doctor").out.splitlines()[-1] == "no problems found"


def test_nothing_is_made(run: Run, path: Path) -> None:
    before = sorted(os.listdir(path))
    found = rows(run)
    assert "does not exist yet" in found["objects"]["detail"]
    assert sorted(os.listdir(path)) == before
    (path / "quire.toml").write_text('object_store = "elsewhere"')
    assert rows(run)["objects"]["state"] == "warn"
    assert sorted(os.listdir(path)) == before
    (path / "quire.toml").write_text("")


def test_an_object_store_that_is_there_gets_a_round_trip(run: Run, path: Path) -> None:
    (path / "objects").mkdir()
    found = rows(run)["objects"]
    assert (found["state"], "put, get, delete" in found["detail"]) == ("ok", True)
    assert not [each for each in (path / "objects").rglob("*") if each.is_file()]
    (path / "quire.toml").write_text('object_store = "memory://doctor"')
    assert "put, get, delete" in rows(run)["objects"]["detail"]
    assert "objects" not in rows(run, "--no-objects")
    (path / "quire.toml").write_text("")


def test_what_fails_is_a_row_and_the_others_follow(run: Run, path: Path, tmp_path: Path) -> None:
    (path / "objects").write_text("a file in the way")
    assert rows(run)["objects"]["state"] == "fail"
    assert run("doctor").out.splitlines()[-1] == "1 problem found"
    (path / "objects").unlink()
    (path / "quire.toml").write_text("not toml")
    found = rows(run)
    assert (found["store"]["state"], found["manifest"]["state"]) == ("fail", "ok")
    (path / "quire.toml").write_text("")
    missing = rows(run, at=tmp_path / "no" / "where")
    assert (missing["disk"]["state"], missing["store"]["state"]) == ("ok", "fail")


@pytest.mark.parametrize("planted", [GHOST, GARBAGE], ids=["mendable", "garbage"])
def test_the_manifest_is_checked(run: Run, damage: Plant, planted: Any) -> None:
    damage(planted)
    found = rows(run)
    assert found["manifest"]["state"] == "fail"
    assert "quire manifest check" in found["manifest"]["next"]
    assert list(found) == ROWS, "the others still run"


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
def test_no_probe_can_end_it(run: Run, monkeypatch: pytest.MonkeyPatch, probe: str, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(f"quire.cli.doctor.{probe}", fail)
    failed = [name for name, each in rows(run).items() if each["state"] == "fail" and "odd" in each["detail"]]
    assert failed == {"_version": ["quire", "lmdb", "sqlite"], "_rules": ["manifest"]}.get(probe, [probe[1:]])


def test_java_and_spark_are_optional(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.doctor.installed_version", lambda _: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("shutil.which", lambda _: None)
    found = rows(run)
    assert (found["java"]["state"], found["spark"]["state"]) == ("ok", "ok")
    assert "quire[spark]" in found["spark"]["next"]
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    broken = rows(run)["java"]
    assert (broken["state"], "JAVA_HOME" in broken["detail"] + broken["next"]) == ("fail", True)


def test_a_clock_that_went_back_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows(run)["clock"]["state"] == "ok"
    monkeypatch.setattr("quire.cli.doctor.CLOCK", ManualClock(1_000))
    assert rows(run)["clock"]["state"] == "warn"


def test_it_fits_80_columns(path: Path) -> None:
    shown = on_a_terminal("doctor", "--store", str(path))
    assert max(map(width_of, shown)) <= 80 + len(str(path)), "only a path may stay whole"


def test_what_a_verification_found_outlives_its_job(run: Run, path: Path) -> None:
    """Findings that are about no artifact were forgotten with the job."""
    with quire.open(path) as store:
        store.manifest.submit([RecordVerification(["kv log x: damaged"])]).result()
    assert "damage on record: kv log x: damaged" in " ".join(run("doctor", "--no-objects").out.split())
    with quire.open(path) as store:
        job = store.heavy.verify(runner="threads")
        store.manifest.submit([ForgetJob(job.job_id)]).result()
        with store.manifest.read() as txn:
            last = last_verification(txn)
    assert last is not None
    assert last.problems == []
    assert "damage is recorded" not in run("doctor", "--no-objects").out


def test_the_places_of_namespaces_get_a_round_trip_too(run: Run, path: Path, tmp_path: Path) -> None:
    (tmp_path / "cold").mkdir()
    with quire.open(path) as store:
        store.namespaces.create("cold", str(tmp_path / "cold"))
        store.namespaces.create("far", str(tmp_path / "not-mounted"))
    states = {check: row["state"] for check, row in rows(run).items()}
    assert (states["namespace cold"], states["namespace far"]) == ("ok", "warn")


def test_a_followed_file_in_trouble_is_told(run: Run, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "app.db"
    apsw.Connection(str(file)).execute("pragma journal_mode=wal; create table t(x); insert into t values (1)")
    with quire.open(path) as store:
        store.followers.follow(file, "app")
    assert rows(run)["followed files"]["state"] == "ok"
    file.unlink()
    found = rows(run)["followed files"]
    assert (found["state"], str(file) in found["detail"], "unfollow" in found["next"]) == ("warn", True, True)
