"""Workers whose connection is closed."""

from __future__ import annotations

import socket

import pytest
from pyspark import daemon as original

from quire.spark import daemon


def test_a_worker_whose_connection_is_closed_ends_silently(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    local, remote = socket.socketpair()

    def talking(sock: socket.socket, _: bool) -> int:
        while True:
            sock.send(b"rows that nobody wants")

    monkeypatch.setattr(daemon, "_work", talking)
    remote.close()
    with local:
        assert daemon.worker(local, True) == 1, "it must not get another task"
    assert capfd.readouterr() == ("", "")


def test_other_errors_are_handled_by_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    local, remote = socket.socketpair()

    def failing(sock: socket.socket, authenticated: bool) -> int:
        raise ValueError(f"{sock is local} {authenticated}")

    with local, remote:
        monkeypatch.setattr(daemon, "_work", lambda sock, authenticated: 0 if sock is local and authenticated else 2)
        assert daemon.worker(local, True) == 0
        monkeypatch.setattr(daemon, "_work", failing)
        with pytest.raises(ValueError, match="True False"):
            daemon.worker(local, False)
    assert original.worker.__module__ == "pyspark.daemon", "it is replaced only in the daemon's process"
