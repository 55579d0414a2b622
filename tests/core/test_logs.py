"""Events as lines for machines and for people."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from quire.core.errors import InvalidInput
from quire.core.logs import configure
from tests.cli.conftest import quire_program
from tests.rules.tree import SRC


def emitted(style: str) -> str:
    code = (
        "from quire.core.logs import configure\nfrom quire.core.events import emit, listening\n"
        f"configure({style!r})\nassert listening()\n"
        "emit('debug', 'too.quiet')\nemit('info', 'manifest.commit', rows=3, path=b'x')\n"
        "emit('warning', 'disk.full', free='größe')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env, check=True
    )
    assert ended.stdout == "", "stdout belongs to commands"
    return ended.stderr


def test_json_is_one_object_a_line() -> None:
    first, second = (json.loads(line) for line in emitted("json").splitlines())
    assert (first["event"], first["level"], first["rows"]) == ("manifest.commit", "info", 3)
    assert (second["event"], second["free"]) == ("disk.full", "größe")
    assert first["timestamp"].endswith("Z")


def test_console_is_for_people() -> None:
    shown = emitted("console")
    assert "manifest.commit" in shown
    assert "rows=3" in shown
    assert "\x1b" not in shown, "colours are for terminals"


def test_another_style_is_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown log style"):
        configure("xml")


def test_serve_tells_what_happens(tmp_path: Path) -> None:
    quire.open(tmp_path / "store").close()
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-m", "quire", "serve", "--store", str(tmp_path / "store"), "--log", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as serving:
        assert serving.stdout is not None
        assert serving.stderr is not None
        serving.stdout.readline()
        serving.send_signal(signal.SIGTERM)
        _, told = serving.communicate(timeout=30)
    events = [json.loads(line)["event"] for line in told.splitlines()]
    assert {"service.listening", "service.closed"} <= set(events)


def test_the_environment_asks_for_it_too(tmp_path: Path) -> None:
    quire.open(tmp_path / "store").close()
    made = quire_program("create", "shop", "--store", str(tmp_path / "store"), env={"QUIRE_LOG": "json"})
    assert made.returncode == 0
    assert all(json.loads(line)["event"] for line in made.stderr.splitlines())
    wrong = quire_program("create", "cart", "--store", str(tmp_path / "store"), env={"QUIRE_LOG": "xml"})
    assert (wrong.returncode, "json, console" in wrong.stderr) == (2, True)
