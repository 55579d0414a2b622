"""Hazard: a program that starts together with its server fails, because the server does not listen yet."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import quire


def test_connect_waits_for_an_owner_that_is_starting(tmp_path: Path) -> None:
    waiting, listening, done = threading.Event(), threading.Event(), threading.Event()

    def serve() -> None:
        waiting.wait()
        with quire.open(tmp_path / "store") as store, store.serve():
            listening.set()
            done.wait()

    owner = threading.Thread(target=serve)
    owner.start()
    try:
        waiting.set()
        with quire.connect(tmp_path / "store", wait=60) as client:
            assert listening.wait(60)
            assert list(client.databases()) == []
    finally:
        done.set()
        owner.join()


def test_connect_does_not_wait_unless_asked(tmp_path: Path) -> None:
    for wait in (0.0, 0.1):
        with pytest.raises(quire.InvalidInput, match="no owner listens"):
            quire.connect(tmp_path, wait=wait)
