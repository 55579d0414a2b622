"""A cluster as it is run elsewhere: a master and two workers in processes of their own, executors that see nothing of the
store's directory, objects in S3. Executors and drivers are killed, and S3 is away for a while."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyspark
import pytest
from deltalake import DeltaTable

import quire
from quire.service.loads import Loads
from quire.spark.java import find_java, quiet_home
from tests.jobs.mirror_world import read_databases, sorted_rows
from tests.rules.tree import ROOT
from tests.service.test_access import certificate
from tests.spark.cluster_child import fill, s3, s3_environment, unseen_store
from tests.spark.standalone_child import LAKE
from tests.spark.test_cluster import EXPECTED

JARS = os.path.join(os.path.dirname(pyspark.__file__), "jars", "*")
SECONDS = 400


@dataclass
class Cluster:
    """A master, its workers, and the store's owner, which is this process."""

    master: str
    store: quire.Store
    options: dict[str, str]
    workers: list[subprocess.Popen[str]]
    environment: dict[str, str]
    drivers: list[subprocess.Popen[str]] = field(default_factory=list)

    def drive(self, *words: str) -> subprocess.Popen[str]:
        """A driver that has its session."""
        command = [
            sys.executable,
            "-m",
            "tests.spark.standalone_child",
            self.master,
            words[0],
            json.dumps(self.options),
        ]
        driver = subprocess.Popen(
            [*command, *words[1:]],
            env=self.environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.drivers.append(driver)
        assert driver.stdout is not None
        line = driver.stdout.readline()
        assert line == "started\n", driver.communicate()[1][-3_000:]
        return driver

    def executors(self) -> list[psutil.Process]:
        """Processes of executors that the workers have started."""
        found = []
        for worker in self.workers:
            for process in psutil.Process(worker.pid).children(recursive=True):
                try:
                    if any("CoarseGrainedExecutorBackend" in word for word in process.cmdline()):
                        found.append(process)
                except psutil.Error:
                    continue  # it has ended meanwhile
        return found


def ended(driver: subprocess.Popen[str]) -> str:
    """The last line of a driver that succeeds."""
    out, error = driver.communicate(timeout=SECONDS)
    assert driver.returncode == 0, error[-4_000:]
    return out.splitlines()[-1]


def started(environment: dict[str, str], cwd: Path, name: str, *words: str) -> tuple[subprocess.Popen[str], str]:
    """A process of Spark's, by its class, and the line of its log that says that it is up."""
    java = os.path.join(environment["JAVA_HOME"], "bin", "java")
    opens = ["--add-opens=java.base/sun.nio.ch=ALL-UNNAMED", "--add-opens=java.base/java.nio=ALL-UNNAMED"]
    command = [java, "-Xmx256m", *opens, "-cp", JARS, f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1", *words]
    process = subprocess.Popen(command, env=environment, cwd=cwd, text=True, stderr=subprocess.PIPE)
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "Starting Spark master at" in line or "Successfully registered with master" in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()  # so that it never waits for us
            return process, line
    raise AssertionError("".join(seen)[-3_000:])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    base = tmp_path_factory.mktemp("standalone")
    cert_file, key_file = certificate(base, "machine")
    with (
        s3(cert_file, key_file) as endpoint,
        set_environment(**s3_environment(cert_file, endpoint)),
    ):
        environment = {**os.environ, "JAVA_HOME": quiet_home(find_java()), "PYTHONPATH": str(ROOT)}
        environment["SPARK_LOCAL_IP"] = "127.0.0.1"
        # Where workers start executors from; without the version they look for a build of Spark's sources.
        environment |= {"SPARK_HOME": os.path.dirname(pyspark.__file__), "SPARK_SCALA_VERSION": "2.13"}
        processes: list[subprocess.Popen[str]] = []
        with quire.open(base / "store", settings=unseen_store("standalone")) as store:
            fill(store)
            server = store.serve("grpc+tls://127.0.0.1:0", tls_cert_file=cert_file, tls_key_file=key_file)
            token = str(base / "store" / "admin.token")
            options = {"store": server.address, "tls_ca_file": cert_file, "token_file": token}
            try:
                master, line = started(environment, base, "master.Master", "--port", "0", "--webui-port", "0")
                processes.append(master)
                url = line.split()[-1]
                for number in range(2):
                    work = str(base / f"worker-{number}")
                    words = ["--webui-port", "0", "--cores", "1", "--memory", "800m", "--work-dir", work, url]
                    processes.append(started(environment, base, "worker.Worker", *words)[0])
                cluster = Cluster(url, store, options, processes[1:], environment)
                yield cluster
                processes += cluster.drivers
                assert store.manifest.check() == []
            finally:
                for process in processes:
                    process.kill()
                    process.communicate()


@contextmanager
def set_environment(**values: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_executor_is_killed_while_it_reads(cluster: Cluster) -> None:
    driver = cluster.drive("count")
    while not (running := cluster.executors()):
        assert driver.poll() is None
    running[0].kill()
    assert json.loads(ended(driver)) == EXPECTED


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_s3_is_away_for_a_while(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the next forty requests, of the owner's and the executors'."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication

    served = DomainDispatcherApplication.__call__
    refused: list[str] = []

    def away(self: Any, environ: dict[str, Any], start_response: Any) -> Any:
        if len(refused) < 40:
            refused.append(environ["PATH_INFO"])
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        return served(self, environ, start_response)

    with closing(cluster.store.sqlite("shop")) as shop, shop:
        shop.execute("UPDATE orders SET who = who WHERE id = 1")
    monkeypatch.setattr(DomainDispatcherApplication, "__call__", away)
    assert json.loads(ended(cluster.drive("count"))) == EXPECTED
    assert len(refused) == 40


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_driver_is_killed_when_its_batch_was_written(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        path = tmp_path / "in" / f"{number}.json"
        path.write_text("".join(json.dumps({"id": 10 * number + row}) + "\n" for row in range(5)))
        os.utime(path, (1_700_000_000 + number,) * 2)
    written = Loads.insert
    kills: list[int] = []

    def kill_after_the_second(self: Loads, request: Any) -> int:
        rows = written(self, request)
        if request.batch == 1 and not kills:
            kills.append(cluster.drivers[-1].pid)
            os.killpg(kills[0], signal.SIGKILL)
        return rows

    monkeypatch.setattr(Loads, "insert", kill_after_the_second)
    first = cluster.drive("stream", str(tmp_path))
    first.communicate(timeout=SECONDS)
    assert first.returncode == -signal.SIGKILL
    assert ended(cluster.drive("stream", str(tmp_path))) == "written"
    with closing(cluster.store.sqlite("shop")) as shop:
        found = [number for (number,) in shop.execute("SELECT id FROM copied ORDER BY id")]
        assert found == [10 * number + row for number in range(3) for row in range(5)]
        assert list(shop.execute("SELECT batch FROM quire_sinks")) == [(2,)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_mirror_outlives_its_executors_and_its_driver(cluster: Cluster, tmp_path: Path) -> None:
    """Files are written by executors that see buckets only, and each change is in the table once."""
    where = str(tmp_path / "mirrored")
    driver = cluster.drive("mirror", where)
    while not (running := cluster.executors()):
        assert driver.poll() is None
    running[0].kill()
    first = json.loads(ended(driver))
    assert (first["runner"], first["full"], first["rows_written"]) == ("spark", True, 16_000)
    # Between the table's commit and its adoption: the next driver finds the number of the batch in the table.
    killed = cluster.drive("mirror", where, "jobs.mirror.committed")
    killed.communicate(timeout=SECONDS)
    assert killed.returncode == -signal.SIGKILL
    third = json.loads(ended(cluster.drive("mirror", where)))
    assert (third["runner"], third["full"], third["changed"]) == ("spark", False, 1)
    assert third["batch_id"] > first["batch_id"] + 1
    found = sorted_rows(DeltaTable(LAKE).to_pyarrow_table().to_pylist())
    with quire.open(where, "r") as store:
        assert store.mirrors.status("lake").changed == 0
        assert found == read_databases(store)
