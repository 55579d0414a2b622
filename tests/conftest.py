"""Settings of the whole test run: the location of its files, and one shared Spark session, because starting a JVM takes
more than ten seconds."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Deadlines measure the machine, not the code: a slow disk would make a property fail.
settings.register_profile(
    "default", deadline=None, max_examples=40, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "torture", settings.get_profile("default"), max_examples=2_000, stateful_step_count=100, print_blob=True
)
settings.load_profile(os.environ.get("QUIRE_HYPOTHESIS_PROFILE", "default"))


MEMORY = "/dev/shm"
FREE_BYTES_MIN = 4 << 30
"""Bytes that must be free, so that tests never reach a limit of the machine."""


def _use_memory_directory() -> None:
    """Put the files of tests into memory, unless TMPDIR is set. On a disk most of a run is spent waiting for syncs,
    whose effect no test can observe: lost writes are tested on a simulated disk (`quire.testing`)."""
    if "TMPDIR" in os.environ or not os.path.isdir(MEMORY):
        return
    if min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) >= FREE_BYTES_MIN:
        # In the environment, so that child processes and the workers of a parallel run use it too.
        os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="q", dir=MEMORY)
        os.chmod(os.environ["TMPDIR"], 0o711)  # some tests switch to another user
        tempfile.tempdir = None
        _created_directories.append(os.environ["TMPDIR"])


_created_directories: list[str] = []
"""The directory of this run, in the process that created it."""

_use_memory_directory()


def pytest_sessionfinish(exitstatus: int) -> None:
    """Free the memory; the files of a failed run are kept for debugging."""
    if exitstatus == pytest.ExitCode.OK:
        for directory in _created_directories:
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _sigint_is_not_ignored() -> None:
    """Child processes inherit whether SIGINT is ignored, as it is in processes that a shell starts with `&`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Collecting tests creates millions of long-lived objects: the garbage collector is off meanwhile."""
    gc.disable()
    if (
        _created_directories and not config.option.basetemp
    ):  # short, because it contains sockets, whose paths are limited to 107 bytes
        config.option.basetemp = os.path.join(_created_directories[0], "t")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Search for doctests only in modules that contain some: the search imports the module in every worker, and one in
    nine has a doctest."""
    collectors = yield
    if not collectors or ">>> " in file_path.read_text():
        return collectors
    return [collector for collector in collectors if not isinstance(collector, DoctestModule)]


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collection."""
    gc.freeze()
    gc.enable()


_tests_finished = itertools.count(1)


def pytest_runtest_logfinish() -> None:
    """Exclude imported modules and caches from time to time, otherwise full collections traverse all of them."""
    if next(_tests_finished) % 25 == 0:
        gc.collect()
        gc.freeze()


RULES_THAT_RUN_PROGRAMS = ("tests/rules/test_docs_run.py", "tests/rules/test_packaging.py")
"""Rules that run programs: they parse no source, and take long."""


class SparkInOneProcess(LoadScopeScheduling):  # type: ignore[misc]
    """Tests are distributed one by one, except those with "spark" in their path or name, which all run in one process:
    a JVM per process would be slower. So do the rules that analyse the parsed source, which would be parsed again in
    each process. (`--dist loadgroup` is meant for this, but has no effect with pytest 9.2 and pytest-xdist 3.8.)"""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/rules/") and not nodeid.startswith(RULES_THAT_RUN_PROGRAMS):
            return "rules"
        return "spark" if "spark" in nodeid.lower() else nodeid

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """Forget the test: the scheduler counts a worker's assigned tests after each one, including completed ones."""
        assigned, nodeid = self.assigned_work[node], self.registered_collections[node][item_index]
        scope = self._split_scope(nodeid)
        del assigned[scope][nodeid]
        if not assigned[scope]:
            del assigned[scope]
        self._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SparkInOneProcess:
    """Used whatever `--dist` says."""
    return SparkInOneProcess(config, log)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The shared session, on two cores. Tests that use it have "spark" in their path or name (`SparkInOneProcess`)."""
    from quire.spark.sessions import session, settings_of

    java_options = settings_of("local[2]", "", None)["spark.driver.extraJavaOptions"]
    # The optimising compiler does not pay off: most code of this JVM runs only a few times.
    config = {"spark.driver.extraJavaOptions": f"{java_options} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
    spark_session = session("local[2]", memory="1g", config=config)
    yield spark_session
    stop(spark_session)


def stop(spark_session: SparkSession) -> None:
    """Stop a session, and close the sockets that its gateway leaves to the garbage collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        spark_session.stop()
        gc.collect()


@pytest.fixture
def shared_spark(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """The shared session, for a program that creates and stops its own: it gets this one, and `stop` has no effect."""
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    return spark
