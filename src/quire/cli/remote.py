"""Commands and a store that another process owns (K8): the two ends of having a command done there.

Terms
  there   the owner, reached through the store's socket: a `quire serve`, which runs commands for others

Rules
  1. Only commands listed here are done there: those that begin, do one thing and end; `sqlite follow` has the owner follow the
     file, and ends. A command that would stay (`jobs work`) or that takes the store apart (`manifest check --repair`) is not;
     `sqlite shell` reads beside the owner.
  2. What is written, and the exit code, are those of the command done here; an error is raised here as it was there. Questions
     are asked here.
  3. Paths are made absolute first: the owner's directory is another one.

Threads: there one of the service's, here the main one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

from quire.cli.command import Cli, result_of
from quire.cli.job_progress import Display
from quire.cli.output import Look, Note, json_parts, text_parts
from quire.cli.prompts import REMOTE_ANSWER, Question, agreed, on_terminal
from quire.cli.stream import LINES_PER_APPEND, appended
from quire.core.errors import Conflict, InvalidInput, StoreLocked, Unavailable
from quire.service.commands import CommandResult, RemoteCommand
from quire.service.sockets import find_owner
from quire.store.mirrors import absolute_target

if TYPE_CHECKING:
    from quire.manifest.store import ManifestStore
    from quire.service.client import Client
    from quire.store.store import Store

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "stores": ("create", "drop", "undrop", "rename"),
    "snapshots": ("create", "drop", "undrop", "fork", "rollback", "diff"),
    "retention": ("set_", "clear", "apply"),
    "checkpoint": ("checkpoint", "merge", "evict", "hydrate", "restore"),
    "verify": ("verify",),
    "gc": ("gc",),
    "jobs": ("retry", "cancel"),
    "feed": ("drop", "resume"),
    "objects": ("create_namespace", "drop_namespace"),
    "mirror": ("create", "run", "drop"),
    "kv": ("get", "put", "delete", "scan", "stats", "compact", "verify", "backup", "list_backups", "restore"),
    "stream": ("append", "read", "segments", "info", "seal", "tier", "checkpoint", "verify", "retention"),
    "sqlite": ("import_", "export", "follow", "unfollow"),
    "manifest_log": ("bundle", "mode"),
    "stats": ("stats",),
    "archive": ("drill",),
    "backup": ("backup", "restore_db"),
}
"""Module → its functions that are done there (rule 1)."""

PATHS: Mapping[str, tuple[str, ...]] = {
    "sqlite.import_": ("file",),
    "sqlite.export": ("out",),
    "sqlite.follow": ("file",),
    "checkpoint.restore": ("file",),
    "verify.verify": ("report",),
    "backup.backup": ("target", "since"),
    "backup.restore_db": ("url",),
}
"""Function → its arguments that are paths, or may be (rule 3)."""

INSTEAD = {
    "jobs.work": "the owner runs its jobs itself: `quire jobs ls` shows them",
    "serve.serve": "a store has one owner, which can itself serve (`store.serve()`): `quire doctor` shows it",
    "objects.takeover": "this directory already has an owner: stop that process first",
    "objects.moved": "stop the owner first: it writes to the old location",
    "manifest.check": "stop the owner first: a repair needs the store for itself",
}
"""What to do where a command is not done there."""

ANSWER_CHARACTERS_MAX = 32 * 1024 * 1024
LINES_BYTES_MAX = 4 * 1024 * 1024
"""Of stdin, in one call."""
LOOK_SECONDS = 0.1


# ── here ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_at_owner(body: Callable[..., Any], cli: Cli, arguments: dict[str, Any], locked: StoreLocked) -> int:
    """Have a command done by the process that has the store, and write what came of it; the exit code."""
    function = f"{body.__module__.rpartition('.')[2]}.{body.__name__}"
    if not _is_listed(function):
        if function in INSTEAD:
            raise Unavailable(locked.what, hint=INSTEAD[function], **locked.where) from locked
        raise locked

    owner = find_owner(cli.path)
    if owner is None:
        raise locked
    with owner:
        given = dict(arguments)
        for path in PATHS.get(function, ()):
            if given.get(path) and "://" not in given[path]:
                given[path] = os.path.abspath(given[path])
        if function == "mirror.create":
            given["to"] = absolute_target(given["to"])
        try:
            if function == "stream.append" and not given["record"]:
                return _appended(owner, cli, given)
            done = _asked(owner, cli, function, given, Look.of(sys.stdout))
        except InvalidInput as error:
            if "runs no commands" in error.what:
                raise locked from error
            raise
    sys.stdout.write(done.out)
    return done.code


def _is_listed(function: str) -> bool:
    module, _, name = function.partition(".")
    return name in FUNCTIONS.get(module, ())


def _asked(owner: Client, cli: Cli, function: str, given: dict[str, Any], look: Look) -> CommandResult:
    """The answer of the owner, after what it wanted to know of the person."""
    answer = ""
    while True:
        command = RemoteCommand(
            function,
            json.dumps(given).encode(),
            os.urandom(16),
            owner.server.pid,
            cli.as_json,
            look.width,
            look.colours,
            answer,
        )
        done = _watched(owner, cli, command)
        if not done.question:
            return done
        answer = "yes" if agreed(done.question, done.otherwise) else "no"


def _watched(owner: Client, cli: Cli, command: RemoteCommand) -> CommandResult:
    """Wait for the owner; on a terminal the jobs that it runs are shown meanwhile."""
    if not on_terminal():
        return owner.run_command(command)

    ended: list[CommandResult | BaseException] = []
    over = threading.Event()

    def ask() -> None:
        try:
            ended.append(owner.run_command(command))
        except BaseException as error:
            ended.append(error)
        finally:
            over.set()

    threading.Thread(target=ask, name="quire-away", daemon=True).start()
    with cli.reader() as manifest, Display(manifest) as display:
        while not over.wait(LOOK_SECONDS):
            display.refresh()
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]


def _appended(owner: Client, cli: Cli, given: dict[str, Any]) -> int:
    """Lines of stdin, in calls that are not too long; each is durable before the next."""
    first, count = -1, 0
    while True:
        lines: list[str] = []
        size = 0
        for line in islice(sys.stdin.buffer, LINES_PER_APPEND):
            lines.append(line.rstrip(b"\n").decode("utf-8", "surrogateescape"))
            size += len(line)
            if size > LINES_BYTES_MAX:
                break
        if not lines:
            break
        done = _asked(owner, Cli(cli.path, True), "stream.append", {**given, "record": lines}, Look(0, False))
        answer = json.loads(done.out)
        first, count = (answer["first"] if first < 0 else first), count + answer["count"]
    note: Note = appended(given["database"], max(first, 0), count)
    for part in json_parts(note) if cli.as_json else text_parts(note, Look.of(sys.stdout)):
        sys.stdout.write(part)
    return 0


# ── there ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_here(store: Store, command: RemoteCommand) -> CommandResult:
    """Run a command for somebody else: what `quire serve` lends to its service."""
    if not _is_listed(command.function):
        raise InvalidInput("the owner does not run this command", hint="stop the owner first", command=command.function)
    module, _, name = command.function.partition(".")
    body = getattr(import_module(f"quire.cli.{module}"), name)
    before = REMOTE_ANSWER.set(command.answer)
    try:
        result = result_of(body, AtOwner(store.path, command.as_json, store), json.loads(command.arguments))
        shown, look = result.shown, Look(command.width, command.colours)
        if shown is None:
            return CommandResult(code=result.code)
        return CommandResult(_joined(json_parts(shown) if command.as_json else text_parts(shown, look)), result.code)
    except Question as question:
        return CommandResult(question=question.question, otherwise=question.otherwise)
    finally:
        REMOTE_ANSWER.reset(before)


def _joined(parts: Any) -> str:
    texts, size = [], 0
    for part in parts:
        size += len(part)
        if size > ANSWER_CHARACTERS_MAX:
            raise InvalidInput("the output is too long for one reply", hint="use --limit", max=ANSWER_CHARACTERS_MAX)
        texts.append(part)
    return "".join(texts)


class AtOwner(Cli, frozen=True):
    """What a command gets at the owner: the store that is open, which it must not close."""

    store: Any = None

    def reader(self) -> ManifestStore:
        lent: Any = KeepOpen(self.store.manifest)
        return lent  # type: ignore[no-any-return]

    def owner(self, **options: Any) -> Store:
        """The options are the owner's own affair, but for the grace."""
        if options.get("grace_seconds") is not None:
            raise Conflict(
                "the owner keeps the grace period for its readers", hint="omit `--now`, or stop the owner first"
            )
        lent: Any = KeepOpen(self.store)
        return lent  # type: ignore[no-any-return]

    def keeper(self) -> Store | Client:
        return self.owner()


class KeepOpen:
    """Something open that its user does not close."""

    def __init__(self, lent: Any) -> None:
        self._lent = lent

    def __enter__(self) -> Any:
        return self._lent

    def __exit__(self, *_: object) -> None:
        """It stays open."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lent, name)
