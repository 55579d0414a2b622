"""Runs the clients' own public test suites against a server, and counts what they show.

    git clone https://github.com/tursodatabase/libsql-client-py      (and libsql-client-ts, libsql-python, turso)
    python -m tests.service.sql.client_suites libsql-client-py libsql-client-ts libsql-python turso

Each suite runs unmodified but for the URL, once with the server and once with nothing at its address; a test counts if it
fails without the server. `libsql-client-py` needs `pytest-asyncio` 0.20 and pytest 7 (`--python`: another interpreter with
them), `libsql-client-ts` needs `npm ci`, and `npm run build` in `packages/libsql-core`, before. Nothing of the suites is part
of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.rules.tree import ROOT
from tests.service.sql.hrana_client import owner

UNUSED_URL = "http://127.0.0.1:9"
Verdicts = dict[str, bool]
"""Test → whether it passed. Skipped tests are not included."""
Suite = Callable[[str, Path, str, str], Verdicts]
"""Arguments: the interpreter, the clone, the server's URL, its admin token."""


def pytest_suite(python: str, root: Path, tests: str, environment: dict[str, str], *options: str) -> Verdicts:
    report = root / "quire-report.xml"
    command = [python, "-m", "pytest", "-q", tests, "-p", "no:cacheprovider", f"--junitxml={report}", *options]
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{ROOT}", **environment}
    subprocess.run(command, cwd=root, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    verdicts: Verdicts = {}
    for case in ET.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        if "skipped" not in tags:
            verdicts[f"{case.get('classname')}::{case.get('name')}"] = not tags & {"failure", "error"}
    report.unlink()
    return verdicts


def libsql_client_py(python: str, root: Path, url: str, _: str) -> Verdicts:
    environment = {"HTTP_URL": url, "WS_URL": url.replace("http", "ws", 1)}
    return pytest_suite(python, root, "tests", environment)


def libsql_python(python: str, root: Path, url: str, token: str) -> Verdicts:
    """The tests of `libsql`, without the `sqlite3` tests that it uses for comparison."""
    plugin = ("-p", "tests.service.sql.libsql_python_plugin", "-k", "not sqlite")
    return pytest_suite(python, root, "tests", {"QUIRE_URL": url, "QUIRE_TOKEN": token}, *plugin)


def turso(python: str, root: Path, url: str, _: str) -> Verdicts:
    return pytest_suite(python, root / "serverless" / "python", "tests", {"TURSO_DATABASE_URL": url})


def libsql_client_ts(scheme: str, version: str) -> Suite:
    def run(_: str, root: Path, url: str, __: str) -> Verdicts:
        directory, report = root / "packages" / "libsql-client", root / "quire-report.json"
        command = ["npx", "jest", "--runInBand", "--json", f"--outputFile={report}"]
        env = {**os.environ, "URL": url.replace("http", scheme, 1), "SERVER": version}
        subprocess.run(
            command, cwd=directory, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
        )
        results = json.loads(report.read_text("utf-8"))["testResults"]
        report.unlink()
        cases = [case for suite in results for case in suite["assertionResults"]]
        return {
            case["fullName"]: case["status"] == "passed" for case in cases if case["status"] in ("passed", "failed")
        }

    return run


SUITES: dict[str, list[tuple[str, Suite]]] = {
    "libsql-client-py": [("", libsql_client_py)],
    "libsql-python": [("", libsql_python)],
    "turso": [("serverless", turso)],
    "libsql-client-ts": [
        (f"{scheme} {version}", libsql_client_ts(scheme, version))
        for scheme in ("http", "ws")
        for version in ("test_v2", "test_v3")
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", nargs="+", type=Path, help="directories named as their repositories")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the Python suites")
    options = parser.parse_args()
    for clone in options.clones:
        for variant, suite in SUITES[clone.name]:
            with tempfile.TemporaryDirectory() as store, owner(Path(store) / "store") as hrana:
                token = (Path(store) / "store" / "admin.token").read_text("utf-8").strip()
                up = suite(options.python, clone.resolve(), hrana.address, token)
            down = suite(options.python, clone.resolve(), UNUSED_URL, "")
            needing = [name for name in up if not down.get(name, False)]  # some tests are skipped without a server
            passed = sum(up.get(name, False) for name in needing)
            sys.stdout.write(
                f"{clone.name} {variant}: {sum(up.values())} passed; "
                f"of {len(needing)} that need a server {passed} passed\n"
            )
            for name in sorted(name for name, good in up.items() if not good):
                sys.stdout.write(f"  failed: {name}\n")


if __name__ == "__main__":
    main()
