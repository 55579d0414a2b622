"""`quire serve` as a process: what it says, who it lets in, how it ends."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import quire
from tests.programs import Program
from tests.rules.tree import SRC

Serve = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def serve(path: Path) -> Iterator[Serve]:
    quire.open(path).close()
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, store: Path = path) -> subprocess.Popen[str]:
        command = ["-m", "quire", "serve", "--store", str(store), *arguments]
        env = {**os.environ, "PYTHONPATH": str(SRC)}
        started.append(Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def address(line: str) -> str:
    assert line.startswith("listening on ")
    return line.split()[2]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_listens_serves_and_ends_well(serve: Serve, path: Path, end: signal.Signals) -> None:
    process = serve()
    assert process.stdout is not None
    first = process.stdout.readline()
    assert f"pid {process.pid}" in first
    with quire.connect(address(first)) as client:
        client.create("shop", "pages")
        with pytest.raises(quire.StoreLocked):
            quire.open(path)
    process.send_signal(end)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("served ")
    assert not (path / "quire.sock").exists()
    with quire.open(path) as store:
        assert [each.name for each in store.databases()] == ["shop"]


@pytest.mark.parametrize("name", ['a "b" c', "größe"])
def test_a_store_with_an_awkward_path_prints_what_can_be_pasted(serve: Serve, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    quire.open(path).close()
    process = serve("--http", "127.0.0.1:0", store=path)
    assert process.stdout is not None
    with quire.connect(address(process.stdout.readline())) as client:
        assert client.path == str(path)
    where = address(process.stdout.readline())
    pasted = ast.parse(process.stdout.readline().removeprefix("SQL from Python: "))
    texts = [node.value for node in ast.walk(pasted) if isinstance(node, ast.Constant)]
    assert (where in texts, str(path / "admin.token") in texts) == (True, True)


def test_what_is_ignored_stays_ignored(path: Path) -> None:
    """`nohup quire serve &` was ended by an interrupt that was meant for others."""
    quire.open(path).close()
    command = [sys.executable, "-m", "quire", "serve", "--store", str(path)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SRC)}
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        assert process.stdout is not None
        where = address(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        with quire.connect(where) as client:
            client.create("shop", "pages")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_on_the_network_it_makes_tokens_and_asks_for_them(serve: Serve, path: Path, tmp_path: Path) -> None:
    token = tmp_path / "admin"
    process = serve("--listen", "grpc://127.0.0.1:0", "--admin-token", str(token), "--json")
    assert process.stderr is not None
    local, network = address(process.stderr.readline()), address(process.stderr.readline())
    assert local == f"grpc+unix://{path}/quire.sock"
    with quire.connect(network, token_file=str(token)) as client:
        client.create("shop", "pages")
    with quire.connect(network, token_file=str(path / "read.token")) as client, pytest.raises(quire.AccessDenied):
        client.drop("shop")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    ended = json.loads(out)
    assert ended["addresses"] == [local, network]
    assert (ended["calls"] >= 4, ended["refused"]) == (True, 1)
    assert "service.refused" in err


def test_what_cannot_be_is_said_with_its_exit_code(serve: Serve, path: Path) -> None:
    wrong = serve("--listen", "ftp://x")
    _, err = wrong.communicate(timeout=30)
    assert (wrong.returncode, "cannot listen on this address" in err) == (2, True)
    first = serve()
    assert first.stdout is not None
    first.stdout.readline()
    second = serve()
    _, err = second.communicate(timeout=30)
    assert (second.returncode, "another owner" in err) == (5, True)
