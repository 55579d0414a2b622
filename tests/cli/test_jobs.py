"""jobs ls, show, retry, cancel, work."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli.output import width_of
from quire.jobs.registry import HANDLERS
from quire.manifest.records import JobKind, JobState
from tests.cli.conftest import Run, on_a_terminal
from tests.programs import Program
from tests.rules.tree import SRC

SLOW = """
import time
from quire.jobs.registry import HANDLERS
from quire.manifest.records import JobKind

def slow(ctx, job, progress):
    for step in range(1_000):
        progress(step, 1_000)
        time.sleep(0.02)

HANDLERS[JobKind.EVICT] = slow
from quire.cli.main import main
main()
"""
"""The program, with a slow handler."""


@pytest.fixture
def queue(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jobs: 1 succeeds, 2 fails permanently, 3 has no handler, 4 is due in an hour."""
    monkeypatch.delitem(HANDLERS, JobKind.EVICT)
    with quire.open(path) as store:
        jobs = store.manifest.jobs
        jobs.enqueue(JobKind.RETENTION, 1)
        jobs.enqueue(JobKind.VERIFY, 1, {"nonsense": 1})
        store.worker.drain()
        jobs.enqueue(JobKind.EVICT, 2)
        jobs.enqueue(JobKind.RETENTION, 1, delay_seconds=3600)
    return path


@pytest.fixture(autouse=True)
def _warnings_are_expected(capfd: pytest.CaptureFixture[str]) -> None:
    """A failing job also logs a warning to stderr."""


def test_ls_shows_every_job(run: Run, queue: Path) -> None:
    data = run("jobs", "ls", "--json").data
    assert [(job["job_id"], job["kind"], job["database"], job["state"]) for job in data] == [
        (1, "retention", "shop", "succeeded"),
        (2, "verify", "shop", "failed_permanent"),
        (3, "evict", "clicks", "pending"),
        (4, "retention", "shop", "pending"),
    ]
    assert data[0]["result"] == {"dropped": 0, "kept": 0, "snapshots": []}
    assert data[1]["payload"] == {"nonsense": 1}
    lines = run("jobs", "ls").out.splitlines()
    assert lines[0].split() == ["id", "kind", "database", "state", "created", "what"]
    assert lines[2].split()[:4] == ["2", "verify", "shop", "failed"]
    assert "InvalidInput: the job does not support this payload" in lines[2]
    assert "due in 59 min" in lines[4]
    assert max(map(width_of, on_a_terminal("jobs", "ls", "--store", str(queue)))) <= 80


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--state", "failed"], [2]),
        (["--state", "failed_permanent"], [2]),
        (["--state", "PENDING"], [3, 4]),
        (["--state", "running"], []),
        (["--state", "in-flight"], []),
        (["--db", "shop"], [1, 2, 4]),
        (["--db", "shop", "--state", "pending"], [4]),
        (["--db", "2"], [3]),
        (["--limit", "2"], [3, 4]),
        (["--limit", "0"], [1, 2, 3, 4]),
    ],
)
def test_ls_filters(run: Run, queue: Path, arguments: list[str], expected: list[int]) -> None:
    assert [job["job_id"] for job in run("jobs", "ls", *arguments, "--json").data] == expected


def test_ls_of_no_jobs_and_of_invalid_filters(run: Run, path: Path) -> None:
    assert run("jobs", "ls").out == "no jobs\n"
    assert run("jobs", "ls", "--state", "failed").out == "no failed jobs\n"
    refused = run("jobs", "ls", "--state", "lost")
    assert (refused.code, "pending, running, succeeded, failed, cancelled" in refused.err) == (2, True)
    assert run("jobs", "ls", "--db", "nothing").code == 3


def test_show(run: Run, queue: Path) -> None:
    data = run("jobs", "show", "2", "--json").data
    assert (data["attempt"], data["lease"], data["artifact"]) == (1, None, None)
    text = run("jobs", "show", "2").out
    assert text.startswith("job       2: verify of shop\nstate     failed\n")
    assert "attempts  1, failed 1 of 5" in text
    assert "payload   nonsense=1" in text
    assert "error     InvalidInput: " in text
    assert "due       " in run("jobs", "show", "4").out
    assert "result    " in run("jobs", "show", "1").out
    assert max(map(width_of, on_a_terminal("jobs", "show", "2", "--store", str(queue)))) <= 80


@pytest.mark.parametrize("command", ["show", "retry", "cancel"])
@pytest.mark.parametrize(
    ("job", "code"), [("99", 3), ("0", 2), ("-1", 2), ("x", 2), (str(2**64), 2), (str(2**62 + 1), 2), (str(2**62), 3)]
)
def test_an_unknown_job_is_reported(run: Run, queue: Path, command: str, job: str, code: int) -> None:
    result = run("jobs", command, job)
    assert (result.code, result.out) == (code, "")
    assert "bug" not in result.err
    if code == 3:
        assert result.err.splitlines()[1] == "next:  `quire jobs ls` lists them"


def test_retry_creates_a_new_job(run: Run, queue: Path) -> None:
    data = run("jobs", "retry", "2", "--json").data
    assert (data["retried"], data["job"]["job_id"], data["job"]["state"]) == (2, 5, "pending")
    assert run("jobs", "show", "2", "--json").data["state"] == "failed_permanent", "the old job keeps its state"
    for job, hint in (("1", "`quire jobs show 1` shows how it ended"), ("3", "`quire jobs work --once` runs it")):
        refused = run("jobs", "retry", job)
        assert (refused.code, refused.err.splitlines()[1]) == (4, f"next:  {hint}")


def test_cancel_ends_a_job_once(run: Run, queue: Path) -> None:
    assert run("jobs", "cancel", "4").out == "cancelled job 4, retention\n"
    assert run("jobs", "show", "4", "--json").data["state"] == "cancelled"
    twice = run("jobs", "cancel", "4")
    assert (twice.code, twice.err.splitlines()[1]) == (4, "next:  `quire jobs show 4` shows how")
    retried_id = run("jobs", "retry", "4", "--json").data["job"]["job_id"]
    assert run("jobs", "cancel", "1").code == 4
    held = run("jobs", "retry", "4")
    assert (held.code, f"`quire jobs cancel {retried_id}`" in held.err) == (4, True), (
        "the error names the outstanding job"
    )


def test_work_once_runs_due_jobs_and_lists_waiting_ones(run: Run, queue: Path) -> None:
    run("jobs", "cancel", "4")
    run("jobs", "retry", "4")
    data = run("jobs", "work", "--once", "--json").data
    assert (data["ran"], data["succeeded"], data["failed"], data["waiting"]) == (1, 1, 0, 1)
    assert [(job["job_id"], job["state"]) for job in data["jobs"]] == [(5, "succeeded")]
    lines = run("jobs", "work", "--once").out.splitlines()
    assert lines == ["no job was due", "", "1 job waiting, the first is due now"], "there is no handler for evict"


def test_work_once_reports_failures(run: Run, queue: Path) -> None:
    run("jobs", "retry", "2")
    worked = run("jobs", "work", "--once", "--json")
    assert (worked.data["ran"], worked.data["succeeded"], worked.data["failed"]) == (1, 0, 1)
    assert worked.code == 1
    assert run("jobs", "work", "--once").code == 0, "no job was run"


def start(path: Path, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
    """Start the program with the slow handler, and wait until its job runs."""
    with quire.open(path) as store:
        job_id = store.manifest.jobs.enqueue(JobKind.EVICT, 1)
    env = {**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}
    process = Program(["-c", SLOW, "jobs", "work", *arguments, "--store", str(path)], env=env, **streams)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with quire.open(path, "r") as reader:
            if reader.manifest.jobs.get(job_id).state is JobState.IN_FLIGHT:
                return process
        time.sleep(0.1)
    raise AssertionError("the job was never begun")


@pytest.mark.parametrize(
    ("arguments", "sent", "code"),
    [
        (["--once"], signal.SIGINT, 130),
        ([], signal.SIGINT, 0),
        ([], signal.SIGTERM, 0),
    ],
)
def test_an_interrupt_puts_running_jobs_back(path: Path, arguments: list[str], sent: signal.Signals, code: int) -> None:
    """Without --once this is how the command ends. The next worker restarts the job, which has not failed."""
    process = start(path, *arguments, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.send_signal(sent)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, "")
    assert json.loads(out)["ran"] == 1
    with quire.open(path, "r") as store:
        (job,) = store.manifest.jobs.jobs()
    assert (job.state, job.record.failures, job.lease) == (JobState.PENDING, 0, None)


def test_progress_is_shown_on_a_terminal(path: Path) -> None:
    terminal_fd, program_fd = pty.openpty()
    process = start(path, "--once", stdout=subprocess.DEVNULL, stderr=program_fd)
    os.close(program_fd)
    shown = b""
    while b"/1000" not in shown:
        shown += os.read(terminal_fd, 4096)
    process.send_signal(signal.SIGINT)
    try:
        while part := os.read(terminal_fd, 4096):
            shown += part
    except OSError:
        pass  # the terminal is closed
    os.close(terminal_fd)
    assert process.wait(30) == 130
    assert b"evict shop" in shown
    assert "stopping: running jobs return to the queue" in shown.decode()
