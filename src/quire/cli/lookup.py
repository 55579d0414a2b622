"""Resolves what users type for a database, a snapshot or a tag, and declares parameters that commands share.

Rules
  1. `#7` (quoted in a shell) is the snapshot with that id. Anything else is first looked up as a name, because programs, for
     which ids are numbers and names are strings, may name a snapshot 7; only if no snapshot has the name is it tried as an id.
  2. The command line does not create such names: they would be taken for ids (`need_no_number`).
  3. An error for something that does not exist names the command that lists what exists.

Raises `UnknownDatabase`, `UnknownSnapshot`, `InvalidInput`, `InvalidName`, `WrongKind`.
"""

from __future__ import annotations

import os
import shlex
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec

from quire.cli.declarations import Argument, Option
from quire.cli.formatting import article
from quire.core.clock import SystemClock, moment
from quire.core.errors import InvalidInput, InvalidName, UnknownDatabase, UnknownSnapshot, WrongKind
from quire.core.ids import U32_MAX, Epoch
from quire.core.logs import configure
from quire.core.settings import ObjectSettings
from quire.core.time_parsing import parse_version, requested_moment
from quire.manifest import tables as t
from quire.manifest.records import DbKind, WalState
from quire.objects.options import StoreOptions, options_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime

    from quire.manifest.reads import ReadTxn
    from quire.manifest.snapshots import SnapshotInfo
    from quire.manifest.store import ManifestStore
    from quire.service.client import Client
    from quire.service.values import DatabaseInfo
    from quire.store.store import Store

RUNNERS = ("auto", "threads", "spark")

LISTED = 1_000
"""Default limit for listing databases as text: more is not useful on a terminal."""

Database = Annotated[str, Argument(metavar="DB", help="The database's name.")]
Snapshot = Annotated[str, Argument(metavar="SNAP", help="The snapshot's name, or its id.")]
Yes = Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")]
Follow = Annotated[
    bool, Option("--follow", "-f", help="Continue with new records until Ctrl-C; JSON is one line per record.")
]

Endpoint = Annotated[
    str,
    Option("--endpoint", metavar="URL", help="Endpoint of an S3-compatible service.", show_default="the provider's"),
]
Region = Annotated[
    str, Option("--region", metavar="NAME", help="Region of the bucket; S3 only.", show_default="AWS_REGION")
]
AllowHttp = Annotated[bool, Option("--allow-http", help="Allow plain HTTP to the endpoint.")]


def objects_given(endpoint: str, region: str, allow_http: bool) -> ObjectSettings:
    """Return how to reach a bucket according to these options, checked."""
    given = ObjectSettings(endpoint=endpoint, region=region, allow_http=allow_http)
    given.check_endpoint("`--endpoint`", allow="add `--allow-http`")
    return given


def options_given(endpoint: str, region: str, allow_http: bool) -> StoreOptions | None:
    """Return the options for a bucket, `None` if none were given: then those of the store's quire.toml apply, if any."""
    given = objects_given(endpoint, region, allow_http)
    return options_of(given, "objects") if given != ObjectSettings() else None


def moment_given(at: str) -> int | None:
    """Return the moment that `--at` names, `None` if it was not given. One in the future is refused."""
    return requested_moment(at or None, now_ms=SystemClock().now_ms(), what="--at")


At = Annotated[str, Option("--at", metavar="VERSION", help="A snapshot, an epoch or a time.", show_default="now")]
Moment = Annotated[
    str, Option("--at", metavar="WHEN", help="An age (90s, 15m, 2h) or a date in UTC.", show_default="the newest")
]
OwnerEpoch = Annotated[
    int,
    Option(
        "--epoch",
        metavar="N",
        min=0,
        help="An owner epoch, which may be an abandoned one.",
        show_default="the newest owner's",
    ),
]
StoreId = Annotated[str, Option("--store-id", metavar="ID", help="The store's id, if several stores share the bucket.")]
Runner = Annotated[
    str, Option(metavar="RUNNER", help="threads, spark, or auto: Spark for 256 MiB and more.", show_default=False)
]
DryRun = Annotated[bool, Option("--dry-run", help="Only show what would be done.")]
# Parameters that select a page of a list of databases: the fields of `DatabaseFilter`.
Prefix = Annotated[str, Argument(metavar="[PREFIX]", help="Only names with this prefix, or like `'tenant-*'`.")]
Kind = Annotated[str, Option("--kind", metavar="KIND", help="Only this kind: pages (or sqlite), stream, kv (or lsm).")]
Tag = Annotated[str, Option("--tag", metavar="TAG[=VALUE]", help="Only databases with this tag.")]
Sort = Annotated[
    str, Option("--sort", metavar="ORDER", help="name; written: newest change first; size: largest first.")
]
Limit = Annotated[
    int | None,
    Option("--limit", "-n", min=0, help="Maximum number of rows; 0 for all.", show_default="1000, with --json all"),
]
After = Annotated[str, Option("--after", metavar="NAME", help="Start after this name.")]
Log = Annotated[
    str,
    Option(
        "--log",
        metavar="STYLE",
        help="Write events to stderr: json or console.",
        show_default="QUIRE_LOG, else warnings",
    ),
]


class AboutDatabase(Protocol):
    """A value that refers to a database: a job, an entry of the audit."""

    @property
    def db_id(self) -> int: ...


def limit_of(limit: int | None, *, as_json: bool) -> int:
    """Return the maximum number of databases to list, 0 for all."""
    return limit if limit is not None else 0 if as_json else LISTED


def more_text(last: str, sort: str) -> str:
    """Format how to see the rest of a list of databases. `last` is the last name shown."""
    more = f"`--after {shlex.quote(last)}` continues, " if sort == "name" else ""
    return f"there are more: {more}`--limit 0` lists all"


def number_of(text: str) -> int:
    """Parse an id; return 0 if the text is not one."""
    digits = text.removeprefix("#")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 10):
        return 0

    return int(digits) if int(digits) <= U32_MAX else 0


def snapshot_named(where: ManifestStore | Store | Client, database: str, text: str) -> SnapshotInfo:
    """Return a snapshot by name, else by id (rule 1)."""
    both = (text, number_of(text))
    for asked in reversed(both) if text.startswith("#") else both:
        if asked:
            try:
                return _get_snapshot(where, database, asked)
            except UnknownSnapshot:
                pass
    hint = f"`quire snapshot ls {shlex.quote(database)}` lists them"
    raise UnknownSnapshot("the database has no such snapshot", hint=hint, database=database, snapshot=text)


@contextmanager
def suggesting_create() -> Iterator[None]:
    """Add to the error of an unknown database that `--create` would create it."""
    try:
        yield
    except UnknownDatabase as error:
        error.hint = f"add `--create` to create it; {error.hint}"
        raise


def need_no_number(name: str) -> None:
    """Raise `InvalidName` for a snapshot name that reads as an id (rule 2)."""
    digits = name.removeprefix("#")
    if digits.isdecimal():
        hint = f"use v{digits}, for instance; a snapshot without a name gets an id"
        raise InvalidName("a snapshot name cannot be a number: it would be taken for an id", hint=hint, name=name)


def _get_snapshot(where: Any, database: str, asked: int | str) -> SnapshotInfo:
    """Return a snapshot from a manifest, a store, or a client of the owner."""
    if (remote := getattr(where, "get_snapshot", None)) is not None:
        info: SnapshotInfo = remote(database, asked)
    else:
        info = getattr(where, "manifest", where).snapshots.get(database, asked)
    return info


def any_database(txn: ReadTxn, text: str) -> int:
    """Return the id of a database by name, else by id, which may be that of a removed database: for history."""
    try:
        return txn.database_id(text)
    except UnknownDatabase:
        if not (number := number_of(text)):
            raise
        return number


def names_of(manifest: ManifestStore, values: Iterable[AboutDatabase]) -> dict[int, str]:
    """Return id → name of the databases that these values refer to; dropped ones are included until their rows are removed."""
    with manifest.read() as txn:
        return txn.database_names(value.db_id for value in values)


def title_of(snapshot: SnapshotInfo) -> str:
    """Format a snapshot for use in a sentence.

    >>> from quire.manifest.records import SnapshotKind
    >>> from quire.manifest.snapshots import SnapshotInfo
    >>> title_of(SnapshotInfo(1, 7, "monday", SnapshotKind.NAMED, 0, 0, 0, 0, 0, 0, 0, 0, 0, {}))
    'monday (id 7)'
    """
    return f"{snapshot.name} (id {snapshot.snapshot_id})" if snapshot.name else f"#{snapshot.snapshot_id}"


def tags_of(given: list[str], *, reserved: str = "", what: str = "tag") -> dict[str, str]:
    """Parse `--tag key=value` options. `reserved` is a key that must not be used."""
    tags: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not (equals and key.strip()):
            raise InvalidInput(f"{article(what)} is a key and a value", hint=f"use --{what} key=value", given=text)
        if key in tags:
            raise InvalidInput(f"{article(what)} is given twice", hint="give each key once", key=key)
        if key == reserved:
            raise InvalidInput("this tag is reserved for automatic snapshots", hint="use another key", key=key)
        tags[key] = value
    return tags


def recover_wal(store: Store | Client, name: str) -> DatabaseInfo:
    """Return a database after recovering its WAL, if an owner that crashed has left a segment open.

    A snapshot must include the last commit, and this process has not opened the database yet. With a client nothing is done:
    the live owner has recovered it.
    """
    info = store.database(name)
    here: Any = store if hasattr(store, "manifest") else None
    if info.kind is DbKind.PAGES and here is not None:
        with here.manifest.read() as txn:
            left_open = any(row.state is WalState.OPEN for _, row in txn.scan(t.WAL_CATALOG, info.db_id))
        if left_open:
            here.pages.open(info.db_id)
    return info


def need_pages(info: DatabaseInfo, what: str) -> None:
    """Raise `WrongKind` unless it is a page database. `what` completes "only page databases"."""
    if info.kind.name != "PAGES":
        hint = "`quire ls` shows the kinds"
        raise WrongKind(f"only page databases {what}", hint=hint, name=info.name, kind=info.kind.name.lower())


def need_runner(runner: str) -> None:
    """Raise `InvalidInput` for an unknown runner."""
    if runner and runner not in RUNNERS:
        raise InvalidInput("unknown runner", hint=f"runners: {', '.join(RUNNERS)}", runner=runner)


def need_report_path(path: str) -> None:
    """Raise `InvalidInput` if no report can be written at `path`, before the run that it is to report on."""
    folder = os.path.dirname(os.path.abspath(path))
    if path and not os.path.isdir(folder):
        raise InvalidInput("the report's directory does not exist", hint="create the directory first", path=folder)
    if path and (os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK)):
        raise InvalidInput("no report can be written there", hint="name a file that this user may write", path=path)


def log_to(style: str) -> None:
    """Write events in this style, if one was given."""
    if style:
        configure(style)


# ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class VersionRef(msgspec.Struct, frozen=True):
    """A version of a database: a snapshot, the state at an epoch or a time, or (neither) the newest."""

    text: str
    snapshot: SnapshotInfo | None = None
    at: Epoch | datetime | None = None

    @property
    def then(self) -> str:
        """The rest of a sentence that begins with the database's name: `was at snapshot monday (id 1)`."""
        return self.text.replace("as of ", "was at ").removeprefix("as it ")


def version_of(where: Any, database: str, text: str) -> VersionRef:
    """Resolve the user's text for a version (rule 1). `where` has the snapshots: a manifest, a store, or an owner's client."""
    if not text:
        return VersionRef("as it is now")
    try:
        info = snapshot_named(where, database, text)
        return VersionRef(f"as of snapshot {title_of(info)}", snapshot=info)
    except UnknownSnapshot as unknown:
        now_ms = SystemClock().now_ms()
        at = parse_version(text, now_ms=now_ms, unknown=unknown)
    if isinstance(at, Epoch):
        return VersionRef(f"as of epoch {text}", at=at)
    at_ms = int(at.timestamp() * 1000)
    if at_ms > now_ms:
        raise InvalidInput("the time is in the future", hint="leave it out for the newest version", given=text)
    return VersionRef(f"as it was {moment(at_ms)}", at=at)
