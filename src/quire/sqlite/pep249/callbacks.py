"""Functions of Python's that SQLite calls: their errors become what sqlite3 makes of them, and their results are checked.

An exception in a callback fails the statement with a sentence that names the callback's kind; the exception itself is shown,
as one that nobody can catch, only after `enable_callback_tracebacks(True)`.

Threads: as the connection that calls them.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import apsw

from quire.sqlite.pep249.errors import DataError, OperationalError

_INT64 = range(-(1 << 63), 1 << 63)
_INT32 = range(-(1 << 31), 1 << 31)
_SHOWN = SimpleNamespace(enabled=False)


def enable_callback_tracebacks(enable: bool, /) -> None:
    """Show exceptions of callbacks on stderr, or to `sys.unraisablehook`."""
    _SHOWN.enabled = bool(enable)


def show(callback: object, error: BaseException) -> None:
    """Say that a callback has failed, if somebody has asked for it."""
    if not _SHOWN.enabled:
        return
    hook = sys.unraisablehook
    if hook is sys.__unraisablehook__:  # it takes nothing that Python code can make
        sys.stderr.write(f"Exception ignored in: {callback!r}\n")
        traceback.print_exception(error)
        return
    details = {"exc_type": type(error), "exc_value": error, "exc_traceback": error.__traceback__}
    hook(SimpleNamespace(**details, err_msg=None, object=callback))


def _failure(error: BaseException, message: str) -> BaseException:
    """What the statement fails with."""
    if isinstance(error, MemoryError):
        return MemoryError()
    return DataError("string or blob too big") if isinstance(error, OverflowError) else OperationalError(message)


def _checked(value: Any) -> Any:
    """A result that SQLite can hold; raises what sqlite3 meets with one that it cannot."""
    if isinstance(value, str):
        value.encode()  # surrogates
    elif isinstance(value, int):
        if value not in _INT64:
            raise OverflowError("Python int too large to convert to SQLite INTEGER")
    elif value is not None and not isinstance(value, float | bytes) and not memoryview(value).c_contiguous:
        raise BufferError("memoryview: underlying buffer is not C-contiguous")
    return value


def scalar(function: Callable[..., Any]) -> Callable[..., Any]:
    """For `create_function`."""

    def call(*arguments: Any) -> Any:
        try:
            return _checked(function(*arguments))
        except Exception as error:
            show(function, error)
            raise _failure(error, "user-defined function raised exception") from error

    return call


class Aggregate:
    """One use of an aggregate or window function. Its object is made with the first row: without any the result is NULL."""

    def __init__(self, made_by: Callable[[], Any]) -> None:
        self._made_by = made_by
        self._object: Any = None
        self._failed = False
        self._slides = False

    def step(self, *arguments: Any) -> None:
        """A row more."""
        if self._object is None and not self._failed:
            try:
                self._object = self._made_by()
            except Exception as error:
                self._fail(error, "__init__", "raised error")
        self._call("step", *arguments)

    def inverse(self, *arguments: Any) -> None:
        """A row less, at the other end of a window."""
        self._call("inverse", *arguments)

    def value(self) -> Any:
        """Of the rows in the window."""
        self._slides = True
        return self._call("value")

    def final(self) -> Any:
        """Of all rows. SQLite has no use for what the end of a window returns, nor for its errors."""
        if self._object is None or self._failed:
            return None
        try:
            return self._call("finalize")
        except OperationalError:
            if self._slides:
                return None
            raise

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            method = getattr(self._object, name)
        except AttributeError as error:
            self._fail(error, name, "not defined")
        try:
            return _checked(method(*arguments))
        except Exception as error:
            self._fail(error, name, "raised error")

    def _fail(self, error: Exception, name: str, what: str) -> Any:
        self._failed = True
        show(self._made_by, error)
        raise _failure(error, f"user-defined aggregate's '{name}' method {what}") from error


def collation(function: Callable[[str, str], int]) -> Callable[[str, str], int]:
    """For `create_collation`: what fails, or is no number, compares as equal."""

    def compare(one: str, other: str) -> int:
        try:
            order: int = function(one, other)
            return (order > 0) - (order < 0)
        except Exception as error:
            show(function, error)
            return 0

    return compare


def authorizer(function: Callable[..., Any]) -> Callable[..., int]:
    """For `set_authorizer`: what fails, or is no number of SQLite's, denies."""

    def decide(*arguments: Any) -> int:
        try:
            verdict = function(*arguments)
        except Exception as error:
            show(function, error)
            return apsw.SQLITE_DENY
        return verdict if isinstance(verdict, int) and verdict in _INT32 else apsw.SQLITE_DENY

    return decide


def progress(function: Callable[[], Any]) -> Callable[[], bool]:
    """For `set_progress_handler`: what fails interrupts."""

    def go_on() -> bool:
        try:
            return bool(function())
        except Exception as error:
            show(function, error)
            return True

    return go_on


def trace(function: Callable[[str], Any]) -> Callable[[Callable[[], str | None], str], None]:
    """For `set_trace_callback`: it is given the SQL with its parameters, or, if that is too long, without."""

    def tell(expanded: Callable[[], str | None], sql: str) -> None:
        try:
            text = expanded()
        except (apsw.Error, MemoryError):
            text = None
        try:
            if text is None:
                show(function, DataError("Expanded SQL string exceeds the maximum string length"))
            function(sql if text is None else text)
        except Exception as error:
            show(function, error)

    return tell
