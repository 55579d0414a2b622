"""One client's connection to an owner: sends calls until they are answered, or their time is over.

Terms
  call      what the caller asked for; it has a deadline and, if it changes something, an idempotency key
  attempt   one try of it over the wire

Rules
  1. A call is sent again only if that can do no harm: it carries a key, or repeating it changes nothing (M11). All of ours are
     one or the other.
  2. An owner that cannot be reached, goes away or restarts is tried again, with pauses that double and differ, until the
     deadline: then `Unavailable`. An answer that does not come in time is `TimedOut`: the call may still be done.
  3. Every failed attempt is followed by a new connection: the transport's own would wait for longer and longer.
  4. Owner and client say their versions with every call; who does not understand the other says so.
  5. A call carries the trace that its caller is in.
  6. A channel belongs to its process: after fork() the child makes a connection of its own.
  7. On the owner's machine calls travel as frames (`frames.py`), to an address of HTTP over HTTP (`http_carrier.py`), elsewhere
     by Flight, which alone brings Arrow.

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
from quire.core.tracing import carried
from quire.durable.files import translated
from quire.service.carrier import CallBroken, CallTimedOut, Carrier
from quire.service.frame_carrier import FrameCarrier
from quire.service.frames import CLIENT_BYTES
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
"""How long a call may take, all attempts together, unless it says otherwise."""

ATTEMPT_SECONDS = 10.0
"""How long one attempt may take: an answer that was lost without a word must not use up the whole call."""

PAUSE_SECONDS = 0.02
PAUSE_SECONDS_MAX = 1.0

STREAM_SECONDS = 60.0
"""A stream goes on with another call after this long."""

SCHEMES = ("grpc", "grpc+tls", "grpc+unix", *HTTP_SCHEMES)

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
"""What a broken connection looks like from here; a server that meets a bug of its own says so in words."""

R = TypeVar("R")


class Channel:
    """See the rules above."""

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

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """End the connection; calls under way fail. A second time: nothing."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None and self._pid == os.getpid():
            client.close()
        if self._own is not None:
            self._own.close()

    @property
    def is_connected(self) -> bool:
        """Whether the owner knows by a connection that this client lives."""
        return isinstance(self._own, FrameCarrier) and self._own.is_there()

    def _carrier(self) -> Any:
        """What the next call travels with (rule 7)."""
        if self._own is not None and not self._closed and self._own.is_there():
            return self._own
        return self._connected()

    def _connected(self) -> Any:
        with self._lock:
            if self._closed:
                raise StoreClosed("the client is closed", hint="connect again", uri=self.uri)
            if self._pid != os.getpid():  # rule 6: what the parent has is not touched
                self._pid, self._client = os.getpid(), None
            if self._client is None:
                try:
                    self._client = flight.FlightClient(
                        self._location, tls_root_certs=self._roots, generic_options=_OPTIONS
                    )
                except pa.ArrowException as error:
                    raise InvalidInput(f"cannot connect: {_line(error)}", uri=self.uri) from error
            return self._client

    def _reconnect(self, failed: Any) -> None:
        """Connect anew after a failed attempt. The old connection is left to those who still use it, and closes itself
        with the last of them."""
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
        """The answer to an action, by its name."""
        from quire.service.messages import ACTIONS  # of a manifest's values: executors have none

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
        """The answer to an action. `key` is the caller's own idempotency key, where the action takes one."""
        name = action.name
        body = write_call(key or (os.urandom(16) if action.keyed else b""), request)
        trace = carried()
        headers = [*self._headers, (TRACE_HEADER.encode(), trace.encode())] if trace else self._headers

        def attempt(client: Any, seconds: float) -> Any:
            if isinstance(client, Carrier):
                return read_answer(client.call(name, trace, body, min(seconds, attempt_seconds)), action.answer)
            options = flight.FlightCallOptions(timeout=min(seconds, attempt_seconds), headers=headers)
            whole = b"".join([bytes(part.body) for part in client.do_action(flight.Action(name, body), options)])
            return read_answer(whole, action.answer)

        return self._until_answered(name, attempt, self.call_seconds if timeout is None else timeout, self._carrier)

    def _until_answered(
        self, name: str, attempt: Callable[[Any, float], R], seconds: float, connected: Callable[[], Any]
    ) -> R:
        """Repeat a call that can do no harm, with growing pauses, until the deadline (rules 1 and 2). A call that may take
        longer than others has their time to reach an owner that was lost."""
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
            rest = deadline - time.monotonic()
            if rest <= pause:
                raise _gave_up(name, failure, self.uri, seconds) from None
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def stream(self, ticket: TableTicket) -> Iterator[pa.RecordBatch]:
        """The batches of a ticket. A stream that breaks goes on behind the last row that was given."""
        if isinstance(self._own, HttpCarrier):
            raise InvalidInput(
                "tables of the manifest travel as Arrow, by Flight only",
                hint="have the owner listen for it, `quire serve --listen grpc://HOST:PORT`, and connect there",
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
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    def _open_stream(self, ticket: TableTicket, client: Any, _: float) -> Any:
        """A reader that has its schema: what is wrong with the ticket is heard here."""
        options = flight.FlightCallOptions(timeout=STREAM_SECONDS, headers=self._headers)
        reader = client.do_get(flight.Ticket(msgspec.msgpack.encode(ticket)), options)
        _ = reader.schema
        return reader

    def _stream_broke(self, error: Exception, moved_at: float) -> None:
        """Raise, unless the stream can go on with another call; it must have moved within the time that a call has."""
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
    """The parts of an owner's address."""
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
        hint = f'connect to {plain} and name the database there, as in .sqlite("shop"); a token comes from token_file=…'
        raise InvalidInput("an owner's address is a host and a port", hint=hint)
    return parts


def _form(error: Exception) -> ErrorForm | None:
    """What the owner said about an error, if it was the owner's."""
    detail = getattr(error, "extra_info", None)
    return read_form(bytes(detail)) if detail else None


def _explained(error: Exception, uri: str) -> QuireError:
    """An error of the transport as ours; what the owner said comes first."""
    if (form := _form(error)) is not None:
        return error_of(form)
    if isinstance(error, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
        return AccessDenied("the owner refused the token", hint="connect with token_file=…", uri=uri)
    return Incompatible(
        f"the other side does not answer as an owner does: {_line(error)}", hint="is this its address?", uri=uri
    )


def _gave_up(name: str, failure: Exception, uri: str, seconds: float) -> QuireError:
    if isinstance(failure, flight.FlightTimedOutError | CallTimedOut):
        return TimedOut(
            "the owner did not answer in time", hint="it may still do it", call=name, seconds=seconds, uri=uri
        )
    if isinstance(failure, RemoteError):
        return error_of(failure.form)
    return Unavailable(
        f"the owner cannot be reached: {_line(failure)}", hint="does it run `quire serve`?", uri=uri, seconds=seconds
    )


def _line(error: Exception) -> str:
    """The first words of the transport's message, without its debugging tail."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.partition(" gRPC client debug context")[0].removeprefix("Flight returned ")[:200]


def _read(path: str) -> bytes:
    try:
        with translated(path, "reading a certificate"), open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, StorageFault) as error:
        raise InvalidInput("the certificate cannot be read", path=path) from error
