"""The state of an archive, for display: as recorded by the directory or the owner, and whether the bucket confirms it.

Raises nothing that the bucket raises: an unreachable bucket is part of the state.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from quire.archive.clones import CloneRegistration, registrations
from quire.archive.format import parse_archive_key
from quire.archive.log_reader import epochs
from quire.archive.standbys import Registration
from quire.archive.standbys import registrations as standby_registrations
from quire.archive.state_files import read_origin, read_standby_state
from quire.archive.window import RestorableRange, restorable_range
from quire.cli.formatting import ago_text, cost_text, count_of, size, span
from quire.core.clock import SystemClock, moment
from quire.core.errors import QuireError
from quire.durable.files import OsDisk
from quire.manifest import tables as t
from quire.objects.ownership import newer_owner
from quire.store.object_access import open_place

if TYPE_CHECKING:
    from quire.archive.status import ArchiveStatus
    from quire.core.settings import StoreSettings
    from quire.manifest.reads import ReadTxn

CLOCK = SystemClock()


class InBucket(msgspec.Struct, frozen=True, kw_only=True):
    """What the bucket has of an archive, if it was read."""

    range: RestorableRange | None = None
    clones: tuple[CloneRegistration, ...] = ()
    standbys: tuple[Registration, ...] = ()
    retired: int = 0
    """Objects that only archived moments and clones need."""
    is_empty: bool = False
    """Whether the bucket answered, and has no archive of the store."""
    newer_owner: str = ""
    """Who has taken the store over, if this directory was its owner and does not know it yet."""
    error: str = ""


def read_bucket(txn: ReadTxn, root: str, settings: StoreSettings) -> InBucket:
    """Read from the bucket what it has of a store's archive."""
    store_id = txn.store_id()
    try:
        with closing(open_place(txn, root, settings)) as bucket:
            if not epochs(bucket, store_id):
                return InBucket(is_empty=True, error="this bucket has no archive of the store")
            return InBucket(
                range=restorable_range(bucket, store_id),
                clones=tuple(registrations(bucket, store_id)),
                standbys=tuple(standby_registrations(bucket, store_id)),
                retired=txn.count(t.RETIRED),
                newer_owner=newer_owner(bucket, store_id, txn.owner_epoch(), OsDisk(), root),
            )
    except QuireError as error:
        return InBucket(error=error.what)


def doubt_about(status: ArchiveStatus, in_bucket: InBucket) -> str:
    """Return why the bucket does not confirm a status; empty if it does, or was not read."""
    restorable = in_bucket.range
    if restorable is None:
        return in_bucket.error
    if restorable.missing:
        parsed = parse_archive_key(restorable.missing)
        part = "an object of the log" if parsed is not None and parsed[1] == "log" else "a part of the newest base"
        return f"{part} is missing ({restorable.missing})"
    if status.is_safe and restorable.newest_at_ms < status.last_cut_at_ms:
        return f"it can be restored only to {moment(restorable.newest_at_ms)}"
    return ""


STATES = {
    "archived": "everything is in the bucket: losing this disk now would lose nothing",
    "closed": "closed with everything in the bucket: losing this disk now would lose nothing",
    "uploading": "changes are being uploaded: losing this disk now would lose them",
    "behind": "the bucket does not respond: losing this disk now would lose the backlog",
    "no base": "nothing can be restored yet: the first copy of the store is being uploaded",
    "fenced": "another directory has taken this store over: nothing more is archived from here",
    "stopped": "the archiver has stopped: losing this disk now would lose what was changed since; restart the owner",
    "not closed cleanly": "losing this disk now may lose changes: the next owner uploads what is not in the bucket",
    "owned": "a process owns the store but does not respond: the state in the bucket is shown",
    "standby": "nothing is archived from here: the owner that this standby follows archives the store",
    "restored": "nothing is archived from here: this restored directory is not the owner",
}


def doubtful_text(status: ArchiveStatus, in_bucket: InBucket, doubt: str) -> str:
    """Format a state that the bucket has not confirmed."""
    if in_bucket.newer_owner and status.state in CLOSED_STATES:
        return doubt
    if status.state == "not closed cleanly" and in_bucket.is_empty:  # such as a new clone
        return "nothing is archived yet: the next owner uploads the whole store"
    return f"{status.state} according to this directory; the bucket does not confirm it, do not rely on it: {doubt}"


COPY_STATES = ("standby", "restored")
CLOSED_STATES = ("closed", "not closed cleanly")


def state_text(status: ArchiveStatus) -> str:
    """Return the state of the archive as a sentence."""
    return STATES.get(status.state, status.state)


def copy_text(root: str, state: str) -> str:
    """Return what a standby or restored directory is a copy of, and of which moment."""
    if state == "standby":
        standby = read_standby_state(OsDisk(), root)
        return f"a standby of {standby.url}, as of {moment(standby.at_ms)}" if standby is not None else "a standby"
    origin = read_origin(OsDisk(), root)
    return f"a read-only restore of {origin.url}, as of {moment(origin.at_ms)}" if origin is not None else "a restore"


def promise_text(status: ArchiveStatus) -> str:
    """Return what the mode of the archive promises."""
    if status.mode == "sync":
        return "every change waits for the bucket"
    return f"uploads every {status.interval_seconds:g} s"


def waiting_lines(status: ArchiveStatus) -> list[tuple[str, str]]:
    """Format what waits. After an unclean end only the owner's files show it, and a copy uploads nothing."""
    if status.is_live or status.state == "closed":
        return [
            ("lag", f"{status.lag_seconds:.1f} s"),
            ("waiting", f"{size(status.memory_bytes)} in memory, {size(status.backlog_bytes)} on disk"),
            ("last error", status.last_error or "none"),
        ]
    if status.state in COPY_STATES:
        return []
    return [("waiting", f"unknown; at least {size(status.backlog_bytes)} on disk")]


def bucket_lines(status: ArchiveStatus, in_bucket: InBucket) -> list[tuple[str, str]]:
    """Format what the bucket has, or what the owner reports if the bucket was not read."""
    restorable = in_bucket.range
    newest = max(status.restorable_at_ms, restorable.newest_at_ms if restorable else 0)
    lines = [
        (
            "last upload",
            ago_text(status.last_cut_at_ms or (restorable.newest_at_ms if restorable else 0), CLOCK.now_ms()),
        )
    ]
    if restorable is None:
        if in_bucket.is_empty:
            return [*lines, ("restorable", f"nothing: {in_bucket.error}")]
        why = f"; the bucket could not be read: {in_bucket.error}" if in_bucket.error else ""
        return [*lines, ("restorable", f"to {moment(newest)}{why}")]
    lines += [
        ("restorable", f"from {moment(restorable.oldest_at_ms)} to {moment(newest)}"),
        ("window", f"{span(int(status.retain_seconds * 1000))} (archive.retain_seconds)"),
        ("in the bucket", f"{count_of(restorable.objects, 'object')} of the archive, {size(restorable.size_bytes)}"),
    ]
    if in_bucket.retired:
        kept_for = "moments of the window" + (", and clones" if in_bucket.clones else "")
        lines.append(("kept", f"{count_of(in_bucket.retired, 'object')} that only {kept_for} need"))
    lines += [("clone", f"{clone.clone_id}, at {clone.host}:{clone.path}") for clone in in_bucket.clones]
    lines += [
        ("standby", f"process {standby.pid} on {standby.host}, last seen {ago_text(standby.at_ms, CLOCK.now_ms())}")
        for standby in in_bucket.standbys
    ]
    return lines


def cost_lines(status: ArchiveStatus) -> list[tuple[str, str]]:
    """Format traffic and cost, which only a running owner has measured."""
    if not status.is_live:
        return []
    requests = count_of(round(status.writes_per_hour + status.reads_per_hour), "request")
    return [
        ("uploaded", f"{count_of(status.puts, 'object')}, {size(status.put_bytes)} since the store was opened"),
        ("per hour", f"{requests}, {size(round(status.put_bytes_per_hour))} uploaded"),
        ("per month", f"{cost_text(status)}, {size(status.put_bytes_per_month)} uploaded"),
    ]
