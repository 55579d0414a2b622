"""feed tail --follow and stream tail --follow, while another process writes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

import quire
from quire.cli.output import TerminalStyle
from quire.cli.tables import RunningTable
from tests.cli.conftest import Run, quire_program
from tests.programs import Program
from tests.rules.tree import SRC

SECONDS = 60
"""Seconds that an event may take on a busy machine."""

WRITER = """
import sys, quire
with quire.open(sys.argv[1]) as store:
    clicks = store.stream("clicks")
    for line in sys.stdin:
        word = line.split()
        if word[0] == "append":
            clicks.append([payload.encode() for payload in word[1:]]).result()
        elif word[0] == "create":
            store.create(word[1], "pages")
        else:
            getattr(clicks, word[0])()
        print("done", flush=True)
"""


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = Program(arguments, **{**streams, **options}, env=env, bufsize=1)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None and not stream.closed:
                stream.close()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line of its output. Lines are short, so that a pipe never holds part of one."""
    assert process.stdout is not None
    buffered = getattr(process, "_lines", "")
    while "\n" not in buffered:
        ready, _, _ = select.select([process.stdout], [], [], SECONDS)
        assert ready, "no output arrived"
        more = os.read(process.stdout.fileno(), 65_536).decode()
        assert more, f"the process has ended: {process.stderr.read() if process.stderr else ''}"
        buffered += more
    line, _, rest = buffered.partition("\n")
    process._lines = rest  # type: ignore[attr-defined]
    return line


def stdout(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


class Writer:
    """A process that owns the store."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert line_of(self._process) == "done"


@contextmanager
def writing(path: Path) -> Iterator[Writer]:
    with started("-c", WRITER, str(path)) as process:
        writer = Writer(process)
        writer.do("append x")
        yield writer


def ended_by(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    process.send_signal(number)
    assert process.stderr is not None
    return process.wait(SECONDS), process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stream_is_followed_while_another_process_writes_it(run: Run, path: Path, number: signal.Signals) -> None:
    run("stream", "append", "clicks", "a", "b", "c")
    with started("-m", "quire", "stream", "tail", "clicks", "-f", "-n", "2", "--json", "-s", str(path)) as follower:
        records = [json.loads(line_of(follower)) for _ in range(2)]
        assert [(record["id"], record["payload"]) for record in records] == [(2, "62"), (3, "63")]
        with writing(path) as writer:
            assert json.loads(line_of(follower))["id"] == 4, "while the other one owns the store"
            for record, step in enumerate(("seal", "upload", "evict", "seal"), 5):
                writer.do(step)
                writer.do(f"append {record}")
                assert bytes.fromhex(json.loads(line_of(follower))["payload"]) == b"%d" % record
        run("stream", "append", "clicks", "the next owner's")
        assert json.loads(line_of(follower))["id"] == 9
        assert ended_by(follower, number) == (0, "")


def test_the_feed_is_followed_while_another_process_commits(path: Path) -> None:
    with started("-m", "quire", "feed", "tail", "--follow", "-n", "1", "-s", str(path)) as follower:
        assert line_of(follower).split() == ["sequence", "committed", "operations"]
        assert line_of(follower).split()[0] == "2"
        with writing(path) as writer:
            writer.do("create other")
            while "name=other" not in (line := line_of(follower)):
                assert line
        assert ended_by(follower, signal.SIGTERM) == (0, "")


def test_n_0_shows_no_old_entries_and_then_every_new_one(run: Run, path: Path) -> None:
    run("stream", "append", "clicks", "old")
    stream = ("-m", "quire", "stream", "tail", "clicks", "-f", "-n", "0", "--json", "-s", str(path))
    feed = ("-m", "quire", "feed", "tail", "-f", "-n", "0", "--json", "-s", str(path))
    head = run("feed", "tail", "-n", "1", "--json").data[0]["sequence"]
    with started(*stream) as records, started(*feed) as changes, writing(path) as writer:
        waiting, deadline = {stdout(records), stdout(changes)}, time.monotonic() + SECONDS
        while waiting:  # it is unknown when they start to follow: entries written before that are old
            assert time.monotonic() < deadline, "no output arrived"
            writer.do("append new")
            waiting -= set(select.select(waiting, [], [], 0.1)[0])
        assert json.loads(line_of(records))["id"] > 1
        assert json.loads(line_of(changes))["sequence"] > head


def test_tail_beside_a_writing_owner_shows_no_more_than_requested(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.stream.file_reader import StreamContents, StreamFileReader

    with writing(path) as writer:
        contents = StreamFileReader.contents

        def append_after_reading(reader: StreamFileReader, after_segment: int = 0) -> StreamContents:
            stream_contents = contents(reader, after_segment)
            writer.do("append later")
            return stream_contents

        monkeypatch.setattr(StreamFileReader, "contents", append_after_reading)
        writer.do("append a b c")
        assert [record["payload"] for record in run("stream", "tail", "clicks", "-n", "2", "--json").data] == [
            "62",
            "63",
        ]


def test_the_feed_is_followed_from_a_sequence_as_json_lines(path: Path) -> None:
    with started("-m", "quire", "feed", "tail", "-f", "--from", "1", "--json", "-s", str(path)) as follower:
        assert [json.loads(line_of(follower))["sequence"] for _ in range(2)] == [1, 2]
        assert ended_by(follower, signal.SIGINT) == (0, "")


@pytest.mark.parametrize("command", [["feed", "tail", "-f"], ["stream", "tail", "clicks", "-f", "--json"]])
def test_a_closed_pipe_ends_it_although_nothing_new_arrives(run: Run, path: Path, command: list[str]) -> None:
    run("stream", "append", "clicks", "a")
    with started("-m", "quire", *command, "-s", str(path)) as follower:
        assert line_of(follower)
        assert follower.stdout is not None
        follower.stdout.close()
        assert follower.stderr is not None
        assert (follower.wait(SECONDS), follower.stderr.read()) == (141, "")


def test_entries_that_were_trimmed_unseen_are_reported(path: Path) -> None:
    with quire.open(path) as store:
        store.feed.register(name="app")
        store.feed.acknowledge("app", 1)
    result = quire_program("feed", "tail", "-f", "--from", "1", "-s", str(path))
    assert result.returncode == 4
    assert result.stderr.splitlines() == [
        "error: the changes 1 to 1 are no longer retained",
        "next:  `quire feed tail --from 2 --follow` continues after them",
    ]


@pytest.mark.parametrize(("database", "code"), [("nothing", 3), ("shop", 2)])
def test_what_cannot_be_followed_is_refused_at_once(path: Path, database: str, code: int) -> None:
    result = quire_program("stream", "tail", database, "-f", "--json", "-s", str(path))
    assert (result.returncode, result.stdout) == (code, "")
    assert json.loads(result.stderr)["error"]["next"].startswith("`quire ls`")


def test_a_missing_store_is_reported(tmp_path: Path) -> None:
    for command in (["feed", "tail"], ["stream", "tail", "x"]):
        assert quire_program(*command, "-f", "-s", str(tmp_path)).returncode == 3


def test_rows_keep_their_columns_and_are_wrapped_as_in_every_table() -> None:
    table = RunningTable([">id", "record"], TerminalStyle(20, False))
    shown = [table.lines([number, text]) for number, text in (("9", "a b"), ("10", "one two three four"))]
    assert shown == ["id  record\n 9  a b\n", "10  one two three\n    four\n"]
