"""What the tests of runners run: functions that a Python worker of Spark imports, too."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.core.errors import Corruption
from quire.jobs.runner import Key, Tools

HIGH = 2**64 - 100
"""Numbers are unsigned: these would be negative as Spark has them."""


@dataclass(frozen=True)
class Words:
    """An input: words of one database."""

    db_id: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """A task that weighs something."""

    name: str
    dirty: int = 0
    page_size: int = 4_096

    @property
    def weight_bytes(self) -> int:
        return self.dirty * self.page_size


def by_length(given: Words, tools: Tools) -> Iterator[tuple[Key, str]]:
    """Split: each word under its length."""
    for word in given.words:
        if word == "bad":
            raise Corruption("a bad word", hint="take another", db_id=given.db_id)
        yield (given.db_id, len(word)), word


def gather(key: Key, task: Task | None, words: list[str], tools: Tools) -> tuple[str, list[str]]:
    """Join: the words of one length."""
    if task is not None and task.name == "refused":
        raise Corruption("a refused task", hint="take another", key=key)
    return (task.name if task else ""), sorted(words)


def numbers_of(given: Words, tools: Tools) -> Iterator[tuple[int | None, str]]:
    """Tell: each word under its length, then how many there were."""
    for word in given.words:
        if word == "bad":
            raise Corruption("a bad word", hint="take another", db_id=given.db_id)
        yield HIGH + len(word), word
    yield None, f"{len(given.words)} words"


def double(number: int, tools: Tools) -> int:
    """Run."""
    if number < 0:
        raise Corruption("a negative number", hint="take another", number=number)
    return 2 * number


def crash(number: int, tools: Tools) -> int:
    """Run: a bug."""
    raise ZeroDivisionError("a bug")


def sleep(seconds: float, tools: Tools) -> float:
    """Run: takes a while."""
    time.sleep(seconds)
    return seconds


def die_once(marker: str, tools: Tools) -> int:
    """Run: the process is killed the first time."""
    path = Path(marker)
    if not path.exists():
        path.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()
