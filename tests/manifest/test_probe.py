"""The probe: a file whose damage kills the reading process is detected by a separate process that dies instead."""

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
    """Offsets of the leaf pages with many rows, of any table; except the page that lists the tables."""
    for offset in range(2 * PAGE, len(data), PAGE):
        number, _, flags, lower, _ = HEADER.unpack_from(data, offset)
        is_full = number * PAGE == offset and flags == LEAF and lower > HEADER.size + 40
        if is_full and b"chunk_catalog" not in data[offset : offset + PAGE]:
            yield offset


def break_flags(data: bytearray) -> None:
    """Makes a page in the middle of a table neither branch nor leaf, which fails an assertion of LMDB."""
    key = t.CHUNK_CATALOG.key.pack(1, 1500, 1)
    for offset in full_leaves(data):
        if key in data[offset : offset + PAGE]:
            struct.pack_into("<H", data, offset + 10, 0x2EC0)


def break_rows(data: bytearray) -> None:
    """Makes rows at the end of a page claim to be larger than the page."""
    for offset in full_leaves(data):
        struct.pack_into("<HH", data, offset + 16, PAGE - 8, PAGE - 8)
        data[offset + PAGE - 8 : offset + PAGE] = b"\xff" * 8


def swap_rows(data: bytearray) -> None:
    """Puts two rows into the wrong order: LMDB reads them without an error, but lookups would miss them."""
    for offset in full_leaves(data):
        first, second = struct.unpack_from("<HH", data, offset + 16)
        struct.pack_into("<HH", data, offset + 16, second, first)


def damage(path: str, change: Callable[[bytearray], None]) -> None:
    data = bytearray(Path(path).read_bytes())
    change(data)
    Path(path).write_bytes(data)


def test_an_intact_manifest_has_no_problems(filled: str) -> None:
    assert probe(filled) is None


def test_the_probe_can_run_beside_the_owner_and_its_readers(filled: str) -> None:
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


def test_damage_that_kills_the_reading_process_is_reported(filled: str) -> None:
    """Hazard: the check at start-up, and `manifest check`, died of SIGABRT instead of reporting the damage."""
    damage(filled, break_flags)
    victim = python(VICTIM, filled)
    victim.communicate(timeout=60)
    assert victim.returncode < 0, "the damage must kill a reader"
    report = probe(filled)
    assert report is not None
    assert "kills the process with SIGABRT" in report
    assert "table " in report
    assert "\n" not in report


def test_a_file_that_ends_too_early_is_reported(filled: str) -> None:
    os.truncate(filled, os.path.getsize(filled) // 2)
    report = probe(filled)
    assert report is not None
    assert "manifest" in report


@pytest.mark.parametrize(("change", "expected"), [(break_rows, "table"), (swap_rows, "order")])
def test_damage_that_lmdb_survives_is_reported_too(
    filled: str, change: Callable[[bytearray], None], expected: str
) -> None:
    damage(filled, change)
    report = probe(filled)
    assert report is not None
    assert expected in report


def test_a_file_that_is_not_a_manifest_is_reported(path: str) -> None:
    report = probe(path)
    assert report is not None
    assert "No such file" in report
    Path(path).write_bytes(b"x" * 10_000)
    report = probe(path)
    assert report is not None
    assert "Invalid" in report


def test_the_probing_process_imports_next_to_nothing(filled: str) -> None:
    code = "import sys; import quire.manifest.probe; print(*sorted(m for m in sys.modules if m.startswith('quire')))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [
        "quire", "quire.core", "quire.core.lazy", "quire.manifest", "quire.manifest.probe",
    ]  # fmt: skip
