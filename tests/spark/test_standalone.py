"""A realistic cluster: a master and two workers as processes, executors without access to the store's directory,
objects in S3. Executors and drivers are killed, and S3 is unavailable for a while.
"""

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
from tests.jobs.mirrored_store import read_databases, sorted_rows
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
        """Start a driver, and wait for its session."""
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
        """The executor processes of the workers."""
        processes = []
        for worker in self.workers:
            for process in psutil.Process(worker.pid).children(recursive=True):
                try:
                    if any("CoarseGrainedExecutorBackend" in word for word in process.cmdline()):
                        processes.append(process)
                except psutil.Error:
                    continue  # the process has ended
        return processes


def last_line_of(driver: subprocess.Popen[str]) -> str:
    """The last line of the output of a driver that succeeds."""
    out, error = driver.communicate(timeout=SECONDS)
    assert driver.returncode == 0, error[-4_000:]
    return out.splitlines()[-1]


def start_spark_process(
    environment: dict[str, str], cwd: Path, name: str, *words: str
) -> tuple[subprocess.Popen[str], str]:
    """Start a Spark process by its class. Returns it with the log line that reports its start."""
    java = os.path.join(environment["JAVA_HOME"], "bin", "java")
    opens = ["--add-opens=java.base/sun.nio.ch=ALL-UNNAMED", "--add-opens=java.base/java.nio=ALL-UNNAMED"]
    command = [java, "-Xmx256m", *opens, "-cp", JARS, f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1", *words]
    process = subprocess.Popen(command, env=environment, cwd=cwd, text=True, stderr=subprocess.PIPE)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "Starting Spark master at" in line or "Successfully registered with master" in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()  # so that its pipe never fills up
            return process, line
    raise AssertionError("".join(lines)[-3_000:])


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
        # The directory from which workers start executors; without the version they look for a build of Spark's sources.
        environment |= {"SPARK_HOME": os.path.dirname(pyspark.__file__), "SPARK_SCALA_VERSION": "2.13"}
        processes: list[subprocess.Popen[str]] = []
        with quire.open(base / "store", settings=unseen_store("standalone")) as store:
            fill(store)
            server = store.serve("grpc+tls://127.0.0.1:0", tls_cert_file=cert_file, tls_key_file=key_file)
            token = str(base / "store" / "admin.token")
            options = {"store": server.address, "tls_ca_file": cert_file, "token_file": token}
            try:
                master, line = start_spark_process(
                    environment, base, "master.Master", "--port", "0", "--webui-port", "0"
                )
                processes.append(master)
                url = line.split()[-1]
                for number in range(2):
                    work = str(base / f"worker-{number}")
                    words = ["--webui-port", "0", "--cores", "1", "--memory", "800m", "--work-dir", work, url]
                    processes.append(start_spark_process(environment, base, "worker.Worker", *words)[0])
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
def test_a_read_survives_a_killed_executor(cluster: Cluster) -> None:
    driver = cluster.drive("count")
    while not (running := cluster.executors()):
        assert driver.poll() is None
    running[0].kill()
    assert json.loads(last_line_of(driver)) == EXPECTED


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_read_survives_an_outage_of_s3(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the next forty requests, of the owner and of the executors."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication

    served = DomainDispatcherApplication.__call__
    refused: list[str] = []

    def refuse_some(self: Any, environ: dict[str, Any], start_response: Any) -> Any:
        if len(refused) < 40:
            refused.append(environ["PATH_INFO"])
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        return served(self, environ, start_response)

    with closing(cluster.store.sqlite("shop")) as shop, shop:
        shop.execute("UPDATE orders SET who = who WHERE id = 1")
    monkeypatch.setattr(DomainDispatcherApplication, "__call__", refuse_some)
    assert json.loads(last_line_of(cluster.drive("count"))) == EXPECTED
    assert len(refused) == 40


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_driver_killed_after_its_batch_was_written_duplicates_nothing(
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
    assert last_line_of(cluster.drive("stream", str(tmp_path))) == "written"
    with closing(cluster.store.sqlite("shop")) as shop:
        ids = [number for (number,) in shop.execute("SELECT id FROM copied ORDER BY id")]
        assert ids == [10 * number + row for number in range(3) for row in range(5)]
        assert list(shop.execute("SELECT batch FROM quire_sinks")) == [(2,)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_mirror_survives_killed_executors_and_drivers(cluster: Cluster, tmp_path: Path) -> None:
    """Files are written by executors that only have access to buckets, and each change is in the table once."""
    store_path = str(tmp_path / "mirrored")
    driver = cluster.drive("mirror", store_path)
    while not (running := cluster.executors()):
        assert driver.poll() is None
    running[0].kill()
    first = json.loads(last_line_of(driver))
    assert (first["runner"], first["full"], first["rows_written"]) == ("spark", True, 16_000)
    # Killed between the table's commit and its adoption: the next driver finds the batch number in the table.
    killed = cluster.drive("mirror", store_path, "jobs.mirror.committed")
    killed.communicate(timeout=SECONDS)
    assert killed.returncode == -signal.SIGKILL
    third = json.loads(last_line_of(cluster.drive("mirror", store_path)))
    assert (third["runner"], third["full"], third["changed"]) == ("spark", False, 1)
    assert third["batch_id"] > first["batch_id"] + 1
    rows = sorted_rows(DeltaTable(LAKE).to_pyarrow_table().to_pylist())
    with quire.open(store_path, "r") as store:
        assert store.mirrors.status("lake").changed == 0
        assert rows == read_databases(store)
