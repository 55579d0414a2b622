"""Commands on a store with many databases: they read what they show, whatever the size of the store (docs/scale.md)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import quire
from quire.cli.candidates import candidates
from quire.cli.output import width_of
from quire.cli.tree import FORKS_SHOWN
from quire.manifest import tables as t
from quire.manifest.records import AuditRecord
from tests.cli.conftest import Run, on_a_terminal
from tests.manifest.rows_read import RowsRead

FEW, MANY = 1_500, 4_500


@pytest.fixture
def store_with_forks(shop: Path) -> Path:
    """A store with many forks of shop, two of them forked again."""
    with quire.open(shop) as store:
        store.fork_many("shop", [f"tenant-{number:05}" for number in range(FEW)], tags={"plan": "free"})
        store.fork("tenant-00000", "zebra")
        store.fork("zebra", "zebra-2")
    return shop


@pytest.mark.parametrize(
    "command",
    [
        ("tree", "-n", "50"),
        ("tree", "--after", "tenant-00100", "-n", "50", "--sizes", "--json"),
        ("tree", "zebra"),
        ("stats", "-n", "50"),
        ("stats", "--sort", "written", "-n", "5"),
        ("stats", "tenant-0000", "--snapshots", "-n", "20", "--json"),
        ("jobs", "ls"),
        ("jobs", "ls", "--state", "succeeded", "--limit", "1"),
        ("jobs", "show", "1"),
        ("audit", "zebra"),
        ("gc", "--dry-run"),
    ],
    ids=" ".join,
)
def test_a_page_reads_what_it_shows(
    run: Run, store_with_forks: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    rows, read = RowsRead(monkeypatch), []
    for until in (FEW, MANY):
        with quire.open(store_with_forks) as store:
            store.fork_many("shop", [f"tenant-{number:05}" for number in range(FEW, until)])
            store.snapshot("zebra")  # the newest change
            store.checkpoint("zebra")
        rows.take()
        assert run(*command).code == 0
        read.append(rows.take())
    assert read[1] <= read[0] + 20, "one more snapshot and one more job"
    assert read[0] < FEW


def test_audit_decodes_only_the_newest_entries(
    run: Run, store_with_forks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, decoded = t.AUDIT.rows.decode, []

    def decode_and_count(key: bytes, raw: bytes) -> AuditRecord:
        decoded.append(key)
        return decode(key, raw)

    whole = run("audit", "--limit", "0", "--json").data
    assert len(whole) > FEW
    monkeypatch.setattr(t.AUDIT.rows, "decode", decode_and_count)
    assert run("audit", "--limit", "7", "--json").data == whole[-7:]
    assert len(decoded) == 8, "and one more, to know whether there are more"
    assert run("audit").out.splitlines()[-1] == "there are earlier entries: `--limit 0` lists all"
    assert "there are earlier" not in run("audit", "zebra-2").out


def test_completion_reads_only_the_names_it_offers(store_with_forks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RowsRead(monkeypatch)
    typed: Any = SimpleNamespace(command_path="quire snapshot ls", params={"store": str(store_with_forks)}, args=[])
    assert [item.value for item in candidates("DB", typed, "tenant-0012")] == [f"tenant-0012{n}" for n in range(10)]
    assert rows.take() < 40
    assert len(candidates("DB", typed, "")) == 1_000


def test_a_tree_of_many_forks_is_truncated_and_continues(run: Run, store_with_forks: Path) -> None:
    lines = run("tree").out.splitlines()
    assert sum("tenant-" in line for line in lines) == FORKS_SHOWN + 1, "plus the last line"
    # A page of 1,000: clicks, shop and 998 of its forks.
    assert any(line.startswith(f"└── … and {998 - FORKS_SHOWN} more forks") for line in lines)
    assert lines[-1] == "there are more: `--after tenant-00997` continues, `--limit 0` lists all"
    assert sum("tenant-" in line for line in run("tree", "--all").out.splitlines()) == 998 + 1
    assert sum("tenant-" in line for line in run("tree", "--all", "--limit", "0").out.splitlines()) == FEW

    rest = run("tree", "--after", "tenant-01498").out.splitlines()
    drawn_names = (line.lstrip("│├└─ ").split("  ")[0] for line in rest)
    assert [name for name in drawn_names if not name.startswith("@")] == [
        "shop", "tenant-00000", "zebra", "zebra-2", "tenant-01499",
    ], "with their parents"  # fmt: skip
    assert "no database matches" in run("tree", "nobody").out
    (root,) = run("tree", "zebra-2", "--json").data
    names = []
    while root:
        names.append(root["name"])
        root = next(iter(root["forks"]), None)
    assert names == ["shop", "tenant-00000", "zebra", "zebra-2"]
    assert run("tree", "--tag", "plan=free", "--kind", "stream").out.startswith("no database matches")


def test_pages_of_stats_add_up_to_the_whole(run: Run, store_with_forks: Path) -> None:
    whole = {(row["database"], row["snapshot"]): row for row in run("stats", "--snapshots", "--json").data}
    assert len(whole) == FEW + 5, "the databases and a snapshot"
    paged: dict[tuple[str, str], object] = {}
    after = ""
    while page := run("stats", "--snapshots", "--json", "-n", "600", "--after", after).data:
        paged |= {(row["database"], row["snapshot"]): row for row in page}
        after = page[-1]["database"]
    assert paged == whole
    assert list(paged) == list(whole), "sorted by name"
    text = run("stats", "-n", "2").out
    assert "`--after shop` continues" in text
    assert "on disk:" not in text, "it would require reading every directory"


def test_tree_and_stats_fit_a_terminal(store_with_forks: Path) -> None:
    for command in ("tree", "stats"):
        lines = on_a_terminal(command, "-n", "30", "--store", str(store_with_forks))
        assert max(map(width_of, lines)) <= 80
