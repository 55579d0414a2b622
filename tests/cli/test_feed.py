"""feed tail, cursors, resume, drop."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.cli import feed as commands
from quire.cli.output import width_of
from quire.manifest.ops.cursors import LoseCursor
from tests.cli.conftest import Run, on_a_terminal


@pytest.fixture
def store_with_cursors(path: Path) -> Path:
    """A store whose feed has four kinds of cursors."""
    with quire.open(path) as store:
        feed = store.manifest.feed
        feed.register(name="billing", ttl_seconds=90, max_lag=1_000)
        feed.register(1)
        feed.register(name="dead", max_lag=1)
        feed.register(name="2", start=2)
        feed.acknowledge("billing", 1)
        feed.maintain()
    return path


def test_tail_shows_the_newest_or_from_a_sequence(run: Run) -> None:
    data = run("feed", "tail", "--limit", "1", "--json").data
    assert [(batch["sequence"], batch["operations"][0]["op"]) for batch in data] == [(2, "RegisterDb")]
    assert [batch["sequence"] for batch in run("feed", "tail", "--from", "1", "--json").data] == [1, 2]
    assert "RegisterDb db_id=1 name=shop" in run("feed", "tail", "--from", "1").out
    assert run("feed", "tail", "--from", "9").out == "the feed has no changes from sequence 9 on\n"


def test_tail_of_an_empty_feed(run: Run, tmp_path: Path) -> None:
    quire.open(tmp_path / "empty").close()
    assert run("feed", "tail", at=tmp_path / "empty").out == "the feed is empty\n"
    assert run("feed", "tail", "--limit", "0", "--json", at=tmp_path / "empty").data == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--limit", "0"], range(1, 13)),
        (["--limit", "0", "--from", "4"], range(4, 13)),
        (["--limit", "7"], range(6, 13)),
        (["--limit", "7", "--from", "2"], range(2, 9)),
        (["--limit", "100"], range(1, 13)),
        ([], range(3, 13)),
    ],
)
def test_tail_reads_in_steps_and_0_means_no_limit(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: range
) -> None:
    """Like `manifest dump`."""
    monkeypatch.setattr(commands, "STEP_RECORDS", 5)
    with quire.open(path) as store:
        for number in range(10):
            store.create(f"db-{number}", "pages")
    assert [batch["sequence"] for batch in run("feed", "tail", *arguments, "--json").data] == list(expected)


def test_cursors_shows_the_position_of_every_cursor(run: Run, store_with_cursors: Path) -> None:
    rows = {row["cursor_id"]: row for row in run("feed", "cursors", "--json").data}
    assert [(row["name"], row["acked_sequence"], row["lag"], row["state"]) for row in rows.values()] == [
        ("billing", 1, 1, "live"),
        ("", 1, 1, "live"),
        ("dead", 0, 2, "lost"),
        ("2", 2, 0, "live"),
    ]
    assert (rows[1]["ttl_ms"], rows[1]["max_lag"], rows[1]["next_sequence"]) == (90_000, 1_000, 2)
    lines = run("feed", "cursors").out.splitlines()
    assert lines[0].split() == ["id", "name", "acked", "lag", "state", "last", "ack", "ttl", "max", "lag"]
    assert lines[1].split()[:5] == ["1", "billing", "1", "1", "live"]
    assert lines[1].split()[-3:] == ["90", "s", "1,000"]
    assert " s ago " in lines[1]
    assert lines[-1] == "cursor dead (id 3) is lost: 2 changes behind, allowed are 1"
    assert max(map(width_of, on_a_terminal("feed", "cursors", "--store", str(store_with_cursors)))) <= 80


def test_cursors_of_a_feed_without_cursors(run: Run) -> None:
    assert run("feed", "cursors").out.startswith("the feed has no cursors")
    assert run("feed", "cursors", "--json").data == []


def test_drop_by_name_first_then_by_id(run: Run, store_with_cursors: Path) -> None:
    """A cursor can have the name 2 and another id."""
    assert run("feed", "drop", "2", "--yes").out == "dropped cursor 2 (id 4)\n"
    assert run("feed", "drop", "2", "--yes").out == "dropped cursor 2\n"
    assert run("feed", "drop", "dead", "--yes", "--json").data["dropped"]["state"] == "lost"
    assert [row["name"] for row in run("feed", "cursors", "--json").data] == ["billing"]


def test_drop_asks(run: Run, store_with_cursors: Path) -> None:
    refused = run("feed", "drop", "billing", answer="n\n")
    assert (refused.code, refused.out) == (1, "nothing was dropped\n")
    assert refused.err == "drop cursor billing (id 1), 1 change behind? [y/N] "
    assert run("feed", "drop", "billing", "--json", answer="\n").data == {"dropped": None}
    assert run("feed", "drop", "billing", answer="").code == 2
    assert run("feed", "drop", "billing", answer="y\n").code == 0


@pytest.mark.parametrize("cursor", ["nobody", "77", "99999999999999999999999", "²", ""])
def test_drop_of_an_unknown_cursor_names_the_command_that_lists_them(
    run: Run, store_with_cursors: Path, cursor: str
) -> None:
    result = run("feed", "drop", cursor, "--yes")
    assert result.code in (2, 3)
    assert "Traceback" not in result.err
    if result.code == 3:
        assert result.err.splitlines()[1] == "next:  `quire feed cursors` lists them"
    assert len(run("feed", "cursors", "--json").data) == 4


def test_resume_continues_a_lost_cursor_and_leaves_a_live_one(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        info = store.manifest.feed.register(name="slow")
        store.manifest.submit([LoseCursor(info.cursor_id, "too slow")]).result()
    result = run("feed", "resume", "slow")
    assert result.out == f"cursor slow (id {info.cursor_id}) resumes at change {info.next_sequence}\n"
    assert run("feed", "resume", "slow").out.endswith("is live; nothing to do\n")
    assert run("feed", "resume", "slow", "--json").data["resumed"]["state"] == "live"
