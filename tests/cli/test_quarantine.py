"""The quarantine commands, and the commands that mention it: doctor and why."""

from __future__ import annotations

from pathlib import Path

import quire
from quire.durable import quarantine
from quire.durable.files import OsDisk
from tests.cli.conftest import Run

HOT = "streams/2/hot/0000000000000009.seg"


def quarantine_file(path: Path) -> None:
    file = path / HOT
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"records")
    quarantine.move(OsDisk(), str(path), HOT, why="the manifest log does not name it", at_ms=5, database=2)


def test_an_empty_quarantine_is_reported(run: Run) -> None:
    assert run("quarantine", "ls").out == "the quarantine is empty\n"
    assert run("quarantine", "ls", "--json").data == []


def test_quarantined_files_are_listed_with_their_reason(run: Run, path: Path) -> None:
    quarantine_file(path)
    (row,) = run("quarantine", "ls", "--json").data
    assert (row["number"], row["path"], row["size_bytes"], row["database"]) == (1, HOT, 7, 2)
    assert (path / row["place"]).read_bytes() == b"records"
    assert "does not name it" in run("quarantine", "ls").out


def test_doctor_and_why_mention_it(run: Run, path: Path) -> None:
    quarantine_file(path)
    rows = {row["check"]: row for row in run("doctor", "--no-objects", "--json").data}
    assert (rows["quarantine"]["state"], "quire quarantine ls" in rows["quarantine"]["next"]) == ("warn", True)
    answer = run("why", f"quarantine/00000001/{HOT}", "--json").data
    assert (answer["state"], answer["size_bytes"]) == ("in quarantine", 7)
    assert "quire quarantine rm 1" in answer["holders"][0]["release"]


def test_restore_puts_it_back_and_rm_removes_it(run: Run, path: Path) -> None:
    quarantine_file(path)
    assert run("quarantine", "restore", "1", "--json").data == {"number": 1, "path": HOT}
    assert (path / HOT).read_bytes() == b"records"
    assert run("quarantine", "restore", "1").code == 3
    quarantine_file(path)
    assert run("quarantine", "rm", "1", "--yes", "--json").data == {"removed": [1]}
    assert run("quarantine", "ls", "--json").data == []
    assert not (path / HOT).exists()
    assert run("quarantine", "rm").code == 2


def test_rm_asks(run: Run, path: Path) -> None:
    quarantine_file(path)
    assert run("quarantine", "rm", "1", answer="n\n").code == 1
    assert len(run("quarantine", "ls", "--json").data) == 1


def test_commands_do_not_disturb_a_running_owner(run: Run, path: Path) -> None:
    quarantine_file(path)
    with quire.open(path):
        assert run("quarantine", "restore", "1").code != 0
        assert len(run("quarantine", "ls", "--json").data) == 1


def test_nothing_is_removed_if_one_of_the_files_does_not_exist(run: Run, path: Path) -> None:
    quarantine_file(path)
    before = run("quarantine", "ls", "--json").data
    refused = run("quarantine", "rm", "1", "99", "--yes")
    assert (refused.code, run("quarantine", "ls", "--json").data) == (3, before)
    assert run("quarantine", "restore", "99").code == 3
    assert run("quarantine", "rm", "1", "1", "--yes", "--json").data == {"removed": [1]}
