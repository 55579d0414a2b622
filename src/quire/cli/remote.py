"""Runs commands on a store that another process owns (K8): the client's side and the owner's side.

Terms
  owner    the process that owns the store, reached through the store's socket: a `quire serve`, which runs commands for clients
  client   the process in which the user started the command

Rules
  1. The owner runs only the commands listed here: those that do one thing and end. For `sqlite follow` the owner follows the
     file, and the command ends. A command that would keep running (`jobs work`) or that needs the store for itself (`manifest
     check --repair`) is not run by the owner; `sqlite shell` handles an owner itself.
  2. Output and exit code are the same as for a command run locally; an error at the owner is raised in the client. Questions
     are asked in the client.
  3. Paths are made absolute first: the owner has another working directory.

Threads: at the owner one of the service's threads, in the client the main thread.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.cli.command import Cli, result_of
from quire.cli.job_progress import Display
from quire.cli.output import Note, TerminalStyle, is_ascii_only, json_parts, text_parts
from quire.cli.prompts import REMOTE_ANSWER, Question, RemoteAnswer, agreed, on_terminal
from quire.cli.stream import appended, next_lines
from quire.core.errors import Conflict, InvalidInput, StoreLocked, Unavailable
from quire.service.commands import CommandResult, RemoteCommand
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
    "archive": ("drill", "base"),
    "backup": ("backup", "restore_db"),
}
"""Module → its functions that the owner runs (rule 1)."""

PATHS: Mapping[str, tuple[str, ...]] = {
    "sqlite.import_": ("file",),
    "sqlite.export": ("out",),
    "sqlite.follow": ("file",),
    "checkpoint.restore": ("file",),
    "verify.verify": ("report",),
    "backup.backup": ("target", "since"),
    "backup.restore_db": ("url",),
    "objects.create_namespace": ("url",),
}
"""Function → its arguments that are or may be paths (rule 3)."""

INSTEAD = {
    "jobs.work": "the owner runs its jobs itself: `quire jobs ls` shows them",
    "serve.serve": "a store has one owner: if that process serves already, use the store; otherwise stop it first",
    "objects.takeover": "this directory already has an owner: stop that process first",
    "objects.moved": "stop the owner first: it writes to the old location",
    "manifest.check": "stop the owner first: a repair needs the store for itself",
}
"""Function that the owner does not run → what to do instead."""

ANSWER_CHARACTERS_MAX = 32 * 1024 * 1024
LOOK_SECONDS = 0.1


# ── client ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_at_owner(body: Callable[..., Any], cli: Cli, arguments: dict[str, Any], locked: StoreLocked) -> int:
    """Have the owner of the store run a command, write its output, and return the exit code."""
    function = f"{body.__module__.rpartition('.')[2]}.{body.__name__}"
    if not _is_listed(function):
        if function in INSTEAD:
            raise Unavailable(locked.what, hint=INSTEAD[function], **locked.where) from locked
        raise locked

    owner = cli.listening_owner()
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
            done = _run_at_owner(owner, cli, function, given, TerminalStyle.of(sys.stdout))
        except InvalidInput as error:
            if "runs no commands" in error.what:
                raise locked from error
            raise
    is_escaped = cli.as_json and is_ascii_only()
    sys.stdout.write(_escaped(done.out) if is_escaped else done.out)
    return done.code


def _escaped(document: str) -> str:
    """Return a JSON document in ASCII: characters beyond it only occur in strings."""
    return re.sub(r"[^\x00-\x7f]+", lambda found: json.dumps(found[0])[1:-1], document)


def _is_listed(function: str) -> bool:
    module, _, name = function.partition(".")
    return name in FUNCTIONS.get(module, ())


def _run_at_owner(owner: Client, cli: Cli, function: str, given: dict[str, Any], style: TerminalStyle) -> CommandResult:
    """Return the owner's result, after asking the user the questions of the command."""
    answer = about = ""
    while True:
        command = RemoteCommand(
            function,
            json.dumps(given).encode(),
            os.urandom(16),
            owner.server.pid,
            cli.as_json,
            style.width,
            style.colours,
            answer,
            about,
        )
        done = _watched(owner, cli, command)
        if not done.question:
            return done
        answer, about = "yes" if agreed(done.question, done.otherwise) else "no", done.about


def _watched(owner: Client, cli: Cli, command: RemoteCommand) -> CommandResult:
    """Wait for the owner. On a terminal, show the progress of the jobs that it runs."""
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
    """Append the lines of stdin, in calls of bounded size. Each is durable before the next begins."""
    first, count = -1, 0
    while block := next_lines():
        lines = [line.decode("utf-8", "surrogateescape") for line in block]
        done = _run_at_owner(
            owner, Cli(cli.path, True), "stream.append", {**given, "record": lines}, TerminalStyle(0, False)
        )
        answer = json.loads(done.out)
        first, count = (answer["first"] if first < 0 else first), count + answer["count"]
    note: Note = appended(given["database"], max(first, 0), count)
    for part in json_parts(note) if cli.as_json else text_parts(note, TerminalStyle.of(sys.stdout)):
        sys.stdout.write(part)
    return 0


# ── owner ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_for_client(store: Store, command: RemoteCommand) -> CommandResult:
    """Run a command for a client. `quire serve` passes this function to its service."""
    if not _is_listed(command.function):
        raise InvalidInput("the owner does not run this command", hint="stop the owner first", command=command.function)
    module, _, name = command.function.partition(".")
    body = getattr(import_module(f"quire.cli.{module}"), name)
    before = REMOTE_ANSWER.set(RemoteAnswer(command.answer, command.about))
    try:
        result = result_of(body, OwnerCli(store.path, command.as_json, store), json.loads(command.arguments))
        shown, style = result.shown, TerminalStyle(command.width, command.colours)
        if shown is None:
            return CommandResult(code=result.code)
        # The client's stdout decides which characters are escaped, not the owner's.
        parts = json_parts(shown, ascii_only=False) if command.as_json else text_parts(shown, style)
        return CommandResult(_joined(parts), result.code)
    except Question as question:
        return CommandResult(question=question.question, otherwise=question.otherwise, about=question.about)
    finally:
        REMOTE_ANSWER.reset(before)


def _joined(parts: Any) -> str:
    texts, size = [], 0
    for part in parts:
        size += len(part)
        if size > ANSWER_CHARACTERS_MAX:
            raise InvalidInput("the output is too long for one reply", hint="use --limit", max=ANSWER_CHARACTERS_MAX)
        texts.append(part)
    return "".join(texts).encode("utf-8", "backslashreplace").decode()  # as stdout writes names that are not UTF-8


class OwnerCli(Cli, frozen=True):
    """The `Cli` of a command that runs at the owner: it uses the open store and does not close it."""

    store: Any = None

    def reader(self) -> ManifestStore:
        lent: Any = KeepOpen(self.store.manifest)
        return lent  # type: ignore[no-any-return]

    def owner(self, **options: Any) -> Store:
        """Return the open store. All options are ignored, except that `grace_seconds` is refused."""
        if options.get("grace_seconds") is not None:
            raise Conflict(
                "the owner keeps the grace period for its readers", hint="omit `--now`, or stop the owner first"
            )
        lent: Any = KeepOpen(self.store)
        return lent  # type: ignore[no-any-return]

    def owner_or_client(self) -> Store | Client:
        return self.owner()


class KeepOpen:
    """Wraps an open store or manifest so that leaving its context does not close it."""

    def __init__(self, lent: Any) -> None:
        self._lent = lent

    def __enter__(self) -> Any:
        return self._lent

    def __exit__(self, *_: object) -> None:
        """Leave it open."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lent, name)
