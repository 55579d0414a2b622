"""Steps of a simulated life whose store has an archive: outages, bases, trims, audits, and a standby that follows.

Threads: the one of the life. Raises `StepInterrupted`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from quire.archive.archiver import Archiver
from quire.archive.window import abandoned_epochs
from quire.durable.failpoints import armed
from quire.store.store import Store
from quire.testing.simulation_standby import StandbyFollower
from quire.testing.simulation_steps import Model, Steps

WAIT = 60.0
"""How long a step waits for the bucket, in seconds, before the run fails."""
WAITS = 0.15
"""Probability that a change in mode `async` is followed by a wait for the bucket."""
FULL_SPOOLS = 0.3
"""Probability that the disk has no space for objects that wait during an outage."""


class ArchivedSteps(Steps):
    """Steps that occasionally wait for the bucket. Before and after each change, `report` is called."""

    def __init__(self, *given: object, archived: list[Model], is_restorable: bool) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.archived = archived
        self.is_restorable = is_restorable
        self.report: Callable[[], None] = _ignore
        self.follower: StandbyFollower | None = None
        self._is_out = False
        """Whether the bucket does not answer."""

    def _change(self, after: Model, act: Callable[[], object], what: str = "") -> bool:
        is_change = after is not self.model
        self.possible = [self.model, after]
        self._note_model(after)
        self.report()
        done = super()._change(after, act, what)
        self._note_model(self.model)
        is_acknowledged = done and is_change and archive_of(self.store).settings.mode == "sync"
        if not is_acknowledged and not self._is_out and self._draw.random() < WAITS:
            archive_of(self.store).wait(WAIT)
            is_acknowledged = True
        if is_acknowledged:
            self._note_archived()
        self.report()
        return done

    def _note_model(self, model: Model) -> None:
        self.archived.append(model)
        if self.follower is not None:
            self.follower.trail.models.append(model)

    def wait(self) -> None:
        """Wait for the bucket."""
        archive_of(self.store).wait(WAIT)
        self._note_archived()
        self.report()

    def _note_archived(self) -> None:
        self.archived[:] = [self.model]
        self.is_restorable = True

    def outage(self) -> None:
        """Change the store while the bucket does not answer. In mode `sync`, the first change would wait for the end of it."""
        writes = [self._draw.choice(WRITES) for _ in range(self._draw.randint(2, 10))]
        if archive_of(self.store).settings.mode == "sync":
            return
        answers = threading.Event()
        spool = "raise:ENOSPC" if self._draw.random() < FULL_SPOOLS else "off"
        try:
            with armed("archive.log.before", lambda _: _wait_for(answers)), armed("archive.spool.before", spool):
                self._is_out = True
                for write in writes:
                    self._log.append(f"during an outage, {write.__name__}")
                    write(self)
        finally:
            self._is_out = False
            answers.set()

    def base(self) -> None:
        """Upload everything again. Then no former owner is needed any more."""
        self._work(archive_of(self.store).base)
        self.remove_abandoned()

    def trim(self) -> None:
        """Let old moments leave the window."""
        self.release_reader()
        self._clock.advance(self._draw.choice((7_200.0, 100_000.0)))
        self.maintain()

    def leave_window(self) -> None:
        """Replace chunks, and let the old ones, and the moments that need them, leave the window: their objects are deleted."""
        for _ in range(2):
            self.write_rows()
            self.checkpoint()
        for step in (self.maintain, self.base):  # the first retires the old chunks, once no base is needed for them
            self.release_reader()
            self._clock.advance(120.0)
            step()
        self.trim()

    def follow(self) -> None:
        """Let the standby follow, often with everything in the bucket, and perhaps during the next steps."""
        assert self.follower is not None
        self.stop_following()
        self._note_model(self.model)  # `write_rows` has completed it after the change
        is_archived = self.follower.draw.random() < 0.7 or not self.is_restorable  # the first base must be there
        if is_archived:
            for name in sorted(self.model):
                if self.model[name].kind == "pages":
                    self.store.pages.open(name).wal.publish()
            self.wait()
        is_beside = self.follower.draw.random() < 0.4
        order = self.follower.begin(self._clock.now_ms(), is_archived=is_archived, is_beside=is_beside)
        self._log[-1] += f" {order.polls} polls, {order.fate}{', beside the next steps' if is_beside else ''}"
        if not is_beside:
            self.stop_following()
        self.report()

    def stop_following(self) -> None:
        """Wait for the end of the standby's session, if there is one."""
        if self.follower is not None:
            self.findings += self.follower.end()

    def audit(self) -> None:
        """Read everything that any moment of the window needs: nothing may be missing."""
        if self.is_restorable and not (audit := self.store.heavy.audit_archive(runner="threads")).is_sound:
            self.findings.append(f"the audit found problems: {audit.problems[:3]}")

    def remove_abandoned(self) -> None:
        """Remove the owner epochs that died before their first base, and were then abandoned."""
        with self.store.manifest.read() as txn:
            store_id = txn.store_id()
        for epoch in abandoned_epochs(self.store.objects, store_id):
            if epoch.after is None:
                self._work(partial(self.store.heavy.remove_abandoned, epoch.owner_epoch), str(epoch.owner_epoch))


WRITES: tuple[Callable[[ArchivedSteps], None], ...] = (
    ArchivedSteps.write_rows,
    ArchivedSteps.append_records,
    ArchivedSteps.write_pairs,
    ArchivedSteps.flush_or_compact,
    ArchivedSteps.checkpoint,
    ArchivedSteps.merge,
    ArchivedSteps.drop_snapshot,
    ArchivedSteps.trim,
)
"""Steps during an outage: none of them waits for the log."""
ArchivedSteps.choices = (
    *Steps.choices,
    (3, ArchivedSteps.outage),
    (3, ArchivedSteps.base),
    (3, ArchivedSteps.trim),
    (2, ArchivedSteps.leave_window),
    (1, ArchivedSteps.audit),
    (2, ArchivedSteps.remove_abandoned),
)


class FollowedSteps(ArchivedSteps):
    """Steps while a standby follows."""

    choices = (*ArchivedSteps.choices, (12, ArchivedSteps.follow))


def _ignore() -> None:
    """Report nothing."""


def _wait_for(event: threading.Event) -> None:
    event.wait(WAIT)


def archive_of(store: Store) -> Archiver:
    """Return the archive of a store, which every simulated store here has."""
    assert store.archive is not None
    return store.archive
