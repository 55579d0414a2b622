"""audit: events by database and time."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.cli.output import width_of
from tests.cli.conftest import Run, on_a_terminal


@pytest.fixture
def store_with_events(path: Path) -> Path:
    with quire.open(path) as store:
        store.snapshot("shop", "monday")
        store.snapshot("shop")
        store.fork("shop", "copy", at="monday")
        store.manifest.snapshots.drop("shop", 2)
        store.drop("copy")
        store.snapshot("clicks")
    return path


def test_audit_lists_events_in_order(run: Run, store_with_events: Path) -> None:
    data = run("audit", "--json").data
    assert [(row["database"], row["action"], row["subject"], row["number"]) for row in data] == [
        ("shop", "snapshot_created", "monday", 1),
        ("shop", "snapshot_created", "", 2),
        ("shop", "forked", "copy", 3),
        ("copy", "forked_from", "shop", 1),
        ("shop", "snapshot_dropped", "", 2),
        ("copy", "database_dropped", "copy", 3),
        ("clicks", "snapshot_created", "", 1),
    ]
    assert {"db_id", "at_ms", "sequence", "component", "generation", "size_bytes"} <= data[0].keys()
    lines = run("audit").out.splitlines()
    assert lines[0].split() == ["when", "database", "what", "subject"]
    assert lines[2].endswith("snapshot created  #2")
    assert lines[3].split()[-3:] == ["forked", "as", "copy"]
    assert max(map(width_of, on_a_terminal("audit", "--store", str(store_with_events)))) <= 80


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["shop"], 4),
        (["clicks"], 1),
        (["3"], 2),
        (["--since", "1h"], 7),
        (["--until", "1h"], 0),
        (["--since", "2h", "--until", "1h"], 0),
        (["--since", "2026-01-01"], 7),
        (["--until", "2020-01-01T00:00Z"], 0),
        (["--limit", "2"], 2),
        (["--limit", "0"], 7),
        (["shop", "--limit", "1"], 1),
        (["77"], 0),
    ],
)
def test_audit_filters(run: Run, store_with_events: Path, arguments: list[str], expected: int) -> None:
    assert len(run("audit", *arguments, "--json").data) == expected


def test_a_dropped_database_is_audited_by_its_id(run: Run, store_with_events: Path) -> None:
    assert run("audit", "copy").code == 3, "the name is unused"
    assert run("gc", "--now", "--yes").code == 0
    assert [row["database"] for row in run("audit", "#3", "--json").data][:2] == ["", ""]
    assert "#3" in run("audit", "3").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--since", "someday"], "`--since` takes a time"),
        (["--until", "5"], "`--until` takes a time"),
        (["--since", "1h", "--until", "2h"], "`--until` is not after `--since`"),
        (["--limit", "-1"], "is less than 0"),
    ],
)
def test_audit_refuses_invalid_arguments(run: Run, store_with_events: Path, arguments: list[str], message: str) -> None:
    result = run("audit", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_audit_of_a_store_without_events(run: Run, path: Path) -> None:
    assert run("audit").out == "no entries yet\n"
    assert run("audit", "--since", "1h").out == "no entries in that time\n"
    assert run("audit", "nothing").code == 3
    assert run("audit", "--limit", "1", "--json").data == []
