"""Directories that are not the owner (a standby, a restore, a deposed owner): what `doctor` says, and that SQL can be read."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import quire
from tests.cli.conftest import Run


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """An archived store in `origin`, a standby of it, and a restore."""
    bucket = str(tmp_path / "bucket")
    (tmp_path / "origin").mkdir()
    config = f'object_store = "{bucket}"\n[archive]\nmode = "async"\ninterval_seconds = 0.05\n'
    (tmp_path / "origin" / "quire.toml").write_text(config)
    with quire.open(tmp_path / "origin") as store:
        with store.sqlite("shop", create=True) as connection:
            connection.execute("create table item(name)")
            connection.execute("insert into item values('apples')")
        store.snapshot("shop", "monday")
    with quire.Standby(bucket, tmp_path / "standby") as standby:
        standby.poll()
    quire.restore(bucket, tmp_path / "restored")
    return tmp_path


def checks(run: Run, at: Path) -> dict[str, dict[str, str]]:
    return {row["check"]: row for row in run("doctor", "--json", at=at).data}


def test_doctor_accepts_a_standby(run: Run, copies: Path) -> None:
    found = checks(run, copies / "standby")
    assert [name for name, row in found.items() if row["state"] == "fail"] == []
    assert found["session"]["detail"].startswith(f"a standby of {copies / 'bucket'}, as of ")
    assert found["session"]["detail"].endswith("0.0 s behind")
    assert "takeover" not in str(found)


def test_doctor_accepts_a_restored_directory(run: Run, copies: Path) -> None:
    found = checks(run, copies / "restored")
    assert [name for name, row in found.items() if row["state"] == "fail"] == []
    assert found["session"]["detail"].startswith(f"a read-only restore of {copies / 'bucket'}, as of ")
    assert "takeover" not in str(found)


def test_doctor_gives_a_deposed_owner_one_advice(run: Run, copies: Path) -> None:
    quire.promote(copies / "standby")
    refused = run("kv", "put", "cart", "a", "1", "--create", at=copies / "origin")
    assert refused.code != 0
    found = checks(run, copies / "origin")
    assert found["session"]["state"] == "fail"
    advice = [row["next"] for row in found.values() if "takeover" in row["next"]]
    assert len(advice) == 1
    assert "`quire takeover --discard`" in advice[0]


@pytest.mark.parametrize("which", ["standby", "restored"])
def test_sql_of_a_copy_is_read_and_exported(run: Run, copies: Path, which: str, tmp_path: Path) -> None:
    at = copies / which
    result = run("sqlite", "shell", "shop", "select name from item", at=at)
    assert (result.code, result.out.strip()) == (0, "apples"), result.err
    for name, version in (("now.db", []), ("then.db", ["--at", "monday"])):
        result = run("sqlite", "export", "shop", str(tmp_path / name), *version, at=at)
        assert result.code == 0, result.err
        exported = sqlite3.connect(tmp_path / name)
        assert exported.execute("select name from item").fetchall() == [("apples",)]
        exported.close()


@pytest.mark.parametrize("which", ["standby", "restored"])
def test_a_refused_write_names_commands_that_work(run: Run, copies: Path, which: str) -> None:
    refused = run("kv", "put", "cart", "a", "1", "--create", at=copies / which)
    assert "`quire sqlite shell`" in refused.err
    written = run("sqlite", "shell", "shop", "delete from item", at=copies / which)
    assert written.code != 0
    assert "write to the owner" in written.err


def test_status_of_a_copy_reports_nothing_that_it_cannot_know(run: Run, copies: Path) -> None:
    for which, says in (("standby", "a standby of"), ("restored", "a read-only restore of")):
        result = run("archive", "status", at=copies / which)
        assert result.code == 0
        assert says in result.out
        assert "lag" not in result.out
        assert "last error" not in result.out
        assert "archive drill" not in result.out + run("info", at=copies / which).out, "only the owner can run one"


def test_status_of_a_deposed_owner_reports_nothing_that_it_cannot_know(run: Run, copies: Path) -> None:
    origin = copies / "origin"
    quire.promote(copies / "standby")
    unaware = run("archive", "status", at=origin)
    assert unaware.code == 1
    assert "another owner has taken the store over: 00000002.00000001" in unaware.out
    assert run("archive", "status", "--json", at=origin).data["safe"] is False
    assert run("kv", "put", "cart", "a", "1", "--create", at=origin).code != 0
    fenced = run("archive", "status", at=origin)
    assert fenced.code == 1
    assert "nothing more is archived from here" in fenced.out
    for figure in ("lag", "last error", "US$", "archive drill"):
        assert figure not in fenced.out
        assert figure not in run("info", at=origin).out
