"""Clients from the package index, against a store that another process serves: `libsql` holds the GIL while it waits
for an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import libsql
import libsql_client
import pytest
import sqlalchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tests.service.sql.hrana_client import HranaClient, owner

turso_serverless = pytest.importorskip("turso_serverless")


@pytest.fixture
def hrana(path: Path) -> Iterator[HranaClient]:
    with owner(path) as served_there:
        yield served_there


def test_libsql(hrana: HranaClient) -> None:
    connection = libsql.connect(database=hrana.address, auth_token="")
    connection.execute("create table t(id integer primary key, a, b)")
    connection.executemany("insert into t(a, b) values (?, ?)", [(2**60, b"\0\1"), (None, "text"), (1.5, "")])
    connection.commit()
    assert connection.execute("select a, b from t order by id").fetchall() == [
        (2**60, b"\0\1"),
        (None, "text"),
        (1.5, ""),
    ]
    connection.execute("insert into t(a) values (9)")
    assert hrana.rows("select count(*) from t") == [(3,)]
    connection.rollback()
    assert connection.execute("select count(*) from t").fetchone() == (3,)
    with pytest.raises(ValueError, match="no such table"):
        connection.execute("select * from absent")
    connection.close()


def test_libsql_reads_a_long_result_while_it_writes(hrana: HranaClient) -> None:
    connection = libsql.connect(database=hrana.address, auth_token="")
    connection.execute("create table t(a)")
    connection.commit()
    series = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 3000) select i from n"
    connection.execute(f"insert into t {series}")
    connection.commit()
    rows = connection.execute("select a from t").fetchmany(10)
    connection.execute("insert into t values (0)")
    connection.commit()
    assert len(rows) == 10
    assert hrana.rows("select count(*) from t") == [(3_001,)]
    connection.close()


@pytest.mark.parametrize("scheme", ["http", "ws"])
def test_libsql_client(hrana: HranaClient, scheme: str) -> None:
    with libsql_client.create_client_sync(hrana.address.replace("http", scheme, 1)) as client:
        client.batch(["create table t(id integer primary key, a)", ("insert into t(a) values (?)", [7])])
        result = client.execute("select id, a from t where a = :a", {"a": 7})
        assert [row.astuple() for row in result.rows] == [(1, 7)]
        with pytest.raises(libsql_client.LibsqlError) as caught:
            client.batch(["insert into t(a) values (8)", "insert into absent values (1)"])
        assert caught.value.code == "SQLITE_ERROR"
        assert client.execute("select count(*) from t").rows[0][0] == 1
        if scheme == "ws":
            with client.transaction() as transaction:
                transaction.execute("insert into t(a) values (9)")
                transaction.rollback()
            assert client.execute("select count(*) from t").rows[0][0] == 1


def test_a_url_that_ends_with_a_database_name_gets_a_hint(hrana: HranaClient) -> None:
    with libsql_client.create_client_sync(f"{hrana.address}/db/default/") as client:
        assert client.execute("select 1").rows[0][0] == 1
    nameless = libsql_client.create_client_sync(f"{hrana.address}/db/default")
    with nameless, pytest.raises(libsql_client.LibsqlError, match="ends with a slash") as caught:
        nameless.execute("select 1")
    assert caught.value.code == "DATABASE_NOT_NAMED"
    with libsql_client.create_client_sync(f"{hrana.address.replace('http', 'ws', 1)}/db/default") as client:
        assert client.execute("select 1").rows[0][0] == 1


def test_turso_serverless(hrana: HranaClient) -> None:
    connection = turso_serverless.connect(hrana.address)
    cursor = connection.cursor()
    cursor.execute("create table t(id integer primary key, a text unique)")
    cursor.execute("insert into t(a) values (?)", ("x",))
    connection.commit()
    assert cursor.execute("select * from t").fetchall() == [(1, "x")]
    with pytest.raises(turso_serverless.IntegrityError):
        cursor.execute("insert into t(a) values (?)", ("x",))
    connection.rollback()
    connection.close()


class Base(DeclarativeBase):
    """Base class of the models below."""


class Customer(Base):
    """One row."""

    __tablename__ = "customers"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


def test_sqlalchemy(hrana: HranaClient) -> None:
    engine = sqlalchemy.create_engine(f"sqlite+{hrana.address.replace('http', 'libsql', 1)}/?secure=false")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Customer(name="Ada"), Customer(name="Grace")])
        session.commit()
        session.add(Customer(name="nobody"))
        session.rollback()
    with Session(engine) as session:
        names = session.scalars(sqlalchemy.select(Customer.name).order_by(Customer.name)).all()
    assert names == ["Ada", "Grace"]
    assert sqlalchemy.inspect(engine).get_table_names() == ["customers"]
    engine.dispose()
