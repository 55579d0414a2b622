"""The disk space of a WAL: sizes follow the used bytes, sealed segments keep no zeros, and crashes lose nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.core.errors import Corruption
from quire.core.settings import PagesSettings
from quire.durable import quarantine
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.manifest.records import WalState
from quire.pages.segment import FILE_BYTES_MAX, FILE_BYTES_MIN
from quire.pages.wal_files import SPARE
from tests.pages.engine_harness import Model, Pages, assert_reads, image, small_segments, write
from tests.pages.test_wal import rows


def _wal(pages: Pages) -> dict[int, Path]:
    folder = Path(pages.root) / "pages/00000001/wal"
    return {int(path.stem, 16): path for path in sorted(folder.iterdir())}


def _sizes(pages: Pages) -> dict[int, int]:
    return {segment_id: path.stat().st_size for segment_id, path in _wal(pages).items()}


def interrupt(_: str) -> None:
    raise KeyboardInterrupt


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_segment_doubles_only_if_the_one_before_was_filled(tmp_path: Path) -> None:
    """Each new segment doubled, however empty the previous one was."""
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    for _ in range(10):
        write(store, model, {0: image()})
        assert max(_sizes(pages).values()) == FILE_BYTES_MIN
        pages.engine.flush(store.db_id)
    filled = {page: image() for page in range(FILE_BYTES_MIN // 512)}
    write(store, model, filled)  # slightly more than one segment holds
    write(store, model, filled)
    assert max(_sizes(pages).values()) > FILE_BYTES_MIN
    pages.engine.flush(store.db_id)
    write(store, model, {0: image()})
    pages.engine.flush(store.db_id)
    write(store, model, {0: image()})
    last = max(_wal(pages))
    assert _sizes(pages)[last] == FILE_BYTES_MIN, "after a busy phase the size returns to the smallest"
    pages.stop()


def test_a_sealed_segment_keeps_only_its_used_bytes(tmp_path: Path) -> None:
    """Sealed and pinned files used to keep their zeros."""
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    for number in range(5):
        write(store, model, {number: image()})
        pages.engine.snapshot("shop", f"s{number}")
    for segment_id, row in rows(pages).items():
        assert row.state is WalState.INDEXED
        assert _sizes(pages)[segment_id] == row.used_bytes < 32 * 1024
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_zeros_that_an_earlier_version_left_are_released_when_the_database_is_opened(tmp_path: Path) -> None:
    pages, model = Pages(tmp_path), Model()
    write(pages.database(), model, {0: image(), 1: image()})
    pages.engine.snapshot("shop", "kept")
    pages.stop()
    path = _wal(pages)[1]
    used = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(FILE_BYTES_MAX)
    pages.start()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    assert path.stat().st_size == used
    pages.stop()


@pytest.mark.parametrize("point", ["pages.wal.trimmed", "pages.wal.sealed"])
def test_a_crash_around_the_trim_loses_nothing(tmp_path: Path, point: str) -> None:
    """Before the seal: an open segment whose file ends after its last frame. After it: the seal has the same size."""
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    write(store, model, {page: image() for page in range(9)})
    with armed(point, interrupt), pytest.raises(KeyboardInterrupt):
        pages.engine.flush(store.db_id)
    pages.crash()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    (row,) = rows(pages).values()
    assert (row.state, _sizes(pages)[1]) == (WalState.INDEXED, row.used_bytes)
    pages.stop()


def test_only_filled_files_are_recycled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trimmed file needs its zeros again, which is the cost of creating a file."""
    small_segments(monkeypatch, frames=6)
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    write(store, model, {page: image() for page in range(9)})  # one filled, one half full
    pages.checkpoint(store)
    write(store, model, {page: image() for page in range(12)})
    assert store.wal.recycled == 1
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_an_idle_database_has_no_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, frames=6)
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    write(store, model, {page: image() for page in range(5)})
    pages.engine.tick(store)
    assert SPARE in _wal(pages)
    pages.engine.flush(store.db_id)
    pages.engine.tick(store)
    assert SPARE not in _wal(pages)
    pages.stop()


def test_the_budget_counts_the_space_that_the_file_system_allocated(tmp_path: Path) -> None:
    settings = PagesSettings(page_size=512)
    pages = Pages(tmp_path, settings=settings)
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    assert pages.engine.quota.used(store.db_id) == FILE_BYTES_MIN, "an open segment with its preallocated zeros"
    pages.engine.flush(store.db_id)
    allocated_bytes = sum(path.stat().st_blocks * 512 for path in _wal(pages).values())
    assert pages.engine.quota.used(store.db_id) == allocated_bytes < FILE_BYTES_MIN
    pages.stop()


# ── files without a row ───────────────────────────────────────────────────────────────────────────────────────────────
def test_segments_newer_than_a_restored_manifest_are_quarantined(tmp_path: Path) -> None:
    """A manifest from an older copy has no rows for segments with acknowledged commits; opening used to delete them."""
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    write(store, model, {0: image()})
    pages.engine.flush(store.db_id)
    before = model.newest
    pages.manifest.env.copy(str(tmp_path / "older.lmdb"))
    write(store, model, {0: image(), 1: image()})
    pages.stop()
    newer = _wal(pages)[2].read_bytes()
    manifest = pages.manifest.env.path
    os.replace(tmp_path / "older.lmdb", manifest)
    pages.start()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, before)
    (entry,) = quarantine.entries(OsDisk(), pages.root)
    assert entry.path == "pages/00000001/wal/00000002.seg"
    assert (entry.database, "2 page versions" in entry.why) == (1, True)
    assert (Path(pages.root) / entry.place).read_bytes() == newer
    pages.stop()


@pytest.mark.parametrize("contents", [b"", bytes(FILE_BYTES_MIN)])
def test_leftovers_of_a_new_file_after_a_crash_are_removed(tmp_path: Path, contents: bytes) -> None:
    pages, model = Pages(tmp_path), Model()
    write(pages.database(), model, {0: image()})
    pages.stop()
    stray = _wal(pages)[1].with_name("00000007.seg")
    stray.write_bytes(contents)
    pages.start()
    pages.database()
    assert not stray.exists()
    assert quarantine.entries(OsDisk(), pages.root) == []
    pages.stop()


@pytest.mark.parametrize("point", ["pages.segment.created", "pages.wal.made"])
def test_a_file_created_before_its_row_is_removed(tmp_path: Path, point: str) -> None:
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    write(store, model, {0: image()})
    pages.engine.flush(store.db_id)
    with armed(point, interrupt), pytest.raises(KeyboardInterrupt):
        write(store, Model(), {0: image()})
    pages.crash()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    assert set(_wal(pages)) == {1}
    assert quarantine.entries(OsDisk(), pages.root) == []
    pages.stop()


def test_a_file_without_a_row_that_cannot_be_read_is_quarantined(tmp_path: Path) -> None:
    pages, model = Pages(tmp_path), Model()
    write(pages.database(), model, {0: image()})
    pages.stop()
    data = bytearray(_wal(pages)[1].read_bytes())
    data[20] ^= 1
    _wal(pages)[1].with_name("00000007.seg").write_bytes(data)
    pages.start()
    pages.database()
    (entry,) = quarantine.entries(OsDisk(), pages.root)
    assert "checksum" in entry.why
    pages.stop()


# ── files with a row ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_another_segment_under_a_name_is_refused(tmp_path: Path) -> None:
    """A WAL of another database, or of an earlier incarnation of the same one."""
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    write(store, model, {0: image()})
    pages.crash()
    path = _wal(pages)[1]
    original = path.read_bytes()
    (tmp_path / "other").mkdir()
    other = Pages(tmp_path / "other")
    write(other.database(), Model(), {0: image()})
    other.crash()
    path.write_bytes(_wal(other)[1].read_bytes())  # the same database and segment id, another salt
    with pytest.raises(Corruption, match="does not match the manifest"):
        pages.database()
    path.write_bytes(original)
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()
    other.stop()


def test_a_missing_or_truncated_sealed_segment_is_reported_at_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    write(store, model, {0: image()})
    pages.engine.flush(store.db_id)
    write(store, model, {1: image()})
    pages.engine.flush(store.db_id)
    pages.stop()
    first_bytes = _wal(pages)[1].read_bytes()
    _wal(pages)[1].write_bytes(first_bytes[:-100])
    second = _wal(pages)[2]
    second_bytes = second.read_bytes()
    second.unlink()
    pages.start()
    store = pages.database()
    with store.open_snapshot() as reader, pytest.raises(Corruption):
        reader.read_page(0)
    with store.open_snapshot() as reader, pytest.raises(Corruption):
        reader.read_page(1)
    log = capsys.readouterr().err
    assert "wal.segment_cut_short" in log
    assert "wal.segment_missing" in log
    pages.stop()
    second.write_bytes(second_bytes)
    _wal(pages)[1].write_bytes(first_bytes)
