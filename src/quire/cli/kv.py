"""Commands about key-value databases: get, put, delete, scan, stats, compact, verify, repair, backup, backups, prune, restore.

Rules
  1. Keys and values on the command line are text (UTF-8), or hexadecimal with --hex. Output is text if it is valid UTF-8, else
     `0x…`. JSON has them in hexadecimal.
  2. A write is synced before the command reports it.
  3. `get`, `scan` and `stats` also work where this process cannot own the store: alongside another owner, on a standby, in a
     restored directory.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import partial
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.errors import OK, PROBLEMS
from quire.cli.formatting import count_of, size
from quire.cli.job_progress import failure_of
from quire.cli.lookup import Database, Runner, Yes, need_runner, suggesting_create
from quire.cli.output import CliResult, Facts, Listing, ListingRow, Note, Report
from quire.cli.prompts import confirm
from quire.core.clock import SystemClock, moment
from quire.core.errors import InvalidInput, NotFound, UnknownDatabase
from quire.durable.object_names import kv_backups_prefix

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.lsm.backup import Backup
    from quire.objects.api import ObjectStore
    from quire.store.store import Store

Key = Annotated[str, Argument(metavar="KEY", help="The key.")]
Hex = Annotated[bool, Option("--hex", help="Keys and values are hexadecimal.")]
InNamespace = Annotated[
    str,
    Option("--namespace", metavar="NAME", help="Namespace of the backups.", show_default="that of the database"),
]
Label = Annotated[
    str, Option("--label", metavar="NAME", help="The label of the backups.", show_default="the database's name")
]

SCAN_ROWS = 100
"""Default limit of `scan`."""


group = Group("kv")


# ── pairs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("get", group, example="quire kv get cart ann")
def get(cli: Cli, database: Database, key: Key, hex_: Hex = False) -> Note:
    """Show the value of a key."""
    name = _given(key, hex_)
    with cli.readable() as store:
        value = store.kv(database).get(name)
    if value is None:
        hint = f"`quire kv scan {shlex.quote(database)}` lists the keys"
        raise NotFound("no such key", hint=hint, key=key, database=database)
    return Note(text=_shown(value, hex_), data={"key": name, "value": value})


@command("put", group, example="quire kv put cart ann '3 apples' --create")
def put(
    cli: Cli,
    database: Database,
    key: Key,
    value: Annotated[str, Argument(metavar="VALUE", help="The value.")],
    hex_: Hex = False,
    create: Annotated[bool, Option("--create", help="Create the database if it does not exist.")] = False,
) -> Note:
    """Set the value of a key."""
    name, content = _given(key, hex_), _given(value, hex_)
    with cli.owner() as store, suggesting_create():
        lsn = store.kv(database, create=create).write({name: content})
    return Note(text=f"put {key or 'the empty key'} in {database}", data={"key": name, "lsn": lsn})


@command("delete", group, example="quire kv delete cart ann")
def delete(cli: Cli, database: Database, key: Key, hex_: Hex = False) -> Note:
    """Delete a key. A key that does not exist is not an error."""
    name = _given(key, hex_)
    with cli.owner() as store:
        lsn = store.kv(database).write({name: None})
    return Note(text=f"deleted {key} from {database}", data={"key": name, "lsn": lsn})


@command("scan", group, example="quire kv scan cart --prefix a --limit 10")
def scan(
    cli: Cli,
    database: Database,
    prefix: Annotated[str, Option("--prefix", metavar="KEY", help="Only keys with this prefix.")] = "",
    low: Annotated[str, Option("--from", metavar="KEY", help="First key.")] = "",
    high: Annotated[str, Option("--to", metavar="KEY", help="Last key, exclusive.")] = "",
    reverse: Annotated[bool, Option("--reverse", help="In descending order.")] = False,
    limit: Annotated[int, Option("--limit", "-n", min=0, help="Maximum number of rows; 0 for all.")] = SCAN_ROWS,
    hex_: Hex = False,
) -> Listing:
    """List keys and values in order."""
    if prefix and (low or high):
        raise InvalidInput("a scan takes a prefix or a range, not both", hint="use --prefix, or --from and --to")

    left: list[bytes] = []

    def rows() -> Iterator[ListingRow]:
        with cli.readable() as store:
            pairs = store.kv(database).scan(
                prefix=_given(prefix, hex_) if prefix else None,
                low=_given(low, hex_),
                high=_given(high, hex_) if high else None,
                reverse=reverse,
            )
            key = b""
            for key, value in islice(pairs, limit or None):
                yield ListingRow([_shown(key, hex_), _shown(value, hex_)], {"key": key, "value": value})
            # `--from` includes its key, so a scan continues at the next one; `--to`, for one in descending order, excludes it.
            left.extend(key if reverse else following for following, _ in islice(pairs, 1))

    def closing() -> str:
        if not left:
            return ""
        text = _shown(left[0], hex_)
        option = f"`{'--to' if reverse else '--from'} {shlex.quote(text)}` continues, "
        can_continue = not prefix and _given(text, hex_) == left[0]  # bytes that are not text need `--hex`
        return f"there are more: {option if can_continue else ''}`--limit 0` lists all"

    return Listing(columns=["key", "value"], rows=rows(), empty="no matching keys", closing=closing)


# ── maintenance ───────────────────────────────────────────────────────────────────────────────────────────────────────
@command("stats", group, example="quire kv stats cart")
def stats(cli: Cli, database: Database) -> Facts:
    """Show the tables, levels and memory of a database."""
    with cli.readable() as store:
        figures = store.kv(database).stats()
    lines = [
        ("keys (approx.)", f"{figures.rows - 2 * figures.tombstones + figures.memtable_keys:,}"),
        ("last lsn", f"{figures.last_lsn:,}"),
        ("tables", f"{figures.tables:,}, {size(figures.table_bytes)}"),
        (
            "levels",
            ", ".join(
                f"level {number}: {count_of(count, 'table')}" for number, count in enumerate(figures.levels) if count
            )
            or "none",
        ),
        ("in memory", f"{count_of(figures.memtable_keys, 'key')}, {size(figures.memtable_bytes)}"),
        ("manifest", f"version {figures.manifest_version:,}, {size(figures.manifest_log_bytes)} of log"),
    ]
    return Facts(lines=lines, data=figures)


@command("compact", group, example="quire kv compact cart")
def compact(cli: Cli, database: Database, runner: Runner = "") -> Note:
    """Merge all tables into one level. Overwritten and deleted values are removed."""
    need_runner(runner)
    with cli.owner() as store:
        job = store.heavy.compact(database, runner=runner)
    if (failure := failure_of(job, f"the compaction of {database}")) is not None:
        raise failure
    result = job.result or {}
    before, after = result.get("before_bytes", 0), result.get("after_bytes", 0)
    data = {"before": before, "after": after, "job_id": job.job_id, "runner": result.get("runner", "")}
    return Note(text=f"compacted {database}: {size(before)} → {size(after)}", data=data)


@command("verify", group, example="quire kv verify cart")
def verify(cli: Cli, database: Database) -> CliResult:
    """Read and verify every byte of a database."""
    from quire.lsm.verify import problems

    with cli.owner() as store:
        kv = store.kv(database)
        damage = list(problems(kv))
        tables = kv.stats().tables
    shown = Listing(
        columns=["rule", "what", "path"],
        rows=[ListingRow([problem.rule, problem.what, problem.path or "-"], problem) for problem in damage],
        empty=f"{database} has no damage: {count_of(tables, 'table')} read",
    )
    return CliResult(shown, PROBLEMS if damage else OK)


@command("repair", group, example="quire kv repair cart --apply")
def repair(
    cli: Cli,
    database: Database,
    apply: Annotated[bool, Option("--apply", help="Apply the repair; without it, only show it.")] = False,
) -> CliResult:
    """Repair a database whose files are inconsistent.

    Uses its tables and logs, their rows in the store's manifest, and copies in snapshots, forks and backups. Shows what would
    be done and what is lost. Nothing is removed: files that are not needed go to quarantine.
    """
    with cli.owner() as store:
        report = store.kvs.repair(database, apply=apply, objects=store.namespaces.objects_of(database))
    if not report.is_needed:
        return CliResult(Note(text=f"{database} needs no repair", data=report), OK)
    lines = [
        ("reason", report.reason or "-"),
        ("tables kept", f"{report.kept:,}"),
        ("from copies", ", ".join(report.brought_back) or "none"),
        ("from damaged tables", ", ".join(report.rewritten) or "nothing"),
        ("from logs", count_of(report.batches, "batch", "batches")),
        ("to quarantine", ", ".join(path for path, _ in report.moved) or "nothing"),
    ]
    lost = Listing(columns=["lost"], rows=[ListingRow([text], text) for text in report.lost], empty="no data is lost")
    doubts = Listing(columns=["warning"], rows=[ListingRow([text], text) for text in report.doubts], empty="")
    done = (
        f"repaired {database}"
        if report.applied
        else f"nothing was changed: run `quire kv repair {shlex.quote(database)} --apply` to apply it"
    )
    parts: list[Facts | Listing | Note] = [Facts(lines=lines, data=None), lost]
    parts += [doubts] if report.doubts else []
    shown = Report(parts=[*parts, Note(text=done, data=None)], data=report)
    return CliResult(shown, OK if report.applied and not report.lost else PROBLEMS)


def _lsm_backup() -> ModuleType:
    """Import the module on demand: it loads Arrow, which reading and writing keys does not need."""
    from quire.lsm import backup as lsm_backup

    return lsm_backup


# ── backups ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("backup", group, example="quire kv backup cart")
def backup(cli: Cli, database: Database, label: Label = "") -> Note:
    """Back up a database to the object store. Tables that are already there are not copied again.

    Only the newest 30 backups of a label are kept (`lsm.backups_kept` in quire.toml; 0 keeps all).
    """
    lsm_backup = _lsm_backup()
    with cli.owner() as store:
        place = store.namespaces.objects_of(database)
        copy = lsm_backup.back_up(store.kv(database), place, label or database, _home(store))
        removed: tuple[int, ...] = ()
        if keep := store.settings.lsm.backups_kept:
            removed = lsm_backup.prune(
                place,
                label or database,
                keep,
                delete=partial(store.delete_objects, url=place.url),
                now_ms=SystemClock().now_ms(),
                home=_home(store),
            ).backups
    text = f"backed up {database} at lsn {copy.lsn}: {count_of(len(copy.tables), 'table')}, {size(copy.size_bytes)}"
    if removed:
        text += f"; removed {count_of(len(removed), 'superseded backup')}"
    return Note(text=text, data={**_backup_json(copy), "removed": removed})


@command("backups", group, example="quire kv backups cart")
def list_backups(
    cli: Cli,
    label: Annotated[str, Argument(metavar="LABEL", help="The label of the backups.")],
    namespace: InNamespace = "",
) -> Listing:
    """List the backups in the object store, oldest first."""
    lsm_backup = _lsm_backup()
    with cli.owner() as store:
        place = _place(store, label, namespace)
        backups = [
            lsm_backup.read_backup(place, label, lsn, home)
            for home in (lsm_backup.FORMER_HOME, _home(store))
            for lsn in lsm_backup.backups(place, label, home)
        ]
    rows = [
        ListingRow(
            [str(copy.lsn), moment(copy.created_at_ms), str(len(copy.tables)), size(copy.size_bytes)],
            _backup_json(copy),
        )
        for copy in backups
    ]
    return Listing(columns=[">lsn", "created", ">tables", ">size"], rows=rows, empty=f"{label} has no backups")


@command("prune", group, example="quire kv prune cart --keep 5 --yes")
def prune(
    cli: Cli,
    label: Annotated[str, Argument(metavar="LABEL", help="The label of the backups.")],
    keep: Annotated[int, Option("--keep", min=0, metavar="N", help="Backups to keep; 0 for none.")] = 1,
    dry_run: Annotated[bool, Option("--dry-run", help="Only show what would be removed.")] = False,
    yes: Yes = False,
    namespace: InNamespace = "",
) -> Note:
    """Remove all but the newest backups, and tables that no backup needs."""
    lsm_backup = _lsm_backup()
    with cli.owner() as store:
        place = _place(store, label, namespace)
        prune_label = partial(
            lsm_backup.prune,
            place,
            label,
            keep,
            delete=partial(store.delete_objects, url=place.url),
            now_ms=SystemClock().now_ms(),
            home=_home(store),
        )
        plan = prune_label(dry_run=True)
        what = f"{count_of(len(plan.backups), 'backup')} and {count_of(plan.tables, 'table')}, {size(plan.size_bytes)}"
        stays = f"{count_of(plan.kept, 'backup')} of {label} {'remains' if plan.kept == 1 else 'remain'}"
        if dry_run or not (plan.backups or plan.tables):
            return Note(text=f"would remove {what}; {stays}" if dry_run else f"nothing to remove; {stays}", data=plan)
        if not yes:
            confirm(f"remove {what}?", "nothing was removed", None)
        done = prune_label()
    return Note(text=f"removed {what}; {stays}", data=done)


@command("restore", group, example="quire kv restore cart-again --label cart")
def restore(
    cli: Cli,
    database: Annotated[str, Argument(metavar="NEW", help="The new database's name.")],
    label: Label = "",
    lsn: Annotated[int, Option("--lsn", help="The lsn of the backup.", show_default="the newest")] = 0,
    store_id: Annotated[
        str, Option("--store-id", metavar="ID", help="The store that made the backup.", show_default="this store")
    ] = "",
    namespace: InNamespace = "",
) -> Note:
    """Create a database from a backup, in the namespace of the backup."""
    lsm_backup = _lsm_backup()
    with cli.owner() as store:
        label, home = label or database, kv_backups_prefix(store_id) if store_id else _home(store)
        place = _place(store, label, namespace)
        existing = lsm_backup.backups(place, label, home)
        if not store_id and (not existing or (lsn and lsn not in existing)):
            home = lsm_backup.FORMER_HOME  # made before the names of backups contained the store's identity
        chosen = lsm_backup.read_backup(place, label, lsn or None, home)
        db_id = store.kvs.adopt(
            database,
            lambda target: lsm_backup.restore(place, chosen, store.disk, target),
            namespace_id=_namespace_at(store, place.url),
        )
    text = f"restored {database} with id {db_id}, from backup {chosen.label} at lsn {chosen.lsn}"
    return Note(text=text, data={"db_id": db_id, "backup": _backup_json(chosen)})


def _place(store: Store, label: str, namespace: str) -> ObjectStore:
    """Return the object store of a label's backups: that of `namespace`, or of the database with the label's name."""
    if namespace:
        return store.namespaces.objects(namespace)
    try:
        return store.namespaces.objects_of(label)
    except UnknownDatabase:
        return store.objects


def _namespace_at(store: Store, url: str) -> int:
    """Return the id of the namespace at a URL, 0 for the store's own place."""
    return next(
        (info.namespace_id for info in store.namespaces.list() if info.url == url and not info.dropped_at_ms), 0
    )


def _home(store: Store) -> str:
    """Return the key prefix of this store's backups."""
    return kv_backups_prefix(store.feed.store_id())


def _backup_json(copy: Backup) -> dict[str, object]:
    return {
        "label": copy.label,
        "lsn": copy.lsn,
        "created_at_ms": copy.created_at_ms,
        "tables": len(copy.tables),
        "size_bytes": copy.size_bytes,
    }


def _given(text: str, as_hex: bool) -> bytes:
    if not as_hex:
        return text.encode("utf-8", "surrogateescape")
    try:
        return bytes.fromhex(text.removeprefix("0x"))
    except ValueError:
        raise InvalidInput("not hexadecimal", hint="use two digits per byte", given=text) from None


def _shown(data: bytes, as_hex: bool) -> str:
    """Format bytes as text, or as hexadecimal.

    >>> _shown(b"ann", False), _shown(b"\\xff\\x00", False), _shown(b"ann", True)
    ('ann', '0xff00', '616e6e')
    """
    if as_hex:
        return data.hex()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"0x{data.hex()}"
