"""Executors in separate processes: some see nothing but an object store, some run a packed environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.rules.tree import ROOT
from tests.spark.cluster_child import ROWS

EXPECTED = [["late", 10], ["w0", ROWS // 3 + 1 - 4], ["w1", ROWS // 3 + 1 - 3], ["w2", ROWS // 3 - 3]]


def drive(cwd: Path, *words: str) -> dict[str, Any]:
    """Run a driver to its end, and return its report."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.spark.cluster_child", *words],
        capture_output=True, text=True, timeout=800, check=False, env=environment, cwd=cwd,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4_000:]
    report: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_executors_that_see_only_the_object_store(tmp_path: Path) -> None:
    """S3 over TLS, and the owner over TCP with TLS and a token that is only in its file (K6)."""
    report = drive(tmp_path, "objects", str(tmp_path))
    assert report["first"]["orders"] == EXPECTED
    assert report["first"]["pages"] > 50
    assert report == {
        "first": report["first"],
        "same_for_readers": True,
        "refused": True,
        "secret_in_plan": False,
        "table": 1,
        "roots": [""],
        "job": "SUCCEEDED",
        "problems": [],
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_executors_run_a_packed_environment(tmp_path: Path) -> None:
    """`make pack`, unpacked for the driver as well, as described in docs/spark.md."""
    subprocess.run(
        ["make", "-s", "-o", ".venv/.installed", "pack", f"BUILD={tmp_path}/build"],
        cwd=ROOT, timeout=900, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    packed = tmp_path / "build" / "quire-env.tar.gz"
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "env", filter="fully_trusted")
    report = drive(tmp_path, "archive", str(tmp_path), str(packed))
    assert report["asked"]["orders"] == EXPECTED
    assert report["job"] == "SUCCEEDED"
    for prefix, module in report["places"]:
        assert prefix != sys.prefix
        assert Path(module).is_relative_to(prefix)
