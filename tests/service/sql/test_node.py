"""Node clients from the npm registry: `@libsql/client` and `drizzle-orm`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.service.sql.hrana_client import owner

PACKAGES = ("@libsql/client@0.17", "drizzle-orm@0.45")

PROGRAM = """
import assert from "node:assert";
import { createClient } from "@libsql/client";
import { drizzle } from "drizzle-orm/libsql";
import { integer, sqliteTable, text } from "drizzle-orm/sqlite-core";
import { eq } from "drizzle-orm";

const client = createClient({ url: process.argv[2], intMode: "bigint" });
await client.batch(["drop table if exists t", "create table t(id integer primary key, a, b)"], "write");
await client.execute({ sql: "insert into t(a, b) values (?, ?)", args: [9007199254740993n, new Uint8Array([0, 1])] });
const first = (await client.execute("select a, b from t")).rows[0];
assert.strictEqual(first.a, 9007199254740993n);
assert.deepStrictEqual(new Uint8Array(first.b), new Uint8Array([0, 1]));

const transaction = await client.transaction("write");
await transaction.execute("insert into t(a) values (1)");
await transaction.rollback();
assert.strictEqual((await client.execute("select count(*) as n from t")).rows[0].n, 1n);
await assert.rejects(client.execute("insert into absent values (1)"), { code: "SQLITE_ERROR" });

const items = sqliteTable("items", { id: integer("id").primaryKey(), name: text("name").notNull() });
const second = createClient({ url: process.argv[2] });
const orm = drizzle(second);
await client.batch(["drop table if exists items", "create table items(id integer primary key, name text not null)"], "write");
await orm.transaction(async (inside) => {
    await inside.insert(items).values([{ name: "pen" }, { name: "ink" }]);
});
await orm.update(items).set({ name: "quill" }).where(eq(items.name, "pen"));
assert.deepStrictEqual(await orm.select().from(items), [{ id: 1, name: "quill" }, { id: 2, name: "ink" }]);
const nameless = createClient({ url: process.argv[2].replace("ws:", "http:") + "/db/default" });
await assert.rejects(nameless.execute("select 1"), { code: "DATABASE_NOT_NAMED" });
const named = createClient({ url: process.argv[2] + "/db/default/" });
await named.execute("select 1");
named.close();
client.close();
second.close();
console.log("done");
"""


@pytest.mark.slow
def test_libsql_client_and_drizzle(path: Path, tmp_path: Path) -> None:
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("Node is not installed")
    (tmp_path / "package.json").write_text('{"type": "module"}', "utf-8")
    (tmp_path / "program.mjs").write_text(PROGRAM, "utf-8")
    install = ["npm", "install", "--no-audit", "--no-fund", *PACKAGES]
    if subprocess.run(install, cwd=tmp_path, capture_output=True, timeout=250).returncode:
        pytest.skip("the packages cannot be installed")
    with owner(path) as hrana:
        for url in (hrana.address, hrana.address.replace("http", "ws", 1)):
            command = ["node", "program.mjs", url]
            result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
            assert result.stdout.strip() == "done", result.stderr
