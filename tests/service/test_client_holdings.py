"""Holdings of clients whose resources fail."""

from __future__ import annotations

import threading

import pytest

from quire.core.clock import SystemClock
from quire.service import client_holdings
from quire.service.client_holdings import Holdings


class FailingResource:
    """A resource that raises what no caller expects."""

    def on_idle(self, _: float) -> None:
        raise RuntimeError("unexpected")

    def close(self) -> None:
        raise RuntimeError("unexpected")


class Resource:
    """A resource that records what happens to it."""

    def __init__(self) -> None:
        self.idle = threading.Event()
        self.closed = threading.Event()

    def on_idle(self, _: float) -> None:
        self.idle.set()

    def close(self) -> None:
        self.closed.set()


@pytest.mark.parametrize("expires", [False, True])
def test_a_holding_that_fails_does_not_stop_the_sweeper(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], expires: bool
) -> None:
    """Hazard: the sweeper ended with the first error: idle transactions kept their locks, and dead clients their holdings."""
    monkeypatch.setattr(client_holdings, "SWEEP_SECONDS", 0.001)
    if expires:
        monkeypatch.setattr(client_holdings, "IDLE_SECONDS", 0.0)
    holdings = Holdings(SystemClock(), lambda _: False)
    holdings.add("dead", "snapshot", FailingResource())
    later = Resource()
    holdings.add("dead", "snapshot", later)
    assert (later.closed if expires else later.idle).wait(60)
    holdings.close()
    assert later.closed.is_set()
    assert "unexpected" in capfd.readouterr().err


def test_an_error_of_the_sweep_itself_does_not_stop_the_sweeper(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Hazard: the same, for an error outside a holding."""
    monkeypatch.setattr(client_holdings, "SWEEP_SECONDS", 0.001)
    rounds = iter([True])

    def has_connection(_: str) -> bool:
        if next(rounds, False):
            raise RuntimeError("unexpected")
        return True

    holdings, resource = Holdings(SystemClock(), has_connection), Resource()
    holdings.add("me", "snapshot", resource)
    assert resource.idle.wait(60)
    holdings.close()
    assert "service.bug" in capfd.readouterr().err
