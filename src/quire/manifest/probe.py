"""Probe whether the manifest's file can be read, in a child process, because reading a damaged file may kill it.

LMDB trusts its pages. Where bytes were overwritten it usually returns an error, but some headers send it beyond the end
of the map (SIGBUS, SIGSEGV) or into an assertion (SIGABRT), which no Python code can handle. So a process that must
survive, such as `quire doctor`, lets another process read everything first.

The child is started afresh, not forked: LMDB does not survive fork() (M12). It reads as every reader does, with its own
slot, and touches each byte of each row of each table; `check` decides whether the rows are valid. A reader cannot reach
LMDB's list of free pages.

Costs some hundred milliseconds and one pass over the file: too much for every open. Threads: any.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from typing import Any

import lmdb

_CHILD = "from quire.manifest.probe import main; main()"
_TABLES_MAX = 1024
_SOUND = "sound"


def probe(path: str) -> str | None:
    """Return in one sentence what keeps the manifest at `path` from being read; `None` if every row can be read."""
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    lines, complaint = child.stdout.splitlines(), child.stderr.strip().rpartition("\n")[2]
    place = lines[-1] if lines else "opening the file"
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return f"reading the manifest kills the process with {name} ({place})" + (f": {complaint}" if complaint else "")
    if child.returncode > 0:
        return f"the manifest cannot be read ({place}): {complaint}"
    return None if place == _SOUND else place


def main() -> None:
    """Run the child: print its position, line by line, and the result last."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an expected result: write no core file
    try:
        _walk(sys.argv[1])
    except (lmdb.Error, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def _walk(path: str) -> None:
    with (
        lmdb.open(path, subdir=False, readonly=True, create=False, max_dbs=_TABLES_MAX) as env,
        env.begin() as txn,
    ):
        _write_line("the list of tables")
        for name in [bytes(name) for name in txn.cursor().iternext(keys=True, values=False)]:
            _write_line(f"table {name.decode(errors='replace')}")
            table = env.open_db(name, txn=txn, create=False)
            _walk_table(txn.cursor(db=table), int(txn.stat(db=table)["entries"]))
    _write_line(_SOUND)


def _walk_table(cursor: Any, rows: int) -> None:
    last = b""
    for key, _ in cursor:
        if key <= last:  # LMDB has no empty keys
            sys.exit("its keys are out of order")
        last, rows = key, rows - 1
        if rows < 0:
            sys.exit("it has more rows than its count")
    if rows:
        sys.exit("it has fewer rows than its count")


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
