"""The bytes of calls, answers and errors between a client and an owner. docs/formats/wire.md describes them.

Terms
  call     (idempotency key, request): the body of a Flight action, as msgpack
  answer   one byte (0 good, 1 an error) and a msgpack body, cut into parts of at most 1 MiB
  form     an error as a value: class name, text, hint, coordinates, and whether the same call may be sent again at once

Rules
  1. Decoding never runs code: msgpack of declared types only, no pickle.
  2. An error is raised at the client as the class it had at the owner; for an unknown class a `QuireError` names it. Tracebacks
     stay at the owner.
  3. Fields are only appended, with defaults; any other change is a new `WIRE_VERSION`, which each side checks.

Threads: any; pure functions. `read_call` and `read_answer` raise `InvalidInput` and `Incompatible` for bytes that they cannot
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from quire.core import errors
from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import Incompatible, InvalidInput, QuireError
from quire.core.limits import MIB

WIRE_VERSION = 1
VERSION_HEADER = "x-quire-wire"
CLIENT_HEADER = "x-quire-client"
"""Random, the same with every call of a client: it identifies the holdings of the client at the owner."""
TOKEN_HEADER = "authorization"
TRACE_HEADER = "traceparent"
"""The trace of the caller, as in W3C Trace Context."""

PART_BYTES = MIB
"""Answers are sent in messages of this size, to bound the transport's memory however long an answer is."""

GOOD, BAD = b"\x00", b"\x01"

TEXT_CHARS_MAX = 2_000
"""Texts of an error are cut to this length: those of a broken stream travel in a header, and headers have 8 KiB."""

WHERE_MAX = 16

T = TypeVar("T")


class Call(msgspec.Struct, frozen=True, array_like=True):
    """The body of an action."""

    key: bytes
    """16 bytes that make the call safe to repeat (M11); empty where repeating is harmless."""
    request: msgspec.Raw


class ErrorForm(msgspec.Struct, frozen=True, array_like=True):
    """An error as transmitted."""

    kind: str
    what: str
    hint: str = ""
    where: dict[str, Any] = {}
    again: bool = False
    """The owner is closing, or was never reached: nothing was done, and the call may be sent again at once."""


# ── calls ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
_encode = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(Call).decode
_decode_form = msgspec.msgpack.Decoder(ErrorForm).decode


def write_call(key: bytes, request: msgspec.Struct) -> bytes:
    """Return the body of an action."""
    return _encode(Call(key, msgspec.Raw(_encode(request))))


def read_call(body: bytes, kind: type[T]) -> tuple[bytes, T]:
    """Return (key, request) of an action's body."""
    try:
        call = _decode_call(body)
        request = msgspec.msgpack.decode(call.request, type=described(kind))
    except UNDECODABLE as error:
        raise InvalidInput(f"the call cannot be read: {error}", request=kind.__name__, bytes=len(body)) from error
    if call.key and len(call.key) != 16:
        raise InvalidInput("an idempotency key must be 16 bytes", bytes=len(call.key))
    return call.key, request


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def write_answer(value: Any) -> Iterator[bytes]:
    """Return a successful answer, in parts."""
    return _parts(GOOD + _encode(value))


def write_error(error: QuireError, *, again: bool = False) -> Iterator[bytes]:
    """Return an error answer, in parts."""
    return _parts(BAD + _encode(form_of(error, again=again)))


def _parts(whole: bytes) -> Iterator[bytes]:
    view = memoryview(whole)
    for start in range(0, len(whole), PART_BYTES):
        yield bytes(view[start : start + PART_BYTES])


class RemoteError(Exception):  # never leaves the client's channel
    """An answer that is an error."""

    def __init__(self, form: ErrorForm) -> None:
        super().__init__(form.what)
        self.form = form


def read_answer(whole: bytes, kind: Any) -> Any:
    """Return the value of an answer; raise `RemoteError` if it is an error."""
    if whole[:1] == BAD:
        raise RemoteError(read_form(whole[1:]))
    try:
        if whole[:1] != GOOD:
            raise msgspec.DecodeError("it starts with neither 0 nor 1")
        return msgspec.msgpack.decode(memoryview(whole)[1:], type=described(kind))
    except UNDECODABLE as error:
        raise Incompatible(
            f"the owner's answer cannot be read: {error}", hint="use the same version of quire on both sides"
        ) from error


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def form_of(error: QuireError, *, again: bool = False) -> ErrorForm:
    """Return the form of an error; coordinates of types that msgpack does not have become text."""
    where = {name: _portable(value) for name, value in list(error.where.items())[:WHERE_MAX]}
    return ErrorForm(type(error).__name__, _text(error.what), _text(error.hint), where, again)


def _text(text: str) -> str:
    """Return the beginning of a text. Surrogates, of a path or a name that is not UTF-8, are escaped: msgpack has none."""
    return text[:TEXT_CHARS_MAX].encode("utf-8", "backslashreplace").decode()[:TEXT_CHARS_MAX]


def _portable(value: Any) -> Any:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, bytes):
        return value[:TEXT_CHARS_MAX]
    if isinstance(value, list | tuple | set | frozenset) and len(value) <= WHERE_MAX:
        return [_portable(item) for item in value]
    return _text(str(value))


def write_form(error: QuireError, *, again: bool = False) -> bytes:
    """Return an error as the detail of a broken stream."""
    return _encode(form_of(error, again=again))


def read_form(body: bytes) -> ErrorForm:
    """Return the error in an answer or in the detail of a broken stream."""
    try:
        return _decode_form(body)
    except UNDECODABLE:
        return ErrorForm("QuireError", "the owner refused with an unknown error")


def error_of(form: ErrorForm) -> QuireError:
    """Return the error that a form describes (rule 2)."""
    kind = getattr(errors, form.kind, None)
    where = {str(name): value for name, value in form.where.items() if name not in ("what", "hint", "self")}
    if isinstance(kind, type) and issubclass(kind, QuireError):
        return kind(form.what, hint=form.hint, **where)
    return QuireError(form.what, hint=form.hint, **{**where, "kind": form.kind})


def version_error(theirs: str) -> Incompatible | None:
    """Return an error if the peer's version is not ours, otherwise `None`; `theirs` is empty if it sent none."""
    if theirs == str(WIRE_VERSION):
        return None
    spoken = f"version {theirs[:20]}" if theirs else "no version"
    return Incompatible(
        f"the other side uses {spoken} of quire's protocol, this one version {WIRE_VERSION}",
        hint="use the same version of quire on both sides; other Flight clients send the header x-quire-wire",
        theirs=theirs[:20],
        ours=WIRE_VERSION,
    )
