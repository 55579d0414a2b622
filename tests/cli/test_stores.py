"""init, ls, info, create, drop, rename."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import quire
from quire.core.settings import StoreSettings
from quire.manifest.ops.snapshots import ForkDb
from quire.store.info import StoreReader
from tests.cli.conftest import Run, quire_program


def test_init_creates_a_store_once(run: Run, tmp_path: Path) -> None:
    new = tmp_path / "new"
    first = run("init", str(new), "--json")
    assert first.data == {"path": str(new), "created": True, "object_store": str(new / "objects")}
    assert run("init", str(new), "--json").data["created"] is False
    assert "is already a store" in run("init", str(new)).out


def test_init_remembers_the_object_store_and_refuses_another(run: Run, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert run("init", str(new), "--object-store", "s3://bucket/x", "--json").data["object_store"] == "s3://bucket/x"
    assert run("init", str(new), "--object-store", "s3://bucket/y").code == 8


def test_init_of_an_existing_store_refuses_settings_that_it_would_ignore(run: Run, tmp_path: Path) -> None:
    new = tmp_path / "new"
    given = ("--object-store", "s3://bucket/x", "--endpoint", "https://s3.example", "--region", "eu")
    assert run("init", str(new), *given).code == 0
    assert run("init", str(new), *given).code == 0, "they are those that it has"
    for option in (("--endpoint", "https://other.example"), ("--region", "us"), ("--allow-http",)):
        refused = run("init", str(new), *option)
        assert (refused.code, option[0] in refused.err) == (2, True)


@pytest.mark.parametrize("url", ["ftp://x", "S4://bucket/x", "s3:bucket", "file:/x"])
def test_an_unsupported_object_store_is_refused_at_once(run: Run, path: Path, tmp_path: Path, url: str) -> None:
    """By init and whenever the store is opened, in Python too, with the supported URLs; not only when the first object
    is written."""
    refused = run("init", str(tmp_path / "other"), "--object-store", url)
    assert refused.code == 2
    assert "s3://bucket/prefix" in refused.err
    assert not (tmp_path / "other").exists()
    with pytest.raises(quire.InvalidConfig, match="s3://bucket/prefix"):
        quire.open(tmp_path / "other", settings=StoreSettings(object_store=url))
    assert not (tmp_path / "other" / "quire.toml").exists()
    (path / "quire.toml").write_text(f'object_store = "{url}"')
    for command in (["ls"], ["create", "x"], ["manifest", "tables"]):
        refused = run(*command)
        assert (refused.code, "s3://bucket/prefix" in refused.err) == (2, True)
        assert f"path='{path / 'quire.toml'}'" in refused.err
    states = {row["check"]: row["state"] for row in run("doctor", "--json").data}
    assert (states["store"], states["manifest"]) == ("fail", "ok"), "the doctor runs its other checks"
    (path / "quire.toml").write_text("")


@pytest.mark.parametrize(
    "url", ["s3://bucket/x", "gs://b", "az://c/x", "memory://m", "file:///tmp/x", "/tmp/a:b", "c:/x"]
)
def test_supported_object_stores(path: Path, url: str) -> None:
    (path / "quire.toml").write_text(f'object_store = "{url}"')
    with quire.open(path, "r") as store:
        assert store.objects_url.endswith(url)
    (path / "quire.toml").write_text("")


def test_an_invalid_configuration_names_the_file_and_how_to_compare(run: Run, path: Path) -> None:
    (path / "quire.toml").write_text("[manifest]\nops_max = 1")
    result = run("ls")
    assert (result.code, f"path='{path / 'quire.toml'}'" in result.err) == (2, True)
    assert "`quire init DIR` with a new DIR writes a commented example" in result.err
    (path / "quire.toml").write_text("")


def test_init_refuses_a_directory_with_other_files(run: Run, tmp_path: Path) -> None:
    result = run("init", str(tmp_path))
    assert result.code == 2
    assert result.err.splitlines()[1] == "next:  use a new or an empty directory"


def test_ls_lists_databases(run: Run) -> None:
    lines = run("ls").out.splitlines()
    assert lines[0].split() == ["name", "kind", "status", "snapshots", "created", "forked", "from"]
    assert [line.split()[:3] for line in lines[1:]] == [["clicks", "stream", "active"], ["shop", "pages", "active"]]
    assert [(row["name"], row["kind"]) for row in run("ls", "--json").data] == [
        ("clicks", "stream"),
        ("shop", "pages"),
    ]


def test_ls_of_an_empty_store_gives_a_hint(run: Run, tmp_path: Path) -> None:
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
    assert run("ls", QUIRE_STORE=str(tmp_path / "nothing")).code == 0, "the option takes precedence"


def test_info_shows_numbers(run: Run, path: Path) -> None:
    data = run("info", "--json").data
    assert data["databases"] == {"pages": 1, "stream": 1, "lsm": 0}
    assert data["newest_change"] == 2
    assert f"store         {path}" in run("info").out


def test_create_rename_drop(run: Run) -> None:
    assert run("create", "kv", "--kind", "lsm", "--json").data["kind"] == "lsm"
    assert run("rename", "kv", "cache").out == "renamed kv to cache\n"
    dropped = run("drop", "cache", "--yes", "--json").data["dropped"]
    assert (dropped["name"], dropped["status"]) == ("cache", "tombstoned"), "the current state"
    assert [row["name"] for row in run("ls", "--json").data] == ["clicks", "shop"]


@pytest.mark.parametrize(
    ("kind", "text"), [("lsm", "a key-value set"), ("pages", "a page database"), ("stream", "a stream")]
)
def test_created_databases_are_reported_in_correct_english(run: Run, kind: str, text: str) -> None:
    assert run("create", "x", "--kind", kind).out == f"created x, {text} with id 3\n"


def test_a_fork_of_a_dropped_database_shows_its_id(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        store.manifest.submit([ForkDb(store.manifest.reserve_db_id(), 1, "copy")]).result()
    assert run("ls").out.splitlines()[-2].split()[-1] == "shop"
    assert run("drop", "shop", "--yes").code == 0
    assert run("ls").out.splitlines()[-1].endswith("  #1, dropped")
    (fork,) = (row for row in run("ls", "--json").data if row["name"] == "copy")
    assert (fork["parent_db_id"], fork["parent"]) == (1, "")


def test_bidirectional_overrides_in_database_names_are_escaped(run: Run) -> None:
    """Right-to-left overrides and zero-width characters are escaped wherever a name is shown."""
    unsafe_name = "a\u202eb\u200bc"
    outputs = [
        run("create", unsafe_name),
        run("create", unsafe_name),
        run("ls"),
        run("rename", unsafe_name, unsafe_name + "d"),
        run("drop", unsafe_name + "d", answer="n\n"),
        run("drop", unsafe_name + "d", "--yes"),
        run("drop", unsafe_name, "--yes"),
    ]
    for result in outputs:
        assert "\u202e" not in result.out + result.err
        assert "\\u202e" in result.out + result.err
    assert run("create", unsafe_name, "--json").data["name"] == unsafe_name, "JSON contains the name itself"


def test_a_reader_reports_the_same_as_the_store(path: Path) -> None:
    with quire.open(path, "r") as store:
        databases, info = store.databases(), store.info()
    with StoreReader(str(path)) as reader:
        assert reader.databases() == databases
        assert reader.info() == info


def test_drop_asks(run: Run) -> None:
    refused = run("drop", "shop", answer="n\n")
    assert (refused.code, refused.out) == (1, "nothing was dropped\n")
    assert "drop the page database shop?" in refused.err
    assert run("drop", "shop", answer="").code == 2
    assert len(run("ls", "--json").data) == 2
    assert run("drop", "shop", "--json", answer="y\n").data["dropped"]["name"] == "shop"


@pytest.mark.parametrize("is_dropped", [False, True])
def test_drop_now_says_that_it_is_final(run: Run, is_dropped: bool) -> None:
    if is_dropped:
        run("drop", "shop", "--yes")
    refused = run("drop", "shop", "--now", answer="n\n")
    assert refused.code == 1
    assert "It cannot be brought back. [y/N]" in refused.err


def test_dropped_databases_are_filtered_and_limited(run: Run) -> None:
    run("create", "tenant-1")
    run("create", "tenant-2")
    for name in ("tenant-1", "tenant-2", "clicks"):
        run("drop", name, "--yes")

    def listed(*arguments: str) -> list[str]:
        return [row["name"] for row in run("ls", "--dropped", *arguments, "--json").data]

    assert listed() == ["clicks", "tenant-2", "tenant-1"]
    assert listed("tenant-") == listed("tenant-*") == ["tenant-2", "tenant-1"]
    assert listed("--kind", "stream") == ["clicks"]
    assert listed("--limit", "1") == ["clicks"]
    assert "there are more: `--limit 0` lists all" in run("ls", "--dropped", "--limit", "1").out
    assert "there are more" not in run("ls", "--dropped").out
    assert run("ls", "nothing", "--dropped").out == "no dropped database matches\n"
    for option in (("--tag", "a"), ("--sort", "size"), ("--after", "clicks")):
        assert run("ls", "--dropped", *option).code == 2


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
def test_failures_have_an_exit_code_and_no_traceback(run: Run, arguments: list[str], code: int) -> None:
    result = run(*arguments)
    assert result.code == code
    assert result.out == ""
    assert "Traceback" not in result.err


def test_an_error_is_one_sentence_and_a_hint(run: Run, tmp_path: Path) -> None:
    result = run("ls", at=tmp_path / "nothing")
    missing = tmp_path / "nothing"
    hint = f"name one with `--store DIR` or QUIRE_STORE; `quire init {missing}` creates one"
    assert result.err == f"error: no store found (path='{missing}')\nnext:  {hint}\n"
    error = json.loads(run("ls", "--json", at=missing).err)["error"]
    assert error == {
        "kind": "StoreNotFound",
        "what": "no store found",
        "next": hint,
        "where": {"path": str(missing)},
        "exit_code": 3,
    }


def test_debug_shows_the_traceback(run: Run, tmp_path: Path) -> None:
    with pytest.raises(quire.StoreNotFound):
        run("ls", "--debug", at=tmp_path / "nothing")


def test_beside_an_owner_reads_work_and_writes_name_the_owner(path: Path) -> None:
    """Reading commands run in a separate process: LMDB allows one environment per process."""
    with quire.open(path) as store:
        for command in (["ls"], ["info"], ["manifest", "check"], ["manifest", "tables"], ["feed", "tail"], ["doctor"]):
            result = quire_program(*command, "--store", str(path))
            assert result.returncode == 0, result.stderr
        refused = quire_program("create", "x", "--store", str(path))
        assert refused.returncode == 5
        message, hint = refused.stderr.splitlines()
        assert f"pid={os.getpid()}" in message
        assert re.search(r"since='\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ'", message), "a time instead of a number"
        assert "_ms" not in message
        assert hint.startswith(f"next:  wait for process {os.getpid()} to end")
        assert "mode=" not in hint, "the hint names no Python mode"
        error = json.loads(quire_program("create", "x", "--json", "--store", str(path)).stderr)["error"]
        assert error["where"]["since"].endswith("Z")
        assert [database.name for database in store.databases()] == ["clicks", "shop"]


def test_ls_filters_and_shows_that_there_are_more(path: Path, run: Run) -> None:
    with quire.open(path) as store:
        store.create_many([f"tenant-{number}" for number in range(5)], tags={"plan": "free"})
    shown = run("ls", "tenant-", "--tag", "plan=free", "-n", "2")
    assert "tenant-1" in shown.out
    assert "tenant-2" not in shown.out
    assert "--after tenant-1" in shown.out + shown.err
    assert "no database matches" in run("ls", "nobody-").out


def test_stats_filters_and_sorts(path: Path, run: Run) -> None:
    with quire.open(path) as store:
        store.create_many(["tenant-1", "tenant-2"])
        with store.sqlite("tenant-2") as connection:
            connection.execute("CREATE TABLE t(x)")
    rows = json.loads(run("stats", "tenant-", "--sort", "size", "-n", "1", "--json").out)
    assert [row["database"] for row in rows] == ["tenant-2"]
    assert "1 more row" in run("stats", "tenant-", "--sort", "disk", "-n", "1").out
    assert "--after tenant-1" in run("stats", "tenant-", "-n", "1").out
    assert [row["database"] for row in run("stats", "--after", "tenant-1", "--json").data] == ["tenant-2"]
    assert [row["database"] for row in run("stats", "--kind", "stream", "--json").data] == ["clicks"]
    assert run("stats", "--after", "tenant-1", "--sort", "size").code == 2
    assert run("stats", "--sort", "colour").code == 2
