"""A process is killed at every step of the archiver: what it was told to be archived is in the bucket, exactly."""

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
from tests.archive.killed import ROUND
from tests.archive.world import WAIT, World, contents, fill, kill, quiet, read
from tests.nursery import Nursery

SOURCES = Path(__file__).parents[2] / "src" / "quire" / "archive"
HIT = re.compile(r'hit\("(archive\.[a-z.]+)"\)')
POINTS = sorted({point for path in SOURCES.glob("*.py") for point in HIT.findall(path.read_text())})
OF_TAKEOVERS = {"archive.seal.before", "archive.seal.put"}
RARE = {"archive.spooled", "archive.seal.ahead"}
"""Only reached while the bucket is away (test_archiver.py), or by a takeover from a busy owner (test_sealing.py)."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.archive.killed:run") as made:
        yield made


def live(nursery: Nursery, home: Path, failpoints: str, first: int = 0, rounds: int = 6) -> tuple[int, int, bool]:
    """(last round begun, last round archived, whether it ended by itself)"""
    begun, archived, is_done = -1, -1, False
    with nursery.spawn() as child:
        told = {"home": str(home), "failpoints": failpoints, "first": first, "rounds": rounds}
        child.line.send(json.dumps(told).encode())
        while (message := child.line.receive()) is not None:
            word, _, number = message.decode().partition(" ")
            begun = int(number) if word == "begun" else begun
            archived = int(number) if word == "archived" else archived
            is_done = is_done or word == "done"
    return begun, archived, is_done


def check(state: dict[str, object], begun: int, archived: int, first: int = 0) -> None:
    """Everything that was archived is there, nothing that was not begun is, and each database is a beginning of its work."""
    expected = [number * 1_000 + step for number in range(first, begun + 1) for step in range(ROUND)]
    certain = (archived - first + 1) * ROUND
    for name, numbers in (
        ("shop", sorted(state.get("shop", {}))),  # type: ignore[call-overload]
        ("pairs", sorted(int(key) for key in state.get("pairs", {}))),  # type: ignore[attr-defined]
        ("events", [int(payload.split()[1]) for _, payload in state.get("events", [])]),  # type: ignore[attr-defined]
    ):
        assert numbers == expected[: len(numbers)], name
        assert len(numbers) >= certain, name
    for number in range(first, archived + 1):
        if number % 2:
            assert f"shop@round-{number}" in state


def is_restorable(bucket: Path) -> bool:
    with closing(open_store(str(bucket))) as store:
        known = store_ids(store)
        try:
            return bool(known) and find(store, known[0]) is not None
        except QuireError:
            return False


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    "point", [point for point in POINTS if point not in OF_TAKEOVERS | RARE and ".replay." not in point]
)
def test_an_owner_killed_at_a_step(nursery: Nursery, tmp_path: Path, point: str, after: int) -> None:
    begun, archived, is_done = live(nursery, tmp_path, f"{point}={after}*off->kill" if after else f"{point}=kill")
    assert not is_done, f"{point} was not reached"
    bucket = tmp_path / "as it was"
    (tmp_path / "bucket").mkdir(exist_ok=True)  # the first step comes before the first put
    shutil.copytree(tmp_path / "bucket", bucket)
    if archived >= 0 or is_restorable(bucket):  # before a base counts, nobody is told that anything is archived
        quire.restore(str(bucket), tmp_path / "restored")
        check(read(tmp_path / "restored"), begun, archived)
    # the directory goes on, with a base
    w = World(tmp_path)
    fill(w.store, 900_000, 3)
    w.archived()
    state = contents(w.store)
    w.close()
    assert w.look("continued") == state


@pytest.mark.parametrize("point", sorted(OF_TAKEOVERS))
def test_a_takeover_killed_at_a_step_leaves_one_owner(tmp_path: Path, point: str) -> None:
    w = World(tmp_path)
    fill(w.store, 0)
    w.archived()
    expected = contents(w.store)
    kill(w.store)
    with armed(point, "raise:EIO"), pytest.raises(OSError, match="failpoint"):
        w.restore("first", takeover=True)
    taken = w.restore("second", takeover=True)
    with w.open(taken) as store:
        assert contents(store) == expected
        fill(store, 100)
        assert store.archive is not None
        store.archive.wait(WAIT)
        expected = contents(store)
    with pytest.raises(StoreFenced):  # the dead owner comes back
        came_back(w)
    assert w.look("at last") == expected


def came_back(w: World) -> None:
    with w.open() as store:
        store.kv("pairs").put(b"too", b"late")
        assert store.archive is not None
        store.archive.wait(WAIT)


def test_a_restore_that_was_cut_off_is_no_store(tmp_path: Path) -> None:
    """quire.toml and the manifest were there, with some of the rows: the directory opened, and had less than was archived."""
    w = World(tmp_path)
    fill(w.store, 0)
    w.close()

    def dies(step: str, done: int, total: int) -> None:
        if step == "log":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        w.restore("half", progress=dies)
    for attempt in (
        lambda: quire.open(tmp_path / "half", "r"),
        lambda: quire.open(tmp_path / "half", settings=quiet()),
        lambda: w.restore("half"),
    ):
        with pytest.raises(InvalidInput, match="did not complete"):
            attempt()
