"""A client's connection to an owner: sends calls until they are answered, or their time is over.

Terms
  call      a request of the caller; it has a deadline and, if it changes something, an idempotency key
  attempt   one transmission of a call

Rules
  1. A call is sent again only if that is harmless: it carries a key, or repeating it changes nothing (M11). Every action is one
     or the other.
  2. An owner that cannot be reached, goes away or restarts is tried again, with randomized pauses that double, until the
     deadline; then `Unavailable` is raised. If a response does not arrive in time, `TimedOut` is raised: the call may still be
     executed.
  3. Every failed attempt is followed by a new connection: the transport's own reconnects back off for longer and longer.
  4. Owner and client send their versions with every call; either refuses a version that it does not understand.
  5. A call carries the trace of its caller.
  6. A channel belongs to its process: after fork() the child opens its own connection.
  7. Calls are sent as frames on the owner's machine (`frames.py`), over HTTP to an HTTP address (`http_carrier.py`), and by
     Flight otherwise. Only Flight carries Arrow.

Threads: any. Raises what the owner raised, and `Unavailable`, `TimedOut`, `AccessDenied`, `Incompatible`.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from quire.core.errors import (
    AccessDenied,
    Incompatible,
    InvalidInput,
    QuireError,
    StorageFault,
    StoreClosed,
    TimedOut,
    Unavailable,
)
from quire.core.tracing import current_traceparent
from quire.durable.files import translated
from quire.service.carrier import CallBroken, CallTimedOut, Carrier
from quire.service.frame_carrier import FrameCarrier
from quire.service.frames import CLIENT_BYTES
from quire.service.grpc_forks import kept_after_fork
from quire.service.http_carrier import SCHEMES as HTTP_SCHEMES
from quire.service.http_carrier import HttpCarrier
from quire.service.tickets import Action, TableTicket
from quire.service.tokens import read_token
from quire.service.values import Request
from quire.service.wire import (
    CLIENT_HEADER,
    TOKEN_HEADER,
    TRACE_HEADER,
    VERSION_HEADER,
    WIRE_VERSION,
    ErrorForm,
    RemoteError,
    error_of,
    read_answer,
    read_form,
    write_call,
)

CALL_SECONDS = 30.0
"""The default time limit of a call, all attempts together."""

ATTEMPT_SECONDS = 10.0
"""The time limit of one attempt: a response that is lost silently must not use up the whole call."""

PAUSE_SECONDS = 0.02
PAUSE_SECONDS_MAX = 1.0

STREAM_SECONDS = 60.0
"""The time limit of one `do_get`; a longer stream continues with another one."""

SCHEMES = ("grpc", "grpc+tls", "grpc+unix", *HTTP_SCHEMES)

# A new client shares no connection with the failed one, and retries to connect within a second (rule 3).
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 60_000),
]

_AGAIN = (
    flight.FlightUnavailableError,
    flight.FlightTimedOutError,
    flight.FlightCancelledError,
    flight.FlightInternalError,
)
"""How a broken connection appears here. A server that fails because of a bug returns an error message."""

R = TypeVar("R")

_RANDOM = random.Random()
"""Not the generator of the module, whose numbers belong to the program: it may have seeded it."""


class Channel:
    """A connection to an owner. See the rules above."""

    def __init__(
        self, uri: str, *, token_file: str = "", tls_ca_file: str = "", call_seconds: float = CALL_SECONDS
    ) -> None:
        parts = _checked(uri)
        # constant after construction
        self.uri = uri
        self.token_file = token_file
        self.tls_ca_file = tls_ca_file
        self.call_seconds = call_seconds
        self._location = uri.replace("grpc://", "grpc+tcp://", 1) if parts.scheme == "grpc" else uri
        self._roots = _read(tls_ca_file) if tls_ca_file else None
        client = os.urandom(CLIENT_BYTES)
        headers = {VERSION_HEADER: str(WIRE_VERSION), CLIENT_HEADER: client.hex()}
        if token_file:
            headers[TOKEN_HEADER] = f"Bearer {read_token(token_file)}"
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.body_bytes_max: int | None = None
        """The most bytes of a call that the owner accepts; `None` before it has been requested."""
        self._own: Carrier[Any] | None = None
        if parts.scheme == "grpc+unix":
            self._own = FrameCarrier(parts.path, client, WIRE_VERSION)
        elif parts.scheme in HTTP_SCHEMES:
            self._own = HttpCarrier(parts.scheme, str(parts.hostname), parts.port, headers, tls_ca_file)
        # guarded by _lock
        self._lock = threading.Lock()
        self._client: Any = None
        self._pid = os.getpid()
        self._closed = False

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Close the connection; calls in progress fail. Idempotent."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None and self._pid == os.getpid():
            client.close()
        if self._own is not None:
            self._own.close()

    @property
    def is_connected(self) -> bool:
        """Whether an open connection shows the owner that this client is alive."""
        return isinstance(self._own, FrameCarrier) and self._own.is_available()

    def _carrier(self) -> Any:
        """Return the transport of the next call (rule 7)."""
        if self._own is not None and not self._closed and self._own.is_available():
            return self._own
        return self._connected()

    def _connected(self) -> Any:
        with self._lock:
            if self._closed:
                raise StoreClosed("the client is closed", hint="connect again", uri=self.uri)
            if self._pid != os.getpid():  # rule 6: the parent's connection is not touched
                self._pid, self._client = os.getpid(), None
            if self._client is None:
                try:
                    self._client = kept_after_fork(
                        flight.FlightClient(self._location, tls_root_certs=self._roots, generic_options=_OPTIONS)
                    )
                except pa.ArrowException as error:
                    raise InvalidInput(f"cannot connect: {_line(error)}", uri=self.uri) from error
            return self._client

    def _reconnect(self, failed: Any) -> None:
        """Drop the connection of a failed attempt, so that the next one opens another. Threads that still use the old one keep
        it, and it closes with the last of them."""
        if isinstance(failed, Carrier):
            failed.drop_idle()
            return
        with self._lock:
            if self._client is failed:
                self._client = None

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def call(
        self,
        name: str,
        request: Request,
        *,
        timeout: float | None = None,
        attempt_seconds: float = ATTEMPT_SECONDS,
        key: bytes = b"",
    ) -> R:  # type: ignore[type-var] # inferred from the caller's annotation: the type that the action declares
        """Execute an action, given its name, and return its result."""
        from quire.service.messages import ACTIONS  # contains values of the manifest, which executors do not have

        answer: R = self.ask(ACTIONS[name], request, timeout=timeout, attempt_seconds=attempt_seconds, key=key)
        return answer

    def ask(
        self,
        action: Action,
        request: Request,
        *,
        timeout: float | None = None,
        attempt_seconds: float = ATTEMPT_SECONDS,
        key: bytes = b"",
    ) -> Any:
        """Execute an action and return its result. `key` is the caller's own idempotency key, where the action takes one."""
        name = action.name
        body = write_call(key or (os.urandom(16) if action.keyed else b""), request)
        if self.body_bytes_max is not None and len(body) > self.body_bytes_max:
            # Not left to the owner: it closes the connection of a frame that is too long, and with it the client's holdings.
            hint = "send less in one call, or raise service.body_bytes_max at the owner"
            raise InvalidInput("the call is too long", hint=hint, bytes=len(body), max=self.body_bytes_max)
        trace = current_traceparent()
        headers = [*self._headers, (TRACE_HEADER.encode(), trace.encode())] if trace else self._headers

        def attempt(client: Any, seconds: float) -> Any:
            if isinstance(client, Carrier):
                return read_answer(client.call(name, trace, body, min(seconds, attempt_seconds)), action.answer)
            options = flight.FlightCallOptions(timeout=min(seconds, attempt_seconds), headers=headers)
            answer = b"".join([bytes(part.body) for part in client.do_action(flight.Action(name, body), options)])
            return read_answer(answer, action.answer)

        return self._until_answered(name, attempt, self.call_seconds if timeout is None else timeout, self._carrier)

    def _until_answered(
        self, name: str, attempt: Callable[[Any, float], R], seconds: float, connected: Callable[[], Any]
    ) -> R:
        """Repeat a call, which is harmless, with growing pauses until the deadline (rules 1 and 2). After a failed attempt, a
        call with a longer timeout has only the default time left to reach the owner."""
        deadline, pause = time.monotonic() + seconds, PAUSE_SECONDS
        while True:
            client = connected()
            try:
                return attempt(client, max(deadline - time.monotonic(), 0.001))
            except RemoteError as refused:
                if not refused.form.again:
                    raise error_of(refused.form) from None
                failure: Exception = refused
            except (CallBroken, CallTimedOut) as error:
                failure = error
            except (flight.FlightError, pa.ArrowException) as error:
                if not isinstance(error, _AGAIN):
                    raise _explained(error, self.uri) from None
                failure = error
            self._reconnect(client)
            if seconds > self.call_seconds:
                seconds = self.call_seconds
                deadline = time.monotonic() + seconds
            remaining = deadline - time.monotonic()
            if remaining <= pause:
                raise _gave_up(name, failure, self.uri, seconds) from None
            time.sleep(pause * _RANDOM.uniform(0.5, 1.0))
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def stream(self, ticket: TableTicket) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a ticket. A stream that breaks resumes after the last row that was yielded."""
        if isinstance(self._own, HttpCarrier):
            raise InvalidInput(
                "manifest tables can only be read over Flight",
                hint="run `quire serve --listen grpc://HOST:PORT` and connect to that address",
                uri=self.uri,
            )
        left, moved_at, pause = ticket.rows_max or None, time.monotonic(), PAUSE_SECONDS
        while left is None or left != 0:
            opened = self._until_answered(
                "do_get", partial(self._open_stream, ticket), self.call_seconds, self._connected
            )
            while True:
                try:
                    chunk = opened.read_chunk()
                except StopIteration:
                    return
                except (flight.FlightError, pa.ArrowException) as error:
                    self._stream_broke(error, moved_at)
                    break
                left = None if left is None else left - chunk.data.num_rows
                ticket = msgspec.structs.replace(ticket, after=chunk.app_metadata.to_pybytes(), rows_max=left or 0)
                yield chunk.data
                moved_at, pause = time.monotonic(), PAUSE_SECONDS
            time.sleep(pause * _RANDOM.uniform(0.5, 1.0))
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    def _open_stream(self, ticket: TableTicket, client: Any, _: float) -> Any:
        """Return a reader whose schema has arrived, so that an invalid ticket raises here."""
        options = flight.FlightCallOptions(timeout=STREAM_SECONDS, headers=self._headers)
        reader = client.do_get(flight.Ticket(msgspec.msgpack.encode(ticket)), options)
        _ = reader.schema
        return reader

    def _stream_broke(self, error: Exception, moved_at: float) -> None:
        """Raise, unless the stream can resume with another call: it must have progressed within the time limit of a call."""
        form = _form(error)
        if form is not None and not form.again:
            raise error_of(form) from None
        if form is None and not isinstance(error, _AGAIN):
            raise _explained(error, self.uri) from None
        if time.monotonic() - moved_at > self.call_seconds:
            raise _gave_up("do_get", error, self.uri, self.call_seconds) from None
        with self._lock:
            self._client = None


def _checked(uri: str) -> SplitResult:
    """Return the parts of an owner's address; raise if it is none."""
    try:
        parts = urlsplit(uri)
        is_good = parts.scheme in SCHEMES and bool(parts.path if parts.scheme == "grpc+unix" else parts.hostname)
        _ = parts.port
    except ValueError:
        is_good = False
    if not is_good:
        hint = "http://HOST:PORT, https://HOST:PORT, grpc+unix:///PATH, grpc://HOST:PORT or grpc+tls://HOST:PORT"
        raise InvalidInput("not the address of an owner", hint=hint, uri=uri)
    if parts.scheme in HTTP_SCHEMES and (parts.path not in ("", "/") or parts.query or parts.username is not None):
        plain = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
        hint = f'connect to {plain} and name the database in the call, as in .sqlite("shop"); a token comes from token_file=…'
        raise InvalidInput("an owner's address must be a host and a port", hint=hint)
    return parts


def _form(error: Exception) -> ErrorForm | None:
    """Return the owner's error form; `None` if the error is the transport's."""
    detail = getattr(error, "extra_info", None)
    return read_form(bytes(detail)) if detail else None


def _explained(error: Exception, uri: str) -> QuireError:
    """Translate an error of the transport; the owner's error form takes precedence."""
    if (form := _form(error)) is not None:
        return error_of(form)
    if isinstance(error, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
        return AccessDenied("the owner refused the token", hint="connect with token_file=…", uri=uri)
    return Incompatible(
        f"the server is not the owner of a quire store: {_line(error)}", hint="check the address", uri=uri
    )


def _gave_up(name: str, failure: Exception, uri: str, seconds: float) -> QuireError:
    if isinstance(failure, flight.FlightTimedOutError | CallTimedOut):
        return TimedOut(
            "the owner did not respond in time",
            hint="the call may still take effect",
            call=name,
            seconds=seconds,
            uri=uri,
        )
    if isinstance(failure, RemoteError):
        return error_of(failure.form)
    return Unavailable(
        f"the owner cannot be reached: {_line(failure)}",
        hint="check that it runs `quire serve`",
        uri=uri,
        seconds=seconds,
    )


def _line(error: Exception) -> str:
    """Return the first line of the transport's message, without its debugging tail."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.partition(" gRPC client debug context")[0].removeprefix("Flight returned ")[:200]


def _read(path: str) -> bytes:
    try:
        with translated(path, "reading a certificate"), open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, StorageFault) as error:
        raise InvalidInput("the certificate cannot be read", path=path) from error
