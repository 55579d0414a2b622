"""`quire.stream` and `quire.manifest_log` whose records and logs are in S3 alone: executors read the objects over HTTPS.

Workers of Spark have the environment that their Java was started with, which is where the address of the object store and the
keys to it come from: so the driver is a process of its own.

    python -m tests.spark.test_source_stream_s3 BASE      says what it found as a line of JSON
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
from tests.spark.sourced import run_available
from tests.spark.test_source_records import PER_SEGMENT, RECORDS, SETTINGS, payload

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from quire.stream.stream import Stream

SLICE = (120, 130)


def drive(base: Path) -> None:
    """Records in S3 alone, beside such that are on this disk alone, and such that come between two runs of a query."""
    cert_file, key_file = certificate(base, "machine")
    with s3(cert_file, key_file) as endpoint:
        os.environ.update(s3_environment(cert_file, endpoint))
        settings = msgspec.structs.replace(SETTINGS, object_store=f"s3://{BUCKET}/store")
        with quire.open(base / "store", settings=settings) as store:
            options = options_of(store)
            clicks = store.stream("clicks", create=True)
            fill(clicks)
            spark = session("local[2]", memory="1g")
            print(json.dumps(ask(spark, options, clicks, base)), flush=True)
            spark.stop()
            assert store.manifest.check() == []


def fill(clicks: Stream) -> None:
    """Segments 1 to 3 are in S3 alone, 4 is on this disk alone, 5 is open."""
    for start in range(0, RECORDS, PER_SEGMENT):
        clicks.append([payload(number) for number in range(start + 1, start + PER_SEGMENT + 1)]).result()
        if start + PER_SEGMENT < RECORDS:
            clicks.seal()
    clicks.upload(1, 2, 3)
    clicks.evict(1, 2, 3, warm=True)


def ask(spark: SparkSession, options: dict[str, str], clicks: Stream, base: Path) -> dict[str, Any]:
    def read(source: str = "quire.stream", **more: str) -> Any:
        return spark.read.format(source).options(**options, stream="clicks", **more).load()

    def only_far() -> bool:
        """Give up every copy on this disk; whether S3 has all there is."""
        clicks.seal()
        clicks.upload()
        clicks.evict(warm=True)
        info = clicks.info()
        return (info.hot_segments, info.warm_segments, info.remote_segments) == (0, 0, info.segments)

    found: dict[str, Any] = {"before": clicks.info().remote_segments}
    first, last = SLICE
    some = read().where(f"id >= {first} and id < {last}").select("id").orderBy("id")
    found["slice"] = [row.id for row in some.collect()]
    found["mixed"] = _is_right(read(partitions="5").select("id", "payload").collect(), RECORDS)
    found["untouched"] = clicks.info().remote_segments == 3  # who sees this disk needs no upload
    found["asked"] = read(upload="true").count()
    found["uploaded"] = clicks.info().remote_segments
    following = spark.readStream.format("quire.stream").options(**options, stream="clicks", consumer="etl").load()
    for _ in range(2):
        found.setdefault("far", []).append(only_far())
        writer = following.writeStream.format("parquet").option("path", str(base / "out"))
        run_available(writer.option("checkpointLocation", str(base / "at")))
        clicks.append([payload(number) for number in range(clicks.end_record, clicks.end_record + 70)]).result()
    found["followed"] = _is_right(spark.read.parquet(str(base / "out")).select("id", "payload").collect(), RECORDS + 70)
    found["far"].append(only_far())
    found["whole"] = _is_right(read(partitions="4").select("id", "payload").collect(), RECORDS + 140)
    found["logged"] = read("quire.manifest_log", tier="object").where("type = 'UploadDone'").count()
    found["objects"] = sum("/wal:" in each.key for each in list_objects(clicks.store))
    return found


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
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found == {
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
