"""retention show, set, clear, plan, apply."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import quire
from quire.cli.output import width_of
from quire.manifest.records import JobKind
from tests.cli.conftest import Run, on_a_terminal, write_pages

EVERYTHING_OFF = {
    "keep_last": 0,
    "keep_generations": 0,
    "hourly": 0,
    "daily": 0,
    "weekly": 0,
    "keep_seconds": 0,
    "keep_named": True,
    "schedules": [],
}


@pytest.fixture
def kept(path: Path) -> Path:
    """Five snapshots of shop, one of them named by a person."""
    with quire.open(path) as store:
        for name in ("", "", "monday", "", ""):
            store.snapshot("shop", name)
    return path


def snapshots(run: Run) -> list[int]:
    return [each["snapshot_id"] for each in run("snapshot", "ls", "shop", "--json").data]


def test_without_a_policy_everything_stays(run: Run, kept: Path) -> None:
    data = run("retention", "show", "shop", "--json").data
    assert (data["database"], data["policy"], data["snapshots"], data["would_drop"]) == ("shop", None, 5, 0)
    text = run("retention", "show", "shop").out
    assert "every snapshot: there is no rule" in text
    assert "no snapshots by itself" in text
    assert run("retention", "apply", "shop", "--yes").out == "nothing to drop: 5 snapshots, all kept\n"


def test_set_changes_what_it_names_and_leaves_the_rest(run: Run, kept: Path) -> None:
    """Nobody loses a rule, and with it snapshots, by naming another one."""
    options = "--keep-last 2 --keep-generations 3 --hourly 24 --daily 7 --weekly 4 --keep 30d --schedule hourly,daily"
    policy = run("retention", "set", "shop", *options.split(), "--json").data["policy"]
    assert policy == {
        "keep_last": 2,
        "keep_generations": 3,
        "hourly": 24,
        "daily": 7,
        "weekly": 4,
        "keep_seconds": 30 * 86_400,
        "keep_named": True,
        "schedules": ["hourly", "daily"],
    }
    changed = run("retention", "set", "shop", "--keep", "1h30m", "--no-keep-named", "--json").data["policy"]
    assert changed == {**policy, "keep_seconds": 5_400, "keep_named": False}
    text = run("retention", "show", "shop").out
    assert "the newest 2; those of the last 3 generations; what is younger than 90m" in text
    assert "hourly, daily snapshots" in text
    off = "--keep-last 0 --keep-generations 0 --hourly 0 --daily 0 --weekly 0 --keep 0 --keep-named --schedule none"
    assert run("retention", "set", "shop", *off.split(), "--json").data["policy"] == EVERYTHING_OFF
    assert snapshots(run) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["shop"], 2, "no rule was named"),
        (["shop", "--keep-last", "-1"], 2, "not in the range"),
        (["shop", "--keep", "30"], 2, "`--keep` takes a duration (given='30')"),
        (["shop", "--keep", "2h3"], 2, "`--keep` takes a duration"),
        (["shop", "--keep", "999999999d"], 2, "at most a thousand years"),
        (["shop", "--schedule", "yearly"], 2, "there is no such schedule"),
        (["shop", "--keep-last", str(2**70)], 2, "a number below"),
        (["nothing", "--keep-last", "1"], 3, "no database has this name"),
    ],
)
def test_set_refuses_and_changes_nothing(run: Run, kept: Path, arguments: list[str], code: int, told: str) -> None:
    ended = run("retention", "set", *arguments)
    assert (ended.code, ended.out) == (code, "")
    assert told in ended.err
    assert run("retention", "show", "shop", "--json").data["policy"] is None


def test_clear(run: Run, kept: Path) -> None:
    run("retention", "set", "shop", "--keep-last", "1")
    assert run("retention", "clear", "shop", "--json").data["cleared"]["keep_last"] == 1
    assert run("retention", "clear", "shop").out == "shop had no retention policy\n"
    assert run("retention", "clear", "nothing").code == 3


def test_plan_says_what_goes_and_why(run: Run, kept: Path) -> None:
    run("retention", "set", "shop", "--keep-last", "2")
    before = run("info", "--json").data["newest_change"]
    data = run("retention", "plan", "shop", "--json").data
    assert [(each["snapshot_id"], each["keep"], each["why"]) for each in data["decisions"]] == [
        (1, False, "no rule keeps it"),
        (2, False, "no rule keeps it"),
        (3, True, "named"),
        (4, True, "among the last 2"),
        (5, True, "among the last 2"),
    ]
    assert (data["would_drop"], data["drops_everything"], data["share"]["artifacts"]) == (2, False, 0)
    lines = run("retention", "plan", "shop").out.splitlines()
    assert lines[0].split() == ["id", "snapshot", "created", "verdict", "why"]
    assert lines[3].split()[-2:] == ["keep", "named"]
    assert lines[-1] == "Drop them now: `quire retention apply shop`."
    assert run("info", "--json").data["newest_change"] == before, "a dry run"
    run("retention", "set", "shop", "--keep", "7d")
    assert "younger than 7d" in run("retention", "plan", "shop").out
    assert max(map(width_of, on_a_terminal("retention", "plan", "shop", "--store", str(kept)))) <= 80
    assert run("retention", "plan", "clicks").out == "clicks has no snapshots\n"


def test_apply_asks_and_drops_what_the_plan_said(run: Run, kept: Path) -> None:
    run("retention", "set", "shop", "--keep-last", "2")
    refused = run("retention", "apply", "shop", answer="n\n")
    assert (refused.code, refused.out) == (1, "nothing was dropped\n")
    assert refused.err == "drop 2 snapshots of shop (#1, #2), all that they hold being held elsewhere too? [y/N] "
    assert run("retention", "apply", "shop", answer="").code == 2
    assert snapshots(run) == [1, 2, 3, 4, 5]
    ended = run("retention", "apply", "shop", "--yes", "--json").data
    assert [each["snapshot_id"] for each in ended["dropped"]] == [1, 2]
    assert snapshots(run) == [3, 4, 5]
    assert run("retention", "apply", "shop", "--yes", "--json").data == {"database": "shop", "dropped": []}


def test_the_last_snapshots_go_only_by_force(run: Run, kept: Path) -> None:
    run("snapshot", "drop", "shop", "monday", "--yes")
    run("retention", "set", "shop", "--no-keep-named", "--keep", "1s")
    time.sleep(1.1)  # now the youngest is older than that
    refused = run("retention", "apply", "shop", "--yes")
    assert (refused.code, "say `--force`" in refused.err) == (4, True)
    assert snapshots(run) == [1, 2, 4, 5]
    assert "`quire retention apply shop --force`" in run("retention", "plan", "shop").out
    asked = run("retention", "apply", "shop", "--force", answer="n\n").err
    assert asked.startswith("drop EVERY snapshot of shop (#1, #2, #4, #5), ")
    assert run("retention", "apply", "shop", "--force", "--yes").out == "dropped 4 of 4 snapshots of shop\n"
    assert snapshots(run) == []


def test_what_is_said_to_go_is_what_goes(run: Run, shop: Path) -> None:
    """Leaves, chunks, deltas and WAL that several snapshots share, and nobody else holds."""
    with quire.open(shop) as store:
        for fill in (b"c", b"d", b"e"):
            store.snapshot("shop")
            store.snapshot("shop")
            store.checkpoint("shop")
            write_pages(store, "shop", range(8), fill)
        store.checkpoint("shop")
        store.manifest.jobs.enqueue(JobKind.MERGE, 1)
    assert run("gc", "--now", "--yes").code == 0
    run("retention", "set", "shop", "--no-keep-named", "--keep-last", "1")
    share = run("retention", "plan", "shop", "--json").data["share"]
    assert share["chunks"] + share["deltas"] > 1
    assert share["wal_segments"] > 1
    assert run("retention", "apply", "shop", "--yes", "--json").data["share"] == share
    done = run("gc", "--now", "--yes", "--json").data
    assert (done["deleted"], done["freed_bytes"]) == (share["artifacts"], share["size_bytes"])


def test_a_question_names_a_few(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        for _ in range(9):
            store.snapshot("shop")
    run("retention", "set", "shop", "--keep-last", "1")
    assert "(#1, #2, #3, #4, #5 and 3 more)" in run("retention", "apply", "shop", answer="n\n").err
