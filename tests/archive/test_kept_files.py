"""Files that a standby's owner removes or recycles stay readable for the leases that existed at that time, and no
longer."""

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
RECYCLED: list[AnyEvent] = [WriteEvent(7, 0, b"header 3"), RenameEvent(7, SEGMENT, NEXT), WriteEvent(7, 8, b"others")]


class FollowedDirectory:
    """A directory that is followed, with leases by name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.leases: set[str] = set()
        self.replay = self.resume()
        self.apply(FIRST)

    def resume(self) -> Replay:
        self.root.mkdir(exist_ok=True)
        (self.root / ".files").mkdir(exist_ok=True)
        return Replay.resume(
            OsDisk(), str(self.root), kept=KeptFiles(OsDisk(), str(self.root), lambda: set(self.leases))
        )

    def apply(self, events: list[AnyEvent]) -> None:
        self.replay.apply(events)
        self.replay.sweep()

    def read(self, path: str) -> bytes:
        def no_bucket() -> None:
            raise Unavailable("no bucket")

        file = ReaderFiles(OsDisk(), str(self.root), no_bucket).open(str(self.root / path), write=False)  # type: ignore[arg-type]
        try:
            return file.read_at(14, 0)
        finally:
            file.close()

    def kept_count(self) -> int:
        return len(list((self.root / ".kept").iterdir())) if (self.root / ".kept").exists() else 0


@pytest.fixture
def followed_directory(tmp_path: Path) -> FollowedDirectory:
    return FollowedDirectory(tmp_path / "standby")


@pytest.mark.parametrize("events", [RECYCLED, [RemoveEvent(7, SEGMENT)]])
def test_a_removed_or_recycled_segment_is_kept_for_the_leases_of_that_moment(
    followed_directory: FollowedDirectory, events: list[AnyEvent]
) -> None:
    followed_directory.leases = {"one", "two"}
    followed_directory.apply(events)
    assert followed_directory.read(SEGMENT) == b"header 2frames"
    assert not (followed_directory.root / SEGMENT).exists()
    followed_directory.leases = {"two", "later"}
    followed_directory.apply([])
    assert followed_directory.read(SEGMENT) == b"header 2frames"
    followed_directory.leases = {"later"}
    followed_directory.apply([])
    assert followed_directory.kept_count() == 0
    with pytest.raises(FileNotFoundError):
        followed_directory.read(SEGMENT)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_recycled_segment_is_readable_in_both_uses_wherever_objects_are_split(
    followed_directory: FollowedDirectory, cut: int
) -> None:
    followed_directory.leases = {"one"}
    followed_directory.apply(RECYCLED[:cut])
    followed_directory.replay.close()
    followed_directory.replay = followed_directory.resume()
    followed_directory.apply([])
    followed_directory.apply(RECYCLED[cut:])
    assert followed_directory.read(SEGMENT) == b"header 2frames"
    assert followed_directory.read(NEXT) == b"header 3others"


def test_nothing_is_kept_without_leases(followed_directory: FollowedDirectory) -> None:
    followed_directory.apply(RECYCLED)
    assert followed_directory.kept_count() == 0
    assert followed_directory.read(NEXT) == b"header 3others"


def test_a_restarted_standby_keeps_files_for_current_leases(followed_directory: FollowedDirectory) -> None:
    followed_directory.leases = {"one"}
    followed_directory.apply([RemoveEvent(7, SEGMENT)])
    followed_directory.replay.close()
    followed_directory.replay = followed_directory.resume()
    assert followed_directory.read(SEGMENT) == b"header 2frames"
    followed_directory.replay.close()
    followed_directory.leases = set()
    followed_directory.replay = followed_directory.resume()
    assert followed_directory.kept_count() == 0


def test_a_name_with_a_new_file_is_read_from_that_file(followed_directory: FollowedDirectory) -> None:
    followed_directory.leases = {"one"}
    followed_directory.apply([RemoveEvent(7, SEGMENT)])
    followed_directory.apply([CreateEvent(8, SEGMENT), WriteEvent(8, 0, b"header of another")])
    assert followed_directory.read(SEGMENT) == b"header of anot"
