"""manifest check: what is found, what is mended, and what is left alone."""

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
from tests.cli.conftest import GARBAGE, GHOST, ORPHAN, Plant, Run, on_a_terminal, quire_program


def test_check_of_a_sound_manifest(run: Run) -> None:
    for how in ([], ["--repair"], ["--repair", "--partial"]):
        ended = run("manifest", "check", *how)
        assert (ended.code, ended.out) == (0, "all rules of the manifest hold\n")
        assert run("manifest", "check", *how, "--json").data == []


def test_check_names_the_rule_and_repair_mends_it(run: Run, path: Path, damage: Plant) -> None:
    damage(GHOST)
    ended = run("manifest", "check")
    assert ended.code == 1
    assert (
        ended.out.splitlines()[1]
        == "D1    repairable  db_names is wrong (table: db_names, key: ghost, is: 77, should be: nothing)"
    )
    assert f"cp -r {path} {path}.copy" in ended.out, "a copy first"
    assert f"quire manifest check --repair --store {path}" in ended.out
    (problem,) = run("manifest", "check", "--json").data
    assert (problem["rule"], problem["mendable"], problem["leak"]) == ("D1", True, False)
    mended = run("manifest", "check", "--repair")
    assert (mended.code, mended.err) == (0, "")
    assert mended.out.splitlines()[1].split()[:2] == ["D1", "repaired"]
    assert mended.out.splitlines()[-1] == "all rules of the manifest hold after 1 repair"
    assert run("manifest", "check").code == 0


def test_repair_says_nothing_on_stderr_to_a_program(run: Run, damage: Plant) -> None:
    damage(GHOST)
    ended = run("manifest", "check", "--repair", "--json")
    assert (ended.code, ended.data, ended.err) == (0, [], "")


def test_what_cannot_be_mended_wholly_is_left_alone(run: Run, path: Path, damage: Plant) -> None:
    """A store that is half mended is harder to understand than a damaged one."""
    damage(GHOST, ORPHAN)
    before = (path / "manifest.lmdb").read_bytes()
    ended = run("manifest", "check", "--repair")
    assert ended.code == 1
    assert "Nothing was changed." in ended.out
    assert "1 of 2 cannot be repaired" in ended.out
    assert "--repair --partial" in ended.out
    assert f"cp -r {path}" in ended.out
    assert (path / "manifest.lmdb").read_bytes() == before
    asked = run("manifest", "check", "--repair", "--json")
    assert (asked.code, asked.err, [each["mendable"] for each in asked.data]) == (1, "", [True, False])


def test_partial_mends_the_rest(run: Run, damage: Plant) -> None:
    damage(GHOST, ORPHAN)
    ended = run("manifest", "check", "--repair", "--partial")
    assert ended.code == 1
    assert [line.split()[:2] for line in ended.out.splitlines()[1:3]] == [["D1", "repaired"], ["D2", "damage"]]
    assert "1 problem after 1 repair" in ended.out
    assert [each["rule"] for each in run("manifest", "check", "--json").data] == ["D2"]
    assert run("manifest", "check", "--partial").code == 2


@pytest.mark.parametrize("how", [["--repair"], ["--repair", "--partial"]])
def test_where_nothing_can_be_mended_nothing_is_opened_for_writing(
    run: Run, damage: Plant, how: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(ORPHAN)
    monkeypatch.setattr("quire.cli.command.Cli.owner", None)
    ended = run("manifest", "check", *how)
    assert (ended.code, "Nothing was changed." in ended.out) == (1, True)


def test_check_shows_what_does_not_decode(run: Run, damage: Plant) -> None:
    """A row that is garbage is a problem to list, not the end of the command."""
    damage(GARBAGE)
    ended = run("manifest", "check")
    assert ended.code == 1
    assert "K1" in ended.out
    assert "run `quire manifest check`" not in ended.out, "its reader is doing that"
    assert run("ls").code == 0, "the other databases are listed"


def test_damage_that_kills_is_met_by_a_child(run: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pages send LMDB beyond its map: whoever opens them dies."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("opened what kills")

    monkeypatch.setattr(manifest, "probe", lambda at: f"reading {at} kills the process with SIGBUS")
    monkeypatch.setattr(ManifestStore, "open", refuse)
    for how in ([], ["--repair"], ["--repair", "--partial"]):
        ended = run("manifest", "check", *how)
        assert ended.code == 1
        assert f"K1    damage  reading {path / 'manifest.lmdb'} kills" in ended.out
    rows = {each["check"]: each for each in run("doctor", "--json").data}
    assert (rows["manifest"]["state"], rows["objects"]["state"]) == ("fail", "ok")
    assert "backup" in rows["manifest"]["next"]


def test_pages_that_make_no_sense_are_a_row(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        for number in range(200):
            store.create(f"db-{number}", "pages")
    file = path / "manifest.lmdb"
    whole = file.read_bytes()
    pages = [whole[start : start + 4096] for start in range(0, len(whole), 4096)]
    file.write_bytes(b"".join([*pages[:2], *(b"\xa5" * 64 + page[64:] for page in pages[2:])]))
    (problem,) = json.loads(quire_program("manifest", "check", "--json", "--store", str(path)).stdout)
    assert (problem["rule"], problem["mendable"]) == ("K1", False)
    ended = quire_program("doctor", "--json", "--store", str(path))
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    assert {each["check"]: each["state"] for each in json.loads(ended.stdout)}["manifest"] == "fail"
    file.write_bytes(whole)


def test_a_store_that_refuses_to_open_says_so_shortly(run: Run, damage: Plant) -> None:
    """The rows it breaks are for `manifest check`, one to a line."""
    damage(*((t.JOBS_BY_STATE, (0, n), t.JOBS_BY_STATE.codec.encode(IndexRecord(n))) for n in range(1, 11)))
    refused = run("create", "x")
    assert refused.code == 7
    what, then = refused.err.splitlines()
    assert what.startswith("error: the manifest breaks its rules (path=")
    assert "problems=10" in what
    assert then == "next:  `quire manifest check` lists them; run `quire manifest check --repair`"
    assert "jobs_by_state" in json.loads(run("create", "x", "--json").err)["error"]["what"], "programs get it all"


def test_a_database_that_is_closed_says_so_and_the_others_work(run: Run, path: Path, damage: Plant) -> None:
    """One broken database kept the whole store shut."""
    damage((t.LIVE_LEAF, (1, 0), t.LIVE_LEAF.codec.encode(LeafRef(1, 77))))
    assert run("create", "x").code == 0
    with quire.open(path) as store:
        with pytest.raises(quire.ManifestDamaged, match="the database is closed"):
            store.snapshot("shop", "now")
        assert [info.name for info in store.databases()] == ["clicks", "shop", "x"]
    assert "S1" in run("manifest", "check").out


def test_no_python_and_no_overflow_at_80_columns(damage: Plant, path: Path) -> None:
    damage(GHOST, ORPHAN, (GHOST[0], ("a name of many words " * 5 + "x",), GHOST[2]))
    shown = on_a_terminal("manifest", "check", "--store", str(path))
    assert max(map(width_of, shown)) <= 80 + 2 * len(str(path)), "only a path may stay whole"
    assert not [line for line in shown if "None" in line or "('" in line or "<" in line]
