"""The manifest on disk: durable before visible, recovered after every crash, damage reported."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import (
    Corruption,
    FormatTooNew,
    InternalError,
    QuireError,
    SnapshotChecksumMismatch,
    StoreClosed,
)
from quire.durable.files import OsDisk, read_all
from quire.durable.log_format import NAMED_HEADER_BYTES
from quire.durable.log_writer import LogWriter
from quire.durable.names import LsmHome
from quire.lsm.manifest import Manifest
from quire.lsm.manifest_data import (
    ErrorKind,
    ManifestData,
    kind_of,
)
from quire.lsm.manifest_format import LOG_FIRST
from tests.lsm.manifests import entry, fill, home_in, read_back


# ── what is kept ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_operation_survives_reopening(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    with Manifest.open(OsDisk(), home) as manifest:
        fill(manifest)
        manifest.add_frozen_wal(7)
        manifest.remove_frozen_wal(7)
        manifest.remove_sst(2)
        manifest.update_lsn(50)
        known = manifest.state()
        assert known.dirty
    assert known == ManifestData(11, 50, 2, [1], {3: entry(3)}, 4)
    assert read_back(home) == known


def test_a_flush_adds_its_table_and_releases_its_wal(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    with Manifest.open(OsDisk(), home) as manifest:
        manifest.add_frozen_wal(1)
        manifest.add_frozen_wal(2)
        manifest.flushed(entry(manifest.allocate_sst_id()), 1)
        manifest.flushed(None, 2)
    assert read_back(home) == ManifestData(version=5, tables={1: entry(1)}, next_sst_id=2)


def test_the_file_layout_is_that_of_the_design_document(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    with Manifest.open(OsDisk(), home) as manifest:
        manifest.checkpoint()
    assert sorted(os.listdir(home.path + "/manifest")) == ["000000.log", "MANIFEST-000001"]


def test_a_checkpoint_clears_the_dirty_flag_and_the_log(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    with Manifest.open(OsDisk(), home) as manifest:
        fill(manifest)
        assert manifest.log_bytes > 0
        manifest.checkpoint()
        assert manifest.log_bytes == 0
        known = manifest.state()
        assert not known.dirty
        assert OsDisk().size(home.manifest_log) == NAMED_HEADER_BYTES
    assert read_back(home) == known
    with Manifest.open(OsDisk(), home) as manifest:
        manifest.update_lsn(99)
        assert manifest.state().dirty
    assert read_back(home).last_lsn == 99


def test_start_up_after_a_checkpoint_does_not_depend_on_history(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    with Manifest.open(OsDisk(), home) as manifest:
        for number in range(500):
            manifest.update_lsn(number)
        manifest.checkpoint()
    assert OsDisk().size(home.manifest_log) < 100  # the header and the clean-close marker
    assert OsDisk().size(home.manifest_snapshot) < 100


def test_ids_are_unique_across_crashes(tmp_path: Path) -> None:
    """The process dies after each allocation, with or without a checkpoint before."""
    home, given_out = home_in(tmp_path), list[int]()
    for round_ in range(6):
        manifest = Manifest.open(OsDisk(), home)
        given_out += [manifest.allocate_sst_id(), *manifest.allocate_sst_ids(2)]
        if round_ % 2:
            manifest.checkpoint()
        manifest.abandon()
    assert given_out == list(range(1, 19))


def test_threads_can_use_a_manifest_concurrently(tmp_path: Path) -> None:
    home, allocated = home_in(tmp_path), list[int]()
    with Manifest.open(OsDisk(), home) as manifest:

        def work(number: int) -> None:
            for _ in range(20):
                allocated.append(manifest.allocate_sst_id())
                manifest.add_sst(entry(allocated[-1])) if number % 2 else manifest.update_lsn(number)
            manifest.checkpoint()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        known = manifest.state()
    assert sorted(allocated) == list(range(1, 81))
    assert len(known.tables) == 40
    assert read_back(home) == known


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "operation",
    [
        lambda m: m.add_sst(entry(9)),
        lambda m: m.add_sst(entry(2)),
        lambda m: m.compaction([entry(9)], []),
        lambda m: m.compaction([], [1]),
        lambda m: m.flushed(entry(9), 1),
        lambda m: m.set_version(0),
    ],
)
def test_an_operation_that_breaks_an_invariant_is_refused_before_it_is_logged(
    tmp_path: Path, operation: Callable[[Manifest], None]
) -> None:
    home = home_in(tmp_path)
    with Manifest.open(OsDisk(), home) as manifest:
        fill(manifest)
        before = manifest.state()
        with pytest.raises(InternalError) as caught:
            operation(manifest)
        assert kind_of(caught.value) is ErrorKind.INTERNAL
        assert manifest.state() == before
    assert read_back(home) == before


def test_a_closed_manifest_refuses_operations(tmp_path: Path) -> None:
    manifest = Manifest.open(OsDisk(), home_in(tmp_path))
    manifest.close()
    manifest.close()
    with pytest.raises(StoreClosed):
        manifest.update_lsn(1)


# ── damage ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def filled_manifest(tmp_path: Path, *, checkpoint: bool) -> tuple[LsmHome, ManifestData]:
    home = home_in(tmp_path)
    with Manifest.open(OsDisk(), home) as manifest:
        fill(manifest)
        if checkpoint:
            manifest.checkpoint()
            manifest.update_lsn(77)
        return home, manifest.state()


def overwrite(path: str, data: bytes) -> None:
    Path(path).write_bytes(data)


def test_a_corrupt_snapshot_is_an_error_and_never_ignored(tmp_path: Path) -> None:
    home, _ = filled_manifest(tmp_path, checkpoint=True)
    good = read_all(OsDisk(), home.manifest_snapshot)
    overwrite(home.manifest_snapshot, good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(SnapshotChecksumMismatch) as caught:
        Manifest.open(OsDisk(), home)
    assert kind_of(caught.value) is ErrorKind.SNAPSHOT_CHECKSUM_MISMATCH
    assert caught.value.where["path"] == home.manifest_snapshot


def test_a_missing_snapshot_is_detected(tmp_path: Path) -> None:
    home, _ = filled_manifest(tmp_path, checkpoint=True)
    os.remove(home.manifest_snapshot)
    with pytest.raises(Corruption, match="snapshot is missing"):
        Manifest.open(OsDisk(), home)


def test_a_missing_log_is_detected(tmp_path: Path) -> None:
    home, _ = filled_manifest(tmp_path, checkpoint=True)
    os.remove(home.manifest_log)
    with pytest.raises(Corruption, match="log is missing") as caught:
        Manifest.open(OsDisk(), home)
    assert kind_of(caught.value) is ErrorKind.WAL


def test_an_old_log_beside_a_newer_snapshot_is_detected(tmp_path: Path) -> None:
    home, _ = filled_manifest(tmp_path, checkpoint=True)
    LogWriter.create(OsDisk(), home.manifest_log, kind=LOG_FIRST, replace=True).close()
    with pytest.raises(Corruption, match="older than its snapshot"):
        Manifest.open(OsDisk(), home)


def test_an_unknown_tag_in_the_log_is_an_encoding_error_with_its_offset(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    Manifest.open(OsDisk(), home).close()
    with LogWriter.open(OsDisk(), home.manifest_log, kind=LOG_FIRST)[0] as log:
        offset = log.end
        log.append(b"\x63 from the future")
    with pytest.raises(FormatTooNew) as caught:
        Manifest.open(OsDisk(), home)
    assert kind_of(caught.value) is ErrorKind.ENCODING
    assert (caught.value.where["tag"], caught.value.where["offset"]) == (0x63, offset)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_log_cut_at_every_byte_gives_a_prefix_of_history_or_an_error(tmp_path: Path, checkpoint: bool) -> None:
    """Only states that existed, possibly with just their version applied: a cut in the header is corruption, one after
    it a torn tail.
    """
    home = home_in(tmp_path)
    states = list[ManifestData]()
    with Manifest.open(OsDisk(), home) as manifest:
        if checkpoint:
            manifest.checkpoint()
        for lsn in range(4):
            for change in (partial(manifest.update_lsn, lsn * 10), manifest.allocate_sst_id):
                before = manifest.state()
                states += [before, replace(before, version=before.version + 1)]
                change()
                assert manifest.version == before.version + 1
            states.append(manifest.state())
        manifest.abandon()
    log = read_all(OsDisk(), home.manifest_log)
    versions = list[int]()
    for size in range(len(log)):
        overwrite(home.manifest_log, log[:size])
        if size < NAMED_HEADER_BYTES:
            with pytest.raises(Corruption) as caught:
                Manifest.open(OsDisk(), home)
            assert kind_of(caught.value) is ErrorKind.WAL
        else:
            state = read_back(home)
            assert state in states
            versions.append(states.index(state))
    assert versions == sorted(versions)


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_in_the_log_never_gives_a_state_that_did_not_exist(position: int, bit: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        home = home_in(directory)
        states = list[ManifestData]()
        with Manifest.open(OsDisk(), home) as manifest:
            states.append(manifest.state())
            for lsn in range(1, 6):
                states.append(replace(states[-1], version=lsn))
                manifest.update_lsn(lsn)
                states.append(manifest.state())
        log = bytearray(read_all(OsDisk(), home.manifest_log))
        log[position % len(log)] ^= 1 << bit
        overwrite(home.manifest_log, bytes(log))
        try:
            assert read_back(home) in states
        except QuireError as error:
            assert kind_of(error) is ErrorKind.WAL  # noqa: PT017 - either outcome is fine
