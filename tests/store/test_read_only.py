"""Streams and key-value sets of a store opened for reading: beside a live owner in another process, on a standby, in a
restored directory. They equal the owner's state, whatever the owner does meanwhile."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli.main import run
from quire.core.errors import CursorLost, OutOfRange, ReadOnly, StoreClosed, UnknownCursor
from quire.store.standby import Standby
from tests.archive.archived_store import archived_store, contents, fill
from tests.programs import Program, run_program

OWNER = """
import sys, quire
from tests.archive.archived_store import settings
from quire.core.settings import ArchiveSettings
from msgspec.structs import replace
given = replace(settings(sys.argv[1] + ".bucket"), archive=ArchiveSettings())
with quire.open(sys.argv[1], settings=given) as store:
    kv, stream = store.kv("pairs", create=True), store.stream("events", create=True)
    print("ready", flush=True)
    for line in sys.stdin:
        exec(line)
        print("done", flush=True)
"""

BUSY_OWNER = """
import sys, quire
from tests.archive.archived_store import settings
from quire.core.settings import ArchiveSettings
from msgspec.structs import replace
given = replace(settings(sys.argv[1] + ".bucket"), archive=ArchiveSettings())
with quire.open(sys.argv[1], settings=given) as store:
    kv, stream = store.kv("pairs", create=True), store.stream("events", create=True)
    number = begun = int(kv.get(b"first") or b"0")
    if stream.end_record < 2 * number:  # killed between the two
        stream.append([b"%d" % number, b"%d again" % number]).result()
    while True:
        number += 1
        kv.write({b"first": b"%d" % number, b"%05d" % (number % 97): b"x" * 300, b"last": b"%d" % number})
        stream.append([b"%d" % number, b"%d again" % number]).result()
        if number % 20 == 0:
            stream.seal()
            stream.compress()
        if number % 40 == 0:
            stream.upload()
            stream.evict(warm=True)
        if number % 60 == 0:
            kv.compact()
        if number == begun + 3:
            print("ready", flush=True)
"""


class OwnerProcess:
    """A process that owns the store and executes commands."""

    def __init__(self, path: Path, script: str = OWNER) -> None:
        self._process = Program(
            ["-c", script, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        self._answer("ready")

    def _answer(self, expected: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == expected

    def do(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self._answer("done")

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            self.close()

    def close(self) -> None:
        self._process.communicate(timeout=60)


@contextmanager
def owned(path: Path) -> Iterator[tuple[OwnerProcess, quire.Store]]:
    """An owner in another process, and the store beside it."""
    owner = OwnerProcess(path)
    try:
        with quire.open(path, "r") as store:
            yield owner, store
    finally:
        owner.close()


def test_a_key_value_set_beside_its_owner_equals_the_owners(tmp_path: Path) -> None:
    with owned(tmp_path / "store") as (owner, store):
        kv = store.kv("pairs")
        assert (kv.get(b"a"), list(kv.scan()), kv.last_lsn) == (None, [], 0)
        owner.do("kv.write({b'a': b'1', b'b': b'2'})")
        assert (kv.get(b"a"), kv.last_lsn) == (b"1", 1)
        with kv.snapshot() as before, kv.iterator() as cursor:
            owner.do("kv.put(b'a', b'3')")
            assert kv.get(b"a") == b"3"
            owner.do("kv.flush()")
            assert (kv.get(b"a"), kv.stats().tables) == (b"3", 1)
            owner.do("kv.delete(b'b'); kv.put(b'c', b'x' * 50000); kv.compact()")
            assert [key for key, _ in kv.scan()] == [b"a", b"c"]
            assert list(kv.scan(prefix=b"a", reverse=True)) == [(b"a", b"3")]
            # The owner's compactions do not know about readers: the reader itself holds the files that it reads.
            assert (before.get(b"a"), list(before.scan()), list(cursor)) == (b"1", *[[(b"a", b"1"), (b"b", b"2")]] * 2)
        owner.do("store.snapshot('pairs', 'monday'); kv.put(b'a', b'4')")
        with store.kvs.open_snapshot("pairs", "monday") as monday:
            assert (monday.get(b"a"), kv.get(b"a")) == (b"3", b"4")
        for change in (lambda: kv.put(b"a", b"5"), kv.flush, kv.compact, kv.sync, lambda: store.kv("new", create=True)):
            with pytest.raises(ReadOnly, match=r"reading|read-only"):
                change()
    with pytest.raises(StoreClosed):
        kv.get(b"a")


def test_a_stream_beside_its_owner_equals_the_owners(tmp_path: Path) -> None:
    with owned(tmp_path / "store") as (owner, store):
        stream = store.stream("events")
        assert (stream.first_record, stream.end_record, list(stream.read())) == (1, 1, [])
        owner.do("stream.append([b'a', b'b']).result()")
        assert [(record.id, record.payload) for record in stream.read()] == [(1, b"a"), (2, b"b")]
        follower = stream.tail(1)
        assert [next(follower).id, next(follower).id] == [1, 2]
        moves = [
            "seal()",
            "compress()",
            "upload()",
            "evict()",
            "evict(warm=True)",
            "register('etl', 2)",
            "ack('etl', 3)",
        ]
        for number, move in enumerate(moves, 3):
            owner.do(f"stream.{move}; stream.append(b'{number}').result()")
            assert next(follower).payload == b"%d" % number
            assert [record.id for record in stream.read()] == list(range(1, number + 1))
        assert sum(batch.num_rows for batch in stream.read_batches(2, 7)) == 5
        assert stream.seek(next(stream.read(5)).timestamp_ms) <= 5
        assert (stream.seek(1 << 50), stream.position("etl"), stream.info().lag("etl")) == (10, 3, 7)
        assert (stream.info().records, stream.wait(9, 1.0), stream.wait(10, 0)) == (9, True, False)
        with pytest.raises(UnknownCursor):
            stream.position("nobody")
        with pytest.raises(OutOfRange, match="the next one is 10"):
            list(stream.read(11))
        changes = (lambda: stream.append(b"x"), stream.seal, stream.sync, stream.upload, lambda: stream.ack("etl", 4))
        for change in (*changes, lambda: stream.register("new"), stream.tick, lambda: store.streams.repair("events")):
            with pytest.raises(ReadOnly, match="opened for reading"):
                change()
        owner.do(
            "from quire.stream.state import Retention; stream.retain(Retention(bytes=1)); stream.drop_consumer('etl')"
        )
        owner.do("stream.seal(); stream.retire(); stream.append(b'new').result()")
        assert [record.payload for record in stream.read()] == [b"new"]
        with pytest.raises(CursorLost, match="no longer retained"):
            list(stream.read(2))


def test_readers_beside_a_busy_owner_see_complete_batches_without_gaps_also_when_it_is_killed(tmp_path: Path) -> None:
    """Tables are flushed, merged and removed, segments compressed, uploaded and evicted all the time."""
    path, last_seen, read = tmp_path / "store", 0, 0
    for _ in range(2):
        owner = OwnerProcess(path, BUSY_OWNER)
        with ExitStack() as ending:
            ending.callback(owner.kill)
            store = ending.enter_context(quire.open(path, "r"))
            kv, stream = store.kv("pairs"), store.stream("events")
            tail = stream.tail(read + 1, timeout=60)
            reached, is_killed = last_seen + 100, False
            while last_seen < reached:
                pairs = dict(kv.scan())
                assert pairs[b"first"] == pairs[b"last"]
                assert int(pairs[b"first"]) >= last_seen
                last_seen = int(pairs[b"first"])
                assert {key for key in pairs if key.isdigit()} == {
                    b"%05d" % (number % 97) for number in range(1, last_seen + 1)
                }
                assert int(kv.get(b"last") or 0) >= last_seen
                with kv.snapshot() as held:
                    assert held.get(b"first") == held.get(b"last")
                while read < 2 * (last_seen - 1):  # a batch is written before its records
                    record = next(tail)
                    number = (record.id + 1) // 2
                    assert record.payload == (b"%d" % number if record.id % 2 else b"%d again" % number)
                    read = record.id
                if not is_killed and last_seen > reached - 50:
                    owner.kill()
                    is_killed, reached = True, last_seen
            assert int(kv.get(b"first") or 0) >= last_seen
            assert stream.end_record > read
            assert all(record.id == record_id for record_id, record in enumerate(stream.read(), 1))
    with quire.open(path) as store:
        assert store.manifest.check() == []


READER = """
import json, sys, quire
with quire.open(sys.argv[1], "r") as store:
    kv, stream = store.kv("pairs"), store.stream("events")
    records = [[record.id, record.payload.decode()] for record in stream.read()]
    with store.kvs.open_snapshot("pairs", "one") as frozen:
        kept = len(list(frozen.scan()))
    print(json.dumps([records, [[key.decode(), value.hex()] for key, value in kv.scan()], kept, kv.get(b"000003").hex()]))
"""


def read_elsewhere(path: Path) -> Any:
    """In a separate process: the one that runs a standby cannot read it."""
    answer = run_program(["-c", READER, str(path)], capture_output=True, timeout=120)
    assert not answer.returncode, answer.stderr
    return json.loads(answer.stdout)


def test_streams_and_key_value_sets_of_a_standby_and_of_a_restored_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.store.snapshot("pairs", "one")
        stream, kv = archived.store.stream("events"), archived.store.kv("pairs")
        with Standby(str(archived.bucket), tmp_path / "standby") as standby:
            for start in range(20, 80, 20):
                archived.wait_archived()
                standby.poll()
                records, pairs, snapshot_pairs, value = read_elsewhere(tmp_path / "standby")
                assert records == [[record.id, record.payload.decode()] for record in stream.read()]
                assert pairs == [[key.decode(), value.hex()] for key, value in kv.scan()]
                assert (snapshot_pairs, bytes.fromhex(value)) == (20, kv.get(b"000003"))
                fill(archived.store, start)
                stream.seal()
                stream.compress()
                if start % 40 == 0:
                    stream.upload()
                    stream.evict(warm=True)
                    kv.compact()
        archived.wait_archived()
        expected = contents(archived.store)
        restored = archived.restore()
    with quire.open(restored, "r") as store:
        assert contents(store) == expected
        with pytest.raises(ReadOnly, match="quire takeover"):
            store.kv("pairs").put(b"a", b"b")
        with pytest.raises(ReadOnly, match="quire takeover"):
            store.stream("events").append(b"a")
    with quire.open_archive(str(tmp_path / "bucket")) as store:
        assert contents(store) == expected
    for path in (tmp_path / "standby", restored):
        store_option = ["--store", str(path), "--json"]
        for command in (["kv", "get", "pairs", "000003"], ["kv", "scan", "pairs", "-n", "2"], ["kv", "stats", "pairs"]):
            assert run([*command, *store_option]) == 0, capsys.readouterr().err
        for command in (["stream", "read", "events", "-n", "2"], ["stream", "tail", "events", "-n", "2"]):
            assert run([*command, *store_option]) == 0, capsys.readouterr().err
            assert '"payload"' in capsys.readouterr().out
        assert run(["stream", "info", "events", *store_option]) == 0
        assert run(["kv", "put", "pairs", "a", "b", *store_option]) != 0


def test_the_command_line_reads_beside_an_owner_that_does_not_listen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as ending:
        owner = OwnerProcess(tmp_path / "store")
        ending.callback(owner.close)
        owner.do("kv.put(b'a', b'value of a'); stream.append([b'one', b'two', b'three']).result()")
        for command in (["kv", "get", "pairs", "a"], ["kv", "scan", "pairs"]):
            assert run([*command, "--store", str(tmp_path / "store")]) == 0
            assert "value of a" in capsys.readouterr().out
        for command in (["stream", "read", "events"], ["stream", "tail", "events", "-n", "1"]):
            assert run([*command, "--store", str(tmp_path / "store")]) == 0
            assert "three" in capsys.readouterr().out
