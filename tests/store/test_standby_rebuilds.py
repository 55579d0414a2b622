"""A standby that cannot follow the log any further begins again from a base, and leaves nothing of its former state behind."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

import quire
from quire.archive.format import NO_DIGEST, Kind
from quire.archive.sealing import seal
from quire.archive.state_files import StandbyPhase, StandbyState, read_standby_state
from quire.core.errors import StoreFenced
from quire.durable import names
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.objects.open import open_store
from quire.store.standby import REPLACED, STAGED, Standby, promote
from quire.testing.clock import ManualClock
from tests.archive.archived_store import ArchivedStore, archived_store, contents, fill, kill, quiet
from tests.store.test_standby import change_and_wait, contents_after_promotion, follow, polled


def test_a_standby_waits_for_the_next_owner_at_a_seal_that_was_put_ahead(tmp_path: Path) -> None:
    """Hazard: such a seal has no parent digest. If the owner had used all numbers before it, standbys took the end of the log
    for damage, and stopped."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)

        hits: list[str] = []

        def be_faster_once(point: str) -> None:
            hits.append(point)
            if len(hits) == 1:
                change_and_wait(archived)

        def write_until_fenced(_: str) -> None:
            with suppress(StoreFenced):
                while archived.headers()[-1].kind is Kind.SEAL:
                    change_and_wait(archived)

        with (
            closing(open_store(str(archived.bucket))) as bucket,
            armed("archive.seal.before", be_faster_once),
            armed("archive.seal.stopped", write_until_fenced),
        ):
            last, _ = seal(bucket, archived.store_id, 1, 2, int(time.time() * 1000))
        ending = archived.headers()[-1]
        assert (ending.kind, ending.position.number) == (Kind.SEAL, last.number + 1)
        assert ending.parent_digest == NO_DIGEST
        with follow(archived) as standby:
            standby.poll()
            assert (standby.status.phase, standby.status.position) == ("waiting for a base", last)
        with suppress(StoreFenced):
            archived.store.close()


def test_a_broken_chain_is_followed_from_the_next_base(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)
        archived.archiver._break_chain("a test")
        fill(archived.store, 20)
        archived.wait_archived()
        with follow(archived) as standby:
            standby.poll()
            assert standby.status.rebuilds == 1
        assert contents_after_promotion(archived) == contents(archived.store)


def test_an_owner_that_was_killed_and_reopened_is_followed_from_its_base(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)
        kill(archived.store)
        archived.store = archived.open()
        fill(archived.store, 20)
        polled(archived)
        assert contents_after_promotion(archived) == contents(archived.store)


def test_a_trimmed_log_is_followed_from_its_base(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)
        fill(archived.store, 20)
        archived.wait_archived()  # the next object is older than the base, however soon that starts
        archived.archiver._needs_base = True
        fill(archived.store, 40)
        archived.wait_archived()
        state = read_standby_state(OsDisk(), str(tmp_path / "standby"))
        assert state is not None
        next_object = archived.log_path(type(state.position)(1, state.position.number + 1))
        next_object.unlink()
        with follow(archived) as standby:
            standby.poll()
            assert standby.status.rebuilds == 1
            assert standby.status.position > state.position


class Trimming:
    """An owner that, at a failpoint of a standby, changes something, puts a base, and removes the log before it."""

    def __init__(self, archived: ArchivedStore, clock: ManualClock) -> None:
        self.archived, self.clock = archived, clock
        self.is_done = False

    def __call__(self, _: str) -> None:
        if not self.is_done:
            self.is_done = True
            fill(self.archived.store, 20)
            self.archived.archiver.base()
            self.clock.advance(120)
            self.archived.store._parts.window.look(now=True)


def test_a_rebuild_whose_base_is_trimmed_begins_again_from_the_next(tmp_path: Path) -> None:
    """Hazard: when the owner trimmed the base that a standby was reading, the standby ended with `ObjectNotFound`, as if the
    archive were damaged."""
    clock = ManualClock()
    with archived_store(tmp_path, clock=clock, retain_seconds=60.0, base_seconds=3_600.0) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        with armed("standby.emptied", Trimming(archived, clock)):
            polled(archived)
        assert contents_after_promotion(archived) == contents(archived.store)


def test_a_promotion_is_completed_although_the_log_is_trimmed_meanwhile(tmp_path: Path) -> None:
    """Hazard: if the owner removed the object that the standby had applied last before its log was sealed, the promotion, and
    each that followed, ended with `ObjectNotFound`."""
    clock = ManualClock()
    with archived_store(tmp_path, clock=clock, retain_seconds=60.0, base_seconds=3_600.0) as archived:
        fill(archived.store, 0)
        polled(archived)
        trimming = Trimming(archived, clock)
        with armed("standby.promoting", trimming):
            promote(tmp_path / "standby")
        assert trimming.is_done
        with quire.open(tmp_path / "standby", settings=quiet()) as store:
            assert store.manifest.check() == []
            assert contents(store) == contents(archived.store)
        with suppress(StoreFenced):
            archived.store.close()


def test_a_promotion_is_completed_although_the_last_applied_object_is_damaged_meanwhile(tmp_path: Path) -> None:
    """Hazard: the promotion, and each that followed, ended with `Corruption`, although the standby had that object and could
    apply all later ones."""
    with archived_store(tmp_path) as archived:
        for start in (
            0,
            40,
        ):  # the last applied object is not the first of the log, at which the line of an epoch begins
            fill(archived.store, start)
            polled(archived)
        state = read_standby_state(OsDisk(), str(tmp_path / "standby"))
        assert state is not None
        applied = archived.log_path(state.position)

        def damage(_: str) -> None:
            fill(archived.store, 20)
            archived.wait_archived()
            applied.write_bytes(b"!" + applied.read_bytes()[1:])

        with armed("standby.promoting", damage):
            promote(tmp_path / "standby")
        with quire.open(tmp_path / "standby", settings=quiet()) as store:
            assert store.manifest.check() == []
            assert contents(store) == contents(archived.store)
        with suppress(StoreFenced):
            archived.store.close()


def test_a_standby_that_has_lost_files_begins_again_from_a_base(tmp_path: Path) -> None:
    """Hazard: writes to the missing files were passed over in the first object after a restart."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)
        for path in (tmp_path / "standby" / names.REPLAYED).iterdir():
            path.unlink()
        archived.store.kv("pairs").put(b"late", b"1")
        archived.wait_archived()
        with follow(archived) as standby:
            standby.poll()
            assert standby.status.rebuilds == 1
        assert contents_after_promotion(archived) == contents(archived.store)


def save_and_die(standby: Standby, state: StandbyState) -> None:
    Standby._save(standby, state)
    if state.phase is StandbyPhase.FOLLOWING:
        raise OSError("killed")


def test_what_a_killed_rebuild_has_replaced_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: a standby that was killed after its rows were exchanged left `.next/` and `.old/` until the next rebuild, also as
    an owner."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)
        archived.archiver._break_chain("a test")
        fill(archived.store, 20)
        archived.wait_archived()
        with follow(archived) as standby:
            monkeypatch.setattr(standby, "_save", lambda state: save_and_die(standby, state))
            with pytest.raises(OSError, match="killed"):
                standby.poll()
        assert (tmp_path / "standby" / STAGED).exists()
        assert (tmp_path / "standby" / REPLACED).exists()
        promote(tmp_path / "standby")
        assert not (tmp_path / "standby" / STAGED).exists()
        assert not (tmp_path / "standby" / REPLACED).exists()
        with suppress(StoreFenced):
            archived.store.close()
