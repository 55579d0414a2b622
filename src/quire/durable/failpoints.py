"""Named points in the code where a test can make the process die, fail or wait.

Code at a point calls `hit("package.step.before")`; with nothing armed, that is one check of an empty dict. A script defines
what happens at each successive hit: terms joined by `->`, each `action` or `N*action`. A counted term applies to N hits, an
uncounted one to all remaining hits; after the last term nothing happens. Actions: `off` · `kill` (SIGKILL to this process) ·
`raise:ENOSPC` (an `OSError` with that errno) · `sleep:20` (milliseconds) · in code also any callable, which receives the
point's name. `*` matches every point: `armed("*", "4*off->kill")` dies at the fifth hit of any point.

`QUIRE_FAILPOINTS="name=kill;other=2*off->raise:EIO"` arms points at import, which is how a test reaches a child process.

Threads: any; counting and taking a term are done under one lock, the action itself runs outside it. Raises `InvalidConfig` for
a script that does not parse, and at a point whatever its action raises.

    >>> with armed("demo.step", "1*off->raise:ENOSPC"):
    ...     hit("demo.step")
    ...     hit("demo.step")
    Traceback (most recent call last):
        ...
    OSError: [Errno 28] failpoint demo.step: No space left on device
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.core.errors import InvalidConfig

VARIABLE = "QUIRE_FAILPOINTS"
EVERY = "*"

Action = Callable[[str], None]
_TERM = re.compile(r"(?:([0-9]{1,9})\*)?([a-z]+)(?::([A-Za-z0-9]+))?")
_HINT = "a script is like `kill`, `raise:ENOSPC`, `sleep:20` or `3*off->kill`"


class _FailpointScript:
    """The remaining terms at one point; accessed only under `_lock`."""

    __slots__ = ("_terms",)

    def __init__(self, terms: list[tuple[int | None, Action]]) -> None:
        self._terms = terms

    def take(self) -> Action | None:
        if not self._terms:
            return None
        count, action = self._terms[0]
        if count is not None:
            if count <= 1:
                self._terms.pop(0)
            else:
                self._terms[0] = (count - 1, action)
        return action


_lock = threading.Lock()
_armed: dict[str, _FailpointScript] = {}
_hits: Counter[str] = Counter()


def hit(name: str) -> None:
    """Run the action armed for `name`, normally none."""
    if _armed:
        _act(name)


def _act(name: str) -> None:
    with _lock:
        _hits[name] += 1
        actions = [script.take() for key in (name, EVERY) if (script := _armed.get(key)) is not None]
    for action in actions:
        if action is not None:
            action(name)


@contextmanager
def armed(name: str, script: str | Action) -> Iterator[None]:
    """Arm a point for the duration of a block; an outer script for the same point is restored afterwards."""
    new = _FailpointScript([(None, script)] if callable(script) else _parse(name, script))
    with _lock:
        former = _armed.get(name)
        _armed[name] = new
    try:
        yield
    finally:
        with _lock:
            if former is None:
                _armed.pop(name, None)
            else:
                _armed[name] = former


@contextmanager
def recording() -> Iterator[None]:
    """Count hits from zero for the duration of a block, without any action; read the counts with `hits`."""
    with _lock:
        _hits.clear()
    with armed(EVERY, "off"):
        yield


def hits() -> dict[str, int]:
    """Return how often each point was hit while any point was armed, in order of first hit."""
    with _lock:
        return dict(_hits)


def arm_from(text: str) -> None:
    """Arm the points listed in `text`, the value of `QUIRE_FAILPOINTS`, for the life of the process."""
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, script = entry.partition("=")
        if not equals or not name.strip():
            raise InvalidConfig("a failpoint entry is name=script", hint=_HINT, entry=entry)
        terms = _parse(name.strip(), script.strip())
        with _lock:
            _armed[name.strip()] = _FailpointScript(terms)


def _parse(name: str, script: str) -> list[tuple[int | None, Action]]:
    terms: list[tuple[int | None, Action]] = []
    for text in script.split("->"):
        match = _TERM.fullmatch(text.strip())
        action = match and _action(match[2], match[3])
        if match is None or action is None:
            raise InvalidConfig("a failpoint script does not parse", hint=_HINT, name=name, term=text)
        count = int(match[1]) if match[1] is not None else None
        if count != 0:
            terms.append((count, action))
    return terms


def _action(verb: str, argument: str | None) -> Action | None:
    if verb == "off" and argument is None:
        return _off
    if verb == "kill" and argument is None:
        return _kill
    if verb == "sleep" and argument is not None and argument.isascii() and argument.isdigit():
        seconds = int(argument) / 1000
        return lambda _name: time.sleep(seconds)
    number = getattr(errno, argument, None) if verb == "raise" and argument else None
    if not isinstance(number, int):
        return None
    return lambda name: _raise(number, name)


def _off(_name: str) -> None:
    pass


def _kill(_name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(number: int, name: str) -> None:
    raise OSError(number, f"failpoint {name}: {os.strerror(number)}")


arm_from(os.environ.get(VARIABLE, ""))
