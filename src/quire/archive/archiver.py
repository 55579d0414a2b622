"""The archiver: takes cuts from the queue, uploads log objects and bases, and bounds what waits for the bucket (A4 to A9).

Terms
  cut        where the archiver stopped taking events: those it took become one or more log objects
  outbox     objects that are encoded and not in the bucket yet, in order (outbox.py)
  archived   the ordinal of the queue up to which everything is in the bucket

What is on disk and in the bucket at each step, and what follows if the process dies there (a life is one opening of a store):
  handed over      nothing                                  the next life finds no clean end in archive.json: base
  encoded          perhaps a file in archive/               the same; the file is removed at the next opening
  artifact put     an object that no log names              trimmed by its position, once out of the window
  log object put   a longer chain                           restorable to here; the next life continues after it with a base
  base parts put   objects that no log names                the same
  base named       a base that counts                       restorable with it
  closed           archive.json with position and digest    the next life continues without a base

A log object's name is created once. If it exists already, the object is our own (a response was lost), one of a former life
that arrived late (the log then continues after it, with a base), or a successor's: then this owner is fenced before any change
is reported as archived (A2).

Threads: one uploads, in order, artifacts before the object that names them; one takes cuts and encodes them, and in mode `sync`
the uploading thread does so, too, before it wakes the calls that were served (decision 081): `_cutting` admits one of the two.
A third reads a base while the others continue. Writers of the store do not wait for any of them, except in mode `sync`.

Raises `NotArchived` and `StoreFenced`, to callers that wait in mode `sync`.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial

from quire.archive.arrivals import Arrivals
from quire.archive.artifacts import Artifacts
from quire.archive.base_writer import write_base
from quire.archive.format import (
    NONE,
    AnyEvent,
    BaseEvent,
    BreakEvent,
    CommitEvent,
    Header,
    Kind,
    Position,
    encode_object,
)
from quire.archive.outbox import Outbox, Outgoing
from quire.archive.queue import Entry, PendingArtifact, PendingBase, Slot, bounded_queue
from quire.archive.recorder import SPOOL, Recorder, whole_file
from quire.archive.sealing import end_of_log
from quire.archive.standbys import StandbyWatch
from quire.archive.state_files import ArchiveState, config_digest, take_archive_state, write_archive_state
from quire.archive.status import ArchiveStatus, DrillRecord, Figures, Traffic, read_drill, status_of
from quire.archive.uploader import Uploader
from quire.core.clock import Clock
from quire.core.errors import (
    InvalidInput,
    NotArchived,
    ObjectStoreUnavailable,
    QuireError,
    StoreFenced,
    Unavailable,
)
from quire.core.events import emit_safely
from quire.core.settings import ArchiveSettings
from quire.durable import names
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.manifest.overlay import TableRows
from quire.manifest.store import ManifestStore
from quire.objects.api import ObjectStore
from quire.objects.requests import RequestCount

RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses between attempts to reach the bucket; the last one repeats."""
BLOCKED_SECONDS = 0.001
"""Between two attempts to cut while a commit that is not finished is at the front of the queue, and a call waits."""
END_SECONDS = 10.0
"""How long a retirement of objects waits for the first answer of the bucket after an opening."""
BASE_WAIT_SECONDS = 600.0
"""How long `base` waits for the log object that names the base; its parts are in the bucket by then."""
BASE_PAUSE_SECONDS = 60.0
"""Shortest time between the beginnings of two bases that the growth of the log makes due."""
FIRST_LOG_BYTES = 64 * 1024 * 1024
"""A base is due when the log since the last base is larger than that base and than this."""


class Archiver:
    """The archive of an open store. `start` it before the first change, `close` it after the last."""

    def __init__(
        self,
        *,
        root: str,
        disk: Disk,
        clock: Clock,
        manifest: ManifestStore,
        objects: Callable[[], ObjectStore],
        settings: ArchiveSettings,
        fence: Callable[[StoreFenced], None],
        confirm: Callable[[], None],
        depose: Callable[[StoreFenced], None],
        drill: Callable[[], DrillRecord] | None = None,
        requests: Callable[[], RequestCount] = RequestCount,
    ) -> None:
        """Create the archiver. `confirm` checks in the bucket that the store is still ours, and raises `StoreFenced` if not.
        `requests` counts those of the whole store."""
        # constant after construction
        self.queue = bounded_queue(settings.memory_bytes, self._cut_early)
        self.recorder = Recorder(disk, root, self.queue, self._artifact_complete)
        self.settings = settings
        self.standbys = StandbyWatch(self.queue, objects, confirm)
        self._root = root
        self._disk = disk
        self._clock = clock
        self._manifest = manifest
        self._objects = objects
        self._fence = fence
        self._depose = depose
        self._drill = drill
        self._requests = requests
        self._store_id, self._epoch = "", 0  # constant after `start`
        spool = os.path.join(root, SPOOL)
        self._artifacts = Artifacts(disk, spool)
        self.traffic = Traffic()
        self._uploader = Uploader(disk, lambda: self._objects(), self._artifacts, self.traffic, confirm)
        # guarded by _lock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """Wakes the archiver's own threads."""
        self._outbox = Outbox(disk, spool, self._artifacts, settings, self._changed)
        self._arrivals = Arrivals()
        """What the bucket has. While calls wait for more, cuts do not wait for the interval."""
        self._stop = False
        self._is_drained = False
        self._is_end_unknown = False
        """Whether the log in the bucket does not end at the expected position, so that its end must be found again."""
        self.last_error = ""
        # guarded by _cutting, which one of the two threads holds while it cuts; other threads read it for status reports
        self._cutting = threading.Lock()
        self._is_blocked = False
        """Whether the last cut found nothing but a commit that is not finished."""
        self._next: Position | None = None
        self._parent = Position(0, 0)
        self._digest = b""
        self._restorable, self._base = NONE, NONE
        self._needs_base = True
        self._at_ms = 0
        """Time in the last header. It never decreases, even if the clock does."""
        self._base_thread: threading.Thread | None = None
        self._is_base_unnamed = False
        """Whether a base has begun that the log does not name yet. Another one would upload everything twice, and could
        overwrite parts that the log is about to name."""
        self._has_base_failed = False
        self._base_began = float("-inf")
        self._base_bytes = self._log_bytes = self._base_at_ms = self._last_cut_ms = self._restorable_ms = 0
        self._threads: list[threading.Thread] = []

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def start(self) -> None:
        """Continue where the last life ended if nothing has changed since, otherwise with a base. Sends no request."""
        with self._manifest.read() as txn:
            self._store_id, self._epoch = txn.store_id(), txn.owner_epoch()
        self._artifacts.sweep()
        state = take_archive_state(self._disk, self._root)
        if state is not None and not state.continues(self._store_id, self._epoch, self._manifest.env.last_txn_id()):
            state = None
        if state is not None:
            self._next = Position(state.position.epoch, state.position.number + 1)
            self._digest, self._restorable, self._base = state.digest, state.restorable, state.base
            self._base_bytes, self._log_bytes, self._at_ms = state.base_bytes, state.log_bytes, state.at_ms
            self._base_began = time.monotonic() - max(self._clock.now_ms() - state.base_at_ms, 0) / 1000
            self._base_at_ms = state.base_at_ms
            self._artifacts.resume(state.files)
            self._manifest.writer.commit_not_before(state.at_ms)
            self._needs_base, self._arrivals.is_restorable = False, True
            self._last_cut_ms = self._restorable_ms = state.at_ms
            if (digest := config_digest(self._disk, self._root)) and digest != state.config_digest:
                # the settings were edited while the store was closed, and no base will read them for an hour
                for event in whole_file(self._disk, os.path.join(self._root, names.CONFIG), names.CONFIG):
                    self.queue.append(event)
        # No commit may come between the comparison above and this line: it would be in no log object, and no base would
        # follow. Changes of files are recorded since the constructor.
        self._manifest.writer.archive = self
        self._manifest.writer.record_rows()
        for run, name in ((self._run_cuts, "quire-archive"), (self._run_puts, "quire-archive-put")):
            self._threads.append(threading.Thread(target=run, name=name, daemon=True))
            self._threads[-1].start()
        self.standbys.start(self._store_id, self._epoch)

    def close(self) -> bool:
        """Take the last cut and wait up to `close_seconds` for its upload. Return whether everything is in the bucket."""
        deadline = time.monotonic() + self.settings.close_seconds
        with self._lock:
            self._stop = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.1))
        if self._base_thread is not None:
            self._base_thread.join(max(deadline - time.monotonic(), 0.1))
        self.standbys.close()  # after the uploads: an owner that is taken for dead during them would lose them
        # Only if the log in the bucket leads to exactly this state. Without archive.json, the next life begins with a
        # base.
        if is_complete := self._is_complete():
            assert self._next is not None
            state = ArchiveState(
                store_id=self._store_id,
                position=Position(self._next.epoch, self._next.number - 1),
                digest=self._digest,
                restorable=self._restorable,
                base=self._base,
                base_bytes=self._base_bytes,
                log_bytes=self._log_bytes,
                # Final: `Store.close` ends the manifest's writer before the archive.
                transaction=self._manifest.env.last_txn_id(),
                at_ms=self._at_ms,
                base_at_ms=self._base_at_ms,
                config_digest=config_digest(self._disk, self._root),
                files=self._artifacts.known(),
            )
            write_archive_state(self._disk, self._root, state)
        elif self._arrivals.failure is None and self._threads:  # without threads the opening was refused
            emit_safely("warning", "archive.incomplete", lag_seconds=self.lag_seconds(), error=self.last_error)
        self.queue.close()
        return is_complete

    def _is_complete(self) -> bool:
        """Return whether the threads have ended, and left nothing that is not in the bucket."""
        with self._lock:
            return (
                not any(thread.is_alive() for thread in self._threads)
                and self._arrivals.failure is None
                and self._next is not None
                and not self._needs_base
                and not self._outbox
                and not self._is_end_unknown
                and self._arrivals.archived >= self.queue.end
            )

    # ── for threads that change the store ─────────────────────────────────────────────────────────────────────────────
    def reserve(self) -> Slot:
        """Reserve a slot before a commit of the manifest (`manifest.writer.CommitLog`)."""
        return self.queue.reserve()

    def fill(self, slot: Slot, written: list[TableRows]) -> None:
        """Fill the slot of a commit that is durable."""
        slot.fill(CommitEvent(tuple(written)))

    def _artifact_complete(self, path: str, relative: str) -> None:
        """Queue a table or compressed segment that has its final name."""
        self.queue.append(self._artifacts.keep(path, relative))

    def _cut_early(self) -> None:
        """Cut before the interval has passed, because the queue holds more than one object can.

        Until the end of the log is known, no object can be written, and the queue is dropped instead. The base that begins
        when the end is known contains the dropped changes.
        """
        forgotten: list[Entry] = []
        with self._lock:  # `_next` is set under it: events that arrive after that are kept
            if self._next is None:
                forgotten = self.queue.drop()
            self._changed.notify_all()
        self._remove_kept(forgotten)

    def _remove_kept(self, entries: list[Entry]) -> None:
        for entry in entries:
            if isinstance(entry, PendingArtifact):
                self._artifacts.discard(entry.kept)

    def wait(self, timeout: float | None = None) -> None:
        """Block until everything that was changed before this call is in the bucket."""
        seconds = self.settings.sync_seconds if timeout is None else timeout
        # The recorder and the manifest's writer hand a change over before the call that made it returns, so the end of
        # the queue covers what the caller has changed.
        if not self._arrivals.wait(self.queue.end, seconds, self._request_cut):
            raise NotArchived(
                "committed on this disk but not yet in the bucket, which did not respond in time",
                hint="`quire archive status` shows the backlog; it is uploaded as soon as the bucket responds",
                error=self.last_error,
            )

    def require_end(self) -> None:
        """Wait until the end of the log is known, and with it the time that no commit may precede. Called before objects are
        retired: their retirement must not be older than a moment that needs them."""
        with self._lock:
            self._changed.wait_for(lambda: self._next is not None or self._stop, END_SECONDS)
        if self._next is None:
            raise ObjectStoreUnavailable(
                "the bucket has not responded since the store was opened",
                hint="nothing is deleted until it does; `quire archive status` shows its last error",
                error=self.last_error,
            )

    def _request_cut(self) -> None:
        """Wake the cutting thread, unless an upload is in progress: the next cut follows that."""
        with self._lock:
            if not self._outbox:
                self._changed.notify_all()

    def require_ours(self) -> None:
        """Raise `StoreFenced` if another owner was found. Changes since the last upload are then only in this directory."""
        if isinstance(self._arrivals.failure, StoreFenced):
            raise self._arrivals.failure.with_traceback(None)

    @property
    def archived(self) -> int:
        """The ordinal of the queue up to which everything is in the bucket."""
        return self._arrivals.archived

    def lag_seconds(self) -> float:
        """Return the age of the oldest change that is not in the bucket; 0 if there is none."""
        with self._lock:
            first = self._outbox.first
            since = first.taken_at if first is not None else self.queue.since
        return time.monotonic() - since if since is not None else 0.0

    def status(self) -> ArchiveStatus:
        """Return the state of the archive: its backlog, its restorable moments, its traffic."""
        with self._lock:
            in_memory, on_disk = self._outbox.sizes()
            figures = Figures(
                failure=self._arrivals.failure,
                is_complete=self._arrivals.archived >= self.queue.end and not self._outbox,
                has_base=self._arrivals.is_restorable,
                waiting_bytes=in_memory + self.queue.size_bytes,
                backlog_bytes=on_disk,
                last_cut_ms=self._last_cut_ms,
                restorable_ms=self._restorable_ms,
                last_error=self.last_error,
            )
        drill = read_drill(self._disk, self._root)
        return status_of(
            self.settings, figures, self.traffic, self._requests(), self.lag_seconds(), self._clock.now_ms(), drill
        )

    def drill(self) -> DrillRecord:
        """Restore into scratch without claiming anything, and compare every database with the live store."""
        if self._drill is None:
            raise InvalidInput("this archive has no store to compare it with")
        return self._drill()

    def base(self) -> None:
        """Upload the whole store again, under new names, and return when it can be restored from that alone."""
        deadline = time.monotonic() + BASE_WAIT_SECONDS
        while not self._write_base_now():
            if time.monotonic() >= deadline:
                hint = "raise archive.backlog_bytes, or try again when the store is less busy"
                raise NotArchived("the backlog overflowed while the base was uploaded", hint=hint)

    def _write_base_now(self) -> bool:
        """Write a base, after the one in progress if there is one, which may keep names. Return whether it was written, and the
        log did not break meanwhile: then it is useless, because it lacks the dropped part."""
        with self._cutting:
            if not self._ensure_end():
                raise NotArchived("the bucket does not respond", hint="try again when it does", error=self.last_error)
            is_ours, breaks = not self._is_base_pending(), self._outbox.breaks
            if is_ours:
                # A put under the old name would adopt the object that is there, which may be the damaged one.
                self._artifacts.forget_all()
                self._begin_base()
            thread = self._base_thread
        if thread is not None:
            thread.join()
        if self._outbox.breaks == breaks and self._has_base_failed:
            hint = "it will be retried; `quire archive status` shows when it has succeeded"
            raise NotArchived("the base was not uploaded", hint=hint, error=self.last_error)
        self.wait(BASE_WAIT_SECONDS)
        return is_ours and self._outbox.breaks == breaks

    # ── the cutting thread ────────────────────────────────────────────────────────────────────────────────────────────
    def _run_cuts(self) -> None:
        try:
            while not self._is_stopping():
                with self._cutting:
                    is_end_known = self._ensure_end()
                    if is_end_known:
                        self._begin_base_if_due()
                        self._cut()
                if is_end_known:
                    self._pause()
            while self._cut_the_rest():
                pass
        except BaseException as error:  # reported to every waiting call
            self._fail(error)
        finally:
            with self._lock:
                # Last: the uploading thread ends when this is set and the outbox is empty.
                self._is_drained = True
                self._changed.notify_all()

    def _cut_the_rest(self) -> bool:
        """Cut what is left at close, and wait until it is uploaded. Return whether that must be repeated, because the log does
        not end where it should: the objects that waited have the wrong numbers, and a base must take their place."""
        with self._cutting:
            if self._arrivals.failure is not None or not self._ensure_end():
                return False
            self._cut()
            self._end_with_a_base()
        with self._lock:
            while self._outbox and not self._is_end_unknown and self._arrivals.failure is None:
                self._changed.wait(0.5)
            if self._is_end_unknown:
                return True
        with self._cutting:
            self._cut()  # slots that were cancelled last count as archived only when the outbox is empty
        return False

    def _ensure_end(self) -> bool:
        """Find where the log in the bucket ends, if that is not known. Return whether it is."""
        if self._is_end_unknown:
            self._start_over()
        return self._next is not None or self._find_end()

    def _pause(self) -> None:
        """Sleep until the next cut is due: for an interval, or not at all if a call waits and no upload is in progress. Events
        that arrive during an upload are taken together when it has completed."""
        deadline = time.monotonic() + self.settings.interval_seconds
        with self._lock:
            while not self._stop and self._arrivals.failure is None:
                left = deadline - time.monotonic()
                if left <= 0 or self._is_end_unknown or self.queue.size_bytes > self.queue.crowded_bytes:
                    return
                # `archived < end`: a call that waits only for a base would make this loop spin.
                if self._arrivals.has_waiters() and not self._outbox and self.archived < self.queue.end:
                    if self._is_blocked:
                        self._changed.wait(min(left, BLOCKED_SECONDS))
                    return
                self._changed.wait(left)

    def _is_stopping(self) -> bool:
        with self._lock:
            return self._stop or self._arrivals.failure is not None

    def _find_end(self) -> bool:
        """Find the end of this epoch's log in the bucket. Return whether it was found."""
        try:
            now_ms = self._clock.now_ms()
            end = end_of_log(self._objects(), self._disk, self._root, self._store_id, self._epoch, now_ms)
        except (Unavailable, QuireError) as error:
            if isinstance(error, StoreFenced):
                raise
            self._note(error)
            self._bound_queue()
            with self._lock:
                if not self._stop:
                    self._changed.wait(RETRY_SECONDS[2])
            return False
        self._parent, self._digest = end.parent, end.digest
        self._restorable, self._base = end.restorable, end.base
        self._at_ms, self._last_cut_ms = max(self._at_ms, end.at_ms), end.at_ms or self._last_cut_ms
        # Before `_next` is set, for which `require_end` waits: a retirement after it must not carry an earlier time.
        self._manifest.writer.commit_not_before(self._at_ms)
        with self._lock:  # from here on no event is dropped (`_cut_early`)
            self._next = end.next
            self._changed.notify_all()
        return True

    def _bound_queue(self) -> None:
        is_large = self.queue.size_bytes > self.settings.memory_bytes
        if is_large or self._artifacts.only_kept_bytes() > self.settings.backlog_bytes:
            self._break_chain("the bucket has not responded since the store was opened")

    def _cut(self) -> None:
        """Encode the events that are in the queue now as objects. Later events wait for the next cut."""
        # Fixed at the beginning: writers may add events as fast as they are taken, and the loop would not end.
        wanted = self.queue.end
        while True:
            since = self.queue.since or time.monotonic()
            hit("archive.cut.before")
            events, end = self.queue.take(self.queue.crowded_bytes)
            self._is_blocked = not events
            if not events:
                with self._lock:  # at most cancelled slots were taken
                    # Objects in the outbox have events before `end`.
                    if not self._outbox and end > self._arrivals.archived:
                        self._arrivals.archived = end
                self._arrivals.wake()
                return
            hit("archive.cut.taken")
            self._send(events, end, since)
            if end >= wanted:
                return

    def _send(self, events: list[Entry], end: int, taken_at: float) -> None:
        assert self._next is not None
        position = self._next
        artifacts: list[tuple[str, str]] = []
        shipped = [event for entry in events if (event := self._resolved(entry, position, artifacts)) is not None]
        if any(isinstance(entry, PendingBase) for entry in events):
            self._is_base_unnamed = False
        if self._needs_base or any(isinstance(entry, PendingBase) and self._is_new_chain(entry) for entry in events):
            # In the object that names the base too: a standby must not continue from the one before.
            shipped.insert(0, BreakEvent())
        for event in shipped:
            if isinstance(event, BaseEvent):
                self._base = position.number
                self._base_bytes, self._log_bytes = sum(size for _, size, _ in event.parts), 0
                self._needs_base = False
        broken = self._needs_base
        self._at_ms = max(self._at_ms, self._clock.now_ms())  # restoring a moment is a binary search for it
        # Before this moment can be restored: an object that is retired later and carries an earlier time would be
        # deleted while the moment needs it (decision 040).
        self._manifest.writer.commit_not_before(self._at_ms)
        header = Header(
            kind=Kind.LOG,
            position=position,
            parent=Position(position.epoch, position.number - 1) if position.number else self._parent,
            parent_digest=self._digest,
            at_ms=self._at_ms,
            restorable=self._restorable if broken else position.number,
            base=self._base,
        )
        data = encode_object(header, shipped)
        outgoing = Outgoing(
            header=header,
            digest=hashlib.sha256(data).digest(),
            end=end,
            taken_at=taken_at,
            breaks=self._outbox.breaks,
            artifacts=artifacts,
            size_bytes=len(data),
        )
        if refusal := self._outbox.hold(outgoing, data, queued_bytes=self.queue.size_bytes):
            self._break_chain(refusal, outgoing)
            return  # the log continues at the position that `_break_chain` has set
        self._log_bytes += len(data)
        # Only now: an object that the outbox refuses must not use up a number. The log has no gaps.
        self._next, self._digest = Position(position.epoch, position.number + 1), outgoing.digest
        self._restorable = header.restorable
        hit("archive.cut.encoded")

    def _break_chain(self, why: str, *dropped_too: Outgoing, keep_first: bool = True) -> None:
        """Drop everything that waits; a base must follow. Moments in the bucket stay restorable, but no new one is until the
        base counts."""
        with self._lock:
            dropped = [*self._outbox.break_chain(keep_first=keep_first), *dropped_too]
            if (first := self._outbox.first) is not None:  # it may be in an upload already: the log continues after it
                self._next = Position(first.header.position.epoch, first.header.position.number + 1)
                self._digest, self._restorable, self._base = first.digest, first.header.restorable, first.header.base
            self._arrivals.is_restorable = False
        self._outbox.discard(dropped)
        # Their uploads are dropped too: the next base must not assume that the bucket has them.
        self._artifacts.forget(key for outgoing in dropped for key, _ in outgoing.artifacts)
        # After `breaks` has risen: a base that began before does not count, because it may lack the dropped changes.
        self._remove_kept(self.queue.drop())
        self._needs_base, self._is_base_unnamed = True, False
        self._base_began = float("-inf")
        emit_safely("error", "archive.broken", reason=why, objects=len(dropped))

    def _start_over(self) -> None:
        """Find the end of the log again, and begin with a base: a former life or a loss has changed where the log ends."""
        self._break_chain(
            "the log in the bucket does not end where the previous owner process left it", keep_first=False
        )
        with self._lock:
            self._next, self._is_end_unknown = None, False
            self._changed.notify_all()

    def _resolved(self, event: Entry, position: Position, artifacts: list[tuple[str, str]]) -> AnyEvent | None:
        """Return an entry as it is shipped. An artifact gets its object, and is uploaded once for all its names; a base from
        before a break is omitted (`None`)."""
        if isinstance(event, PendingBase):
            return event.base if event.breaks == self._outbox.breaks else None
        if not isinstance(event, PendingArtifact):
            return event
        resolved, upload = self._artifacts.taken(event, self._store_id, position)
        if upload is None:
            self._artifacts.discard(event.kept)
        else:
            artifacts.append(upload)
        return resolved

    # ── bases ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _is_new_chain(self, pending: PendingBase) -> bool:
        """Return whether a base counts, and names other objects than the log before it."""
        return pending.renames and pending.breaks == self._outbox.breaks

    def _is_base_pending(self) -> bool:
        """Return whether a base is being read, or was read and is not named in the log yet."""
        return self._is_base_unnamed or (self._base_thread is not None and self._base_thread.is_alive())

    def _begin_base_if_due(self) -> None:
        if self._is_base_pending():
            return
        since = time.monotonic() - self._base_began
        outweighs = self._log_bytes > max(self._base_bytes, FIRST_LOG_BYTES) and since >= BASE_PAUSE_SECONDS
        # Without a change since the last base, another one would have the same contents.
        is_old = since >= self.settings.base_seconds and self._log_bytes > 0
        is_due = since >= RETRY_SECONDS[2] if self._needs_base else outweighs or is_old
        if self._next is not None and is_due:
            self._begin_base()

    def _begin_base(self) -> None:
        """Begin a base in a separate thread. REQUIRES `_cutting`, and that the end of the log is known."""
        assert self._next is not None
        self._base_began, self._base_at_ms = time.monotonic(), self._clock.now_ms()
        self._is_base_unnamed, self._has_base_failed = True, False
        # Both before anything is read: a break from here on voids the base, and a change that the base does not see is
        # in an object from `first` on.
        args = (self._next, self._outbox.breaks)
        self._base_thread = threading.Thread(target=self._run_base, args=args, name="quire-archive-base", daemon=True)
        self._base_thread.start()

    def _end_with_a_base(self) -> None:
        """Write a base at close if one is needed: log objects without a base cannot be restored."""
        if self._base_thread is not None:
            self._base_thread.join(self.settings.close_seconds)
            self._cut()
        if self._needs_base and self._next is not None:
            self._write_base(self._next, self._outbox.breaks)
            self._cut()

    def _run_base(self, first: Position, breaks: int) -> None:
        try:
            self._write_base(first, breaks)
        except StoreFenced as error:
            self._fail(error)
        except Exception as error:  # the base is retried; the log continues meanwhile
            self._note(error)
            self._is_base_unnamed, self._has_base_failed = False, True

    def _write_base(self, first: Position, breaks: int) -> None:
        """Write a base while the store is in use. The log from `first` on corrects what changed while it was read."""
        self._artifacts.begin_base()
        base = write_base(self, first, self._store_id, self._manifest, self._disk, self._root)
        self.queue.append(PendingBase(base, breaks, self._artifacts.end_base()))
        with self._lock:  # calls that wait in mode `sync` also wait for this base
            self._changed.notify_all()

    def put_part(self, key: str, events: list[AnyEvent], first: Position) -> tuple[str, int, bytes]:
        """Upload a part of a base, with retries. Return its name, size and digest (`base_writer.BaseSink`)."""
        header = Header(kind=Kind.BASE, position=first, parent=Position(0, 0), at_ms=self._clock.now_ms())
        data = encode_object(header, events)
        self._retry_until_answered(lambda: self._uploader.put_part(key, data))
        return key, len(data), hashlib.sha256(data).digest()

    def artifact(self, first: Position, path: str, relative: str) -> AnyEvent:
        """Upload an immutable file unless it is in the bucket already. Return its event (`base_writer.BaseSink`)."""

        def upload(key: str, path: str) -> None:  # a file that was removed while the base was read is not an outage
            self._retry_until_answered(lambda: self._uploader.put_artifact(key, path), final=FileNotFoundError)

        return self._artifacts.in_base(path, relative, self._store_id, first, upload)

    # ── the uploading thread ──────────────────────────────────────────────────────────────────────────────────────────
    def _run_puts(self) -> None:
        try:
            while (outgoing := self._first()) is not None:
                self._retry_until_answered(partial(self._put, outgoing))
                if self._is_end_unknown:
                    continue
                with self._lock:
                    if self._outbox.remove_first(outgoing):
                        is_whole = outgoing.header.restorable == outgoing.header.position.number
                        # An object that was encoded before a break may arrive after it; what followed it was dropped.
                        is_restorable = is_whole and outgoing.breaks == self._outbox.breaks
                        self._arrivals.advance(outgoing.end, is_restorable=is_restorable)
                        self._last_cut_ms = outgoing.header.at_ms
                        self._restorable_ms = outgoing.header.at_ms if is_restorable else self._restorable_ms
                self._outbox.discard([outgoing])
                self._cut_for_waiters()
                self._arrivals.wake()
        except BaseException as error:
            self._fail(error)

    def _cut_for_waiters(self) -> None:
        """Cut again at once if calls wait for more. This precedes waking those that were served: they would compete with the
        cut for the interpreter, while nothing is on its way to the bucket."""
        # Without waiting for the lock: its holder may wait for the bucket, or read a large file (decision 081).
        if self._arrivals.has_waiters() and self._cutting.acquire(blocking=False):
            try:
                if self._next is not None and not self._outbox:
                    self._cut()
            finally:
                self._cutting.release()
        with self._lock:
            if not self._outbox:
                self._changed.notify_all()

    def _first(self) -> Outgoing | None:
        """Wait for the next object to upload and return it; `None` when all are uploaded and no more will follow."""
        with self._lock:
            while (first := self._outbox.first) is None or self._is_end_unknown:
                if (self._is_drained and first is None) or self._arrivals.failure is not None:
                    return None
                self._changed.wait(0.5)
            return first

    def _put(self, outgoing: Outgoing) -> None:
        if self._uploader.put(self._store_id, outgoing):
            self.last_error = ""
        else:
            with self._lock:
                self._is_end_unknown = True
                self._changed.notify_all()

    def _retry_until_answered(self, attempt: Callable[[], object], *, final: type[Exception] = StoreFenced) -> None:
        """Retry until the bucket responds. Errors other than `StoreFenced` and `final` are outages and never end an archive."""
        for number in range(1 << 62):
            try:
                attempt()
                return
            except (StoreFenced, final):
                raise
            except (QuireError, OSError) as error:
                self._note(error)
                pause = RETRY_SECONDS[min(number, len(RETRY_SECONDS) - 1)]
                with self._lock:
                    if (self._stop and number >= len(RETRY_SECONDS)) or self._arrivals.failure is not None:
                        raise
                    self._changed.wait(pause)

    # ── outcomes ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _fail(self, error: BaseException) -> None:
        failure = error if isinstance(error, QuireError) else NotArchived(f"the archiver stopped: {error!r}")
        if isinstance(error, StoreFenced):
            self._fence(error)  # before waiting calls return: their callers' next changes must be refused
        with self._lock:
            self._arrivals.failure = self._arrivals.failure or failure
            self._changed.notify_all()
        self._arrivals.wake()
        self.queue.close()  # it has no consumer left; after the failure is set, or `wait` would trust the queue's end
        if isinstance(error, StoreFenced):
            self._depose(error)  # `_fence` has emitted an event
        else:
            emit_safely("error", "archive.stopped", error=str(error))

    def _note(self, error: BaseException) -> None:
        if not self.last_error:
            emit_safely("warning", "archive.delayed", error=str(error))
        self.last_error = str(error)
