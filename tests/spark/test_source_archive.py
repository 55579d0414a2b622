"""Sources read a store from its bucket alone: the rows are those of the owner at that cut, without the owner's
directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import quire
from quire.core.errors import AccessDenied, InvalidInput, StoreNotFound
from quire.core.settings import ArchiveSettings, MaintenanceSettings, ObjectSettings, StoreSettings
from quire.objects import StoreOptions
from quire.service import archive_copies
from quire.service.archive_copies import CopyRequest, driver_of, served_copy
from quire.spark import options_of
from quire.spark.access import access_of
from quire.spark.sources.sqlite import SqliteSource
from quire.spark.sources.stream import StreamSource
from tests.objects.conftest import CREDENTIALS, fresh_url, s3_server

__all__ = ["s3_server"]  # a fixture

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_rows_of_every_kind_are_read_from_the_bucket(spark: SparkSession, tmp_path: Path) -> None:
    settings = StoreSettings(
        object_store=str(tmp_path / "bucket"),
        maintenance=MaintenanceSettings(enabled=False),
        archive=ArchiveSettings(mode="async"),
    )
    with quire.open(tmp_path / "store", settings=settings) as store:
        with store.sqlite("shop", create=True) as db:
            db.execute("create table item(n integer primary key)")
            db.executemany("insert into item values (?)", [(n,) for n in range(300)])
        store.checkpoint("shop")
        with store.sqlite("shop") as db:
            db.execute("insert into item values (300)")  # only in the WAL
        store.create("cart", "lsm")
        for n in range(100):
            store.kv("cart").put(b"%03d" % n, b"v", sync=False)
        store.kv("cart").flush()
        store.kv("cart").put(b"logged", b"w")
        store.create("events", "stream")
        store.stream("events").append([b"r%d" % n for n in range(50)]).result()
        store.stream("events").seal()
        store.stream("events").append(b"open").result()
        expected = dict(store.kv("cart").scan())
    os.rename(tmp_path / "store", tmp_path / "gone")
    with quire.open_archive(str(tmp_path / "bucket")) as archived:
        options = options_of(archived)
        assert options["store"] != str(tmp_path / "store")

        def rows(source: str, **source_options: str) -> list[tuple[Any, ...]]:
            frame = spark.read.format(source).options(**options, **source_options).load()
            return [tuple(row) for row in frame.collect()]

        numbers = rows("quire.sqlite", database="shop", table="item")
        assert sorted(numbers) == [(n,) for n in range(301)]
        pairs = {bytes(key): bytes(value) for key, value in rows("quire.kv", database="cart")}
        assert pairs == expected
        records = rows("quire.stream", stream="events", columns="payload")
        assert [bytes(payload) for (payload,) in records] == [*(b"r%d" % n for n in range(50)), b"open"]
        frame = spark.createDataFrame([("k", "v")], ["key", "value"])
        with pytest.raises(Exception, match="copy of an archive"):
            frame.write.format("quire.kv").mode("append").options(**options, database="cart").save()


def in_async(url: str, **objects: Any) -> StoreSettings:
    return StoreSettings(
        object_store=url,
        objects=ObjectSettings(**objects),
        maintenance=MaintenanceSettings(enabled=False),
        archive=ArchiveSettings(mode="async"),
    )


def archived(store: quire.Store) -> None:
    assert store.archive is not None
    store.archive.wait()


def fill(store: quire.Store) -> None:
    with store.sqlite("shop", create=True) as db:
        db.execute("create table item(n integer primary key)")
        db.executemany("insert into item values (?)", [(n,) for n in range(100)])
    store.checkpoint("shop")
    store.snapshot("shop", "first")
    with store.sqlite("shop") as db:
        db.execute("insert into item values (100)")
        db.execute("delete from item where n = 7")
    store.kv("cart", create=True).put(b"alice", b"3 apples")
    store.stream("events", create=True).append([b"one", b"two"]).result()
    store.create("late", "lsm")  # a change after the base
    archived(store)


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of this test's records of copies; their processes end with the test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def recording_popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", recording_popen)
    yield tmp_path / "quire"
    for process in started:
        with suppress(ProcessLookupError, ChildProcessError):  # a process that could not open its store
            os.kill(process.pid, signal.SIGTERM)
            os.waitpid(process.pid, 0)


def test_sources_read_a_standby_by_its_directory(
    spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    endpoint = "http://{}:{}".format(*request.getfixturevalue("s3_server"))
    url = fresh_url()
    reached = {"endpoint": endpoint, "region": "us-east-1", "allow_http": True, "credentials": CREDENTIALS}
    (tmp_path / "store").mkdir()
    lines = [f'object_store = "{url}"', "[objects]", f'endpoint = "{endpoint}"', 'region = "us-east-1"']
    lines += ["allow_http = true", 'credentials = { access_key_id = "testing", secret_access_key = "testing" }']
    (tmp_path / "store" / "quire.toml").write_text("\n".join(lines) + "\n")
    options = StoreOptions(endpoint=endpoint, region="us-east-1", allow_http=True, settings=CREDENTIALS)
    with quire.open(tmp_path / "store", settings=in_async(url, **reached)) as store:
        fill(store)
        sequence = store.feed.head()
    os.rename(tmp_path / "store", tmp_path / "gone")
    with quire.Standby(url, tmp_path / "standby", options=options) as standby:
        standby.poll()

        def rows(source: str, **source_options: str) -> list[tuple[Any, ...]]:
            frame = spark.read.format(source).options(store=str(tmp_path / "standby"), **source_options).load()
            return [tuple(row) for row in frame.collect()]

        numbers = [n for n in range(101) if n != 7]
        assert sorted(rows("quire.sqlite", database="shop", table="item")) == [(n,) for n in numbers]
        assert sorted(rows("quire.sqlite", database="shop", table="item", snapshot="first")) == [
            (n,) for n in range(100)
        ]
        assert [(bytes(key), bytes(value)) for key, value in rows("quire.kv", database="cart")] == [
            (b"alice", b"3 apples")
        ]
        records = rows("quire.stream", stream="events", columns="payload")
        assert [bytes(payload) for (payload,) in records] == [b"one", b"two"]
        source_options = {"database": "shop", "table": "item", "from": "first"}
        changed_rows = {(row[2], row[-1]) for row in rows("quire.rows", **source_options)}
        assert changed_rows == {("insert", 100), ("delete", 7)}
        changes = rows("quire.changes", columns="sequence,kinds")
        assert changes[-1][0] >= sequence
        assert any("RegisterDb" in kinds for _, kinds in changes)
        frame = spark.createDataFrame([("k", "v")], ["key", "value"])
        with pytest.raises(Exception, match="copy of an archive"):
            frame.write.format("quire.kv").mode("append").options(store=standby.path, database="cart").save()
        query = spark.readStream.format("quire.stream").options(store=standby.path, stream="events", consumer="etl")
        writer = query.load().writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
        with pytest.raises(Exception, match="copy of an archive"):
            writer.trigger(availableNow=True).start().awaitTermination()


def test_a_bucket_is_read_by_its_url_with_the_environments_credentials(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, copies: Path
) -> None:
    url = fresh_url()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*request.getfixturevalue("s3_server")))
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    with quire.open(tmp_path / "store", settings=in_async(url)) as store:
        fill(store)
        between = datetime.now(UTC).isoformat()
        time.sleep(0.01)
        store.stream("events").append(b"three").result()
        archived(store)

    def payloads(**more: str) -> list[bytes]:
        options = StreamSource.parse({"store": url, "stream": "events", "columns": "payload", **more})
        reader = StreamSource.READER(options, StreamSource({**options._given}).schema())
        return [
            row["payload"] for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()
        ]

    assert payloads() == [b"one", b"two", b"three"]
    assert payloads(archived_at=between) == [b"one", b"two"]


def test_a_copy_is_reused_while_it_is_fresh_and_removed_at_its_end(
    tmp_path: Path, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = str(tmp_path / "bucket")
    with quire.open(tmp_path / "store", settings=in_async(bucket)) as store:
        fill(store)
    first = access_of({"store": bucket})
    assert first.is_copy
    assert access_of({"store": bucket}) == first
    with pytest.raises(AccessDenied, match="copy of an archive"), first.connect() as client:
        client.kv("cart").put(b"a", b"b")
    monkeypatch.setattr(archive_copies, "FRESH_SECONDS", 0)
    second = access_of({"store": bucket})
    assert second != first, "an older copy stays for its readers, and a new query gets a newer one"
    with first.connect() as client, second.connect() as other:
        assert client.kv("cart").get(b"alice") == other.kv("cart").get(b"alice") == b"3 apples"


def test_a_copy_ends_with_its_driver(tmp_path: Path) -> None:
    bucket = str(tmp_path / "bucket")
    with quire.open(tmp_path / "store", settings=in_async(bucket)) as store:
        fill(store)
    program = "import sys\nfrom quire.spark.access import access_of\nprint(access_of({'store': sys.argv[1]}).uri)"
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", program, bucket], env=environment, capture_output=True, text=True, check=True
    )
    scratch = Path(answer.stdout.strip().removeprefix("grpc+unix://")).parent
    ends = time.monotonic() + 60
    while scratch.exists():
        assert time.monotonic() < ends
        time.sleep(0.1)


def test_a_restored_directory_is_read_as_of_its_restore_time(tmp_path: Path, copies: Path) -> None:
    bucket = str(tmp_path / "bucket")
    with quire.open(tmp_path / "store", settings=in_async(bucket)) as store:
        fill(store)
        restored = quire.restore(bucket, tmp_path / "restored")
        with store.sqlite("shop") as db:
            db.execute("insert into item values (1000)")
        archived(store)
    options = SqliteSource.parse({"store": restored.path, "database": "shop", "table": "item"})
    source = SqliteSource({**options._given})
    reader = source.reader(source.schema())
    numbers = [row["n"] for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert sorted(numbers) == [n for n in range(101) if n != 7]


def test_a_failure_to_open_is_an_error_of_the_query(tmp_path: Path, copies: Path) -> None:
    with quire.open(tmp_path / "store", settings=in_async(str(tmp_path / "bucket"))) as store:
        fill(store)
        with pytest.raises(InvalidInput, match="`archived_at` needs an archive"):
            access_of({**options_of(store), "archived_at": "5m"})
    with pytest.raises(InvalidInput, match="does not reach back"):
        access_of({"store": str(tmp_path / "bucket"), "archived_at": "2001-02-03"})
    with pytest.raises(InvalidInput, match="archived_at"):
        served_copy(CopyRequest(url=str(tmp_path / "bucket"), at="tomorrow, perhaps"))
    with pytest.raises(StoreNotFound):
        access_of({"store": str(tmp_path / "nothing")})


def test_the_driver_is_the_parent_jvm_or_the_process_itself(tmp_path: Path) -> None:
    assert driver_of(os.getpid()) == os.getpid()
    shutil.copy(shutil.which("bash") or "/bin/bash", tmp_path / "java")
    java = subprocess.Popen([tmp_path / "java", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
    assert java.stdout is not None
    below = int(java.stdout.readline())
    while psutil.Process(below).name() == "java":  # forked, but exec() has not run yet
        time.sleep(0.01)
    assert driver_of(below) == java.pid
    os.kill(below, signal.SIGTERM)
    java.wait()
    java.stdout.close()
