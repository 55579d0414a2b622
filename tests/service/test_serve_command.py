"""`quire serve` as a process: its output, access control, and shutdown."""

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
from quire.store.standby import Standby
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
    for process in started:
        process.kill()
        process.communicate()


def address(line: str) -> str:
    assert line.startswith("listening on ")
    return line.split()[2]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_serve_prints_its_address_serves_and_ends_cleanly(serve: Serve, path: Path, end: signal.Signals) -> None:
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
        assert [database.name for database in store.databases()] == ["shop"]


def test_serve_ends_when_another_directory_has_taken_the_store_over(serve: Serve, tmp_path: Path) -> None:
    """It went on answering reads with a state that its successor had left behind (A11)."""
    store_path, bucket = tmp_path / "archived", tmp_path / "bucket"
    store_path.mkdir()
    settings = f'object_store = "{bucket}"\n[archive]\nmode = "sync"\ninterval_seconds = 0.1\n'
    (store_path / "quire.toml").write_text(settings)
    quire.open(store_path).close()
    process = serve(store=store_path)
    assert process.stdout is not None
    with quire.connect(address(process.stdout.readline())) as client:
        client.kv("pairs", create=True).put(b"a", b"1")
        with Standby(str(bucket), tmp_path / "standby") as standby:
            standby.promote()
        with pytest.raises(quire.StoreFenced):
            client.kv("pairs").put(b"a", b"2")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 9  # as every command whose store is fenced
    assert "owner epoch 2 has taken this store over" in err
    assert "next:" in err
    with quire.open(tmp_path / "standby", mode="r") as successor:
        assert successor.kv("pairs").get(b"a") == b"1"


@pytest.mark.parametrize("name", ['a "b" c', "größe"])
def test_the_printed_code_is_valid_for_an_awkward_path(serve: Serve, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    quire.open(path).close()
    process = serve("--http", "127.0.0.1:0", store=path)
    assert process.stdout is not None
    with quire.connect(address(process.stdout.readline())) as client:
        assert client.path == str(path)
    url = address(process.stdout.readline())
    printed_code = ast.parse(process.stdout.readline().removeprefix("SQL from Python: "))
    texts = [node.value for node in ast.walk(printed_code) if isinstance(node, ast.Constant)]
    assert (url in texts, str(path / "admin.token") in texts) == (True, True)


def test_ignored_signals_stay_ignored(path: Path) -> None:
    """`nohup quire serve &` was ended by an interrupt meant for other processes."""
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
        url = address(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        with quire.connect(url) as client:
            client.create("shop", "pages")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_on_the_network_serve_creates_tokens_and_requires_them(serve: Serve, path: Path, tmp_path: Path) -> None:
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
    output = json.loads(out)
    assert output["addresses"] == [local, network]
    assert (output["calls"] >= 4, output["refused"]) == (True, 1)
    assert "service.refused" in err


def test_invalid_arguments_are_refused_with_an_exit_code(serve: Serve, path: Path) -> None:
    wrong = serve("--listen", "ftp://x")
    _, err = wrong.communicate(timeout=30)
    assert (wrong.returncode, "cannot listen on this address" in err) == (2, True)
    first = serve()
    assert first.stdout is not None
    first.stdout.readline()
    second = serve()
    _, err = second.communicate(timeout=30)
    assert (second.returncode, "another owner" in err) == (5, True)
