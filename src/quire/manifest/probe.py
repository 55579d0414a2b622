"""Is the manifest's file fit to be read? Asked of a child process, because the answer may be its death.

LMDB believes what its pages say of themselves. Where bytes were overwritten it mostly returns an error, but some headers send
it beyond the end of the map (SIGBUS, SIGSEGV) or into an assertion (SIGABRT), and no Python code gets to handle that. So a
process that wants to live, `quire doctor` say, lets another one read everything first.

The child is started anew, not forked: LMDB does not survive fork() (M12). It reads as every reader does, with a slot of its
own, and touches each byte of each row of each table; whether the rows make sense is the business of `check`. LMDB's list of
free pages is out of a reader's reach.

Costs some hundred milliseconds and one pass over the file: not for every open. Any thread.
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
    """What keeps the manifest at `path` from being read, in one sentence; `None` if every row can be."""
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
    """The child: says where it is, line by line, and last what it found."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its death is an answer, nobody will look into it
    try:
        _walk(sys.argv[1])
    except (lmdb.Error, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def _walk(path: str) -> None:
    with (
        lmdb.open(path, subdir=False, readonly=True, create=False, max_dbs=_TABLES_MAX) as env,
        env.begin() as txn,
    ):
        _say("the list of tables")
        for name in [bytes(name) for name in txn.cursor().iternext(keys=True, values=False)]:
            _say(f"table {name.decode(errors='replace')}")
            table = env.open_db(name, txn=txn, create=False)
            _walk_table(txn.cursor(db=table), int(txn.stat(db=table)["entries"]))
    _say(_SOUND)


def _walk_table(cursor: Any, rows: int) -> None:
    last = b""
    for key, _ in cursor:
        if key <= last:  # LMDB has no empty keys
            sys.exit("its keys are out of order")
        last, rows = key, rows - 1
        if rows < 0:
            sys.exit("it has more rows than it says")
    if rows:
        sys.exit("it has fewer rows than it says")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
