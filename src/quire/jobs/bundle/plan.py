"""Which manifest logs a bundle job looks at: those of the live streams, or of one.

Rules
  1. The manifest says which streams there are; what is in tier 2 is looked at by the runner (`run.look`): ten thousand
     listings are no work for a driver.
"""

from __future__ import annotations

from quire.core.errors import WrongKind
from quire.jobs.bundle.run import LookTask
from quire.jobs.context import JobContext
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, DbStatus

STREAM_BYTES = 1 << 20
"""What looking at one stream counts for when a runner is chosen: from 256 streams on it is Spark's, if that is left open."""


def looks(ctx: JobContext, txn: ReadTxn, db_id: int, period_seconds: float) -> list[LookTask]:
    """One task for each log; `db_id` 0: of all streams."""
    now = ctx.clock.now_ms()
    found = []
    for stream_id, record in txn.databases():
        if record.kind is DbKind.STREAM and record.status is not DbStatus.TOMBSTONED and db_id in (0, stream_id):
            place_id, url = txn.place_of(stream_id, ctx.objects_url)
            found.append(
                LookTask(
                    stream_id=stream_id,
                    url=url,
                    now_ms=now,
                    period_seconds=period_seconds,
                    prefixes=txn.object_prefixes(place_id)[:1],
                )
            )
    if db_id and not found:
        raise WrongKind("only streams have a manifest log", hint="`quire ls` shows the kinds", db_id=db_id)
    return found
