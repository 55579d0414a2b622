"""A standby: a directory that follows an owner's archive, serves readers, and becomes the owner if that one fails (A11).

Terms
  follow    apply the owner's log objects in the order of their numbers, each one completely
  rebuild   restore the newest base and the log after it into a staging directory, then swap it in: on first use, after a broken
            chain, after the log was trimmed past our position, and when another owner has taken over
  silence   time in which the bucket answered but had neither a new object nor a new heartbeat; counted only while the newest
            heartbeat of the owner names this standby

A standby runs no recovery before it is promoted: readers (`quire.open(directory, "r")`, in other processes) see what the owner
had published as of the last object applied.

Promotion: claim the next owner epoch (an object that can be created only once: of two standbys one succeeds), seal the owner's
log, apply what it wrote until then, take over. The former owner runs into the seal and acknowledges nothing more.

What is on disk after each step, named like its failpoint, and what the next process does if this one ends there. The phase in
standby.json decides, which is replaced after everything that it relies on is durable.

  following
    (replay.synced, files)  bytes, then names of the next object       applies the object again, from its beginning
    (replay.rows), applied  its rows, too                              the same
    noted                   its position; files without a name         removes them with the next object
  begun, following or promoting, when a rebuild begins
    emptied, staged         perhaps `.next/`                           removes it, restores again
  swapping
    swapping                `.next/`, complete                         moves all parts
    part_swapped            parts in place, former ones in `.old/`     moves the rest; rows are still the former ones
    files_swapped           all files in place                         replaces the rows
    rows_swapped            the same state, from the first row on      replaces the rows again
  following, or promoting
    swapped                 perhaps `.next/` and `.old/`               removes them
  promoting
    promoting               owner.json may have a claim                claims the epoch, unless a higher one is claimed
    claimed                 the claim's object; perhaps a seal         seals, applies what is left, rebuilds if that is newer
  sealed
    sealed                  all that the owner acknowledged            removes `.files/` and `.kept/`, names the origin
    named                   restored.json                              takes over
    taken_over, opened      the new epoch; tails published             takes over again, in that epoch
  (no standby.json)         the owner's directory                      opens it

Threads: one. The directory's lock is held while the standby is open. Raises `StoreLocked`, `StoreFenced`, `InvalidInput`,
`Corruption`, and the errors of the disk and the object store.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from quire.archive.format import AnyEvent, Header, Kind, Position, decode_object, log_key, parse_log_key
from quire.archive.kept_files import KeptFiles
from quire.archive.log_reader import (
    RestorePoint,
    epochs,
    find,
    find_intact,
    header_of,
    is_continuous,
    log_positions,
)
from quire.archive.recorder import REMOTE_FILES
from quire.archive.replay import Replay
from quire.archive.sealing import highest_epoch, positions_after, seal, seal_later
from quire.archive.standbys import (
    HEARTBEAT_SECONDS,
    OwnerContact,
    Promoted,
    StandbyStatus,
)
from quire.archive.state_files import (
    Origin,
    StandbyPhase,
    StandbyState,
    read_standby_state,
    write_origin,
    write_standby_state,
)
from quire.archive.store_choice import choose_store
from quire.archive.window import require_in_window
from quire.core.clock import Clock, SystemClock
from quire.core.errors import (
    Corruption,
    InvalidInput,
    ObjectNotFound,
    QuireError,
    StoreFenced,
    StoreLocked,
    Unavailable,
)
from quire.core.events import emit
from quire.durable import names
from quire.durable.failpoints import hit
from quire.durable.files import Disk, OsDisk, read_all, remove_tree, write_atomic
from quire.durable.locks import FileLock
from quire.manifest.row_image import RowImage, image
from quire.objects.open import open_store
from quire.objects.options import options_of
from quire.objects.ownership import claim_epoch
from quire.pages.leasefiles import LeaseFiles
from quire.store import layout
from quire.store.archiving import refuse_unapplied
from quire.store.backup import Progress, no_progress
from quire.store.backup_index import read_index
from quire.store.opening import open_owner
from quire.store.restoring import (
    correct_block,
    correct_rows,
    open_written,
    quiet_settings,
    replay_state,
    write_config,
)

if TYPE_CHECKING:
    from quire.objects.options import StoreOptions

STAGED = ".next"
"""Directory inside a standby's directory where a rebuild restores into."""
REPLACED = ".old"
"""Directory inside a standby's directory that holds what a rebuild has replaced, until it is removed."""
PARTS = (names.REPLAYED, names.PAGES, names.STREAMS, names.LSM, names.QUARANTINE)
POLL_SECONDS = 0.25
"""Interval between polls for the next object: half of the delay we may add to the owner's interval, to leave room for the
request itself."""
GAP_SECONDS = 10.0
"""Interval between checks whether the log was trimmed past our position."""


class Standby:
    """A standby in `directory` of the store that is archived at `url`."""

    def __init__(
        self,
        url: str,
        directory: str | os.PathLike[str],
        *,
        store_id: str = "",
        options: StoreOptions | None = None,
        disk: Disk | None = None,
        clock: Clock | None = None,
        progress: Progress | None = None,
    ) -> None:
        # constant after construction
        self.path = os.path.abspath(os.fspath(directory))
        self.url = url if "://" in url else os.path.abspath(url)
        self._disk, self._clock = disk or OsDisk(), clock or SystemClock()
        self._progress = progress or no_progress
        self._options = options or recorded_options(self._disk, self.path)
        self._bucket = open_store(self.url, options=self._options)
        # owned by the standby's thread
        self._replay: Replay | None = None
        self._is_first = True
        """Whether the next object may have been partly applied, by a process that was killed."""
        self._waits_for_base = False
        self._objects = self._rebuilds = 0
        self._owner = OwnerContact(self._bucket)
        self._gap_looked_at = float("-inf")
        try:
            if not self._disk.exists(os.path.join(self.path, names.STANDBY)):
                store_id = choose_store(self._bucket, store_id)  # raises on a wrong URL, before anything is created
            self._lock: FileLock | None = self._take_lock()
        except BaseException:
            self._bucket.close()
            raise
        try:
            self._leases = LeaseFiles(self.path, self._disk, self._clock)
            self._kept = KeptFiles(self._disk, self.path, self._readers)
            self._state = self._begin(store_id)
        except BaseException:
            self.close()
            raise

    def _readers(self) -> set[str]:
        return {str(lease.reader) for lease in self._leases.look()}

    def _take_lock(self) -> FileLock:
        layout.make_directory(self._disk, self.path)
        try:
            return FileLock.acquire(os.path.join(self.path, names.LOCK), self._clock)
        except StoreLocked as error:  # the lock speaks of an owner, which this directory does not have
            text, hint = "another process updates this standby", "stop it (`quire standby`) first"
            raise StoreLocked(text, hint=hint, **error.where) from None

    def _begin(self, store_id: str) -> StandbyState:
        state = read_standby_state(self._disk, self.path)
        if state is None:
            if layout.directory_state(self._disk, self.path) is not layout.DirectoryState.EMPTY:
                hint = "use a new or an empty directory; a promoted standby is opened like any store"
                raise InvalidInput("the directory is not empty and not a standby", hint=hint, path=self.path)
            state = StandbyState(store_id=store_id, url=self.url)
            write_standby_state(self._disk, self.path, state)
        if not state.store_id.startswith(store_id):
            hint = "use another directory"
            raise InvalidInput("this directory follows another store", hint=hint, follows=state.store_id)
        if state.phase is not StandbyPhase.SWAPPING:  # left by a process that was killed
            self._remove(STAGED)
            self._remove(REPLACED)
        return state

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Stop following. The directory stays as it is; the next `Standby` on it continues."""
        with ExitStack() as closing:  # callbacks run in reverse order, all of them even if one raises
            if self._lock is not None:
                closing.callback(self._lock.close)
                self._lock = None
            closing.callback(self._bucket.close)
            closing.callback(self._withdraw)
            closing.callback(self._close_replay)

    def _withdraw(self) -> None:
        with suppress(QuireError):  # the owner ignores a registration that is no longer refreshed
            self._owner.withdraw()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    @property
    def status(self) -> StandbyStatus:
        """The current progress."""
        state = self._state
        return StandbyStatus(
            path=self.path,
            store_id=state.store_id,
            url=self.url,
            phase="waiting for a base" if self._waits_for_base else str(state.phase),
            position=state.position,
            at_ms=state.at_ms,
            objects=self._objects,
            rebuilds=self._rebuilds,
            is_named=self._owner.is_named(state.position.epoch),
            silent_seconds=self._owner.silent_seconds,
        )

    @property
    def is_promoting(self) -> bool:
        """Whether a promotion of this directory has begun and is not complete."""
        return self._state.owner_epoch > 0

    def _save(self, state: StandbyState) -> None:
        write_standby_state(self._disk, self.path, state)
        self._state = state

    # ── following ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def run(
        self,
        *,
        promote_after: float | None = None,
        stop: threading.Event | None = None,
        each: Callable[[StandbyStatus], None] | None = None,
    ) -> Promoted | None:
        """Follow until `stop` is set. With `promote_after`, take over after that many seconds of silence, and complete a
        promotion that was interrupted.

        Automatic promotion never deposes another standby that was promoted first: this standby then follows it.
        """
        check_promote_after(promote_after)
        stop = stop or threading.Event()
        looked_at: float | None = None
        while not stop.is_set():
            applied = 0
            try:
                if promote_after is not None and (self.is_promoting or self._owner.silent_seconds >= promote_after):
                    return self.promote()
                self._owner.register_if_due(self._state.store_id, self._state.position, self._clock.now_ms())
                applied = self.poll()
                state, now = self._state, time.monotonic()
                is_alive = applied > 0 or self._owner.has_new_heartbeat(state.store_id, state.position.epoch)
                self._count_silence(is_alive, now - looked_at if looked_at is not None else 0.0)
                looked_at = now
            except StoreLocked:
                raise  # another process took the directory when the promotion released its lock
            except StoreFenced as error:
                emit("warning", "standby.overtaken", path=self.path, error=str(error))
                self._owner.silent_seconds = 0.0
            except Unavailable as error:
                emit("warning", "standby.delayed", path=self.path, error=str(error))
                # A bucket that does not answer proves nothing about the owner, which may have lost it earlier than we did.
                looked_at, self._owner.silent_seconds = None, 0.0
                time.sleep(1.0)
            if each is not None and applied:
                each(self.status)
            time.sleep(POLL_SECONDS)  # not `stop.wait`: a signal handler that sets `stop` runs in this thread
        return None

    def _count_silence(self, is_alive: bool, seconds: float) -> None:
        if is_alive or self._waits_for_base:
            self._owner.silent_seconds = 0.0
        else:
            self._owner.count_silence(seconds, self._state.position.epoch)

    def poll(self) -> int:
        """Apply all new log objects and return their number."""
        before = self._objects
        if self.is_promoting:
            hint = "run `quire promote` again"
            raise InvalidInput("a promotion of this directory is incomplete", hint=hint, path=self.path)
        if self._state.phase is StandbyPhase.SWAPPING:
            self._swap()
        if self._state.phase is StandbyPhase.BEGUN:
            self._rebuild(find_intact(self._bucket, self._state.store_id))
        if self._waits_for_base and not self._rebuild_if_newer():
            return 0
        try:
            while self._apply_next():
                pass
        except Corruption as error:  # in our directory or in the log: a rebuild from a newer base repairs either
            emit("warning", "standby.rebuilt", path=self.path, error=str(error))
            self._waits_for_base = True
            if not self._rebuild_if_newer():
                raise
        self._look_for_gap()
        return self._objects - before

    def _apply_next(self) -> bool:
        state = self._state
        key = log_key(state.store_id, Position(state.position.epoch, state.position.number + 1))
        try:
            data = self._bucket.get(key)
        except ObjectNotFound:
            return False
        header, events = decode_object(data, key)
        # Seals first: one that a takeover put ahead has no parent digest, and may be the end of the log.
        if header.kind is not Kind.SEAL and header.parent_digest != state.digest:
            raise Corruption("the archive's log is not the one that this standby followed", key=key)
        if header.kind is Kind.SEAL or not is_continuous(header, events):
            self._waits_for_base = True
            return self._rebuild_if_newer()
        self._apply(header, sha256(data).digest(), events)
        return True

    def _apply(self, header: Header, digest: bytes, events: list[AnyEvent]) -> None:
        """Apply one object: files, names, rows, then the position. After a kill in between, it is applied again."""
        replay = self._following()
        replay.apply(events, again=self._is_first)
        # Before the position is saved: after a kill in between, the object is applied again, and this is done again.
        if names.CONFIG in replay.touched:
            write_config(self._disk, self.path, self.url, self._options)
        hit("standby.applied")
        self._save(replace(self._state, position=header.position, digest=digest, at_ms=header.at_ms))
        hit("standby.noted")
        replay.sweep()
        self._is_first = False
        self._objects += 1

    def _following(self) -> Replay:
        if self._replay is None:
            self._replay = Replay.resume(self._disk, self.path, adapt=self._adapt, kept=self._kept)
            self._is_first = True
        return self._replay

    def _adapt(self, table: str, rows: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        return correct_block(table, rows, self._state.oldest_change)

    # ── rebuilding ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _look_for_gap(self) -> None:
        """Rebuild if the log was trimmed past our position while we were away: it then starts after the object we wait for."""
        if time.monotonic() - self._gap_looked_at < GAP_SECONDS:
            return
        self._gap_looked_at = time.monotonic()
        position = self._state.position
        later = log_positions(self._bucket, self._state.store_id, position.epoch, after=position)
        is_gap = bool(later) and later[0].number != position.number + 1
        if is_gap or any(epoch > position.epoch for epoch in epochs(self._bucket, self._state.store_id)):
            self._rebuild_if_newer()

    def _rebuild_if_newer(self, upto: Position | None = None) -> bool:
        """Rebuild from a newer state that cannot be reached by following. Return `False` if there is none yet. `upto`: no state
        after this log object."""
        epoch = upto.epoch if upto is not None else None
        try:
            if find(self._bucket, self._state.store_id, epoch=epoch, upto=upto).position <= self._state.position:
                return False
            point = find_intact(self._bucket, self._state.store_id, epoch=epoch, upto=upto)
        except (InvalidInput, ObjectNotFound):
            return False  # no base yet
        if point.position <= self._state.position:  # what is newer is damaged
            return False
        self._rebuild(point)
        return True

    def _rebuild(self, point: RestorePoint) -> None:
        self._close_replay()
        if read_index(self._bucket, point.store_id, point.position) is not None:
            # The log of a backup has only what changed while its base was read: it cannot be followed.
            hint = "give the URL of the store's archive; `quire restore-store` restores a backup"
            raise InvalidInput("this location has backups of the store, and no archive", hint=hint, url=self.url)
        while True:
            try:
                digest, objects, oldest = self._stage(point)
                break
            except ObjectNotFound:  # trimmed meanwhile, if there is a newer base
                newer = find_intact(self._bucket, self._state.store_id)
                if newer.base == point.base:
                    raise
                point = newer
        # From the next step on, a killed standby swaps `.next/` in without looking at it again: it must be complete and
        # durable.
        hit("standby.staged")
        self._save(
            replace(
                self._state,
                phase=StandbyPhase.SWAPPING,
                position=point.position,
                digest=digest,
                at_ms=point.at_ms,
                oldest_change=oldest,
                swaps=self._state.swaps + 1,
            )
        )
        hit("standby.swapping")
        self._objects += objects
        self._rebuilds += 1
        self._swap()

    def _stage(self, point: RestorePoint) -> tuple[bytes, int, int]:
        """Restore into `.next/`. Return (digest of the last object, objects, first sequence of the change feed)."""
        staged = os.path.join(self.path, STAGED)
        self._remove(STAGED)
        self._disk.make_dirs(staged)
        hit("standby.emptied")
        replay, digest, objects, _ = replay_state(self._bucket, point, self._disk, staged, self._progress)
        with replay:
            correct_rows(replay, self.path, self.url)
            with replay.rows().read() as txn:
                oldest = txn.feed_bounds()[0]
            for part in PARTS:
                self._disk.make_dirs(os.path.join(staged, part))
            replay.settle()
        return digest, objects, oldest

    def _swap(self) -> None:
        """Swap the staged directory in: its parts by renames, its rows in one transaction, because readers have the manifest
        open. Each step is atomic, and the whole sequence can be repeated after a kill."""
        staged = os.path.join(self.path, STAGED)
        self._kept.keep_others(staged)
        for part in PARTS:
            source, target = os.path.join(staged, part), os.path.join(self.path, part)
            if self._disk.exists(source):
                if self._disk.exists(target):
                    self._remove(f"{REPLACED}/{part}")
                    self._disk.make_dirs(os.path.join(self.path, REPLACED))
                    self._disk.rename(target, os.path.join(self.path, REPLACED, part))
                self._disk.rename(source, target)
                hit("standby.part_swapped")
        if self._disk.exists(remote := os.path.join(staged, REMOTE_FILES)):
            self._disk.rename(remote, os.path.join(self.path, REMOTE_FILES))
        # Before the rows are replaced: rows that survive a power loss must find their files.
        self._disk.sync_dir(self.path)
        hit("standby.files_swapped")
        if self._disk.exists(config := os.path.join(staged, names.CONFIG)):
            # A copy, not a rename: the staged file is linked to `.files/`, where the owner's next change of it is applied.
            write_atomic(self._disk, os.path.join(self.path, names.CONFIG), read_all(self._disk, config))
        write_config(self._disk, self.path, self.url, self._options)
        self._swap_rows(os.path.join(staged, names.MANIFEST), os.path.join(self.path, names.MANIFEST))
        hit("standby.rows_swapped")
        # A promotion that finds a newer base after its claim goes on as a promotion: its epoch may have fenced the
        # owner.
        self._save(replace(self._state, phase=StandbyPhase.PROMOTING if self.is_promoting else StandbyPhase.FOLLOWING))
        hit("standby.swapped")
        self._remove(STAGED)
        self._remove(REPLACED)
        self._waits_for_base = False

    def _swap_rows(self, source: str, target: str) -> None:
        if not self._disk.exists(source):
            return
        if not self._disk.exists(target):
            self._disk.rename(source, target)
            self._disk.sync_dir(self.path)
            return
        with RowImage(source) as staged, RowImage(target) as rows:
            rows.replace(lambda: image(staged.read, 0))

    def _remove(self, name: str) -> None:
        path = os.path.join(self.path, name)
        if self._disk.exists(path):
            remove_tree(self._disk, path)

    # ── promotion ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def promote(self, *, discard: bool = False) -> Promoted:
        """Become the owner, and close the standby. Nothing that the former owner acknowledged in mode `sync` is lost.

        Another standby that was promoted first is deposed only with `discard`; what it wrote is then lost. So are log objects
        that this standby cannot apply, because it waits for a base or one of them is damaged: `ArchiveAhead` without `discard`.
        """
        started = time.monotonic()
        if self._state.phase is StandbyPhase.SWAPPING:
            self._swap()
        if self.is_promoting:
            self._continue(discard)
        else:
            self._apply_all(discard)
            self._claim(discard)
        if self._state.phase is StandbyPhase.PROMOTING:
            self._seal()
        epoch, position, store_id = self._state.owner_epoch, self._state.position, self._state.store_id
        newest = max(positions_after(self._bucket, store_id, position), default=position)
        self._take_over()
        promoted = Promoted(
            path=self.path,
            store_id=store_id,
            owner_epoch=epoch,
            position=position,
            newest=newest,
            seconds=time.monotonic() - started,
        )
        seconds, dropped = round(promoted.seconds, 3), promoted.dropped
        emit("info", "standby.promoted", path=self.path, owner_epoch=epoch, dropped=dropped, seconds=seconds)
        return promoted

    def _apply_all(self, discard: bool) -> None:
        """Apply what can be applied. Raise, before anything is claimed, if that is not everything or cannot become an owner."""
        try:
            self.poll()
        except Corruption:
            if not discard:
                raise
        if self._waits_for_base:
            require_in_window(self._bucket, self._state.store_id, self._state.position)
            if not discard:
                refuse_unapplied(self._bucket, self._state.store_id, self._state.position)

    def _highest_epoch(self) -> int:
        return highest_epoch(self._bucket, self._state.store_id, self._state.position.epoch)

    def _continue(self, discard: bool) -> None:
        """Check that a promotion that was interrupted still has the highest claim; otherwise give it up, or claim again."""
        if (highest := self._highest_epoch()) > self._state.owner_epoch:
            if not discard:
                self._give_up()
                raise self._overtaken_by(highest)
            self._save(replace(self._state, phase=StandbyPhase.PROMOTING, owner_epoch=highest + 1))

    def _give_up(self) -> None:
        self._save(replace(self._state, phase=StandbyPhase.FOLLOWING, owner_epoch=0))

    def _claim(self, discard: bool) -> None:
        state, highest = self._state, self._highest_epoch()
        if highest > state.position.epoch and not discard:
            raise self._overtaken_by(highest)
        # Before the claim: a standby that is killed after it must not go on following, because the owner may be fenced
        # already.
        self._save(replace(state, phase=StandbyPhase.PROMOTING, owner_epoch=highest + 1))
        hit("standby.promoting")

    def _overtaken_by(self, epoch: int) -> StoreFenced:
        what = f"owner epoch {epoch} has taken this store over"
        hint = "run `quire standby` again: it follows the new owner; if that is lost for good, use `quire promote --discard`"
        return StoreFenced(what, hint=hint, path=self.path)

    def _seal(self) -> None:
        state, epoch = self._state, self._state.owner_epoch
        if not claim_epoch(self._bucket, self._disk, self.path, state.store_id, epoch, self._clock.now_ms()):
            self._give_up()
            raise self._overtaken_by(epoch)
        hit("standby.claimed")
        chain = [not self._waits_for_base]  # without the next base nothing more is applied: the log is only sealed

        def overtaken(header: Header, digest: bytes, events: list[AnyEvent]) -> None:
            chain[0] = chain[0] and is_continuous(header, events)
            if chain[0]:
                self._apply(header, digest, events)

        known = self._known() if chain[0] else None
        former, now_ms = state.position.epoch, self._clock.now_ms()
        try:
            seal_later(self._bucket, state.store_id, former, epoch, now_ms)
            try:
                seal(self._bucket, state.store_id, former, epoch, now_ms, known=known, overtaken=overtaken)
            except Corruption as error:  # the epoch is claimed: what cannot be read is given up, and reported
                emit("error", "standby.log_damaged", path=self.path, error=str(error))
                seal(self._bucket, state.store_id, former, epoch, now_ms)
        except StoreFenced:
            self._give_up()
            raise
        try:
            while chain[0] and known is None and self._apply_next():
                pass
        except Corruption as error:  # given up as well
            emit("error", "standby.log_damaged", path=self.path, error=str(error))
        # The owner may have completed a base since `_apply_all`, or trimmed its log, and acknowledged what is in it.
        self._rebuild_as_far_as_intact()
        self._following().settle()
        self._close_replay()
        self._save(replace(self._state, phase=StandbyPhase.SEALED))
        hit("standby.sealed")

    def _rebuild_as_far_as_intact(self) -> None:
        """Rebuild from the newest state; if an object of its log is damaged, from the one before that object. What cannot be
        reached is given up."""
        upto: Position | None = None
        while True:
            try:
                self._rebuild_if_newer(upto)
                return
            except Corruption as error:
                emit("error", "standby.log_damaged", path=self.path, error=str(error))
                self._remove(STAGED)
                damaged = parse_log_key(str(error.where.get("key", "")))
                if damaged is None or not damaged.number or (upto is not None and damaged > upto):
                    return
                upto = Position(damaged.epoch, damaged.number - 1)

    def _known(self) -> tuple[Header, bytes] | None:
        """Return the last object that was applied, for `seal`; `None` if it was damaged meanwhile, or trimmed."""
        try:
            return header_of(self._bucket, self._state.store_id, self._state.position), self._state.digest
        except (ObjectNotFound, Corruption):
            return None

    def _take_over(self) -> None:
        state = self._state
        # Before the store is opened: its links would keep the blocks of every file that the engines remove.
        self._remove(names.REPLAYED)
        self._remove(names.KEPT)
        origin = Origin(
            store_id=state.store_id,
            url=self._bucket.url,
            position=state.position,
            digest=state.digest,
            at_ms=state.at_ms,
        )
        write_origin(self._disk, self.path, origin)
        hit("standby.named")
        if self._lock is not None:
            self._lock.close()  # `open_owner` takes it; until then standby.json keeps other processes out
            self._lock = None
        is_begun = self._has_epoch(state.owner_epoch)
        try:
            with open_owner(
                self.path,
                quiet_settings(self._disk, self.path),
                self._clock,
                self._disk,
                takeover=not is_begun,
                discard=True,  # whether to give up what the archive has after the seal was decided in `_claim`
            ) as store:
                if is_begun:  # `_continue` may have looked before another directory took over
                    store.rights.before_put()
                hit("standby.taken_over")
                open_written(store)  # publishes the tail of the WAL: readers see only what is published
        except BaseException:
            self._lock = self._take_lock()  # `run` tries again, or follows another owner
            raise
        hit("standby.opened")
        # Last: until then a kill is followed by another promotion, which finds the epoch begun.
        self._disk.remove(os.path.join(self.path, names.STANDBY))
        self._disk.sync_dir(self.path)
        self.close()

    def _has_epoch(self, epoch: int) -> bool:
        """Return whether an earlier promotion that was killed has already begun the epoch."""
        with RowImage(os.path.join(self.path, names.MANIFEST)) as rows, rows.read() as txn:
            return txn.owner_epoch() >= epoch


def check_promote_after(seconds: float | None) -> None:
    """Raise `InvalidInput` for a time of silence that an owner without changes may reach."""
    if seconds is not None and seconds <= 2 * HEARTBEAT_SECONDS:
        what = f"--promote-after must be more than {2 * HEARTBEAT_SECONDS:g} seconds"
        raise InvalidInput(what, hint=f"the owner sends a heartbeat every {HEARTBEAT_SECONDS:g} seconds")


def recorded_options(disk: Disk, root: str) -> StoreOptions | None:
    """Return the options for the bucket from the quire.toml of a standby's directory; `None` before it has one."""
    if not disk.exists(os.path.join(root, names.CONFIG)):
        return None
    return options_of(layout.read_config(disk, root, None).objects, "objects")


def promote(
    directory: str | os.PathLike[str], *, discard: bool = False, options: StoreOptions | None = None
) -> Promoted:
    """Promote the standby in `directory` to owner. A `quire standby` that runs there must be stopped first.

    `options` say how the bucket is reached; default: as quire.toml in the directory says.
    """
    root = os.path.abspath(os.fspath(directory))
    state = read_standby_state(OsDisk(), root)
    if state is None:
        raise InvalidInput("this directory is not a standby", hint="`quire standby URL DIR` creates one", path=root)
    with Standby(state.url, root, options=options) as standby:
        return standby.promote(discard=discard)
