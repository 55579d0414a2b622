"""init, ls, info, create, drop, rename."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import quire
from tests.cli.conftest import Run, quire_program


def test_init_makes_a_store_once(run: Run, tmp_path: Path) -> None:
    new = tmp_path / "new"
    first = run("init", str(new), "--json")
    assert first.data == {"path": str(new), "created": True, "object_store": str(new / "objects")}
    assert run("init", str(new), "--json").data["created"] is False
    assert "is a store already" in run("init", str(new)).out


def test_init_remembers_the_object_store_and_refuses_another(run: Run, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert run("init", str(new), "--object-store", "s3://bucket/x", "--json").data["object_store"] == "s3://bucket/x"
    assert run("init", str(new), "--object-store", "s3://bucket/y").code == 8
    assert run("init", str(tmp_path / "other"), "--object-store", "ftp://x").code == 2
    assert not (tmp_path / "other").exists()


def test_init_leaves_a_directory_with_files_alone(run: Run, tmp_path: Path) -> None:
    ended = run("init", str(tmp_path))
    assert ended.code == 2
    assert ended.err.splitlines()[1] == "next:  `quire init` wants a new or an empty directory"


def test_ls_lists_databases(run: Run) -> None:
    lines = run("ls").out.splitlines()
    assert lines[0].split() == ["name", "kind", "status", "snapshots", "created", "forked", "from"]
    assert [line.split()[:3] for line in lines[1:]] == [["clicks", "stream", "active"], ["shop", "pages", "active"]]
    assert [(each["name"], each["kind"]) for each in run("ls", "--json").data] == [
        ("clicks", "stream"),
        ("shop", "pages"),
    ]


def test_ls_of_an_empty_store_says_what_to_do(run: Run, tmp_path: Path) -> None:
    quire.open(tmp_path / "empty").close()
    assert "quire create NAME" in run("ls", at=tmp_path / "empty").out
    assert run("ls", "--json", at=tmp_path / "empty").data == []


def test_the_store_is_found_by_option_environment_or_directory(
    run: Run, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("ls", at=None, QUIRE_STORE=str(path)).code == 0
    monkeypatch.chdir(path)
    assert run("ls", at=None).code == 0
    monkeypatch.chdir(tmp_path)
    assert run("ls", at=None).code != 0
    assert run("ls", QUIRE_STORE=str(tmp_path / "nothing")).code == 0, "the option wins"


def test_info_shows_numbers(run: Run, path: Path) -> None:
    data = run("info", "--json").data
    assert data["databases"] == {"pages": 1, "stream": 1, "lsm": 0}
    assert data["newest_change"] == 2
    assert f"store         {path}" in run("info").out


def test_create_rename_drop(run: Run) -> None:
    assert run("create", "kv", "--kind", "lsm", "--json").data["kind"] == "lsm"
    assert run("rename", "kv", "cache").out == "kv is called cache now\n"
    assert run("drop", "cache", "--yes", "--json").data["dropped"]["name"] == "cache"
    assert [each["name"] for each in run("ls", "--json").data] == ["clicks", "shop"]


def test_drop_asks(run: Run) -> None:
    refused = run("drop", "shop", answer="n\n")
    assert (refused.code, refused.out) == (1, "nothing was dropped\n")
    assert "drop pages database shop?" in refused.err
    assert run("drop", "shop", answer="").code == 2
    assert len(run("ls", "--json").data) == 2
    assert run("drop", "shop", "--json", answer="y\n").data["dropped"]["name"] == "shop"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["create", "shop"], 4),
        (["create", "a/b"], 2),
        (["create", "x", "--kind", "table"], 2),
        (["rename", "nothing", "x"], 3),
        (["drop", "nothing", "--yes"], 3),
        (["ls", "--nonsense"], 2),
        (["nonsense"], 2),
    ],
)
def test_what_fails_has_its_code_and_no_traceback(run: Run, arguments: list[str], code: int) -> None:
    ended = run(*arguments)
    assert ended.code == code
    assert ended.out == ""
    assert "Traceback" not in ended.err


def test_an_error_is_one_sentence_and_the_next_step(run: Run, tmp_path: Path) -> None:
    ended = run("ls", at=tmp_path / "nothing")
    where = tmp_path / "nothing"
    hint = f"say which with `--store DIR` or QUIRE_STORE; `quire init {where}` makes one"
    assert ended.err == f"error: there is no store here (path='{where}')\nnext:  {hint}\n"
    told = json.loads(run("ls", "--json", at=where).err)["error"]
    assert told == {
        "kind": "StoreNotFound",
        "what": "there is no store here",
        "next": hint,
        "where": {"path": str(where)},
        "exit_code": 3,
    }


def test_debug_shows_the_traceback(run: Run, tmp_path: Path) -> None:
    with pytest.raises(quire.StoreNotFound):
        run("ls", "--debug", at=tmp_path / "nothing")


def test_while_an_owner_is_there_reading_works_and_writing_says_who(path: Path) -> None:
    """Reading commands run in a process of their own: LMDB allows one environment per process."""
    with quire.open(path) as store:
        for command in (["ls"], ["info"], ["manifest", "check"], ["manifest", "tables"], ["feed", "tail"], ["doctor"]):
            ended = quire_program(*command, "--store", str(path))
            assert ended.returncode == 0, ended.stderr
        refused = quire_program("create", "x", "--store", str(path))
        assert refused.returncode == 5
        assert f"pid={os.getpid()}" in refused.stderr
        assert [each.name for each in store.databases()] == ["clicks", "shop"]
