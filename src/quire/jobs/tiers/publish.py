"""What a move of an artifact's bytes tells the manifest."""

from __future__ import annotations

from quire.jobs.steps import update
from quire.jobs.tiers.plan import MovePlan
from quire.jobs.tiers.run import MoveTask, Uploaded
from quire.manifest.ops.base import Op
from quire.manifest.records import Residency, VerifyState


def announcement(plan: MovePlan) -> Op:
    """An object will be put: before its first byte is sent."""
    assert plan.announce is not None, "it was announced before"
    namespace_id, suffix = plan.announce
    return update(plan.task.place.key, namespace_id=namespace_id, suffix=suffix)


def uploaded(task: MoveTask, done: Uploaded, *, bitmap_hash: int, at_ms: int) -> Op:
    """There is an object, and this is what it is."""
    return update(
        task.place.key,
        residency=Residency.LOCAL_AND_REMOTE,
        sha256=done.sha256,
        uploaded_at_ms=at_ms,
        bitmap_hash=bitmap_hash or None,
        verify_state=_doubt_removed(task),  # the file was read, and the object is it
    )


def evicted(task: MoveTask) -> Op:
    """There is no file any more: before it goes."""
    return update(task.place.key, residency=Residency.EVICTED)


def hydrated(task: MoveTask, *, fetched: bool) -> Op:
    """There is a file, complete and on disk. One that was there already says nothing about the object: doubt stays."""
    doubt = _doubt_removed(task) if fetched else None
    return update(task.place.key, residency=Residency.LOCAL_AND_REMOTE, verify_state=doubt)


def _doubt_removed(task: MoveTask) -> VerifyState | None:
    """A repaired artifact is not damaged any more, and not verified either: both copies have been seen to be the same."""
    return VerifyState.UNVERIFIED if task.is_suspect else None
