"""Maintains the window of the owner's archive: trims the archive and deletes retired objects that no moment needs (A3, A8).

Terms
  retired   an object that nothing needs now, but that archived moments from before its retirement need. Table `retired`
  kept      the base that trimming keeps: the newest one that is older than `archive.retain_seconds` (`archive/window.py`)

Rules
  1. A retired object is deleted when the kept base is of a later moment: nothing that can be restored names the object. That
     is after the window at the earliest, and up to `archive.base_seconds` later.
  2. The archive is trimmed first. If that fails, nothing is deleted, because it is not known which moments exist.
  3. `kept_until` may keep an object longer, for clones: it gets the name, and the moment since which nothing needs the object.
  4. With archiving off there are no moments: all retired objects are deleted at once. The objects of the archive stay.

The state after each durable step, and what follows if the owner dies there:
  objects deleted    rows of `retired` whose objects are gone    deleted again: a missing object is a success
  rows removed       nothing of them                             the next round finds others

Threads: one. Raises what manifest and object store raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from quire.archive.clones import registrations
from quire.archive.window import Line, keys_in_order, list_archive, plan_trim
from quire.core.errors import NotFound, StillReferenced
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.durable.object_names import archive_epoch_prefix, epoch_prefix
from quire.jobs.context import JobContext
from quire.manifest import tables as t
from quire.manifest.namespaces import retired_objects
from quire.manifest.ops.artifacts import ForgetRetired
from quire.objects.api import list_objects

if TYPE_CHECKING:
    from quire.core.settings import ArchiveSettings

LOOK_SECONDS = 3_600.0
"""Time between two inspections of the archive: each lists it, and bases are written once an hour."""
SETTLED_MS = 60_000
"""A row of `retired` has the time at which its commit began. The commit may be in the cut after the one with the same clock
time, so the row counts as part of a moment only if it is this much older."""
STEP_OBJECTS = 1_000

KeptUntil = Callable[[str, str, int], int]
"""(URL, name, since when this store no longer needs it) → until when a clone keeps it, in milliseconds; 0: no clone does."""


def kept_by_no_clone(_url: str, _name: str, _since_ms: int) -> int:
    """Return 0: the store has no clones."""
    return 0


@dataclass(slots=True)
class WindowRound:
    """Counts of what one inspection deleted."""

    trimmed: int = 0
    """Objects of the archive."""
    deleted: int = 0
    """Retired objects."""


def remove_abandoned(ctx: JobContext, owner_epoch: int) -> int:
    """Delete all objects of an abandoned owner epoch that a user has named; return how many.

    Objects of its databases go first, then its archive, the log last: after an interruption the epoch is still listed.
    """
    store = ctx.open_store(ctx.objects_url)
    with ctx.manifest.read() as txn:
        store_id = txn.store_id()
        named = [row for _, row in txn.scan(t.REMOTE_NAMESPACE) if row.url and not row.owner_epoch]
    listing = list_archive(store, store_id)
    line = Line(store, listing)
    if owner_epoch not in line.abandoned():
        hint = "`quire archive abandoned` lists them"
        raise NotFound("no such abandoned owner epoch", hint=hint, owner_epoch=owner_epoch)
    current = {str(epoch) for epoch, _ in line.epochs}
    for clone in registrations(store, store_id):
        if clone.position.partition(".")[0] not in current:
            hint = "`quire clones release` in the clone releases them; if the clone no longer exists, use `quire clones forget`"
            raise StillReferenced(
                "a clone may read objects of an abandoned epoch",
                hint=hint,
                clone=clone.clone_id,
                position=clone.position,
            )
    below = epoch_prefix(store_id, owner_epoch)
    places = {(ctx.objects_url, below)}
    places |= {(row.url, f"{row.prefix.removesuffix('/')}/{below}" if row.prefix else below) for row in named}
    deleted = 0
    for url, prefix in sorted(places):
        keys = [info.key for info in list_objects(ctx.open_store(url), prefix)]
        ctx.collector.delete_abandoned(url, prefix, keys)
        deleted += len(keys)
    hit("archive.abandoned.objects")
    keys = keys_in_order(listing.epochs[owner_epoch], store_id, owner_epoch)
    ctx.collector.delete_abandoned(ctx.objects_url, archive_epoch_prefix(store_id, owner_epoch), keys)
    emit("info", "archive.abandoned_removed", owner_epoch=owner_epoch, objects=deleted + len(keys))
    return deleted + len(keys)


class ArchiveWindow:
    """The archive window of one open store."""

    def __init__(self, ctx: JobContext, settings: ArchiveSettings, kept_until: KeptUntil = kept_by_no_clone) -> None:
        self._ctx = ctx
        self._settings = settings
        self._kept_until = kept_until
        self._next_look = 0.0

    def look(self, *, now: bool = False) -> WindowRound:
        """Trim the archive and delete retired objects, if an inspection is due or `now` is set."""
        done = WindowRound()
        monotonic = self._ctx.clock.monotonic()
        if self._settings.mode == "off":
            done.deleted = self._delete(before_ms=None)
        elif now or monotonic >= self._next_look:
            self._next_look = monotonic + min(LOOK_SECONDS, max(self._settings.retain_seconds, 60.0))
            moment = self._trim(done)
            if moment is not None:
                done.deleted = self._delete(before_ms=moment - SETTLED_MS)
        return done

    # ── the archive's own objects ─────────────────────────────────────────────────────────────────────────────────────
    def _trim(self, done: WindowRound) -> int | None:
        """Delete archive objects that no moment of the window needs; return the moment of the kept base, `None` if all are
        needed."""
        ctx = self._ctx
        with ctx.manifest.read() as txn:
            store_id, epoch, ancestors = txn.store_id(), txn.owner_epoch(), txn.current_namespace()[1].ancestors
        store = ctx.open_store(ctx.objects_url)
        listing = list_archive(store, store_id)
        line = Line(store, listing)
        if not line.epochs or line.epochs[0][0] != epoch:
            return None  # this owner has archived nothing yet, or is no longer the newest owner
        kept = line.kept(ctx.clock.now_ms() - int(self._settings.retain_seconds * 1000))
        if kept is None:
            return None
        plan = plan_trim(store, listing, kept, ancestors)
        files = [key for key in plan.files if not self._is_kept(ctx.objects_url, key, kept.at_ms)]
        for keys, step in ((plan.parts, "parts"), (plan.logs, "logs"), (files, "files")):
            ctx.collector.delete_now(ctx.objects_url, keys)
            hit(f"archive.trim.{step}")
            done.trimmed += len(keys)
        if done.trimmed:
            emit("info", "archive.trimmed", objects=done.trimmed, size_bytes=plan.size_bytes, oldest=str(kept.position))
        return kept.at_ms

    # ── retired objects ───────────────────────────────────────────────────────────────────────────────────────────────
    def _delete(self, before_ms: int | None) -> int:
        """Delete objects retired before a moment, or all retired objects; return how many."""
        ctx, deleted = self._ctx, 0
        with ctx.manifest.read() as txn:
            due = [
                (digest, row) for digest, row in retired_objects(txn) if before_ms is None or row.since_ms <= before_ms
            ]
        by_url: dict[str, list[tuple[bytes, str]]] = {}
        for digest, row in due:  # outside the transaction: this reads from the bucket
            url = row.url or ctx.objects_url
            if not self._is_kept(url, row.name, row.since_ms):
                by_url.setdefault(url, []).append((digest, row.name))
        for url, objects in by_url.items():
            ours = ctx.collector.deletable(url, [name for _, name in objects])
            if len(ours) < len(objects):
                emit("warning", "archive.foreign_retired", store=url, objects=len(objects) - len(ours))
            waiting = (pair for pair in objects if pair[1] in ours)
            while step := list(islice(waiting, STEP_OBJECTS)):
                ctx.collector.delete_now(url, [name for _, name in step])
                hit("archive.retired.deleted")
                ctx.manifest.submit([ForgetRetired([digest for digest, _ in step])]).result()
                hit("archive.retired.forgotten")
                deleted += len(step)
        return deleted

    def _is_kept(self, url: str, name: str, since_ms: int) -> bool:
        return self._kept_until(url, name, since_ms) > self._ctx.clock.now_ms()
