"""Columns of a mirror's target: no value is lost when names or types of databases collide, and odd names are handled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidInput
from quire.jobs.mirror.run import TYPES, Column, assigned, fits
from quire.manifest.records import JobState
from quire.store.store import Store
from tests.jobs.mirrored_store import MirroredStore, read_target, sorted_rows


@pytest.fixture
def mirror(tmp_path: Path) -> MirroredStore:
    return MirroredStore(tmp_path, "parquet")


@pytest.fixture
def store(mirror: MirroredStore) -> Iterator[Store]:
    with mirror.open() as store:
        yield store


def run_sql(store: Store, database: str, *statements: str) -> None:
    with closing(store.sqlite(database, create=True)) as connection:
        for sql in statements:
            connection.execute(sql)


def mirrored(mirror: MirroredStore, store: Store) -> list[dict[str, Any]]:
    store.mirrors.run("lake", runner="threads")
    return [dict(row) for row in read_target(mirror.root, mirror.kind)]


NAMES = st.sampled_from(["a", "A_double", "a_double_2", "a_string", "É", "é", "é_bigint"])
KINDS = st.sampled_from(list(TYPES))


@given(
    own=st.lists(st.tuples(NAMES, KINDS), unique_by=lambda column: column[0]),
    known=st.lists(st.tuples(NAMES, KINDS), unique_by=lambda column: column[0].lower()),
)
def test_two_columns_of_a_table_never_share_a_column_of_the_target(own: list[Column], known: list[Column]) -> None:
    columns = {name.lower(): (name, kind) for name, kind in known}
    targets = assigned(own, columns)
    assert len({name.lower() for name, _ in targets}) == len(own)
    for (_, kind), target in zip(own, targets, strict=True):
        assert fits(kind, target[1])
        assert columns.get(target[0].lower(), target) == target


@pytest.mark.parametrize("order", ["price REAL, price_double REAL", "price_double REAL, price REAL"])
def test_a_column_named_like_the_one_of_a_changed_type_keeps_its_values(
    mirror: MirroredStore, store: Store, order: str
) -> None:
    run_sql(store, "tenant-1", "CREATE TABLE orders (price INTEGER)", "INSERT INTO orders VALUES (5)")
    mirror.define(store)
    store.mirrors.run("lake")
    run_sql(
        store,
        "tenant-2",
        f"CREATE TABLE orders ({order})",
        "INSERT INTO orders (price, price_double) VALUES (7.25, 99.5)",
    )
    assert mirrored(mirror, store)[1] == {"_database": "tenant-2", "price_double": 99.5, "price_double_2": 7.25}


def test_databases_that_spell_a_column_differently_agree_about_the_column_of_its_new_type(
    mirror: MirroredStore, store: Store
) -> None:
    mirror.options = {"file_bytes": "65536"}
    run_sql(store, "tenant-0", "CREATE TABLE orders (price INTEGER)", "INSERT INTO orders VALUES (5)")
    mirror.define(store)
    store.mirrors.run("lake")
    for number in range(1, 12):
        name = "Price" if number % 2 else "PRICE"
        run_sql(store, f"tenant-{number}", f"CREATE TABLE orders ({name} REAL)", "INSERT INTO orders VALUES (1.5)")
    rows = mirrored(mirror, store)
    assert [row["price_double"] for row in rows if "price_double" in row] == [1.5] * 11


def test_columns_whose_names_differ_only_in_the_case_of_other_letters_are_two(
    mirror: MirroredStore, store: Store
) -> None:
    run_sql(store, "tenant-1", "CREATE TABLE orders (É TEXT, é TEXT)", "INSERT INTO orders VALUES ('big', 'small')")
    mirror.define(store)
    assert mirrored(mirror, store) == [{"_database": "tenant-1", "É": "big", "é_string": "small"}]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_numbers_are_widened_also_if_a_database_has_blobs(
    mirror: MirroredStore, store: Store, order: tuple[int, ...]
) -> None:
    mirror.options = {"file_bytes": "65536"}
    values = ["1", "2.5", "x'00'"]
    for number, value in enumerate(values[place] for place in order):
        run_sql(store, f"tenant-{number}", "CREATE TABLE orders (v)", f"INSERT INTO orders VALUES ({value})")
    mirror.define(store)
    rows = mirrored(mirror, store)
    assert sorted(row["v"] for row in rows if "v" in row) == [1.0, 2.5]
    assert [row["v_binary"] for row in rows if "v_binary" in row] == [b"\0"]


def test_only_0_and_1_are_booleans(mirror: MirroredStore, store: Store) -> None:
    run_sql(
        store, "tenant-1", "CREATE TABLE orders (b BOOLEAN)", "INSERT INTO orders VALUES (0), (1), (7), (-1), (NULL)"
    )
    mirror.define(store)
    with pytest.raises(InvalidInput, match="only 0 and 1 are booleans") as caught:
        store.mirrors.run("lake")
    assert caught.value.where == {"column": "b", "value": "7", "table": "orders", "database": "tenant-1"}
    store.mirrors.drop("lake")
    mirror.options = {"misfits": "null"}
    mirror.define(store)
    assert [row.get("b") for row in mirrored(mirror, store)].count(None) == 3


INVALID_UTF8 = (
    "CREATE TABLE orders (t TEXT, b BLOB)",
    "INSERT INTO orders VALUES (CAST(x'ff41' AS TEXT), CAST(x'ff' AS TEXT))",
)


def test_a_text_that_is_not_utf8_fails_the_job_with_a_sentence_or_is_null(mirror: MirroredStore, store: Store) -> None:
    run_sql(store, "tenant-1", *INVALID_UTF8)
    mirror.define(store)
    with pytest.raises(InvalidInput, match="not valid in the encoding") as caught:
        store.mirrors.run("lake")
    assert caught.value.where.items() >= {"column": "t", "table": "orders", "database": "tenant-1"}.items()
    assert "misfits=null" in caught.value.hint
    (job,) = store.manifest.jobs.jobs(JobState.FAILED_PERMANENT)
    assert "tenant-1" in job.record.error
    store.mirrors.drop("lake")
    mirror.options = {"misfits": "null"}
    mirror.define(store)
    assert mirrored(mirror, store) == [{"_database": "tenant-1", "b": b"\xff"}]


def _twice(*values: Any) -> Any:
    return 2 * values[0]


def test_a_function_of_the_application_fails_the_run_with_a_sentence(mirror: MirroredStore, store: Store) -> None:
    with closing(store.sqlite("tenant-1", create=True)) as connection:
        connection.create_scalar_function("twice", _twice, deterministic=True)
        connection.execute("CREATE TABLE orders (n INTEGER, m INTEGER AS (twice(n)))")
        connection.execute("INSERT INTO orders VALUES (1)")
    mirror.define(store)
    with pytest.raises(InvalidInput, match=r"only its application registers: unknown function: twice") as caught:
        store.mirrors.run("lake")
    assert caught.value.where == {"table": "orders", "database": "tenant-1"}


def test_computed_json_is_text(mirror: MirroredStore, store: Store) -> None:
    run_sql(
        store,
        "tenant-1",
        "CREATE TABLE orders (body TEXT, name TEXT AS (body -> '$.name'))",
        """INSERT INTO orders VALUES ('{"name": "Ann"}')""",
    )
    mirror.define(store)
    mirror.run(store)


@pytest.mark.parametrize("kind", ["iceberg", "parquet", "delta"])
def test_a_column_name_may_contain_a_dot(tmp_path: Path, store: Store, kind: str) -> None:
    mirror = MirroredStore(tmp_path, kind)
    run_sql(store, "tenant-1", 'CREATE TABLE orders (a INTEGER, "a.b" TEXT)', "INSERT INTO orders VALUES (1, 'x')")
    mirror.define(store)
    mirror.run(store)
    run_sql(store, "tenant-1", "UPDATE orders SET a = 2")
    mirror.run(store)


@pytest.mark.parametrize("name", ["a b", "a,b", "a=b", "a\nb", "a{", ";"])
def test_delta_refuses_names_that_need_column_mapping(tmp_path: Path, store: Store, name: str) -> None:
    mirror = MirroredStore(tmp_path, "delta")
    run_sql(store, "tenant-1", f'CREATE TABLE orders (id INTEGER, "{name}" TEXT)', "INSERT INTO orders VALUES (1, 'x')")
    mirror.define(store)
    with pytest.raises(InvalidInput, match="Delta does not allow") as caught:
        store.mirrors.run("lake")
    assert caught.value.where["column"] == name
    assert read_target(tmp_path, "delta") == sorted_rows([])


def test_a_database_whose_name_reads_as_a_pattern_is_followed_by_its_name(mirror: MirroredStore, store: Store) -> None:
    run_sql(store, "tenant-[1]", "CREATE TABLE orders (id INTEGER)", "INSERT INTO orders VALUES (1)")
    assert store.mirrors.create("lake", "tenant-[1]", "orders", f"parquet:{mirror.root}/lake").followed == 1


def test_patterns_are_split_at_commas(store: Store, tmp_path: Path) -> None:
    for database in ("a-1", "b-1", "c-1"):
        run_sql(store, database, "CREATE TABLE orders (id INTEGER)", "INSERT INTO orders VALUES (1)")
    status = store.mirrors.create("lake", "a-*, b-*", "orders", f"parquet:{tmp_path}/lake")
    assert (status.databases, status.followed) == (["a-*", "b-*"], 2)
    with pytest.raises(InvalidInput, match="needs databases"):
        store.mirrors.create("other", "a-*,,b-*", "orders", f"parquet:{tmp_path}/other")
