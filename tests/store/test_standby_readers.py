"""Processes that read a standby while it exchanges its files see one state of the owner, from the first row to the
last."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import quire
from quire.archive import state_files
from quire.archive.log_reader import find
from quire.core.errors import Unavailable
from quire.durable.failpoints import armed
from quire.durable.files import Disk, OsDisk
from quire.store import reader_files
from tests.archive.archived_store import archived_store, fill
from tests.programs import Program
from tests.store.test_standby import follow, polled

READS = """
import sys, threading, quire

path, last = sys.argv[1], int(sys.argv[2])
done, failed = threading.Event(), []

def tail():
    for expected, record in enumerate(stream.tail(1, timeout=120), 1):
        assert (record.id, record.payload) == (expected, b"%d" % expected)
        if expected == last:
            return
    raise AssertionError("the tail ended")

def check_never_decreases(number):
    previous = 0
    while not done.is_set():
        now = number()
        assert now >= previous, f"{number.__name__}: {now} after {previous}"
        previous = now

def read():
    records = [(record.id, record.payload) for record in stream.read()]
    assert records == [(number, b"%d" % number) for number in range(1, len(records) + 1)]
    if records:
        list(stream.read(len(records)))  # it existed a moment ago
    return len(records)

def count():
    pairs = int(kv.get(b"count"))
    assert len(list(kv.scan())) > pairs
    return pairs

def rows():
    with store.sqlite("shop") as db:
        number, highest = db.execute("select count(*), max(n) from item").fetchone()
    assert number == highest
    return number

def guarded(work, *arguments):
    try:
        work(*arguments)
    except BaseException as error:
        failed.append(f"{type(error).__name__}: {error}")
        done.set()

with quire.open(path, "r") as store:
    stream, kv = store.stream("events"), store.kv("pairs")
    print("ready", flush=True)
    threads = [threading.Thread(target=guarded, args=(check_never_decreases, number)) for number in (read, count, rows)]
    tailing = threading.Thread(target=guarded, args=(tail,), daemon=True)
    for thread in (tailing, *threads):
        thread.start()
    while tailing.is_alive() and not done.is_set():
        tailing.join(0.1)
    done.set()
    for thread in threads:
        thread.join()
    print(*failed, flush=True)
"""


def test_readers_of_a_standby_that_restarts_from_a_base_see_one_state(tmp_path: Path) -> None:
    last = 800
    with archived_store(tmp_path) as archived:
        store = archived.store
        stream, kv = store.stream("events", create=True), store.kv("pairs", create=True)
        with store.sqlite("shop", create=True) as db:
            db.execute("create table item(n integer primary key)")

        def more(start: int) -> None:
            with store.sqlite("shop") as db:
                db.execute("insert into item select coalesce(max(n), 0) + 1 from item")
            kv.put(b"%06d" % start, b"")
            kv.put(b"count", b"%d" % (start // 20))
            stream.append([b"%d" % number for number in range(start, start + 20)]).result()
            if start % 60 == 1:
                stream.seal()
                stream.compress()
                kv.flush()
                store.checkpoint("shop")
            if start % 240 == 1:
                stream.upload()
                stream.evict(warm=True)
                kv.compact()
            archived.wait_archived()

        more(1)
        with follow(archived) as standby:
            standby.poll()
            reader = Program(["-c", READS, standby.path, str(last)], stdout=subprocess.PIPE)
            assert reader.stdout is not None
            with reader, reader.stdout as answers:
                assert answers.readline() == "ready\n"
                for start in range(21, last, 20):
                    more(start)
                    if start % 40 == 1:
                        point = find(store.objects, store.feed.store_id())
                        assert point.position >= standby.status.position, (point.position, standby.status.position)
                        standby._rebuild(point)
                    standby.poll()
                assert (answers.read(), reader.wait()) == ("\n", 0)
            assert standby.status.rebuilds >= 20


READS_SLOWLY = """
import sys, quire

with quire.open(sys.argv[1], "r") as store:
    while line := sys.stdin.readline():
        with store.sqlite("shop") as db:
            round, = db.execute("select round from now").fetchone()
            print(round, flush=True)
            sys.stdin.readline()  # meanwhile the standby goes on
            rows = db.execute("select count(*), min(round), max(round) from item").fetchone()
            print(*rows, flush=True)
"""


@pytest.mark.parametrize("begins_again", [False, True])
def test_a_long_read_of_a_standby_keeps_files_that_the_owner_has_removed(tmp_path: Path, begins_again: bool) -> None:
    """A checkpoint beyond the version being read ended the read, and a reused segment replaced its files."""
    with archived_store(tmp_path) as archived:
        store = archived.store

        def change(number: int) -> None:
            with store.sqlite("shop", create=True) as db:
                db.execute("create table if not exists now(round)")
                db.execute("create table if not exists item(n integer primary key, round, filler)")
                db.execute("delete from now")
                db.execute("insert into now values (?)", (number,))
                db.execute("delete from item")
                db.executemany("insert into item values (?, ?, zeroblob(900))", [(n, number) for n in range(400)])
            store.pages.open("shop").wal.publish()  # the first version of a read is in the WAL
            archived.wait_archived()

        change(0)
        with follow(archived) as standby:
            standby.poll()
            kept_files = Path(standby.path, ".kept")
            reader = Program(
                ["-c", READS_SLOWLY, standby.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1
            )
            assert reader.stdin is not None
            assert reader.stdout is not None
            with reader, reader.stdin as requests, reader.stdout as answers:
                for round_number in range(5):
                    requests.write("begin\n")
                    assert answers.readline() == f"{round_number * 10}\n"
                    for number in range(round_number * 10 + 1, round_number * 10 + 11):
                        change(number)
                        store.checkpoint("shop")
                        store.worker.drain()
                        if number % 10 == 0:
                            change(number)
                        standby.poll()
                    assert any(kept_files.iterdir())
                    if begins_again:
                        point = find(store.objects, store.feed.store_id())
                        assert point.position >= standby.status.position, (point.position, standby.status.position)
                        standby._rebuild(point)
                        standby.poll()
                    requests.write("read\n")
                    assert answers.readline() == f"400 {round_number * 10} {round_number * 10}\n"
            change(99)
            standby.poll()
            assert not any(kept_files.iterdir())


def test_a_swap_between_two_looks_at_the_directories_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The phase was read from standby.json and the identity from the directories: a swap between the two went unnoticed, and
    files of the new state were read with rows of the old one (issue 21)."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        with follow(archived) as standby:
            standby.poll()
            files = reader_files.ReaderFiles(OsDisk(), standby.path, lambda: archived.store.objects)
            read_state = state_files.read_standby_state

            def read_and_swap(disk: Disk, root: str) -> object:
                state = read_state(disk, root)
                monkeypatch.setattr(reader_files, "read_standby_state", read_state)
                standby._rebuild(find(archived.store.objects, archived.store.feed.store_id()))
                return state

            monkeypatch.setattr(reader_files, "read_standby_state", read_and_swap)
            before = files.directories_id()
            assert files.directories_id() != before


def test_a_standby_that_died_while_exchanging_its_files_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_files, "EXCHANGE_SECONDS", 0.1)
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        polled(archived)
        fill(archived.store, 20)
        archived.wait_archived()
        with (
            follow(archived) as standby,
            armed("standby.part_swapped", "1*raise:EIO"),
            pytest.raises(OSError, match="failpoint"),
        ):
            standby._rebuild(find(archived.store.objects, archived.store.feed.store_id()))
        with quire.open(tmp_path / "standby", "r") as store, pytest.raises(Unavailable, match="replacing its files"):
            list(store.stream("events").read())
        polled(archived)
        with quire.open(tmp_path / "standby", "r") as store:
            assert len(list(store.stream("events").read())) == len(list(archived.store.stream("events").read()))
