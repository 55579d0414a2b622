"""Spark Connect (K3): sources and jobs through a session that has no JVM and no context."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkRuntimeError

from quire.core.errors import SparkUnavailable
from quire.spark import sessions

CHILD = [sys.executable, "-m", "tests.spark.connect_child"]


@pytest.fixture
def url() -> Iterator[str]:
    """The address of a Connect server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(
        [*CHILD, "serve", str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            assert server.stdout.readline().strip() == "listens"
            yield f"sc://127.0.0.1:{port}"
        finally:
            server.stdin.close()
            server.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sources_and_jobs_work_through_connect(url: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [*CHILD, "use", url, str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=800, check=True
    )
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "is_connect": True,
        "counts": [["w0", 334], ["w1", 333], ["w2", 333]],
        "few": 2,
        "whole": True,
        "job": ["SUCCEEDED", 1],
        "again": 1_000,
        "problems": [],
    }


def raise_no_session() -> None:
    raise PySparkRuntimeError("no active session")


def test_without_its_packages_connect_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "find_spec", lambda name: None if name == "grpc" else object())
    monkeypatch.setattr("pyspark.sql.SparkSession.active", raise_no_session)
    with pytest.raises(SparkUnavailable, match="Spark Connect") as caught:
        sessions.session("sc://127.0.0.1:1")
    assert "pyspark[connect]" in caught.value.hint
