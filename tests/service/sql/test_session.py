"""SQL sessions on a real database, without a protocol around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import quire
from quire.service.sql import protocol as p
from quire.service.sql.pool import ConnectionPool, SqlTarget
from quire.service.sql.session import AnswerLimits, LockTimeout, SqlSession, Work
from quire.service.sql.threads import advance
from quire.service.sql.wire_values import WireText
from quire.sqlite.statements import StatementFailed
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.service.sql.hrana_client import settings

TARGET = SqlTarget("shop")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store", settings=settings()) as opened:
        connection = opened.sqlite("shop", create=True)
        connection.execute("create table t(id integer primary key, a unique, b text)")
        connection.close()
        yield opened


@pytest.fixture
def pool(store: Store) -> Iterator[ConnectionPool]:
    pool = ConnectionPool(store, AnswerLimits(rows_max=1_000, bytes_max=100_000))
    yield pool
    pool.close()


@contextmanager
def session_of(pool: ConnectionPool, target: SqlTarget) -> Iterator[SqlSession]:
    """A session for the duration of a block, like that of a one-shot."""
    connection = pool.take(target)
    try:
        yield pool.session_on(connection)
    finally:
        pool.give(connection)


@pytest.fixture
def session(pool: ConnectionPool) -> Iterator[SqlSession]:
    with session_of(pool, TARGET) as session:
        yield session


def result_of(work: Work[Any]) -> Any:
    """The result of work that does not wait."""
    is_done, result = advance(work)
    assert is_done, "the work waits for a lock"
    return result


def run(session: SqlSession, sql: str, *args: Any) -> p.StatementResult:
    result: p.StatementResult = result_of(session.execute(sql, args)).wire()
    return result


def rows(session: SqlSession, sql: str) -> Any:
    return msgspec.json.decode(run(session, sql).rows)


def step(sql: str, condition: p.WireCondition | None = None) -> p.BatchStep:
    return p.BatchStep(p.WireStatement(sql=sql), condition)


def test_a_result_reports_what_changed(session: SqlSession) -> None:
    result = run(session, "insert into t(a, b) values (?, ?), (?, ?)", 1, "x", 2, "y")
    assert (result.affected_row_count, result.last_insert_rowid, result.rows_written) == (2, "2", 2)
    assert run(session, "create table u(x)").affected_row_count == 0
    selected = run(session, "select id, b from t")
    assert (selected.affected_row_count, selected.rows_read) == (0, 2)
    assert [(column.name, column.decltype) for column in selected.cols] == [("id", "INTEGER"), ("b", "TEXT")]


def test_a_statement_without_rows_reports_its_columns(session: SqlSession) -> None:
    assert [column.name for column in run(session, "select id, a from t where 0").cols] == ["id", "a"]


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        ("", "SQL_NO_STATEMENT"),
        ("-- nothing", "SQL_NO_STATEMENT"),
        ("insert into t(a) values (1); select 2", "SQL_MANY_STATEMENTS"),
        ("selec", "SQLITE_ERROR"),
        ("select ?", "ARGS_INVALID"),
        ("attach '/etc/passwd' as x", "SQLITE_AUTH"),
    ],
)
def test_execute_takes_exactly_one_statement(session: SqlSession, sql: str, code: str) -> None:
    with pytest.raises(StatementFailed) as caught:
        run(session, sql)
    assert caught.value.code == code
    assert rows(session, "select count(*) from t") == [[{"type": "integer", "value": "0"}]]


@pytest.mark.parametrize("sql", ["select 1;", "select 1; -- end", "/* a */ select 1 /* b */ ; ; "])
def test_whitespace_and_comments_around_a_statement_do_not_count(session: SqlSession, sql: str) -> None:
    assert rows(session, sql) == [[{"type": "integer", "value": "1"}]]


def test_a_constraint_error_has_its_base_and_extended_code(session: SqlSession) -> None:
    run(session, "insert into t(a) values (1)")
    with pytest.raises(StatementFailed) as caught:
        run(session, "insert into t(a) values (1)")
    assert (caught.value.code, caught.value.extended_code) == ("SQLITE_CONSTRAINT", "SQLITE_CONSTRAINT_UNIQUE")


def test_named_arguments_work_with_and_without_prefix(session: SqlSession) -> None:
    def named(**names: str) -> p.WireStatement:
        arguments = [p.NamedArgument(name.replace("at_", "@"), WireText(text)) for name, text in names.items()]
        return p.WireStatement(sql="select ?, :a, @b, $c", args=[WireText("0")], named_args=arguments)

    result = result_of(session.run_statement(named(a="1", at_b="2", c="3"))).wire()
    assert [cell["value"] for cell in msgspec.json.decode(result.rows)[0]] == ["0", "1", "2", "3"]
    for wrong in (named(a="1", b="2"), named(a="1", b="2", c="3", d="4")):
        with pytest.raises(StatementFailed) as caught:
            result_of(session.run_statement(wrong))
        assert caught.value.code == "ARGS_INVALID"


def test_an_answer_is_bounded_in_rows_and_bytes(session: SqlSession) -> None:
    series = "with recursive n(i) as (select 1 union all select i + 1 from n where i < {}) select {} from n"
    for sql in (series.format(1_001, "i"), series.format(100, "zeroblob(2000)")):
        with pytest.raises(StatementFailed) as caught:
            run(session, sql)
        assert caught.value.code == "RESPONSE_TOO_LARGE"
    assert len(rows(session, series.format(1_000, "i"))) == 1_000
    assert result_of(session.execute(series.format(5_000, "i"), want_rows=False)).row_count == 5_000


def test_columns_and_errors_count_as_bytes_of_an_answer(pool: ConnectionPool) -> None:
    """Hazard: a stored text with long column names, executed by many short steps, gave an answer far above the limit; and so
    did one whose error quotes a long name."""
    columns = ", ".join(f"{number} as c{'x' * 500}{number}" for number in range(20))
    texts = [f"select {columns} limit 0", f"select {columns} where ?", f"select a from {'y' * 5_000}"]
    for text in texts:
        for request in (p.BatchRequest(p.WireBatch([p.BatchStep(p.WireStatement(sql_id=1))] * 1_000)), None):
            with session_of(pool, TARGET) as session:
                session.sqls.store(1, text)
                requests = [request] if request is not None else [p.DescribeRequest(sql_id=1)] * 1_000
                size = sum(len(p.encode(result_of(session.answer(one)))) for one in requests)
                assert size < session.limits.bytes_max + 1_000 * 200
                assert result_of(session.execute("insert into t(b) values ('x')")).affected_rows == 1


def test_a_failed_statement_frees_its_part_of_the_answer(session: SqlSession) -> None:
    wide = f"select 1 as {'x' * 60_000}"
    run(session, wide)
    with pytest.raises(StatementFailed, match="more than"):
        run(session, wide)
    assert run(session, f"select 1 as {'x' * 30_000}").rows_read == 1


def test_the_text_of_an_error_is_bounded(session: SqlSession) -> None:
    with pytest.raises(StatementFailed) as caught:
        run(session, f"select a from {'y' * 5_000}")
    assert len(str(caught.value)) == 1_001


def test_conditions_of_a_batch(session: SqlSession) -> None:
    batch = p.WireBatch(
        [
            step("insert into t(a) values (1)"),
            step("insert into t(a) values (1)"),
            step("select 'ok'", p.CondOk(0)),
            step("select 'skipped'", p.CondOk(1)),
            step("select 'failed'", p.CondError(1)),
            step("select 'skipped counts as failed'", p.CondError(3)),
            step("select 'not'", p.CondNot(p.CondOk(1))),
            step("select 'and'", p.CondAnd([p.CondOk(0), p.CondError(1), p.CondIsAutocommit()])),
            step("select 'or'", p.CondOr([p.CondOk(1), p.CondOk(0)])),
            step("select 'none of none'", p.CondOr([])),
        ]
    )
    result = result_of(session.batch(batch))
    executed = [number for number, one in enumerate(result.step_results) if one is not None]
    assert executed == [0, 2, 4, 5, 6, 7, 8]
    assert [number for number, one in enumerate(result.step_errors) if one is not None] == [1]


@pytest.mark.parametrize("number", [0, 5, -1])
def test_a_condition_refers_to_an_earlier_step(session: SqlSession, number: int) -> None:
    with pytest.raises(StatementFailed) as caught:
        result_of(session.batch(p.WireBatch([step("select 1", p.CondOk(number))])))
    assert caught.value.code == "BATCH_COND_BAD_STEP"


def test_a_sequence_stops_at_its_first_failure(session: SqlSession) -> None:
    result_of(
        session.sequence(
            "insert into t(a) values (1); -- a comment; with a semicolon\n select ';'; insert into t(a) values (2);"
        )
    )
    with pytest.raises(StatementFailed):
        result_of(session.sequence("insert into t(a) values (3); selec; insert into t(a) values (4)"))
    assert [row[0]["value"] for row in rows(session, "select a from t order by a")] == ["1", "2", "3"]


def test_describe_runs_nothing(session: SqlSession) -> None:
    described = session.describe("insert into t(a, b) values (:x, ?) returning id")
    assert [parameter.name for parameter in described.params] == [":x", None]
    assert (described.is_explain, described.is_readonly, described.cols[0].decltype) == (False, False, "INTEGER")
    assert session.describe("explain select 1").is_explain
    assert rows(session, "select count(*) from t") == [[{"type": "integer", "value": "0"}]]


def test_stored_texts_are_bounded_and_closed(session: SqlSession) -> None:
    session.sqls.store(1, "select 7")
    assert result_of(session.run_statement(p.WireStatement(sql_id=1))).row_count == 1
    with pytest.raises(StatementFailed, match="already stored"):
        session.sqls.store(1, "select 8")
    session.sqls.close(1)
    session.sqls.close(1)
    with pytest.raises(StatementFailed, match="not stored"):
        result_of(session.run_statement(p.WireStatement(sql_id=1)))
    for number in range(250):
        session.sqls.store(number, "select 1")
    with pytest.raises(StatementFailed, match="too many"):
        session.sqls.store(250, "select 1")


# ── locks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_statement_that_finds_the_lock_taken_has_no_effect_and_can_be_continued(pool: ConnectionPool) -> None:
    with session_of(pool, TARGET) as holder, session_of(pool, TARGET) as other:
        result_of(holder.execute("begin immediate"))
        work = other.execute("insert into t(a) values (5)")
        assert advance(work) == (False, None)
        assert advance(work) == (False, None)
        result_of(holder.execute("commit"))
        is_done, outcome = advance(work)
        assert is_done
        assert outcome.affected_rows == 1


def test_a_statement_that_waited_for_its_timeout_fails_with_busy(pool: ConnectionPool) -> None:
    with session_of(pool, TARGET) as holder, session_of(pool, TARGET) as other:
        result_of(holder.execute("begin immediate"))
        work = other.execute("insert into t(a) values (5)")
        next(work)
        with pytest.raises(StatementFailed) as caught:
            work.throw(LockTimeout())
        assert caught.value.code == "SQLITE_BUSY"


def test_a_write_after_reading_an_old_version_fails_at_once(pool: ConnectionPool) -> None:
    with session_of(pool, TARGET) as reader, session_of(pool, TARGET) as writer:
        result_of(reader.execute("begin"))
        result_of(reader.execute("select count(*) from t"))
        result_of(writer.execute("insert into t(a) values (1)"))
        with pytest.raises(StatementFailed) as caught:
            result_of(reader.execute("insert into t(a) values (2)"))
        assert (caught.value.code, caught.value.extended_code) == ("SQLITE_BUSY", "SQLITE_BUSY_SNAPSHOT")


# ── the pool ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_reused_connection_keeps_no_state_of_its_previous_user(pool: ConnectionPool) -> None:
    with session_of(pool, TARGET) as first:
        run(first, "insert into t(a) values (1)")
        result_of(first.execute("begin"))
        run(first, "insert into t(a) values (2)")
    with session_of(pool, TARGET) as second:
        assert second.runner is first.runner
        assert second.is_autocommit
        assert second.runner.last_insert_rowid() == 0
        assert rows(second, "select count(*) from t") == [[{"type": "integer", "value": "1"}]]
    assert pool.opened == 1


def test_a_reused_connection_counts_changes_from_zero(pool: ConnectionPool) -> None:
    counts = "select changes(), total_changes()"
    for number in range(3):
        with session_of(pool, TARGET) as session:
            assert (session.runner.changes(), session.runner.total_changes()) == (0, 0)
            assert rows(session, counts) == [[{"type": "integer", "value": "0"}] * 2]
            run(session, f"insert into t(a) values ({2 * number}), ({2 * number + 1})")
            assert (session.runner.changes(), session.runner.total_changes()) == (2, 2)
            run(session, f"delete from t where a = {2 * number}")
            assert rows(session, counts) == [[{"type": "integer", "value": "1"}, {"type": "integer", "value": "3"}]]
            run(session, "delete from t where a = -1")
            assert rows(session, counts) == [[{"type": "integer", "value": "0"}, {"type": "integer", "value": "3"}]]
    assert pool.opened == 1


def test_a_trigger_reads_the_changes_of_its_own_statements_on_a_reused_connection(pool: ConnectionPool) -> None:
    with session_of(pool, TARGET) as first:
        run(first, "create table log(n)")
        run(
            first,
            "create trigger count_rows after insert on t begin "
            "delete from t where a = new.a; insert into log values (changes()); end",
        )
        run(first, "insert into t(a) values (7), (8)")
        before = rows(first, "select n from log")
        run(first, "delete from log")
    with session_of(pool, TARGET) as second:
        assert second.runner is first.runner
        run(second, "insert into t(a) values (7), (8)")
        assert rows(second, "select n from log") == before


@pytest.mark.parametrize("sql", ["create temp table x(a)", "pragma foreign_keys = 1", "pragma case_sensitive_like = 1"])
def test_a_connection_with_leftover_state_is_closed(pool: ConnectionPool, sql: str) -> None:
    with session_of(pool, TARGET) as first:
        result_of(first.execute(sql))
    with session_of(pool, TARGET) as second:
        assert second.runner is not first.runner


def test_a_connection_caches_four_mib(session: SqlSession) -> None:
    assert rows(session, "pragma cache_size") == [[{"type": "integer", "value": "-4096"}]]


def test_idle_connections_are_closed_after_a_while(pool: ConnectionPool) -> None:
    with session_of(pool, TARGET) as first:
        pass
    pool.sweep()
    with session_of(pool, TARGET) as second:
        assert second.runner is first.runner
    pool.sweep(float("inf"))
    with session_of(pool, TARGET) as third:
        assert third.runner is not first.runner


def test_another_database_of_the_same_name_gets_another_connection(store: Store, pool: ConnectionPool) -> None:
    with session_of(pool, TARGET) as first:
        assert rows(first, "select count(*) from t") == [[{"type": "integer", "value": "0"}]]
    store.rename("shop", "old")
    store.sqlite("shop", create=True).close()
    with session_of(pool, TARGET) as second, pytest.raises(StatementFailed, match="no such table"):
        run(second, "select * from t")


def looked(pool: ConnectionPool, name: str) -> int:
    """The number of rows that a one-shot reads."""
    with session_of(pool, SqlTarget.parse(name)) as session:
        return int(rows(session, "select count(*) from t")[0][0]["value"])


def test_a_name_of_a_version_is_looked_up_for_each_stream(tmp_path: Path) -> None:
    """Hazard: an idle connection was reused for the same words. While it was in use, `shop@monday` was a snapshot that had been
    replaced, and `shop@1h` stayed at the moment of the first request."""
    clock, hour = ManualClock(), 60.0 * 60.0
    with quire.open(tmp_path / "store", settings=settings(), clock=clock) as store:
        pool = ConnectionPool(store, AnswerLimits(rows_max=1_000, bytes_max=100_000))
        with closing(store.sqlite("shop", create=True)) as connection:
            connection.execute("create table t(a)")
            empty = connection.pragma("quire_epoch")
            store.snapshot("shop", "monday")
            clock.advance(2 * hour)
            connection.execute("insert into t(a) values (1)")
        assert [looked(pool, f"shop@{version}") for version in ("monday", empty, "1h")] == [0, 0, 0]
        store.drop_snapshot("shop", "monday")
        store.snapshot("shop", "monday")
        clock.advance(2 * hour)
        assert [looked(pool, f"shop@{version}") for version in ("monday", "1h")] == [1, 1]
        opened = pool.opened
        assert [looked(pool, f"shop@{version}") for version in ("monday", empty)] == [1, 0]
        assert pool.opened == opened, "connections to the same version are reused"
        pool.close()


def test_a_connection_to_a_database_that_took_the_name_meanwhile_is_not_lent(
    store: Store, pool: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: the connection was pooled as one to the former database, which has another name now: the next program that named
    that one read and wrote the wrong database."""
    connect = store.sqlite

    def rename_first(name: str, **options: Any) -> Any:
        monkeypatch.setattr(store, "sqlite", connect)
        store.rename("shop", "old")
        connect("shop", create=True).close()
        return connect(name, **options)

    monkeypatch.setattr(store, "sqlite", rename_first)
    with session_of(pool, TARGET) as session, pytest.raises(StatementFailed, match="no such table"):
        run(session, "select * from t")
    assert looked(pool, "old") == 0


def test_versions_are_read_only(store: Store, pool: ConnectionPool) -> None:
    with session_of(pool, TARGET) as session:
        run(session, "insert into t(a) values (1)")
        epoch = rows(session, "pragma quire_epoch")[0][0]["value"]
        store.snapshot("shop", "monday")
        run(session, "insert into t(a) values (2)")
    for name in ("shop@monday", f"shop@{epoch}"):
        with session_of(pool, SqlTarget.parse(name)) as old:
            assert rows(old, "select a from t") == [[{"type": "integer", "value": "1"}]]
            with pytest.raises(StatementFailed) as caught:
                run(old, "insert into t(a) values (3)")
            assert caught.value.code == "SQLITE_READONLY"
