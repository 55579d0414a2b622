"""The quarantine: a file that is moved there is never lost, has a note of its former path, and can be restored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.core.errors import AlreadyExists, Corruption, NotFound
from quire.durable import quarantine
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk, read_all
from quire.durable.names import QuarantinedFile, parse_path
from quire.testing.crashdisk import CrashDisk, every_chooser

HOT = "streams/7/hot/0000000000000001.seg"
WHY = "the manifest log does not name it"


def put(root: Path, path: str, data: bytes = b"records") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def test_a_moved_file_has_a_note_with_its_path_and_the_reason(tmp_path: Path) -> None:
    file = put(tmp_path, HOT)
    entry = quarantine.move(OsDisk(), str(tmp_path), HOT, why=WHY, at_ms=5, database=7)
    assert not file.exists()
    assert (tmp_path / entry.place).read_bytes() == b"records"
    assert parse_path(entry.place) == QuarantinedFile(number=1, original=HOT)
    assert quarantine.entries(OsDisk(), str(tmp_path)) == [entry]
    assert (entry.path, entry.why, entry.moved_ms, entry.database, entry.size_bytes) == (HOT, WHY, 5, 7, 7)


def test_the_same_path_may_be_moved_again(tmp_path: Path) -> None:
    for number, data in ((1, b"a"), (2, b"bb")):
        put(tmp_path, HOT, data)
        assert quarantine.move(OsDisk(), str(tmp_path), HOT, why=WHY, at_ms=5).number == number
    assert [entry.size_bytes for entry in quarantine.entries(OsDisk(), str(tmp_path))] == [1, 2]


def test_a_directory_is_moved_as_a_whole(tmp_path: Path) -> None:
    put(tmp_path, HOT)
    quarantine.move(OsDisk(), str(tmp_path), "streams/7", why=WHY, at_ms=5)
    quarantine.restore(OsDisk(), str(tmp_path), 1)
    assert (tmp_path / HOT).read_bytes() == b"records"


def test_restoring_moves_the_file_back_and_replaces_nothing(tmp_path: Path) -> None:
    put(tmp_path, HOT)
    quarantine.move(OsDisk(), str(tmp_path), HOT, why=WHY, at_ms=5)
    other = put(tmp_path, HOT, b"other")
    with pytest.raises(AlreadyExists):
        quarantine.restore(OsDisk(), str(tmp_path), 1)
    assert other.read_bytes() == b"other"
    other.unlink()
    assert quarantine.restore(OsDisk(), str(tmp_path), 1).path == HOT
    assert other.read_bytes() == b"records"
    assert quarantine.entries(OsDisk(), str(tmp_path)) == []
    assert os.listdir(tmp_path / "quarantine") == []
    with pytest.raises(NotFound):
        quarantine.restore(OsDisk(), str(tmp_path), 1)


def test_removing_deletes_the_file_and_its_note(tmp_path: Path) -> None:
    put(tmp_path, HOT)
    quarantine.move(OsDisk(), str(tmp_path), HOT, why=WHY, at_ms=5)
    quarantine.remove(OsDisk(), str(tmp_path), 1)
    assert os.listdir(tmp_path / "quarantine") == []
    with pytest.raises(NotFound):
        quarantine.remove(OsDisk(), str(tmp_path), 1)


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "a/../../b", "", "quarantine/00000001.json", "a//b"])
def test_a_note_with_a_path_outside_the_store_is_rejected(tmp_path: Path, path: str) -> None:
    """Anyone may have written a note: restoring must not move a file out of the store."""
    put(tmp_path, HOT)
    quarantine.move(OsDisk(), str(tmp_path), HOT, why=WHY, at_ms=5)
    note = tmp_path / "quarantine/00000001.json"
    note.write_text(note.read_text().replace(HOT, path))
    with pytest.raises(Corruption):
        quarantine.restore(OsDisk(), str(tmp_path), 1)
    (listed,) = quarantine.entries(OsDisk(), str(tmp_path))
    assert "note" in listed.why


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"x" * (quarantine.NOTE_BYTES_MAX + 1)])
def test_a_damaged_note_is_reported_and_hides_no_other(tmp_path: Path, data: bytes) -> None:
    for name in "12":
        put(tmp_path, HOT[:-5] + f"{name}.seg")
        quarantine.move(OsDisk(), str(tmp_path), HOT[:-5] + f"{name}.seg", why=WHY, at_ms=5)
    (tmp_path / "quarantine/00000001.json").write_bytes(data)
    damaged, intact = quarantine.entries(OsDisk(), str(tmp_path))
    assert (damaged.path, intact.why) == ("", WHY)
    quarantine.remove(OsDisk(), str(tmp_path), 1)
    assert quarantine.entries(OsDisk(), str(tmp_path)) == [intact]


def test_a_note_of_a_move_that_did_not_happen_is_not_an_entry(tmp_path: Path) -> None:
    put(tmp_path, HOT)
    with armed("quarantine.noted", "raise:EIO"), pytest.raises(OSError, match="failpoint"):
        quarantine.move(OsDisk(), str(tmp_path), HOT, why=WHY, at_ms=5)
    assert quarantine.entries(OsDisk(), str(tmp_path)) == []
    entry = quarantine.move(OsDisk(), str(tmp_path), HOT, why=WHY, at_ms=5)
    assert quarantine.entries(OsDisk(), str(tmp_path)) == [entry]
    assert sorted(os.listdir(tmp_path / "quarantine")) == [f"{entry.number:08x}", f"{entry.number:08x}.json"]


@pytest.mark.parametrize("point", ["quarantine.noted", "quarantine.renamed", "quarantine.moved"])
def test_power_loss_at_any_step_loses_nothing(tmp_path: Path, point: str) -> None:
    """The file is at its old path, or in quarantine with a note of that path."""
    disk = CrashDisk(str(tmp_path / "before"))
    root = disk.path()
    disk.make_dirs(disk.path("streams", "7", "hot"))
    with disk.open(disk.path(HOT), create=True) as file:
        file.write_at(b"records", 0)
        file.sync()
    disk.sync_dir(disk.path("streams", "7", "hot"))
    with armed(point, "raise:EIO"), pytest.raises(OSError, match="failpoint"):
        quarantine.move(disk, root, HOT, why=WHY, at_ms=5)
    for number, choose in enumerate(every_chooser()):
        crashed = disk.crash(str(tmp_path / str(number)), choose)
        entries = quarantine.entries(crashed, crashed.path())
        paths = [path for path in (HOT, *(entry.place for entry in entries)) if crashed.exists(crashed.path(path))]
        assert paths
        assert all(read_all(crashed, crashed.path(path)) == b"records" for path in paths)
