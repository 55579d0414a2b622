"""The owner is killed at a step of a client's call, over the Unix socket and over HTTP: acknowledged changes are
present, repeated calls have happened once, and the client continues with the next owner by itself."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import quire
from quire.service.client import Client
from quire.sqlite import dbapi
from tests.service.owners import HTTP_OWNER, OWNER, end, line, process

WRITES = 6

POINTS = [
    "service.answer",
    "stream.hot.written",
    "stream.hot.synced",
    "stream.hot.header",
    "stream.hot.rolled",
    "lsm.wal.appended",
    "lsm.wal.synced",
    "lsm.freeze.rotated",
    "pages.segment.frames",
    "pages.segment.sync",
    "pages.wal.synced",
    "sql.served",
]
FAST = {
    "frames": ("service.answer", "stream.hot.synced", "lsm.wal.appended", "sql.served"),
    "http": ("service.answer", "sql.served"),
}
"""Failpoints that every run reaches, by carrier."""


class Owners:
    """Successive owners: one that died is replaced."""

    def __init__(self, path: Path, carrier: str, failpoints: str) -> None:
        self._over = False
        self.deaths = 0
        self._program = [OWNER, str(path)] if carrier == "frames" else [HTTP_OWNER, str(path), "http://127.0.0.1:0"]
        self._owner = process(*self._program, QUIRE_FAILPOINTS=failpoints)
        self.address = line(self._owner)
        if carrier == "http":
            self._program[2] = self.address  # where the client looks for the next owner
        self._thread = threading.Thread(target=self._replace)
        self._thread.start()

    def _replace(self) -> None:
        while not self._over:
            try:
                self._owner.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            if not self._over:
                self.deaths += 1
                end(self._owner)
                self._owner = process(*self._program)

    def close(self) -> None:
        self._over = True
        self._thread.join()
        end(self._owner)


@contextmanager
def owners(path: Path, carrier: str, failpoints: str) -> Iterator[tuple[Owners, Client]]:
    running = Owners(path, carrier, failpoints)
    token = str(path / "admin.token") if carrier == "http" else ""
    try:
        with quire.connect(running.address, timeout=120, token_file=token) as client:
            yield running, client
    finally:
        running.close()


def write_rows(connection: dbapi.Connection, number: int) -> None:
    """Insert two rows in one transaction, exactly once, and handle errors as a correct program does."""
    while True:
        try:
            connection.execute("insert into t values (?, 'a')", (number,))
            connection.execute("insert into t values (?, 'b')", (number,))
            connection.commit()
        except dbapi.OperationalError as lost:
            if "unknown" in str(lost) and connection.execute("select 1 from t where a = ?", (number,)).fetchone():
                return
        else:
            return


@pytest.mark.parametrize(
    ("carrier", "point", "passed"),
    [
        pytest.param(carrier, point, passed, marks=() if point in fast and passed == 3 else pytest.mark.slow)
        for carrier, fast in FAST.items()
        for point in POINTS
        for passed in (1, 3, 9)
    ],
)
def test_an_owner_killed_at_any_step_has_acknowledged_changes_exactly_once(
    path: Path, carrier: str, point: str, passed: int
) -> None:
    with quire.open(path) as store:
        store.sqlite("shop", create=True).execute("create table t(a, b)").fetchall()
        store.stream("s", create=True)
        store.kv("k", create=True)
    with owners(path, carrier, f"{point}={passed}*off->kill") as (running, client):
        stream, kv, shop = client.stream("s"), client.kv("k"), client.sqlite("shop")
        ids, lsns = [], []
        for number in range(WRITES):
            ids.append(stream.append([b"%d" % number, b"second"]).result())
            lsns.append(kv.write({b"n": b"%d" % number, b"%d" % number: b"x"}))
            write_rows(shop, number)
            if number == 2:
                kv.flush()
                stream.seal()
        assert [record.payload for record in stream.read()] == [
            payload for number in range(WRITES) for payload in (b"%d" % number, b"second")
        ]
        assert ids == [1 + 2 * number for number in range(WRITES)]
        assert lsns == [number + 1 for number in range(WRITES)], "a batch written twice would add two"
        assert kv.get(b"n") == b"%d" % (WRITES - 1)
        assert len(list(kv.scan())) == WRITES + 1
        rows = shop.execute("select a, b from t order by a, b").fetchall()
        assert rows == [(number, letter) for number in range(WRITES) for letter in "ab"]
    if point in FAST[carrier] and passed == 3:
        assert running.deaths == 1, "the failpoint was not reached"


def test_a_key_is_known_after_the_segment_was_sealed_and_the_log_flushed(path: Path) -> None:
    """Idempotency keys outlive the files that they were written to."""
    key, other = bytes(range(16)), bytes(range(1, 17))
    with quire.open(path) as store:
        stream, kv = store.stream("s", create=True), store.kv("k", create=True)
        first = stream.append(b"a", key=key).result()
        lsn = kv.write({b"a": b"1"}, key=key)
        kv.flush()
        kv.write({b"a": b"2"}, key=other)
        kv.flush()
        stream.seal()
    for _ in range(2):
        with quire.open(path) as store:
            stream, kv = store.stream("s"), store.kv("k")
            assert stream.append(b"a", key=key).result() == first
            assert kv.write({b"a": b"1"}, key=key) == lsn
            assert kv.write({b"a": b"2"}, key=other) == lsn + 1
            assert (stream.end_record, kv.get(b"a"), kv.last_lsn) == (2, b"2", lsn + 1)
