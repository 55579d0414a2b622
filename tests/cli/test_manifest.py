"""manifest check, tables, dump; feed tail; doctor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import quire
from quire.cli.output import STEP_ROWS
from quire.manifest import tables as t
from quire.manifest.ops.base import Op
from quire.manifest.ops.corrections import CorrectIndex
from quire.manifest.ops.local import RecordMetric
from tests.cli.conftest import Run


def damage(path: Path) -> None:
    """Make an index lie, with the operation that mends it."""
    with quire.open(path) as store:
        store.manifest.submit([CorrectIndex("db_names", t.DB_NAMES.key.pack("ghost"), 77)]).result()


def test_check_of_a_sound_manifest(run: Run) -> None:
    ended = run("manifest", "check")
    assert (ended.code, ended.out) == (0, "the manifest keeps all its rules\n")
    assert run("manifest", "check", "--json").data == []


def test_check_names_the_rule_and_repair_mends_it(run: Run, path: Path) -> None:
    damage(path)
    ended = run("manifest", "check")
    assert ended.code == 1
    assert ended.out.splitlines()[1].split()[:3] == ["D1", "damage", "yes"]
    assert "--repair" in ended.out
    (problem,) = run("manifest", "check", "--json").data
    assert (problem["rule"], problem["mendable"], problem["leak"]) == ("D1", True, False)
    refused = run("create", "x")
    assert refused.code == 7
    assert "quire manifest check --repair" in refused.err
    assert run("manifest", "check", "--repair").out == "the manifest keeps all its rules after 1 repair\n"
    assert run("manifest", "check", "--repair").code == 0


def test_check_shows_what_does_not_decode(run: Run, path: Path) -> None:
    """A row that is garbage is a problem to list, not the end of the command."""
    whole = (path / "manifest.lmdb").read_bytes()
    with quire.open(path) as store:
        env = store.manifest.env
        txn = env.begin_write()
        txn.put(t.DB.key.pack(9), b"\x01\x00garbage", db=env.handles["db"])
        txn.commit()
    ended = run("manifest", "check")
    assert ended.code == 1
    assert "K1" in ended.out
    assert run("ls").code == 7
    (path / "manifest.lmdb").write_bytes(whole)


def test_tables_lists_every_table(run: Run) -> None:
    data = run("manifest", "tables", "--json").data
    assert {each["table"]: each["rows"] for each in data}["db"] == 2
    assert [each["table"] for each in data] == list(t.TABLES)
    assert {each["policy"] for each in data} == {"logged", "local", "derived"}


def test_dump_decodes_rows(run: Run) -> None:
    (row,) = run("manifest", "dump", "db", "--limit", "1", "--json").data
    assert (row["db_id"], row["record"]["name"], row["record"]["kind"]) == (1, "shop", "pages")
    assert "db_id=1  name=shop kind=pages" in run("manifest", "dump", "db").out
    assert run("manifest", "dump", "metrics").out == "metrics is empty\n"


@pytest.mark.parametrize("name", list(t.TABLES))
def test_every_table_dumps(run: Run, name: str) -> None:
    assert run("manifest", "dump", name, "--json").code == 0
    assert run("manifest", "dump", name).code == 0


def test_dump_of_an_unknown_table_lists_the_tables(run: Run) -> None:
    ended = run("manifest", "dump", "nonsense")
    assert ended.code == 2
    assert "chunk_catalog" in ended.err


@pytest.mark.parametrize("limit", [0, 1, STEP_ROWS, STEP_ROWS + 1, 10 * STEP_ROWS])
def test_dump_goes_on_where_a_step_ended(run: Run, path: Path, limit: int) -> None:
    rows = 2 * STEP_ROWS + 5
    with quire.open(path) as store:
        ops: list[Op] = [RecordMetric(number, 1, [1.0]) for number in range(rows)]
        store.manifest.submit(ops).result()
    data = run("manifest", "dump", "metrics", "--limit", str(limit), "--json").data
    assert [each["scope"] for each in data] == list(range(min(limit or rows, rows)))


def test_feed_tail_shows_the_newest_or_from_a_sequence(run: Run) -> None:
    data = run("feed", "tail", "--limit", "1", "--json").data
    assert [(each["sequence"], each["operations"][0]["op"]) for each in data] == [(2, "RegisterDb")]
    assert [each["sequence"] for each in run("feed", "tail", "--from", "1", "--json").data] == [1, 2]
    assert "RegisterDb db_id=1 name=shop" in run("feed", "tail", "--from", "1").out
    assert run("feed", "tail", "--from", "9").out == "the feed has nothing from sequence 9 on\n"


def test_doctor_finds_all_well(run: Run, path: Path) -> None:
    ended = run("doctor", "--json")
    assert ended.code == 0
    states = {each["check"]: each["state"] for each in ended.data}
    assert set(states) == {"quire", "python", "platform", "lmdb", "store", "disk", "owner", "readers", "map", "objects"}
    assert states["objects"] == "ok"
    assert not [each for each in (path / "objects").rglob("*") if each.is_file()]


def test_doctor_tells_what_is_bad_and_goes_on(run: Run, path: Path, tmp_path: Path) -> None:
    (path / "objects").write_text("a file in the way")
    ended = run("doctor")
    assert ended.code == 1
    assert [line.split()[1] for line in ended.out.splitlines() if line.startswith("objects")] == ["bad"]
    assert run("doctor", "--no-objects").code == 0
    missing = run("doctor", "--json", at=tmp_path / "nothing")
    assert missing.code == 1
    assert "disk" in {each["check"] for each in json.loads(missing.out)}
    (path / "objects").unlink()
