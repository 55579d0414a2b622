"""The duration of commands against starting Python: what a user waits for before a command does anything.

Commands and `python -c pass` alternate, each as a new process; the ratio is of medians. Bytecode is cached in the benchmark's
directory, as it is cached where quire is installed: without it, the compiler would be measured. There are targets for help and
completion, and for the lists that users type most often and scripts call in loops. The other commands also load what they work
with: the operations and the checker to own a manifest, checksums and an engine to read a database.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import quire
from bench.report import Report, alternate

ROUNDS = 15
LISTS_TARGET = 10.0
HELP_TARGET = 8.0

HELP = ("--help", "snapshot --help", "snapshot create --help")
LISTS = ("ls", "info", "tree")
OTHERS = (
    "snapshot ls shop", "jobs ls", "feed cursors", "feed tail",
    "why shop", "audit", "retention show shop", "gc --dry-run", "manifest tables", "snapshot show shop monday",
    "init", "create new-{}", "snapshot create shop", "fork shop other-{}", "retention set shop --keep-last 3", "manifest check",
    "kv get cart ann", "kv put cart ann 4", "stream append clicks seen", "stream tail clicks", "doctor --no-objects",
)  # fmt: skip
"""`{}` is replaced by a new number in each run."""

COMPLETING = {"completion_of_commands": ("quire s", 1), "completion_of_databases": ("quire snapshot ls ", 3)}
"""Completions that a shell requests: the words so far, and the index of the word being typed."""


def whole(report: Report, directory: Path, quick: bool) -> None:
    """Run commands on a small store."""
    root = directory / "store"
    _fill(root)
    env = _environment(directory, root)
    every = (*HELP, *LISTS, *OTHERS)
    contenders = [_timed(_PYTHON, env)]
    contenders += [_timed([*_QUIRE, *shlex.split(text)], env) for text in every]
    contenders += [_timed(_QUIRE, {**env, **_completion(*request)}) for request in COMPLETING.values()]
    python, *took = alternate(2 if quick else ROUNDS, *contenders)
    report.figure("python_seconds", python)
    names = ["_".join(word for word in text.replace("-", " ").split() if word not in _OBJECTS) for text in every]
    targets = [HELP_TARGET if text in HELP else LISTS_TARGET if text in LISTS else None for text in every]
    names += COMPLETING
    targets += [HELP_TARGET] * len(COMPLETING)
    for name, target, seconds in zip(names, targets, took, strict=True):
        detail = f"{seconds * 1000:.0f} ms, Python {python * 1000:.0f} ms"
        report.ratio(f"{name}_vs_python", seconds / python, target, "lower", detail)
        report.figure(f"{name}_seconds", seconds)


_PYTHON = [sys.executable, "-c", "pass"]
_QUIRE = [sys.executable, "-m", "quire"]
_OBJECTS = {
    "shop", "cart", "clicks", "ann", "seen", "new", "other", "{}", "dry", "run", "no", "objects", "monday", "keep", "last", "3",
    "4",
}  # fmt: skip


def _completion(words: str, place: int) -> dict[str, str]:
    """Return the environment variables by which bash requests completions."""
    return {"_QUIRE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(place)}


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

    run()  # writes the bytecode
    return run


PARTS = (whole,)
