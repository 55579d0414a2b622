"""Streaming queries whose batches are files, for the tests of sinks: each file is one batch, and batches can be
repeated.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.spark.served_store import ServedStore, run_available

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class FileQuery:
    """A query that reads JSON files, one per batch, and writes to a quire sink."""

    owner: ServedStore
    base: Path
    schema: str
    sink: str = "quire.sqlite"
    options: dict[str, str] = field(default_factory=dict)
    checkpoint: str = "checkpoint"
    mode: str = "append"

    @property
    def spark(self) -> SparkSession:
        return self.owner.spark

    def add(self, *rows: dict[str, Any]) -> None:
        """Add a file with rows: the next batch."""
        directory = self.base / "in"
        directory.mkdir(exist_ok=True)
        number = len(list(directory.iterdir()))
        file = directory / f"{number:04}.json"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(file, (1_700_000_000 + number,) * 2)  # Spark reads the oldest file first

    def run(self) -> None:
        """Write all files that are not in the checkpoint yet."""
        frame = self.spark.readStream.schema(self.schema).option("maxFilesPerTrigger", 1).json(str(self.base / "in"))
        if self.mode == "complete":
            frame = frame.groupBy("id").count()
        writer = frame.writeStream.format(self.sink).options(**self.owner.options, **self.options)
        at = str(self.base / self.checkpoint)
        run_available(writer.outputMode(self.mode).option("checkpointLocation", at))

    def forget_commit(self) -> None:
        """Remove the last batch from Spark's commit log, as if the driver had been killed right after the sink's
        commit.
        """
        commits = self.base / self.checkpoint / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink()
