"""The quick way to what is asked most: ls, info, tree, snapshot ls and the list of commands, for a few Python starts;
`quick_lists` has two more.

Rules
  1. It shows what the usual commands show, letter by letter (a test compares them), or it declines by raising anything at all:
     then the usual way is taken, which tells what is wrong.
  2. It loads LMDB, and neither msgspec nor dataclasses nor typer (a test looks): each costs more than the whole command.
  3. Of quire.toml it reads where the objects are; a store with other settings is for the usual way, which checks them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

from quire.cli.command import Cli
from quire.cli.lineage import DEPTH_MAX, Known, in_order, nested, roots
from quire.cli.output import Facts, Listing, Ready, Tree
from quire.cli.show import facts, listing, snapshot_listing
from quire.manifest.glance import Glance, Unfamiliar
from quire.manifest.kinds import DbKind, DbStatus
from quire.manifest.lineage import grow
from quire.store.plain_config import object_store_of

CONFIG, MANIFEST, OBJECTS = "quire.toml", "manifest.lmdb", "objects"
"""As `quire.durable.names` has them, which is slow to load (a test compares)."""

SCHEMES = ("s3://", "gs://", "az://", "memory://", "file://")

HELP_COLUMNS = 80
"""What help.txt was written for: on a narrower terminal typer breaks the lines."""


# ── a store ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class Looked(Glance):
    """A store that is only looked at."""

    def __init__(self, cli: Cli) -> None:
        self.root = os.path.abspath(cli.path)
        self.object_store = _object_store(self.root)
        super().__init__(os.path.join(self.root, MANIFEST))

    def rows(self, table: str) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of a table, in order."""
        return self._rows(table)


def _object_store(root: str) -> str:
    """What quire.toml says of the objects (rule 3)."""
    with open(os.path.join(root, CONFIG), encoding="utf-8", newline="") as file:
        url = object_store_of(file.read())
    if url is None:
        raise Unfamiliar(f"a setting of {CONFIG}: whether it makes sense is known elsewhere")
    if ":" in url and not url.startswith(SCHEMES):
        raise Unfamiliar("an object store of another kind")
    return url if "://" in url else os.path.join(root, url or OBJECTS)


def _told(value: SimpleNamespace) -> Ready:
    """A value as an object of JSON; what it is made of is plain but for enumerations."""
    return Ready({name: each.name.lower() if isinstance(each, Enum) else each for name, each in vars(value).items()})


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def ls(cli: Cli) -> Listing:
    """As `quire.cli.show.ls`."""
    with Looked(cli) as store:
        records = store.databases()
        live = [
            SimpleNamespace(
                db_id=db_id,
                name=each.name,
                kind=each.kind,
                status=each.status,
                created_at_ms=each.created_at_ms,
                page_size=each.page_size,
                snapshots=store.count_of("snapshot_index", db_id),
                parent_db_id=each.parent_db_id,
                parent=_parent(records.get(each.parent_db_id)),
                tags=each.tags,
            )
            for db_id, each in records.items()
            if each.status is not DbStatus.TOMBSTONED
        ]
    found: Any = sorted(live, key=lambda each: each.name)
    return listing(found, [_told(each) for each in found])


def _parent(record: SimpleNamespace | None) -> str:
    return record.name if record is not None and record.status is not DbStatus.TOMBSTONED else ""


def info(cli: Cli) -> Facts:
    """As `quire.cli.show.info`."""
    from quire.durable.space import given_below  # for this command alone

    with Looked(cli) as store:
        records = store.databases().values()
        live = [each.kind for each in records if each.status is not DbStatus.TOMBSTONED]
        oldest, head = store.feed_bounds()
        found: Any = SimpleNamespace(
            path=store.root,
            mode="r",
            store_id=store.meta("store_id").text,
            schema=store.meta("schema").number,
            object_store=store.object_store,
            owner_epoch=store.owner_epoch(),
            owner_session=0,
            owner_state=_own_objects(store),
            databases={kind.name.lower(): live.count(kind) for kind in DbKind},
            dropped=len(records) - len(live),
            snapshots=store.count("snapshot_index"),
            chunks=store.count("chunk_catalog"),
            deltas=store.count("chunk_delta_index"),
            wal_segments=store.count("wal_catalog"),
            jobs=store.count("job_queue"),
            unreferenced=store.count("gc_zero"),
            oldest_change=oldest if store.count("change_log") else 0,
            newest_change=head,
            manifest_bytes=store.file_bytes,
            map_bytes=store.figures["map_size"],
            readers=store.readers(),
            disk_bytes=sum(given for _, given in given_below(store.root)),
        )
    return facts(found, _told(found))


def _own_objects(store: Looked) -> str:
    """The state of a store whose objects are in its directory; others have a file that says more."""
    home, place = os.path.realpath(store.root), os.path.realpath(store.object_store)
    if "://" in store.object_store or not place.startswith(home.rstrip(os.sep) + os.sep):
        raise Unfamiliar("objects outside the store's directory")
    return "not needed"


def tree(cli: Cli) -> Tree:
    """As `quire.cli.tree.tree`, without its options."""
    with Looked(cli) as store:
        records: Any = store.databases()
        snapshots: Any = {db_id: store.snapshots(db_id) for db_id in records}
    lineage: Any = grow(records, _node)
    for each in in_order(lineage):
        snapshots.setdefault(each.db_id, [])
    names = {db_id: {one.snapshot_id: one.name for one in found} for db_id, found in snapshots.items()}
    known = Known(records, snapshots, names, {}, False)
    if cli.as_json:
        return Tree(roots=(), data=[Ready(each) for each in nested(lineage, known, _told, DEPTH_MAX)])
    empty = "no databases yet: `quire create NAME --kind pages` makes one"
    return Tree(roots=roots(lineage, known), data=None, empty=empty)


def _node(db_id: int, record: Any, forks: tuple[Any, ...]) -> SimpleNamespace:
    """With the fields of `LineageNode`."""
    found = record or SimpleNamespace(
        name="",
        status=None,
        parent_db_id=0,
        parent_snapshot_id=0,
        parent_generation=0,
        parent_lsn=0,
        created_at_ms=0,
    )
    return SimpleNamespace(
        db_id=db_id,
        name=found.name,
        status=found.status,
        parent_db_id=found.parent_db_id,
        parent_snapshot_id=found.parent_snapshot_id,
        parent_generation=found.parent_generation,
        parent_lsn=found.parent_lsn,
        created_at_ms=found.created_at_ms,
        forks=forks,
    )


def snapshot_ls(cli: Cli, database: str) -> Listing:
    """As `quire.cli.snapshots.ls`."""
    with Looked(cli) as store:
        live = [db_id for db_id, each in store.databases().items() if (each.name, _is_live(each)) == (database, True)]
        if len(live) != 1:
            raise Unfamiliar("a database that is not there")
        found: Any = store.snapshots(live[0])
    return snapshot_listing(database, found, [Ready({**_told(each), "database": database}) for each in found])


def _is_live(record: SimpleNamespace) -> bool:
    return record.status is not DbStatus.TOMBSTONED


# ── the list of commands ──────────────────────────────────────────────────────────────────────────────────────────────
def help_text() -> str:
    """What typer writes for `quire --help` on a terminal of 80 columns and more, or on none; else declines."""
    columns = os.environ.get("COLUMNS", "")
    if columns or sys.stdout.isatty():
        width = int(columns) if columns else os.get_terminal_size(sys.stdout.fileno()).columns
        if width < HELP_COLUMNS:
            raise Unfamiliar("a narrow terminal")
    with open(os.path.join(os.path.dirname(__file__), "help.txt"), encoding="utf-8") as file:
        text = file.read()
    text.encode(sys.stdout.encoding or "utf-8")  # if it cannot be shown, typer shows it in its own way
    return text
