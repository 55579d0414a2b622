"""Events as lines of JSON and as readable text."""

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


def emitted_lines(style: str) -> str:
    code = (
        "from quire.core.logs import configure\nfrom quire.core.events import emit, listening\n"
        f"configure({style!r})\nassert listening()\n"
        "emit('debug', 'too.quiet')\nemit('info', 'manifest.commit', rows=3, path=b'x')\n"
        "emit('warning', 'disk.full', free='größe')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env, check=True
    )
    assert result.stdout == "", "stdout is reserved for the output of commands"
    return result.stderr


def test_json_is_one_object_per_line() -> None:
    first, second = (json.loads(line) for line in emitted_lines("json").splitlines())
    assert (first["event"], first["level"], first["rows"]) == ("manifest.commit", "info", 3)
    assert (second["event"], second["free"]) == ("disk.full", "größe")
    assert first["timestamp"].endswith("Z")


def test_console_is_readable_text() -> None:
    text = emitted_lines("console")
    assert "manifest.commit" in text
    assert "rows=3" in text
    assert "\x1b" not in text, "no colours outside of terminals"


def test_an_unknown_style_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="unknown log style"):
        configure("xml")


def test_serve_logs_its_events(tmp_path: Path) -> None:
    quire.open(tmp_path / "store").close()
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-m", "quire", "serve", "--store", str(tmp_path / "store"), "--log", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    events = [json.loads(line)["event"] for line in stderr.splitlines()]
    assert {"service.listening", "service.closed"} <= set(events)


def test_the_environment_can_select_the_style(tmp_path: Path) -> None:
    quire.open(tmp_path / "store").close()
    result = quire_program("create", "shop", "--store", str(tmp_path / "store"), env={"QUIRE_LOG": "json"})
    assert result.returncode == 0
    assert all(json.loads(line)["event"] for line in result.stderr.splitlines())
    rejected = quire_program("create", "cart", "--store", str(tmp_path / "store"), env={"QUIRE_LOG": "xml"})
    assert (rejected.returncode, "json, console" in rejected.stderr) == (2, True)
