"""Sessions that know quire: the configuration of a new one, and the reuse of a running one."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from quire.core.errors import SparkUnavailable
from quire.spark import sessions
from quire.spark.java import Java


def test_a_running_session_is_used(spark: SparkSession) -> None:
    """The object may differ (a stream has its own session); the application is the same."""
    assert sessions.session("local[1]", app="another").conf.get("spark.app.id") == spark.conf.get("spark.app.id")


def test_a_running_session_keeps_its_settings_whatever_thread_asks(spark: SparkSession) -> None:
    """Hazard: a thread that had no active session created one with quire's settings, which Spark gave to the running one."""
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    spark.conf.set(name, "77")
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(sessions.session).result()
        assert spark.conf.get(name) == "77"
    finally:
        spark.conf.set(name, str(before))


def test_threads_that_need_a_session_at_the_same_time_start_one_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: the jobs of several stores (`run_stores`) each started a JVM, and all but one of them stayed without work."""
    launched = list[str]()
    running = list[Any]()

    def active() -> Any:
        if not running:
            raise PySparkRuntimeError("there is no session")
        return running[0]

    def launch(_: dict[str, str]) -> None:
        launched.append("JVM")
        time.sleep(0.2)  # the others look for a session in the meantime

    def created() -> Any:
        running.append(SimpleNamespace())
        return running[0]

    builder = Mock(getOrCreate=created)
    builder.config.return_value = builder
    for target, name, value in (
        (SparkSession, "active", active),
        (SparkSession, "builder", builder),
        (sessions, "launch", launch),
        (sessions, "attach", lambda spark: spark),
        (sessions, "find_java", lambda: Java("/java", 17, "PATH")),
        (sessions, "quiet_home", lambda java: java.home),
        (sessions, "choose_python", lambda _: None),
    ):
        monkeypatch.setattr(target, name, value)
    monkeypatch.setenv("JAVA_HOME", "")
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: sessions.session("local[1]"), range(4)))
    assert made == [running[0]] * 4
    assert launched == ["JVM"]


def test_attaching_twice_prints_nothing(spark: SparkSession) -> None:
    assert sessions.attach(sessions.attach(spark)) is spark


def test_workers_run_this_python(spark: SparkSession) -> None:
    """Not the first `python3` of the PATH, which has no quire."""

    def describe_worker(batches):  # type: ignore[no-untyped-def]  # pickled by value
        import sys

        import pyarrow as pa

        import quire.core.ids  # noqa: F401 - that it is there is the point

        for batch in batches:
            yield pa.RecordBatch.from_pydict({"python": [sys.executable] * batch.num_rows})

    rows = spark.range(1).mapInArrow(describe_worker, "python string").collect()
    assert [row["python"] for row in rows] == [sys.executable]


def test_another_python_can_be_set_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a packed environment; without `spark-submit` only quire reads the setting."""
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    sessions.choose_python({})
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    sessions.choose_python({"spark.pyspark.python": "./env/bin/python"})
    assert os.environ["PYSPARK_PYTHON"] == "./env/bin/python"
    assert os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable


def test_filters_are_not_pushed_to_sources(spark: SparkSession) -> None:
    """A reader that accepts filters would apply them to later queries, so our sessions disable it."""
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "false"
    assert not [name for name in sessions.settings_of("local[*]", "", None) if "filterPushdown" in name]


def test_the_configuration_of_a_new_session() -> None:
    local = sessions.settings_of("local[*]", "", None)
    assert local["spark.driver.bindAddress"] == "127.0.0.1"
    assert local["spark.driver.memory"].endswith("m")
    assert "log4j2" in local["spark.driver.extraJavaOptions"]
    remote = sessions.settings_of("spark://host:7077", "2g", {"spark.ui.enabled": "true"})
    assert "spark.driver.bindAddress" not in remote, "remote executors must reach the driver"
    assert (remote["spark.driver.memory"], remote["spark.ui.enabled"]) == ("2g", "true")


def test_workers_on_this_machine_use_unix_sockets_of_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rule 5: on a cluster the length of directory names is unknown."""
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    ends: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *call, **more: ends.append((call, more)))
    settings = sessions.workers_of("local[2]", {})
    assert settings[sessions.UNIX_SOCKETS] == "true"
    directory = Path(settings["spark.python.unix.domain.socket.dir"])
    assert directory.stat().st_mode & 0o077 == 0, "other users cannot access the sockets"
    ((end, path), more) = ends.pop()
    end(path, **more)
    assert not directory.exists()
    for elsewhere in ("spark://host:7077", "local-cluster[2,1,512]"):
        assert sessions.workers_of(elsewhere, {}) == {}
    assert sessions.workers_of("local[2]", {sessions.PYTHON: "/env/bin/python"}) == {}, "that Python may not have quire"
    assert sessions.workers_of("local[2]", {sessions.UNIX_SOCKETS: "false"}) == sessions.DAEMON
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 20)))
    assert sessions.workers_of("local", {}) == sessions.DAEMON
    assert not ends


@pytest.mark.parametrize(("total_mib", "expected_mib"), [(1_024, 512), (8_192, 2_048), (262_144, 4_096)])
def test_memory_is_a_quarter_of_the_machine_within_limits(
    monkeypatch: pytest.MonkeyPatch, total_mib: int, expected_mib: int
) -> None:
    sizes = {"SC_PAGE_SIZE": 4_096, "SC_PHYS_PAGES": total_mib << 8}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    assert sessions.default_memory_mib() == expected_mib


def test_without_pyspark_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "find_spec", lambda _: None)
    with pytest.raises(SparkUnavailable, match="not installed") as caught:
        sessions.session()
    assert ".[spark]" in caught.value.hint


def test_an_old_pyspark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.__version__", "3.5.1")
    with pytest.raises(SparkUnavailable, match="too old"):
        sessions.session()
