"""The public API: its names are pinned, importing it loads nothing, and docs, examples and benchmarks use only it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import quire
from bench import snapshots, wire
from quire.cli.main import GARBAGE_ALLOCATIONS
from quire.core import errors
from quire.core.limits import CHUNK_BYTES, GIB, SLOTS_PER_LEAF
from tests.rules.tree import ROOT, SRC, Import, Source, imports, parse, sources

# A name here is a promise to users: removing one is a breaking change and belongs in the changelog.
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
    """The modules that a statement loads in a bare interpreter, except those that every module may load."""
    command = [sys.executable, "-I", "-S", "-c", IMPORTED_BY, str(SRC), statement]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    loaded: list[str] = json.loads(result.stdout)
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


# ── users of the API ──────────────────────────────────────────────────────────────────────────────────────────────────
PROGRAM = re.compile(r"^```(?:python)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def public() -> set[str]:
    """Every public name, dotted, and the packages themselves."""
    inside = {f"{package}.{name}" for package, names in PACKAGES.items() for name in names}
    return {"quire", *PACKAGES, *inside, *(f"quire.{name}" for name in quire.__all__)}


def private_imports(path: str, text: str) -> Iterator[str]:
    for imported in imports(parse(path, text)):
        if imported.is_in("quire") and imported.name not in public():
            yield f"{path}:{imported.line}: {imported.name}"


def private_lines(page: Path) -> Iterator[str]:
    """Private imports in the code blocks of a page; blocks without a language may be incomplete, so lines are
    matched."""
    for block in PROGRAM.findall(page.read_text("utf-8")):
        for line in re.findall(r"^\s*((?:from quire\S* import|import quire).*)$", block, re.MULTILINE):
            yield from private_imports(page.name, line)


def test_docs_and_examples_import_public_names_only() -> None:
    """Pages about bytes (docs/formats) are exempt: they show the modules that own the bytes."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]
    assert not [problem for page in pages for problem in private_lines(page)]
    assert not [problem for source in sources("examples") for problem in private_imports(source.path, source.text)]
    assert [*private_imports("a.py", "from quire.store.store import Store")] == ["a.py:1: quire.store.store.Store"]


# docs/decisions/079-benchmarks-of-components.md: a benchmark of one component against the library below it imports the
# component. All others use public names, so that they measure what users have, and can be read as examples.
BENCHMARKS = {
    "bench/archive_restore.py": {"quire.archive"},
    "bench/checkpoint.py": {"quire.jobs", "quire.manifest", "quire.pages"},
    "bench/feed.py": {"quire.manifest"},
    "bench/kv_tables.py": {"quire.durable", "quire.lsm"},
    "bench/manifest.py": {"quire.manifest"},
    "bench/many_opening.py": {"quire.manifest"},
    "bench/pages.py": {"quire.core", "quire.durable", "quire.manifest", "quire.pages"},
    "bench/row_changes.py": {"quire.pages", "quire.spark", "quire.sqlite"},
    "bench/snapshots.py": {"quire.manifest"},
    "bench/spark_changes.py": {"quire.manifest"},
    "bench/spark_jobs.py": {"quire.jobs"},
    "bench/sqlite_fork.py": {"quire.manifest"},
    "bench/stream.py": {"quire.core", "quire.durable", "quire.stream"},
}
"""The private packages that a benchmark may import; of a package with public names, its private modules. Remove an entry that
is not needed any more."""


IN_STRING = re.compile(r"\bfrom (quire[\w.]*) import (\w+)|\bimport (quire[\w.]*)")


def imports_of_benchmark(source: Source) -> Iterator[Import]:
    """Yield the imports of a benchmark, and those of programs in its strings, which run in other processes."""
    yield from imports(source)
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for package, name, module in IN_STRING.findall(node.value):
                yield Import(module or f"{package}.{name}", node.lineno)


def private_packages(source: Source) -> dict[str, str]:
    """Return the private packages that a benchmark imports, each with the place of an import."""
    private = (used for used in imports_of_benchmark(source) if used.is_in("quire") and used.name not in public())
    return {".".join(used.name.split(".")[:2]): f"{source.path}:{used.line}: {used.name}" for used in private}


def test_benchmarks_import_private_packages_only_where_they_measure_them() -> None:
    problems = [
        f"{place} is private; use a public name, or state in BENCHMARKS and in decision 079 why it is measured"
        for source in sources("bench")
        for package, place in private_packages(source).items()
        if package not in BENCHMARKS.get(source.path, set())
    ]
    assert not problems


def test_every_private_package_that_a_benchmark_may_import_is_imported() -> None:
    used = {source.path: private_packages(source).keys() for source in sources("bench")}
    assert not {path: unused for path, packages in BENCHMARKS.items() if (unused := packages - used.get(path, set()))}


def test_benchmarks_with_public_names_take_nothing_from_one_that_imports_private_packages() -> None:
    """Otherwise a helper of such a benchmark would be a way around the table."""
    private = {path.removesuffix(".py").replace("/", ".") for path in BENCHMARKS}
    problems = [
        f"{source.path}:{used.line}: {used.name}"
        for source in sources("bench")
        if source.path not in BENCHMARKS
        for used in imports(source)
        if any(used.is_in(module) for module in private)
    ]
    assert not problems


def test_private_imports_are_found_in_strings_too() -> None:
    program = 'RUN = "import sys; from quire.store.store import Store; import quire.cli.main"'
    assert private_packages(parse("bench/a.py", program)).keys() == {"quire.store", "quire.cli"}
    assert not private_packages(parse("bench/a.py", "import quire\nfrom quire.sqlite import dbapi"))


def test_benchmarks_take_a_public_name_where_there_is_one() -> None:
    """Readers of a benchmark should learn the public API from it."""
    public_names = {value: name for name in public() if (value := defined_as(name))}
    problems = [
        f"{source.path}:{used.line}: {used.name} is public as {public_names[used.name]}"
        for source in sources("bench")
        for used in imports_of_benchmark(source)
        if used.name in public_names and used.name not in public()
    ]
    assert not problems


def test_numbers_that_benchmarks_repeat_are_those_of_the_code() -> None:
    """They are copies, because a number is not a reason to import a private module."""
    assert snapshots.CHUNKS * CHUNK_BYTES == 1024 * GIB
    assert snapshots.SLOTS_PER_LEAF == SLOTS_PER_LEAF
    assert wire.GARBAGE_ALLOCATIONS == GARBAGE_ALLOCATIONS


def defined_as(name: str) -> str:
    """`quire.store.store.Store` for `quire.Store`; empty for anything but classes and functions."""
    package, _, last = name.rpartition(".")
    value = getattr(import_module(package), last, None) if package else None
    module = getattr(value, "__module__", "")
    return f"{module}.{last}" if isinstance(module, str) and module.startswith("quire.") else ""
