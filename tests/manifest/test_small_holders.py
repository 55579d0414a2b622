"""What is held is counted in two ways, by numpy where it is much and without where it is little: they find the same."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import QuireError
from quire.manifest import check as checks
from quire.manifest import small_holders
from quire.manifest.holders import count_holders
from quire.manifest.reads import ReadTxn
from quire.manifest.small_holders import are_few, count_few
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import checkpoint, does, register
from tests.manifest.test_check import FATAL, MENDABLE, Damage, Vandal, furnish

UNCOUNTABLE = (QuireError, ValueError, struct.error)
"""What `check` turns into a K1."""


def found(count: Any, txn: ReadTxn) -> list[str] | str:
    try:
        return sorted(map(str, count(txn)))
    except UNCOUNTABLE:
        return "cannot be counted"


@pytest.mark.parametrize("damage", [None, *MENDABLE, *FATAL])
def test_both_ways_find_the_same(tmp_path: Path, damage: str | None) -> None:
    path = str(tmp_path / "manifest.lmdb")
    furnish(path)
    if damage is not None:
        deed: Damage = {**MENDABLE, **FATAL}[damage][1]
        vandal = Vandal(path)
        deed(vandal)
        vandal.done()
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        assert are_few(txn)
        assert found(count_few, txn) == found(count_holders, txn)


def test_both_ways_count_every_kind_of_reference(tmp_path: Path) -> None:
    """An empty answer proves little: without its counts, every artifact of a store is a finding."""
    path = str(tmp_path / "manifest.lmdb")
    furnish(path)
    vandal = Vandal(path)
    vandal.txn.drop(vandal.env.handles["gc_refcounts"], delete=False)
    vandal.done()
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        few = found(count_few, txn)
        assert few == found(count_holders, txn)
    assert {kind for kind in ("BASE", "DELTA", "WAL", "LEAF") if f"ArtifactKind.{kind}" in str(few)} == {
        "BASE",
        "DELTA",
        "WAL",
        "LEAF",
    }


def test_many_are_left_to_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ManifestStore.open(str(tmp_path / "manifest.lmdb")) as manifest:
        does(manifest, register(1, "a"))
        checkpoint(manifest, 1, 0)
        monkeypatch.setattr(small_holders, "count_few", None)  # it would be called
        monkeypatch.setattr(small_holders, "FEW", 1)
        assert manifest.check() == []
        monkeypatch.setattr(small_holders, "FEW", 10_000)
        with manifest.read() as txn, pytest.raises(TypeError):
            list(checks.check(txn))


def test_owning_a_small_manifest_loads_no_numpy(tmp_path: Path) -> None:
    path = str(tmp_path / "manifest.lmdb")
    furnish(path)
    program = (
        "import sys; from quire.manifest.store import ManifestStore; ManifestStore.open(sys.argv[1]).close(); "
        "print([each for each in ('numpy', 'pyarrow', 'asyncio') if each in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=60)
    assert (ended.stdout.strip(), ended.stderr) == ("[]", "")
