"""A store with a stream whose segments are small, for tests of the jobs about streams; and a process that dies in them."""

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
    """Make sealed segments."""
    for _ in range(segments):
        stream.append([b"%d" % number * 30 for number in range(records)]).result()
        stream.seal()


def check(store: quire.Store) -> None:
    """Every rule of the manifest, of the open streams and of their logs."""
    for stream in store.streams.streams():
        stream.ledger.project_now()
        assert [each for each in problems(stream) if not each.leak] == []
        log = stream.ledger.log
        found = log_problems(log.files, log.objects, settings=SETTINGS.manifest_log)
        assert [each for each in found if not each.leak] == []
    assert store.manifest.check() == []


def main(root: str) -> None:
    """A life: four segments in all tiers, published; two retired; what is at zero deleted. Dies where it is told."""
    with quire.open(Path(root), settings=SETTINGS) as store:
        clicks = store.stream("clicks", create=True)
        if clicks.end_record == 1:
            fill(clicks, 4)
            clicks.upload(1, 2)
            clicks.evict(1, warm=True)
        store.checkpoint("clicks")
        clicks.retain(Retention(bytes=sum(each.durable_bytes for each in clicks.ledger.view.sealed[-2:])))
        clicks.retire()
        store.maintain()


if __name__ == "__main__":
    main(sys.argv[1])
