"""Functions for the tests of runners, which Python workers of Spark import as well."""

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
"""Numbers are unsigned: in Spark's signed type these are negative."""


@dataclass(frozen=True)
class Words:
    """An input: words of one database."""

    db_id: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """A task with a weight."""

    name: str
    dirty: int = 0
    page_size: int = 4_096

    @property
    def weight_bytes(self) -> int:
        return self.dirty * self.page_size


def by_length(words_input: Words, tools: Tools) -> Iterator[tuple[Key, str]]:
    """Split: each word, with its length as the key."""
    for word in words_input.words:
        if word == "bad":
            raise Corruption("a bad word", hint="take another", db_id=words_input.db_id)
        yield (words_input.db_id, len(word)), word


def gather(key: Key, task: Task | None, words: list[str], tools: Tools) -> tuple[str, list[str]]:
    """Join: the words of one length."""
    if task is not None and task.name == "refused":
        raise Corruption("a refused task", hint="take another", key=key)
    return (task.name if task else ""), sorted(words)


def numbers_of(words_input: Words, tools: Tools) -> Iterator[tuple[int | None, str]]:
    """Emit each word with its length as the number, then the number of words."""
    for word in words_input.words:
        if word == "bad":
            raise Corruption("a bad word", hint="take another", db_id=words_input.db_id)
        yield HIGH + len(word), word
    yield None, f"{len(words_input.words)} words"


def double(number: int, tools: Tools) -> int:
    """Run: double a number."""
    if number < 0:
        raise Corruption("a negative number", hint="take another", number=number)
    return 2 * number


def crash(number: int, tools: Tools) -> int:
    """Run: raise an unexpected error."""
    raise ZeroDivisionError("a bug")


def sleep(seconds: float, tools: Tools) -> float:
    """Run: take some time."""
    time.sleep(seconds)
    return seconds


def die_once(marker: str, tools: Tools) -> int:
    """Run: kill the process on the first attempt."""
    path = Path(marker)
    if not path.exists():
        path.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()
