"""Python functions that SQLite calls: their errors are translated as in sqlite3, and their results are checked.

An exception in a callback fails the statement with a message that names the kind of callback. The exception itself is shown,
as an unraisable one, only after `enable_callback_tracebacks(True)`.

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
    """Show exceptions of callbacks on stderr, or pass them to `sys.unraisablehook`."""
    _SHOWN.enabled = bool(enable)


def show(callback: object, error: BaseException) -> None:
    """Report that a callback has failed, if that is enabled."""
    if not _SHOWN.enabled:
        return
    hook = sys.unraisablehook
    if hook is sys.__unraisablehook__:  # it accepts no object that Python code can create
        sys.stderr.write(f"Exception ignored in: {callback!r}\n")
        traceback.print_exception(error)
        return
    details = {"exc_type": type(error), "exc_value": error, "exc_traceback": error.__traceback__}
    hook(SimpleNamespace(**details, err_msg=None, object=callback))


def _failure(error: BaseException, message: str) -> BaseException:
    """Return the error that the statement fails with."""
    if isinstance(error, MemoryError):
        return MemoryError()
    return DataError("string or blob too big") if isinstance(error, OverflowError) else OperationalError(message)


def _checked(value: Any) -> Any:
    """Return a result that SQLite can store; raise sqlite3's error for any other."""
    if isinstance(value, str):
        value.encode()  # surrogates
    elif isinstance(value, int):
        if value not in _INT64:
            raise OverflowError("Python int too large to convert to SQLite INTEGER")
    elif value is not None and not isinstance(value, float | bytes) and not memoryview(value).c_contiguous:
        raise BufferError("memoryview: underlying buffer is not C-contiguous")
    return value


def scalar(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function for `create_function`."""

    def call(*arguments: Any) -> Any:
        try:
            return _checked(function(*arguments))
        except Exception as error:
            show(function, error)
            raise _failure(error, "user-defined function raised exception") from error

    return call


class Aggregate:
    """One use of an aggregate or window function. Its object is created with the first row: without any the result is NULL."""

    def __init__(self, made_by: Callable[[], Any]) -> None:
        self._made_by = made_by
        self._object: Any = None
        self._failed = False
        self._slides = False

    def step(self, *arguments: Any) -> None:
        """Add a row."""
        if self._object is None and not self._failed:
            try:
                self._object = self._made_by()
            except Exception as error:
                self._fail(error, "__init__", "raised error")
        self._call("step", *arguments)

    def inverse(self, *arguments: Any) -> None:
        """Remove a row, at the other end of a window."""
        self._call("inverse", *arguments)

    def value(self) -> Any:
        """Return the result for the rows in the window."""
        self._slides = True
        return self._call("value")

    def final(self) -> Any:
        """Return the result for all rows. At the end of a window SQLite ignores the result, and errors are ignored too."""
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
    """Wrap a function for `create_collation`: texts compare as equal if it fails or returns no number."""

    def compare(one: str, other: str) -> int:
        try:
            order: int = function(one, other)
            return (order > 0) - (order < 0)
        except Exception as error:
            show(function, error)
            return 0

    return compare


def authorizer(function: Callable[..., Any]) -> Callable[..., int]:
    """Wrap a function for `set_authorizer`: the action is denied if it fails or returns no valid number."""

    def decide(*arguments: Any) -> int:
        try:
            verdict = function(*arguments)
        except Exception as error:
            show(function, error)
            return apsw.SQLITE_DENY
        return verdict if isinstance(verdict, int) and verdict in _INT32 else apsw.SQLITE_DENY

    return decide


def progress(function: Callable[[], Any]) -> Callable[[], bool]:
    """Wrap a function for `set_progress_handler`: the statement is interrupted if it fails."""

    def go_on() -> bool:
        try:
            return bool(function())
        except Exception as error:
            show(function, error)
            return True

    return go_on


def trace(function: Callable[[str], Any]) -> Callable[[Callable[[], str | None], str], None]:
    """Wrap a function for `set_trace_callback`: it gets the SQL with its parameters, or without if that is too long."""

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
