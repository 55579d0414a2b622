"""A store with a stream of small segments for tests of stream jobs, and a program that is killed while it runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import quire
from quire.core.settings import MaintenanceSettings, ManifestLogSettings, StoreSettings, StreamSettings
from quire.stream.mlog_verify import verify as log_problems
from quire.stream.state import Retention
from quire.stream.stream import Stream
from quire.stream.verify import problems

SETTINGS = StoreSettings(
    maintenance=MaintenanceSettings(enabled=False, delete_grace_seconds=0.0),
    stream=StreamSettings(segment_bytes=16 << 10, record_bytes_max=8 << 10),
    manifest_log=ManifestLogSettings(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=2, sealed_kept=1),
)


def fill(stream: Stream, segments: int, records: int = 20) -> None:
    """Append and seal this many segments."""
    for _ in range(segments):
        stream.append([b"%d" % number * 30 for number in range(records)]).result()
        stream.seal()


def check(store: quire.Store) -> None:
    """Check every rule of the manifest, of the open streams and of their logs."""
    for stream in store.streams.streams():
        stream.ledger.project_now()
        assert [problem for problem in problems(stream) if not problem.leak] == []
        log = stream.ledger.log
        log_faults = log_problems(log.files, log.objects, settings=SETTINGS.manifest_log)
        assert [problem for problem in log_faults if not problem.leak] == []
    assert store.manifest.check() == []


def main(root: str) -> None:
    """Write four segments in all tiers and publish them, retire two, delete what is unreferenced. Dies at its
    failpoint."""
    with quire.open(Path(root), settings=SETTINGS) as store:
        clicks = store.stream("clicks", create=True)
        if clicks.end_record == 1:
            fill(clicks, 4)
            clicks.upload(1, 2)
            clicks.evict(1, warm=True)
        store.checkpoint("clicks")
        clicks.retain(Retention(bytes=sum(segment.durable_bytes for segment in clicks.ledger.view.sealed[-2:])))
        clicks.retire()
        store.maintain()


if __name__ == "__main__":
    main(sys.argv[1])
