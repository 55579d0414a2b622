"""Executors in processes of their own: that see nothing but an object store, and that run a packed environment."""

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
    """Run a driver to its end; what it found."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.spark.cluster_child", *words],
        capture_output=True, text=True, timeout=800, check=False, env=environment, cwd=cwd,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4_000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_executors_that_see_only_the_object_store(tmp_path: Path) -> None:
    """S3 over TLS, and the owner over TCP with TLS and a token that only its file has (K6)."""
    found = drive(tmp_path, "objects", str(tmp_path))
    assert found["first"]["orders"] == EXPECTED
    assert found["first"]["pages"] > 50
    assert found == {
        "first": found["first"],
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
    """`make pack`, unpacked beside the driver too, as docs/spark.md says."""
    subprocess.run(
        ["make", "-s", "-o", ".venv/.installed", "pack", f"BUILD={tmp_path}/build"],
        cwd=ROOT, timeout=900, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    packed = tmp_path / "build" / "quire-env.tar.gz"
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "env", filter="fully_trusted")
    found = drive(tmp_path, "archive", str(tmp_path), str(packed))
    assert found["asked"]["orders"] == EXPECTED
    assert found["job"] == "SUCCEEDED"
    for prefix, module in found["places"]:
        assert prefix != sys.prefix
        assert Path(module).is_relative_to(prefix)
