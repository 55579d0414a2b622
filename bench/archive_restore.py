"""Restoring from an archive against the download of the same bytes, and the replay of its log.

Run as part of `python -m bench archive`. The chunk rows of a store of 1 TiB, and the changes of a long log, are submitted to
the manifest without chunks, which would need a disk of that size.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import quire
from bench.archive import opened, s3
from bench.manifest import chunk_op
from bench.report import GIB, KIB, MIB, Report, rate, seconds
from quire.archive.format import CommitEvent, Header, Kind, Position, decode_object, encode_object
from quire.archive.replay import Replay
from quire.objects import list_objects, open_store

CHUNK_BYTES = 64 * MIB
STORE_BYTES = 1024 * GIB


def restoring(report: Report, directory: Path, quick: bool) -> None:
    """Restore a store, against downloading its archive and writing as many bytes as its manifest has."""
    chunks, tails = STORE_BYTES // CHUNK_BYTES // (10 if quick else 1), (32 if quick else 256) * MIB
    with s3() as url:
        store = opened(directory, "whole", url("whole"), "async")
        store.create("bench", "pages")
        for guard in [store.manifest.submit((chunk_op(number),)) for number in range(chunks)]:
            guard.result()
        stream = store.stream("tails", create=True)
        for _ in range(tails // (256 * KIB)):
            stream.append(os.urandom(256 * KIB))
        stream.sync()
        assert store.archive is not None
        store.archive.wait(600)
        store.close()
        restored, copy = directory / "restored", directory / "copy"
        shutil.rmtree(restored, ignore_errors=True)
        ours = seconds(lambda: quire.restore(url("whole"), restored))
        bucket = open_store(url("whole"))
        keys = [info.key for info in list_objects(bucket) if "/log/" in info.key or "/base/" in info.key]

        def floor() -> None:
            with open(copy, "wb") as file:
                for key in keys:
                    file.write(bucket.get(key))
                file.write((directory / "whole" / "manifest.lmdb").read_bytes())
                os.fsync(file.fileno())

        limit = seconds(floor)
        bucket.close()
    detail = f"{ours:.1f} s for {tails // MIB} MiB of tails and {chunks:,} chunk rows, against {limit:.1f} s"
    report.ratio("restore_vs_download", ours / limit, 3.0, "lower", detail)


class _Rows:
    """Collects the rows that the manifest's writer commits, as the archiver does."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def reserve(self) -> None:
        """Do nothing: with one writer, commits arrive in order."""

    def fill(self, _: None, written: list[Any]) -> None:
        self.events.append(CommitEvent(tuple(written)))


def replaying(report: Report, directory: Path, quick: bool) -> None:
    """Replay a log object with many changes into an empty manifest."""
    count = 20_000 if quick else 300_000
    rows = _Rows()
    with opened(directory, "source") as store:
        store.manifest.writer.archive = rows
        store.manifest.writer.record_rows()
        store.create("bench", "pages")
        for guard in [store.manifest.submit((chunk_op(number),)) for number in range(count)]:
            guard.result()
        disk = store.disk
    header = Header(kind=Kind.LOG, position=Position(1, 0), parent=Position(0, 0), at_ms=0)
    encoded: list[bytes] = []
    writing = seconds(lambda: encoded.append(encode_object(header, rows.events)))
    stored = sum(len(puts) for event in rows.events for _, puts, _ in event.tables)
    root = directory / "replayed"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()

    def work() -> None:
        with Replay(disk, str(root)) as replay:
            replay.apply(decode_object(encoded[0], "bench")[1])

    took = seconds(work)
    detail = (
        f"{rate(stored / took)} rows; {len(encoded[0]) / count:.0f} bytes a change, encoded at {rate(count / writing)}"
    )
    report.ratio("replayed_changes_per_second", count / took, 50_000, "higher", detail)
    report.figure("replayed_rows_per_second", stored / took)


PARTS = (restoring, replaying)
