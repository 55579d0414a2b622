"""Creates Spark sessions for quire.

    spark = quire.spark.session()            # local[*]
    spark = quire.spark.session("spark://host:7077", config={"spark.archives": "quire-env.tar.gz#env"})

A running session is used as it is: a missing setting is an error, or the feature is not used. A new session is small by
default: one JVM alongside the owner's process, on a machine that may have 2 GiB. This package uses only the DataFrame API, so
that Connect works (K3).

On one machine the Python workers of a new session are reached through Unix sockets, in a directory per session, unless
`config` sets otherwise. Through TCP every task waits 40 ms: it is sent two small writes, and the second waits until the first
is acknowledged. Workers whose socket Spark closes end quietly (`daemon.py`, `jvm_log.py`).

Threads: any. Raises `SparkUnavailable`.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.core.errors import SparkUnavailable
from quire.core.packages import install_command
from quire.spark.active_session import make_active
from quire.spark.java import find_java, quiet_home
from quire.spark.jvm_log import launch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from quire.spark.runner import SparkRunner

MEMORY_SHARE = 4
"""A JVM that we start gets a quarter of the machine's memory …"""
MEMORY_MIN_MIB, MEMORY_MAX_MIB = 512, 4_096
"""… between these limits: page bodies are handled in Python workers, the JVM only schedules and shuffles index rows."""

UNIX_SOCKETS = "spark.python.unix.domain.socket.enabled"
DAEMON = {"spark.python.daemon.module": "quire.spark.daemon"}

SOCKET_DIRECTORY_MAX = 48
"""Characters of the directory for temporary files, at most: some systems limit a socket's name to 104, and Spark adds 43."""

PYTHON = "spark.pyspark.python"
"""The setting that names another Python for workers, one of a packed environment (K7)."""

DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.adaptive.coalescePartitions.enabled": "false",  # few index rows, much work: a slot is 64 MiB of pages
    "spark.sql.shuffle.partitions": "8",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.python.worker.reuse": "true",
}
"""Settings of a new session, unless `config` overrides them; the hosts only where the master is local."""


def session(
    master: str = "", *, app: str = "quire", memory: str = "", config: Mapping[str, str] | None = None
) -> SparkSession:
    """Return the running session, or a new one, with quire's data sources.

    `master`: "local[*]" unless `SPARK_MASTER` or this argument is set; `sc://…` connects to a Spark Connect server. `memory`:
    of the driver's JVM, like "2g". `config` overrides all other settings.
    """
    _require()
    with _starting:
        return attach(_running_or_new(master, app, memory, config or {}))


_starting = threading.Lock()
"""Held while a session is looked for and created: two threads would start a JVM each."""


def _running_or_new(master: str, app: str, memory: str, config: Mapping[str, str]) -> SparkSession:
    from pyspark import errors, sql

    try:
        # Not that of this thread alone: `getOrCreate` would give our settings to the session of another thread.
        running = sql.SparkSession.active()
    except errors.PySparkRuntimeError:
        running = None
    if running is not None and _is_alive(running):
        return running
    master = master or os.environ.get("SPARK_MASTER", "") or "local[*]"
    if master.startswith("sc://"):
        _require_connect()
        return sql.SparkSession.builder.remote(master).getOrCreate()
    os.environ["JAVA_HOME"] = quiet_home(find_java())
    choose_python(config)
    settings = settings_of(master, memory, {**workers_of(master, config), **config})
    settings |= {"spark.master": master, "spark.app.name": app}
    builder = sql.SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    with _unwarned():
        if settings.get(UNIX_SOCKETS) == "true":
            launch(settings)
        return builder.getOrCreate()


def spark_runner(**options: Any) -> SparkRunner:
    """Return a `SparkRunner` in the running session, or in a new one; `options` are the runner's."""
    spark = session()  # first: without pyspark it raises an error with a hint
    from quire.spark.runner import SparkRunner

    return SparkRunner(spark, **options)


def choose_python(config: Mapping[str, str]) -> None:
    """Make workers run this very Python. Spark itself reads the setting only where `spark-submit` starts the driver."""
    if given := config.get(PYTHON, ""):
        os.environ["PYSPARK_PYTHON"] = given
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


@contextmanager
def _unwarned() -> Iterator[None]:
    """Start the JVM without PYTHONWARNINGS: its Python workers would inherit it, and they leave pipes to the collector."""
    filters = os.environ.pop("PYTHONWARNINGS", None)
    try:
        yield
    finally:
        if filters is not None:
            os.environ["PYTHONWARNINGS"] = filters


def settings_of(master: str, memory: str, config: Mapping[str, str] | None) -> dict[str, str]:
    """Return the settings of a new session."""
    chosen = dict(DEFAULTS)
    if not master.startswith(("local[", "local-cluster[")) and master != "local":
        for name in ("spark.driver.host", "spark.driver.bindAddress"):
            del chosen[name]  # executors elsewhere must reach the driver
    logging = Path(__file__).with_name("log4j2.properties")
    chosen["spark.driver.extraJavaOptions"] = f"-Dlog4j2.configurationFile={logging}"
    chosen["spark.driver.memory"] = memory or f"{default_memory_mib()}m"
    return {**chosen, **(config or {})}


def workers_of(master: str, config: Mapping[str, str]) -> dict[str, str]:
    """Return settings that connect Python workers by Unix sockets; none where workers run elsewhere or with another Python,
    or where socket names would be too long."""
    if not (master == "local" or master.startswith("local[")) or PYTHON in config:
        return {}
    if config.get(UNIX_SOCKETS) == "false" or len(tempfile.gettempdir()) > SOCKET_DIRECTORY_MAX:
        return DAEMON
    directory = tempfile.mkdtemp(prefix="quire-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return {**DAEMON, UNIX_SOCKETS: "true", "spark.python.unix.domain.socket.dir": directory}


def default_memory_mib() -> int:
    """Return the JVM's memory: small, because it shares the machine with the owner's process."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return max(MEMORY_MIN_MIB, min(MEMORY_MAX_MIB, total // MEMORY_SHARE))


def attach(spark: SparkSession) -> SparkSession:
    """Register quire's data sources in a session and make it the active one of this thread. Return the session."""
    _require()
    from quire.spark.sources.registry import SOURCES

    # First: Spark looks in the active session whether a name is taken, and refuses one that is registered there only.
    make_active(spark)
    with warnings.catch_warnings():
        # Spark warns if a source is already registered, which happens when a session is attached twice.
        warnings.simplefilter("ignore")
        for source in SOURCES:
            spark.dataSource.register(source)
    return spark


def _is_alive(spark: Any) -> bool:
    """Return whether a session has not been stopped; a Connect session has no context to check."""
    context = getattr(spark, "_sc", None)
    return context is None or getattr(context, "_jsc", None) is not None


def _require_connect() -> None:
    if find_spec("grpc") is None:
        raise SparkUnavailable(
            "Spark Connect needs packages that are not installed", hint="`pip install 'pyspark[connect]'`"
        )


def _require() -> None:
    if find_spec("pyspark") is None:
        raise SparkUnavailable("pyspark is not installed", hint=install_command("spark"))
    from pyspark import __version__

    if tuple(int(part) for part in __version__.split(".")[:2]) < (4, 2):
        raise SparkUnavailable(
            "this pyspark is too old: quire's streaming source needs 4.2",
            hint=install_command("spark"),
            version=__version__,
        )
