"""`quire archive audit`, by the store's directory, or by the bucket's URL if the directory is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from quire.cli import main as program
from tests.jobs.test_archive_audit import Bucket


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    code = program.run([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_audit_by_directory_and_by_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bucket = Bucket(tmp_path)
    code, by_url = run(capsys, "archive", "audit", bucket.url)
    assert (code, by_url["problems"], by_url["orphans"]) == (0, [], [])
    assert by_url["store_id"] == bucket.store_id
    (bucket.path / "store" / "quire.toml").write_text(f'object_store = "{bucket.url}"\n')
    assert run(capsys, "archive", "audit", "--store", str(tmp_path / "store")) == (code, by_url)
    missing = bucket.one("/file/")
    missing.unlink()
    report = tmp_path / "differences.parquet"
    assert program.run(["archive", "audit", bucket.url, "--report", str(report)]) == 1
    text = capsys.readouterr().out
    assert "missing" in text
    assert missing.name in text.replace("\n", "")
    assert parquet.read_table(report).column("state").to_pylist() == ["MISSING"]


def test_a_bucket_without_an_archive_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bucket").mkdir()
    assert program.run(["archive", "audit", str(tmp_path / "bucket")]) != 0
    assert "this bucket contains no store" in capsys.readouterr().err
