"""What all commands share: where the store is, what they return, and how that becomes output and an exit code.

A command is a function whose first parameter is a `Cli`. It returns what it shows (`Shown`), or a `CliResult` with an exit code
as well, or it raises: an error is a sentence and the next step, with the exit code of its group; `--debug` shows a traceback.
A command that must own a store which another process owns is run by that process, if it listens (K8).

A reader that closes the pipe (`quire ls | head -1`) ends the command at once, silently, with the exit code that a shell reports
for SIGPIPE. The signal itself stays ignored: sockets would raise it too.
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
"""Arguments that must not be empty where a command needs them."""


class Cli(msgspec.Struct, frozen=True):
    """What a command gets: where the store is, and whether a program reads the output."""

    path: str
    as_json: bool = False

    def reader(self) -> ManifestStore:
        """The manifest, opened for reading: works while another process owns the store."""
        from quire.manifest.store import ManifestStore  # a third of `quire ls`, which does without it

        manifest = self.settings().manifest
        return ManifestStore.open(os.path.join(os.path.abspath(self.path), MANIFEST), mode="r", settings=manifest)

    def settings(self) -> StoreSettings:
        """The settings in the store's quire.toml."""
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
        """The store, opened for changes; never creates one.

        `upkeep` in the background is for commands that may take minutes. `grace_seconds` replaces the delay between the
        last reference to bytes and their deletion.
        """
        settings = self.settings()
        maintenance = replace(settings.maintenance, enabled=upkeep and settings.maintenance.enabled)
        if upkeep and not maintenance.workers:  # the command is there to do the work, whatever quire.toml says
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
        if (
            store.archive is not None
        ):  # opening asked no bucket: that the store is another's may be heard with the last upload
            store.after_close = store.archive.require_ours
        return store

    def readable(self) -> Store:
        """The store, to be read: owned by this process, or beside whoever owns it. A standby, a restored directory and an owner
        that was fenced are only read. An owner that listens runs the command itself (K8)."""
        try:
            store = self.owner()
            store.after_close = None  # what was read is right, whoever owns the store
            return store
        except StoreFenced:
            return self.beside()
        except StoreLocked:
            client = self._listening_owner()
            if client is None:
                return self.beside()
            client.close()
            raise

    def beside(self) -> Store:
        """The store, opened for reading, whoever owns it."""
        return quire.open(self.path, "r", settings=self.settings())

    def keeper(self) -> Store | Client:
        """The store, owned by this process, or a client of the process that owns it (K8)."""
        try:
            return self.owner()
        except StoreLocked:
            client = self._listening_owner()
            if client is None:
                raise
            return client

    def _listening_owner(self) -> Client | None:
        from quire.service.sockets import (
            find_owner,  # sockets, for which commands on a store without an owner need not wait
        )

        return find_owner(self.path)


def perform(body: Callable[..., Shown | CliResult], cli: Cli, arguments: dict[str, Any], *, debug: bool) -> int:
    """Run a command and show what it returns or what went wrong; its exit code."""
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
            from quire.cli.remote import run_at_owner

            return run_at_owner(body, cli, arguments, locked)
    except BrokenPipeError:
        return pipe_closed()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's own way of ending, with 1
            return pipe_closed()
        raise
    except QuireError as error:
        if debug:
            raise
        return report_error(output, error)
    except Exception as error:
        if debug:
            raise
        if isinstance(error.__cause__, QuireError):  # passed on by SQLite, say: a missing chunk is no bug
            return report_error(output, error.__cause__)
        return report_error(output, InternalError(f"a bug in quire: {type(error).__name__}: {error}"))


def _need_names(body: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Refuse empty names: a shell passes an empty word for a variable that is not set, which must not mean "all"."""
    needed = body.__code__.co_varnames[1 : body.__code__.co_argcount - len(body.__defaults__ or ())]
    for name, what in NAMES.items():
        if name in needed and arguments.get(name) == "":
            raise InvalidInput(f"{what} is empty", hint="`quire ls` lists the databases")


def result_of(body: Callable[..., Shown | CliResult], cli: Cli, arguments: dict[str, Any]) -> CliResult:
    """What a command returned. One that was declined shows that nothing happened, and ends with exit code 1."""
    try:
        outcome = body(cli, **arguments)
    except Declined as declined:
        return CliResult(Note(text=declined.text, data=declined.data), PROBLEMS)
    return outcome if isinstance(outcome, CliResult) else CliResult(outcome, OK)
