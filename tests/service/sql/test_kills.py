"""The server is killed at every step: what was acknowledged is there, what was not is there whole or not at all, and a
pipeline with an idempotency key that is sent again has happened once."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quire
from tests.service.sql.world import CLOSE, SqlAsker, execute, owner, settings, statement

INSERT = "insert into t(tag, n) values (?, ?)"
NUMBERS = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 3000) select i from n"
GONE = (OSError, http.client.HTTPException, ValueError)


def steps(tag: str, *between: str) -> list[dict[str, Any]]:
    texts = [
        statement("begin immediate"),
        statement(INSERT, tag, 1),
        *map(statement, between),
        statement(INSERT, tag, 2),
    ]
    return [{"stmt": text} for text in [*texts, statement("commit")]]


def one_shot(asker: SqlAsker) -> None:
    """Two rows by one statement."""
    assert asker.once(f"{INSERT}, (?, ?)", "one-shot", 1, "one-shot", 2)["type"] == "ok"


def batch(asker: SqlAsker) -> None:
    (result, _) = asker.pipeline({"type": "batch", "batch": {"steps": steps("batch")}}, CLOSE)
    assert result["response"]["result"]["step_errors"] == [None] * 4


def stream(asker: SqlAsker) -> None:
    for sql, args in (("begin", ()), (INSERT, ("stream", 1)), (INSERT, ("stream", 2)), ("commit", ())):
        asker.run(sql, *args)


def cursor(asker: SqlAsker) -> None:
    lines = asker.lines(*steps("cursor", NUMBERS))
    assert lines[-1]["type"] == "step_end"
    assert not any(line["type"] == "step_error" for line in lines)


def sequence(asker: SqlAsker) -> None:
    script = "begin; insert into t(tag, n) values ('sequence', 1); insert into t(tag, n) values ('sequence', 2); commit"
    assert asker.pipeline({"type": "sequence", "sql": script}, CLOSE)[0]["type"] == "ok"


def keyed(asker: SqlAsker) -> None:
    results = asker.pipeline(execute(INSERT, "keyed", 1), execute(INSERT, "keyed", 2), CLOSE, Idempotency_Key="once")
    assert [result["type"] for result in results] == ["ok"] * 3


KINDS: dict[str, Callable[[SqlAsker], None]] = {
    kind.__name__: kind for kind in (one_shot, batch, stream, cursor, sequence, keyed)
}

COMMIT = ["pages.segment.frames", "pages.segment.sync", "pages.wal.synced"]
LANE = ["sql.lane.run", "sql.lane.synced"]
CASES = [
    ("one_shot", [*COMMIT, *LANE, "sql.executed", "sql.pipeline_request"]),
    ("batch", [*COMMIT, *LANE, *(f"sql.batch_step={n}" for n in range(4))]),
    ("stream", [*COMMIT, *(f"sql.executed={n}" for n in range(4))]),
    ("cursor", [*COMMIT, *(f"sql.cursor_bunch={n}" for n in (0, 3))]),
    ("sequence", [*COMMIT, *(f"sql.sequence={n}" for n in range(4))]),
    ("keyed", [*COMMIT, *LANE, "sql.keyed_request", "sql.keyed_request=1", "sql.keyed_commit"]),
]
QUICK = {("one_shot", "sql.lane.run"), ("batch", "sql.batch_step=2"), ("keyed", "sql.lane.synced")}


def cases() -> list[Any]:
    pairs = [(kind, point) for kind, points in CASES for point in points]
    return [pytest.param(*pair, id="-".join(pair), marks=() if pair in QUICK else pytest.mark.slow) for pair in pairs]


def tags(path: Path) -> dict[str, int]:
    with quire.open(path, settings=settings()) as store:
        connection = store.sqlite("default")
        rows = connection.execute("select tag, count(*) from t group by tag").fetchall()
        connection.close()
        return {str(tag): int(str(count)) for tag, count in rows}


@pytest.mark.parametrize(("kind", "point"), cases())
def test_killed(path: Path, kind: str, point: str) -> None:
    with quire.open(path, settings=settings()) as store:
        connection = store.sqlite("default", create=True)
        connection.execute("create table t(tag, n, primary key(tag, n))")
        connection.close()
    name, _, skipped = point.partition("=")
    acknowledged = True
    with owner(path, f"{name}={skipped or 0}*off->kill") as asker:
        try:
            KINDS[kind](asker)
        except GONE:
            acknowledged = False
    after = tags(path)
    assert after in ({}, {kind.replace("_", "-"): 2}), "whole or not at all"
    assert after or not acknowledged, "acknowledged, and not there"
    if kind == "keyed":
        with owner(path) as asker:
            keyed(asker)
            keyed(asker)
        assert tags(path) == {"keyed": 2}
