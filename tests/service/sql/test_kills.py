"""The server is killed at every step: acknowledged changes are present, unacknowledged ones are present completely or
not at all, and a repeated pipeline with an idempotency key is executed once."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quire
from tests.service.sql.hrana_client import CLOSE, HranaClient, execute, owner, settings, statement

INSERT = "insert into t(tag, n) values (?, ?)"
NUMBERS = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 3000) select i from n"
CONNECTION_ERRORS = (OSError, http.client.HTTPException, ValueError)


def steps(tag: str, *between: str) -> list[dict[str, Any]]:
    texts = [
        statement("begin immediate"),
        statement(INSERT, tag, 1),
        *map(statement, between),
        statement(INSERT, tag, 2),
    ]
    return [{"stmt": text} for text in [*texts, statement("commit")]]


def one_shot(hrana: HranaClient) -> None:
    """Inserts two rows by one statement."""
    assert hrana.once(f"{INSERT}, (?, ?)", "one-shot", 1, "one-shot", 2)["type"] == "ok"


def batch(hrana: HranaClient) -> None:
    (result, _) = hrana.pipeline({"type": "batch", "batch": {"steps": steps("batch")}}, CLOSE)
    assert result["response"]["result"]["step_errors"] == [None] * 4


def stream(hrana: HranaClient) -> None:
    for sql, args in (("begin", ()), (INSERT, ("stream", 1)), (INSERT, ("stream", 2)), ("commit", ())):
        hrana.run(sql, *args)


def cursor(hrana: HranaClient) -> None:
    lines = hrana.lines(*steps("cursor", NUMBERS))
    assert lines[-1]["type"] == "step_end"
    assert not any(line["type"] == "step_error" for line in lines)


def sequence(hrana: HranaClient) -> None:
    script = "begin; insert into t(tag, n) values ('sequence', 1); insert into t(tag, n) values ('sequence', 2); commit"
    assert hrana.pipeline({"type": "sequence", "sql": script}, CLOSE)[0]["type"] == "ok"


def keyed(hrana: HranaClient) -> None:
    results = hrana.pipeline(execute(INSERT, "keyed", 1), execute(INSERT, "keyed", 2), CLOSE, Idempotency_Key="once")
    assert [result["type"] for result in results] == ["ok"] * 3


KINDS: dict[str, Callable[[HranaClient], None]] = {
    kind.__name__: kind for kind in (one_shot, batch, stream, cursor, sequence, keyed)
}

COMMIT = ["pages.segment.frames", "pages.segment.sync", "pages.wal.synced"]
ONE_SHOT_POINTS = ["sql.lane.run", "sql.lane.synced"]
CASES = [
    ("one_shot", [*COMMIT, *ONE_SHOT_POINTS, "sql.executed", "sql.pipeline_request"]),
    ("batch", [*COMMIT, *ONE_SHOT_POINTS, *(f"sql.batch_step={n}" for n in range(4))]),
    ("stream", [*COMMIT, *(f"sql.executed={n}" for n in range(4))]),
    ("cursor", [*COMMIT, *(f"sql.cursor_bunch={n}" for n in (0, 3))]),
    ("sequence", [*COMMIT, *(f"sql.sequence={n}" for n in range(4))]),
    ("keyed", [*COMMIT, *ONE_SHOT_POINTS, "sql.keyed_request", "sql.keyed_request=1", "sql.keyed_commit"]),
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
    with owner(path, f"{name}={skipped or 0}*off->kill") as hrana:
        try:
            KINDS[kind](hrana)
        except CONNECTION_ERRORS:
            acknowledged = False
    after = tags(path)
    assert after in ({}, {kind.replace("_", "-"): 2}), "completely or not at all"
    assert after or not acknowledged, "an acknowledged change is missing"
    if kind == "keyed":
        with owner(path) as hrana:
            keyed(hrana)
            keyed(hrana)
        assert tags(path) == {"keyed": 2}
