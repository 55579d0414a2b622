"""Runs a command: gives it the store, and turns its result or error into output and an exit code.

A command is a function whose first parameter is a `Cli`. It returns the value to show (`Shown`), or a `CliResult` that also has
an exit code, or it raises. An error is shown as a sentence and the next step, with the exit code of its group; `--debug` shows
the traceback. A command that must own a store which another process owns is run by that process, if it listens (K8).

A reader that closes the pipe (`quire ls | head -1`) ends the command at once, silently, with the exit code that a shell reports
for SIGPIPE. The signal itself stays ignored, because writing to a closed socket would raise it too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

import quire
from quire.cli.errors import OK, PROBLEMS
from quire.cli.output import CliResult, Note, Shown, output_for, pipe_closed, report_error
from quire.cli.prompts import Declined
from quire.core.errors import InternalError, InvalidInput, QuireError, StoreFenced, StoreLocked
from quire.core.logs import configure
from quire.core.settings import StoreSettings
from quire.durable.files import OsDisk
from quire.durable.names import MANIFEST
from quire.store.layout import existing_config

if TYPE_CHECKING:
    from quire.manifest.store import ManifestStore
    from quire.service.client import Client
    from quire.store.store import Store

NAMES = {"database": "the database's name", "stream": "the stream's name", "subject": "the subject"}
"""Required arguments that must not be empty → how errors name them."""


class Cli(msgspec.Struct, frozen=True):
    """The context of a command: the path of the store, and whether the output is JSON."""

    path: str
    as_json: bool = False

    def reader(self) -> ManifestStore:
        """Open the manifest for reading, which works while another process owns the store."""
        # Here: loading it takes a third of `quire ls`, which does not use it
        from quire.manifest.store import ManifestStore

        manifest = self.settings().manifest
        return ManifestStore.open(os.path.join(os.path.abspath(self.path), MANIFEST), mode="r", settings=manifest)

    def settings(self) -> StoreSettings:
        """Return the settings in the store's quire.toml."""
        return existing_config(OsDisk(), os.path.abspath(self.path))

    def owner(
        self,
        *,
        repair: bool = False,
        upkeep: bool = False,
        grace_seconds: float | None = None,
        takeover: bool = False,
        discard: bool = False,
        moved: bool = False,
    ) -> Store:
        """Open the store as its owner. Never creates one.

        `upkeep` runs maintenance in the background, for commands that may take minutes. `grace_seconds` replaces the grace
        period between the last reference to an artifact and its deletion.
        """
        settings = self.settings()
        maintenance = replace(settings.maintenance, enabled=upkeep and settings.maintenance.enabled)
        if upkeep and not maintenance.workers:  # the command has to run jobs, whatever quire.toml says
            maintenance = replace(maintenance, workers=1)
        if grace_seconds is not None:
            maintenance = replace(maintenance, delete_grace_seconds=grace_seconds)
        settings = replace(settings, maintenance=maintenance)
        store = quire.open(
            self.path,
            create=False,
            repair=repair,
            takeover=takeover,
            discard=discard,
            moved=moved,
            settings=settings,
        )
        if store.archive is not None:
            # Opening sends no request to the bucket, so a takeover may only be noticed by the last upload.
            store.after_close = store.archive.require_ours
        return store

    def readable(self, *, upkeep: bool = False) -> Store:
        """Open the store for a command that only reads: as its owner if possible, else alongside the owner. A standby, a
        restored directory and a fenced owner are only read. Raises `StoreLocked` if an owner listens: it then runs the command
        (K8)."""
        try:
            store = self.owner(upkeep=upkeep)
            store.after_close = None  # what was read is valid even if the store was taken over
            return store
        except StoreFenced:
            return self.open_read_only()
        except StoreLocked:
            client = self.listening_owner()
            if client is None:
                return self.open_read_only()
            client.close()
            raise

    def open_read_only(self) -> Store:
        """Open the store for reading, whether or not another process owns it."""
        return quire.open(self.path, "r", settings=self.settings())

    def owner_or_client(self) -> Store | Client:
        """Open the store as its owner, or a client of the process that owns it (K8)."""
        try:
            return self.owner()
        except StoreLocked:
            client = self.listening_owner()
            if client is None:
                raise
            return client

    def listening_owner(self) -> Client | None:
        """Return a client of the process that owns the store, or `None` if there is none, or it does not listen."""
        from quire.service.local_owner import (
            find_owner,  # here: loads sockets, which commands on a store without an owner do not need
        )

        return find_owner(self.path)


def perform(
    body: Callable[..., Shown | CliResult],
    cli: Cli,
    arguments: dict[str, Any],
    run_at_owner: Callable[[StoreLocked], int],
    *,
    debug: bool,
) -> int:
    """Run a command, show its result or error, and return its exit code. `run_at_owner` has the process that owns the store run
    it instead."""
    output = output_for(cli.as_json)
    try:
        if style := os.environ.get("QUIRE_LOG"):
            configure(style)
        _need_names(body, arguments)
        try:
            result = result_of(body, cli, arguments)
            if result.shown is not None:
                output.show(result.shown)
            return result.code
        except StoreLocked as locked:
            return run_at_owner(locked)
    except BrokenPipeError:
        return pipe_closed()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich exits with 1 on a closed pipe
            return pipe_closed()
        raise
    except QuireError as error:
        if debug:
            raise
        return report_error(output, error)
    except Exception as error:
        if debug:
            raise
        if isinstance(error.__cause__, QuireError):  # passed on by SQLite, for example: a missing chunk is not a bug
            return report_error(output, error.__cause__)
        return report_error(output, InternalError(f"a bug in quire: {type(error).__name__}: {error}"))


def _need_names(body: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Raise `InvalidInput` for empty names: a shell passes an empty word for an unset variable, which must not mean "all"."""
    needed = body.__code__.co_varnames[1 : body.__code__.co_argcount - len(body.__defaults__ or ())]
    for name, what in NAMES.items():
        if name in needed and arguments.get(name) == "":
            raise InvalidInput(f"{what} is empty", hint="`quire ls` lists the databases")


def result_of(body: Callable[..., Shown | CliResult], cli: Cli, arguments: dict[str, Any]) -> CliResult:
    """Run a command and return its result. If the user declines, it shows what was not done, with exit code 1."""
    try:
        outcome = body(cli, **arguments)
    except Declined as declined:
        return CliResult(Note(text=declined.text, data=declined.data), PROBLEMS)
    except UnicodeEncodeError as error:
        if "surrogates" not in error.reason:
            raise
        # A word of the command line with other bytes; keys, records and paths may have them, names may not.
        raise InvalidInput("a name on the command line is not valid UTF-8", hint="names are UTF-8") from error
    return outcome if isinstance(outcome, CliResult) else CliResult(outcome, OK)
