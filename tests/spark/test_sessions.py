"""A session that knows quire: what it is made with, and that one which is there already is used."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quire.core.errors import SparkUnavailable
from quire.spark import sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_running_session_is_used(spark: SparkSession) -> None:
    """The object may be another one (a stream has a session of its own), the application is the same."""
    assert sessions.session("local[1]", app="another").conf.get("spark.app.id") == spark.conf.get("spark.app.id")


def test_attaching_twice_says_nothing(spark: SparkSession) -> None:
    assert sessions.attach(sessions.attach(spark)) is spark


def test_workers_run_this_python(spark: SparkSession) -> None:
    """And not the first `python3` of the PATH, which has no quire."""

    def who(batches):  # type: ignore[no-untyped-def]  # it travels by value
        import sys

        import pyarrow as pa

        import quire.core.ids  # noqa: F401 - that it is there is the point

        for batch in batches:
            yield pa.RecordBatch.from_pydict({"python": [sys.executable] * batch.num_rows})

    rows = spark.range(1).mapInArrow(who, "python string").collect()
    assert [row["python"] for row in rows] == [sys.executable]


def test_another_python_may_be_named_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a packed environment; without `spark-submit` nobody but us looks at the setting."""
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    sessions.choose_python({})
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    sessions.choose_python({"spark.pyspark.python": "./env/bin/python"})
    assert os.environ["PYSPARK_PYTHON"] == "./env/bin/python"
    assert os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable


def test_filters_of_sparks_are_not_pushed_to_sources(spark: SparkSession) -> None:
    """A reader that takes them answers later queries with them, so no session of ours has it on."""
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "false"
    assert not [name for name in sessions.settings_of("local[*]", "", None) if "filterPushdown" in name]


def test_what_a_new_session_is_made_with() -> None:
    local = sessions.settings_of("local[*]", "", None)
    assert local["spark.driver.bindAddress"] == "127.0.0.1"
    assert local["spark.driver.memory"].endswith("m")
    assert "log4j2" in local["spark.driver.extraJavaOptions"]
    remote = sessions.settings_of("spark://host:7077", "2g", {"spark.ui.enabled": "true"})
    assert "spark.driver.bindAddress" not in remote, "executors elsewhere must reach the driver"
    assert (remote["spark.driver.memory"], remote["spark.ui.enabled"]) == ("2g", "true")


def test_workers_on_this_machine_are_spoken_to_through_sockets_of_this_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rule 5: on a cluster nobody knows how long the names of its directories are."""
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    ends: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *call, **more: ends.append((call, more)))
    settings = sessions.workers_of("local[2]", {})
    assert settings[sessions.UNIX_SOCKETS] == "true"
    directory = Path(settings["spark.python.unix.domain.socket.dir"])
    assert directory.stat().st_mode & 0o077 == 0, "nobody else gets at the sockets"
    ((end, path), more) = ends.pop()
    end(path, **more)
    assert not directory.exists()
    for elsewhere in ("spark://host:7077", "local-cluster[2,1,512]"):
        assert sessions.workers_of(elsewhere, {}) == {}
    assert sessions.workers_of("local[2]", {sessions.PYTHON: "/env/bin/python"}) == {}, "it may not have quire"
    assert sessions.workers_of("local[2]", {sessions.UNIX_SOCKETS: "false"}) == sessions.DAEMON
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 20)))
    assert sessions.workers_of("local", {}) == sessions.DAEMON
    assert not ends


@pytest.mark.parametrize(("total_mib", "given"), [(1_024, 512), (8_192, 2_048), (262_144, 4_096)])
def test_memory_is_a_quarter_of_the_machine_within_limits(
    monkeypatch: pytest.MonkeyPatch, total_mib: int, given: int
) -> None:
    sizes = {"SC_PAGE_SIZE": 4_096, "SC_PHYS_PAGES": total_mib << 8}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    assert sessions.default_memory_mib() == given


def test_without_pyspark_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "find_spec", lambda _: None)
    with pytest.raises(SparkUnavailable, match="not installed") as caught:
        sessions.session()
    assert "quire[spark]" in caught.value.hint


def test_an_old_pyspark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.__version__", "3.5.1")
    with pytest.raises(SparkUnavailable, match="too old"):
        sessions.session()
