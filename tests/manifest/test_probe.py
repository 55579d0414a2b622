"""The probe: a file that kills whoever reads it is found out by somebody else's death."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.manifest import tables as t
from quire.manifest.probe import probe
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import chunk, python, register

PAGE = 4096
LEAF = 2
HEADER = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
assert HEADER.size == 16


@pytest.fixture
def filled(path: str) -> str:
    with ManifestStore.open(path) as manifest:
        manifest.submit([register(1)]).result()
        for start in range(0, 3000, 500):
            manifest.submit([chunk(start + n) for n in range(500)]).result()
    return path


def full_leaves(data: bytearray) -> Iterator[int]:
    """Offsets of the leaf pages with many rows, in one table or another; but for the one that lists the tables."""
    for offset in range(2 * PAGE, len(data), PAGE):
        number, _, flags, lower, _ = HEADER.unpack_from(data, offset)
        is_full = number * PAGE == offset and flags == LEAF and lower > HEADER.size + 40
        if is_full and b"chunk_catalog" not in data[offset : offset + PAGE]:
            yield offset


def break_flags(data: bytearray) -> None:
    """A page in the middle of a table, which is neither branch nor leaf: LMDB's assertion."""
    key = t.CHUNK_CATALOG.key.pack(1, 1500, 1)
    for offset in full_leaves(data):
        if key in data[offset : offset + PAGE]:
            struct.pack_into("<H", data, offset + 10, 0x2EC0)


def break_rows(data: bytearray) -> None:
    """Rows that lie at the end of a page and claim to be larger than it."""
    for offset in full_leaves(data):
        struct.pack_into("<HH", data, offset + 16, PAGE - 8, PAGE - 8)
        data[offset + PAGE - 8 : offset + PAGE] = b"\xff" * 8


def swap_rows(data: bytearray) -> None:
    """Two rows in the wrong order: LMDB does not mind, and would not find them."""
    for offset in full_leaves(data):
        first, second = struct.unpack_from("<HH", data, offset + 16)
        struct.pack_into("<HH", data, offset + 16, second, first)


def damage(path: str, change: Callable[[bytearray], None]) -> None:
    data = bytearray(Path(path).read_bytes())
    change(data)
    Path(path).write_bytes(data)


def test_a_sound_manifest_has_nothing_to_be_said_against(filled: str) -> None:
    assert probe(filled) is None


def test_it_may_be_asked_beside_the_owner_and_its_readers(filled: str) -> None:
    with ManifestStore.open(filled) as manifest, manifest.read():
        assert probe(filled) is None
        manifest.submit([chunk(9999)]).result()
        assert probe(filled) is None


VICTIM = """
import sys
from quire.manifest import tables as t
from quire.manifest.store import ManifestStore
with ManifestStore.open(sys.argv[1], mode="r") as manifest, manifest.read() as txn:
    print(len(list(txn.raw_scan(t.CHUNK_CATALOG))))
"""


def test_bytes_that_kill_the_reader_are_reported_by_one_that_lives(filled: str) -> None:
    """Hazard: the check at start-up, and `manifest check`, died of SIGABRT instead of saying what is wrong."""
    damage(filled, break_flags)
    victim = python(VICTIM, filled)
    victim.communicate(timeout=60)
    assert victim.returncode < 0, "these bytes kill"
    found = probe(filled)
    assert found is not None
    assert "kills the process with SIGABRT" in found
    assert "table " in found
    assert "\n" not in found


def test_a_file_that_ends_too_early_is_reported(filled: str) -> None:
    os.truncate(filled, os.path.getsize(filled) // 2)
    found = probe(filled)
    assert found is not None
    assert "manifest" in found


@pytest.mark.parametrize(("change", "words"), [(break_rows, "table"), (swap_rows, "order")])
def test_damage_that_lmdb_survives_is_reported_too(
    filled: str, change: Callable[[bytearray], None], words: str
) -> None:
    damage(filled, change)
    found = probe(filled)
    assert found is not None
    assert words in found


def test_what_is_no_manifest_at_all_is_reported(path: str) -> None:
    found = probe(path)
    assert found is not None
    assert "No such file" in found
    Path(path).write_bytes(b"x" * 10_000)
    found = probe(path)
    assert found is not None
    assert "Invalid" in found


def test_the_probing_process_imports_next_to_nothing(filled: str) -> None:
    code = "import sys; import quire.manifest.probe; print(*sorted(m for m in sys.modules if m.startswith('quire')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "quire", "quire.core", "quire.core.lazy", "quire.manifest", "quire.manifest.probe",
    ]  # fmt: skip
