"""Shared by the tests of the manifest: a home, strategies for events, and reading a manifest back."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from quire.durable.files import Disk, OsDisk
from quire.durable.names import LsmHome, sst_entry_path
from quire.lsm.manifest import Manifest
from quire.lsm.manifest_data import (
    AddFrozenWal,
    AddSst,
    AllocateSstId,
    Compaction,
    ManifestData,
    ManifestSstEntry,
    RemoveFrozenWal,
    RemoveSst,
    SetActiveWal,
    UpdateLsn,
    Version,
)

NUMBERS = st.one_of(st.integers(0, 6), st.integers(0, 2**64 - 1))
SMALL = st.integers(0, 6)
ENTRIES = st.builds(ManifestSstEntry, SMALL, st.sampled_from(["sst/000001.sst", "sst/000002.sst", "größe"]))
EVENTS = st.one_of(
    st.builds(Version, NUMBERS),
    st.builds(SetActiveWal, SMALL),
    st.builds(AddFrozenWal, SMALL),
    st.builds(RemoveFrozenWal, SMALL),
    st.builds(AddSst, ENTRIES),
    st.builds(RemoveSst, SMALL),
    st.builds(UpdateLsn, NUMBERS),
    st.builds(AllocateSstId, NUMBERS),
    st.builds(
        Compaction,
        st.lists(ENTRIES, max_size=3).map(tuple),
        st.lists(SMALL, max_size=3).map(tuple),
    ),
)


def home_in(path: Path | str) -> LsmHome:
    return LsmHome(f"{path}/lsm/00000001")


def entry(number: int) -> ManifestSstEntry:
    return ManifestSstEntry(number, sst_entry_path(number))


def read_back(home: LsmHome, disk: Disk | None = None) -> ManifestData:
    """The state that an open finds."""
    with Manifest.open(disk or OsDisk(), home) as manifest:
        return manifest.state()


def fill(manifest: Manifest) -> None:
    """Apply one operation of each kind."""
    manifest.set_version(1)
    manifest.set_active_wal(1)
    ids = manifest.allocate_sst_ids(3)
    manifest.add_sst(entry(ids[0]))
    manifest.add_sst(entry(ids[1]))
    manifest.rotate_wal(1, 2, 40)
    manifest.compaction([entry(ids[2])], [ids[0]])
