"""A standby has what the owner had at each object, wherever it is killed, and becomes the owner with all of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.archive import standbys
from quire.archive.format import StandbyEvent
from quire.archive.state_files import StandbyPhase, read_standby_state
from quire.core.errors import InvalidInput, StoreFenced
from quire.durable import names
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.store.standby import Standby, promote
from tests.archive.world import Gate, World, contents, fill, kill, quiet, until, world
from tests.programs import run_program


def follow(here: World, name: str = "standby") -> Standby:
    return Standby(str(here.bucket), here.home / name)


def polled(here: World, name: str = "standby") -> None:
    here.archived()
    with follow(here, name) as standby:
        standby.poll()


def what_a_promotion_gives(here: World, name: str = "standby") -> dict[str, Any]:
    """Promote, look, and put the bucket and the directory back as they were. What the owner uploads meanwhile waits."""
    gate = Gate(here.archiver)
    gate.held.clear()
    for path in (here.bucket, here.home / name):
        subprocess.run(["cp", "-a", path, f"{path}.kept"], check=True)
    promote(here.home / name)
    with quire.open(here.home / name, settings=quiet()) as store:
        assert store.manifest.check() == []
        state = contents(store)
    for path in (here.bucket, here.home / name):
        shutil.rmtree(path)
        os.rename(f"{path}.kept", path)
    gate.held.set()
    return state


def work(here: World, start: int) -> None:
    """Tables are flushed and merged, segments sealed and compressed, chunks written."""
    fill(here.store, start)
    here.store.kv("pairs").flush()
    here.store.snapshot("shop", f"at-{start}")
    if start % 2:
        here.store.checkpoint("shop")


def test_a_standby_has_what_the_owner_had_at_each_object(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        for start in range(0, 100, 25):
            work(here, start)
            polled(here)
            assert what_a_promotion_gives(here) == contents(here.store)


def test_a_standby_has_a_rollback_and_what_was_dropped(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        work(here, 0)
        polled(here)
        work(here, 25)
        here.store.rollback("shop", to="at-0")
        here.store.drop("pairs", undoable=True)
        polled(here)
        assert what_a_promotion_gives(here) == contents(here.store)


def test_files_leave_with_the_object_that_no_longer_names_them(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        fill(here.store, 0)
        polled(here)
        before = {path.stat().st_ino: path for path in (tmp_path / "standby" / names.REPLAYED).iterdir()}
        (tmp_path / "held").mkdir()
        for number, path in before.items():
            os.link(path, tmp_path / "held" / str(number))  # or another file may get its number when it has left
        for start in range(20, 120, 20):
            work(here, start)
        here.store.drop("events")
        polled(here)
        named = {
            os.stat(os.path.join(folder, name)).st_ino
            for part in ("pages", "streams", "lsm")
            for folder, _, files in os.walk(tmp_path / "standby" / part)
            for name in files
        }
        kept = {path.stat().st_ino for path in (tmp_path / "standby" / names.REPLAYED).iterdir()}
        assert before.keys() - kept, "nothing left"
        assert kept <= named


STEPS = [
    "standby.staged",
    "standby.part_swapped",
    "standby.rows_swapped",
    "archive.replay.files",
    "archive.replay.rows",
    "archive.replay.replaced",
    "standby.applied",
    "standby.noted",
]


@pytest.mark.parametrize("hits", [0, 2])
def test_a_standby_that_is_killed_goes_on(tmp_path: Path, hits: int) -> None:
    """At each step a standby of its own is killed while it is made and while it follows; all of them follow one owner."""
    with world(tmp_path) as here:
        fill(here.store, 0)
        here.archived()
        for step in STEPS:
            _killed(here, step, hits, step)  # while it is made
            polled(here, step)
        work(here, 21)
        here.archived()
        for step in STEPS:
            _killed(here, step, hits, step)  # while it follows
            polled(here, step)
        expected = contents(here.store)
        for step in STEPS:
            assert what_a_promotion_gives(here, step) == expected, step


def _killed(here: World, step: str, hits: int, name: str) -> None:
    with armed(step, f"{hits}*off->1*raise:EIO" if hits else "1*raise:EIO"), follow(here, name) as standby:
        try:
            standby.poll()
        except OSError as error:
            assert "failpoint" in str(error)  # noqa: PT017 - it may also come to its end


PROMOTION = [
    "standby.promoting",
    "objects.ownership.recorded",
    "objects.ownership.created",
    "standby.claimed",
    "archive.seal.before",
    "archive.seal.put",
    "standby.sealed",
    "objects.ownership.epoch_begun",
    "objects.ownership.confirmed",
    "standby.taken_over",
]


def test_a_promotion_that_is_killed_is_completed_by_the_next_one(tmp_path: Path) -> None:
    kept = (tmp_path / "bucket", tmp_path / "standby")
    with world(tmp_path) as here:
        fill(here.store, 0)
        polled(here)
        fill(here.store, 20)
        here.archived()
        expected = contents(here.store)
        kill(here.store)
    for path in kept:
        subprocess.run(["cp", "-a", path, f"{path}.kept"], check=True)
    for step in PROMOTION:
        with armed(step, "1*raise:EIO"), pytest.raises(OSError, match="failpoint"):
            promote(tmp_path / "standby")
        promote(tmp_path / "standby")
        with quire.open(tmp_path / "standby", settings=quiet()) as store:
            assert store.manifest.check() == [], step
            assert contents(store) == expected, step
        for path in kept:  # the next step begins with the same bucket and the same standby
            shutil.rmtree(path)
            subprocess.run(["cp", "-a", f"{path}.kept", path], check=True)


def test_promotion_applies_what_the_owner_writes_meanwhile_and_fences_it(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        fill(here.store, 0)
        polled(here)

        expected: list[dict[str, Any]] = []

        def write(_: str) -> None:
            fill(here.store, 20)
            here.archived()
            expected.append(contents(here.store))

        with armed("standby.claimed", write):
            promoted = promote(tmp_path / "standby")
        assert promoted.seconds < 5
        with pytest.raises(quire.QuireError):
            change_and_wait(here)
        with quire.open(tmp_path / "standby", settings=quiet()) as store:
            assert [contents(store)] == expected
            assert store.info().owner_epoch == promoted.owner_epoch == 2
        with suppress(StoreFenced):
            here.store.close()


def test_an_owner_that_slept_through_a_promotion_is_fenced_before_it_acknowledges(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        fill(here.store, 0)
        polled(here)
        expected = contents(here.store)
        gate = Gate(here.archiver)
        gate.held.clear()  # asleep, with an upload in its hands
        here.store.kv("pairs").put(b"late", b"1")
        assert gate.is_waiting.wait(30)
        promote(tmp_path / "standby")
        gate.held.set()
        with pytest.raises(StoreFenced, match="epoch 2"):
            here.archived()
        with quire.open(tmp_path / "standby", settings=quiet()) as store:
            assert contents(store) == expected
        with suppress(StoreFenced):
            here.store.close()


def change_and_wait(here: World) -> None:
    here.archiver.queue.append(StandbyEvent(()))
    here.archived()


def test_of_two_standbys_one_is_promoted_and_the_other_follows_it(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        fill(here.store, 0)
        polled(here, "first")
        polled(here, "second")
        expected = contents(here.store)
        kill(here.store)

        def other(_: str) -> None:
            if not (tmp_path / "first.promoted").exists():
                (tmp_path / "first.promoted").touch()
                promote(tmp_path / "first")

        with armed("standby.promoting", other), pytest.raises(StoreFenced, match="epoch 2"):
            promote(tmp_path / "second")
        with pytest.raises(StoreFenced, match="epoch 2"):
            promote(tmp_path / "second")
        with here.open(tmp_path / "first") as winner:
            assert contents(winner) == expected
            fill(winner, 20)
            winner.archive.wait(30)  # type: ignore[union-attr]
            with follow(here, "second") as loser:
                loser.poll()
                assert loser.status.position.epoch == 2
            expected = contents(winner)
        promote(tmp_path / "second")
        with quire.open(tmp_path / "second", settings=quiet()) as store:
            assert contents(store) == expected


def test_of_two_standbys_that_promote_at_once_one_becomes_the_owner(tmp_path: Path) -> None:
    """Both have chosen the same epoch before either has claimed it."""
    with world(tmp_path) as here:
        fill(here.store, 0)
        polled(here, "first")
        polled(here, "second")
        expected = contents(here.store)
        kill(here.store)
        both = threading.Barrier(2, timeout=30)
        refused: dict[str, StoreFenced] = {}

        def promoted(name: str) -> None:
            try:
                promote(tmp_path / name)
            except StoreFenced as error:
                refused[name] = error

        def meet(_: str) -> None:
            both.wait()

        with armed("standby.promoting", meet):
            threads = [threading.Thread(target=promoted, args=(name,)) for name in ("first", "second")]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        ((loser, error),) = refused.items()
        assert "epoch 2" in str(error)
        (winner,) = {"first", "second"} - {loser}
        with here.open(tmp_path / winner) as store:
            assert (contents(store), store.info().owner_epoch) == (expected, 2)
            fill(store, 20)
            expected = contents(store)
        with follow(here, loser) as standby:
            standby.poll()
            assert standby.status.position.epoch == 2
        assert what_a_promotion_gives_now(tmp_path / loser) == expected


def what_a_promotion_gives_now(path: Path) -> dict[str, Any]:
    promote(path)
    with quire.open(path, settings=quiet()) as store:
        return contents(store)


def test_a_broken_chain_is_followed_from_the_next_base(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        fill(here.store, 0)
        polled(here)
        here.archiver._break_chain("a test")
        fill(here.store, 20)
        here.archived()
        with follow(here) as standby:
            standby.poll()
            assert standby.status.rebuilds == 1
        assert what_a_promotion_gives(here) == contents(here.store)


def test_an_owner_that_was_killed_and_opened_again_is_followed_from_its_base(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        fill(here.store, 0)
        polled(here)
        kill(here.store)
        here.store = here.open()
        fill(here.store, 20)
        polled(here)
        assert what_a_promotion_gives(here) == contents(here.store)


def test_a_log_that_was_trimmed_meanwhile_is_followed_from_its_base(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        fill(here.store, 0)
        polled(here)
        fill(here.store, 20)
        here.archived()  # the next object is older than the base, however soon that begins
        here.archiver._needs_base = True
        fill(here.store, 40)
        here.archived()
        state = read_standby_state(OsDisk(), str(tmp_path / "standby"))
        assert state is not None
        next_object = here.log_path(type(state.position)(1, state.position.number + 1))
        next_object.unlink()
        with follow(here) as standby:
            standby.poll()
            assert standby.status.rebuilds == 1
            assert standby.status.position > state.position


READER = """
import sys, quire
with quire.open(sys.argv[1], "r") as store:
    rows, kept = (store.sqlite("shop", at=at).execute("select count(*) from t").fetchall()[0][0] for at in (None, "one"))
    print(rows, kept, [info.name for info in store.databases()], store.feed.head() > 0)
"""


def test_readers_beside_a_running_standby_see_what_was_published(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        fill(here.store, 0)
        here.store.kv("pairs").flush()
        here.store.snapshot("shop", "one")
        here.archived()
        with follow(here) as standby:
            standby.poll()
            assert _read_beside(tmp_path) == "20 20 ['events', 'pairs', 'shop'] True"
            fill(here.store, 20)
            here.store.kv("pairs").flush()
            here.store.checkpoint("shop")
            here.archived()
            standby.poll()
            assert _read_beside(tmp_path) == "40 20 ['events', 'pairs', 'shop'] True"


def _read_beside(tmp_path: Path) -> str:
    command = ["-c", READER, str(tmp_path / "standby")]
    answer = run_program(command, capture_output=True)
    assert not answer.returncode, answer.stderr
    return answer.stdout.strip()


def test_a_standby_is_opened_by_nobody_else(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        fill(here.store, 0)
        polled(here)
        with pytest.raises(StoreFenced, match="standby"):
            quire.open(tmp_path / "standby", takeover=True)
        with pytest.raises(InvalidInput, match="not a standby"):
            promote(tmp_path / "store")
        with pytest.raises(InvalidInput, match="not empty"):
            follow(here, "store.copy" if shutil.copytree(tmp_path / "bucket", tmp_path / "store.copy") else "")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standbys, "HEARTBEAT_SECONDS", 0.3)
    monkeypatch.setattr(standbys, "LIST_SECONDS", 0.3)
    monkeypatch.setattr(standbys, "FIRST_LIST_SECONDS", 0.05)
    monkeypatch.setattr(standbys, "TICK_SECONDS", 0.05)
    monkeypatch.setattr("quire.store.standby.HEARTBEAT_SECONDS", 0.3)


@pytest.mark.usefixtures("fast")
def test_an_idle_owner_is_heard_and_a_dead_one_replaced(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        fill(here.store, 0)
        here.archived()
        results: list[Any] = []
        with follow(here) as standby:
            thread = threading.Thread(target=lambda: results.append(standby.run(promote_after=2.0)))
            thread.start()
            until(lambda: standby.status.is_named)
            heard = standby.status.objects
            until(
                lambda: standby.status.objects >= heard + 8 or not thread.is_alive()
            )  # each after 0.3 s without a change
            assert thread.is_alive(), "an idle owner was replaced"
            expected = contents(here.store)
            kill(here.store)
            thread.join(30)
            assert [promoted.owner_epoch for promoted in results] == [2]
        assert not (tmp_path / "standby" / names.STANDBY).exists()
        with quire.open(tmp_path / "standby", settings=quiet()) as store:
            assert contents(store) == expected


def test_silence_counts_only_after_the_owner_has_named_the_standby(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        fill(here.store, 0)
        here.archived()
        with follow(here) as standby:
            standby.poll()
            for _ in range(10):
                standby._count_silence(0, 2.0)
            assert standby.status.silent_seconds == 0
            here.archiver.queue.append(StandbyEvent((standby.standby_id,)))
            here.archived()
            standby.poll()
            standby._count_silence(0, 2.0)
            standby._count_silence(0, 3600.0)  # asleep: nothing was heard because nobody listened
            assert standby.status.silent_seconds == 4.0
            with pytest.raises(InvalidInput, match="more than 10 seconds"):
                standby.run(promote_after=10)


def test_a_standby_behind_by_many_objects_catches_up_and_stays_close(tmp_path: Path) -> None:
    with world(tmp_path, interval_seconds=0.2) as here:
        fill(here.store, 0)
        here.archived()
        stop = threading.Event()
        lags: list[float] = []
        with follow(here) as standby:
            standby.poll()
            thread = threading.Thread(
                target=lambda: standby.run(
                    stop=stop, each=lambda status: lags.append(time.time() - status.at_ms / 1000)
                )
            )
            thread.start()
            with closing(here.store.sqlite("shop")) as connection:
                for number in range(100, 160):
                    connection.execute("insert into t values(?, ?)", (number, "y"))
                    time.sleep(0.02)
            here.archived()
            last = here.headers()[-1].position
            until(lambda: standby.status.position >= last)
            stop.set()
            thread.join(30)
        assert lags
        assert sorted(lags)[len(lags) // 2] < 2.0
        assert read_standby_state(OsDisk(), str(tmp_path / "standby")).phase is StandbyPhase.FOLLOWING  # type: ignore[union-attr]
        assert what_a_promotion_gives(here) == contents(here.store)
