"""`quire kv`: every command, for people and for programs."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli import main
from quire.objects.api import list_objects

Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `quire kv …` on a store. Returns the exit code and the output, as JSON unless `text=True`."""
    monkeypatch.delenv("QUIRE_STORE", raising=False)
    quire.open(tmp_path / "store").close()

    def invoke(*arguments: str, text: bool = False) -> tuple[int, Any]:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            monkeypatch.setattr(sys, "stdin", io.StringIO())
            options = ["--store", str(tmp_path / "store"), *([] if text else ["--json"])]
            code = main.run(["kv", *arguments, *options])
        output = out.getvalue() or err.getvalue()
        return code, output if text else json.loads(output)

    return invoke


def test_pairs_are_put_read_listed_and_deleted(run: Run) -> None:
    assert run("put", "cart", "ann", "3 apples")[0] == 3
    assert run("put", "cart", "ann", "3 apples", "--create") == (0, {"key": b"ann".hex(), "lsn": 1})
    assert run("put", "cart", "bob", "größe", text=True) == (0, "put bob in cart\n")
    assert run("get", "cart", "ann", text=True) == (0, "3 apples\n")
    assert run("get", "cart", "ann") == (0, {"key": b"ann".hex(), "value": b"3 apples".hex()})
    code, output = run("get", "cart", "eve")
    assert (code, output["error"]["kind"]) == (3, "NotFound")
    listed = [bytes.fromhex(row["key"]) for row in run("scan", "cart", "--reverse")[1]]
    assert listed == [b"bob", b"ann"]
    assert [row["key"] for row in run("scan", "cart", "--from", "b", "--to", "c")[1]] == [b"bob".hex()]
    assert [row["key"] for row in run("scan", "cart", "--prefix", "a", "--limit", "1")[1]] == [b"ann".hex()]
    assert run("scan", "cart", "--prefix", "a", "--from", "b")[0] == 2
    assert run("delete", "cart", "ann")[0] == 0
    assert run("scan", "cart", "--prefix", "ann", text=True) == (0, "no matching keys\n")


def test_bytes_that_are_not_text_are_hexadecimal(run: Run) -> None:
    assert run("put", "cart", "ff00", "0xfe", "--hex", "--create")[0] == 0
    assert run("get", "cart", "ff00", "--hex", text=True) == (0, "fe\n")
    assert "0xff00" in run("scan", "cart", text=True)[1]
    assert run("get", "cart", "zz", "--hex")[0] == 2


def test_stats_compact_and_verify(run: Run, tmp_path: Path) -> None:
    for number in range(5):
        run("put", "cart", f"k{number}", "v", "--create")
    assert run("stats", "cart")[1]["memtable_keys"] == 5
    compacted = run("compact", "cart", "--runner", "threads")[1]
    assert (compacted["after"] > 0, compacted["runner"], compacted["job_id"] > 0) == (True, "threads", True)
    assert run("compact", "cart", "--runner", "nobody")[0] == 2
    stats = run("stats", "cart")[1]
    assert (stats["rows"], stats["tables"], stats["memtable_keys"]) == (5, 1, 0)
    assert "tables" in run("stats", "cart", text=True)[1]
    assert run("verify", "cart", text=True) == (0, "cart has no damage: 1 table read\n")
    folder = tmp_path / "store" / "lsm" / "00000001" / "sst"
    (table,) = os.listdir(folder)
    data = bytearray((folder / table).read_bytes())
    data[600] ^= 1
    (folder / table).write_bytes(data)
    code, problems = run("verify", "cart")
    assert (code, problems[0]["rule"]) == (1, "V1")


def test_a_backup_is_created_listed_and_restored(run: Run) -> None:
    run("put", "cart", "ann", "1", "--create")
    backup = run("backup", "cart")[1]
    assert (backup["label"], backup["lsn"], backup["tables"]) == ("cart", 1, 1)
    assert [row["lsn"] for row in run("backups", "cart")[1]] == [1]
    assert run("restore", "again", "--label", "cart")[0] == 0
    assert run("get", "again", "ann", text=True) == (0, "1\n")
    assert run("restore", "again", "--label", "cart")[0] == 4
    assert run("restore", "other")[0] == 3


def test_the_error_of_a_damaged_database_names_the_repair_command_which_works(run: Run, tmp_path: Path) -> None:
    """A flipped bit in the last record dropped a synced write, and no check reported it."""
    for name in ("ann", "bob"):
        run("put", "cart", name, "1", "--create")
    assert run("repair", "cart", text=True) == (0, "cart needs no repair\n")
    (wal,) = (tmp_path / "store" / "lsm" / "00000001" / "wal").iterdir()
    original = wal.read_bytes()
    wal.write_bytes(original[:-30] + bytes([original[-30] ^ 1]) + original[-29:])
    code, output = run("get", "cart", "ann", text=True)
    assert code != 0
    assert "quire kv repair cart" in output
    code, report = run("repair", "cart")
    assert (code, report["applied"], report["batches"], len(report["lost"])) == (1, False, 1, 1)
    assert wal.exists()
    code, output = run("repair", "cart", "--apply", text=True)
    assert code == 1, "not everything was saved"
    assert "\nlost\n" in output
    assert "repaired cart" in output
    assert run("get", "cart", "ann", text=True) == (0, "1\n")
    assert run("repair", "cart", "--apply")[1]["applied"] is False


def test_superseded_backups_are_removed(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "store" / "quire.toml"
    config.write_text(config.read_text().replace("[lsm]\n", "[lsm]\nbackups_kept = 2\n"))
    backups = []
    for n in range(4):
        run("put", "cart", f"k{n}", "v", "--create")
        backups.append(run("backup", "cart")[1])
    assert [backup["removed"] for backup in backups] == [[], [], [backups[0]["lsn"]], [backups[1]["lsn"]]]
    assert [row["lsn"] for row in run("backups", "cart")[1]] == [backups[2]["lsn"], backups[3]["lsn"]]
    assert run("prune", "cart", "--dry-run", text=True)[1].startswith("would remove 1 backup")
    assert run("prune", "cart", text=True)[0] != 0, "no confirmation was given"
    assert run("prune", "cart", "--yes")[1]["backups"] == [backups[2]["lsn"]]
    assert run("prune", "cart", text=True) == (0, "nothing to remove; 1 backup of cart remains\n")
    assert run("restore", "again", "--label", "cart")[0] == 0


def test_why_names_the_command_that_removes_an_object_of_a_backup(tmp_path: Path, run: Run) -> None:
    run("put", "cart", "a", "1", "--create")
    run("backup", "cart")
    with quire.open(tmp_path / "store") as store:
        keys = [info.key for info in list_objects(store.objects) if info.key.endswith((".sst", ".json"))]
    assert len(keys) == 2
    for key in keys:
        out = io.StringIO()
        with redirect_stdout(out):
            assert main.run(["why", key, "--store", str(tmp_path / "store"), "--json"]) == 0
        (holder,) = json.loads(out.getvalue())["holders"]
        assert "quire kv prune cart" in holder["release"]
