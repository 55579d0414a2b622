"""The owner's side of the wire: an Arrow Flight server over a store.

Terms
  action   a call with one answer (`messages.py`); stream: rows of a table as Arrow batches (`tables.py`)
  door     the Flight server itself; it has threads of its own, in which everything here runs

Rules
  1. Everything a client can use up is bounded: the bytes of a call and of a batch, the calls, long polls and streams at once.
  2. A slow client costs a thread of the transport and a place under its limit; neither transactions nor the writer wait.
  3. What goes wrong is told as an error of ours, a bug as `InternalError`; tracebacks stay here.
  4. Through the Unix socket whoever may open it may do everything. Over TCP every call shows a token.
  5. Closing answers long polls, lets calls end for `stop_seconds`, then hangs up on whoever does not read.

Threads: the transport's; `close` from any other.
Raises `InvalidInput` for an address, `InvalidConfig` for tokens and certificates, `ReadOnly` for a store opened for reading.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from quire.core.errors import InternalError, InvalidConfig, InvalidInput, QuireError, ReadOnly, Unavailable
from quire.core.events import emit
from quire.core.tracing import continued, span
from quire.durable.failpoints import hit
from quire.durable.files import OsDisk, translated
from quire.service.admission import MIDDLEWARE, CallLimit, FlightGate, Refusals
from quire.service.api import CallContext, StoreApi
from quire.service.client_holdings import Holdings
from quire.service.data_actions import STREAM_TAIL
from quire.service.frame_server import FrameServer
from quire.service.handlers import Handlers
from quire.service.handlers_sql import SQL
from quire.service.messages import ACTIONS, DatabaseRequest, Scope, TableTicket
from quire.service.signed_tokens import accepted_tokens
from quire.service.sockets import SCHEME, SocketPath, announce, binding, hang_up, listens, place_of, retract
from quire.service.sql_actions import SQL_ACTIONS
from quire.service.tables import TableStream
from quire.service.tokens import Credentials
from quire.service.values import ServiceFigures
from quire.service.wire import read_call, write_answer, write_error, write_form

TCP, TLS = "grpc", "grpc+tls"
TICKET_BYTES_MAX = 64 * 1024
LONG_POLLS = frozenset({"feed.wait", "stream.wait", STREAM_TAIL})
"""Actions that wait for something to happen."""
UNLIMITED = frozenset(action.name for action in SQL_ACTIONS)


class Server:
    """A store that is being served. Made by `store.serve()`; use it as a context manager, or call `close`."""

    def __init__(self, store: StoreApi, address: str | None = None, credentials: Credentials | None = None) -> None:
        if store.mode != "rw":
            raise ReadOnly("only the owner of a store serves it", hint='open it with mode="rw"', path=store.path)
        self._settings = store.settings.service
        self._stopping = threading.Event()
        self._refusals = Refusals(store.manifest.clock)
        self._service = Service(store, self._refusals, self._stopping)
        self.path = store.path
        self._place: SocketPath | None = None
        self._frames: FrameServer | None = None
        self._door: Any = None
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
        listens(self)
        emit("info", "service.listening", address=self.address, path=store.path)

    def _listen_on_socket(self, store: StoreApi, place: SocketPath) -> None:
        gate = FlightGate(None, self._refusals, copy_of=store.copy_of)
        try:
            # Before the other one: whoever finds that one may rely on this.
            self._frames = self._service.frames = FrameServer(
                place.path,
                self._service.act,
                gate,
                left=self._service.left,
                connections_max=self._settings.connections_max,
                body_bytes_max=self._settings.body_bytes_max,
                stop_seconds=self._settings.stop_seconds,
            )
            with binding(place) as path:
                self._door = _Door(SCHEME + path, gate, self._service)
                self._bound = path
            announce(OsDisk(), store.path, place)
        except BaseException:
            if self._door is not None:
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
        # Flight knows TLS by this name.
        location = f"{'grpc+tls' if certificates else 'grpc+tcp'}://{host}:{port}"
        self._door = _Door(location, FlightGate(tokens, self._refusals), self._service, certificates)
        self._bound = self._door.port
        self.address = f"{scheme}://{host}:{self._door.port}"
        if scheme == TCP and host not in ("localhost", "127.0.0.1", "[::1]"):
            emit(
                "warning", "service.plaintext", address=self.address, hint="tokens travel in the clear: use grpc+tls://"
            )

    def figures(self) -> ServiceFigures:
        """What was counted since the server started."""
        return self._service.figures()

    def close(self) -> None:
        """Stop listening, answer who waits, let the rest end (rule 5). A second time, and in a forked child: nothing."""
        if self._pid != os.getpid():
            return  # the child of a fork(): connections and socket are the parent's
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._shut()
        if self._place is not None:
            retract(self._place)
        emit("info", "service.closed", address=self.address)

    def _shut(self) -> None:
        self._stopping.set()
        if self._frames is not None:
            self._frames.close()
        ending = threading.Thread(target=self._door.shutdown, name="quire-service-close", daemon=True)
        ending.start()
        ending.join(self._settings.stop_seconds)
        while ending.is_alive():
            gone = hang_up(self._bound)
            emit("warning", "service.hung_up", address=getattr(self, "address", ""), connections=gone)
            ending.join(0.5)
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class _Counts:
    """Guarded by `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: int = 0
    failed: int = 0
    batches: int = 0
    rows: int = 0


class Service:
    """Calls and streams, whatever they come in by."""

    def __init__(self, store: StoreApi, refusals: Refusals, stopping: threading.Event) -> None:
        settings = store.settings.service
        self._manifest = store.manifest
        self._settings = settings
        self._refusals = refusals
        self._stopping = stopping
        self.frames: FrameServer | None = None
        self.holdings = Holdings(store.manifest.clock, self._lives)
        self._handlers = Handlers(store, lambda: {"service": msgspec.to_builtins(self.figures())}, self.holdings)
        self._calls = CallLimit("calls", settings.calls_max, settings.busy_seconds)
        self._waits = CallLimit("long polls", settings.waits_max, settings.busy_seconds)
        self._streams = CallLimit("streams", settings.streams_max, settings.busy_seconds)
        self._counts = _Counts()

    def close(self) -> None:
        """Nothing more is begun, and what clients hold ends."""
        self._handlers.close()
        self.holdings.close()

    def _lives(self, client: str) -> bool:
        return self.frames is not None and self.frames.lives(client)

    def left(self, client: str) -> None:
        """A client's last connection has ended: its transactions must not keep others waiting."""
        self.holdings.left(client, SQL)

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
        """The answer to an action, in parts (rule 3)."""
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
            emit("error", "service.bug", action=name, error=f"{type(error).__name__}: {error}")
            return self._failed(InternalError(f"a bug at the owner: {type(error).__name__}", action=name))

    def _act(self, name: str, body: Any, gate: FlightGate, context: Any) -> Any:
        action = ACTIONS.get(name)
        if action is None:
            raise InvalidInput("unknown action", hint="is the client newer than the owner?", action=name[:60])
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

        def is_over() -> bool:
            return self._stopping.is_set() or bool(context.is_cancelled())

        with (
            self._place(name),
            continued(admission.trace),
            span("Service.call", action=name, role=admission.grant.holder),
        ):
            handler, called = (
                self._handlers.of(name),
                CallContext(key, admission.grant, is_over, admission.client, gate.is_local),
            )
            if (barrier := self._manifest.barrier) is None or not action.writes:
                return handler(request, called)
            with (
                barrier.call()
            ):  # once for the whole action, and also for an answer that was kept from an earlier attempt
                answer = handler(request, called)
                barrier.note()
            return answer

    def _place(self, name: str) -> AbstractContextManager[None]:
        """Where a call is counted. SQL has no limit beside that of connections: a statement may wait for a lock, and the one
        who holds it must find a place for its COMMIT."""
        if name in UNLIMITED:
            return nullcontext()
        return (self._waits if name in LONG_POLLS else self._calls).place()

    def _failed(self, error: QuireError, *, again: bool = False) -> Iterator[bytes]:
        with self._counts.lock:
            self._counts.failed += 1
        return write_error(error, again=again)

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def stream(self, raw: bytes) -> tuple[pa.Schema, Iterator[tuple[pa.RecordBatch, bytes]]]:
        """The schema and the batches that a ticket asks for."""
        with self._counts.lock:
            self._counts.calls += 1
        if len(raw) > TICKET_BYTES_MAX:
            raise InvalidInput("the ticket is too long", bytes=len(raw), max=TICKET_BYTES_MAX)
        try:
            ticket = msgspec.msgpack.decode(raw, type=TableTicket)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInput(f"the ticket cannot be read: {error}") from error
        reader = TableStream(self._manifest, ticket, self._settings.batch_bytes)
        return reader.schema, self._batches(reader)

    def _batches(self, reader: TableStream) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """Runs in the transport's thread, between two batches it is blocked by the client: rule 2."""
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
        """An error as a stream ends with it (rule 3)."""
        if not isinstance(error, QuireError):
            emit("error", "service.bug", action="stream", error=f"{type(error).__name__}: {error}")
            error = InternalError(f"a bug at the owner: {type(error).__name__}")
        with self._counts.lock:
            self._counts.failed += 1
        again = self._stopping.is_set() and type(error) is Unavailable
        return flight.FlightServerError(error.what[:200], extra_info=write_form(error, again=again))


class _Door(flight.FlightServerBase):  # type: ignore[misc]
    """The Flight server; what Flight has beyond this, the gate refuses."""

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
                hint="choose another port or path; port 0 is a free one",
                address=location,
            ) from error

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        answer = self._service.act(action.type, action.body, self._gate, context)
        hit("service.answer")  # where tests lose it
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
    """(scheme, host, port) of an address on the network."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in (TCP, TLS) or not parts.hostname or port is None or parts.path or parts.query:
        raise InvalidInput(
            "cannot listen there", hint="grpc://HOST:PORT, grpc+tls://HOST:PORT or grpc+unix:///PATH", address=address
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return parts.scheme, host, port


def _certificates(scheme: str, credentials: Credentials) -> list[tuple[bytes, bytes]]:
    given = bool(credentials.tls_cert_file), bool(credentials.tls_key_file)
    if scheme == TCP and any(given):
        raise InvalidConfig("a certificate is for grpc+tls://", hint="listen there, or leave the certificate out")
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
