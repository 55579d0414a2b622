"""Maintains the window of the owner's archive: trims the archive and deletes retired objects that no moment needs (A3, A8).

Terms
  retired   an object that nothing needs now, but that archived moments from before its retirement need. Table `retired`
  kept      the base that trimming keeps: the newest one that is older than `archive.retain_seconds` (`archive/window.py`)

Rules
  1. A retired object is deleted when the kept base is of a later moment: nothing that can be restored names the object. That
     is after the window at the earliest, and up to `archive.base_seconds` later.
  2. The archive is trimmed first. If that fails, nothing is deleted, because it is not known which moments exist.
  3. Clones keep an object longer (`archive/clones.py`). They are listed in each round, after parts of bases and log objects are
     deleted and before anything that a clone reads is: a clone that is not listed finds its moment gone, and is not created.
  4. With archiving off there are no moments: all retired objects that no clone needs are deleted at once. The objects of the
     archive stay.

The state after each durable step, and what follows if the owner dies there:
  objects deleted    rows of `retired` whose objects are gone    deleted again: a missing object is a success
  rows removed       nothing of them                             the next round finds others

Threads: one. Raises what manifest and object store raise.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from quire.archive.clones import ClonedMoments, CloneRegistration, SeenTakeovers, registrations
from quire.archive.window import Line, keys_in_order, list_archive, plan_trim
from quire.core.errors import NotFound, StillReferenced
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.durable.object_names import archive_epoch_prefix, clone_key, epoch_prefix
from quire.jobs.context import JobContext
from quire.manifest import tables as t
from quire.manifest.namespaces import retired_objects
from quire.manifest.ops.artifacts import ForgetRetired
from quire.objects.api import ObjectStore, list_objects

if TYPE_CHECKING:
    from quire.core.settings import ArchiveSettings

LOOK_SECONDS = 3_600.0
"""Time between two inspections of the archive: each lists it, and bases are written once an hour."""
SETTLED_MS = 60_000
"""A row of `retired` has the time at which its commit began. The commit may be in the cut after the one with the same clock
time, so the row counts as part of a moment only if it is this much older."""
STEP_OBJECTS = 1_000


@dataclass(slots=True)
class WindowRound:
    """Counts of what one inspection deleted."""

    trimmed: int = 0
    """Objects of the archive."""
    deleted: int = 0
    """Retired objects."""


def remove_abandoned(ctx: JobContext, owner_epoch: int) -> int:
    """Delete all objects of an abandoned owner epoch that a user has named; return how many.

    The parts of its bases go first: from then on no clone of it can be created, so the clones that are listed after that are
    all there are. Objects of its databases follow, then its archive, the log last: after an interruption it is still listed.
    """
    store = ctx.open_store(ctx.objects_url)
    with ctx.manifest.read() as txn:
        store_id, history = txn.store_id(), {*txn.current_namespace()[1].ancestors, txn.owner_epoch()}
        named = [row for _, row in txn.scan(t.REMOTE_NAMESPACE) if row.url and not row.owner_epoch]
    listing = list_archive(store, store_id)
    line = Line(store, listing)
    if owner_epoch not in line.off_line():
        hint = "`quire archive abandoned` lists them"
        raise NotFound("no such abandoned owner epoch", hint=hint, owner_epoch=owner_epoch)
    _refuse_cloned(store, store_id, history)
    archived = archive_epoch_prefix(store_id, owner_epoch)
    hit("archive.abandoned.before")
    ctx.collector.delete_abandoned(ctx.objects_url, archived, listing.epochs[owner_epoch].parts)
    _refuse_cloned(store, store_id, history)
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
    ctx.collector.delete_abandoned(ctx.objects_url, archived, keys)
    hit("archive.abandoned.logs")
    emit("info", "archive.abandoned_removed", owner_epoch=owner_epoch, objects=deleted + len(keys))
    return deleted + len(keys)


def _refuse_cloned(store: ObjectStore, store_id: str, history: Collection[int]) -> None:
    """Raise `StillReferenced` if a clone was made of a moment that is not in the history: it may read any abandoned epoch.

    `history` is that of the manifest: an epoch whose log was trimmed is on no line that the bucket still has.
    """
    current = {str(epoch) for epoch in history}
    for clone in registrations(store, store_id):
        if clone.position.partition(".")[0] not in current:
            hint = "`quire clones release` in the clone releases them; if the clone no longer exists, use `quire clones forget`"
            raise StillReferenced(
                "a clone may read objects of an abandoned epoch",
                hint=hint,
                clone=clone.clone_id,
                position=clone.position,
            )


class ArchiveWindow:
    """The archive window of one open store."""

    def __init__(self, ctx: JobContext, settings: ArchiveSettings) -> None:
        self._ctx = ctx
        self._settings = settings
        self._next_look = 0.0
        self._takeovers = SeenTakeovers(ctx.clock, self._forget_takeover)

    def look(self, *, now: bool = False) -> WindowRound:
        """Trim the archive and delete retired objects, if an inspection is due or `now` is set."""
        done = WindowRound()
        monotonic = self._ctx.clock.monotonic()
        if not now and monotonic < self._next_look:
            return done
        pause = min(LOOK_SECONDS, max(self._settings.retain_seconds, 60.0))
        if self._settings.mode == "off":
            done.deleted, kept = self._delete(before_ms=None)
            self._next_look = monotonic + pause if kept else monotonic
        else:
            self._next_look = monotonic + pause
            moment = self._trim(done)
            if moment is not None:
                done.deleted, _ = self._delete(before_ms=moment - SETTLED_MS)
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
        hit("archive.trim.before")
        ctx.collector.delete_now(ctx.objects_url, plan.parts)
        hit("archive.trim.parts")
        ctx.collector.delete_now(ctx.objects_url, plan.logs)
        hit("archive.trim.logs")
        clones = ClonedMoments.listed(store, store_id, self._takeovers)  # after the log objects are gone, see rule 3
        files = [key for key in plan.files if not clones.need(store, key, kept.at_ms)]
        ctx.collector.delete_now(ctx.objects_url, files)
        hit("archive.trim.files")
        done.trimmed = len(plan.parts) + len(plan.logs) + len(files)
        if done.trimmed:
            emit("info", "archive.trimmed", objects=done.trimmed, size_bytes=plan.size_bytes, oldest=str(kept.position))
        return kept.at_ms

    def _forget_takeover(self, takeover: CloneRegistration) -> None:
        ctx = self._ctx
        with ctx.manifest.read() as txn:
            store_id = txn.store_id()
        ctx.collector.delete_registration(ctx.objects_url, clone_key(store_id, takeover.clone_id))
        emit(
            "warning", "archive.takeover_forgotten", host=takeover.host, path=takeover.path, position=takeover.position
        )

    # ── retired objects ───────────────────────────────────────────────────────────────────────────────────────────────
    def _delete(self, before_ms: int | None) -> tuple[int, int]:
        """Delete objects retired before a moment, or all retired objects. Return how many, and how many of them were kept."""
        ctx, deleted = self._ctx, 0
        with ctx.manifest.read() as txn:
            due = [
                (digest, row) for digest, row in retired_objects(txn) if before_ms is None or row.since_ms <= before_ms
            ]
            store_id = txn.store_id()
        if not due:
            return 0, 0
        # after the trim, see rule 3
        clones = ClonedMoments.listed(ctx.open_store(ctx.objects_url), store_id, self._takeovers)
        by_url: dict[str, list[tuple[bytes, str]]] = {}
        for digest, row in due:  # outside the transaction: this reads from the bucket
            url = row.url or ctx.objects_url
            if not clones.need(ctx.open_store(url), row.name, row.since_ms):
                by_url.setdefault(url, []).append((digest, row.name))
        for url, objects in by_url.items():
            ours = ctx.collector.deletable(url, [name for _, name in objects])
            if len(ours) < len(objects):
                emit("warning", "archive.foreign_retired", store=url, objects=len(objects) - len(ours))
            waiting = (pair for pair in objects if pair[1] in ours)
            while step := list(islice(waiting, STEP_OBJECTS)):
                hit("archive.retired.before")
                ctx.collector.delete_now(url, [name for _, name in step])
                hit("archive.retired.deleted")
                ctx.manifest.submit([ForgetRetired([digest for digest, _ in step])]).result()
                hit("archive.retired.forgotten")
                deleted += len(step)
        return deleted, len(due) - deleted
