"""One round of a stream's upkeep: continues unfinished moves, begins due ones, and enforces budgets.

An object store that fails is not used for a while, longer after each failure; only the moves that need it wait. A damaged
segment is reported once and then skipped. After opening, tier 2 is listed once and compared with the log: missing objects are
uploaded again from the local copy; segments without any copy are marked `NEEDS_REPAIR` in the log until they reappear or are
retired.

Threads: one round at a time. Raises: `StoreUnusable`, `StoreClosed`; other errors are reported, and the move is retried."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from quire.core.clock import Clock
from quire.core.errors import Corruption, NotFound, QuireError, StorageFault, StoreClosed, StoreUnusable, Unavailable
from quire.core.events import emit
from quire.core.settings import StreamSettings
from quire.stream.mlog_modes import Mode
from quire.stream.mlog_records import CustomEvent, Schema
from quire.stream.mlog_states import Hydration, Remote, Warm
from quire.stream.segment_events import Ledger
from quire.stream.state import Retention, StreamState, due
from quire.stream.tiers import Tiers

RETRY_SECONDS = 0.25
RETRY_SECONDS_MAX = 60.0


class Moved(msgspec.Struct):
    """The result of a round."""

    compressed: int = 0
    uploaded: int = 0
    evicted: int = 0
    hydrated: int = 0
    retired: int = 0
    failed: str = ""
    """The error of the object store, if it failed; otherwise empty."""

    @property
    def total(self) -> int:
        return self.compressed + self.uploaded + self.evicted + self.hydrated + self.retired


class StreamMaintenance:
    """Runs the upkeep of one stream."""

    def __init__(
        self, tiers: Tiers, ledger: Ledger, state: StreamState, settings: StreamSettings, clock: Clock
    ) -> None:
        # constant after construction
        self._tiers = tiers
        self._ledger = ledger
        self._state = state
        self._settings = settings
        self._clock = clock
        # guarded by _round
        self._round = threading.Lock()
        self._is_over = False
        self._damaged: set[int] = set()
        self._failures = 0
        self._retry_at = clock.monotonic()
        self._is_reconciled = False
        self.object_bytes: dict[int, int] = {}
        """Sizes in bytes of objects whose size the log does not have."""

    @property
    def retention(self) -> Retention:
        """The retention in effect: the stream's own, or the store's."""
        settings = self._settings
        return self._state.stored.retention or Retention(seconds=settings.retain_seconds, bytes=settings.retain_bytes)

    def stop(self) -> None:
        """Wait for the current round to end, and start no other."""
        with self._round:
            self._is_over = True

    def tick(self) -> Moved:
        """Run one round."""
        done = Moved()
        with self._round:
            if self._is_over:
                return done
            self._ledger.project()
            self._reconcile(done)
            # Retirement first, so that no work is done for a segment that goes; eviction last, because it needs the
            # copies that the other moves make.
            self._retire(done)
            self._compress(done)
            self._move_remote(done)
            self._evict(done)
            ticked = self._ledger.guarded(self._ledger.log.tick)
            done.failed = done.failed or (ticked.failed if ticked is not None else "")
            self._ledger.watch()
        return done

    # ── moves ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def retire(self) -> int:
        """Remove the segments that retention allows, and return their number."""
        done = Moved()
        with self._round:
            self._retire(done, now=True)
        return done.retired

    def _reconcile(self, done: Moved) -> None:
        """Compare tier 2 with the log, and upload missing objects again. If the object store fails, a later round tries
        again."""
        if self._is_reconciled or self._ledger.mode is not Mode.ON or not self._store_is_due():
            return
        objects: dict[str, int] = {}

        def look(_: int) -> None:
            nonlocal objects
            objects = self._tiers.objects_there()
            self._ledger.log.reconcile()

        view = self._ledger.view
        remote = [segment for segment in view if segment.is_remote]
        if (remote or self._ledger.log.committed.chunk_index) and not self._try(done, 0, look):
            return
        for segment in remote:
            if segment.key in objects:
                if segment.segment_id in self._ledger.index.needs_repair:
                    self._ledger.record_steps((CustomEvent(Schema.REPAIRED), segment.segment_id))
                if not segment.warm_bytes:
                    self.object_bytes[segment.segment_id] = objects[segment.key]
                continue
            if not (segment.is_hot or segment.is_warm):
                self._lost(segment.segment_id)
            elif self._try(done, segment.segment_id, self._tiers.send_again):
                done.uploaded += 1
            elif segment.segment_id not in self._damaged:
                return
        self._is_reconciled = True

    def _lost(self, segment_id: int) -> None:
        """Mark a segment whose only copy is a missing object. The log has the mark until the object reappears or the segment is
        retired."""
        self._damaged.add(segment_id)
        segment = self._ledger.view.get(segment_id)
        if segment is None or segment_id in self._ledger.index.needs_repair or not segment.is_remote:
            return
        self._ledger.record_steps((CustomEvent(Schema.NEEDS_REPAIR), segment_id))
        emit(
            "error",
            "stream.needs_repair",
            stream=self._ledger.log.files.stream_id,
            segment_id=segment_id,
            key=segment.key,
        )

    def _retire(self, done: Moved, *, now: bool = False) -> None:
        view = self._ledger.view
        consumers = list(self._state.stored.consumers.values())
        # These first, whatever retention says now: for readers they are gone already.
        being_removed = [segment for segment in view if segment.is_being_removed]
        segments = being_removed + [
            segment
            for segment in due(view.sealed, self.retention, consumers, now_ms=self._clock.now_ms())
            if segment not in being_removed
        ]
        for segment in segments:
            needs_store = segment.state.remote not in (Remote.NONE, Remote.DELETED)
            if needs_store and not (now or self._store_is_due()):
                return  # segments are retired oldest first: the later ones wait
            self._damaged.discard(segment.segment_id)  # retiring reads nothing: a damaged segment may be retired too
            if not self._try(done, segment.segment_id, self._tiers.retire, raising=now):
                return
            done.retired += 1

    def _compress(self, done: Moved) -> None:
        for segment in self._ledger.view.sealed:
            begun = segment.state.warm is Warm.COMPRESSING
            wanted = self._settings.compress and segment.is_hot and not segment.is_warm and not segment.is_remote
            if (begun or wanted) and self._try(done, segment.segment_id, self._tiers.compress):
                done.compressed += 1

    def _move_remote(self, done: Moved) -> None:
        """Make the moves that need the object store: uploads, and unfinished hydrations."""
        for segment in self._ledger.view.sealed:
            state = segment.state
            begun = state.remote in (Remote.UPLOADING, Remote.FAILED)
            wanted = self._settings.upload and state.remote is Remote.NONE and (segment.is_hot or segment.is_warm)
            if (begun or wanted) and self._store_is_due() and self._try(done, segment.segment_id, self._tiers.upload):
                done.uploaded += 1
            if state.hydration is not Hydration.IDLE and self._store_is_due():
                done.hydrated += self._try(done, segment.segment_id, self._tiers.hydrate)

    def _evict(self, done: Moved) -> None:
        view, settings = self._ledger.view, self._settings
        excess = sum(segment.durable_bytes for segment in view.sealed if segment.is_hot) - settings.hot_bytes
        for segment in self._tiers.coldest(segment for segment in view.sealed if segment.is_hot):
            if excess <= 0:
                break
            if (segment.is_warm or segment.is_remote) and segment.state.warm is not Warm.COMPRESSING:
                done.evicted += self._tiers.evict(segment.segment_id)
                excess -= segment.durable_bytes
        excess = sum(segment.warm_bytes for segment in view.sealed if segment.is_warm) - settings.warm_bytes
        for segment in self._tiers.coldest(segment for segment in view.sealed if segment.is_warm):
            if excess <= 0:
                break
            if segment.is_remote:
                done.evicted += self._tiers.evict(segment.segment_id, warm=True)
                excess -= segment.warm_bytes

    # ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _store_is_due(self) -> bool:
        return self._clock.monotonic() >= self._retry_at

    def _try(self, done: Moved, segment_id: int, move: Callable[[int], object], *, raising: bool = False) -> bool:
        """Make a move; return False if it cannot be made now."""
        if segment_id in self._damaged:
            return False
        try:
            moved = move(segment_id) is not False
        except (StoreClosed, StoreUnusable):
            raise
        except (Unavailable, StorageFault) as error:
            if raising:
                raise
            wait = min(RETRY_SECONDS * 2**self._failures, RETRY_SECONDS_MAX)
            self._failures = min(self._failures + 1, 16)
            self._retry_at = self._clock.monotonic() + wait
            done.failed = str(error)
            return False
        except QuireError as error:
            if raising:
                raise
            if isinstance(error, (Corruption, NotFound)):
                self._damaged.add(segment_id)
                segment = self._ledger.view.get(segment_id)
                if isinstance(error, NotFound) and segment is not None and not (segment.is_hot or segment.is_warm):
                    self._lost(segment_id)
            done.failed = str(error)
            emit(
                "error",
                "stream.move_refused",
                stream=self._ledger.log.files.stream_id,
                segment_id=segment_id,
                error=str(error),
            )
            return False
        self._failures = 0
        return moved
