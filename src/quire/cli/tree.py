"""The command `tree`: shows databases, their snapshots and their forks.

A fork is shown below the snapshot it was forked from, or below its parent if that snapshot was dropped or there was none. Text
shows the newest `SNAPSHOTS_SHOWN` snapshots of a database and those with forks, the first `FORKS_SHOWN` forks of one version,
and a dropped database only if it has forks; `--all` shows every snapshot and fork, and JSON has everything on record.

In a store with more databases than are listed, one page is read, as by `quire ls`, together with the ancestors of its
databases.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from quire.cli.declarations import Option, command
from quire.cli.formatting import count_of, kind_text, size
from quire.cli.lookup import LISTED, After, Kind, Limit, Prefix, Sort, Tag, limit_of, more_text
from quire.cli.output import Node, Tree
from quire.cli.snapshots import about, share_json
from quire.core.clock import moment
from quire.core.errors import InvalidInput, ManifestDamaged
from quire.core.json_values import plain
from quire.manifest.kv_tables import table_holders
from quire.manifest.records import DbKind
from quire.manifest.snapshots import forest, snapshots_of, with_ancestors
from quire.service.values import DatabaseFilter
from quire.store.exclusive_artifacts import ExclusiveShare, live_share, snapshots_share
from quire.store.listing import is_whole, page_of
from quire.store.manifest_reader import ManifestReader

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.manifest.reads import ReadTxn
    from quire.manifest.records import DbRecord
    from quire.manifest.snapshots import LineageNode, SnapshotInfo
    from quire.manifest.store import ManifestStore

SNAPSHOTS_SHOWN = 5
FORKS_SHOWN = 20
DEPTH_MAX = 150
"""Most JSON libraries, ours included, do not read deeper nesting."""


class TreeData(msgspec.Struct, frozen=True):
    """What is read from the manifest before anything is drawn."""

    lineage: list[LineageNode]
    records: dict[int, DbRecord]
    snapshots: dict[int, list[SnapshotInfo]]
    names: dict[int, dict[int, str]]
    """Database → snapshot id → name."""
    shares: dict[tuple[int, int], ExclusiveShare]
    """What a snapshot (database, snapshot) or a live database (database, 0) holds exclusively; empty without `--sizes`."""
    everything: bool


@command("tree", example="quire tree --sizes")
def tree(
    cli: Cli,
    prefix: Prefix = "",
    kind: Kind = "",
    tag: Tag = "",
    sort: Sort = "name",
    limit: Limit = None,
    after: After = "",
    everything: Annotated[bool, Option("--all", help="Show all snapshots and forks of what is listed.")] = False,
    sizes: Annotated[
        bool, Option("--sizes", help="Show how much each database and snapshot holds exclusively.")
    ] = False,
) -> Tree:
    """Show database lineage: databases, snapshots and forks.

    The databases are selected as by `quire ls`; their ancestors are shown above them, selected or not.
    """
    most = limit_of(limit, as_json=cli.as_json)
    wanted = DatabaseFilter(prefix=prefix, kind=kind, tag=tag, sort=sort, limit=most, after=after)
    with ManifestReader(cli.path) as store, store.read() as txn:
        known, last = _known(txn, wanted, everything=everything, sizes=sizes)
    if cli.as_json:
        return Tree(roots=(), data=_nested(known))
    is_chosen = prefix or kind or tag or after
    return Tree(
        roots=_roots(known),
        data=None,
        empty="no database matches" if is_chosen else "no databases: create one with `quire create NAME --kind pages`",
        closing=more_text(last, sort) if last else "",
    )


def nodes_of(manifest: ManifestStore) -> list[Node]:
    """Return the lineage of a store, as nodes to draw."""
    with manifest.read() as txn:
        known, _ = _known(txn, DatabaseFilter(limit=LISTED), everything=False, sizes=False)
    return _roots(known)


def _known(txn: ReadTxn, wanted: DatabaseFilter, *, everything: bool, sizes: bool) -> tuple[TreeData, str]:
    """Read what to draw; return it with the last name of the page, or an empty string if there are no more."""
    last = ""
    if is_whole(txn, wanted):
        records, damaged = dict(txn.databases()), txn.damaged_databases()
    else:
        page, last = page_of(txn, wanted)
        records, damaged = with_ancestors(txn, page)
    snapshots: dict[int, list[SnapshotInfo]] = {}
    for db_id in records:
        with suppress(ManifestDamaged):  # its row is damaged
            snapshots[db_id] = snapshots_of(txn, db_id)
    names = {db_id: {row.snapshot_id: row.name for row in rows} for db_id, rows in snapshots.items()}
    shares = _shares(txn, records, snapshots) if sizes else {}
    return TreeData(forest(records, damaged), records, snapshots, names, shares, everything), last


def _shares(
    txn: ReadTxn, records: dict[int, DbRecord], snapshots: dict[int, list[SnapshotInfo]]
) -> dict[tuple[int, int], ExclusiveShare]:
    holders = table_holders(txn)
    shares = {(db_id, 0): live_share(txn, db_id, holders) for db_id in snapshots}
    for db_id, rows in snapshots.items():
        if records[db_id].kind is DbKind.LSM:
            continue  # the tables that only a snapshot of a key-value set keeps have no rows
        for snapshot in rows:
            shares[db_id, snapshot.snapshot_id] = snapshots_share(txn, db_id, [snapshot.snapshot_id])
    return shares


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _node(database: LineageNode, known: TreeData, nodes: dict[int, Node]) -> Node:
    """Return the node of a database, with its forks below their versions. `nodes` has the nodes of the forks."""
    snapshots = known.snapshots.get(database.db_id, [])
    kept = known.names.get(database.db_id, {})
    forks_at: dict[int, list[LineageNode]] = {}
    for fork in (fork for fork in database.forks if fork.db_id in nodes):
        forks_at.setdefault(fork.parent_snapshot_id if fork.parent_snapshot_id in kept else 0, []).append(fork)
    newest = {snapshot.snapshot_id for snapshot in snapshots[-SNAPSHOTS_SHOWN:]}
    shown = [row for row in snapshots if known.everything or row.snapshot_id in newest or row.snapshot_id in forks_at]
    below = [
        Node(
            _snapshot_name(snapshot),
            _snapshot_text(snapshot, known),
            _forks(forks_at.get(snapshot.snapshot_id, []), known, nodes),
        )
        for snapshot in shown
    ]
    if len(shown) < len(snapshots):
        left = count_of(len(snapshots) - len(shown), "older snapshot")
        below.insert(0, Node(f"… {left}", "use `--all` to show", faded=True))
    below += _forks(forks_at.get(0, []), known, nodes)
    return Node(database.name or f"#{database.db_id}", _text(database, known), below, faded=_is_dropped(database))


def _forks(forks: list[LineageNode], known: TreeData, nodes: dict[int, Node]) -> list[Node]:
    """Return the nodes of the forks of one version: the first ones, and how many more there are."""
    shown = forks if known.everything else forks[:FORKS_SHOWN]
    below = [nodes[fork.db_id] for fork in shown]
    if len(shown) < len(forks):
        left = count_of(len(forks) - len(shown), "more fork")
        below.append(Node(f"… and {left}", "use `--all` to show", faded=True))
    return below


def _text(database: LineageNode, known: TreeData) -> str:
    record = known.records.get(database.db_id)
    if record is None:
        return "damaged; see `quire manifest check`" if database.name else "dropped"
    words = [kind_text(record.kind)]
    if _is_dropped(database):
        words = [f"id {database.db_id}", "dropped"]
    elif record.status.name == "READ_ONLY":
        words.append("read-only")
    if database.parent_db_id:
        words.append(_forked(database, known))
    if not _is_dropped(database):
        words += _exclusive(known, database.db_id, 0)
    return ", ".join(words)


def _forked(fork: LineageNode, known: TreeData) -> str:
    dropped = fork.parent_snapshot_id and fork.parent_snapshot_id not in known.names.get(fork.parent_db_id, ())
    source = f" from a snapshot since dropped (#{fork.parent_snapshot_id})" if dropped else ""
    return f"forked {moment(fork.created_at_ms)}{source}"


def _snapshot_name(snapshot: SnapshotInfo) -> str:
    return f"@{snapshot.name}" if snapshot.name else f"#{snapshot.snapshot_id}"


def _snapshot_text(snapshot: SnapshotInfo, known: TreeData) -> str:
    words = [moment(snapshot.created_at_ms), *_exclusive(known, snapshot.db_id, snapshot.snapshot_id)]
    return ", ".join(filter(None, (*words, about(snapshot))))


def _exclusive(known: TreeData, db_id: int, snapshot_id: int) -> list[str]:
    share = known.shares.get((db_id, snapshot_id))
    return [] if share is None else [f"{size(share.size_bytes)} exclusive"]


def _roots(known: TreeData) -> list[Node]:
    """Return the trees as nodes to draw."""
    nodes: dict[int, Node] = {}
    for database in reversed(_in_order(known.lineage)):
        node = _node(database, known, nodes)
        if node.below or not _is_dropped(database):
            nodes[database.db_id] = node
    return [nodes[root.db_id] for root in known.lineage if root.db_id in nodes]


def _in_order(lineage: list[LineageNode]) -> list[LineageNode]:
    """Return every database, parents before their forks."""
    order = list(lineage)
    for database in order:  # the list grows during iteration
        order += database.forks
    return order


def _is_dropped(database: LineageNode) -> bool:
    return database.status is None or database.status.name == "TOMBSTONED"


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _nested(known: TreeData) -> list[dict[str, Any]]:
    """Return the trees as nested JSON objects."""
    depth: dict[int, int] = {}
    nodes = _in_order(known.lineage)
    for node in nodes:
        depth[node.db_id] = depth.get(node.parent_db_id, 0) + 1
    if max(depth.values(), default=0) > DEPTH_MAX:
        hint = "`quire ls --json` names every parent"
        raise InvalidInput("forks are nested too deeply for one JSON document", hint=hint, max=DEPTH_MAX)
    objects: dict[int, dict[str, Any]] = {}
    for node in reversed(nodes):
        objects[node.db_id] = _object(node, known, [objects[fork.db_id] for fork in node.forks])
    return [objects[root.db_id] for root in known.lineage]


def _object(node: LineageNode, known: TreeData, forks: list[dict[str, Any]]) -> dict[str, Any]:
    record = known.records.get(node.db_id)
    snapshots = known.snapshots.get(node.db_id, [])
    names = known.names.get(node.parent_db_id, {})
    return {
        "db_id": node.db_id,
        "name": node.name,
        "kind": record.kind.name.lower() if record else None,
        "status": node.status.name.lower() if node.status else "damaged" if node.name else "gone",
        "created_at_ms": node.created_at_ms,
        "parent_db_id": node.parent_db_id,
        "parent_snapshot_id": node.parent_snapshot_id,
        "parent_snapshot": names.get(node.parent_snapshot_id, ""),
        "parent_generation": node.parent_generation,
        "parent_lsn": node.parent_lsn,
        **_share_of(known, node.db_id, 0),
        "snapshots": [{**plain(row), **_share_of(known, node.db_id, row.snapshot_id)} for row in snapshots],
        "forks": forks,
    }


def _share_of(known: TreeData, db_id: int, snapshot_id: int) -> dict[str, Any]:
    share = known.shares.get((db_id, snapshot_id))
    return {} if share is None else {"share": share_json(share)}
