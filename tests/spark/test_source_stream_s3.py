"""`quire.stream` and `quire.manifest_log` with records and logs that are only in S3: executors read the objects over
HTTPS.

Spark's workers have the environment with which their Java was started, which contains the address and the credentials
of the
object store: therefore the driver is a separate process.

    python -m tests.spark.test_source_stream_s3 BASE      prints its results as a line of JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import quire
from quire.objects.api import list_objects
from quire.spark.access import options_of
from quire.spark.sessions import session
from tests.rules.tree import ROOT
from tests.service.test_access import certificate
from tests.spark.cluster_child import BUCKET, s3, s3_environment
from tests.spark.served_store import run_available
from tests.spark.test_source_records import PER_SEGMENT, RECORDS, SETTINGS, payload

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from quire.stream.stream import Stream

SLICE = (120, 130)


def drive(base: Path) -> None:
    """Records only in S3, records only on this disk, and records that are appended between two runs of a query."""
    cert_file, key_file = certificate(base, "machine")
    with s3(cert_file, key_file) as endpoint:
        os.environ.update(s3_environment(cert_file, endpoint))
        settings = msgspec.structs.replace(SETTINGS, object_store=f"s3://{BUCKET}/store")
        with quire.open(base / "store", settings=settings) as store:
            options = options_of(store)
            clicks = store.stream("clicks", create=True)
            fill(clicks)
            spark = session("local[2]", memory="1g")
            print(json.dumps(read_everything(spark, options, clicks, base)), flush=True)
            spark.stop()
            assert store.manifest.check() == []


def fill(clicks: Stream) -> None:
    """Segments 1 to 3 are only in S3, 4 is only on this disk, 5 is open."""
    for start in range(0, RECORDS, PER_SEGMENT):
        clicks.append([payload(number) for number in range(start + 1, start + PER_SEGMENT + 1)]).result()
        if start + PER_SEGMENT < RECORDS:
            clicks.seal()
    clicks.upload(1, 2, 3)
    clicks.evict(1, 2, 3, warm=True)


def read_everything(spark: SparkSession, options: dict[str, str], clicks: Stream, base: Path) -> dict[str, Any]:
    def read(source: str = "quire.stream", **more: str) -> Any:
        return spark.read.format(source).options(**options, stream="clicks", **more).load()

    def evict_all() -> bool:
        """Evict every local copy, and return whether S3 has everything."""
        clicks.seal()
        clicks.upload()
        clicks.evict(warm=True)
        info = clicks.info()
        return (info.hot_segments, info.warm_segments, info.remote_segments) == (0, 0, info.segments)

    report: dict[str, Any] = {"before": clicks.info().remote_segments}
    first, last = SLICE
    some = read().where(f"id >= {first} and id < {last}").select("id").orderBy("id")
    report["slice"] = [row.id for row in some.collect()]
    report["mixed"] = _is_right(read(partitions="5").select("id", "payload").collect(), RECORDS)
    report["untouched"] = clicks.info().remote_segments == 3  # executors that see this disk need no upload
    report["asked"] = read(upload="true").count()
    report["uploaded"] = clicks.info().remote_segments
    following = spark.readStream.format("quire.stream").options(**options, stream="clicks", consumer="etl").load()
    for _ in range(2):
        report.setdefault("far", []).append(evict_all())
        writer = following.writeStream.format("parquet").option("path", str(base / "out"))
        run_available(writer.option("checkpointLocation", str(base / "at")))
        clicks.append([payload(number) for number in range(clicks.end_record, clicks.end_record + 70)]).result()
    report["followed"] = _is_right(
        spark.read.parquet(str(base / "out")).select("id", "payload").collect(), RECORDS + 70
    )
    report["far"].append(evict_all())
    report["whole"] = _is_right(read(partitions="4").select("id", "payload").collect(), RECORDS + 140)
    report["logged"] = read("quire.manifest_log", tier="object").where("type = 'UploadDone'").count()
    report["objects"] = sum("/wal:" in info.key for info in list_objects(clicks.store))
    return report


def _is_right(rows: list[Any], records: int) -> bool:
    return sorted((row[0], bytes(row[1])) for row in rows) == [(n, payload(n)) for n in range(1, records + 1)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_executors_read_a_stream_from_s3(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.spark.test_source_stream_s3", str(tmp_path)],
        capture_output=True, text=True, timeout=380, check=False, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4_000:]
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report == {
        "before": 3,
        "slice": list(range(*SLICE)),
        "mixed": True,
        "untouched": True,
        "asked": RECORDS,
        "uploaded": 5,
        "far": [True, True, True],
        "followed": True,
        "whole": True,
        "logged": 7,
        "objects": 7,
    }


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
