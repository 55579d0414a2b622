"""Datasette with the plugin: databases and snapshots of a store are databases in it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from datasette.app import Datasette
from datasette.plugins import pm

import quire
from quire.core.errors import InvalidInput
from quire.integrations import datasette as plugin
from quire.integrations.datasette_databases import StoreDatabases
from quire.sqlite import dbapi


def run(use: Callable[[Datasette], Awaitable[Any]], *, crossdb: bool = False, **config: Any) -> Any:
    if not pm.is_registered(plugin):
        pm.register(plugin)

    async def main() -> Any:
        datasette = Datasette([], metadata={"plugins": {"quire": config}}, crossdb=crossdb)
        await datasette.invoke_startup()
        return await use(datasette)

    return asyncio.run(main())


async def rows(datasette: Datasette, address: str) -> Any:
    answer = await datasette.client.get(address)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_databases_and_snapshots_are_databases(shop: Path) -> None:
    async def use(datasette: Datasette) -> None:
        shown = {row["name"]: row for row in await rows(datasette, "/-/databases.json")}
        assert set(shown) == {"_memory", "shop", "shop@monday"}
        assert (shown["shop"]["is_mutable"], shown["shop@monday"]["is_mutable"]) == (True, False)
        assert shown["shop"]["size"] == shown["shop@monday"]["size"] > 0
        assert [row["item"] for row in await rows(datasette, "/shop/orders.json?_shape=array")] == ["tea", "milk"]
        assert [row["item"] for row in await rows(datasette, "/shop~40monday/orders.json?_shape=array")] == ["tea"]
        for page in ("/", "/shop", "/shop/orders", "/shop/orders/1", "/shop~40monday/orders.csv"):
            assert (await datasette.client.get(page)).status_code == 200
        wrong = await datasette.client.get("/shop.json?sql=select+nosuch")
        assert (wrong.status_code, wrong.json()["error"]) == (400, "no such column: nosuch")
        endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"
        slow = await datasette.client.get("/shop.json", params={"sql": endless, "_timelimit": "5"})
        assert slow.status_code == 400
        assert "took too long" in slow.text
        write = f"from quire.sqlite import dbapi; dbapi.connect('{shop}/shop').executescript('delete from orders')"
        subprocess.run([sys.executable, "-c", write], timeout=250, check=True)  # the plugin does not own the store
        assert await rows(datasette, "/shop/orders.json?_shape=array") == []

    run(use, store=str(shop))


def test_databases_created_and_dropped_meanwhile_appear_and_disappear(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.integrations.datasette_databases.REFRESH_SECONDS", 0.0)

    async def use(datasette: Datasette) -> None:
        assert "shop@monday" in {row["name"] for row in await rows(datasette, "/-/databases.json")}
        assert len(await rows(datasette, "/shop~40monday/orders.json?_shape=array")) == 1
        store.manifest.snapshots.drop("shop", "monday")
        store.snapshot("shop", "monday")
        store.fork("shop", "what-if")
        assert "what-if" in {row["name"] for row in await rows(datasette, "/-/databases.json")}
        assert len(await rows(datasette, "/shop~40monday/orders.json?_shape=array")) == 2
        store.drop("what-if")
        assert "what-if" not in {row["name"] for row in await rows(datasette, "/-/databases.json")}

    with quire.open(shop) as store:
        run(use, store=[str(shop)])


def test_plugins_can_write_if_allowed(shop: Path) -> None:
    async def insert(datasette: Datasette) -> None:
        await datasette.get_database("shop").execute_write("insert into orders(item) values ('rum')")

    with quire.open(shop) as store:
        with pytest.raises(dbapi.OperationalError, match="readonly"):
            run(insert, store=str(shop))
        run(insert, store=str(shop), write=True)
        assert store.sqlite("shop").execute("select count(*) from orders").get == 3


def test_operations_that_need_a_file_are_refused_without_damage(shop: Path) -> None:
    async def use(datasette: Datasette) -> None:
        assert (await datasette.client.get("/shop~40monday.db")).status_code in (403, 404)
        answer = await rows(datasette, "/_memory.json?sql=select+1+as+one&_shape=array")
        assert answer == [{"one": 1}]

    run(use, crossdb=True, store=str(shop))


def test_unknown_settings_are_refused(shop: Path) -> None:
    with pytest.raises(InvalidInput, match="no such setting"):
        StoreDatabases(None, {"stores": str(shop)})
    with pytest.raises(InvalidInput, match="path of a store"):
        StoreDatabases(None, {"databases": "*"})

    async def names(datasette: Datasette) -> set[str]:
        return {row["name"] for row in await rows(datasette, "/-/databases.json")}

    assert run(names, store=str(shop), databases="s*", snapshots=False) == {"_memory", "shop"}


def test_without_configuration_nothing_is_loaded() -> None:
    code = (
        "import asyncio, sys; from datasette.app import Datasette; from datasette.plugins import pm\n"
        "from quire.integrations import datasette as plugin; pm.is_registered(plugin) or pm.register(plugin)\n"
        "asyncio.run(Datasette([]).invoke_startup())\n"
        "print({'quire.store', 'quire.sqlite.dbapi', 'apsw', 'lmdb'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert result.stdout == "set()\n"
