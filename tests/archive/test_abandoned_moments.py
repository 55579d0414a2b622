"""A moment that a takeover of an earlier state has abandoned is named, and can be restored and cloned by its owner epoch."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

import quire
from quire.archive.clones import clone_keys
from quire.archive.window import abandoned_epochs
from quire.cli.main import run
from quire.core.errors import InvalidInput, ObjectNotFound, StillReferenced
from quire.objects.collector import Collector
from quire.objects.open import open_store
from quire.testing.clock import ManualClock
from tests.archive.archived_store import WAIT, ArchivedStore


class Branched:
    """A store that was restored to its first value and taken over there, after it had a second value."""

    def __init__(self, home: Path) -> None:
        self.clock = ManualClock()
        self.archived = ArchivedStore(home, clock=self.clock)
        self.bucket = str(self.archived.bucket)
        self.archived.store.create("pairs", "lsm")
        self.first_ms = self._put(self.archived.store, b"one")
        self.second_ms = self._put(self.archived.store, b"two")
        self.archived.close()
        self.newest = self.archived.restore("newest", at_ms=self.first_ms)
        with self.archived.open(self.newest, takeover=True, discard=True) as store:
            self.third_ms = self._put(store, b"three")

    def _put(self, store: quire.Store, value: bytes) -> int:
        """Put a value; return a moment at which the store has it."""
        store.kv("pairs").put(b"key", value)
        assert store.archive is not None
        store.archive.wait(WAIT)
        self.clock.advance(60)
        return self.clock.now_ms() - 30_000

    def value(self, path: Path | str) -> bytes | None:
        with quire.open(path, "r", clock=self.clock) as store:
            return store.kv("pairs").get(b"key")


@pytest.fixture
def branched(tmp_path: Path) -> Branched:
    return Branched(tmp_path)


def test_a_restore_names_the_abandoned_state_of_its_time(branched: Branched, tmp_path: Path) -> None:
    restored = quire.restore(branched.bucket, tmp_path / "line", at_ms=branched.second_ms, clock=branched.clock)
    assert branched.value(tmp_path / "line") == b"one"
    assert restored.abandoned is not None
    assert restored.abandoned.epoch == 1
    assert restored.abandoned_at_ms <= branched.second_ms
    quire.restore(branched.bucket, tmp_path / "other", at_ms=branched.second_ms, epoch=1, clock=branched.clock)
    assert branched.value(tmp_path / "other") == b"two"


def test_a_clone_names_the_abandoned_state_of_its_time(branched: Branched, tmp_path: Path) -> None:
    cloned = quire.clone(branched.bucket, tmp_path / "line", at_ms=branched.second_ms, clock=branched.clock)
    assert branched.value(tmp_path / "line") == b"one"
    assert cloned.abandoned is not None
    assert cloned.abandoned.epoch == 1
    quire.clone(branched.bucket, tmp_path / "other", at_ms=branched.second_ms, epoch=1, clock=branched.clock)
    assert branched.value(tmp_path / "other") == b"two"


@pytest.mark.parametrize("moment", ["first_ms", "third_ms"])
def test_a_moment_of_the_history_has_no_other_state(branched: Branched, tmp_path: Path, moment: str) -> None:
    at_ms = getattr(branched, moment)
    restored = quire.restore(branched.bucket, tmp_path / "line", at_ms=at_ms, clock=branched.clock)
    assert restored.abandoned is None


def test_the_commands_print_the_command_for_the_abandoned_state(
    branched: Branched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = datetime.fromtimestamp(branched.second_ms / 1000, UTC).isoformat()
    assert run(["restore-store", branched.bucket, str(tmp_path / "line"), "--at", at]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"quire restore-store {branched.bucket} DIR --at" in output
    words = output.split("DIR ", 1)[1].split("`")[0].split()
    assert run(["restore-store", branched.bucket, str(tmp_path / "other"), *words]) == 0
    assert branched.value(tmp_path / "other") == b"two"
    capsys.readouterr()
    assert run(["clone", branched.bucket, str(tmp_path / "clone"), "--at", at]) == 0
    assert "--epoch 1" in capsys.readouterr().out
    assert run(["archive", "abandoned", "--store", str(branched.newest)]) == 0
    output = capsys.readouterr().out
    assert f"quire restore-store {branched.bucket} DIR --epoch 1" in output


def test_the_end_of_a_restored_epoch_is_listed(branched: Branched) -> None:
    with closing(open_store(branched.bucket)) as bucket:
        (left,) = abandoned_epochs(bucket, branched.archived.store_id)
    assert left.owner_epoch == 1
    assert left.after is not None
    assert left.ended_at_ms > branched.first_ms


def test_an_unknown_epoch_is_refused(branched: Branched, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match="no archive of that owner epoch"):
        quire.restore(branched.bucket, tmp_path / "other", epoch=7, clock=branched.clock)
    with pytest.raises(InvalidInput, match="cannot take over directly"):
        quire.restore(branched.bucket, tmp_path / "other", epoch=1, takeover=True, clock=branched.clock)


def test_an_abandoned_epoch_that_is_cloned_while_it_is_removed_stays(
    branched: Branched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived, clock = branched.archived, branched.clock
    third = archived.restore("third", at_ms=branched.first_ms)
    deleted: list[list[str]] = []
    delete_abandoned = Collector.delete_abandoned

    def clone_first(self: Collector, url: str, prefix: str, keys: list[str]) -> None:
        names = list(keys)
        if not deleted:
            quire.clone(branched.bucket, tmp_path / "clone", epoch=2, clock=clock)
        deleted.append(names)
        delete_abandoned(self, url, prefix, names)

    with archived.open(third, takeover=True, discard=True) as store:
        assert store.archive is not None
        store.kv("pairs").put(b"key", b"four")
        store.archive.wait(WAIT)
        monkeypatch.setattr(Collector, "delete_abandoned", clone_first)
        with pytest.raises(StillReferenced, match="a clone may read"):
            store.heavy.remove_abandoned(2)
        assert len(deleted) == 1
        assert len(clone_keys(store.objects, archived.store_id)) == 1
    assert branched.value(tmp_path / "clone") == b"three"
