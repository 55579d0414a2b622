"""A stream with its manifest, its clock, and an object store that can be made unavailable, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quire.core.background import Background
from quire.core.settings import ManifestLogSettings, StreamSettings
from quire.durable.files import Disk, OsDisk
from quire.durable.names import Tier
from quire.manifest.records import DbKind
from quire.manifest.store import ManifestStore
from quire.objects.open import open_store
from quire.stream.files import StreamFiles
from quire.stream.mlog_verify import verify as log_problems
from quire.stream.stream import Stream
from quire.stream.verify import problems
from quire.testing.clock import ManualClock
from tests.stream.tiers import FlakyStore

SMALL = StreamSettings(
    segment_bytes=16 << 10,
    record_bytes_max=8 << 10,
    cache_bytes=1 << 20,
    hot_bytes=64 << 10,
    warm_bytes=16 << 10,
    attempts=2,
    retry_seconds=0.0,
)
"""Small segments, so that few records make many of them."""
LOG = ManifestLogSettings(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=2, sealed_kept=1)


class StreamHarness:
    """One stream, opened without background threads."""

    def __init__(
        self,
        root: Path,
        *,
        settings: StreamSettings = SMALL,
        log_settings: ManifestLogSettings = LOG,
        disk: Disk | None = None,
        stream_root: str | None = None,
    ) -> None:
        self.root = root
        self.settings = settings
        self.log_settings = log_settings
        self.disk: Disk = disk or OsDisk()
        self.stream_root = stream_root or str(root)
        self.clock = ManualClock()
        self.manifest = ManifestStore.open(os.path.join(root, "manifest.lmdb"), clock=self.clock)
        self.stream_id = self.manifest.register_db("clicks", DbKind.STREAM)
        self.objects = FlakyStore(open_store(str(root / "objects")))
        self.stream = self.open()

    def open(self, mode: str | None = None, *, background: bool = False) -> Stream:
        import msgspec

        if mode is not None:
            self.log_settings = msgspec.structs.replace(self.log_settings, mode=mode)
        return Stream.open(
            stream_id=self.stream_id,
            root=self.stream_root,
            disk=self.disk,
            manifest=self.manifest,
            store=lambda: self.objects,
            collect=lambda keys: self.objects.delete_many(keys),
            clock=self.clock,
            settings=self.settings,
            log_settings=self.log_settings,
            background=Background("stream-keeper", threads_max=1) if background else None,
        )

    @property
    def files(self) -> StreamFiles:
        return StreamFiles(self.disk, self.stream_root, self.stream_id)

    def reopen(self, mode: str | None = None) -> Stream:
        self.stream.close()
        self.stream = self.open(mode)
        return self.stream

    def crash(self, mode: str | None = None) -> Stream:
        """Simulate the death of the process; the machine stays up."""
        self.stream.abandon()
        self.stream = self.open(mode)
        return self.stream

    def fill(self, segments: int, records: int = 20, size: int = 100) -> list[bytes]:
        """Append records as sealed segments, and return their payloads."""
        written = []
        for _ in range(segments):
            start = self.stream.hot.next_record
            payloads = [record(start + number, size) for number in range(records)]
            self.stream.append(payloads).result()
            self.stream.seal()
            written += payloads
        return written

    def segments(self) -> list[Any]:
        return list(self.stream.ledger.view)

    def on_disk(self, tier: Tier) -> list[int]:
        return self.files.segments(tier)

    def payloads(self, start: int | None = None, stop: int | None = None) -> list[bytes]:
        return [record.payload for record in self.stream.read(start, stop)]

    def check(self) -> None:
        """Check every invariant of an open stream."""
        stream = self.stream
        assert [problem for problem in problems(stream) if not problem.leak] == []
        assert self.manifest.check() == []
        if stream.mode.value == "on":
            log_issues = log_problems(stream.ledger.log.files, stream.ledger.log.objects, settings=self.log_settings)
            assert [problem for problem in log_issues if not problem.leak] == []
            stream.ledger.project_now()
            assert stream.compare() == []

    def close(self) -> None:
        self.stream.close()
        self.manifest.close()
        self.objects.close()


def record(number: int, size: int = 100) -> bytes:
    """The payload of the record with this id: it contains the id, and does not compress to nothing."""
    head = f"{number}:".encode()
    return head + bytes((number * 7919 + i * i) & 0xFF for i in range(max(size - len(head), 0)))


def ids(records: Iterable[Any]) -> list[int]:
    return [record.id for record in records]
