"""Starting the command line against starting Python: what a person waits for before anything is done.

Terms
  start   from the first instruction of Python to the call of the command's function: the command line is understood, its module
          loaded
  whole   the command as people run it, with what it does

Commands and `python -c pass` take turns, as processes of their own; the ratio is of medians. Bytecode is kept, as it is where
quire is installed, in a place of the benchmark's own: an environment that forbids it would measure the compiler. The promise is
for the start of every command, and for the whole of those that read, which people type most and scripts call in loops. What
others take is their work, and what they work with: the operations and the checker to own a manifest, checksums and an engine
for what is in a database, Java and a child process for the doctor.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import quire
from bench.report import Report, alternate
from quire.cli.app import app
from quire.cli.declared import Group

ROUNDS = 15
START_ROUNDS = 5
TARGET = 6.0

LIGHT = ("--help", "ls", "info", "tree", "snapshot ls shop", "jobs ls", "feed cursors")
READING = (
    "feed tail", "why shop", "audit", "retention show shop", "gc --dry-run", "manifest tables", "snapshot show shop monday",
)  # fmt: skip
OTHERS = (
    "init", "create new-{}", "snapshot create shop", "fork shop other-{}", "retention set shop --keep-last 3", "manifest check",
    "kv get cart ann", "kv put cart ann 4", "stream append clicks seen", "stream tail clicks", "doctor --no-objects",
)  # fmt: skip
"""`{}` is another number each time."""

STARTING = "import sys; from quire.cli.lane import understand; assert understand(sys.argv[1:]) is not None"


def start(report: Report, directory: Path, quick: bool) -> None:
    """Every command up to its beginning: the slowest is reported."""
    env = _environment(directory, directory)
    lines = [[sys.executable, "-c", STARTING, *example] for example in _examples(app)]
    python, *took = alternate(2 if quick else START_ROUNDS, *(_timed(line, env) for line in (_PYTHON, *lines)))
    slowest = max(range(len(took)), key=took.__getitem__)
    named = " ".join(lines[slowest][3:])
    detail = (
        f"{took[slowest] * 1000:.0f} ms for `quire {named}`, the slowest of {len(took)}; Python {python * 1000:.0f} ms"
    )
    report.ratio("start_vs_python", took[slowest] / python, TARGET, "lower", detail)
    report.figure("start_median_seconds", sorted(took)[len(took) // 2])


def whole(report: Report, directory: Path, quick: bool) -> None:
    """Commands on a small store."""
    root = directory / "store"
    _fill(root)
    env = _environment(directory, root)
    every = (*LIGHT, *READING, *OTHERS)
    lines = [shlex.split(each) for each in every]
    timed = [_timed(_PYTHON, env), *(_timed([sys.executable, "-m", "quire", *line], env) for line in lines)]
    python, *took = alternate(2 if quick else ROUNDS, *timed)
    report.figure("python_seconds", python)
    for text, seconds in zip(every, took, strict=True):
        name = "_".join(word for word in text.replace("-", " ").split() if word not in _OBJECTS)
        detail = f"{seconds * 1000:.0f} ms, Python {python * 1000:.0f} ms"
        report.ratio(f"{name}_vs_python", seconds / python, None if text in OTHERS else TARGET, "lower", detail)
        report.figure(f"{name}_seconds", seconds)


_PYTHON = [sys.executable, "-c", "pass"]
_OBJECTS = {
    "shop", "cart", "clicks", "ann", "seen", "new", "other", "{}", "dry", "run", "no", "objects", "monday", "keep", "last", "3",
    "4",
}  # fmt: skip


def _examples(group: Group) -> Iterator[list[str]]:
    """The example of every command that needs no Spark."""
    for command in group.commands.values():
        if "spark" not in command.example:
            yield shlex.split(command.example)[1:]
    for inner in group.groups.values():
        yield from _examples(inner)


def _fill(root: Path) -> None:
    with quire.open(root) as store:
        for name in ("shop", "basket"):
            store.create(name, "pages")
            store.snapshot(name, "monday")
        store.fork("shop", "shop-test", at="monday")
        store.kv("cart", create=True).put(b"ann", b"3 apples")
        store.stream("clicks", create=True).append([b"one"]).result()


def _environment(directory: Path, root: Path) -> dict[str, str]:
    env = {**os.environ, "QUIRE_STORE": str(root), "PYTHONPYCACHEPREFIX": str(directory / "bytecode")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def _timed(line: list[str], env: dict[str, str]) -> Callable[[], float]:
    numbers = count(1)

    def run() -> float:
        number = str(next(numbers))
        words = [word.replace("{}", number) for word in line]
        started = time.perf_counter()
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=env)
        return time.perf_counter() - started

    run()  # the first one writes the bytecode
    return run


PARTS = (start, whole)
