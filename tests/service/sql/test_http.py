"""Hrana over HTTP: pipelines, batons, cursors, version 1, names, keys."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.core.limits import MIB
from quire.service.signed_tokens import create_token
from quire.store.store import Store
from tests.service.sql.world import CLOSE, SqlAsker, execute, plain_rows, sql_served, statement
from tests.service.web.world import Asker


def until(happened: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_bare_url_is_the_default_database(asker: SqlAsker, store: Store) -> None:
    assert asker.once("create table t(a)")["type"] == "ok"
    assert asker.once("insert into t values (?)", 2**53 + 1)["type"] == "ok"
    assert asker.rows("select a from t") == [(2**53 + 1,)]
    assert [info.name for info in store.databases()] == ["default"]


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_a_transaction_belongs_to_its_stream(asker: SqlAsker, version: str) -> None:
    asker.once("create table t(a)")
    stream = SqlAsker(asker.address, version)
    stream.run("begin")
    stream.run("insert into t values (1)")
    assert asker.rows("select * from t") == []
    assert stream.pipeline({"type": "get_autocommit"})[0]["response"] == {
        "type": "get_autocommit",
        "is_autocommit": False,
    }
    results = stream.pipeline(execute("commit"), CLOSE)
    assert [result["type"] for result in results] == ["ok", "ok"]
    assert stream.baton is None
    assert asker.rows("select * from t") == [(1,)]


def test_what_is_not_committed_is_gone_when_the_stream_is_closed(asker: SqlAsker) -> None:
    asker.once("create table t(a)")
    stream = SqlAsker(asker.address)
    stream.run("begin immediate")
    stream.run("insert into t values (1)")
    stream.pipeline(CLOSE)
    assert asker.rows("select * from t") == []
    asker.once("insert into t values (2)")


def test_wrong_replayed_and_foreign_batons_are_refused(asker: SqlAsker, store: Store) -> None:
    store.create("crm", "pages")
    stream = SqlAsker(asker.address)
    stream.run("select 1")
    used, _ = stream.baton, stream.run("select 2")
    for baton, headers, code in (
        (used, {}, "BATON_REUSED"),
        ("nonsense", {}, "BATON_INVALID"),
        (stream.baton, {"x_namespace": "crm"}, "BATON_INVALID"),
    ):
        for path, rest in (("/v3/pipeline", {"requests": []}), ("/v3/cursor", {"batch": {"steps": []}})):
            told = asker.post(path, {"baton": baton, **rest}, **headers)
            assert (told.status, told.json["code"]) == (400, code)
    stream.run("select 3")


def test_an_idle_transaction_is_rolled_back_and_its_lock_is_free(path: Path) -> None:
    with sql_served(path, sql_transaction_seconds=0.3) as (_, asker):
        asker.once("create table t(a)")
        stream = SqlAsker(asker.address)
        stream.run("begin immediate")
        stream.run("insert into t values (1)")
        assert asker.once("insert into t values (2)")["type"] == "ok"  # it waited for the lock
        told = stream.post("/v3/pipeline", {"baton": stream.baton, "requests": [execute("commit")]})
        assert (told.status, told.json["code"]) == (400, "STREAM_EXPIRED")
        assert asker.rows("select a from t") == [(2,)]


def test_a_write_waits_for_the_lock_and_is_told_busy_in_the_end(path: Path) -> None:
    with sql_served(path, sql_lock_seconds=0.2) as (store, asker):
        asker.once("create table t(a)")
        holder = store.sqlite("default")
        holder.execute("begin immediate")
        for result in (
            asker.once("insert into t values (1)"),
            SqlAsker(asker.address).pipeline(execute("begin immediate"))[0],
        ):
            assert result["error"]["code"] == "SQLITE_BUSY"
        holder.execute("rollback")
        holder.close()
        assert asker.once("insert into t values (1)")["type"] == "ok"


def test_a_request_that_fails_leaves_the_rest_of_its_pipeline(asker: SqlAsker) -> None:
    results = asker.pipeline(execute("create table t(a)"), execute("selec"), execute("insert into t values (1)"), CLOSE)
    assert [result["type"] for result in results] == ["ok", "error", "ok", "ok"]
    assert results[1]["error"]["code"] == "SQLITE_ERROR"


def test_stored_sql_lives_with_its_stream(asker: SqlAsker) -> None:
    asker.pipeline({"type": "store_sql", "sql_id": 1, "sql": "select 7"})
    (result,) = asker.pipeline({"type": "execute", "stmt": {"sql_id": 1}})
    assert plain_rows(result["response"]["result"]["rows"]) == [(7,)]
    results = asker.pipeline({"type": "close_sql", "sql_id": 1}, {"type": "describe", "sql_id": 1}, CLOSE)
    assert [result["type"] for result in results] == ["ok", "error", "ok"]


# ── cursors ───────────────────────────────────────────────────────────────────────────────────────────────────────────
NUMBERS = (
    "with recursive n(i) as (select 1 union all select i + 1 from n where i < {}) select i, printf('%080d', i) from n"
)


def test_a_cursor_answers_line_by_line(asker: SqlAsker) -> None:
    lines = asker.lines(
        {"stmt": statement(NUMBERS.format(2_000))},
        {"stmt": statement("selec")},
        {"stmt": statement("select 'skipped'"), "condition": {"type": "ok", "step": 1}},
        {"stmt": statement("select 'done'"), "condition": {"type": "error", "step": 2}},
    )
    kinds = [line["type"] for line in lines]
    assert kinds == ["step_begin", *["row"] * 2_000, "step_end", "step_error", "step_begin", "row", "step_end"]
    assert [int(line["row"][0]["value"]) for line in lines[1:2_001]] == [*range(1, 2_001)]


def test_a_request_with_the_baton_of_a_cursor_waits_for_its_end(asker: SqlAsker) -> None:
    """`libsql` sends one as soon as it has the first line."""
    body = json.dumps({"batch": {"steps": [{"stmt": statement(NUMBERS.format(60_000))}]}}).encode()
    head = f"POST /v3/cursor HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(Asker(asker.address).place, timeout=60) as connection:
        connection.sendall(head + body)
        data = b""
        while b'"baton"' not in data or not data.endswith(b"\r\n"):
            data += connection.recv(4_096)
        baton = json.loads(data[data.index(b'{"baton"') :].splitlines()[0])["baton"]
        later: list[Any] = []
        stream = SqlAsker(asker.address, baton=baton)
        thread = threading.Thread(target=lambda: later.append(stream.run("select 5")))
        thread.start()
        assert not later
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(1 << 16)
        thread.join(60)
    assert plain_rows(later[0]["result"]["rows"]) == [(5,)]
    assert data.count(b'"type":"row"') == 60_000


def test_a_client_that_leaves_a_cursor_is_rolled_back(asker: SqlAsker) -> None:
    asker.once("create table t(a, b)")
    steps = [{"stmt": statement("begin immediate")}, {"stmt": statement(NUMBERS.format(2_000_000))}]
    body = json.dumps({"batch": {"steps": steps}}).encode()
    head = f"POST /v3/cursor HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(Asker(asker.address).place, timeout=60) as connection:
        connection.sendall(head + body)
        connection.recv(4_096)
    assert asker.once("insert into t values (1, 2)")["type"] == "ok"


# ── version 1, protobuf ───────────────────────────────────────────────────────────────────────────────────────────────
def test_version_one_answers_with_the_result_alone(asker: SqlAsker) -> None:
    told = asker.post("/v1/execute", {"stmt": statement("select 1 as one")})
    assert told.json["result"]["cols"][0]["name"] == "one"
    told = asker.post("/v1/batch", {"batch": {"steps": [{"stmt": statement("select 1")}]}})
    assert told.json["result"]["step_errors"] == [None]
    told = asker.post("/v1/execute", {"stmt": statement("selec")})
    assert (told.status, told.json["code"]) == (400, "SQLITE_ERROR")


def test_clients_are_told_which_versions_there_are(asker: SqlAsker) -> None:
    answers = {path: Asker(asker.address).get(path).status for path in ("/v2", "/v3", "/v3-protobuf", "/db/x/v3")}
    assert answers == {"/v2": 200, "/v3": 200, "/v3-protobuf": 404, "/db/x/v3": 200}


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[1]", b'{"requests":[{"type":"fly"}]}', b'{"requests":[{"type":"close"},{"type":"close"}]}']
)
def test_a_body_that_cannot_be_read_is_a_clear_error(asker: SqlAsker, body: bytes) -> None:
    told = Asker(asker.address).ask("POST", "/v2/pipeline", body)
    assert told.status == 400
    assert told.json["message"]


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_database_is_named_by_header_host_or_path(asker: SqlAsker, store: Store) -> None:
    for name in ("shop", "crm", "blog"):
        connection = store.sqlite(name, create=True)
        connection.execute(f"create table t as select '{name}' as name")
        connection.close()
    query = "select name from t"
    port = Asker(asker.address).place[1]
    assert SqlAsker(asker.address, headers={"x_namespace": "shop"}).rows(query) == [("shop",)]
    assert SqlAsker(asker.address, headers={"host": f"crm.localhost:{port}"}).rows(query) == [("crm",)]
    assert SqlAsker(asker.address, prefix="/db/blog").rows(query) == [("blog",)]
    both = SqlAsker(asker.address, prefix="/db/blog", headers={"x_namespace": "shop"})
    assert both.rows(query) == [("shop",)]
    assert SqlAsker(asker.address, prefix="/db/blog/").rows(query) == [("blog",)]  # /db/blog//v2/pipeline
    cut = Asker(asker.address).post("/db/v2/pipeline", {"requests": [CLOSE]})  # v2/pipeline, resolved against /db/blog
    assert (cut.status, cut.json["code"]) == (404, "DATABASE_NOT_NAMED")
    assert "ends with a slash" in cut.json["message"], "what clients show of an error"
    told = SqlAsker(asker.address, prefix="/db/none").post("/v2/pipeline", {"requests": [CLOSE]})
    assert told.status == 404


def test_namespaces_are_created_forked_at_any_moment_and_dropped(asker: SqlAsker, store: Store, path: Path) -> None:
    admin = Asker(asker.address, (path / "admin.token").read_text("utf-8").strip())
    assert Asker(asker.address).post("/v1/namespaces/shop/create").status in (401, 403)
    assert admin.post("/v1/namespaces/shop/create", {}).status == 200
    assert admin.post("/v1/namespaces/shop/create", {}).status == 409
    shop = SqlAsker(asker.address, prefix="/db/shop")
    shop.once("create table t(a)")
    shop.once("insert into t values (1)")
    ((epoch,),) = shop.rows("pragma quire_epoch")
    store.snapshot("shop", "monday")
    shop.once("insert into t values (2)")
    for new, body in (("now", {}), ("old", {"at": int(epoch)}), ("kept", {"at": "monday"})):
        assert admin.post(f"/v1/namespaces/shop/fork/{new}", body).status == 200
    fork = SqlAsker(asker.address, prefix="/db/old")
    assert fork.rows("select a from t") == [(1,)]
    assert SqlAsker(asker.address, prefix="/db/kept").rows("select a from t") == [(1,)]
    assert SqlAsker(asker.address, prefix="/db/now").rows("select a from t") == [(1,), (2,)]
    assert SqlAsker(asker.address, prefix="/db/shop@monday").rows("select a from t") == [(1,)]
    for name in ("shop@0s", "shop@0%20seconds%20ago"):
        assert SqlAsker(asker.address, prefix=f"/db/{name}").rows("select count(*) from t") == [(2,)]
    nowhere = SqlAsker(asker.address, prefix="/db/shop@someday").post("/v2/pipeline", {"requests": [CLOSE]})
    assert nowhere.status == 404
    assert Asker(asker.address).post("/v1/namespaces/shop/rollback", {"to": "monday"}).status in (401, 403)
    assert admin.post("/v1/namespaces/shop/rollback", {}).status == 400
    assert admin.post("/v1/namespaces/shop/rollback", {"to": "someday"}).status == 404
    done = admin.post("/v1/namespaces/shop/rollback", {"to": "monday"}).json
    assert (done["database"], done["snapshot"]) == ("shop", f"before-rollback-{done['before_lsn']}")
    assert shop.rows("select a from t") == [(1,)]
    assert admin.post("/v1/namespaces/shop/rollback", {"to": done["before_lsn"]}).status == 200
    assert shop.rows("select a from t") == [(1,), (2,)]
    first = Asker(asker.address).get("/v1/namespaces?limit=2").json
    rest = Asker(asker.address).get(f"/v1/namespaces?limit=2&after={first['next']}").json
    assert [one["name"] for one in first["namespaces"] + rest["namespaces"]] == ["kept", "now", "old", "shop"]
    assert admin.ask("DELETE", "/v1/namespaces/old").status == 200
    assert fork.post("/v2/pipeline", {"requests": [execute("select 1"), CLOSE]}).status == 404
    refused = admin.ask("DELETE", "/v1/namespaces/shop")
    assert refused.status == 409  # it has a snapshot
    assert "?snapshots=true" in refused.json["hint"]
    assert admin.ask("DELETE", "/v1/namespaces/shop?snapshots=true").status == 200
    assert admin.post("/v1/namespaces/shop/undrop").json["name"] == "shop"
    assert shop.rows("select a from t") == [(1,), (2,)]
    assert admin.ask("DELETE", "/v1/namespaces/shop?snapshots=true&now=true").status == 200
    assert admin.post("/v1/namespaces/shop/undrop").status == 404


def test_who_may_only_read_is_told_how_to_write(path: Path) -> None:
    with sql_served(path, http_anonymous_writes=False) as (store, asker):
        store.sqlite("default", create=True).close()
        told = asker.once("create table t(a)")["error"]
        assert told["code"] == "SQLITE_READONLY"
        assert "attempt to write a readonly database: this caller may only read" in told["message"]
        assert "admin.token" in told["message"]
        token = (path / "admin.token").read_text("utf-8").strip()
        assert asker.once("create table t(a)", authorization=f"Bearer {token}")["type"] == "ok"


def test_a_token_may_name_databases_to_attach(path: Path) -> None:
    with sql_served(path, http_anonymous_writes=False) as (store, asker):
        for name in ("shop", "prices", "secret"):
            with closing(store.sqlite(name, create=True)) as connection:
                connection.execute(f"create table {name}_rows(a); insert into {name}_rows values ('{name}')")
        store.create("empty", "pages")
        shop = SqlAsker(asker.address, prefix="/db/shop")
        token = create_token(str(path), ["shop"], attach=["prices", "empty"])
        bearer = {"authorization": f"Bearer {token}"}

        def outcomes(*sql: str) -> list[str]:
            body = {"requests": [*map(execute, sql), CLOSE]}
            answers = shop.post("/v2/pipeline", body, **bearer).json["results"][:-1]
            return [answer.get("error", {}).get("code", "ok") for answer in answers]

        attach, read = "attach 'prices' as p", "select * from shop_rows, p.prices_rows"
        assert outcomes(attach, read, "insert into p.prices_rows values (1)") == ["ok", "ok", "SQLITE_READONLY"]
        assert outcomes(read) == ["SQLITE_ERROR"]  # the connection is not used again
        for refused in ("attach 'secret' as s", "attach 'none' as s", "attach 'empty' as s", "vacuum into 'empty'"):
            assert outcomes(refused) == ["SQLITE_AUTH"], refused
        assert outcomes("vacuum into 'prices'") == ["SQLITE_ERROR"]
        assert [info.name for info in store.databases()] == ["empty", "prices", "secret", "shop"]
        assert shop.once(attach)["error"]["code"] == "SQLITE_AUTH"  # without a token


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_pipeline_with_a_key_is_done_once(asker: SqlAsker) -> None:
    asker.once("create table t(a)")
    insert = "insert into t values (1)"
    first = asker.once(insert, Idempotency_Key="k1")
    assert asker.once(insert, Idempotency_Key="k1") == first
    asker.once(insert, Idempotency_Key="k2")
    assert asker.rows("select count(*) from t") == [(2,)]
    told = asker.post("/v2/pipeline", {"requests": [execute("delete from t"), CLOSE]}, Idempotency_Key="k1")
    assert (told.status, told.json["code"]) == (400, "IDEMPOTENCY_KEY_REUSED")


def test_a_batch_with_a_key_has_its_transactions_inside(asker: SqlAsker) -> None:
    asker.once("create table t(a unique)")

    def batch(*values: int) -> dict[str, Any]:
        steps: list[dict[str, Any]] = [{"stmt": statement("begin")}]
        for number, value in enumerate(values):
            steps.append(
                {"stmt": statement("insert into t values (?)", value), "condition": {"type": "ok", "step": number}}
            )
        steps.append({"stmt": statement("commit"), "condition": {"type": "ok", "step": len(values)}})
        last: dict[str, Any] = {"type": "not", "cond": {"type": "ok", "step": len(values) + 1}}
        steps.append({"stmt": statement("rollback"), "condition": last})
        return {"type": "batch", "batch": {"steps": steps}}

    for _ in range(2):
        (done, _) = asker.pipeline(batch(1, 2), CLOSE, Idempotency_Key="good")
        assert done["response"]["result"]["step_errors"] == [None] * 5
    (failed, _) = asker.pipeline(batch(3, 1), CLOSE, Idempotency_Key="bad")
    assert failed["response"]["result"]["step_errors"][2]["code"] == "SQLITE_CONSTRAINT"
    assert asker.rows("select a from t order by a") == [(1,), (2,)]


def test_a_pipeline_with_a_key_that_failed_may_be_sent_again(asker: SqlAsker) -> None:
    assert asker.once("insert into t values (1)", Idempotency_Key="k")["type"] == "error"
    asker.once("create table t(a)")
    assert asker.once("insert into t values (1)", Idempotency_Key="k")["type"] == "ok"
    assert asker.rows("select count(*) from t") == [(1,)]


# ── the lane ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_one_shots_do_not_see_each_others_connection(asker: SqlAsker) -> None:
    """They share one: a transaction, a temporary table or a pragma that one leaves is gone for the next."""
    asker.once("create table t(a)")
    batch = {
        "type": "batch",
        "batch": {"steps": [{"stmt": statement("begin")}, {"stmt": statement("insert into t values (1)")}]},
    }
    asker.pipeline(batch, CLOSE)
    asker.once("create temp table x(a)")
    assert asker.once("insert into x values (1)")["error"]["code"] == "SQLITE_ERROR"
    result = asker.once("update t set a = 5")
    assert result["response"]["result"]["last_insert_rowid"] == "0"
    assert asker.rows("select * from t") == []


def test_many_writers_at_once_are_all_written(asker: SqlAsker) -> None:
    asker.once("create table t(a)")

    def write(number: int) -> None:
        for offset in range(10):
            assert asker.once("insert into t values (?)", number * 10 + offset)["type"] == "ok"

    threads = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert asker.rows("select count(*), count(distinct a) from t") == [(120, 120)]


def test_one_open_transaction_and_forty_waiting_writers(path: Path) -> None:
    """The holder's COMMIT finds a thread although far more writers wait than there are threads, and all of them succeed."""
    with sql_served(path, sql_threads=2) as (_, asker):
        asker.once("create table t(a)")
        holder = SqlAsker(asker.address)
        holder.run("begin immediate")
        holder.run("insert into t values (0)")
        results: list[str] = []

        def write(number: int) -> None:
            if number % 2:
                results.append(asker.once("insert into t values (?)", number)["type"])
                return
            stream = SqlAsker(asker.address)
            stream.run("begin immediate")
            stream.run("insert into t values (?)", number)
            results.append(stream.pipeline(execute("commit"), CLOSE)[0]["type"])

        threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 41)]
        for thread in threads:
            thread.start()
        until(lambda: len(threading.enumerate()) > 40)
        time.sleep(0.3)  # most of them have sent their statement; none can have finished
        assert not results
        response = holder.pipeline(execute("commit"))[0]["response"]
        assert response["result"]["query_duration_ms"] < 2_000
        for thread in threads:
            thread.join(120)
        assert results == ["ok"] * 40
        assert asker.rows("select count(*) from t") == [(41,)]


def test_a_row_of_many_large_values_is_refused_before_it_is_made(path: Path) -> None:
    """Each value is within SQLite's limit, and 20 of them would be 1.2 GB, twice."""

    def columns(count: int, size: int) -> str:
        return "select " + ", ".join([f"randomblob({size})"] * count)

    with sql_served(path) as (_, asker):
        before = psutil.Process().memory_info().rss
        wide = columns(20, 60_000_000)
        error = asker.pipeline(execute(wide), CLOSE)[0]["error"]
        assert error["code"] == "SQLITE_TOOBIG"
        assert "13,421,772 bytes in a row of so many columns" in error["message"]
        assert SqlAsker(asker.address).lines({"stmt": {"sql": wide}})[0]["error"]["code"] == "SQLITE_TOOBIG"
        assert psutil.Process().memory_info().rss - before < 100 * MIB
        assert asker.run(columns(20, 100_000))["type"] == "execute"
        assert asker.run("select length(randomblob(60000000))")["type"] == "execute", "a single one may be as large"
        text = Asker(asker.address).ask("GET", "/metrics").body.decode()
        assert 'quire_http_limited_total{limit="sql_answers"} 2.0' in text


def test_the_answers_of_a_pipeline_are_bounded_together(path: Path) -> None:
    with sql_served(path, sql_answer_bytes_max=10_000) as (_, asker):
        for requests in (
            [execute("select hex(zeroblob(3000))")] * 2 + [CLOSE],
            [execute("select hex(zeroblob(3000))")] * 2,
        ):
            first, second = asker.pipeline(*requests)[:2]
            assert first["type"] == "ok"
            assert second["error"]["code"] == "RESPONSE_TOO_LARGE"
        assert asker.run("select hex(zeroblob(3000))")["type"] == "execute"  # another answer of the stream
