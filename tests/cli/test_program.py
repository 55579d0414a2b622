"""The program as a process: its imports, its help, the tour."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from quire.manifest.change import CHANGE_LOG
from quire.manifest.env import CHANGE_LOG_NAME
from quire.manifest.tables import GC_REFCOUNTS, TABLES
from tests.cli.commands import COMMANDS, GROUPS
from tests.cli.conftest import Run, quire_program
from tests.rules import test_docs_run
from tests.rules.tree import ROOT, SRC

HEAVY = ("numpy", "pyarrow", "obstore", "awscrt", "structlog", "prometheus_client", "rich", "asyncio")

ENGINES = (
    "pyarrow", "pandas", "obstore", "apsw", "pyspark", "rich", "structlog", "prometheus_client", "opentelemetry", "asyncio",
)  # fmt: skip
"""Packages that a small store does not need; numpy and the codecs come with the engines."""


NAMES = [" ".join(words) for words in COMMANDS]


def test_the_list_of_commands() -> None:
    assert NAMES == [
        "init", "ls", "info", "create", "drop", "undrop", "rename", "tree", "why", "fork", "rollback", "checkpoint", "merge",
        "evict", "hydrate", "restore", "backup", "restore-db", "verify", "stats", "metrics", "gc", "audit", "restore-store",
        "standby", "promote", "clone", "takeover", "serve", "token create", "doctor", "tour", "completion",
        "db set-status", "db set",
        "snapshot create", "snapshot ls", "snapshot show", "snapshot drop", "snapshot undrop", "snapshot diff", "sqlite import",
        "sqlite export", "sqlite follow", "sqlite unfollow", "sqlite shell",
        "kv get", "kv put", "kv delete", "kv scan", "kv stats", "kv compact", "kv verify", "kv repair", "kv backup",
        "kv backups", "kv prune", "kv restore", "stream append", "stream read", "stream tail", "stream ls",
        "stream info", "stream seal", "stream tier", "stream checkpoint", "stream verify", "stream repair",
        "stream mirror", "stream retention", "mirror create", "mirror run", "mirror status", "mirror ls",
        "mirror drop", "retention show", "retention set", "retention clear", "retention plan",
        "retention apply", "jobs ls", "jobs show", "jobs retry", "jobs cancel", "jobs work", "feed tail",
        "feed cursors", "feed resume", "feed drop", "manifest check", "manifest tables", "manifest dump",
        "manifest inspect", "manifest verify", "manifest mode", "manifest bundle", "quarantine ls",
        "quarantine restore", "quarantine rm", "archive on", "archive off", "archive status",
        "archive drill", "archive base", "archive abandoned", "archive audit", "clones ls", "clones release",
        "clones forget",
        "objects moved", "namespace create", "namespace ls", "namespace drop",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help_with_an_example_of_itself(run: Run, name: str) -> None:
    result = run(*name.split(), "--help", at=None)
    assert result.code == 0
    assert result.out.startswith(f"Usage: quire {name} [OPTIONS]")
    assert "{" not in result.out, "a required argument is written DB, not {DB}"
    assert f"Example: quire {name}" in result.out
    assert "--json" in result.out
    assert "--store" in result.out
    assert max(map(len, result.out.splitlines())) <= 80


@pytest.mark.parametrize("group", [[], *([name] for name in GROUPS)], ids=" ".join)
def test_summaries_in_the_list_of_commands_are_complete_sentences(run: Run, group: list[str]) -> None:
    result = run(*group, "--help", at=None)
    listed = result.out.partition("Commands:" if group else "Databases:")[2].splitlines()
    assert len(listed) > 1
    assert max(map(len, result.out.splitlines())) <= 80
    assert [line for line in listed if line.endswith("...")] == []


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert [name for name in NAMES if f"### `quire {name}" not in page] == []


def loaded(path: Path, arguments: list[str], modules: tuple[str, ...]) -> list[str]:
    """The given modules that running a command imports."""
    program = f"""
import sys
sys.argv = ["quire", *{arguments!r}]
try:
    from quire.cli.main import main
    main()
except SystemExit as end:
    assert not end.code, end.code
print([name for name in {modules!r} if name in sys.modules], file=sys.stderr)
"""
    env = {**os.environ, "PYTHONPATH": str(SRC), "QUIRE_STORE": str(path)}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=env)
    assert result.returncode == 0, result.stderr
    imported = ast.literal_eval(result.stderr.strip().splitlines()[-1])
    assert isinstance(imported, list)
    return imported


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["ls"],
        ["feed", "tail"],
        ["feed", "cursors"],
        ["manifest", "tables"],
        ["manifest", "dump", "db"],
        ["tree", "--json"],
        ["snapshot", "ls", "shop"],
        ["snapshot", "diff", "shop", "now"],
        ["retention", "show", "shop"],
        ["retention", "plan", "shop"],
        ["jobs", "ls"],
        ["gc", "--dry-run"],
        ["audit", "--since", "1h"],
        ["why", "shop"],
        ["snapshot", "show", "shop", "monday"],
        ["jobs", "ls", "--db", "shop"],
    ],
)
def test_light_commands_import_nothing_heavy(path: Path, arguments: list[str]) -> None:
    """Start-up time is a promise, and imports are most of it."""
    with quire.open(path) as store:
        store.snapshot("shop", "monday")
    allowed = (
        {"numpy", "zstandard"} if arguments[0] == "manifest" else set()
    )  # its group also reads manifest logs of streams
    assert set(loaded(path, arguments, (*HEAVY, *ENGINES))) <= allowed


@pytest.mark.parametrize(
    "arguments",
    [
        ["init"],
        ["create", "basket"],
        ["create", "cart", "--kind", "lsm"],
        ["rename", "shop", "store"],
        ["drop", "shop", "--yes"],
        ["snapshot", "create", "shop", "monday", "--tag", "by=ann"],
        ["fork", "shop", "shop-test"],
        ["retention", "set", "shop", "--keep-last", "3"],
        ["feed", "drop", "reader", "--yes"],
        ["manifest", "check"],
    ],
)
def test_changing_a_small_store_imports_neither_arrow_nor_a_client(path: Path, arguments: list[str]) -> None:
    """The owner checks the whole manifest, with numpy."""
    with quire.open(path) as store:
        store.feed.register(name="reader")
    assert loaded(path, arguments, (*ENGINES, "awscrt")) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["kv", "get", "cart", "ann"],
        ["kv", "put", "cart", "bob", "4"],
        ["kv", "delete", "cart", "ann"],
        ["kv", "stats", "cart"],
    ],
)
def test_keys_in_the_log_need_no_arrow(path: Path, arguments: list[str]) -> None:
    with quire.open(path) as store:
        store.kv("cart", create=True).put(b"ann", b"3 apples")
    assert loaded(path, arguments, (*ENGINES, "awscrt")) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["stream", "append", "clicks", "seen", "and again"],
        ["stream", "append", "fresh", "seen", "--create"],
        ["stream", "read", "clicks", "--from", "40"],
        ["stream", "tail", "clicks"],
        ["stream", "ls", "clicks"],
        ["stream", "info", "clicks"],
        ["stream", "seal", "clicks"],
        ["stream", "verify", "clicks"],
        ["stream", "retention", "clicks", "--days", "3", "--apply"],
    ],
)
def test_a_small_stream_needs_no_arrow(path: Path, arguments: list[str]) -> None:
    """A few records are shown without Arrow, and short ones are checked without native code."""
    with quire.open(path) as store, store.stream("clicks") as clicks:
        clicks.append([b"%d" % number for number in range(200)]).result()
        clicks.seal()
        for number in range(20):
            clicks.append([b"%d" % number]).result()
    assert loaded(path, arguments, (*ENGINES, "awscrt", "quire.stream.arrow_batches")) == []


def test_a_manifest_log_is_inspected_without_an_engine(path: Path) -> None:
    """Also when its objects are compared."""
    with quire.open(path) as store, store.stream("clicks") as clicks:
        clicks.append([b"one"]).result()
    assert loaded(path, ["manifest", "inspect", "clicks"], (*ENGINES, "awscrt")) == []


def test_many_records_justify_importing_arrow(path: Path) -> None:
    """And checksums of many bytes justify the native code."""
    with quire.open(path) as store, store.stream("clicks") as clicks:
        clicks.append([b"a" * 100] * 5_000).result()
    engines = ("awscrt", "pyarrow")
    assert loaded(path, ["stream", "tail", "clicks", "-n", "5"], engines) == ["awscrt"]
    assert loaded(path, ["stream", "tail", "clicks", "-n", "4000"], engines) == ["awscrt", "pyarrow"]


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--no-objects"]])
def test_doctor_imports_no_engine(path: Path, arguments: list[str]) -> None:
    engines = ("pyarrow", "pyspark", "apsw", "awscrt", "obstore", "email", "importlib.metadata")
    assert loaded(path, arguments, engines) == []


def test_all_tables_are_listed_whatever_is_imported(path: Path) -> None:
    """One of them is declared by a module that readers do not import."""
    listed = [
        name["table"] for name in json.loads(quire_program("manifest", "tables", "--json", "--store", str(path)).stdout)
    ]
    assert listed == [*TABLES]
    assert CHANGE_LOG_NAME == CHANGE_LOG.name == listed[-1]
    dumped = quire_program("manifest", "dump", "change_log", "--store", str(path))
    assert (dumped.returncode, "RegisterDb" in dumped.stdout) == (0, True)
    refused = quire_program("manifest", "dump", "nonsense", "--store", str(path))
    assert (refused.returncode, "change_log" in refused.stderr) == (2, True)


def test_the_garbage_collector_runs_rarely(path: Path) -> None:
    program = f"""
import gc, sys
sys.argv = ["quire", "ls", "--store", {str(path)!r}]
from quire.cli.main import GARBAGE_ALLOCATIONS, main
try:
    main()
except SystemExit as end:
    print(end.code, gc.get_threshold()[0] == GARBAGE_ALLOCATIONS, gc.get_freeze_count() > 0, file=sys.stderr)
"""
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=env)
    assert result.stderr.split() == ["0", "True", "True"]


def test_the_program_runs_as_a_module(path: Path) -> None:
    result = quire_program("ls", "--json", "--store", str(path))
    assert [row["name"] for row in json.loads(result.stdout)] == ["clicks", "shop"]
    assert quire_program("ls", "--store", str(path / "nothing")).returncode == 3
    assert quire_program("--version").stdout.startswith("quire ")


@pytest.mark.slow
def test_the_tour_can_be_repeated(tmp_path: Path) -> None:
    """Like `make run`, at 80 columns: repeatedly, with a valid manifest each time, and without a growing catalog."""
    root = tmp_path / "quire-data"
    rows = []
    for _ in range(2):
        result = quire_program("tour", cwd=tmp_path, env={"COLUMNS": "80"})
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        assert max(map(len, result.stdout.splitlines())) <= 80
        assert "all rules hold" in result.stdout
        assert "NameTaken" in result.stdout
        assert quire_program("gc", "--now", "--yes", cwd=tmp_path, env={"QUIRE_STORE": str(root)}).returncode == 0
        with quire.open(root) as store, store.manifest.read() as txn:
            assert store.manifest.check() == []
            rows.append(txn.count(GC_REFCOUNTS))
    assert rows[0] == rows[1]
    data = json.loads(quire_program("tour", "--json", "--store", str(root)).stdout)
    assert (data["problems"], data["refused"], data["burst"]["operations"]) == ([], "NameTaken", 5_000)
    assert (data["checkpoint"]["state"], data["retention"]["dropped"]) == ("succeeded", 2)
    assert (data["branch"]["prices"], data["branch"]["rows"], data["branch"]["integrity"]) == (
        [1.2, 1.32, 0.99],
        20,
        "ok",
    )


def test_the_tour_shows_versions(tmp_path: Path) -> None:
    """Its output is read back from the store."""
    output = quire_program("tour", cwd=tmp_path, env={"COLUMNS": "80"}).stdout
    for line in (
        "20 prices raised: milk 1.32; an open reader still sees 1.2",
        "slot 0 is now base:1 + delta:2; milk is 1.32",
        "sells milk for 0.99",
        "shop@before for 1.2, shop for 1.32: three versions",
        "SQL over both: 20 rows of shop are not in shop@before",
        "└── shop-experiment",
    ):
        assert line in output


def test_the_commands_that_the_tour_suggests_work(tmp_path: Path) -> None:
    text = quire_program("tour", cwd=tmp_path).stdout
    suggested = [line.split()[1:] for line in text.splitlines() if line.startswith("  quire ")]
    assert len(suggested) == 9
    for arguments in suggested:
        result = quire_program(*arguments, cwd=tmp_path)
        assert (result.returncode, bool(result.stdout)) == (0, True), result.stderr


def test_the_tour_shows_its_directory(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "default: (./quire-data)" in " ".join(run("tour", "--help", at=None).out.split())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run("tour", "--json", at=".").data["path"] == str(tmp_path / "here"), "an explicit path is used as given"


def test_the_tour_leaves_other_databases_unchanged(run: Run, path: Path) -> None:
    before = run("ls", "--json").data
    result = run("tour")
    assert result.code == 4
    assert "the tour did not create it" in result.err
    assert run("ls", "--json").data == before


def test_the_tour_leaves_a_fork_of_the_same_name_unchanged(run: Run, tmp_path: Path) -> None:
    with quire.open(tmp_path / "own") as store:
        store.create("shop-experiment", "pages")
    result = run("tour", at=tmp_path / "own")
    assert (result.code, "the tour did not create it" in result.err) == (4, True)
    assert [row["name"] for row in run("ls", "--json", at=tmp_path / "own").data] == ["shop-experiment"]


def test_the_programs_of_the_readme_can_be_repeated(tmp_path: Path) -> None:
    """Hazard: a reader who tries twice gets `NameTaken`."""
    for _, code in test_docs_run.programs(ROOT / "README.md"):
        for _ in range(2):
            result = test_docs_run.run(code, tmp_path)
            assert (result.returncode, result.stderr) == (0, "")
