"""The lineage of a store, as people and as programs see it: what `quire tree` shows.

It works on values with the fields of `LineageNode`, `DbRecord` and `SnapshotInfo`, whoever has read them: the command, or the
quick way in, which loads neither typer nor msgspec. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.cli.formatting import count_of, moment, size
from quire.cli.output import Node
from quire.cli.show import about
from quire.core.errors import InvalidInput

if TYPE_CHECKING:
    from quire.manifest.records import DbRecord
    from quire.manifest.snapshots import LineageNode, SnapshotInfo
    from quire.store.info import Share

SNAPSHOTS_SHOWN = 5
DEPTH_MAX = 150
"""Deeper nesting is more than most JSON libraries read, ours included."""


@dataclass(frozen=True)
class Known:
    """What the manifest says, gathered before anything is drawn."""

    records: dict[int, DbRecord]
    snapshots: dict[int, list[SnapshotInfo]]
    names: dict[int, dict[int, str]]
    """Of the snapshots of a database, by id."""
    shares: dict[tuple[int, int], Share]
    """What only a snapshot (database, snapshot) or a live database (database, 0) holds; empty if nobody asked."""
    everything: bool


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
    return ", ".join(filter(None, (*words, about(one))))


def _only_here(known: Known, db_id: int, snapshot_id: int) -> list[str]:
    share = known.shares.get((db_id, snapshot_id))
    return [] if share is None else [f"{size(share.size_bytes)} only here"]


def roots(lineage: list[LineageNode], known: Known) -> list[Node]:
    """The trees, for people."""
    nodes: dict[int, Node] = {}
    for each in reversed(in_order(lineage)):
        node = _node(each, known, nodes)
        if node.below or not _is_gone(each):
            nodes[each.db_id] = node
    return [nodes[each.db_id] for each in lineage if each.db_id in nodes]


def in_order(lineage: list[LineageNode]) -> list[LineageNode]:
    """Every database, parents before their forks."""
    order = list(lineage)
    for each in order:  # grows while it is walked
        order += each.forks
    return order


def _is_gone(each: LineageNode) -> bool:
    return each.status is None or each.status.name == "TOMBSTONED"


# ── for programs ──────────────────────────────────────────────────────────────────────────────────────────────────────
def nested(
    lineage: list[LineageNode], known: Known, told: Callable[[Any], dict[str, Any]], deepest: int
) -> list[dict[str, Any]]:
    """The trees, for programs; `told` makes an object of a snapshot or a share."""
    made: dict[int, dict[str, Any]] = {}
    depth: dict[int, int] = {}
    order = in_order(lineage)
    for each in order:
        depth[each.db_id] = depth.get(each.parent_db_id, 0) + 1
    if max(depth.values(), default=0) > deepest:
        raise InvalidInput(
            "the forks of forks are too deep to nest", hint="`quire ls --json` names every parent", max=deepest
        )
    for each in reversed(order):
        made[each.db_id] = _object(each, known, told, [made[child.db_id] for child in each.forks])
    return [made[each.db_id] for each in lineage]


def _object(
    each: LineageNode, known: Known, told: Callable[[Any], dict[str, Any]], forks: list[dict[str, Any]]
) -> dict[str, Any]:
    record = known.records.get(each.db_id)
    snapshots = known.snapshots.get(each.db_id, [])
    names = known.names.get(each.parent_db_id, {})
    return {
        "db_id": each.db_id,
        "name": each.name,
        "kind": record.kind.name.lower() if record else None,
        "status": each.status.name.lower() if each.status else "gone",
        "created_at_ms": each.created_at_ms,
        "parent_db_id": each.parent_db_id,
        "parent_snapshot_id": each.parent_snapshot_id,
        "parent_snapshot": names.get(each.parent_snapshot_id, ""),
        "parent_generation": each.parent_generation,
        "parent_lsn": each.parent_lsn,
        **_share_of(known, told, each.db_id, 0),
        "snapshots": [{**told(one), **_share_of(known, told, each.db_id, one.snapshot_id)} for one in snapshots],
        "forks": forks,
    }


def _share_of(known: Known, told: Callable[[Any], dict[str, Any]], db_id: int, snapshot_id: int) -> dict[str, Any]:
    share = known.shares.get((db_id, snapshot_id))
    return {} if share is None else {"share": told(share)}
