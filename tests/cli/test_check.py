"""manifest check: what it finds, what it repairs, and what it leaves unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import quire
from quire.cli import manifest
from quire.cli.output import width_of
from quire.manifest import tables as t
from quire.manifest.records import IndexRecord, LeafRef
from quire.manifest.store import ManifestStore
from tests.cli.conftest import GARBAGE, GHOST, ORPHAN, Damage, Run, on_a_terminal, quire_program


def test_check_of_a_valid_manifest(run: Run) -> None:
    for options in ([], ["--repair"], ["--repair", "--partial"]):
        result = run("manifest", "check", *options)
        assert (result.code, result.out) == (0, "all rules of the manifest hold\n")
        assert run("manifest", "check", *options, "--json").data == []


def test_check_names_the_rule_and_repair_fixes_it(run: Run, path: Path, damage: Damage) -> None:
    damage(GHOST)
    result = run("manifest", "check")
    assert result.code == 1
    assert (
        result.out.splitlines()[1]
        == "D1    repairable  db_names is wrong (table: db_names, key: ghost, is: 77, should be: nothing)"
    )
    assert f"cp -r {path} {path}.copy" in result.out, "a copy is made first"
    assert f"quire manifest check --repair --store {path}" in result.out
    (problem,) = run("manifest", "check", "--json").data
    assert (problem["rule"], problem["mendable"], problem["leak"]) == ("D1", True, False)
    repaired = run("manifest", "check", "--repair")
    assert (repaired.code, repaired.err) == (0, "")
    assert repaired.out.splitlines()[1].split()[:2] == ["D1", "repaired"]
    assert repaired.out.splitlines()[-1] == "all rules of the manifest hold after 1 repair"
    assert run("manifest", "check").code == 0


def test_repair_with_json_writes_nothing_to_stderr(run: Run, damage: Damage) -> None:
    damage(GHOST)
    result = run("manifest", "check", "--repair", "--json")
    assert (result.code, result.data, result.err) == (0, [], "")


def test_a_manifest_that_cannot_be_repaired_completely_is_left_unchanged(run: Run, path: Path, damage: Damage) -> None:
    """A half-repaired store is harder to understand than a damaged one."""
    damage(GHOST, ORPHAN)
    before = (path / "manifest.lmdb").read_bytes()
    result = run("manifest", "check", "--repair")
    assert result.code == 1
    assert "Nothing was changed." in result.out
    assert "1 of 2 cannot be repaired" in result.out
    assert "--repair --partial" in result.out
    assert f"cp -r {path}" in result.out
    assert (path / "manifest.lmdb").read_bytes() == before
    listed = run("manifest", "check", "--repair", "--json")
    assert (listed.code, listed.err, [problem["mendable"] for problem in listed.data]) == (1, "", [True, False])


def test_partial_repairs_what_can_be_repaired(run: Run, damage: Damage) -> None:
    damage(GHOST, ORPHAN)
    result = run("manifest", "check", "--repair", "--partial")
    assert result.code == 1
    assert [line.split()[:2] for line in result.out.splitlines()[1:3]] == [["D1", "repaired"], ["D2", "damage"]]
    assert "1 problem after 1 repair" in result.out
    assert [problem["rule"] for problem in run("manifest", "check", "--json").data] == ["D2"]
    assert run("manifest", "check", "--partial").code == 2


@pytest.mark.parametrize("options", [["--repair"], ["--repair", "--partial"]])
def test_without_anything_to_repair_the_store_is_not_opened_for_writing(
    run: Run, damage: Damage, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(ORPHAN)
    monkeypatch.setattr("quire.cli.command.Cli.owner", None)
    result = run("manifest", "check", *options)
    assert (result.code, "Nothing was changed." in result.out) == (1, True)


def test_check_shows_rows_that_do_not_decode(run: Run, damage: Damage) -> None:
    """A garbage row is listed as a problem and does not end the command."""
    damage(GARBAGE)
    result = run("manifest", "check")
    assert result.code == 1
    assert "K1" in result.out
    assert "run `quire manifest check`" not in result.out, "this is that command"
    assert run("ls").code == 0, "the other databases are listed"


def test_damage_that_crashes_lmdb_only_kills_a_child_process(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some damaged pages make LMDB read beyond its map: the process that opens them dies."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("opened what kills")

    monkeypatch.setattr(manifest, "probe", lambda at: f"reading {at} kills the process with SIGBUS")
    monkeypatch.setattr(ManifestStore, "open", refuse)
    for options in ([], ["--repair"], ["--repair", "--partial"]):
        result = run("manifest", "check", *options)
        assert result.code == 1
        assert f"K1    damage  reading {path / 'manifest.lmdb'} kills" in result.out
    rows = {row["check"]: row for row in run("doctor", "--json").data}
    assert (rows["manifest"]["state"], rows["objects"]["state"]) == ("fail", "ok")
    assert "backup" in rows["manifest"]["next"]


def test_invalid_pages_are_listed_as_a_row(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        for number in range(200):
            store.create(f"db-{number}", "pages")
    file = path / "manifest.lmdb"
    whole = file.read_bytes()
    pages = [whole[start : start + 4096] for start in range(0, len(whole), 4096)]
    file.write_bytes(b"".join([*pages[:2], *(b"\xa5" * 64 + page[64:] for page in pages[2:])]))
    (problem,) = json.loads(quire_program("manifest", "check", "--json", "--store", str(path)).stdout)
    assert (problem["rule"], problem["mendable"]) == ("K1", False)
    result = quire_program("doctor", "--json", "--store", str(path))
    assert (result.returncode, "Traceback" in result.stderr) == (1, False)
    assert {row["check"]: row["state"] for row in json.loads(result.stdout)}["manifest"] == "fail"
    file.write_bytes(whole)


def test_a_store_that_cannot_be_opened_reports_it_briefly(run: Run, damage: Damage) -> None:
    """`manifest check` lists the broken rows, one per line."""
    damage(*((t.JOBS_BY_STATE, (0, n), t.JOBS_BY_STATE.codec.encode(IndexRecord(n))) for n in range(1, 11)))
    refused = run("create", "x")
    assert refused.code == 7
    message, hint = refused.err.splitlines()
    assert message.startswith("error: the manifest breaks its rules (path=")
    assert "problems=10" in message
    assert hint == "next:  `quire manifest check` lists them; run `quire manifest check --repair`"
    assert "jobs_by_state" in json.loads(run("create", "x", "--json").err)["error"]["what"], "JSON contains everything"


def test_a_damaged_database_is_reported_and_the_others_work(run: Run, path: Path, damage: Damage) -> None:
    """One damaged database made the whole store unusable."""
    damage((t.LIVE_LEAF, (1, 0), t.LIVE_LEAF.codec.encode(LeafRef(1, 77))))
    assert run("create", "x").code == 0
    with quire.open(path) as store:
        with pytest.raises(quire.ManifestDamaged, match="the database is closed"):
            store.snapshot("shop", "now")
        assert [info.name for info in store.databases()] == ["clicks", "shop", "x"]
    assert "S1" in run("manifest", "check").out


def test_no_python_text_and_no_overflow_at_80_columns(damage: Damage, path: Path) -> None:
    damage(GHOST, ORPHAN, (GHOST[0], ("a name of many words " * 5 + "x",), GHOST[2]))
    shown = on_a_terminal("manifest", "check", "--store", str(path))
    assert max(map(width_of, shown)) <= 80 + 2 * len(str(path)), "only a path may be longer"
    assert not [line for line in shown if "None" in line or "('" in line or "<" in line]
