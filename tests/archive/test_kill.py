"""A process is killed at every step of the archiver: what it reported as archived is in the bucket, exactly."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import quire
from quire.archive.log_reader import find, store_ids
from quire.core.errors import InvalidInput, QuireError, StoreFenced
from quire.durable.failpoints import armed
from quire.objects.open import open_store
from tests.archive.archived_store import WAIT, ArchivedStore, contents, fill, kill, quiet, read
from tests.archive.killed import ROUND
from tests.fork_server import ForkServer

SOURCES = Path(__file__).parents[2] / "src" / "quire" / "archive"
HIT = re.compile(r'hit\("(archive\.[a-z.]+)"\)')
POINTS = sorted({point for path in SOURCES.glob("*.py") for point in HIT.findall(path.read_text())})
TAKEOVER_POINTS = {"archive.seal.before", "archive.seal.put"}
RARE_POINTS = {"archive.spool.before", "archive.spool.written", "archive.seal.ahead", "archive.seal.stopped"}
"""Only reached while the bucket is unavailable (test_archiver.py), or by a takeover from a busy owner
(test_sealing.py)."""


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("tests.archive.killed:run") as fork_server:
        yield fork_server


def run_rounds(
    fork_server: ForkServer, home: Path, failpoints: str, first: int = 0, rounds: int = 6
) -> tuple[int, int, bool]:
    """(last round begun, last round archived, whether it ended by itself)"""
    begun_round, archived_round, is_done = -1, -1, False
    with fork_server.spawn() as child:
        task = {"home": str(home), "failpoints": failpoints, "first": first, "rounds": rounds}
        child.channel.send(json.dumps(task).encode())
        while (message := child.channel.receive()) is not None:
            kind, _, number = message.decode().partition(" ")
            begun_round = int(number) if kind == "begun" else begun_round
            archived_round = int(number) if kind == "archived" else archived_round
            is_done = is_done or kind == "done"
    return begun_round, archived_round, is_done


def check(state: dict[str, object], begun_round: int, archived_round: int, first: int = 0) -> None:
    """Every archived change is there, none that was not begun is, and each database has a prefix of its changes."""
    expected = [number * 1_000 + step for number in range(first, begun_round + 1) for step in range(ROUND)]
    archived_count = (archived_round - first + 1) * ROUND
    for name, numbers in (
        ("shop", sorted(state.get("shop", {}))),  # type: ignore[call-overload]
        ("pairs", sorted(int(key) for key in state.get("pairs", {}))),  # type: ignore[attr-defined]
        ("events", [int(payload.split()[1]) for _, payload in state.get("events", [])]),  # type: ignore[attr-defined]
    ):
        assert numbers == expected[: len(numbers)], name
        assert len(numbers) >= archived_count, name
    for number in range(first, archived_round + 1):
        if number % 2:
            assert f"shop@round-{number}" in state


def is_restorable(bucket: Path) -> bool:
    with closing(open_store(str(bucket))) as store:
        ids = store_ids(store)
        try:
            return bool(ids) and find(store, ids[0]) is not None
        except QuireError:
            return False


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    "point", [point for point in POINTS if point not in TAKEOVER_POINTS | RARE_POINTS and ".replay." not in point]
)
def test_an_owner_killed_at_a_step(fork_server: ForkServer, tmp_path: Path, point: str, after: int) -> None:
    begun_round, archived_round, is_done = run_rounds(
        fork_server, tmp_path, f"{point}={after}*off->kill" if after else f"{point}=kill"
    )
    assert not is_done, f"{point} was not reached"
    bucket = tmp_path / "as it was"
    (tmp_path / "bucket").mkdir(exist_ok=True)  # the first step precedes the first put
    shutil.copytree(tmp_path / "bucket", bucket)
    if archived_round >= 0 or is_restorable(bucket):  # before a base counts, nothing is reported as archived
        quire.restore(str(bucket), tmp_path / "restored")
        check(read(tmp_path / "restored"), begun_round, archived_round)
    # the directory continues, with a base
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 900_000, 3)
    archived.wait_archived()
    state = contents(archived.store)
    archived.close()
    assert archived.restored_contents("continued") == state


@pytest.mark.parametrize("point", sorted(TAKEOVER_POINTS))
def test_a_takeover_killed_at_a_step_leaves_one_owner(tmp_path: Path, point: str) -> None:
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    expected = contents(archived.store)
    kill(archived.store)
    with armed(point, "raise:EIO"), pytest.raises(OSError, match="failpoint"):
        archived.restore("first", takeover=True)
    successor = archived.restore("second", takeover=True)
    with archived.open(successor) as store:
        assert contents(store) == expected
        fill(store, 100)
        assert store.archive is not None
        store.archive.wait(WAIT)
        expected = contents(store)
    with pytest.raises(StoreFenced):  # the dead owner comes back
        write_as_old_owner(archived)
    assert archived.restored_contents("at last") == expected


def write_as_old_owner(archived: ArchivedStore) -> None:
    with archived.open() as store:
        store.kv("pairs").put(b"too", b"late")
        assert store.archive is not None
        store.archive.wait(WAIT)


def test_an_interrupted_restore_is_not_a_store(tmp_path: Path) -> None:
    """quire.toml and the manifest existed, with some of the rows: the directory opened, and had less than was
    archived."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.close()

    def interrupt(step: str, done: int, total: int) -> None:
        if step == "log":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        archived.restore("half", progress=interrupt)
    for attempt in (
        lambda: quire.open(tmp_path / "half", "r"),
        lambda: quire.open(tmp_path / "half", settings=quiet()),
        lambda: archived.restore("half"),
    ):
        with pytest.raises(InvalidInput, match="did not complete"):
            attempt()
