"""The server with invalid input, many clients, and at shutdown."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

import quire
from quire.manifest.records import JobKind
from quire.service import messages as m
from quire.service import wire
from quire.service.client import Client, connect
from quire.service.commands import CommandHandlers
from quire.service.handlers import Handlers
from quire.service.handlers_data import DataHandlers
from quire.service.handlers_jobs import JobHandlers
from quire.service.handlers_sql import SqlHandlers
from quire.store.store import Store
from tests.service.conftest import Start
from tests.service.owners import HEADERS, end, line, process, reserve, served

OPTIONS = flight.FlightCallOptions(headers=HEADERS, timeout=30)


def call_action(raw: Any, name: str, body: bytes) -> wire.ErrorForm | None:
    """The error that a raw action returns."""
    whole = b"".join(bytes(part.body) for part in raw.do_action(flight.Action(name, body), OPTIONS))
    if whole[:1] == wire.BAD:
        return wire.read_form(whole[1:])
    assert whole[:1] == wire.GOOD
    return None


@pytest.fixture
def raw(server: Any) -> Any:
    opened = flight.FlightClient(server.address)
    yield opened
    opened.close()


def test_every_action_has_a_handler_and_every_handler_an_action() -> None:
    methods = {
        name
        for kind in (Handlers, DataHandlers, SqlHandlers, JobHandlers, CommandHandlers)
        for name in vars(kind)
        if name.startswith("do_")
    }
    assert methods == {"do_" + name.replace(".", "_") for name in m.ACTIONS}


# ── invalid input ─────────────────────────────────────────────────────────────────────────────────────────────────────
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@examples(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    name=st.sampled_from(sorted(m.ACTIONS)),
    key=st.sampled_from([b"", b"k" * 16, b"x"]),
    request_=ANYTHING,
    body=st.binary(),
)
def test_garbage_is_answered_with_an_error_and_changes_nothing(
    name: str, key: bytes, request_: Any, body: bytes, raw: Any, store: Store
) -> None:
    for sent in (msgspec.msgpack.encode([key, request_]), body):
        form = call_action(raw, name, sent)
        assert form is None or form.kind not in ("QuireError", "InternalError"), form
        assert "Traceback" not in str(form)
    assert store.databases() == []


def put(raw: Any) -> None:
    """The transport decides whether the refusal arrives at the beginning or at the end."""
    writer, _ = raw.do_put(flight.FlightDescriptor.for_path("db"), pa.schema([("a", pa.int64())]), OPTIONS)
    writer.close()


def test_unknown_actions_other_calls_and_long_bodies_are_refused(raw: Any, path: Path) -> None:
    form = call_action(raw, "format.disk", b"")
    assert form is not None
    assert form.kind == "InvalidInput"
    for call in (
        lambda: list(raw.list_flights(options=OPTIONS)),
        lambda: raw.get_flight_info(flight.FlightDescriptor.for_path("db"), OPTIONS),
        lambda: raw.get_schema(flight.FlightDescriptor.for_path("db"), OPTIONS),
    ):
        with pytest.raises((flight.FlightServerError, OSError), match="does not offer this call") as caught:
            call()
        assert "Traceback" not in str(caught.value)
    with pytest.raises(flight.FlightServerError, match="does not offer this call"):
        put(raw)
    assert {action.type for action in raw.list_actions(OPTIONS)} == set(m.ACTIONS)
    form = call_action(raw, "create", b"x" * (17 << 20))
    assert form is not None
    assert form.what == "the call is too long"


@pytest.mark.parametrize(
    "ticket", [b"", b"\xff" * 10, b"x" * 100_000, msgspec.msgpack.encode(["nothing"]), b"\x91" * 5_000]
)
def test_bad_tickets_are_refused(raw: Any, ticket: bytes) -> None:
    with pytest.raises(flight.FlightServerError) as caught:
        raw.do_get(flight.Ticket(ticket), OPTIONS).read_all()
    assert wire.read_form(bytes(caught.value.extra_info)).kind == "InvalidInput"
    assert "Traceback" not in str(caught.value)


def test_a_key_is_refused_by_actions_that_take_none(raw: Any) -> None:
    form = call_action(raw, "info", wire.write_call(b"k" * 16, m.Nothing()))
    assert form is not None
    assert form.what == "this action takes no idempotency key"


def test_an_internal_error_is_reported_without_its_traceback(
    client: Client, store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(store, "databases", broken)
    with pytest.raises(quire.InternalError) as caught:
        client.databases()
    assert "secret" not in str(caught.value)
    assert "service.bug" in capfd.readouterr().err


# ── concurrency ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_long_polls_and_streams_are_limited_and_leave_capacity_for_calls(path: Path) -> None:
    with served(path, waits_max=3, streams_max=1, calls_max=2, busy_seconds=0.05, batch_bytes=64 * 1024) as (
        store,
        server,
    ):
        from tests.service.test_tables import grow

        grow(store, jobs=300)
        with connect(server.address) as client:
            head = client.feed.head()
            waiting = [threading.Thread(target=lambda: client.feed.wait(head, timeout=30)) for _ in range(3)]
            for thread in waiting:
                thread.start()
            while server.figures().waits_now < 3:
                time.sleep(0.01)
            with pytest.raises(quire.Overloaded, match="long polls"):
                client.feed.wait(head, timeout=5)
            stream = client.scan("job_queue")
            next(stream)
            with pytest.raises(quire.Overloaded, match="streams"):
                client.table("job_queue")
            assert client.databases() == []  # calls have their own slots
            store.create("shop", "pages")
            for thread in waiting:
                thread.join(60)
            stream.close()  # type: ignore[attr-defined]
            del stream
            figures = server.figures()
            assert (figures.waits_now, figures.busy) == (0, 2)


def test_concurrent_calls_are_limited_and_refused_with_a_reason(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(path, calls_max=2, busy_seconds=0.05) as (store, server), connect(server.address) as client:
        inside, release = threading.Semaphore(0), threading.Event()

        def slow(**_: Any) -> list[Any]:
            inside.release()
            release.wait(30)
            return []

        monkeypatch.setattr(store, "databases", slow)
        threads = [threading.Thread(target=client.databases) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert inside.acquire(timeout=60)
        with pytest.raises(quire.Overloaded, match="limit for calls"):
            client.info()
        release.set()
        for thread in threads:
            thread.join(60)
        assert client.info().readers >= 0


def test_eight_clients_submit_at_once_and_nothing_is_lost(store: Store, server: Any) -> None:
    def work(first: int) -> None:
        with connect(server.address) as client:
            guards = [client.submit(reserve(first + number)) for number in range(50)]
            for guard in guards:
                guard.result(30)

    threads = [threading.Thread(target=work, args=(1_000 * number + 1,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.feed.head() == 400


# ── shutdown ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_closing_answers_long_polls_at_once(path: Path) -> None:
    with served(path, stop_seconds=60) as (_, server):
        client = connect(server.address, timeout=0.5)
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                client.feed.wait(0, timeout=2.5)
            except quire.QuireError as error:
                failures.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not server.figures().waits_now:
            time.sleep(0.01)
        started = time.monotonic()
        server.close()
        server.close()
        assert time.monotonic() - started < 2, "closing does not wait for the poll to end"
        waiting.join(60)
        assert isinstance(failures[0], quire.Unavailable)
        client.close()


def test_a_wait_continues_with_the_next_owner(path: Path, owner: Start) -> None:
    first, address = owner()
    with quire.connect(address, timeout=60) as client:
        sequences: list[int] = []
        waiting = threading.Thread(target=lambda: sequences.append(client.feed.wait(0, timeout=60)))
        waiting.start()
        time.sleep(0.3)
        first.kill()
        first.wait()
        owner()
        client.create("shop", "pages")
        waiting.join(60)
        assert sequences == [1]


def test_the_store_closes_its_servers(path: Path) -> None:
    with quire.open(path) as store:
        server = store.serve()
        assert (path / "quire.sock").exists()
        with connect(server.address) as client:
            client.jobs.enqueue(JobKind.VERIFY)
    assert not (path / "quire.sock").exists()
    with pytest.raises(quire.StoreClosed):
        store.serve()


def test_a_forked_child_leaves_the_socket_to_its_parent(path: Path) -> None:
    """Hazard: the child of a fork() that leaves the owner's `with` blocks removes the parent's socket."""
    program = """
import os, sys, quire
with quire.open(sys.argv[1]) as store, store.serve() as server:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print(os.path.exists(os.path.join(sys.argv[1], "quire.sock")), flush=True)
    else:
        server.close()
        os._exit(0)
"""
    started = process(program, str(path))
    try:
        assert line(started) == "True"
        assert started.wait(30) == 0
    finally:
        end(started)
