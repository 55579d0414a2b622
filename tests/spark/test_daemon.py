"""Workers that nobody listens to any more."""

from __future__ import annotations

import socket

import pytest
from pyspark import daemon as original

from quire.spark import daemon


def test_a_worker_that_nobody_listens_to_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = socket.socketpair()

    def talking(sock: socket.socket, _: bool) -> int:
        while True:
            sock.send(b"rows that nobody wants")

    monkeypatch.setattr(daemon, "_work", talking)
    theirs.close()
    with ours:
        assert daemon.worker(ours, True) == 1, "it may not have another task"
    assert capfd.readouterr() == ("", "")


def test_everything_else_is_pysparks(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()

    def failing(sock: socket.socket, authenticated: bool) -> int:
        raise ValueError(f"{sock is ours} {authenticated}")

    with ours, theirs:
        monkeypatch.setattr(daemon, "_work", lambda sock, authenticated: 0 if sock is ours and authenticated else 2)
        assert daemon.worker(ours, True) == 0
        monkeypatch.setattr(daemon, "_work", failing)
        with pytest.raises(ValueError, match="True False"):
            daemon.worker(ours, False)
    assert original.worker.__module__ == "pyspark.daemon", "it is replaced in the daemon's process alone"
