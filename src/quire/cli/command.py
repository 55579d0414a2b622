"""What all commands share: where the store is, what they return, and how the outcome becomes output and an exit code.

A command is a function whose first parameter is a `Cli`. It returns what it shows (`Shown`), or a `Verdict` with an exit code
as well, or it raises. An error is one sentence and the next step, with the exit code of its group; a traceback needs --debug.

A command that must own a store which another process owns is run by that process, if it listens (K8).

A reader that closes the pipe (`quire ls | head -1`) ends the command at once, silently, with the exit code that a shell
reports for SIGPIPE. The signal itself stays ignored: sockets would raise it too.

Importing this module loads neither the manifest nor the store: help needs neither.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import quire
from quire.cli.exit_codes import OK, PIPE_CLOSED, exit_of
from quire.cli.formatting import visible
from quire.cli.output import JsonOutput, Look, Output, Shown, TextOutput, wrapped
from quire.core.errors import InternalError, InvalidInput, QuireError, StorageFault, StoreLocked

if TYPE_CHECKING:
    from quire.core.settings import StoreSettings
    from quire.manifest.store import ManifestStore
    from quire.service.client import Client
    from quire.store.store import Store

ELSEWHERE: ContextVar[str | None] = ContextVar("ELSEWHERE", default=None)
"""Set while a command is run for somebody at the other end of a socket: what that person answered, or "" before it."""

NAMES = {"database": "the database's name", "stream": "the stream's name", "subject": "what is asked about"}
"""Arguments that are never empty, if a command needs them."""

HERE = "."
STORE_VARIABLE = "QUIRE_STORE"
COMPLETING = "_QUIRE_COMPLETE"
"""The variable in which a shell asks what could come next."""


@dataclass(frozen=True)
class Cli:
    """What a command gets: where the store is, and whether a program reads the output."""

    path: str
    as_json: bool = False

    def reader(self) -> ManifestStore:
        """The manifest, opened for reading: works while another process owns the store."""
        from quire.durable.names import MANIFEST
        from quire.manifest.store import ManifestStore

        manifest = self.settings().manifest
        return ManifestStore.open(os.path.join(os.path.abspath(self.path), MANIFEST), mode="r", settings=manifest)

    def settings(self) -> StoreSettings:
        """The settings in the store's quire.toml."""
        from quire.durable.files import OsDisk
        from quire.store.layout import existing_config

        return existing_config(OsDisk(), os.path.abspath(self.path))

    def owner(
        self,
        *,
        repair: bool = False,
        upkeep: bool = False,
        grace_seconds: float | None = None,
        takeover: bool = False,
        moved: bool = False,
    ) -> Store:
        """The store, opened for changes; never creates one.

        `upkeep` in the background is for commands that may take minutes. `grace_seconds` replaces the delay between the
        last reference to bytes and their deletion.
        """
        from msgspec.structs import replace

        settings = self.settings()
        maintenance = replace(settings.maintenance, enabled=upkeep and settings.maintenance.enabled)
        if upkeep and not maintenance.workers:  # the command is there to do the work, whatever quire.toml says
            maintenance = replace(maintenance, workers=1)
        if grace_seconds is not None:
            maintenance = replace(maintenance, delete_grace_seconds=grace_seconds)
        settings = replace(settings, maintenance=maintenance)
        return quire.open(self.path, create=False, repair=repair, takeover=takeover, moved=moved, settings=settings)

    def keeper(self) -> Store | Client:
        """The store, owned by this process, or a client of the process that owns it (K8)."""
        try:
            return self.owner()
        except StoreLocked:
            from quire.service.discover import find_owner

            client = find_owner(self.path)
            if client is None:
                raise
            return client


@dataclass(frozen=True)
class Verdict:
    """A value to show, if any, and the exit code to end with."""

    shown: Shown | None
    code: int


def perform(body: Callable[..., Shown | Verdict], cli: Cli, arguments: dict[str, Any], *, debug: bool) -> int:
    """Run a command, show what it returns or tell what went wrong; its exit code."""
    output = output_for(cli.as_json)
    try:
        if style := os.environ.get("QUIRE_LOG"):
            from quire.core.logs import configure

            configure(style)
        _need_names(body, arguments)
        try:
            verdict = verdict_of(body(cli, **arguments))
            if verdict.shown is not None:
                _show(output, verdict.shown)
            return verdict.code
        except StoreLocked as locked:
            from quire.cli.remote import done_there

            return done_there(body, cli, arguments, locked)
    except BrokenPipeError:
        return pipe_closed()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's own way of ending, with 1
            return pipe_closed()
        raise
    except QuireError as error:
        if debug:
            raise
        return tell(output, error)
    except Exception as error:
        if debug:
            raise
        if isinstance(error.__cause__, QuireError):  # passed on by SQLite, say: a missing chunk is no bug
            return tell(output, error.__cause__)
        return tell(output, InternalError(f"a bug in quire: {type(error).__name__}: {error}"))


def _need_names(body: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """A shell makes an empty word of a variable that is not set: that is no name, and not "all of them" either."""
    needed = body.__code__.co_varnames[1 : body.__code__.co_argcount - len(body.__defaults__ or ())]
    for name, what in NAMES.items():
        if name in needed and arguments.get(name) == "":
            raise InvalidInput(f"{what} is empty", hint="`quire ls` lists the databases")


def verdict_of(outcome: Shown | Verdict) -> Verdict:
    """What a command returned, as a verdict."""
    return outcome if isinstance(outcome, Verdict) else Verdict(outcome, OK)


def output_for(as_json: bool) -> Output:
    """JSON for programs, text for people."""
    return JsonOutput() if as_json else TextOutput()


def tell(output: Output, error: QuireError) -> int:
    """Say what went wrong; the exit code."""
    try:
        output.fail(error)
        sys.stderr.flush()
    except BrokenPipeError:
        return pipe_closed()
    return exit_of(error).code


def pipe_closed() -> int:
    """Rule 5: what is still buffered goes nowhere, and nobody is told."""
    abandon_streams()
    return PIPE_CLOSED


def unwritable(error: OSError) -> StorageFault:
    """The error of an output that cannot be written, because a disk is full for instance."""
    abandon_streams()
    return StorageFault(f"the output cannot be written: {error.strerror}", hint="check where the output goes")


def abandon_streams() -> None:
    """Send what cannot be written nowhere: else the interpreter tries again at its end, and complains."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class Question(Exception):
    """A command that is run for somebody elsewhere must ask that person first."""

    def __init__(self, question: str, otherwise: str) -> None:
        super().__init__(question)
        self.question = question
        self.otherwise = otherwise


def on_terminal() -> bool:
    """Whether a person looks on: progress is for them."""
    return ELSEWHERE.get() is None and sys.stderr.isatty()


def agreed(question: str, otherwise: str) -> bool:
    """Ask on stderr: stdout belongs to the command's value. `otherwise` is what did not happen if nobody answers."""
    if (answer := ELSEWHERE.get()) is not None:
        if not answer:
            raise Question(question, otherwise)
        return answer == "yes"
    sys.stderr.write("\n".join(wrapped(f"{visible(question)} [y/N]", Look.of(sys.stderr).width)) + " ")
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        sys.stderr.write("\n")
        raise InvalidInput(f"no confirmation given; {otherwise}", hint="use `--yes` to skip the question")
    return line.strip().lower() in ("y", "yes")


def _show(output: Output, shown: Shown) -> None:
    try:
        output.show(shown)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritable(error) from error
