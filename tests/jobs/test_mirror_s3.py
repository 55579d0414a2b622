"""Mirrors whose targets are in a bucket that the environment configures."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from quire.jobs.mirror.parquet_target import newest
from quire.objects import open_store
from tests.jobs.mirrored_store import MirroredStore, Rows, fill, read_databases, sorted_rows
from tests.objects.conftest import fresh_url, s3_server

__all__ = ["s3_server"]  # a fixture


def read(kind: str, url: str) -> Rows:
    if kind == "delta":
        return sorted_rows(DeltaTable(url).to_pyarrow_table().to_pylist())
    with closing(open_store(url)) as store:
        manifest = newest(store)
        assert manifest is not None
        tables = [pq.read_table(pa.BufferReader(store.get(file.path))) for file in manifest.files]
    return sorted_rows(pa.concat_tables(tables).to_pylist())


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_a_table_in_a_bucket_follows_its_databases(
    s3_server: tuple[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    host, port = s3_server
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")  # no TLS in a test
    mirror, url = MirroredStore(tmp_path, kind), fresh_url()
    with mirror.open() as store:
        fill(store, "tenant-1")
        fill(store, "tenant-2")
        store.mirrors.create("lake", "tenant-*", "orders", f"{kind}:{url}")
        assert store.mirrors.run("lake").full
        assert read(kind, url) == read_databases(store)
        store.drop("tenant-1")
        fill(store, "tenant-3")
        assert not store.mirrors.run("lake").full
        assert read(kind, url) == read_databases(store)
