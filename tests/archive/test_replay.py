"""A directory rebuilt from events equals the recorded one, wherever a base was read meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from quire.archive.format import AnyEvent, BaseEvent, CreateEvent, RenameEvent, WriteEvent, ZeroEvent
from quire.archive.kept_files import KeptFiles
from quire.archive.queue import EventQueue
from quire.archive.recorder import Recorder, whole_file
from quire.archive.replay import Replay
from quire.core.errors import Corruption
from quire.durable.files import File, OsDisk, preallocate, write_atomic
from quire.testing.crashdisk import CrashDisk, drop_all

FOLDER = "pages/00000001/wal"
NAMES = [f"{FOLDER}/0000000{number}.seg" for number in range(5)]


def contents(root: str) -> dict[str, bytes]:
    tree = {}
    for folder, _, names in os.walk(os.path.join(root, "pages")):
        for name in names:
            path = os.path.join(folder, name)
            tree[os.path.relpath(path, root)] = Path(path).read_bytes()
    return tree


def take_events(queue: EventQueue) -> list[AnyEvent]:
    return queue.take(1 << 62)[0]  # type: ignore[return-value]


class ReplayMachine(RuleBasedStateMachine):
    """Random operations on files. A base is read in steps between which operations continue; events since its begin are
    replayed over it, twice."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.home = tempfile.TemporaryDirectory()
        self.root = os.path.join(self.home.name, "owner")
        os.makedirs(os.path.join(self.root, FOLDER))
        self.queue = EventQueue()
        self.disk = Recorder(OsDisk(), self.root, self.queue, lambda *_: None)
        self.base: list[AnyEvent] | None = None
        self.log: list[AnyEvent] = []
        self.walk: list[str] = []
        self.read_numbers: set[int] = set()
        self.open_files: list[File] = []

    def at(self, name: str) -> str:
        return os.path.join(self.root, name)

    def collect(self) -> None:
        events = take_events(self.queue)
        if self.base is not None:
            self.log += events

    @rule(name=st.sampled_from(NAMES), size=st.sampled_from([0, 10, 200_000]))
    def create(self, name: str, size: int) -> None:
        if not os.path.exists(self.at(name)):
            if size:
                preallocate(self.disk, self.at(name), size).close()
            else:
                self.disk.open(self.at(name), create=True).close()

    @rule(name=st.sampled_from(NAMES), offset=st.integers(0, 300), data=st.binary(min_size=1, max_size=40))
    def write(self, name: str, offset: int, data: bytes) -> None:
        if os.path.exists(self.at(name)):
            file = self.disk.open(self.at(name))
            file.write_at(data, offset)
            file.sync()
            file.close()

    @rule(name=st.sampled_from(NAMES), size=st.integers(0, 400))
    def truncate(self, name: str, size: int) -> None:
        if os.path.exists(self.at(name)):
            file = self.disk.open(self.at(name))
            file.truncate(size)
            file.close()

    @rule(name=st.sampled_from(NAMES))
    def hold(self, name: str) -> None:
        if os.path.exists(self.at(name)) and len(self.open_files) < 4:
            self.open_files.append(self.disk.open(self.at(name)))

    @precondition(lambda self: self.open_files)
    @rule(number=st.integers(0, 3), data=st.binary(min_size=1, max_size=40))
    def write_late(self, number: int, data: bytes) -> None:
        """The file may have lost its name, or another file may have it now."""
        self.open_files[number % len(self.open_files)].write_at(data, 5)

    @precondition(lambda self: self.open_files)
    @rule()
    def close_file(self) -> None:
        self.open_files.pop(0).close()

    @rule(former=st.sampled_from(NAMES), name=st.sampled_from(NAMES))
    def rename(self, former: str, name: str) -> None:
        if os.path.exists(self.at(former)) and former != name:
            self.disk.rename(self.at(former), self.at(name))

    @rule(former=st.sampled_from(NAMES), name=st.sampled_from(NAMES))
    def link(self, former: str, name: str) -> None:
        if os.path.exists(self.at(former)) and not os.path.exists(self.at(name)):
            self.disk.link(self.at(former), self.at(name))

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        if os.path.exists(self.at(name)):
            self.disk.remove(self.at(name))

    @rule(name=st.sampled_from(NAMES), data=st.binary(max_size=40))
    def replace(self, name: str, data: bytes) -> None:
        write_atomic(self.disk, self.at(name), data)

    @precondition(lambda self: self.base is None)
    @rule()
    def begin_base(self) -> None:
        self.collect()
        self.base = []
        self.disk.watch_renames()
        self.walk = sorted(contents(self.root))
        self.read_numbers = set()

    @precondition(lambda self: self.base is not None and self.walk)
    @rule()
    def read_one_file(self) -> None:
        self.read(self.at(self.walk.pop(0)))

    def read(self, path: str) -> None:
        assert self.base is not None
        try:
            self.base += whole_file(OsDisk(), path, os.path.relpath(path, self.root), self.read_numbers)
        except FileNotFoundError:
            return

    @precondition(lambda self: self.base is not None and not self.walk)
    @rule()
    def restore(self) -> None:
        assert self.base is not None
        while renamed := [path for path, number in self.disk.renamed().items() if number not in self.read_numbers]:
            for path in renamed:
                self.read(path)
        self.collect()
        target = os.path.join(self.home.name, f"restored-{len(os.listdir(self.home.name))}")
        with Replay(OsDisk(), target) as replay:
            replay.apply(self.base)
            replay.apply(self.log)
            replay.apply([BaseEvent(0, ())])
            assert contents(target) == contents(self.root)
            replay.finish()
        assert contents(target) == contents(self.root)
        self.disk.end_watch()
        self.base, self.log = None, []

    def teardown(self) -> None:
        while self.open_files:
            self.close_file()
        self.home.cleanup()


TestMirrored = ReplayMachine.TestCase


def test_a_file_that_gained_two_names_and_lost_one_is_read_by_the_other() -> None:
    first, second, third = NAMES[:3]
    machine = ReplayMachine()
    machine.create(first, 10)
    machine.begin_base()
    machine.rename(first, second)
    machine.link(second, third)
    machine.read_one_file()
    machine.remove(third)
    machine.restore()
    machine.teardown()


def test_a_file_replaced_by_a_removed_one_has_lost_its_name() -> None:
    """It was renamed over one that the base had already read, and removed before the base reached it."""
    first, second = NAMES[:2]
    machine = ReplayMachine()
    machine.create(first, 10)
    machine.create(second, 0)
    machine.begin_base()
    machine.read_one_file()
    machine.rename(second, first)
    machine.read_one_file()
    machine.remove(first)
    machine.restore()
    machine.teardown()


@pytest.mark.parametrize("path", ["../x", "pages/../../x", "pages//x", "etc/passwd", "pages/a\0b"])
def test_a_path_that_leaves_the_store_is_refused(tmp_path: Path, path: str) -> None:
    with Replay(OsDisk(), str(tmp_path / "r")) as replay, pytest.raises(Corruption):
        replay.apply([CreateEvent(1, path)])


@given(st.sampled_from([WriteEvent(7, 0, b"x"), RenameEvent(7, NAMES[0], NAMES[1])]))
def test_an_unknown_file_is_ignored_only_before_the_base_counts(event: AnyEvent) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as home, Replay(OsDisk(), os.path.join(home, "r")) as replay:
        replay.apply([event])
        replay.apply([BaseEvent(0, ())])
        with pytest.raises(Corruption, match="never created"):
            replay.apply([event])


@pytest.mark.parametrize("ending", ["removed", "replaced"])
def test_writes_after_the_removal_of_a_file_are_not_archived(tmp_path: Path, ending: str) -> None:
    """A base that was read after the removal does not contain the file: a thread that still filled it with zeros made
    the archive impossible to restore."""
    root, queue = tmp_path / "owner", EventQueue()
    (root / FOLDER).mkdir(parents=True)
    disk, path = Recorder(OsDisk(), str(root), queue, lambda *_: None), str(root / NAMES[0])
    file = disk.open(path, create=True)
    file.write_at(b"x", 0)
    if ending == "removed":
        disk.remove(path)
    else:
        write_atomic(disk, path, b"another")
    take_events(queue)
    file.write_at(bytes(1 << 18), 72)
    file.allocate(1 << 19)
    file.truncate(1)
    file.close()
    assert take_events(queue) == []


def test_a_file_renamed_while_a_base_is_read_is_in_it(tmp_path: Path) -> None:
    """The walk had listed the first name, which was removed; the second came too late for its list."""
    root, queue = tmp_path / "owner", EventQueue()
    (root / FOLDER).mkdir(parents=True)
    disk = Recorder(OsDisk(), str(root), queue, lambda *_: None)
    old_name, name = str(root / NAMES[0]), str(root / NAMES[1])
    write_atomic(disk, old_name, b"content")
    take_events(queue)
    disk.watch_renames()
    disk.link(old_name, name)
    disk.remove(old_name)
    assert list(disk.renamed()) == [name]


def test_zeros_after_the_end_use_no_space_and_before_it_overwrite(tmp_path: Path) -> None:
    """Half of what a restore wrote was zeros of new segments."""
    with Replay(OsDisk(), str(tmp_path / "store")) as replay:
        path = "pages/00000007/wal/0000000000000001.seg"
        replay.apply([CreateEvent(7, path), WriteEvent(7, 0, b"x" * 100), ZeroEvent(7, 50, 64 * 1024 * 1024)])
        file = tmp_path / "store" / path
        assert file.stat().st_size == 50 + 64 * 1024 * 1024
        assert file.stat().st_blocks * 512 < 1024 * 1024
        with file.open("rb") as opened:
            assert opened.read(200) == b"x" * 50 + bytes(150)
        replay.apply([ZeroEvent(7, 0, 10)])
        with file.open("rb") as opened:
            assert opened.read(50) == bytes(10) + b"x" * 40
        assert file.stat().st_size == 50 + 64 * 1024 * 1024


def test_files_may_be_missing_until_the_log_names_the_base_that_is_replayed(tmp_path: Path) -> None:
    """A base that was read earlier may be named in the first object after the beginning of the next one. From there on, a
    file that was removed while the next one was read counted as missing, and the moment could not be restored."""
    earlier, base = BaseEvent(1, (("a", 1, b""),)), BaseEvent(5, (("b", 1, b""),))
    write = WriteEvent(7, 0, b"bytes")
    with Replay(OsDisk(), str(tmp_path / "restored")) as replay:
        replay.base = base
        replay.apply([earlier, write])
        replay.apply([write, base])
        with pytest.raises(Corruption, match="never created"):
            replay.apply([write])


def following(root: Path) -> Replay:
    return Replay.resume(OsDisk(), str(root), kept=KeptFiles(OsDisk(), str(root), set))


def test_what_was_settled_can_be_continued_after_a_loss_of_power(tmp_path: Path) -> None:
    """Hazard: the names in `.files/` were not synced. Without them, a standby passed over all writes of the next object."""
    disk = CrashDisk(str(tmp_path / "machine"))
    with Replay(disk, str(tmp_path / "machine" / "standby")) as replay:
        replay.apply([CreateEvent(7, NAMES[0]), WriteEvent(7, 0, b"before"), BaseEvent(0, ())])
        replay.settle()
        disk.crash(str(tmp_path / "after"), drop_all)
    with following(tmp_path / "after" / "standby") as replay:
        replay.apply([WriteEvent(7, 6, b" and after")])
    assert (tmp_path / "after" / "standby" / NAMES[0]).read_bytes() == b"before and after"


def test_an_object_that_is_applied_again_may_lack_only_files_that_it_creates(tmp_path: Path) -> None:
    """Hazard: writes to any missing file were passed over, and the position moved past them."""
    with Replay(OsDisk(), str(tmp_path)) as replay:
        replay.apply([BaseEvent(0, ())])
        replay.settle()
    with following(tmp_path) as replay:
        replaced: list[AnyEvent] = [WriteEvent(7, 0, b"former"), RenameEvent(7, NAMES[0], NAMES[1])]
        replay.apply([*replaced, CreateEvent(7, NAMES[0]), WriteEvent(7, 0, b"new")], again=True)
        assert contents(str(tmp_path)) == {NAMES[0]: b"new"}
        missing: list[AnyEvent] = [WriteEvent(8, 0, b"x"), RenameEvent(8, NAMES[2], NAMES[3])]
        for event in missing:
            with pytest.raises(Corruption, match="never created"):
                replay.apply([CreateEvent(9, NAMES[4]), event], again=True)
