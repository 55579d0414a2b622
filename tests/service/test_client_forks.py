"""Clients that are used on both sides of a fork(): the child is another client."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import quire
from quire.manifest.ops.base import Counter, ReserveIds
from quire.service.client import Client
from quire.service.remote_stream import RemoteStream
from quire.sqlite import dbapi
from tests.service.owners import HTTP_OWNER, OWNER, end, line, process

CHILD_SECONDS = 20


@pytest.fixture(params=["frames", "http"])
def client(request: pytest.FixtureRequest, path: Path) -> Iterator[Client]:
    """A client of an owner in another process."""
    is_http = request.param == "http"
    owner = process(HTTP_OWNER, str(path), "http://127.0.0.1:0") if is_http else process(OWNER, str(path))
    address = line(owner)
    with quire.connect(address, token_file=str(path / "admin.token") if is_http else "") as connected:
        yield connected
    end(owner)


def in_child(body: Callable[[], bool]) -> bool:
    """Return what a function returns in a forked child; False if it raises, or hangs."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(CHILD_SECONDS)
            code = 0 if body() else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def test_a_forked_child_does_not_use_the_transaction_of_its_parent(client: Client) -> None:
    """Hazard: over HTTP the child read what its parent had not committed, and closed its parent's connection."""
    shop = client.sqlite("shop", create=True, isolation_level=None)
    shop.execute("create table t(a)")
    shop.execute("begin")
    shop.execute("insert into t values (1)")

    def read_and_close() -> bool:
        with pytest.raises(dbapi.OperationalError, match="the transaction was rolled back"):
            shop.execute("select a from t")
        rows = shop.execute("select a from t").fetchall()
        shop.close()
        return not rows

    assert in_child(read_and_close)
    shop.execute("insert into t values (2)")
    shop.execute("commit")
    assert shop.execute("select a from t").fetchall() == [(1,), (2,)]


def test_a_forked_child_does_not_send_what_its_parent_has_queued(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: parent and child sent the same appends, each with its own key, so that they were appended twice."""
    monkeypatch.setattr(RemoteStream, "_run", lambda _: None)  # only callers send
    stream = client.stream("s", create=True)
    queued = stream.append(b"parent")
    assert in_child(lambda: stream.append(b"child").result() == 1)
    assert queued.result() == 2
    assert [record.payload for record in stream.read()] == [b"child", b"parent"]


def test_a_forked_child_sends_batches(client: Client) -> None:
    """Hazard: the sending thread existed in the parent only, so that a batch of the child was never sent."""
    client.submit([ReserveIds(Counter.JOB, 1)]).result(60)
    assert in_child(lambda: client.submit([ReserveIds(Counter.JOB, 2)]).result(CHILD_SECONDS / 2) is not None)
