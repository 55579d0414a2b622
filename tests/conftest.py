"""Settings for the whole test run: where its files are, and the one Spark session that tests share, because starting a JVM
takes ten seconds and more."""

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
ROOM = 4 << 30
"""Bytes that must be free there, so that tests never run into a limit of the machine."""


def _work_in_memory() -> None:
    """Put the files of tests into memory, unless TMPDIR says where they belong. On a disk most of a run is waiting for syncs,
    of which no test can tell whether they did anything: lost writes are tested on a disk that loses them (`quire.testing`)."""
    if "TMPDIR" in os.environ or not os.path.isdir(MEMORY):
        return
    if min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) >= ROOM:
        # The environment, because processes that tests start, and the workers of a parallel run, are to do the same.
        os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="q", dir=MEMORY)
        os.chmod(os.environ["TMPDIR"], 0o711)  # some tests are another user for a while
        tempfile.tempdir = None
        _made_here.append(os.environ["TMPDIR"])


_made_here: list[str] = []
"""The directory of this run, in the process that made it."""

_work_in_memory()


def pytest_sessionfinish(exitstatus: int) -> None:
    """Give the memory back; what a failed run wrote stays for whoever looks into it."""
    if exitstatus == pytest.ExitCode.OK:
        for directory in _made_here:
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _interrupts_are_heard() -> None:
    """Programs that tests start and interrupt inherit whether SIGINT is ignored, as it is in what a shell runs with `&`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Collecting makes millions of objects that stay: nothing is looked through for garbage meanwhile."""
    gc.disable()
    if _made_here and not config.option.basetemp:  # short, because sockets are in there, whose paths may have 107 bytes
        config.option.basetemp = os.path.join(_made_here[0], "t")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Doctests are looked for where there are some: looking is importing, in every worker, and one module in nine has one."""
    collectors = yield
    if not collectors or ">>> " in file_path.read_text():
        return collectors
    return [collector for collector in collectors if not isinstance(collector, DoctestModule)]


def pytest_collection_finish() -> None:
    """What was collected is out of the collector's sight while the tests run."""
    gc.freeze()
    gc.enable()


_ended = itertools.count(1)


def pytest_runtest_logfinish() -> None:
    """The same with what tests have imported and cached, from time to time: otherwise late collections look through it all."""
    if next(_ended) % 25 == 0:
        gc.collect()
        gc.freeze()


RUNNING = ("tests/rules/test_docs_run.py", "tests/rules/test_packaging.py")
"""Rules about programs: they parse nothing, and take long."""


class SparkInOneProcess(LoadScopeScheduling):  # type: ignore[misc]
    """Tests go one by one to whoever is free, but those with "spark" in their path or name all to one process: a JVM for each
    would be slower. So do those that look at the parsed source of everything, which would be parsed again for each process.
    (`--dist loadgroup` is for that, but does nothing with pytest 9.2 and pytest-xdist 3.8.)"""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/rules/") and not nodeid.startswith(RUNNING):
            return "rules"
        return "spark" if "spark" in nodeid.lower() else nodeid

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """Forget the test: what a worker was given is counted after every one, and with it all that it has done."""
        given, nodeid = self.assigned_work[node], self.registered_collections[node][item_index]
        scope = self._split_scope(nodeid)
        del given[scope][nodeid]
        if not given[scope]:
            del given[scope]
        self._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SparkInOneProcess:
    """Whatever `--dist` says."""
    return SparkInOneProcess(config, log)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session: two cores of this machine. Tests that use it have "spark" in their path or name (`SparkInOneProcess`)."""
    from quire.spark.sessions import session, settings_of

    given = settings_of("local[2]", "", None)["spark.driver.extraJavaOptions"]
    # Most of what this JVM would compile once more, for speed later on, it never runs again.
    quick = {"spark.driver.extraJavaOptions": f"{given} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
    made = session("local[2]", memory="1g", config=quick)
    yield made
    stop(made)


def stop(made: SparkSession) -> None:
    """End a session, with the sockets that its gateway leaves to the collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        made.stop()
        gc.collect()


@pytest.fixture
def lent_spark(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """The session, for a program that makes and stops its own: it gets this one, and stopping it does nothing."""
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    return spark
