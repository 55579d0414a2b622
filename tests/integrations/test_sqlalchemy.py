"""SQLAlchemy, Alembic, SQLModel and aiosqlite on a store, each with its one line of configuration."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import aiosqlite
import alembic.command
import pytest
import sqlalchemy as sa
from alembic.config import Config
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.ext.asyncio import create_async_engine

import quire
from quire.durable.failpoints import armed
from quire.integrations import aio
from tests.service.owners import served

ITEMS = sa.Table(
    "items", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("name", sa.String(20))
)


def fill(engine: sa.Engine, *names: str) -> None:
    with engine.begin() as connection:
        ITEMS.metadata.create_all(connection)
        connection.execute(ITEMS.insert(), [{"name": name} for name in names])


def names_of(url: str) -> list[str]:
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            return list(connection.scalars(sa.select(ITEMS.c.name).order_by(ITEMS.c.id)))
    finally:
        engine.dispose()


def test_an_engine_is_one_url_and_a_snapshot_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = sa.create_engine("quire:///store/shop?timeout=2.5")
    assert isinstance(engine.pool, sa.QueuePool)
    assert engine.dialect.name == "sqlite"
    fill(engine, "tea", "milk")
    with engine.begin() as connection:
        upsert = insert(ITEMS).values(id=1, name="coffee")
        connection.execute(upsert.on_conflict_do_update(index_elements=["id"], set_={"name": upsert.excluded.name}))
    engine.dispose()
    with quire.open("store") as store:
        store.snapshot("shop", "monday")
    engine = sa.create_engine(f"quire:///{tmp_path}/store/shop")
    with engine.begin() as connection:
        connection.execute(ITEMS.delete())
    engine.dispose()
    assert names_of("quire:///store/shop") == []
    assert names_of("quire:///store/shop?at=monday") == ["coffee", "milk"]


def test_a_pool_replaces_connections_that_ended(tmp_path: Path) -> None:
    """Hazard: after a failed sync, or after the store was closed and opened again, the pool kept its connections, and every
    statement failed until the program ended."""
    engine = sa.create_engine(f"quire:///{tmp_path}/store/shop")
    with quire.open(tmp_path / "store"):
        fill(engine, "tea")
        with armed("pages.segment.frames", "raise:EIO"), pytest.raises(sa.exc.OperationalError) as failed:
            fill(engine, "milk")
        assert failed.value.connection_invalidated
        fill(engine, "coffee")
    with quire.open(tmp_path / "store"):
        with pytest.raises(sa.exc.OperationalError, match="the store is closed"):
            fill(engine, "juice")
        fill(engine, "water")
    engine.dispose()
    assert {"tea", "coffee", "water"} <= set(names_of(f"quire:///{tmp_path}/store/shop"))


def test_a_database_of_a_server(tmp_path: Path) -> None:
    with served(tmp_path / "store", "http://127.0.0.1:0") as (store, server):
        address = server.address.removeprefix("http://")
        url = f"quire+http://{address}/shop?token_file={tmp_path / 'store' / 'admin.token'}"
        engine = sa.create_engine(url)
        assert isinstance(engine.pool, sa.QueuePool)
        fill(engine, "tea", "milk")
        assert sa.inspect(engine).get_table_names() == ["items"]
        engine.dispose()
        store.snapshot("shop", "monday")
        with store.sqlite("shop") as connection:
            connection.execute("delete from items")
        assert names_of(url) == []
        assert names_of(f"quire+http://{address}/shop?at=monday") == ["tea", "milk"]


def test_asyncio(tmp_path: Path) -> None:
    async def run() -> list[str]:
        engine = create_async_engine(f"quire+aiosqlite:///{tmp_path}/store/shop")
        async with engine.begin() as connection:
            await connection.run_sync(ITEMS.metadata.create_all)
            await connection.execute(ITEMS.insert(), [{"name": "tea"}])
        async with engine.connect() as connection:
            rows = [str(name) async for (name,) in await connection.stream(sa.select(ITEMS.c.name))]
        await engine.dispose()
        return rows

    assert asyncio.run(run()) == ["tea"]


def test_aiosqlite_alone(tmp_path: Path) -> None:
    async def run() -> list[object]:
        async with aio.connect(tmp_path / "store" / "shop") as database:
            assert isinstance(database, aiosqlite.Connection)
            await database.execute("create table t(a)")
            await database.executemany("insert into t values (?)", [(1,), (2,)])
            await database.commit()
            async with database.execute("select a from t") as cursor:
                return [row async for row in cursor]

    assert asyncio.run(run()) == [(1,), (2,)]


ENVIRONMENT = """
from alembic import context
import sqlalchemy as sa
engine = sa.create_engine(context.config.get_main_option("sqlalchemy.url"))
with engine.connect() as connection:
    context.configure(connection=connection, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""
FIRST = """
revision, down_revision = "1", None
import sqlalchemy as sa
from alembic import op
def upgrade(): op.create_table("items", sa.Column("id", sa.Integer, primary_key=True), sa.Column("name", sa.String))
def downgrade(): op.drop_table("items")
"""
SECOND = """
revision, down_revision = "2", "1"
import sqlalchemy as sa
from alembic import op
def upgrade():
    with op.batch_alter_table("items") as batch:
        batch.alter_column("name", new_column_name="title", nullable=False)
def downgrade():
    with op.batch_alter_table("items") as batch:
        batch.alter_column("title", new_column_name="name", nullable=True)
"""


def test_alembic_migrates_up_and_down(tmp_path: Path) -> None:
    scripts = tmp_path / "migrations"
    (scripts / "versions").mkdir(parents=True)
    for name, text in (("env.py", ENVIRONMENT), ("versions/1.py", FIRST), ("versions/2.py", SECOND)):
        (scripts / name).write_text(text)
    url = f"quire:///{tmp_path}/store/shop"
    config = Config()
    config.set_main_option("script_location", str(scripts))
    config.set_main_option("sqlalchemy.url", url)
    for revision, columns in (("head", ["id", "title"]), ("1", ["id", "name"])):
        (alembic.command.upgrade if revision == "head" else alembic.command.downgrade)(config, revision)
        engine = sa.create_engine(url)
        assert [column["name"] for column in sa.inspect(engine).get_columns("items")] == columns
        engine.dispose()


def test_an_engine_over_the_network_uses_a_client(tmp_path: Path) -> None:
    with quire.open(tmp_path) as store, store.serve("grpc://127.0.0.1:0") as server:
        store.sqlite("shop", create=True).close()
        with quire.connect(server.address, token_file=str(tmp_path / "admin.token")) as client:
            creator = partial(client.sqlite, "shop", check_same_thread=False)
            engine = sa.create_engine("quire://", creator=creator, poolclass=sa.QueuePool)
            with engine.begin() as connection:
                connection.execute(sa.text("create table t as select 1 as a"))
            assert sa.inspect(engine).get_table_names() == ["t"]
            engine.dispose()


def test_a_url_with_a_host_gets_a_hint() -> None:
    with pytest.raises(sa.exc.ArgumentError, match=r"quire\+http://host"):
        sa.create_engine("quire://host:7448/shop")


CONFIG = """
import pytest
pytest.register_assert_rewrite("sqlalchemy.testing.assertions")
from sqlalchemy.testing.plugin.pytestplugin import *
from sqlalchemy.testing.provision import temp_table_keyword_args

@temp_table_keyword_args.for_db("quire")
def temporary(cfg, eng):
    return {"prefixes": ["TEMPORARY"]}
"""


REQUIREMENTS = """
from sqlalchemy.testing import exclusions
from sqlalchemy.testing.requirements import SuiteRequirements

class Requirements(SuiteRequirements):
    schemas = exclusions.closed()  # of other servers; SQLite has attached databases
"""
SETUP = """
[db]
default = {url}
[sqla_testing]
requirement_cls = requirements:Requirements
profile_file = profiles.txt
"""


def failures(directory: Path, url: str) -> set[str]:
    """The failed tests of SQLAlchemy's suite, by their names without the dialect."""
    (directory / "test").mkdir(parents=True)
    files = {
        "conftest.py": CONFIG,
        "requirements.py": REQUIREMENTS,
        "setup.cfg": SETUP.format(url=url),
        "test/test_suite.py": "from sqlalchemy.testing.suite import *\n",
    }
    for name, text in files.items():
        (directory / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "test"]
    result = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None, result.stdout[-3000:] + result.stderr
    assert int(passed[1]) > 600, result.stdout[-3000:]
    return {
        re.sub(r"_sqlite\+\w+", "", test)
        for test in re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", result.stdout, re.M)
    }


@pytest.mark.slow
@pytest.mark.timeout(3300)
def test_sqlalchemys_dialect_suite_fails_only_where_it_fails_on_sqlite3(tmp_path: Path) -> None:
    """Some tests fail for both, because SQLAlchemy's own list of SQLite's limitations is not used."""
    sqlite_failures = failures(tmp_path / "sqlite", f"sqlite:///{tmp_path}/plain.db")
    quire_failures = failures(tmp_path / "quire", f"quire:///{tmp_path}/store/test")
    assert not quire_failures - sqlite_failures
