"""Hrana over HTTP: pipelines, batons, cursors, version 1, namespaces, idempotency keys."""

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
from tests.service.sql.hrana_client import CLOSE, HranaClient, execute, plain_rows, sql_served, statement
from tests.service.web.http_client import HttpClient


def until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


def test_a_bare_url_is_the_default_database(hrana: HranaClient, store: Store) -> None:
    assert hrana.once("create table t(a)")["type"] == "ok"
    assert hrana.once("insert into t values (?)", 2**53 + 1)["type"] == "ok"
    assert hrana.rows("select a from t") == [(2**53 + 1,)]
    assert [info.name for info in store.databases()] == ["default"]


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_a_transaction_belongs_to_its_stream(hrana: HranaClient, version: str) -> None:
    hrana.once("create table t(a)")
    stream = HranaClient(hrana.address, version)
    stream.run("begin")
    stream.run("insert into t values (1)")
    assert hrana.rows("select * from t") == []
    assert stream.pipeline({"type": "get_autocommit"})[0]["response"] == {
        "type": "get_autocommit",
        "is_autocommit": False,
    }
    results = stream.pipeline(execute("commit"), CLOSE)
    assert [result["type"] for result in results] == ["ok", "ok"]
    assert stream.baton is None
    assert hrana.rows("select * from t") == [(1,)]


def test_closing_a_stream_rolls_back_uncommitted_changes(hrana: HranaClient) -> None:
    hrana.once("create table t(a)")
    stream = HranaClient(hrana.address)
    stream.run("begin immediate")
    stream.run("insert into t values (1)")
    stream.pipeline(CLOSE)
    assert hrana.rows("select * from t") == []
    hrana.once("insert into t values (2)")


def test_wrong_replayed_and_foreign_batons_are_refused(hrana: HranaClient, store: Store) -> None:
    store.create("crm", "pages")
    stream = HranaClient(hrana.address)
    stream.run("select 1")
    used, _ = stream.baton, stream.run("select 2")
    for baton, headers, code in (
        (used, {}, "BATON_REUSED"),
        ("nonsense", {}, "BATON_INVALID"),
        (stream.baton, {"x_namespace": "crm"}, "BATON_INVALID"),
    ):
        for path, rest in (("/v3/pipeline", {"requests": []}), ("/v3/cursor", {"batch": {"steps": []}})):
            response = hrana.post(path, {"baton": baton, **rest}, **headers)
            assert (response.status, response.json["code"]) == (400, code)
    stream.run("select 3")


def test_an_idle_transaction_is_rolled_back_and_its_lock_is_free(path: Path) -> None:
    with sql_served(path, sql_transaction_seconds=0.3) as (_, hrana):
        hrana.once("create table t(a)")
        stream = HranaClient(hrana.address)
        stream.run("begin immediate")
        stream.run("insert into t values (1)")
        assert hrana.once("insert into t values (2)")["type"] == "ok"  # it has waited for the lock
        response = stream.post("/v3/pipeline", {"baton": stream.baton, "requests": [execute("commit")]})
        assert (response.status, response.json["code"]) == (400, "STREAM_EXPIRED")
        assert hrana.rows("select a from t") == [(2,)]


def test_a_write_waits_for_the_lock_and_fails_with_busy_at_the_timeout(path: Path) -> None:
    with sql_served(path, sql_lock_seconds=0.2) as (store, hrana):
        hrana.once("create table t(a)")
        holder = store.sqlite("default")
        holder.execute("begin immediate")
        for result in (
            hrana.once("insert into t values (1)"),
            HranaClient(hrana.address).pipeline(execute("begin immediate"))[0],
        ):
            assert result["error"]["code"] == "SQLITE_BUSY"
        holder.execute("rollback")
        holder.close()
        assert hrana.once("insert into t values (1)")["type"] == "ok"


def test_a_failed_request_does_not_stop_the_rest_of_its_pipeline(hrana: HranaClient) -> None:
    results = hrana.pipeline(execute("create table t(a)"), execute("selec"), execute("insert into t values (1)"), CLOSE)
    assert [result["type"] for result in results] == ["ok", "error", "ok", "ok"]
    assert results[1]["error"]["code"] == "SQLITE_ERROR"


def test_stored_sql_lives_with_its_stream(hrana: HranaClient) -> None:
    hrana.pipeline({"type": "store_sql", "sql_id": 1, "sql": "select 7"})
    (result,) = hrana.pipeline({"type": "execute", "stmt": {"sql_id": 1}})
    assert plain_rows(result["response"]["result"]["rows"]) == [(7,)]
    results = hrana.pipeline({"type": "close_sql", "sql_id": 1}, {"type": "describe", "sql_id": 1}, CLOSE)
    assert [result["type"] for result in results] == ["ok", "error", "ok"]


# ── cursors ───────────────────────────────────────────────────────────────────────────────────────────────────────────
NUMBERS = (
    "with recursive n(i) as (select 1 union all select i + 1 from n where i < {}) select i, printf('%080d', i) from n"
)


def test_a_cursor_is_answered_line_by_line(hrana: HranaClient) -> None:
    lines = hrana.lines(
        {"stmt": statement(NUMBERS.format(2_000))},
        {"stmt": statement("selec")},
        {"stmt": statement("select 'skipped'"), "condition": {"type": "ok", "step": 1}},
        {"stmt": statement("select 'done'"), "condition": {"type": "error", "step": 2}},
    )
    kinds = [line["type"] for line in lines]
    assert kinds == ["step_begin", *["row"] * 2_000, "step_end", "step_error", "step_begin", "row", "step_end"]
    assert [int(line["row"][0]["value"]) for line in lines[1:2_001]] == [*range(1, 2_001)]


def test_a_request_with_the_baton_of_a_cursor_waits_for_its_end(hrana: HranaClient) -> None:
    """Hazard: `libsql` sends the next request as soon as it has the first line."""
    body = json.dumps({"batch": {"steps": [{"stmt": statement(NUMBERS.format(60_000))}]}}).encode()
    head = f"POST /v3/cursor HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(HttpClient(hrana.address).host_and_port, timeout=60) as connection:
        connection.sendall(head + body)
        data = b""
        while b'"baton"' not in data or not data.endswith(b"\r\n"):
            data += connection.recv(4_096)
        baton = json.loads(data[data.index(b'{"baton"') :].splitlines()[0])["baton"]
        later: list[Any] = []
        stream = HranaClient(hrana.address, baton=baton)
        thread = threading.Thread(target=lambda: later.append(stream.run("select 5")))
        thread.start()
        assert not later
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(1 << 16)
        thread.join(60)
    assert plain_rows(later[0]["result"]["rows"]) == [(5,)]
    assert data.count(b'"type":"row"') == 60_000


def test_a_transaction_is_rolled_back_when_its_client_abandons_a_cursor(hrana: HranaClient) -> None:
    hrana.once("create table t(a, b)")
    steps = [{"stmt": statement("begin immediate")}, {"stmt": statement(NUMBERS.format(2_000_000))}]
    body = json.dumps({"batch": {"steps": steps}}).encode()
    head = f"POST /v3/cursor HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(HttpClient(hrana.address).host_and_port, timeout=60) as connection:
        connection.sendall(head + body)
        connection.recv(4_096)
    assert hrana.once("insert into t values (1, 2)")["type"] == "ok"


# ── version 1, protobuf ───────────────────────────────────────────────────────────────────────────────────────────────
def test_version_one_answers_with_the_result_alone(hrana: HranaClient) -> None:
    response = hrana.post("/v1/execute", {"stmt": statement("select 1 as one")})
    assert response.json["result"]["cols"][0]["name"] == "one"
    response = hrana.post("/v1/batch", {"batch": {"steps": [{"stmt": statement("select 1")}]}})
    assert response.json["result"]["step_errors"] == [None]
    response = hrana.post("/v1/execute", {"stmt": statement("selec")})
    assert (response.status, response.json["code"]) == (400, "SQLITE_ERROR")


def test_supported_versions_are_announced(hrana: HranaClient) -> None:
    answers = {path: HttpClient(hrana.address).get(path).status for path in ("/v2", "/v3", "/v3-protobuf", "/db/x/v3")}
    assert answers == {"/v2": 200, "/v3": 200, "/v3-protobuf": 404, "/db/x/v3": 200}


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[1]", b'{"requests":[{"type":"fly"}]}', b'{"requests":[{"type":"close"},{"type":"close"}]}']
)
def test_a_body_that_cannot_be_read_is_a_clear_error(hrana: HranaClient, body: bytes) -> None:
    response = HttpClient(hrana.address).request("POST", "/v2/pipeline", body)
    assert response.status == 400
    assert response.json["message"]


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_database_is_named_by_header_host_or_path(hrana: HranaClient, store: Store) -> None:
    for name in ("shop", "crm", "blog"):
        connection = store.sqlite(name, create=True)
        connection.execute(f"create table t as select '{name}' as name")
        connection.close()
    query = "select name from t"
    port = HttpClient(hrana.address).host_and_port[1]
    assert HranaClient(hrana.address, headers={"x_namespace": "shop"}).rows(query) == [("shop",)]
    assert HranaClient(hrana.address, headers={"host": f"crm.localhost:{port}"}).rows(query) == [("crm",)]
    assert HranaClient(hrana.address, prefix="/db/blog").rows(query) == [("blog",)]
    both = HranaClient(hrana.address, prefix="/db/blog", headers={"x_namespace": "shop"})
    assert both.rows(query) == [("shop",)]
    assert HranaClient(hrana.address, prefix="/db/blog/").rows(query) == [("blog",)]  # /db/blog//v2/pipeline
    cut = HttpClient(hrana.address).post(
        "/db/v2/pipeline", {"requests": [CLOSE]}
    )  # v2/pipeline, resolved against /db/blog
    assert (cut.status, cut.json["code"]) == (404, "DATABASE_NOT_NAMED")
    assert "ends with a slash" in cut.json["message"], "clients show the message"
    response = HranaClient(hrana.address, prefix="/db/none").post("/v2/pipeline", {"requests": [CLOSE]})
    assert response.status == 404


def test_namespaces_are_created_forked_at_any_moment_and_dropped(hrana: HranaClient, store: Store, path: Path) -> None:
    admin = HttpClient(hrana.address, (path / "admin.token").read_text("utf-8").strip())
    assert HttpClient(hrana.address).post("/v1/namespaces/shop/create").status in (401, 403)
    assert admin.post("/v1/namespaces/shop/create", {}).status == 200
    assert admin.post("/v1/namespaces/shop/create", {}).status == 409
    shop = HranaClient(hrana.address, prefix="/db/shop")
    shop.once("create table t(a)")
    shop.once("insert into t values (1)")
    ((epoch,),) = shop.rows("pragma quire_epoch")
    store.snapshot("shop", "monday")
    shop.once("insert into t values (2)")
    for new, body in (("now", {}), ("old", {"at": int(epoch)}), ("kept", {"at": "monday"})):
        assert admin.post(f"/v1/namespaces/shop/fork/{new}", body).status == 200
    fork = HranaClient(hrana.address, prefix="/db/old")
    assert fork.rows("select a from t") == [(1,)]
    assert HranaClient(hrana.address, prefix="/db/kept").rows("select a from t") == [(1,)]
    assert HranaClient(hrana.address, prefix="/db/now").rows("select a from t") == [(1,), (2,)]
    assert HranaClient(hrana.address, prefix="/db/shop@monday").rows("select a from t") == [(1,)]
    for name in ("shop@0s", "shop@0%20seconds%20ago"):
        assert HranaClient(hrana.address, prefix=f"/db/{name}").rows("select count(*) from t") == [(2,)]
    nowhere = HranaClient(hrana.address, prefix="/db/shop@someday").post("/v2/pipeline", {"requests": [CLOSE]})
    assert nowhere.status == 404
    assert HttpClient(hrana.address).post("/v1/namespaces/shop/rollback", {"to": "monday"}).status in (401, 403)
    assert admin.post("/v1/namespaces/shop/rollback", {}).status == 400
    assert admin.post("/v1/namespaces/shop/rollback", {"to": "someday"}).status == 404
    done = admin.post("/v1/namespaces/shop/rollback", {"to": "monday"}).json
    assert (done["database"], done["snapshot"]) == ("shop", f"before-rollback-{done['before_lsn']}")
    assert shop.rows("select a from t") == [(1,)]
    assert admin.post("/v1/namespaces/shop/rollback", {"to": done["before_lsn"]}).status == 200
    assert shop.rows("select a from t") == [(1,), (2,)]
    first = HttpClient(hrana.address).get("/v1/namespaces?limit=2").json
    rest = HttpClient(hrana.address).get(f"/v1/namespaces?limit=2&after={first['next']}").json
    assert [one["name"] for one in first["namespaces"] + rest["namespaces"]] == ["kept", "now", "old", "shop"]
    assert admin.request("DELETE", "/v1/namespaces/old").status == 200
    assert fork.post("/v2/pipeline", {"requests": [execute("select 1"), CLOSE]}).status == 404
    refused = admin.request("DELETE", "/v1/namespaces/shop")
    assert refused.status == 409  # it has a snapshot
    assert "?snapshots=true" in refused.json["hint"]
    assert admin.request("DELETE", "/v1/namespaces/shop?snapshots=true").status == 200
    assert admin.post("/v1/namespaces/shop/undrop").json["name"] == "shop"
    assert shop.rows("select a from t") == [(1,), (2,)]
    assert admin.request("DELETE", "/v1/namespaces/shop?snapshots=true&now=true").status == 200
    assert admin.post("/v1/namespaces/shop/undrop").status == 404


def test_a_refused_write_explains_how_to_get_permission(path: Path) -> None:
    with sql_served(path, http_anonymous_writes=False) as (store, hrana):
        store.sqlite("default", create=True).close()
        response = hrana.once("create table t(a)")["error"]
        assert response["code"] == "SQLITE_READONLY"
        assert "attempt to write a readonly database: this caller may only read" in response["message"]
        assert "admin.token" in response["message"]
        token = (path / "admin.token").read_text("utf-8").strip()
        assert hrana.once("create table t(a)", authorization=f"Bearer {token}")["type"] == "ok"


def test_a_token_may_name_databases_to_attach(path: Path) -> None:
    with sql_served(path, http_anonymous_writes=False) as (store, hrana):
        for name in ("shop", "prices", "secret"):
            with closing(store.sqlite(name, create=True)) as connection:
                connection.execute(f"create table {name}_rows(a); insert into {name}_rows values ('{name}')")
        store.create("empty", "pages")
        shop = HranaClient(hrana.address, prefix="/db/shop")
        token = create_token(str(path), ["shop"], attach=["prices", "empty"])
        bearer = {"authorization": f"Bearer {token}"}

        def outcomes(*sql: str) -> list[str]:
            body = {"requests": [*map(execute, sql), CLOSE]}
            answers = shop.post("/v2/pipeline", body, **bearer).json["results"][:-1]
            return [answer.get("error", {}).get("code", "ok") for answer in answers]

        attach, read = "attach 'prices' as p", "select * from shop_rows, p.prices_rows"
        assert outcomes(attach, read, "insert into p.prices_rows values (1)") == ["ok", "ok", "SQLITE_READONLY"]
        assert outcomes(read) == ["SQLITE_ERROR"]  # the connection is not reused
        for refused in ("attach 'secret' as s", "attach 'none' as s", "attach 'empty' as s", "vacuum into 'empty'"):
            assert outcomes(refused) == ["SQLITE_AUTH"], refused
        assert outcomes("vacuum into 'prices'") == ["SQLITE_ERROR"]
        assert [info.name for info in store.databases()] == ["empty", "prices", "secret", "shop"]
        assert shop.once(attach)["error"]["code"] == "SQLITE_AUTH"  # without a token


def test_a_write_has_only_the_attach_rights_of_its_own_caller(path: Path) -> None:
    """Hazard: one-shot writes share a connection, which kept the rights of the caller for whom it was opened."""
    with sql_served(path, http_anonymous_writes=False) as (store, hrana):
        for name in ("shop", "secret"):
            with closing(store.sqlite(name, create=True)) as connection:
                connection.execute("create table t(a); insert into t values ('hidden')")
        batch: dict[str, Any] = {
            "type": "batch",
            "batch": {
                "steps": [
                    {"stmt": statement("attach 'secret' as s")},
                    {"stmt": statement("insert into t select a from s.t returning a")},
                ]
            },
        }

        def errors(token: str, request: dict[str, Any]) -> list[str | None]:
            shop = HranaClient(hrana.address, prefix="/db/shop", headers={"authorization": f"Bearer {token}"})
            result = shop.pipeline(request, CLOSE)[0]["response"]["result"]
            return [error and error["code"] for error in result.get("step_errors", [])]

        trusted, other = create_token(str(path), ["shop"], attach=["secret"]), create_token(str(path), ["shop"])
        insert = execute("insert into t values (1)")
        for _ in range(2):  # the lane's connection is opened for either caller first
            errors(trusted, insert)
            assert errors(other, batch) == ["SQLITE_AUTH", "SQLITE_ERROR"]
            errors(other, insert)
            assert errors(trusted, batch) == [None, None]


# ── idempotency keys ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_pipeline_with_a_key_is_executed_once(hrana: HranaClient) -> None:
    hrana.once("create table t(a)")
    insert = "insert into t values (1)"
    first = hrana.once(insert, Idempotency_Key="k1")
    assert hrana.once(insert, Idempotency_Key="k1") == first
    hrana.once(insert, Idempotency_Key="k2")
    assert hrana.rows("select count(*) from t") == [(2,)]
    response = hrana.post("/v2/pipeline", {"requests": [execute("delete from t"), CLOSE]}, Idempotency_Key="k1")
    assert (response.status, response.json["code"]) == (400, "IDEMPOTENCY_KEY_REUSED")


def test_a_batch_with_a_key_contains_its_transactions(hrana: HranaClient) -> None:
    hrana.once("create table t(a unique)")

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
        (done, _) = hrana.pipeline(batch(1, 2), CLOSE, Idempotency_Key="good")
        assert done["response"]["result"]["step_errors"] == [None] * 5
    (failed, _) = hrana.pipeline(batch(3, 1), CLOSE, Idempotency_Key="bad")
    assert failed["response"]["result"]["step_errors"][2]["code"] == "SQLITE_CONSTRAINT"
    assert hrana.rows("select a from t order by a") == [(1,), (2,)]


def test_a_failed_pipeline_with_a_key_can_be_repeated(hrana: HranaClient) -> None:
    assert hrana.once("insert into t values (1)", Idempotency_Key="k")["type"] == "error"
    hrana.once("create table t(a)")
    assert hrana.once("insert into t values (1)", Idempotency_Key="k")["type"] == "ok"
    assert hrana.rows("select count(*) from t") == [(1,)]


@pytest.mark.parametrize("as_batch", [False, True])
@pytest.mark.parametrize("rolls_back", ["insert or rollback into t values (1)", "insert into t values (-1)"])
def test_a_pipeline_with_a_key_that_sqlite_rolls_back_does_nothing(
    hrana: HranaClient, rolls_back: str, as_batch: bool
) -> None:
    """Hazard: the error ends the transaction of the whole pipeline. Later requests were committed one by one, without the key,
    and once more by each repeat."""
    hrana.once("create table t(a unique)")
    hrana.once("insert into t values (1)")
    hrana.once("create trigger r before insert on t when new.a < 0 begin select raise(rollback, 'no'); end")
    texts = ["begin", "insert into t values (2)", rolls_back, "insert into t values (3)", "commit", "create table u(a)"]
    for _ in range(2):
        if as_batch:
            steps = [{"stmt": statement(text)} for text in texts]
            (result, _) = hrana.pipeline({"type": "batch", "batch": {"steps": steps}}, CLOSE, Idempotency_Key="k")
            errors = result["response"]["result"]["step_errors"]
        else:
            results = hrana.pipeline(*map(execute, texts), CLOSE, Idempotency_Key="k")
            errors = [result.get("error") for result in results[:-1]]
        codes = [error and error["code"] for error in errors]
        assert codes == [None, None, "SQLITE_CONSTRAINT", "SQLITE_ABORT", "SQLITE_ABORT", "SQLITE_ABORT"]
        assert hrana.rows("select a from t") == [(1,)]
        assert hrana.rows("select count(*) from sqlite_schema where name = 'u'") == [(0,)]


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        ("ROLLBACK -- go back to the start", [3]),
        ("rollback /* to */ transaction", [3]),
        ('rollback transaction "to"', [3]),
        ("/* undo */ rollback -- x\n to savepoint s", [1, 3]),
        ("rollback transaction to s", [1, 3]),
        ("\ufeffrollback to s", [1, 3]),
        ("\ufeffcommit", [1, 2, 3]),
    ],
)
def test_no_statement_of_a_pipeline_with_a_key_ends_its_transaction(
    hrana: HranaClient, end: str, kept: list[int]
) -> None:
    """Hazard: a ROLLBACK whose comment contains TO, or a COMMIT after a byte order mark, ended the server's transaction."""
    hrana.once("create table t(a)")
    texts = ["begin", "insert into t values (1)", "savepoint s", "insert into t values (2)", end]
    texts += ["insert into t values (3)", *(["commit"] if kept == [1, 3] else [])]  # the transaction is still open
    for _ in range(2):
        results = hrana.pipeline(*map(execute, texts), CLOSE, Idempotency_Key="k")
        assert [result["type"] for result in results] == ["ok"] * (len(texts) + 1)
        assert hrana.rows("select a from t") == [(a,) for a in kept]


# ── one-shot requests ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_one_shots_leave_no_connection_state_behind(hrana: HranaClient) -> None:
    """One-shots share a connection: a transaction, a temporary table or a pragma of one must not affect the next."""
    hrana.once("create table t(a)")
    batch = {
        "type": "batch",
        "batch": {"steps": [{"stmt": statement("begin")}, {"stmt": statement("insert into t values (1)")}]},
    }
    hrana.pipeline(batch, CLOSE)
    hrana.once("create temp table x(a)")
    assert hrana.once("insert into x values (1)")["error"]["code"] == "SQLITE_ERROR"
    result = hrana.once("update t set a = 5")
    assert result["response"]["result"]["last_insert_rowid"] == "0"
    hrana.once("insert into t values (2), (3)")
    hrana.once("delete from t where changes() <> 0 or total_changes() <> 0")
    hrana.once("delete from t where a <> changes() + total_changes() and a = 2 and changes() = 0")
    assert hrana.rows("select a from t") == [(3,)]
    hrana.once("delete from t")
    assert hrana.rows("select * from t") == []


def test_concurrent_writers_all_succeed(hrana: HranaClient) -> None:
    hrana.once("create table t(a)")

    def write(number: int) -> None:
        for offset in range(10):
            assert hrana.once("insert into t values (?)", number * 10 + offset)["type"] == "ok"

    threads = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert hrana.rows("select count(*), count(distinct a) from t") == [(120, 120)]


def test_one_open_transaction_and_forty_waiting_writers(path: Path) -> None:
    """The holder's COMMIT gets a thread although far more writers wait than there are threads, and all of them
    succeed."""
    with sql_served(path, sql_threads=2) as (_, hrana):
        hrana.once("create table t(a)")
        holder = HranaClient(hrana.address)
        holder.run("begin immediate")
        holder.run("insert into t values (0)")
        results: list[str] = []

        def write(number: int) -> None:
            if number % 2:
                results.append(hrana.once("insert into t values (?)", number)["type"])
                return
            stream = HranaClient(hrana.address)
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
        assert hrana.rows("select count(*) from t") == [(41,)]


def test_a_row_of_many_large_values_is_refused_before_it_is_built(path: Path) -> None:
    """Each value is within SQLite's limit, but 20 of them need 1.2 GB, twice."""

    def columns(count: int, size: int) -> str:
        return "select " + ", ".join([f"randomblob({size})"] * count)

    with sql_served(path) as (_, hrana):
        before = psutil.Process().memory_info().rss
        wide = columns(20, 60_000_000)
        error = hrana.pipeline(execute(wide), CLOSE)[0]["error"]
        assert error["code"] == "SQLITE_TOOBIG"
        assert "13,421,772 bytes in a row of so many columns" in error["message"]
        assert HranaClient(hrana.address).lines({"stmt": {"sql": wide}})[0]["error"]["code"] == "SQLITE_TOOBIG"
        assert psutil.Process().memory_info().rss - before < 100 * MIB
        assert hrana.run(columns(20, 100_000))["type"] == "execute"
        assert hrana.run("select length(randomblob(60000000))")["type"] == "execute", "a single value may be that large"
        text = HttpClient(hrana.address).request("GET", "/metrics").body.decode()
        assert 'quire_http_limited_total{limit="sql_answers"} 2.0' in text


def test_the_total_answer_of_a_pipeline_is_bounded(path: Path) -> None:
    with sql_served(path, sql_answer_bytes_max=10_000) as (_, hrana):
        for requests in (
            [execute("select hex(zeroblob(3000))")] * 2 + [CLOSE],
            [execute("select hex(zeroblob(3000))")] * 2,
        ):
            first, second = hrana.pipeline(*requests)[:2]
            assert first["type"] == "ok"
            assert second["error"]["code"] == "RESPONSE_TOO_LARGE"
        assert hrana.run("select hex(zeroblob(3000))")["type"] == "execute"  # another answer of the same stream
