"""Descriptors of a store: only databases in use have some, however many databases there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_program

WRITE_MANY = """
import os, resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
import quire

kind, count = sys.argv[2], int(sys.argv[3])

def write(store, number, value):
    name = f"{kind}{number}"
    if kind == "pages":
        db = store.sqlite(name, create=True)
        db.execute("create table if not exists t(x)")
        db.execute("insert into t values (?)", (value,))
        db.close()
    elif kind == "stream":
        stream = store.stream(name, create=True)
        stream.append(str(value).encode())
        stream.sync()
    else:
        store.kv(name, create=True).put(str(value).encode(), b"x")

def holds(store, number):
    name = f"{kind}{number}"
    if kind == "pages":
        db = store.sqlite(name)
        found = [str(x).encode() for x, in db.execute("select x from t").fetchall()]
        db.close()
        return found
    if kind == "stream":
        return [record.payload for record in store.stream(name).read()]
    return [key for key, _ in store.kv(name).scan()]

def descriptors():
    found = []
    for each in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink("/proc/self/fd/" + each))
        except FileNotFoundError:
            pass
    return [path for path in found if any(part in path for part in ("/pages/", "/streams/", "/lsm/"))]

with quire.open(sys.argv[1]) as store:
    for number in range(count):
        write(store, number, 1)
    for number in range(0, count, 9):
        write(store, number, 2)
    for number in range(0, count, 7):
        wanted = [b"1", b"2"] if number % 9 == 0 else [b"1"]
        assert holds(store, number) == wanted, (number, holds(store, number))
    deadline = time.monotonic() + 60
    while (left := descriptors()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, left
    write(store, 0, 3)  # what was closed goes on
    assert holds(store, 0) == [b"1", b"2", b"3"]
print("done")
"""


@pytest.mark.parametrize("kind", ["pages", "stream", "lsm"])
def test_more_databases_than_descriptors_can_be_written_and_idle_ones_hold_none(tmp_path: Path, kind: str) -> None:
    """With a limit of 1,024 descriptors, database 1,012 failed although all connections had been closed."""
    command = ["-c", WRITE_MANY, str(tmp_path / "s"), kind, "130"]
    done = run_program(command, capture_output=True)
    assert done.stdout.strip() == "done", done.stderr[-3000:]


WRITE_IN_TURN = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
import quire
from quire.durable.files import OsFile

synced = []
sync = OsFile.sync
OsFile.sync = lambda file: (synced.append(file.path), sync(file))

settings = quire.StoreSettings(maintenance=quire.MaintenanceSettings(enabled=False))
with quire.open(sys.argv[1], settings=settings) as store:
    sets = [store.kv(f"set{number}", create=True) for number in range(300)]
    synced.clear()
    for number in range(3):
        for kv in sets:
            kv.put(b"key", b"%d" % number, sync=False)
    assert not synced, (len(synced), synced[:3])
print("done")
"""


def test_hundreds_of_sets_written_in_turn_do_not_sync_each_others_logs(tmp_path: Path) -> None:
    """With 256 open files, each put without a sync had to sync the log of another set, in order to close it."""
    done = run_program(["-c", WRITE_IN_TURN, str(tmp_path / "s")], capture_output=True)
    assert done.stdout.strip() == "done", done.stderr[-3000:]
