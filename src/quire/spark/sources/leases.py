"""A task keeps the version it reads: it renews the lease of its query for as long as it reads.

Rules
  1. Any task keeps what all tasks of its query read: they share one lease. Spark tells nobody that a query has ended, so the
     lease ends `keep_seconds` after the last of them has read (`manifest/leases.py`).
  2. Reading needs no owner, so one that cannot be reached fails no task; what it has not heard, it ends by itself.
  3. A read that fails after the lease has ended says so (`SnapshotGone`): the version may have been deleted under it. It never
     reads wrong rows: names of objects are never used twice, and frames of a file's former life fail their checks.

Threads: one of its own while a task reads. Importable on executors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.core.errors import LeaseExpired, QuireError, SnapshotGone
from quire.service.tickets import LEASE_RENEW, OfLease

if TYPE_CHECKING:
    from quire.spark.access import Access

KEEP_SECONDS = 300
"""How long a version without a name is kept after it was last read."""

RENEWALS = 4
"""In the length of a lease."""

CALL_SECONDS = 5.0


@contextmanager
def kept(access: Access, lease_id: int, keep_seconds: float) -> Iterator[None]:
    """Keep what a lease lends while the block lasts; nothing happens without one."""
    if not lease_id:
        yield
        return
    done = threading.Event()
    thread = threading.Thread(
        target=_renew, args=(access, lease_id, keep_seconds / RENEWALS, done), name="quire-lease", daemon=True
    )
    thread.start()
    try:
        yield
    except QuireError as error:
        if has_ended(access, lease_id):
            raise SnapshotGone(
                "the version that this DataFrame reads is no longer kept",
                hint="load it again for the newest one; a named snapshot, or a longer `keep_seconds`, keeps one",
                cause=str(error),
            ) from error
        raise
    finally:
        done.set()


def has_ended(access: Access, lease_id: int) -> bool:
    """Whether the owner says that a lease is over; renewed if it is not."""
    try:
        channel = access.channel()
        try:
            channel.ask(LEASE_RENEW, OfLease(lease_id), timeout=CALL_SECONDS)
        finally:
            channel.close()
    except LeaseExpired:
        return True
    except QuireError:
        return False  # rule 2
    return False


def _renew(access: Access, lease_id: int, every_seconds: float, done: threading.Event) -> None:
    while not done.is_set():
        if has_ended(access, lease_id):
            return
        done.wait(every_seconds)
