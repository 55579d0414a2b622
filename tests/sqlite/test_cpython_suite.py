"""CPython's own tests of `sqlite3`, run on `quire.sqlite.dbapi` with databases of a store (`cpython_suite.py`).

They are part of Python. Where a distribution leaves them out (Debian: `libpython3-testsuite`; Docker's python images),
set
QUIRE_CPYTHON_LIB to the `Lib` directory of CPython's sources of the same version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.rules.tree import ROOT

VARIABLE = "QUIRE_CPYTHON_LIB"

CANNOT_HOLD = {
    "test_backup.BackupTests.test_modifying_progress": "a database in memory begins its backup again when it is written to; "
    "one on disk, and ours, takes the new page into it (with a file, sqlite3 fails this test, too)",
    "test_dbapi.ModuleTests.test_shared_cache_deprecated": "enable_shared_cache was removed from Python 3.12",
    "test_dbapi.MultiprocessTests.test_ctx_mgr_rollback_if_commit_failed": "two processes write to one file; "
    "one process owns a store",
    "test_factory.TextFactoryTests.test_optimized_unicode": "OptimizedUnicode was removed from Python 3.12",
    "test_regression.RegressionTests.test_bind_mutating_list": "parameters are copied before adapters run, so "
    "changing the list meanwhile is no error",
}
"""The reason of each expected failure."""

MODULES = {
    "dbapi": ["test_dbapi"],
    "rest": [
        "test_backup",
        "test_dump",
        "test_factory",
        "test_hooks",
        "test_regression",
        "test_transactions",
        "test_types",
        "test_userfunctions",
    ],
}


def library() -> Path:
    """The directory of this Python's package `test`; skips if it is missing."""
    for home in (os.environ.get(VARIABLE, ""), sysconfig.get_path("stdlib")):
        if home and (Path(home) / "test" / "test_sqlite3" / "test_dbapi.py").is_file():
            return Path(home)
    pytest.skip(f"this Python has no package test.test_sqlite3; set {VARIABLE} to the Lib of CPython's sources")


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the counts and exceptions are those of Python 3.11's tests"
)
@pytest.mark.parametrize("group", MODULES)
def test_cpythons_tests_of_sqlite3_pass(group: str) -> None:
    path = os.pathsep.join([str(ROOT), str(library())])
    result = subprocess.run(
        [sys.executable, "-m", "tests.sqlite.cpython_suite", *MODULES[group]],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    outcomes: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    failed = {name: text for name, text in outcomes.items() if text != "passed" and not text.startswith("skipped")}
    expected = {name for name in CANNOT_HOLD if name.partition(".")[0] in MODULES[group]} & set(outcomes)
    assert set(failed) == expected, "\n".join(failed[name] for name in sorted(set(failed) - expected))
    passed = sum(text == "passed" for text in outcomes.values())
    assert passed >= (181 if group == "dbapi" else 244), f"{passed} of {len(outcomes)} passed"
