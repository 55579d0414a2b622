"""The programs in examples/ run as their first lines say, and show what they promise."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from examples import audit_log, changes_to_parquet, feature_store, tenant_lakehouse, tenants
from tests.objects.conftest import fresh_url, s3_server
from tests.programs import run_program
from tests.rules.tree import ROOT, SRC

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["s3_server"]  # a fixture

EXAMPLES = ROOT / "examples"


def output_of(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.err == "", "an example prints no error"
    return captured.out


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONWARNINGS": "error", **variables}
    return run_program(arguments, cwd=ROOT, env=environment, capture_output=True)


def test_every_example_is_listed_short_and_says_how_to_start_it() -> None:
    programs = sorted(EXAMPLES.glob("*.py"))
    index = (EXAMPLES / "README.md").read_text("utf-8")
    assert len(programs) == 7
    for program in programs:
        text = program.read_text("utf-8")
        assert f"({program.name})" in index, program.name
        assert 60 <= text.count("\n") <= 150, program.name
        assert f"python examples/{program.name}" in text, program.name
    assert set(re.findall(r"\((\w+\.py)\)", index)) == {program.name for program in programs}


def test_a_branch_for_each_test() -> None:
    result = run("examples/branch_per_test.py")
    assert result.returncode == 0, result.stderr + result.stdout
    assert "10 passed" in result.stdout
    assert re.search(r"a fork, opened: [0-9.]+ ms \(\d+ × faster\)", result.stdout)


def test_four_workers_write_to_one_store() -> None:
    result = run("examples/web_workers.py", "--orders", "80", PYTHONPATH=f"{SRC}{os.pathsep}{ROOT}")
    assert result.returncode == 0, result.stderr + result.stdout
    assert re.search(r"^80 orders of [234] workers, all in the database and in the log", result.stdout, re.M)
    assert "locked" not in result.stderr


def test_tenants_in_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert tenants.main(["--tenants", "3", "--notes", "60"]) == 0
    out = output_of(capsys)
    deleted, back, restored = (
        int(re.findall(pattern, out)[0]) for pattern in (r"deletes (\d+)", r"monday: (\d+);", r"are (\d+) again")
    )
    assert deleted == back == restored > 0
    assert "milk: 0 left" in out


def test_tenants_in_a_lakehouse(capsys: pytest.CaptureFixture[str]) -> None:
    assert tenant_lakehouse.main(["--tenants", "6", "--rows", "30"]) == 0
    filled, full, increment, nothing, equal = output_of(capsys).splitlines()
    assert filled.startswith("filled 6 databases in")
    assert full.startswith("full load: 6 of 6 databases, 0 gone, 180 rows in")
    assert increment.startswith("increment: 4 of 6 databases, 1 gone")
    assert nothing.startswith("increment: 0 of 6 databases")
    assert "of 6 databases, and no others" in equal


def test_tenants_on_s3(
    s3_server: tuple[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host, port = s3_server
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")  # no TLS in a test
    url = fresh_url()
    assert tenants.main(["--objects", url, "--tenants", "2", "--notes", "40"]) == 0
    out = output_of(capsys)
    assert f"in {url}: 3 objects" in out  # one object of each tenant, and the owner's session
    assert "other tenants are unchanged: tenant.customer-1 has" in out


def test_an_audit_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for times in (1, 2):
        assert audit_log.main(["--store", str(tmp_path / "store"), "--entries", "300"]) == 0
        out = output_of(capsys)
        assert f"{300 * times} entries" in out
        assert "0 compressed ones here" in out
        assert "chain: sound" in out
        assert "leaves an entry out: broken at number 100" in out
        assert sum(int(count) for count in re.findall(r"batches of \[(.*)\]", out)[0].split(", ")) == 300


def test_changes_into_parquet_with_spark(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert changes_to_parquet.main(["--out", str(tmp_path)]) == 0
    out = output_of(capsys)
    monday, tuesday = (int(count) for count in re.findall(r"day: (\d+) changes are new", out))
    assert monday > 5
    assert tuesday > 5
    assert re.search(r"ForkDb +2 ×", out)
    assert re.search(r"PublishSnapshot +2 ×", out)
    assert "came twice: 0" in out
    table = spark.read.parquet(str(tmp_path / "operations"))
    sequences = {row.sequence for row in table.select("sequence").distinct().collect()}
    assert len(sequences) == monday + tuesday == max(sequences), "no change is missing"


def test_a_feature_store_with_spark(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert feature_store.main(["--customers", "300", "--orders", "3000"]) == 0
    out = output_of(capsys)
    assert "kept as night-2" in out
    assert re.search(r"after an order by day: .*'largest': 999.99, 'days_since': 0", out)
    assert "999.99" not in out.partition("after night 2")[2], "the load is newer than the daily writes"
    assert "served: 300 customers" in out
    assert "training set of night-1: 300 customers" in out
