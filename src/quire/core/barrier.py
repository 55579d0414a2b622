"""Archive mode `sync`: a call that changes the store returns only when the bucket has the change (A9).

`@changes` and `@may_change` mark public methods without wrapping them, so a store in another mode pays nothing. A `Barrier`
covers an instance: its marked methods then wait before they return.

Rules
  1. The outermost call of a thread waits, once, after everything inside it has returned: no lock is held by then.
  2. Quire's own threads, whose names begin with "quire-", never wait: they acknowledge nothing to a caller.
  3. A call that raises does not wait, nor does one with `sync=False`, which does not promise durability either.

Threads: any. Raises what the wait raises (`NotArchived`, `StoreFenced`); the change is on the local disk nevertheless.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

THREAD_PREFIX = "quire-"
"""The prefix of the names of quire's own threads."""
_MARK = "__changes__"

Method = TypeVar("Method", bound=Callable[..., Any])


def changes(method: Method) -> Method:
    """Mark a public method that changes the store."""
    setattr(method, _MARK, True)
    return method


def may_change(method: Method) -> Method:
    """Mark a public method that waits only if it calls a marked one, such as one that creates a database if it is missing."""
    setattr(method, _MARK, False)
    return method


def marked(kind: type[Any]) -> tuple[tuple[str, bool], ...]:
    """Return (name, whether it always changes the store) for the marked methods of a class."""
    methods = ((name, getattr(kind, name, None)) for name in dir(kind))
    return tuple((name, getattr(method, _MARK)) for name, method in methods if hasattr(method, _MARK))


def refuse_changes(instance: object, refusal: Callable[[str], Exception], *, but: Collection[str] = ()) -> None:
    """Make the instance's methods that always change the store raise, for a store that is a read-only copy.

    `refusal` returns the error for a method name; methods named in `but` are left alone.
    """

    def refused(name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise refusal(name)

        return refuse

    for name, always in marked(type(instance)):
        if always and name not in but:
            setattr(instance, name, refused(name))


class _ThreadState(threading.local):
    depth = 0
    is_changed = False


class Barrier:
    """Delays the acknowledgement of a store's changes until they are in the bucket."""

    def __init__(self, wait: Callable[[], None]) -> None:
        """`wait` returns when every change made before the call is in the bucket."""
        self._wait = wait
        self._current = _ThreadState()

    def cover(self, *instances: object) -> None:
        """Make the marked methods of these instances wait."""
        for instance in instances:
            for name, always in marked(type(instance)):
                setattr(instance, name, self._covered(getattr(instance, name), always))

    def _covered(self, method: Callable[..., Any], always: bool) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.call():
                answer = method(*args, **kwargs)
                if always and kwargs.get("sync", True):
                    self._current.is_changed = True
            return answer

        return call

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run the block as one call: changes noted inside are awaited at its end."""
        current = self._current
        current.depth += 1
        try:
            yield
        except BaseException:
            if current.depth == 1:
                current.is_changed = False
            raise
        finally:
            current.depth -= 1
        # Not in the `finally`: a call that raises does not wait.
        self.settle()

    def note(self) -> None:
        """Record that this thread changed something; the code that acknowledges the change calls `settle`."""
        self._current.is_changed = True

    def settle(self) -> None:
        """Wait for the changes that this thread has noted, unless an enclosing call will do so."""
        current = self._current
        if not current.is_changed or current.depth:
            return
        # Before the wait: if that raises, the next call must not wait for this change again.
        current.is_changed = False
        if not threading.current_thread().name.startswith(THREAD_PREFIX):
            self._wait()

    def hold(self) -> None:
        """Record a change and wait for it, unless an enclosing call will. Called before the change is acknowledged."""
        self._current.is_changed = True
        self.settle()
