"""A standby that cannot follow the log any further begins again from a base, and leaves nothing of its former state behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

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
from tests.archive.archived_store import archived_store, contents, fill, kill
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


def test_a_rebuild_whose_base_is_trimmed_begins_again_from_the_next(tmp_path: Path) -> None:
    """Hazard: when the owner trimmed the base that a standby was reading, the standby ended with `ObjectNotFound`, as if the
    archive were damaged."""
    clock = ManualClock()
    with archived_store(tmp_path, clock=clock, retain_seconds=60.0, base_seconds=3_600.0) as archived:
        fill(archived.store, 0)
        archived.wait_archived()

        def trim(_: str) -> None:
            fill(archived.store, 20)
            archived.archiver.base()
            clock.advance(120)
            archived.store._parts.window.look(now=True)

        with armed("standby.emptied", call_once(trim)):
            polled(archived)
        assert contents_after_promotion(archived) == contents(archived.store)


def call_once(act: Callable[[str], None]) -> Callable[[str], None]:
    calls: list[str] = []

    def hit(point: str) -> None:
        calls.append(point)
        if len(calls) == 1:
            act(point)

    return hit


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
