"""Conditions from users: one expression over one table, or an error that explains what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import apsw
import pytest

from quire.core.errors import InvalidInput
from quire.sqlite.where_clause import CONDITION_BYTES_MAX, bracketed, check_condition


@pytest.fixture
def connection() -> Iterator[apsw.Connection]:
    connection = apsw.Connection(":memory:")
    connection.execute(
        """
        create table "T t"(id integer primary key, who text, price real, note);
        insert into "T t" values (1, 'ada', 1.5, null), (2, 'bob', 2.5, 'x'), (7, 'eve', 9, 'a) or (1');
        create table other(x);
        insert into other values (1);
        create view cheap as select id, who from "T t" where price < (select max(price) from "T t");
        create virtual table words using fts5(body);
        """
    )
    yield connection
    connection.close()


@pytest.mark.parametrize(
    ("condition", "ids"),
    [
        ("id < 5", [1, 2]), ("id in (1, 7)", [1, 7]), ("who like 'a%' or price > 5", [1, 7]), ("id < 5 -- few", [1, 2]),
        ("/* all */ 1", [1, 2, 7]), ("note = 'a) or (1'", [7]), ("(id = 1) or (id = 2)", [1, 2]), ("note is null", [1]),
        ("rowid between 2 and 6", [2]), ('"who" = \'eve\'', [7]), ("length(who) = 3 and abs(price) < 2", [1]),
        ("case when id = 1 then 0 else 1 end", [2, 7]), ('"T t".id = 2', [2]), ("date('2024-01-01') > '2023'", [1, 2, 7]),
    ],
)  # fmt: skip
def test_valid_conditions_are_accepted_and_evaluated(
    connection: apsw.Connection, condition: str, ids: list[int]
) -> None:
    check_condition(connection, "T t", condition)
    rows = connection.execute(
        f'select id from "T t" where {bracketed(condition)} and id between -10 and 10 order by id'
    )
    assert [row[0] for row in rows] == ids


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        ("1) union select 1 from other where (1", "no such table|subselect|syntax error"),
        ("id < 5) or (1", "syntax error"),
        ("1) limit (1", "syntax error"),
        ("1 then 1 when 2", "syntax error"),
        ("1; drop table other", "syntax error"),
        ("id < 5 /* never closed", "incomplete input"),
        ("exists(select 1 from other)", "subselect|no such table"),
        ('id in (select id from "T t")', "subselect"),
        ("(select 1)", "subselect"),
        ("id in other", "no such table: main.other|no such table: other"),
        ("other.x = 1", "no such column"),
        ("id < ?", "parameters"),
        ("id < :limit", "parameters"),
        ('"prcie" > 5', "no such column"),
        ("prcie > 5", "no such column"),
        ("random() > 0", "not deterministic"),
        ("who > current_timestamp", "not deterministic"),
        ("load_extension('x')", "not deterministic"),
        ("count(*) > 1", "misuse of aggregate"),
        ("sum(id) over () > 1", "misuse of window"),
        ("id = 1, 2", "syntax error|row value"),
        ("select 1", "subselect|syntax error"),
        ("", "empty"),
        ("  \n", "empty"),
        ("id < 5\0", "NUL"),
        ("1 or " * CONDITION_BYTES_MAX + "1", "64 KiB"),
    ],
)  # fmt: skip
def test_invalid_conditions_are_refused_with_a_reason(connection: apsw.Connection, condition: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        check_condition(connection, "T t", condition, database="shop")
    assert connection.authorizer is None, "the authorizer is removed afterwards"


def test_conditions_work_on_views_and_full_text_tables(connection: apsw.Connection) -> None:
    """A view may read other tables; the condition may not."""
    check_condition(connection, "cheap", "id > 1 and who = 'bob'")
    check_condition(connection, "CHEAP", "id > 1")
    check_condition(connection, "words", "words match 'one'")
    with pytest.raises(InvalidInput, match="no such column"):
        check_condition(connection, "cheap", "price > 1")
    with pytest.raises(InvalidInput, match="subselect"):
        check_condition(connection, "cheap", "id = (select max(id) from cheap)")


def test_errors_that_only_the_real_table_reveals_are_reported(connection: apsw.Connection) -> None:
    connection.execute("create table pairs(a, b, primary key(a, b)) without rowid")
    check_condition(connection, "pairs", "a = 1")
    with pytest.raises(InvalidInput, match="no such column: rowid"):
        check_condition(connection, "pairs", "rowid = 1")
    with pytest.raises(InvalidInput, match="reserved for internal use"):
        check_condition(connection, "sqlite_schema", "name = 'pairs'")
