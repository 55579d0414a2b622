"""The fixtures of the pytest plugin, used by a small project in a separate pytest run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROJECT = """
import pytest
from quire.sqlite import dbapi

@pytest.fixture(scope="session")
def quire_template(quire_store):
    connection = dbapi.connect(f"{quire_store.path}/shop")
    connection.execute("create table t(a)")
    connection.execute("insert into t values ('template')")
    connection.commit()
    connection.close()
    return "shop"

@pytest.mark.parametrize("number", range(6))
def test_each_begins_with_the_template(quire_branch, number):
    connection = quire_branch.connect()
    assert connection.execute("select a from t").fetchall() == [("template",)]
    connection.execute("insert into t values (?)", (number,))
    connection.commit()
    connection.close()

def test_nothing_is_left(quire_store, quire_template):
    assert [info.name for info in quire_store.databases()] == ["shop"]

def test_a_url(quire_branch):
    assert quire_branch.url.startswith("quire:////")
"""


def test_branches_belong_to_one_test_also_under_xdist(tmp_path: Path) -> None:
    (tmp_path / "test_project.py").write_text(PROJECT)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "."]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert "8 passed" in result.stdout, result.stdout + result.stderr


def test_a_project_without_these_fixtures_imports_nothing_of_quire(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\ndef test_it():\n    assert not {'quire.store', 'apsw', 'lmdb'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert "1 passed" in result.stdout, result.stdout + result.stderr
