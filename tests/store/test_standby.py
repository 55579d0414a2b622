"""A standby has the owner's state at each object, wherever it is killed, and becomes the owner with all of it."""

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
from quire.archive.format import StandbyEvent
from quire.archive.state_files import StandbyPhase, read_standby_state
from quire.core.errors import InvalidInput, StoreFenced
from quire.durable import names
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.store.standby import STAGED, Standby, promote
from quire.testing.clock import ManualClock
from tests.archive.archived_store import WAIT, ArchivedStore, Gate, archived_store, contents, fill, kill, quiet, until
from tests.programs import run_program


def follow(archived: ArchivedStore, name: str = "standby") -> Standby:
    return Standby(str(archived.bucket), archived.home / name)


def polled(archived: ArchivedStore, name: str = "standby") -> None:
    archived.wait_archived()
    with follow(archived, name) as standby:
        standby.poll()


def contents_after_promotion(archived: ArchivedStore, name: str = "standby") -> dict[str, Any]:
    """Promote the standby, read it, and restore the bucket and the directory. Uploads of the owner wait meanwhile."""
    gate = Gate(archived.archiver)
    gate.may_put.clear()
    for path in (archived.bucket, archived.home / name):
        subprocess.run(["cp", "-a", path, f"{path}.kept"], check=True)
    promote(archived.home / name)
    with quire.open(archived.home / name, settings=quiet()) as store:
        assert store.manifest.check() == []
        state = contents(store)
    for path in (archived.bucket, archived.home / name):
        shutil.rmtree(path)
        os.rename(f"{path}.kept", path)
    gate.may_put.set()
    return state


def work(archived: ArchivedStore, start: int) -> None:
    """Flush and merge tables, seal and compress segments, write chunks."""
    fill(archived.store, start)
    archived.store.kv("pairs").flush()
    archived.store.snapshot("shop", f"at-{start}")
    if start % 2:
        archived.store.checkpoint("shop")


def test_a_standby_has_the_owners_state_at_each_object(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        for start in range(0, 100, 25):
            work(archived, start)
            polled(archived)
            assert contents_after_promotion(archived) == contents(archived.store)


def test_a_standby_has_rollbacks_and_drops(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        work(archived, 0)
        polled(archived)
        work(archived, 25)
        archived.store.rollback("shop", to="at-0")
        archived.store.drop("pairs", undoable=True)
        polled(archived)
        assert contents_after_promotion(archived) == contents(archived.store)


def test_files_are_removed_with_the_object_that_no_longer_refers_to_them(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)
        before = {path.stat().st_ino: path for path in (tmp_path / "standby" / names.REPLAYED).iterdir()}
        (tmp_path / "held").mkdir()
        for number, path in before.items():
            # Otherwise another file may get the inode number of a removed one.
            os.link(path, tmp_path / "held" / str(number))
        for start in range(20, 120, 20):
            work(archived, start)
        archived.store.drop("events")
        polled(archived)
        named = {
            os.stat(os.path.join(folder, name)).st_ino
            for part in ("pages", "streams", "lsm")
            for folder, _, files in os.walk(tmp_path / "standby" / part)
            for name in files
        }
        inodes = {path.stat().st_ino for path in (tmp_path / "standby" / names.REPLAYED).iterdir()}
        assert before.keys() - inodes, "no file was removed"
        assert inodes <= named


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
def test_a_killed_standby_continues(tmp_path: Path, hits: int) -> None:
    """For each step, a separate standby is killed while it is created and while it follows; all of them follow one
    owner."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        for step in STEPS:
            _killed(archived, step, hits, step)  # while it is created
            polled(archived, step)
        work(archived, 21)
        archived.wait_archived()
        for step in STEPS:
            _killed(archived, step, hits, step)  # while it follows
            polled(archived, step)
        expected = contents(archived.store)
        for step in STEPS:
            assert contents_after_promotion(archived, step) == expected, step


def _killed(archived: ArchivedStore, step: str, hits: int, name: str) -> None:
    with armed(step, f"{hits}*off->1*raise:EIO" if hits else "1*raise:EIO"), follow(archived, name) as standby:
        try:
            standby.poll()
        except OSError as error:
            assert "failpoint" in str(error)  # noqa: PT017 - it may also complete


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


def test_a_killed_promotion_is_completed_by_the_next_one(tmp_path: Path) -> None:
    directories = (tmp_path / "bucket", tmp_path / "standby")
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)
        fill(archived.store, 20)
        archived.wait_archived()
        expected = contents(archived.store)
        kill(archived.store)
    for path in directories:
        subprocess.run(["cp", "-a", path, f"{path}.kept"], check=True)
    for step in PROMOTION:
        with armed(step, "1*raise:EIO"), pytest.raises(OSError, match="failpoint"):
            promote(tmp_path / "standby")
        promote(tmp_path / "standby")
        with quire.open(tmp_path / "standby", settings=quiet()) as store:
            assert store.manifest.check() == [], step
            assert contents(store) == expected, step
        for path in directories:  # the next step starts with the same bucket and the same standby
            shutil.rmtree(path)
            subprocess.run(["cp", "-a", f"{path}.kept", path], check=True)


@pytest.mark.parametrize("step", ["", "standby.staged", "standby.part_swapped", "standby.rows_swapped"])
def test_a_promotion_includes_what_an_owner_that_restarts_meanwhile_archives(tmp_path: Path, step: str) -> None:
    """Hazard: a restarted owner continues with a base after a break. What it acknowledged after the standby had applied
    everything was left out. The promotion may also be killed while it rebuilds from that base."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)
        kill(archived.store)
    expected: list[dict[str, Any]] = []

    def restart(_: str) -> None:
        if not expected:
            with archived.open() as store:
                fill(store, 20)
                store.archive.wait(WAIT)  # type: ignore[union-attr]
                expected.append(contents(store))

    with armed("standby.promoting", restart):
        if step:
            with armed(step, "1*raise:EIO"), pytest.raises(OSError, match="failpoint"):
                promote(tmp_path / "standby")
        promote(tmp_path / "standby")
    with quire.open(tmp_path / "standby", settings=quiet()) as store:
        assert store.manifest.check() == []
        assert contents(store) == expected[0]


@pytest.mark.parametrize("event", ["restarted", "moved", "uploaded again"])
def test_a_standby_has_its_files_when_the_window_has_passed(tmp_path: Path, event: str) -> None:
    """Hazard: an owner that was closed and opened again gave its tables and segments new objects in the next base. A standby
    continued with the objects that the log had named, and these were removed when the window had passed."""
    clock = ManualClock()
    with archived_store(tmp_path, clock=clock, retain_seconds=60.0, base_seconds=3_600.0) as archived:
        store = archived.store
        fill(store, 0)
        store.kv("pairs").flush()
        store.stream("events").seal()
        store.stream("events").compress()
        store.stream("events").evict()
        polled(archived)
        before = set(archived.bucket.rglob("file/*"))
        assert before
        if event == "uploaded again":
            archived.archiver.base()
        else:
            archived.close()
            if event == "moved":
                subprocess.run(["cp", "-a", archived.root, f"{archived.root}.moved"], check=True)
                shutil.rmtree(archived.root)
                os.rename(f"{archived.root}.moved", archived.root)
            archived.store = archived.open()
        for start in (100, 200):
            fill(archived.store, start)
            archived.wait_archived()
            with archived.archiver._cutting:
                archived.archiver._begin_base()
            until(lambda: not archived.archiver._is_base_pending())
            polled(archived)
            clock.advance(120)
        archived.store._parts.window.look(now=True)
        is_kept = before <= set(archived.bucket.rglob("file/*"))
        assert is_kept == (event == "restarted"), "a restart uploads nothing again"
        polled(archived)
        assert contents_after_promotion(archived) == contents(archived.store)


@pytest.mark.parametrize("damaged", ["before the base", "names the base", "after the base"])
def test_a_promotion_gives_up_only_what_a_damaged_object_hides(tmp_path: Path, damaged: str) -> None:
    """Hazards: after an object that could not be read, a later base, which has everything, was given up too; if the object that
    names the base was damaged after a break, no promotion ended any more; and an object after the base hid the base as well."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)
        before = contents(archived.store)
        kill(archived.store)
    known = len(archived.headers())
    expected: list[dict[str, Any]] = []

    def restart_and_damage(_: str) -> None:
        if expected:
            return
        with armed("archive.base.begun", "raise:EIO"):
            broken = archived.open()
            fill(broken, 50)
            until(lambda: len(archived.headers()) > known)
            kill(broken)
        with archived.open() as store:
            assert store.archive is not None
            fill(store, 100)
            store.archive.wait(WAIT)
            expected.append(before if damaged == "names the base" else contents(store))
            last = len(archived.headers())
            for key in (b"next", b"last") if damaged == "after the base" else ():
                store.kv("pairs").put(key, b"")
                store.archive.wait(WAIT)
        headers = archived.headers()
        place = {"before the base": known, "names the base": headers[-1].base, "after the base": last}[damaged]
        path = archived.log_path(headers[place].position)
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # a fixed byte would leave some of the objects intact

    with armed("standby.promoting", restart_and_damage):
        promote(tmp_path / "standby")
    assert not (tmp_path / "standby" / STAGED).exists()
    with quire.open(tmp_path / "standby", settings=quiet()) as store:
        assert store.manifest.check() == []
        assert contents(store) == expected[0]


def test_a_standby_is_promoted_although_the_object_that_names_its_base_is_damaged(tmp_path: Path) -> None:
    """Hazard: it has everything, but was refused, because nobody else could be restored to its moment any more."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)
        expected = contents(archived.store)
        kill(archived.store)
    (path,) = {
        archived.log_path(header.position) for header in archived.headers() if header.base == header.position.number
    }
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    promote(tmp_path / "standby")
    with archived.open(tmp_path / "standby") as store:
        assert contents(store) == expected
        fill(store, 20)
        store.archive.wait(WAIT)  # type: ignore[union-attr]
        expected = contents(store)
    assert archived.restored_contents() == expected


def test_a_standby_of_backups_is_refused(tmp_path: Path) -> None:
    """Hazard: the log between two backups lacks what changed between them. A standby applied it, and was damaged."""
    with quire.open(tmp_path / "store") as store:
        fill(store, 0)
        store.backup(str(tmp_path / "backups"))
    with (
        Standby(str(tmp_path / "backups"), tmp_path / "standby") as standby,
        pytest.raises(InvalidInput, match="backups"),
    ):
        standby.poll()


def test_promotion_applies_what_the_owner_writes_meanwhile_and_fences_it(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)

        expected: list[dict[str, Any]] = []

        def write(_: str) -> None:
            fill(archived.store, 20)
            archived.wait_archived()
            expected.append(contents(archived.store))

        with armed("standby.claimed", write):
            promoted = promote(tmp_path / "standby")
        assert promoted.seconds < 5
        with pytest.raises(quire.QuireError):
            change_and_wait(archived)
        with quire.open(tmp_path / "standby", settings=quiet()) as store:
            assert [contents(store)] == expected
            assert store.info().owner_epoch == promoted.owner_epoch == 2
        with suppress(StoreFenced):
            archived.store.close()


def test_an_owner_suspended_during_a_promotion_is_fenced_before_it_acknowledges(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)
        expected = contents(archived.store)
        gate = Gate(archived.archiver)
        gate.may_put.clear()  # suspended during an upload
        archived.store.kv("pairs").put(b"late", b"1")
        assert gate.is_waiting.wait(30)
        promote(tmp_path / "standby")
        gate.may_put.set()
        with pytest.raises(StoreFenced, match="epoch 2"):
            archived.wait_archived()
        with quire.open(tmp_path / "standby", settings=quiet()) as store:
            assert contents(store) == expected
        with suppress(StoreFenced):
            archived.store.close()


def change_and_wait(archived: ArchivedStore) -> None:
    archived.archiver.queue.append(StandbyEvent(()))
    archived.wait_archived()


def test_of_two_standbys_one_is_promoted_and_the_other_follows_it(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived, "first")
        polled(archived, "second")
        expected = contents(archived.store)
        kill(archived.store)

        def other(_: str) -> None:
            if not (tmp_path / "first.promoted").exists():
                (tmp_path / "first.promoted").touch()
                promote(tmp_path / "first")

        with armed("standby.promoting", other), pytest.raises(StoreFenced, match="epoch 2"):
            promote(tmp_path / "second")
        with pytest.raises(StoreFenced, match="epoch 2"):
            promote(tmp_path / "second")
        with archived.open(tmp_path / "first") as winner:
            assert contents(winner) == expected
            fill(winner, 20)
            winner.archive.wait(30)  # type: ignore[union-attr]
            with follow(archived, "second") as loser:
                loser.poll()
                assert loser.status.position.epoch == 2
            expected = contents(winner)
        promote(tmp_path / "second")
        with quire.open(tmp_path / "second", settings=quiet()) as store:
            assert contents(store) == expected


@pytest.mark.parametrize("step", ["standby.promoting", "objects.ownership.recorded"])
def test_a_promotion_that_died_before_its_claim_is_refused_if_another_owner_has_taken_the_epoch(
    tmp_path: Path, step: str
) -> None:
    """Hazard: the other owner's first session is forgotten when it is opened again. The promotion then created that session for
    itself, and deposed the owner without `discard`: what it had acknowledged was lost."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)
        kill(archived.store)
        with armed(step, "1*raise:EIO"), pytest.raises(OSError, match="failpoint"):
            promote(tmp_path / "standby")
        archived.restore("restored", takeover=True)
        with archived.open(tmp_path / "restored") as owner:
            fill(owner, 20)
            owner.archive.wait(WAIT)  # type: ignore[union-attr]
            with pytest.raises(StoreFenced, match="epoch 2"):
                promote(tmp_path / "standby")
            fill(owner, 40)
            owner.archive.wait(WAIT)  # type: ignore[union-attr]
            expected = contents(owner)
        with follow(archived, "standby") as standby:
            standby.poll()
    assert promoted_contents(tmp_path / "standby") == expected


def test_of_two_concurrent_promotions_one_becomes_the_owner(tmp_path: Path) -> None:
    """Both have chosen the same epoch before either has claimed it."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived, "first")
        polled(archived, "second")
        expected = contents(archived.store)
        kill(archived.store)
        barrier = threading.Barrier(2, timeout=30)
        refused: dict[str, StoreFenced] = {}

        def promoted(name: str) -> None:
            try:
                promote(tmp_path / name)
            except StoreFenced as error:
                refused[name] = error

        def wait_at_barrier(_: str) -> None:
            barrier.wait()

        with armed("standby.promoting", wait_at_barrier):
            threads = [threading.Thread(target=promoted, args=(name,)) for name in ("first", "second")]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        ((loser, error),) = refused.items()
        assert "epoch 2" in str(error)
        (winner,) = {"first", "second"} - {loser}
        with archived.open(tmp_path / winner) as store:
            assert (contents(store), store.info().owner_epoch) == (expected, 2)
            fill(store, 20)
            expected = contents(store)
        with follow(archived, loser) as standby:
            standby.poll()
            assert standby.status.position.epoch == 2
        assert promoted_contents(tmp_path / loser) == expected


def promoted_contents(path: Path) -> dict[str, Any]:
    promote(path)
    with quire.open(path, settings=quiet()) as store:
        return contents(store)


READER = """
import sys, quire
with quire.open(sys.argv[1], "r") as store:
    rows, kept = (store.sqlite("shop", at=at).execute("select count(*) from t").fetchall()[0][0] for at in (None, "one"))
    print(rows, kept, [info.name for info in store.databases()], store.feed.head() > 0)
"""


def test_readers_beside_a_running_standby_see_published_state(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.store.kv("pairs").flush()
        archived.store.snapshot("shop", "one")
        archived.wait_archived()
        with follow(archived) as standby:
            standby.poll()
            assert _read_beside(tmp_path) == "20 20 ['events', 'pairs', 'shop'] True"
            fill(archived.store, 20)
            archived.store.kv("pairs").flush()
            archived.store.checkpoint("shop")
            archived.wait_archived()
            standby.poll()
            assert _read_beside(tmp_path) == "40 20 ['events', 'pairs', 'shop'] True"


def _read_beside(tmp_path: Path) -> str:
    command = ["-c", READER, str(tmp_path / "standby")]
    answer = run_program(command, capture_output=True)
    assert not answer.returncode, answer.stderr
    return answer.stdout.strip()


def test_a_standby_cannot_be_opened_by_another_process(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)
        with pytest.raises(StoreFenced, match="standby"):
            quire.open(tmp_path / "standby", takeover=True)
        with pytest.raises(InvalidInput, match="not a standby"):
            promote(tmp_path / "store")
        with pytest.raises(InvalidInput, match="not empty"):
            follow(archived, "store.copy" if shutil.copytree(tmp_path / "bucket", tmp_path / "store.copy") else "")


def test_a_standby_behind_by_many_objects_catches_up_and_keeps_up(tmp_path: Path) -> None:
    with archived_store(tmp_path, interval_seconds=0.2) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        stop = threading.Event()
        lags: list[float] = []
        with follow(archived) as standby:
            standby.poll()
            thread = threading.Thread(
                target=lambda: standby.run(
                    stop=stop, each=lambda status: lags.append(time.time() - status.at_ms / 1000)
                )
            )
            thread.start()
            with closing(archived.store.sqlite("shop")) as connection:
                for number in range(100, 160):
                    connection.execute("insert into t values(?, ?)", (number, "y"))
                    time.sleep(0.02)
            archived.wait_archived()
            last = archived.headers()[-1].position
            until(lambda: standby.status.position >= last)
            stop.set()
            thread.join(30)
        assert lags
        assert sorted(lags)[len(lags) // 2] < 2.0
        assert read_standby_state(OsDisk(), str(tmp_path / "standby")).phase is StandbyPhase.FOLLOWING  # type: ignore[union-attr]
        assert contents_after_promotion(archived) == contents(archived.store)
