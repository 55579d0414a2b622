"""Mode `sync` of the archive: a call that changed something returns when the bucket has the change (A9).

`@changes` and `@may_change` mark the public methods of a class and leave them as they are, so that nothing is paid where nobody
waits. A `Barrier` covers an instance: its marked methods then wait at their end.

Rules
  1. The outermost call of a thread waits, once, after everything inside it has returned: no lock is held by then.
  2. Threads of quire, whose names begin with "quire-", never wait: they acknowledge nothing to anybody.
  3. A call that raises does not wait, nor does one with `sync=False`: it promises no durability either.

Threads: any. Raises what the wait raises (`NotArchived`, `StoreFenced`): the change is on this disk nevertheless.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

OURS = "quire-"
"""How the names of quire's own threads begin."""
_MARK = "__changes__"

Method = TypeVar("Method", bound=Callable[..., Any])


def changes(method: Method) -> Method:
    """Mark a public method that changes the store."""
    setattr(method, _MARK, True)
    return method


def may_change(method: Method) -> Method:
    """Mark a public method that waits only if a marked one was called inside it: one that makes a database if there is none."""
    setattr(method, _MARK, False)
    return method


def marked(kind: type[Any]) -> tuple[tuple[str, bool], ...]:
    """(name, whether it always changes something) of the marked methods of a class."""
    methods = ((name, getattr(kind, name, None)) for name in dir(kind))
    return tuple((name, getattr(method, _MARK)) for name, method in methods if hasattr(method, _MARK))


def refuse_changes(instance: object, refusal: Callable[[str], Exception], *, but: Collection[str] = ()) -> None:
    """Have the methods of an instance that always change something raise: of a store that is a copy, to be read.

    `refusal` makes the error of a method; methods named in `but` stay as they are.
    """

    def refused(name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise refusal(name)

        return refuse

    for name, always in marked(type(instance)):
        if always and name not in but:
            setattr(instance, name, refused(name))


class _OfThread(threading.local):
    depth = 0
    is_changed = False


class Barrier:
    """Stands between the changes of one store and their acknowledgement."""

    def __init__(self, wait: Callable[[], None]) -> None:
        """`wait` returns when everything that was done before it was called is in the bucket."""
        self._wait = wait
        self._current = _OfThread()

    def cover(self, *instances: object) -> None:
        """Have the marked methods of these instances wait."""
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
        """A call: what is changed inside is waited for at its end."""
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
        self.settle()

    def note(self) -> None:
        """Something was changed; whoever acknowledges it calls `settle`."""
        self._current.is_changed = True

    def settle(self) -> None:
        """Wait for what this thread has noted, unless a call around this one will."""
        current = self._current
        if not current.is_changed or current.depth:
            return
        current.is_changed = False
        if not threading.current_thread().name.startswith(OURS):
            self._wait()

    def hold(self) -> None:
        """A change is about to be acknowledged."""
        self._current.is_changed = True
        self.settle()
