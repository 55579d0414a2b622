"""Admission control: who may call, and how many calls run at once.

Terms
  admission   what a caller may do: everything through the Unix socket; over the network, what its token allows
  limit       a bounded number of places; a caller that finds none waits briefly and is then refused as `Overloaded`

Rules
  1. The version, kind and token of a call are checked before anything else. Every refusal is counted and emitted as an event,
     with the peer where it is known and never with the token that was sent.
  2. Refusals are logged at most `LOGGED_PER_SECOND` times a second, with the number of those left out: a flood of bad calls
     must not become a flood of log.
  3. Long polls and streams have separate limits: however many there are, other calls find places.

Threads: any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow.flight as flight

from quire.core.clock import Clock
from quire.core.errors import AccessDenied, InvalidInput, Overloaded, QuireError, Unauthenticated
from quire.core.events import emit
from quire.service.grants import Grant
from quire.service.signed_tokens import AcceptedTokens
from quire.service.tokens import bearer
from quire.service.wire import CLIENT_HEADER, TOKEN_HEADER, TRACE_HEADER, VERSION_HEADER, version_error, write_form

MIDDLEWARE = "quire"
LOGGED_PER_SECOND = 20

OFFERED = frozenset({flight.FlightMethod.DO_ACTION, flight.FlightMethod.DO_GET, flight.FlightMethod.LIST_ACTIONS})
"""Flight has more methods. The others are refused here, because the transport would answer some of them with a traceback."""


class CallLimit:
    """A bounded number of places (rule 3)."""

    def __init__(self, name: str, places: int, wait_seconds: float) -> None:
        self._name = name
        self._places = places
        self._wait_seconds = wait_seconds
        self._free = threading.Semaphore(places)
        # guarded by _lock
        self._lock = threading.Lock()
        self.now = 0
        self.busy = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Take a place for the duration of a block."""
        if not self._free.acquire(timeout=self._wait_seconds):
            with self._lock:
                self.busy += 1
            raise Overloaded(
                f"the owner is busy: the limit for {self._name} is reached", hint="try again later", places=self._places
            )
        with self._lock:
            self.now += 1
        try:
            yield
        finally:
            with self._lock:
                self.now -= 1
            self._free.release()


class Refusals:
    """Counts and logs refused calls (rules 1 and 2)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.count = 0
        self._second = 0
        self._logged = 0
        self._left_out = 0

    def add(self, error: QuireError, **fields: Any) -> None:
        """Count a refused call and log it."""
        with self._lock:
            self.count += 1
            second = int(self._clock.monotonic())
            if second != self._second:
                self._second, self._logged = second, 0
            if self._logged >= LOGGED_PER_SECOND:
                self._left_out += 1
                return
            self._logged += 1
            left_out, self._left_out = self._left_out, 0
        if left_out:
            fields["left_out"] = left_out
        emit("warning", "service.refused", reason=error.what, **fields)


class Admission(flight.ServerMiddleware):  # type: ignore[misc]
    """The rights and the trace of the caller of one call."""

    def __init__(self, grant: Grant, trace: str = "", client: str = "") -> None:
        self.grant = grant
        self.trace = trace
        self.client = client
        """The id that the client sends: its holdings at the owner are found by it."""


class FlightGate(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Checks every call first. Without tokens every caller that gets this far is admitted: a file permission admitted it."""

    def __init__(self, tokens: AcceptedTokens | None, refusals: Refusals, *, copy_of: str = "") -> None:
        """`copy_of` is the URL of an archive of which the store is a copy: then no caller may change anything."""
        self._tokens = tokens
        self._refusals = refusals
        self._copy_of = copy_of

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> Admission:
        """Check version, kind and token of a call before anything else; count and report refusals (rule 1)."""
        sent = {name.lower(): str(values[0]) for name, values in headers.items() if values}
        method = str(getattr(info.method, "name", info.method)).lower()
        if (wrong := version_error(sent.get(VERSION_HEADER, ""))) is not None:
            self._refusals.add(wrong, method=method)
            raise flight.FlightServerError(wrong.what, extra_info=write_form(wrong))
        if info.method not in OFFERED:
            wrong_call = InvalidInput(
                "the owner does not offer this call", hint="see docs/formats/wire.md", method=method
            )
            self._refusals.add(wrong_call, method=method)
            raise flight.FlightServerError(wrong_call.what, extra_info=write_form(wrong_call))
        if self._tokens is None:
            return self.admitted(sent.get(TRACE_HEADER, ""), sent.get(CLIENT_HEADER, ""))
        try:
            if TOKEN_HEADER not in sent:
                raise Unauthenticated("the call has no token", hint="connect with token_file=…")
            grant = self._tokens.grant(bearer(sent[TOKEN_HEADER]))
        except Unauthenticated as denied:
            self._refusals.add(denied, method=method)
            raise flight.FlightUnauthenticatedError(denied.what, extra_info=write_form(denied)) from None
        return Admission(grant, sent.get(TRACE_HEADER, ""), sent.get(CLIENT_HEADER, ""))

    @property
    def is_local(self) -> bool:
        """Whether callers come through the Unix socket."""
        return self._tokens is None

    def admitted(self, trace: str, client: str) -> Admission:
        """Return the admission of a caller through the Unix socket: everything, or reading if the store is a copy."""
        return Admission(Grant.READ if self._copy_of else Grant.ADMIN, trace, client)

    def check_store(self, context: Any, what: str, *, writes: bool) -> None:
        """Raise unless the caller may read the whole store, or administer it."""
        grant = context.get_middleware(MIDDLEWARE).grant
        self._check(context, what, grant.check_admin if writes else grant.check_read_all, writes)

    def check_database(self, context: Any, what: str, database: str, *, writes: bool) -> None:
        """Raise unless the caller may read a database, or write it."""
        grant = context.get_middleware(MIDDLEWARE).grant
        self._check(context, what, partial(grant.check, database, write=writes), writes)

    def _check(self, context: Any, what: str, check: Callable[[], None], writes: bool) -> None:
        try:
            check()
        except (AccessDenied, Unauthenticated) as error:
            denied: QuireError = error
            if writes and self._copy_of:
                hint = "write to the store's owner: option `store` with its directory or address"
                denied = AccessDenied("this is a read-only copy of an archive", hint=hint, url=self._copy_of)
            self._refusals.add(denied, call=what, peer=context.peer())
            raise denied from None

    def need_socket(self, context: Any, what: str) -> None:
        """Raise `AccessDenied` unless the caller came through the Unix socket."""
        if self._tokens is not None:
            denied = AccessDenied(
                f"{what} is only allowed on the owner's machine", hint="use the store's socket", call=what
            )
            self._refusals.add(denied, call=what, peer=context.peer())
            raise denied
