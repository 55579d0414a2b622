"""Retiring what a bundle supersedes, by records in the stream's own log.

    Tier2DeleteQueued ──▶ the objects are deleted ──▶ Tier2Deleted

Rules
  1. The log is the owner's: a stream that is open is asked, another one is opened for the moment and closed again.
  2. Objects of a stream that is not open are deleted while nobody is kept from opening it; if somebody has, it goes on itself.
  3. A crash anywhere leaves chunks that are there although a bundle holds them, or a queue in the log: the next job, or the
     next tick of the stream, goes on.

Raises `StalePlan`, and what log and object store raise.
"""

from __future__ import annotations

from quire.durable.failpoints import hit
from quire.stream.engine import StreamEngine
from quire.stream.mlog_bundle import BundleResult
from quire.stream.mlog_bundle import publish as queue
from quire.stream.mlog_modes import Mode


def retire(engine: StreamEngine, result: BundleResult) -> int:
    """Let go the chunks that a bundle holds; how many. None, if the stream's log is switched off."""
    stream_id = result.task.stream_id
    with engine.borrowed(stream_id) as (stream, is_open):
        if stream.mode is Mode.OFF:
            return 0
        keys = queue(stream.ledger.log, result)
        hit("jobs.bundle.queued")
    if is_open:
        stream.ledger.log.tick()
        return len(keys)
    engine.collect_of(stream_id, keys)
    hit("jobs.bundle.deleted")
    with engine.borrowed(stream_id) as (stream, is_open):
        if is_open:
            stream.ledger.log.tick()
        else:
            stream.ledger.log.drain_own_deletes()
    return len(keys)
