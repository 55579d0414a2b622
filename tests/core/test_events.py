"""Events: a library prints nothing until a listener is configured."""

from __future__ import annotations

import subprocess
import sys

import pytest
import structlog
from structlog.testing import capture_logs

from quire.core.events import emit, listening


def test_debug_and_info_are_quiet_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    structlog.reset_defaults()
    assert not listening()
    emit("debug", "part.step", n=1)
    emit("info", "part.step", n=1)
    assert capfd.readouterr() == ("", "")


def test_warnings_and_errors_are_shown_on_stderr_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    structlog.reset_defaults()
    emit("warning", "part.trouble", path="x")
    emit("error", "part.worse")
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "quire warning: part.trouble path='x'\nquire error: part.worse \n"


def test_a_listener_gets_every_event_with_its_fields() -> None:
    with capture_logs() as logs:
        assert listening()
        emit("debug", "part.step", n=1)
    structlog.reset_defaults()
    assert logs == [{"event": "part.step", "log_level": "debug", "n": 1}]


def test_an_exception_is_shown_with_its_type(capfd: pytest.CaptureFixture[str]) -> None:
    with capture_logs() as logs:
        emit("error", "part.failed", error=ValueError("no room"))
    structlog.reset_defaults()
    emit("error", "part.failed", error=ValueError("no room"))
    assert logs == [{"event": "part.failed", "log_level": "error", "error": "ValueError: no room"}]
    assert capfd.readouterr().err == "quire error: part.failed error='ValueError: no room'\n"


def test_an_event_without_a_listener_does_not_import_structlog() -> None:
    code = "import sys; from quire.core.events import emit; emit('debug', 'x'); sys.exit('structlog' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
