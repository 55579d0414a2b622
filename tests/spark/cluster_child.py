"""A driver with executors in separate processes (`local-cluster`), for tests of what executors can access.

    python -m tests.spark.cluster_child objects BASE          all bytes are in S3 (moto, TLS), the owner is reached over
    TCP
    python -m tests.spark.cluster_child archive BASE ARCHIVE  executors run the Python of a packed environment

It prints its results as a line of JSON.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import ssl
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.spark.access import options_of
from quire.spark.sessions import session
from tests.service.test_access import certificate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from quire.store.store import Store

CLUSTER = "local-cluster[2,1,1024]"
BUCKET = "quire-tests"
ROWS = 20_000


def started(config: dict[str, str]) -> SparkSession:
    return session(CLUSTER, memory="700m", config={"spark.executor.memory": "800m", **config})


def fill(store: Store) -> None:
    """Rows in chunks, and rows that are only in the log."""
    with store.sqlite("shop", create=True) as shop:
        shop.execute("create table orders(id integer primary key, who text)")
        shop.executemany("insert into orders values (?, ?)", [(n, f"w{n % 3}") for n in range(ROWS)])
    store.checkpoint("shop", runner="threads")
    with store.sqlite("shop") as shop:
        shop.execute("update orders set who = 'late' where id < 10")
    store.snapshot("shop", "monday")


def read_both(spark: SparkSession, options: dict[str, str]) -> dict[str, Any]:
    """Read the same snapshot with two sources."""
    at = {**options, "database": "shop", "snapshot": "monday"}
    orders = spark.read.format("quire.sqlite").options(**at, table="orders", partitions="4").load()
    pages = spark.read.format("quire.pages").options(**at).load()
    return {
        "orders": [tuple(row) for row in orders.groupBy("who").count().orderBy("who").collect()],
        "pages": pages.selectExpr("count(*)", "count(distinct data) > 1").first()[0],  # type: ignore[index]
    }


# ── objects ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def s3(cert_file: str, key_file: str) -> Iterator[str]:
    """An S3 server with TLS; yields its address."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from moto and its dependencies
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=True, ssl_context=(cert_file, key_file))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    trusting = ssl.create_default_context(cafile=cert_file)
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=trusting, timeout=30)
    connection.request("PUT", f"/{BUCKET}")
    assert connection.getresponse().status == 200
    connection.close()
    yield f"https://127.0.0.1:{server.port}"
    server.shutdown()
    thread.join()


def s3_environment(cert_file: str, endpoint: str) -> dict[str, str]:
    """The environment with which processes reach `s3`."""
    return {
        "SSL_CERT_FILE": cert_file,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
    }


def unseen_store(name: str) -> StoreSettings:
    """Settings of a store whose objects are in `s3` and whose directory is not visible to executors."""
    return StoreSettings(
        object_store=f"s3://{BUCKET}/{name}",
        maintenance=MaintenanceSettings(enabled=False, executors_see_store=False),
    )


def objects(base: Path) -> None:
    """Executors get a view and the object store's URL, but no access to the store's directory."""
    cert_file, key_file = certificate(base, "machine")
    with s3(cert_file, key_file) as endpoint:
        os.environ.update(s3_environment(cert_file, endpoint))
        with quire.open(base / "store", settings=unseen_store("store")) as store:
            fill(store)
            server = store.serve("grpc+tls://127.0.0.1:0", tls_cert_file=cert_file, tls_key_file=key_file)
            over_tcp = {"store": server.address, "tls_ca_file": cert_file}
            admin = {**over_tcp, "token_file": str(base / "store" / "admin.token")}
            reading = {**over_tcp, "token_file": str(base / "store" / "read.token")}
            spark = started({})
            refused = _error(spark, {**reading, "database": "shop", "snapshot": "monday", "table": "orders"})
            first = read_both(spark, admin)
            again = read_both(spark, reading)  # everything is in objects by now
            table = spark.read.format("quire.table").options(**reading, table="db").load().count()
            job = store.checkpoint("shop", runner="spark")
            report = {
                "first": first,
                "same_for_readers": first == again,
                "refused": "admin token" in refused,
                "secret_in_plan": _secret(admin) in _plan(spark, admin),
                "table": table,
                "roots": sorted(_roots(admin)),
                "job": job.state.name,
                "problems": [str(problem) for problem in store.manifest.check()],
            }
            print(json.dumps(report), flush=True)
            spark.stop()


def _error(spark: SparkSession, options: dict[str, str]) -> str:
    """The error for a client that may only read, while a segment is not uploaded yet."""
    try:
        spark.read.format("quire.sqlite").options(**options).load().count()
    except Exception as error:  # Spark wraps it in various types
        return str(error)
    return ""


def _secret(options: dict[str, str]) -> str:
    return Path(options["token_file"]).read_text().strip()


def _plan(spark: SparkSession, options: dict[str, str]) -> str:
    """Everything that Spark shows about a query."""
    frame: Any = spark.read.format("quire.sqlite").options(**options, database="shop", table="orders").load()
    return str(frame._jdf.queryExecution().toString())


def _roots(options: dict[str, str]) -> set[str]:
    """The directories that tasks are given: none."""
    from pyspark.sql.types import LongType, StructField, StructType

    from quire.spark.sources import sqlite

    parsed = sqlite.SqliteSource.parse({**options, "database": "shop", "snapshot": "monday", "table": "orders"})
    reader = sqlite.SqliteReader(parsed, StructType([StructField("id", LongType())]))
    return {piece.version.root for part in reader.partitions() for piece in part.value}


# ── archive ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def archive(base: Path, packed: str) -> None:
    """Workers report which Python they run, which also reads rows of SQLite."""
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False, executors_see_store=True))
    with quire.open(base / "store", settings=settings) as store:
        fill(store)
        spark = started({"spark.archives": f"{packed}#env", "spark.pyspark.python": "./env/bin/python"})

        def describe_worker(batches):  # type: ignore[no-untyped-def]  # pickled by value
            import sys

            import pyarrow as pa

            import quire.pages.view

            for batch in batches:
                row = {"prefix": [sys.prefix], "quire": [quire.pages.view.__file__]}
                yield pa.RecordBatch.from_pydict({name: values * batch.num_rows for name, values in row.items()})

        interpreters = (
            spark.range(4)
            .repartition(4)
            .mapInArrow(describe_worker, "prefix string, quire string")
            .distinct()
            .collect()
        )
        report = {
            "asked": read_both(spark, options_of(store)),
            "places": [[row.prefix, row.quire] for row in interpreters],
            "job": store.checkpoint("shop", runner="spark").state.name,
        }
        print(json.dumps(report), flush=True)
        spark.stop()


if __name__ == "__main__":
    if sys.argv[1] == "objects":
        objects(Path(sys.argv[2]))
    else:
        archive(Path(sys.argv[2]), sys.argv[3])
