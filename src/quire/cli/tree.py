"""The command `tree`: databases, their snapshots and the forks made of them, as a tree.

Rules
  1. A fork stands below the snapshot it was made at; if that is gone, or it was made of the database as it was, below the
     database. People see a database that was dropped only for the sake of its forks; programs see all there is a record of.
  2. People see the newest `SNAPSHOTS_SHOWN` snapshots of a database and those with forks; `--all` and programs see all.
  3. Nothing is read but the manifest; `--sizes` also reads who holds what, which takes longer.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from quire.cli.command import Cli
from quire.cli.output import Node, Tree
from quire.cli.plain import count_of, moment, size
from quire.cli.snapshots import share_json, tags_text
from quire.cli.typed import command
from quire.core.errors import InvalidInput, UnknownDatabase
from quire.core.plain import plain

if TYPE_CHECKING:
    from quire.manifest.reads import ReadTxn
    from quire.manifest.records import DbRecord
    from quire.manifest.snapshots import LineageNode, SnapshotInfo
    from quire.manifest.store import ManifestStore
    from quire.store.info import Share

SNAPSHOTS_SHOWN = 5
DEPTH_MAX = 150
"""Deeper nesting is more than most JSON libraries read, ours included."""


def add_to(app: typer.Typer) -> None:
    """Register this command."""
    command(app, "tree", example="quire tree --sizes")(tree)


class Known(msgspec.Struct, frozen=True):
    """What the manifest says, gathered before anything is drawn."""

    records: dict[int, DbRecord]
    snapshots: dict[int, list[SnapshotInfo]]
    names: dict[int, dict[int, str]]
    """Of the snapshots of a database, by id."""
    shares: dict[tuple[int, int], Share]
    """What only a snapshot (database, snapshot) or a live database (database, 0) holds; empty if nobody asked."""
    everything: bool


def tree(
    cli: Cli,
    everything: Annotated[bool, typer.Option("--all", help="All snapshots, however many.")] = False,
    sizes: Annotated[bool, typer.Option("--sizes", help="Say how much only this database or snapshot holds.")] = False,
) -> Tree:
    """Show who came from whom: databases, snapshots, forks."""
    with cli.reader() as manifest:
        lineage = manifest.snapshots.lineage()
        known = _known(manifest, lineage, everything=everything, sizes=sizes)
    if cli.as_json:
        return Tree(roots=(), data=_nested(lineage, known))
    return Tree(
        roots=_roots(lineage, known),
        data=None,
        empty="no databases yet: `quire create NAME --kind pages` makes one",
    )


def nodes_of(manifest: ManifestStore) -> list[Node]:
    """The lineage of a store, for people."""
    lineage = manifest.snapshots.lineage()
    return _roots(lineage, _known(manifest, lineage, everything=False, sizes=False))


def _roots(lineage: list[LineageNode], known: Known) -> list[Node]:
    nodes: dict[int, Node] = {}
    for each in reversed(_in_order(lineage)):
        node = _node(each, known, nodes)
        if node.below or not _is_gone(each):
            nodes[each.db_id] = node
    return [nodes[each.db_id] for each in lineage if each.db_id in nodes]


def _in_order(lineage: list[LineageNode]) -> list[LineageNode]:
    """Every database, parents before their forks."""
    order = list(lineage)
    for each in order:  # grows while it is walked
        order += each.forks
    return order


def _known(manifest: ManifestStore, lineage: list[LineageNode], *, everything: bool, sizes: bool) -> Known:
    snapshots: dict[int, list[SnapshotInfo]] = {}
    for each in _in_order(lineage):
        with suppress(UnknownDatabase):  # gone, or just now
            snapshots[each.db_id] = manifest.snapshots.of(each.db_id)
    names = {db_id: {one.snapshot_id: one.name for one in found} for db_id, found in snapshots.items()}
    with manifest.read() as txn:
        records = dict(txn.databases())
        shares = _shares(txn, snapshots) if sizes else {}
    return Known(records, snapshots, names, shares, everything)


def _shares(txn: ReadTxn, snapshots: dict[int, list[SnapshotInfo]]) -> dict[tuple[int, int], Share]:
    from quire.store.info import live_share, snapshots_share

    shares = {(db_id, 0): live_share(txn, db_id) for db_id in snapshots}
    for db_id, found in snapshots.items():
        for each in found:
            shares[db_id, each.snapshot_id] = snapshots_share(txn, db_id, [each.snapshot_id])
    return shares


def _is_gone(each: LineageNode) -> bool:
    return each.status is None or each.status.name == "TOMBSTONED"


# ── for people ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _node(each: LineageNode, known: Known, nodes: dict[int, Node]) -> Node:
    """A database, with its forks below what they were made of (rule 1); `nodes` has those already."""
    snapshots = known.snapshots.get(each.db_id, [])
    kept = known.names.get(each.db_id, {})
    at: dict[int, list[LineageNode]] = {}
    for child in (child for child in each.forks if child.db_id in nodes):
        at.setdefault(child.parent_snapshot_id if child.parent_snapshot_id in kept else 0, []).append(child)
    newest = {snapshot.snapshot_id for snapshot in snapshots[-SNAPSHOTS_SHOWN:]}
    shown = [one for one in snapshots if known.everything or one.snapshot_id in newest or one.snapshot_id in at]
    below = [
        Node(
            _snapshot_name(one),
            _snapshot_text(one, known),
            [nodes[child.db_id] for child in at.get(one.snapshot_id, ())],
        )
        for one in shown
    ]
    if len(shown) < len(snapshots):
        left = count_of(len(snapshots) - len(shown), "older snapshot")
        below.insert(0, Node(f"… {left}", "`--all` shows them", faded=True))
    below += [nodes[child.db_id] for child in at.get(0, ())]
    return Node(_name(each), _text(each, known), below, faded=_is_gone(each))


def _name(each: LineageNode) -> str:
    return each.name or f"#{each.db_id}"


def _text(each: LineageNode, known: Known) -> str:
    record = known.records.get(each.db_id)
    if record is None:
        return "dropped"
    words = [record.kind.name.lower()]
    if _is_gone(each):
        words = [f"id {each.db_id}", "dropped"]
    elif record.status.name == "READ_ONLY":
        words.append("read-only")
    if each.parent_db_id:
        words.append(_forked(each, known))
    if not _is_gone(each):
        words += _only_here(known, each.db_id, 0)
    return ", ".join(words)


def _forked(each: LineageNode, known: Known) -> str:
    gone = each.parent_snapshot_id and each.parent_snapshot_id not in known.names.get(each.parent_db_id, ())
    where = f" of snapshot #{each.parent_snapshot_id}, dropped" if gone else ""
    return f"forked {moment(each.created_at_ms)}{where}"


def _snapshot_name(one: SnapshotInfo) -> str:
    return f"@{one.name}" if one.name else f"#{one.snapshot_id}"


def _snapshot_text(one: SnapshotInfo, known: Known) -> str:
    words = [moment(one.created_at_ms), *_only_here(known, one.db_id, one.snapshot_id)]
    if one.tags:
        words.append(tags_text(one.tags))
    return ", ".join(words)


def _only_here(known: Known, db_id: int, snapshot_id: int) -> list[str]:
    share = known.shares.get((db_id, snapshot_id))
    return [] if share is None else [f"{size(share.size_bytes)} only here"]


# ── for programs ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _nested(lineage: list[LineageNode], known: Known) -> list[dict[str, Any]]:
    made: dict[int, dict[str, Any]] = {}
    depth: dict[int, int] = {}
    order = _in_order(lineage)
    for each in order:
        depth[each.db_id] = depth.get(each.parent_db_id, 0) + 1
    if max(depth.values(), default=0) > DEPTH_MAX:
        raise InvalidInput(
            "the forks of forks are too deep to nest", hint="`quire ls --json` names every parent", max=DEPTH_MAX
        )
    for each in reversed(order):
        made[each.db_id] = _object(each, known, [made[child.db_id] for child in each.forks])
    return [made[each.db_id] for each in lineage]


def _object(each: LineageNode, known: Known, forks: list[dict[str, Any]]) -> dict[str, Any]:
    record = known.records.get(each.db_id)
    snapshots = known.snapshots.get(each.db_id, [])
    names = known.names.get(each.parent_db_id, {})
    return {
        "db_id": each.db_id,
        "name": each.name,
        "kind": plain(record.kind) if record else None,
        "status": plain(each.status) if each.status else "gone",
        "created_at_ms": each.created_at_ms,
        "parent_db_id": each.parent_db_id,
        "parent_snapshot_id": each.parent_snapshot_id,
        "parent_snapshot": names.get(each.parent_snapshot_id, ""),
        "parent_generation": each.parent_generation,
        "parent_lsn": each.parent_lsn,
        **_share_of(known, each.db_id, 0),
        "snapshots": [{**plain(one), **_share_of(known, each.db_id, one.snapshot_id)} for one in snapshots],
        "forks": forks,
    }


def _share_of(known: Known, db_id: int, snapshot_id: int) -> dict[str, Any]:
    share = known.shares.get((db_id, snapshot_id))
    return {} if share is None else {"share": share_json(share)}
