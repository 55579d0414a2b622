"""Modules that run on an executor can be imported without `lmdb`: the machines of a cluster have no manifest."""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from tests.rules.tree import SRC, Source, imports, modules

EXECUTOR_SAFE = [
    "quire.core.*",
    "quire.durable.checksums",
    "quire.durable.log*",
    "quire.durable.names",
    "quire.durable.object_names",
    "quire.jobs.*.run",
    "quire.jobs.copies",
    "quire.jobs.locations",
    "quire.jobs.runner",
    "quire.lsm.backup",
    "quire.lsm.bloom",
    "quire.lsm.compaction",
    "quire.lsm.view",
    "quire.lsm.bulk",
    "quire.lsm.manifest",
    "quire.lsm.manifest_*",
    "quire.lsm.memtable",
    "quire.lsm.merge",
    "quire.lsm.remote_compaction",
    "quire.lsm.sst_*",
    "quire.lsm.snapshots",
    "quire.lsm.table_options",
    "quire.lsm.wal",
    "quire.objects.*",
    "quire.pages.cache",
    "quire.pages.chunk*",
    "quire.pages.framemap",
    "quire.pages.sources",
    "quire.pages.page_source",
    "quire.pages.readers",
    "quire.pages.segment*",
    "quire.pages.snapshot",
    "quire.pages.view",
    "quire.pages.view_changes",
    "quire.spark.executor",
    "quire.service.channel",
    "quire.service.tickets",
    "quire.service.tokens",
    "quire.service.wire",
    "quire.spark.access",
    "quire.spark.sources.*",
    "quire.sqlite.arrow_rows",
    "quire.sqlite.leaf_columns",
    "quire.sqlite.read_ahead",
    "quire.sqlite.tables",
    "quire.sqlite.where_clause",
    "quire.sqlite.files",
    "quire.sqlite.pragmas",
    "quire.sqlite.vfs",
    "quire.stream.mlog*",
    "quire.stream.segment",
    "quire.stream.segments",
    "quire.stream.remote_read",
    "quire.stream.sources",
    "quire.stream.warm",
]

# One process for all: a failed import is not cached, and imports have no cycle (test_imports.py), so that their order does not
# matter.
WITHOUT_LMDB = """
import importlib, json, sys

class NoLmdb:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lmdb":
            raise ModuleNotFoundError("lmdb is not on this machine", name=name)

sys.meta_path.insert(0, NoLmdb())
sys.path[:0] = json.loads(sys.argv[1])
verdict = {}
for name in json.loads(sys.argv[2]):
    try:
        importlib.import_module(name)
        verdict[name] = ""
    except ImportError as error:
        verdict[name] = str(error)
print(json.dumps(verdict))
"""


def failing_without_lmdb(names: list[str], *paths: Path) -> dict[str, str]:
    """The modules of `names` that cannot be imported without lmdb, with their error messages."""
    arguments = [json.dumps([str(path) for path in (SRC, *paths)]), json.dumps(names)]
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_LMDB, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    verdict: dict[str, str] = json.loads(result.stdout)
    return {name: error for name, error in verdict.items() if error}


def needs_lmdb(source: Source) -> bool:
    """Whether importing the module imports lmdb; imports in functions or under TYPE_CHECKING do not count here."""
    at_once = {node.lineno for node in source.tree.body}
    return any(imported.is_in("lmdb") and imported.line in at_once for imported in imports(source))


def test_declared_modules_import_without_lmdb() -> None:
    names = [source.module for source in modules()]
    missing = [pattern for pattern in EXECUTOR_SAFE if not any(fnmatchcase(name, pattern) for name in names)]
    assert not missing, f"no module matches {missing}: was it renamed?"
    safe = [name for name in names if any(fnmatchcase(name, pattern) for pattern in EXECUTOR_SAFE)]
    assert not failing_without_lmdb(safe)


def test_the_check_can_fail(tmp_path: Path) -> None:
    (tmp_path / "straight.py").write_text("import lmdb")
    (tmp_path / "around.py").write_text("import straight")
    (tmp_path / "innocent.py").write_text("import json")
    assert failing_without_lmdb(["straight", "around", "innocent"], tmp_path).keys() == {"straight", "around"}


def test_modules_that_need_lmdb_are_detected() -> None:
    users = [source.module for source in modules() if needs_lmdb(source)]
    assert users, "no module imports lmdb: does the test still find imports?"
    assert failing_without_lmdb(users).keys() == set(users)
