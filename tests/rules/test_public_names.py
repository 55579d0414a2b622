"""The public surface: which names it has, that importing it costs nothing, and that docs, examples and benchmarks use it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import quire
from quire.core import errors
from tests.rules.tree import ROOT, SRC, imports, parse, sources

# A name here is a promise to users: taking one away is a breaking change and belongs in the changelog.
FUNCTIONS_AND_CLASSES = [
    "Archive",
    "ArchiveSettings",
    "ArchiveStatus",
    "BackedUp",
    "Cloned",
    "DbKind",
    "DrillRecord",
    "FeedSettings",
    "FollowSettings",
    "JobKind",
    "JobState",
    "Kv",
    "LsmSettings",
    "MaintenanceSettings",
    "ManifestLogSettings",
    "ManifestSettings",
    "MirrorRun",
    "MirrorStatus",
    "ObjectSettings",
    "PagesSettings",
    "Promoted",
    "Replica",
    "Restored",
    "Retention",
    "RetentionRecord",
    "ServiceSettings",
    "SnapshotView",
    "Standby",
    "StandbyStatus",
    "Store",
    "StoreSettings",
    "Stream",
    "StreamSettings",
    "__version__",
    "clone",
    "connect",
    "iterate",
    "open",
    "open_archive",
    "promote",
    "restore",
]
PACKAGES = {
    "quire.integrations": ["aio"],
    "quire.lsm": ["BulkWriter", "Load", "begin_load", "published"],
    "quire.objects": [
        "ExistingObject",
        "ObjectInfo",
        "ObjectStore",
        "PutResult",
        "Range",
        "StoreOptions",
        "list_objects",
        "open_store",
    ],
    "quire.spark": [
        "RegisteredDatabase",
        "SparkRunner",
        "attach",
        "bulk_load",
        "options_of",
        "read_stores",
        "register",
        "run_stores",
        "save",
        "session",
    ],
    "quire.sqlite": ["Exported", "Follower", "Imported", "dbapi", "export_file", "import_file", "open_reader"],
    "quire.testing": [
        "CrashDisk",
        "Fault",
        "FaultyDisk",
        "FaultyStore",
        "ManualClock",
        "ObjectFault",
        "ObjectFaults",
        "PowerCut",
        "assert_clean",
        "assert_replays",
        "each_fault",
        "simulate",
    ],
}
ERRORS = [
    "QuireError",
    "InvalidInput",
    "OutOfRange",
    "InvalidName",
    "InvalidConfig",
    "WrongKind",
    "WrongThread",
    "ReadOnly",
    "NotArchived",
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
    "ArchiveAhead",
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
    "EpochLost",
    "UnknownReader",
    "WouldDropEverything",
    "Unauthenticated",
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
    assert getattr(quire, name) == getattr(quire, name)
    assert name in dir(quire)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = quire.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("package", PACKAGES)
def test_names_of_a_package_are_pinned_and_resolve(package: str) -> None:
    module = import_module(package)
    assert sorted(module.__all__) == PACKAGES[package]
    for name in module.__all__:
        assert getattr(module, name).__doc__, f"{package}.{name} needs a docstring: it is on the page docs/api.md"
        assert name in dir(module)


@pytest.mark.parametrize("package", ["quire", *PACKAGES])
def test_importing_a_package_loads_none_of_its_modules(package: str) -> None:
    loaded = imported_by(f"import {package}")
    assert set(loaded) == {"quire", package, "quire.core", "quire.core.lazy"}


def test_an_error_loads_only_the_errors() -> None:
    loaded = imported_by("import quire; quire.StoreLocked")
    assert loaded == ["quire", "quire.core", "quire.core.errors", "quire.core.lazy"]


# ── who uses it ───────────────────────────────────────────────────────────────────────────────────────────────────────
PROGRAM = re.compile(r"^```(?:python)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def public() -> set[str]:
    """Every public name, dotted, and the packages themselves."""
    inside = {f"{package}.{name}" for package, names in PACKAGES.items() for name in names}
    return {"quire", *PACKAGES, *inside, *(f"quire.{name}" for name in quire.__all__)}


def private_imports(path: str, text: str) -> Iterator[str]:
    for each in imports(parse(path, text)):
        if each.is_in("quire") and each.name not in public():
            yield f"{path}:{each.line}: {each.name}"


def private_lines(page: Path) -> Iterator[str]:
    """Private imports in the blocks of a page; those without a language may be half programs, so lines are matched."""
    for block in PROGRAM.findall(page.read_text("utf-8")):
        for line in re.findall(r"^\s*((?:from quire\S* import|import quire).*)$", block, re.MULTILINE):
            yield from private_imports(page.name, line)


def test_docs_and_examples_import_public_names_only() -> None:
    """Pages about bytes (docs/formats) are exempt: they show the modules that own the bytes."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]
    assert not [problem for page in pages for problem in private_lines(page)]
    assert not [problem for source in sources("examples") for problem in private_imports(source.path, source.text)]
    assert [*private_imports("a.py", "from quire.store.store import Store")] == ["a.py:1: quire.store.store.Store"]


def test_benchmarks_take_a_public_name_where_there_is_one() -> None:
    """They measure private modules, too; but who reads a benchmark to learn an API should learn the public one."""
    homes = {value: name for name in public() if (value := defined_as(name))}
    problems = [
        f"{source.path}:{each.line}: {each.name} is public as {homes[each.name]}"
        for source in sources("bench")
        for each in imports(source)
        if each.name in homes and each.name not in public()
    ]
    assert not problems


def defined_as(name: str) -> str:
    """`quire.store.store.Store` for `quire.Store`; empty for what is no class or function."""
    package, _, last = name.rpartition(".")
    value = getattr(import_module(package), last, None) if package else None
    module = getattr(value, "__module__", "")
    return f"{module}.{last}" if isinstance(module, str) and module.startswith("quire.") else ""
