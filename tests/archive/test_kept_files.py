"""What a standby's owner removes or uses again stays readable for the leases that were there at that moment, and no longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.archive.format import AnyEvent, CreateEvent, RemoveEvent, RenameEvent, ReserveEvent, WriteEvent
from quire.archive.kept_files import KeptFiles
from quire.archive.replay import Replay
from quire.core.errors import Unavailable
from quire.durable.files import OsDisk
from quire.store.reader_files import ReaderFiles

SEGMENT = "pages/00000001/wal/00000002.seg"
NEXT = "pages/00000001/wal/00000003.seg"
FIRST: list[AnyEvent] = [
    CreateEvent(7, SEGMENT),
    ReserveEvent(7, 64),
    WriteEvent(7, 0, b"header 2"),
    WriteEvent(7, 8, b"frames"),
]
USED_AGAIN: list[AnyEvent] = [WriteEvent(7, 0, b"header 3"), RenameEvent(7, SEGMENT, NEXT), WriteEvent(7, 8, b"others")]


class Followed:
    """A directory that is followed, with leases by name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.leases: set[str] = set()
        self.replay = self.resumed()
        self.apply(FIRST)

    def resumed(self) -> Replay:
        self.root.mkdir(exist_ok=True)
        (self.root / ".files").mkdir(exist_ok=True)
        return Replay.resume(
            OsDisk(), str(self.root), kept=KeptFiles(OsDisk(), str(self.root), lambda: set(self.leases))
        )

    def apply(self, events: list[AnyEvent]) -> None:
        self.replay.apply(events)
        self.replay.sweep()

    def read(self, path: str) -> bytes:
        def nowhere() -> None:
            raise Unavailable("no bucket")

        file = ReaderFiles(OsDisk(), str(self.root), nowhere).open(str(self.root / path), write=False)  # type: ignore[arg-type]
        try:
            return file.read_at(14, 0)
        finally:
            file.close()

    def kept(self) -> int:
        return len(list((self.root / ".kept").iterdir())) if (self.root / ".kept").exists() else 0


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path / "standby")


@pytest.mark.parametrize("events", [USED_AGAIN, [RemoveEvent(7, SEGMENT)]])
def test_a_segment_that_is_lost_stays_for_the_leases_of_that_moment(followed: Followed, events: list[AnyEvent]) -> None:
    followed.leases = {"one", "two"}
    followed.apply(events)
    assert followed.read(SEGMENT) == b"header 2frames"
    assert not (followed.root / SEGMENT).exists()
    followed.leases = {"two", "later"}
    followed.apply([])
    assert followed.read(SEGMENT) == b"header 2frames"
    followed.leases = {"later"}
    followed.apply([])
    assert followed.kept() == 0
    with pytest.raises(FileNotFoundError):
        followed.read(SEGMENT)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_segment_that_is_used_again_has_both_lives_wherever_objects_are_cut(followed: Followed, cut: int) -> None:
    followed.leases = {"one"}
    followed.apply(USED_AGAIN[:cut])
    followed.replay.close()
    followed.replay = followed.resumed()
    followed.apply([])
    followed.apply(USED_AGAIN[cut:])
    assert followed.read(SEGMENT) == b"header 2frames"
    assert followed.read(NEXT) == b"header 3others"


def test_nothing_is_kept_if_nobody_reads(followed: Followed) -> None:
    followed.apply(USED_AGAIN)
    assert followed.kept() == 0
    assert followed.read(NEXT) == b"header 3others"


def test_a_standby_that_is_started_again_keeps_for_who_reads_then(followed: Followed) -> None:
    followed.leases = {"one"}
    followed.apply([RemoveEvent(7, SEGMENT)])
    followed.replay.close()
    followed.replay = followed.resumed()
    assert followed.read(SEGMENT) == b"header 2frames"
    followed.replay.close()
    followed.leases = set()
    followed.replay = followed.resumed()
    assert followed.kept() == 0


def test_a_name_that_gets_another_file_is_read_from_that(followed: Followed) -> None:
    followed.leases = {"one"}
    followed.apply([RemoveEvent(7, SEGMENT)])
    followed.apply([CreateEvent(8, SEGMENT), WriteEvent(8, 0, b"header of another")])
    assert followed.read(SEGMENT) == b"header of anot"
