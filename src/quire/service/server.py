"""The owner's side of the wire: an Arrow Flight server over a store.

Terms
  action   a call with one answer (`messages.py`)
  stream   rows of a table as Arrow batches (`tables.py`)
  door     the Flight server itself; it has its own threads, in which everything here runs

Rules
  1. Everything that a client can use up is bounded: the bytes of a call and a batch; concurrent calls, long polls and streams.
  2. A slow client costs a thread of the transport and a place under its limit; neither transactions nor the writer wait for it.
  3. A failure is returned as one of our errors, a bug as `InternalError`; tracebacks stay here.
  4. A process that can open the Unix socket may do everything. Over TCP every call needs a token.
  5. Closing answers long polls, lets calls end for `stop_seconds`, then disconnects clients that do not read.

Threads: the transport's; `close` from any other.
Raises `InvalidInput` for an address, `InvalidConfig` for tokens and certificates, `ReadOnly` for a store opened for reading.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from quire.core.closing import ClosedOnExit
from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import InternalError, InvalidConfig, InvalidInput, QuireError, ReadOnly, Unavailable
from quire.core.events import emit
from quire.core.tracing import attached_trace, span
from quire.durable.failpoints import hit
from quire.durable.files import OsDisk, translated
from quire.service.admission import MIDDLEWARE, CallLimit, FlightGate, Refusals
from quire.service.api import CallContext, StoreApi
from quire.service.client_holdings import Holdings
from quire.service.data_actions import STREAM_TAIL
from quire.service.frame_server import FrameServer
from quire.service.grpc_forks import kept_after_fork
from quire.service.handlers import Handlers
from quire.service.handlers_sql import SQL
from quire.service.messages import ACTIONS
from quire.service.signed_tokens import accepted_tokens
from quire.service.sockets import SCHEME, SocketPath, announce, binding, hang_up, place_of, register_server, retract
from quire.service.sql_actions import SQL_ACTIONS
from quire.service.tables import TableStream
from quire.service.tickets import DatabaseRequest, Scope, TableTicket
from quire.service.tokens import Credentials
from quire.service.values import ServiceFigures
from quire.service.wire import read_call, write_answer, write_error, write_form

TCP, TLS = "grpc", "grpc+tls"
TICKET_BYTES_MAX = 64 * 1024
LONG_POLLS = frozenset({"feed.wait", "stream.wait", STREAM_TAIL})
"""Actions that wait for an event."""
UNLIMITED = frozenset(action.name for action in SQL_ACTIONS)


class Server(ClosedOnExit):
    """A server of a store. Created by `store.serve()`; use it as a context manager, or call `close`."""

    def __init__(self, store: StoreApi, address: str | None = None, credentials: Credentials | None = None) -> None:
        if store.mode != "rw":
            raise ReadOnly("only the owner can serve a store", hint='open it with mode="rw"', path=store.path)
        self._settings = store.settings.service
        self._stopping = threading.Event()
        self._refusals = Refusals(store.manifest.clock)
        self._service = Service(store, self._refusals, self._stopping)
        self.path = store.path
        self._place: SocketPath | None = None
        self._frames: FrameServer | None = None
        self._flight_server: Any = None
        self._bound: str | int = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        credentials = credentials or Credentials()
        if address is None or address.startswith(SCHEME):
            if credentials != Credentials():
                raise InvalidInput("a Unix socket needs neither tokens nor certificates", hint="listen on grpc://…")
            self._place = SocketPath(address.removeprefix(SCHEME), "") if address else place_of(store.path)
            self._listen_on_socket(store, self._place)
        else:
            self._listen_on_network(store, address, credentials)
        register_server(self)
        emit("info", "service.listening", address=self.address, path=store.path)

    def _listen_on_socket(self, store: StoreApi, place: SocketPath) -> None:
        gate = FlightGate(None, self._refusals, copy_of=store.copy_of)
        try:
            # Before the Flight socket: a client that finds the Flight socket may rely on this one.
            self._frames = self._service.frames = FrameServer(
                place.path,
                self._service.act,
                gate,
                on_client_end=self._service.end_client,
                connections_max=self._settings.connections_max,
                body_bytes_max=self._settings.body_bytes_max,
                stop_seconds=self._settings.stop_seconds,
            )
            with binding(place) as path:
                self._flight_server = _FlightServer(SCHEME + path, gate, self._service)
                self._bound = path
            announce(OsDisk(), store.path, place)
        except BaseException:
            if self._flight_server is not None:
                self._shut()
                retract(place)
            elif self._frames is not None:
                self._frames.close()
            raise
        self.address = place.uri

    def _listen_on_network(self, store: StoreApi, address: str, credentials: Credentials) -> None:
        scheme, host, port = _network(address)
        certificates = _certificates(scheme, credentials)
        tokens = accepted_tokens(
            store.path,
            self._settings.jwt_keys,
            store.manifest.clock,
            admin_file=credentials.admin_token_file,
            read_file=credentials.read_token_file,
        )
        # Flight's names for TCP with and without TLS.
        location = f"{'grpc+tls' if certificates else 'grpc+tcp'}://{host}:{port}"
        self._flight_server = _FlightServer(location, FlightGate(tokens, self._refusals), self._service, certificates)
        self._bound = self._flight_server.port
        self.address = f"{scheme}://{host}:{self._flight_server.port}"
        if scheme == TCP and host not in ("localhost", "127.0.0.1", "[::1]"):
            emit(
                "warning",
                "service.plaintext",
                address=self.address,
                hint="tokens are sent unencrypted: use grpc+tls://",
            )

    def figures(self) -> ServiceFigures:
        """Return the counters since the server started."""
        return self._service.figures()

    def close(self) -> None:
        """Stop listening, answer long polls, let other calls end (rule 5). Idempotent; does nothing in a forked child."""
        if self._pid != os.getpid():
            return  # connections and socket belong to the parent
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._shut()
        finally:
            if self._place is not None:
                retract(self._place)
        emit("info", "service.closed", address=self.address)

    def _shut(self) -> None:
        # First: long polls and streams end by themselves, so that the transports have little to wait for (rule 5).
        self._stopping.set()
        if self._frames is not None:
            self._frames.close()
        ending = threading.Thread(target=self._flight_server.shutdown, name="quire-service-close", daemon=True)
        ending.start()
        ending.join(self._settings.stop_seconds)
        while ending.is_alive():
            gone = hang_up(self._bound)
            emit("warning", "service.hung_up", address=getattr(self, "address", ""), connections=gone)
            ending.join(0.5)
        self._flight_server = None  # frees gRPC's memory and threads now, not with a later collection of garbage
        self._service.close()


@dataclass(slots=True)
class _Counts:
    """Counters, guarded by `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: int = 0
    failed: int = 0
    batches: int = 0
    rows: int = 0


class Service:
    """Executes calls and streams of every transport."""

    def __init__(self, store: StoreApi, refusals: Refusals, stopping: threading.Event) -> None:
        settings = store.settings.service
        self._manifest = store.manifest
        self._settings = settings
        self._refusals = refusals
        self._stopping = stopping
        self.frames: FrameServer | None = None
        self.holdings = Holdings(store.manifest.clock, self._has_connection)
        self._handlers = Handlers(store, lambda: {"service": msgspec.to_builtins(self.figures())}, self.holdings)
        self._calls = CallLimit("calls", settings.calls_max, settings.busy_seconds)
        self._waits = CallLimit("long polls", settings.waits_max, settings.busy_seconds)
        self._streams = CallLimit("streams", settings.streams_max, settings.busy_seconds)
        self._counts = _Counts()

    def close(self) -> None:
        """Start no more jobs and end all holdings."""
        self._handlers.close()
        self.holdings.close()

    def _has_connection(self, client: str) -> bool:
        return self.frames is not None and self.frames.has_client(client)

    def end_client(self, client: str) -> None:
        """End the SQL connections of a client whose last connection has ended: its transactions must not block others."""
        self.holdings.end_client(client, SQL)

    def figures(self) -> ServiceFigures:
        """See `Server.figures`."""
        counts, limits = self._counts, (self._calls, self._waits, self._streams)
        return ServiceFigures(
            calls=counts.calls,
            failed=counts.failed,
            refused=self._refusals.count + (self.frames.refused if self.frames is not None else 0),
            busy=sum(limit.busy for limit in limits),
            calls_now=self._calls.now,
            waits_now=self._waits.now,
            streams_now=self._streams.now,
            batches_sent=counts.batches,
            rows_sent=counts.rows,
        )

    # ── actions ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def act(self, name: str, body: Any, gate: FlightGate, context: Any) -> Iterator[bytes]:
        """Execute an action and return its answer, in parts (rule 3)."""
        with self._counts.lock:
            self._counts.calls += 1
        try:
            value = self._act(name, body, gate, context)
            if self._stopping.is_set() and name in LONG_POLLS:
                raise Unavailable("the owner is closing", hint="connect again")
            return write_answer(value)
        except QuireError as error:
            again = self._stopping.is_set() and type(error) is Unavailable
            return self._failed(error, again=again)
        except Exception as error:
            emit("error", "service.bug", action=name, error=error)
            return self._failed(InternalError(f"a bug at the owner: {type(error).__name__}", action=name))

    def _act(self, name: str, body: Any, gate: FlightGate, context: Any) -> Any:
        action = ACTIONS.get(name)
        if action is None:
            raise InvalidInput("unknown action", hint="upgrade the owner if the client is newer", action=name[:60])
        if action.scope is Scope.STORE:
            gate.check_store(context, name, writes=action.writes)
        if action.local:
            gate.need_socket(context, name)
        if self._stopping.is_set():
            raise Unavailable("the owner is closing", hint="connect again")
        if len(body) > self._settings.body_bytes_max:
            raise InvalidInput("the call is too long", bytes=len(body), max=self._settings.body_bytes_max)
        key, request = read_call(bytes(body), action.request)
        if key and not action.keyed:
            raise InvalidInput("this action takes no idempotency key", action=name)
        if action.scope is Scope.DATABASE:
            assert isinstance(request, DatabaseRequest), "see `on_database`"
            gate.check_database(context, name, request.name, writes=action.writes)
        admission = context.get_middleware(MIDDLEWARE)

        def has_left() -> bool:
            return bool(context.is_cancelled())

        def is_over() -> bool:
            return self._stopping.is_set() or has_left()

        with (
            self._limit_of(name),
            attached_trace(admission.trace),
            span("Service.call", action=name, role=admission.grant.holder),
        ):
            handler, called = (
                self._handlers.of(name),
                CallContext(key, admission.grant, is_over, admission.client, gate.is_local, has_left),
            )
            if (barrier := self._manifest.barrier) is None or not action.writes:
                return handler(request, called)
            # Once for the whole action, and also for an answer that was kept from an earlier attempt.
            with barrier.call():
                answer = handler(request, called)
                barrier.note()
            return answer

    def _limit_of(self, name: str) -> AbstractContextManager[None]:
        """Return the place under which a call is counted. SQL has no limit besides that of connections: a statement may wait
        for a lock, and the lock's holder must find a place for its COMMIT."""
        if name in UNLIMITED:
            return nullcontext()
        return (self._waits if name in LONG_POLLS else self._calls).place()

    def _failed(self, error: QuireError, *, again: bool = False) -> Iterator[bytes]:
        with self._counts.lock:
            self._counts.failed += 1
        return write_error(error, again=again)

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def stream(self, raw: bytes) -> tuple[pa.Schema, Iterator[tuple[pa.RecordBatch, bytes]]]:
        """Return the schema and the batches that a ticket selects."""
        with self._counts.lock:
            self._counts.calls += 1
        if len(raw) > TICKET_BYTES_MAX:
            raise InvalidInput("the ticket is too long", bytes=len(raw), max=TICKET_BYTES_MAX)
        try:
            ticket = msgspec.msgpack.decode(raw, type=described(TableTicket))
        except UNDECODABLE as error:
            raise InvalidInput(f"the ticket cannot be read: {error}") from error
        reader = TableStream(self._manifest, ticket, self._settings.batch_bytes)
        return reader.schema, self._batches(reader)

    def _batches(self, reader: TableStream) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """Yield batches in the transport's thread. Between two batches the client may block it (rule 2)."""
        try:
            with self._streams.place():
                for batch, mark in reader.batches():
                    with self._counts.lock:
                        self._counts.batches += 1
                        self._counts.rows += batch.num_rows
                    yield batch, mark
                    if self._stopping.is_set():
                        raise Unavailable("the owner is closing", hint="connect again")
        except Exception as error:
            raise self.stream_error(error) from None

    def stream_error(self, error: Exception) -> flight.FlightServerError:
        """Return an error in the form with which a stream ends (rule 3)."""
        if not isinstance(error, QuireError):
            emit("error", "service.bug", action="stream", error=error)
            error = InternalError(f"a bug at the owner: {type(error).__name__}")
        with self._counts.lock:
            self._counts.failed += 1
        again = self._stopping.is_set() and type(error) is Unavailable
        return flight.FlightServerError(error.what[:200], extra_info=write_form(error, again=again))


class _FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """The Flight server; the gate refuses the methods of Flight that are not defined here."""

    def __init__(
        self, location: str, gate: FlightGate, service: Service, certificates: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        self._gate = gate
        self._service = service
        try:
            super().__init__(location, tls_certificates=certificates or [], middleware={MIDDLEWARE: gate})
        except (OSError, pa.ArrowException) as error:
            raise InvalidInput(
                f"cannot listen: {str(error).splitlines()[0]}",
                hint="choose another port or path; port 0 picks a free one",
                address=location,
            ) from error
        kept_after_fork(self)

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        answer = self._service.act(action.type, action.body, self._gate, context)
        hit("service.answer")  # tests lose the answer here
        return answer

    def list_actions(self, _: Any) -> list[tuple[str, str]]:
        return [(action.name, f"{action.request.__name__}, {action.access.value}") for action in ACTIONS.values()]

    def do_get(self, context: Any, ticket: Any) -> Any:
        try:
            self._gate.check_store(context, "do_get", writes=False)
            schema, batches = self._service.stream(ticket.ticket)
        except Exception as error:
            raise self._service.stream_error(error) from None
        return flight.GeneratorStream(schema, batches)


def _network(address: str) -> tuple[str, str, int]:
    """Return (scheme, host, port) of an address on the network."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in (TCP, TLS) or not parts.hostname or port is None or parts.path or parts.query:
        raise InvalidInput(
            "cannot listen on this address",
            hint="use grpc://HOST:PORT, grpc+tls://HOST:PORT or grpc+unix:///PATH",
            address=address,
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return parts.scheme, host, port


def _certificates(scheme: str, credentials: Credentials) -> list[tuple[bytes, bytes]]:
    given = bool(credentials.tls_cert_file), bool(credentials.tls_key_file)
    if scheme == TCP and any(given):
        raise InvalidConfig(
            "a certificate can only be used with grpc+tls://", hint="listen on grpc+tls://, or omit the certificate"
        )
    if scheme == TLS and not all(given):
        raise InvalidConfig(
            "TLS needs a certificate and its key",
            hint="give tls_cert_file and tls_key_file, on the command line `--tls-cert` and `--tls-key`",
        )
    return [(_pem(credentials.tls_cert_file), _pem(credentials.tls_key_file))] if scheme == TLS else []


def _pem(path: str) -> bytes:
    try:
        with translated(path, "reading a certificate"), open(path, "rb") as file:
            text = file.read()
    except FileNotFoundError:
        raise InvalidConfig("the file does not exist", path=path) from None
    if b"-----BEGIN " not in text:
        raise InvalidConfig("not a certificate or key in PEM", path=path)
    return text
