"""Small files and objects of an archive that hold other bytes than were written are damaged, whatever the bytes are."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.archive import clones, standbys, state_files, status
from quire.archive.recorder import REMOTE_FILES
from quire.core.errors import Corruption
from quire.durable import names
from quire.durable.files import OsDisk
from quire.durable.object_names import clone_key, standby_key
from quire.objects.open import open_store

STORE_ID = "1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19"
OTHER_ID = "2e1d1d2f-8e5f-4d6f-8a61-1e7e2d4c3b2a"

DAMAGED = pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'{"host": "\xff", "store_id": "\xff", "path": "\xff"}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["structure", "not-utf8", "nested"],
)


@DAMAGED
def test_a_damaged_registration_of_a_clone_is_corruption(tmp_path: Path, body: bytes) -> None:
    store = open_store(str(tmp_path))
    store.put(clone_key(STORE_ID, OTHER_ID), body)
    with pytest.raises(Corruption, match="registration of a clone is damaged"):
        clones.registrations(store, STORE_ID)


@DAMAGED
def test_a_damaged_registration_of_a_standby_is_left_out(tmp_path: Path, body: bytes) -> None:
    store = open_store(str(tmp_path))
    store.put(standby_key(STORE_ID, OTHER_ID), body)
    assert standbys.registrations(store, STORE_ID) == []


@DAMAGED
def test_damaged_state_files_are_corruption_or_absent(tmp_path: Path, body: bytes) -> None:
    disk, root = OsDisk(), str(tmp_path)
    for name in (names.STANDBY, names.ORIGIN, REMOTE_FILES, status.DRILL):
        (tmp_path / name).write_bytes(body)
    with pytest.raises(Corruption, match=r"standby\.json is damaged"):
        state_files.read_standby_state(disk, root)
    with pytest.raises(Corruption, match=r"remote_files\.json is damaged"):
        state_files.read_remote_files(disk, root)
    assert state_files.read_origin(disk, root) is None
    assert status.read_drill(disk, root) is None
