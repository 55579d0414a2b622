"""The public door: which names it has, and that opening it costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import quire
from quire.core import errors
from tests.house.tree import SRC

# A name here is a promise to users: taking one away is a breaking change and belongs in the changelog.
FUNCTIONS_AND_CLASSES = ["Store", "__version__", "connect", "open"]
ERRORS = [
    "QuireError",
    "InvalidInput",
    "OutOfRange",
    "InvalidName",
    "InvalidConfig",
    "WrongKind",
    "WrongThread",
    "ReadOnly",
    "NotFound",
    "StoreNotFound",
    "UnknownDatabase",
    "UnknownArtifact",
    "UnknownNamespace",
    "UnknownSnapshot",
    "UnknownJob",
    "UnknownCursor",
    "ObjectNotFound",
    "Conflict",
    "NameTaken",
    "AlreadyExists",
    "DatabaseTombstoned",
    "ArtifactGone",
    "StillReferenced",
    "RefcountUnderflow",
    "IllegalTransition",
    "JobAlreadyPending",
    "StalePlan",
    "LeaseExpired",
    "QuotaExceeded",
    "SnapshotGone",
    "UnknownReader",
    "WouldDropEverything",
    "Unavailable",
    "StoreLocked",
    "TimedOut",
    "Overloaded",
    "ObjectStoreUnavailable",
    "SparkUnavailable",
    "TooManyOpenFiles",
    "TooManyReaders",
    "StorageFault",
    "DiskFull",
    "NotWritable",
    "AccessDenied",
    "Corruption",
    "CursorLost",
    "ManifestDamaged",
    "ManifestIntegrityError",
    "ChecksumMismatch",
    "SnapshotChecksumMismatch",
    "Incompatible",
    "ForeignObject",
    "FormatTooNew",
    "ConfigMismatch",
    "StoreUnusable",
    "StoreClosed",
    "StoreFenced",
    "InternalError",
]

IMPORTED_BY = """
import __future__, importlib, json, sys, typing
sys.path.insert(0, sys.argv[1])
before = set(sys.modules)
exec(sys.argv[2])
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def imported_by(statement: str) -> list[str]:
    """The modules that a statement loads in a bare interpreter, beyond what every module may have."""
    command = [sys.executable, "-I", "-S", "-c", IMPORTED_BY, str(SRC), statement]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    loaded: list[str] = json.loads(ended.stdout)
    return loaded


def test_public_names_are_pinned() -> None:
    assert sorted(quire.__all__) == sorted(FUNCTIONS_AND_CLASSES + ERRORS)


def test_every_error_is_public() -> None:
    defined = [name for name, value in vars(errors).items() if isinstance(value, type) and not name.startswith("_")]
    assert sorted(set(defined) - {"Any"}) == sorted(ERRORS)


@pytest.mark.parametrize("name", FUNCTIONS_AND_CLASSES + ERRORS)
def test_public_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(quire, name) is getattr(quire, name)
    assert name in dir(quire)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = quire.nothing  # type: ignore[attr-defined]


def test_importing_quire_loads_only_the_door() -> None:
    assert imported_by("import quire") == ["quire"]


def test_an_error_loads_only_the_errors() -> None:
    assert imported_by("import quire; quire.StoreLocked") == ["quire", "quire.core", "quire.core.errors"]
