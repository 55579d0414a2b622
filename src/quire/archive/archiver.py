"""Ships what the queue holds: takes cuts, writes log objects and bases, bounds what waits for the bucket (A4 to A9).

Terms
  cut        where the archiver stopped taking: what it took becomes one or more log objects
  outbox     objects that are encoded and not in the bucket yet, in order; beyond a bound of memory they wait on disk
  archived   the ordinal of the queue up to which everything is in the bucket

Two threads. The first takes cuts and encodes them; the second uploads, in order, artifacts before the object that names them. A
base is read by a third, while the others go on. Nobody who writes to the store waits for any of them, except in mode `sync`.

What is on disk and in the bucket at each step, and what comes next if the process dies there:
  handed over      nothing                                  the next life finds no clean end in archive.json: base
  encoded          perhaps a file in archive/               the same; the file is removed at the next opening
  artifact put     an object that no log names              trimmed by its position, once out of the window
  log object put   a longer chain                           restorable to here; the next life continues behind it with a base
  base parts put   objects that no log names                the same
  base named       a base that counts                       restorable with it
  closed           archive.json with position and digest    the next life continues without a base

A log object's name is created once. If it is taken, the object is our own (an answer was lost), one of a former life that
arrived late (then the log goes on behind it, with a base), or a successor's: then this owner is fenced before anybody is told
that anything was archived (A2).

Raises, to those who wait in mode `sync`: `NotArchived`, `StoreFenced`.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

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
from quire.archive.queue import Entry, PendingArtifact, PendingBase, Slot, bounded_queue
from quire.archive.recorder import SPOOL, Recorder, whole_file
from quire.archive.sealing import end_of_log
from quire.archive.standbys import StandbyWatch
from quire.archive.state_files import ArchiveState, config_digest, take_archive_state, write_archive_state
from quire.archive.status import ArchiveStatus, DrillRecord, Figures, Traffic, read_drill, status_of
from quire.archive.uploader import Outgoing, Uploader
from quire.core.clock import Clock
from quire.core.errors import InvalidInput, NotArchived, QuireError, StoreFenced, Unavailable
from quire.core.events import emit_safely
from quire.core.settings import ArchiveSettings
from quire.durable import names
from quire.durable.failpoints import hit
from quire.durable.files import Disk, write_new
from quire.manifest.overlay import TableRows
from quire.manifest.store import ManifestStore
from quire.objects.api import ObjectStore

RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Between two attempts to reach the bucket; the last one from then on."""
BASE_PAUSE_SECONDS = 60.0
"""At most one base begins in this time, however fast the log grows."""
FIRST_LOG_BYTES = 64 * 1024 * 1024
"""A base is due when the log since the last one outweighs it, and this."""


class Archiver:
    """The archive of an opened store. `start` it before the first change, `close` it after the last."""

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
    ) -> None:
        """`confirm` asks the bucket whether the store is still ours: `StoreFenced` if not."""
        # constant after construction
        self.queue = bounded_queue(settings.memory_bytes, self._cut_early)
        self.recorder = Recorder(disk, root, self.queue, self._artifact_complete)
        self.settings = settings
        self.standbys = StandbyWatch(self.queue, objects)
        self._root = root
        self._disk = disk
        self._clock = clock
        self._manifest = manifest
        self._objects = objects
        self._fence = fence
        self._depose = depose
        self._drill = drill
        self._store_id, self._epoch = "", 0  # constant after `start`
        self._spool = os.path.join(root, SPOOL)
        self._artifacts = Artifacts(disk, self._spool)
        self.traffic = Traffic()
        self._uploader = Uploader(disk, lambda: self._objects(), self._artifacts, self.traffic, confirm)
        # guarded by _lock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """The archiver's own threads sleep here."""
        self._arrived = threading.Condition(self._lock)
        """Calls that wait for the bucket sleep here: each object wakes them once."""
        self._outbox: deque[Outgoing] = deque()
        self._has_base = False
        """Whether what is archived can be restored: not before a base counts, nor after the chain was broken."""
        self._waiting = 0
        """Calls that wait for the bucket: cuts are taken at once."""
        self._archived = 0
        self._breaks = 0
        """How often the chain was broken: a base that began before the last time lacks what was dropped, and does not count."""
        self._stop = False
        self._is_drained = False
        self._is_misplaced = False
        """The log does not end where we thought: it has to be looked for again."""
        self._failure: QuireError | None = None
        self.last_error = ""
        # the cutting thread's own, read by others for people
        self._next: Position | None = None
        self._parent = Position(0, 0)
        self._digest = b""
        self._restorable, self._base = NONE, NONE
        self._needs_base = True
        self._at_ms = 0
        """Of the last header: it never falls, whatever the clock does."""
        self._base_thread: threading.Thread | None = None
        self._base_first: Position | None = None
        """Where the last base begins: another one there would overwrite parts that the log is about to name."""
        self._base_began = float("-inf")
        self._base_bytes = self._log_bytes = self._base_at_ms = 0
        self._memory_bytes = self._backlog_bytes = 0
        self._last_cut_ms = self._restorable_ms = 0
        self._threads: list[threading.Thread] = []

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def start(self) -> None:
        """Continue where the last life ended if nothing was changed since; else begin with a base. Asks no bucket."""
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
            self._needs_base, self._has_base = False, True
            self._last_cut_ms = self._restorable_ms = state.at_ms
            if (digest := config_digest(self._disk, self._root)) and digest != state.config_digest:
                # edited while nobody had the store open: no base will read it for an hour
                for event in whole_file(self._disk, os.path.join(self._root, names.CONFIG), names.CONFIG):
                    self.queue.append(event)
        self._manifest.writer.archive = self
        self._manifest.writer.record_rows()
        for run, name in ((self._run_cuts, "quire-archive"), (self._run_puts, "quire-archive-put")):
            self._threads.append(threading.Thread(target=run, name=name, daemon=True))
            self._threads[-1].start()
        self.standbys.start(self._store_id)

    def close(self) -> bool:
        """Take the last cut and wait for its upload, within `close_seconds`; whether everything is in the bucket."""
        deadline = time.monotonic() + self.settings.close_seconds
        self.standbys.close()
        with self._lock:
            self._stop = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.1))
        if self._base_thread is not None:
            self._base_thread.join(max(deadline - time.monotonic(), 0.1))
        is_done = self._is_drained and not any(thread.is_alive() for thread in self._threads)
        if is_done and self._failure is None and self._next is not None and not self._needs_base:
            state = ArchiveState(
                store_id=self._store_id,
                position=Position(self._next.epoch, self._next.number - 1),
                digest=self._digest,
                restorable=self._restorable,
                base=self._base,
                base_bytes=self._base_bytes,
                log_bytes=self._log_bytes,
                transaction=self._manifest.env.last_txn_id(),
                at_ms=self._at_ms,
                base_at_ms=self._base_at_ms,
                config_digest=config_digest(self._disk, self._root),
            )
            write_archive_state(self._disk, self._root, state)
        elif self._failure is None and self._threads:  # without them the opening was refused, and nothing was changed
            emit_safely("warning", "archive.incomplete", lag_seconds=self.lag_seconds(), error=self.last_error)
        self.queue.close()
        return is_done

    # ── whoever changes something ─────────────────────────────────────────────────────────────────────────────────────
    def reserve(self) -> Slot:
        """A commit of the manifest is about to be made (`manifest.writer.CommitLog`)."""
        return self.queue.reserve()

    def fill(self, slot: Slot, written: list[TableRows]) -> None:
        """It is durable."""
        slot.fill(CommitEvent(tuple(written)))

    def _artifact_complete(self, path: str, relative: str) -> None:
        """A table or compressed segment has its name."""
        self.queue.append(self._artifacts.keep(path, relative))

    def _cut_early(self) -> None:
        """More waits in the queue than an object takes: do not wait for the interval.

        There can be no object as long as nobody knows where the log ends. A base begins after that, and contains what is
        forgotten here.
        """
        forgotten: list[Entry] = []
        with self._lock:  # `_next` is set under it: whatever comes behind its setting is kept
            if self._next is None:
                forgotten = self.queue.drop()
            self._changed.notify_all()
        self._remove_kept(forgotten)

    def _remove_kept(self, entries: list[Entry]) -> None:
        for entry in entries:
            if isinstance(entry, PendingArtifact):
                self._artifacts.discard(entry.kept)

    def wait(self, timeout: float | None = None) -> None:
        """Return when everything that was done before this call is in the bucket."""
        end = self.queue.end
        deadline = time.monotonic() + (self.settings.sync_seconds if timeout is None else timeout)
        with self._lock:
            self._waiting += 1
            if not self._outbox:  # else the next cut comes when that has arrived
                self._changed.notify_all()
            try:
                while True:
                    if (
                        self._failure is not None
                    ):  # before the end is believed: behind a failure the queue takes nothing
                        raise self._failure.with_traceback(None)
                    if self._archived >= end and self._has_base:
                        return
                    if (left := deadline - time.monotonic()) <= 0:
                        raise NotArchived(
                            "committed on this disk, and not in the bucket: it did not answer in time",
                            hint="`quire archive status` shows what waits; it is uploaded as soon as the bucket answers",
                            error=self.last_error,
                        )
                    self._arrived.wait(left)
            finally:
                self._waiting -= 1

    def require_ours(self) -> None:
        """`StoreFenced` if another owner was met: what was changed since the last upload is in this directory alone."""
        if isinstance(self._failure, StoreFenced):
            raise self._failure.with_traceback(None)

    @property
    def archived(self) -> int:
        """The ordinal of the queue up to which everything is in the bucket."""
        return self._archived

    def lag_seconds(self) -> float:
        """How old the oldest change is that is not in the bucket."""
        with self._lock:
            since = self._outbox[0].taken_at if self._outbox else self.queue.since
        return time.monotonic() - since if since is not None else 0.0

    def status(self) -> ArchiveStatus:
        """How the archive is doing: what waits, what can be restored, what it costs."""
        with self._lock:
            figures = Figures(
                failure=self._failure,
                is_complete=self._archived >= self.queue.end and not self._outbox,
                has_base=self._has_base,
                waiting_bytes=self._memory_bytes + self.queue.size_bytes,
                backlog_bytes=self._backlog_bytes,
                last_cut_ms=self._last_cut_ms,
                restorable_ms=self._restorable_ms,
                last_error=self.last_error,
            )
        drill = read_drill(self._disk, self._root)
        return status_of(self.settings, figures, self.traffic, self.lag_seconds(), self._clock.now_ms(), drill)

    def drill(self) -> DrillRecord:
        """Restore into scratch, claim nothing, and compare every database with the live store."""
        if self._drill is None:
            raise InvalidInput("this archive belongs to no store that could be compared")
        return self._drill()

    # ── the cutting thread ────────────────────────────────────────────────────────────────────────────────────────────
    def _run_cuts(self) -> None:
        try:
            while not self._is_stopping():
                if self._is_misplaced:
                    self._start_over()
                if self._next is None and not self._find_end():
                    continue
                self._begin_base_if_due()
                self._cut()
                self._pause()
            if self._is_misplaced:
                self._start_over()
            if self._failure is None and (self._next is not None or self._find_end()):
                self._cut()
                self._end_with_a_base()
        except BaseException as error:  # whoever waits must hear of it
            self._fail(error)
        finally:
            with self._lock:
                self._is_drained = True
                self._changed.notify_all()

    def _pause(self) -> None:
        """Until the next cut is due: an interval, or at once when somebody waits and nothing is on its way. What comes while an
        object is on its way is taken together when that has arrived."""
        deadline = time.monotonic() + self.settings.interval_seconds
        with self._lock:
            while not self._stop and self._failure is None:
                left = deadline - time.monotonic()
                if left <= 0 or self._is_misplaced or self.queue.size_bytes > self.queue.crowded_bytes:
                    return
                if self._waiting and not self._outbox and self._archived < self.queue.end:
                    self._changed.wait(min(left, 0.001))  # a commit may be under way, in front of everything else
                    return
                self._changed.wait(left)

    def _is_stopping(self) -> bool:
        with self._lock:
            return self._stop or self._failure is not None

    def _find_end(self) -> bool:
        """Where the log of this epoch ends, in the bucket; whether that is known now."""
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
        with self._lock:  # from now on nothing is forgotten (`_cut_early`)
            self._next = end.next
        return True

    def _bound_queue(self) -> None:
        if self.queue.size_bytes > self.settings.memory_bytes:
            self._break_chain("the bucket has not answered since the store was opened")

    def _cut(self) -> None:
        """Take what there is now, as objects. What comes meanwhile waits for the next cut."""
        wanted = self.queue.end
        while True:
            since = self.queue.since or time.monotonic()
            events, end = self.queue.take(self.queue.crowded_bytes)
            if not events:
                with self._lock:  # places that were cancelled, nothing else
                    if not self._outbox and end > self._archived:
                        self._archived = end
                        self._arrived.notify_all()
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
        if self._needs_base:  # also of the object that names the base: a standby must not follow from the one before
            shipped.insert(0, BreakEvent())
        for event in shipped:
            if isinstance(event, BaseEvent):
                self._base = position.number
                self._base_bytes, self._log_bytes = sum(size for _, size, _ in event.parts), 0
                self._needs_base = False
        broken = self._needs_base
        self._at_ms = max(self._at_ms, self._clock.now_ms())  # restores to a moment search for it
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
            position=position,
            digest=hashlib.sha256(data).digest(),
            end=end,
            taken_at=taken_at,
            restorable=header.restorable,
            base=header.base,
            breaks=self._breaks,
            artifacts=artifacts,
            size_bytes=len(data),
            at_ms=header.at_ms,
        )
        if not self._hold(outgoing, data):
            return  # the log goes on where `_break_chain` left it
        self._log_bytes += len(data)
        self._next, self._digest = Position(position.epoch, position.number + 1), outgoing.digest
        self._restorable = header.restorable
        hit("archive.cut.encoded")

    def _hold(self, outgoing: Outgoing, data: bytes) -> bool:
        """Put an object into the outbox, on disk if memory is used up; break the chain if the disk's share is, too: False."""
        waiting = self._memory_bytes + self.queue.size_bytes
        if waiting + len(data) <= self.settings.memory_bytes or not self._outbox:
            outgoing.data = data
        else:
            if self._backlog_bytes + len(data) > self.settings.backlog_bytes:
                self._break_chain("more waits for the bucket than archive.backlog_bytes allows", outgoing)
                return False
            outgoing.path = os.path.join(self._spool, f"{outgoing.position.number:016x}.log")
            self._disk.make_dirs(self._spool)
            write_new(self._disk, outgoing.path, data, overwrite=True)
            hit("archive.spooled")
        with self._lock:
            self._memory_bytes += len(data) if outgoing.data is not None else 0
            self._backlog_bytes += len(data) if outgoing.data is None else 0
            self._outbox.append(outgoing)
            self._changed.notify_all()
        return True

    def _break_chain(self, why: str, *dropped_too: Outgoing) -> None:
        """Give up what waits: a base follows. What is in the bucket stays restorable; from then on nothing new is, until it
        counts."""
        with self._lock:
            self._breaks += 1
            dropped = [*list(self._outbox)[1:], *dropped_too]
            while len(self._outbox) > 1:  # the first may be on its way: the log goes on behind it
                self._outbox.pop()
            self._memory_bytes = self._backlog_bytes = 0
            if self._outbox:
                first = self._outbox[0]
                self._memory_bytes = first.size_bytes
                self._next = Position(first.position.epoch, first.position.number + 1)
                self._digest, self._restorable, self._base = first.digest, first.restorable, first.base
            self._has_base = False
        for outgoing in dropped:
            self._forget(outgoing)
        self._artifacts.forget(key for outgoing in dropped for key, _ in outgoing.artifacts)
        self._remove_kept(self.queue.drop())
        self._needs_base, self._base_first = True, None
        self._base_began = float("-inf")
        emit_safely("error", "archive.broken", reason=why, objects=len(dropped))

    def _start_over(self) -> None:
        """The bucket's log does not end where we thought, by a former life or by loss: look for its end, begin with a base."""
        with self._lock:
            waiting = list(self._outbox)
            self._outbox.clear()
        self._break_chain("the log in the bucket does not end where the last life left it", *waiting)
        with self._lock:
            self._next, self._is_misplaced = None, False
            self._changed.notify_all()

    def _resolved(self, event: Entry, position: Position, artifacts: list[tuple[str, str]]) -> AnyEvent | None:
        """An entry as it is shipped: an artifact, uploaded once whatever names it has, with its object; no base from before a
        break."""
        if isinstance(event, PendingBase):
            return event.base if event.breaks == self._breaks else None
        if not isinstance(event, PendingArtifact):
            return event
        resolved, upload = self._artifacts.taken(event, self._store_id, position)
        if upload is None:
            self._artifacts.discard(event.kept)
        else:
            artifacts.append(upload)
        return resolved

    # ── bases ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _begin_base_if_due(self) -> None:
        if self._next == self._base_first or (self._base_thread is not None and self._base_thread.is_alive()):
            return
        now = time.monotonic()
        since = now - self._base_began
        outweighs = self._log_bytes > max(self._base_bytes, FIRST_LOG_BYTES) and since >= BASE_PAUSE_SECONDS
        is_old = since >= self.settings.base_seconds and self._log_bytes > 0
        is_due = since >= RETRY_SECONDS[2] if self._needs_base else outweighs or is_old
        if self._next is None or not is_due:
            return
        self._base_began, self._base_at_ms = now, self._clock.now_ms()
        self._base_thread = threading.Thread(target=self._run_base, name="quire-archive-base", daemon=True)
        self._base_thread.start()

    def _end_with_a_base(self) -> None:
        """At closing: what was shipped without a base could not be restored."""
        if self._base_thread is not None:
            self._base_thread.join(self.settings.close_seconds)
            self._cut()
        if self._needs_base:
            self._write_base()
            self._cut()

    def _run_base(self) -> None:
        try:
            self._write_base()
        except StoreFenced as error:
            self._fail(error)
        except Exception as error:  # tried again; the log goes on meanwhile
            self._base_first = None
            self._note(error)

    def _write_base(self) -> None:
        """Read everything while the store goes on. What is read too late or too early, the log from `first` on puts right."""
        breaks = self._breaks
        if (first := self._next) is not None:
            self._base_first = first
            base = write_base(self, first, self._store_id, self._manifest, self._disk, self._root)
            self.queue.append(PendingBase(base, breaks))
            with self._lock:  # whoever waits in mode `sync` waits for this one, too
                self._changed.notify_all()

    def put_part(self, key: str, events: list[AnyEvent], first: Position) -> tuple[str, int, bytes]:
        """Upload a part of a base, however long that takes: its name, size and digest (`base_writer.BaseSink`)."""
        header = Header(kind=Kind.BASE, position=first, parent=Position(0, 0), at_ms=self._clock.now_ms())
        data = encode_object(header, events)
        self._until_it_answers(lambda: self._uploader.put_part(key, data))
        return key, len(data), hashlib.sha256(data).digest()

    def artifact(self, first: Position, path: str, relative: str) -> AnyEvent:
        """The event of a file that never changes, which is uploaded now if it was not (`base_writer.BaseSink`)."""

        def upload(key: str, path: str) -> None:  # that a file was removed while the base was read is no outage
            self._until_it_answers(lambda: self._uploader.put_artifact(key, path), final=FileNotFoundError)

        return self._artifacts.in_base(path, relative, self._store_id, first, upload)

    # ── the uploading thread ──────────────────────────────────────────────────────────────────────────────────────────
    def _run_puts(self) -> None:
        try:
            while (outgoing := self._first()) is not None:
                self._until_it_answers(partial(self._put, outgoing))
                if self._is_misplaced:
                    continue
                with self._lock:
                    if self._outbox and self._outbox[0] is outgoing:
                        self._outbox.popleft()
                        self._memory_bytes -= outgoing.size_bytes if outgoing.data is not None else 0
                        self._backlog_bytes -= outgoing.size_bytes if outgoing.data is None else 0
                        self._archived = outgoing.end
                        is_whole = outgoing.restorable == outgoing.position.number
                        self._has_base = is_whole and outgoing.breaks == self._breaks
                        self._last_cut_ms = outgoing.at_ms
                        self._restorable_ms = outgoing.at_ms if self._has_base else self._restorable_ms
                    self._changed.notify_all()
                    self._arrived.notify_all()
                self._forget(outgoing)
        except BaseException as error:
            self._fail(error)

    def _first(self) -> Outgoing | None:
        """The next object to upload; `None` when all is done and no more will come."""
        with self._lock:
            while not self._outbox or self._is_misplaced:
                if self._is_drained or self._failure is not None:
                    return None
                self._changed.wait(0.5)
            return self._outbox[0]

    def _put(self, outgoing: Outgoing) -> None:
        if self._uploader.put(self._store_id, outgoing):
            self.last_error = ""
        else:
            with self._lock:
                self._is_misplaced = True
                self._changed.notify_all()

    def _forget(self, outgoing: Outgoing) -> None:
        """Remove what waited on disk for this object."""
        for path in (outgoing.path, *(path for _, path in outgoing.artifacts)):
            if path:
                self._artifacts.discard(path)

    def _until_it_answers(self, attempt: Callable[[], object], *, final: type[Exception] = StoreFenced) -> None:
        """Try until the bucket answers. All but being fenced, and `final`, is an outage: nothing else may end an archive."""
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
                    if (self._stop and number >= len(RETRY_SECONDS)) or self._failure is not None:
                        raise
                    self._changed.wait(pause)

    # ── outcomes ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _fail(self, error: BaseException) -> None:
        failure = error if isinstance(error, QuireError) else NotArchived(f"the archiver stopped: {error!r}")
        if isinstance(error, StoreFenced):
            self._fence(error)  # before whoever waits is told: what it does next is refused
        with self._lock:
            self._failure = self._failure or failure
            self._changed.notify_all()
            self._arrived.notify_all()
        self.queue.close()  # nobody takes from it; after `_failure`, or `wait` would believe its end
        emit_safely("error", "archive.stopped", error=str(error))
        if isinstance(error, StoreFenced):
            self._depose(error)

    def _note(self, error: BaseException) -> None:
        if not self.last_error:
            emit_safely("warning", "archive.delayed", error=str(error))
        self.last_error = str(error)
