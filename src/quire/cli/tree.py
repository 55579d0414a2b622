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

from quire.cli.command import Cli
from quire.cli.declarations import Group, Option, command
from quire.cli.formatting import plain
from quire.cli.lineage import DEPTH_MAX, Known, in_order, nested, roots
from quire.cli.output import Node, Tree
from quire.cli.snapshots import share_json
from quire.core.errors import UnknownDatabase
from quire.store.info import Share, live_share, snapshots_share

if TYPE_CHECKING:
    from quire.manifest.reads import ReadTxn
    from quire.manifest.snapshots import LineageNode, SnapshotInfo
    from quire.manifest.store import ManifestStore


def add_to(app: Group) -> None:
    """Register this command."""
    command(app, "tree", example="quire tree --sizes")(tree)


def tree(
    cli: Cli,
    everything: Annotated[bool, Option("--all", help="All snapshots, however many.")] = False,
    sizes: Annotated[bool, Option("--sizes", help="Say how much only this database or snapshot holds.")] = False,
) -> Tree:
    """Show database lineage: databases, snapshots and forks."""
    with cli.reader() as manifest:
        lineage = manifest.snapshots.lineage()
        known = _known(manifest, lineage, everything=everything, sizes=sizes)
    if cli.as_json:
        return Tree(roots=(), data=nested(lineage, known, _told, DEPTH_MAX))
    return Tree(
        roots=roots(lineage, known),
        data=None,
        empty="no databases yet: `quire create NAME --kind pages` makes one",
    )


def nodes_of(manifest: ManifestStore) -> list[Node]:
    """The lineage of a store, for people."""
    lineage = manifest.snapshots.lineage()
    return roots(lineage, _known(manifest, lineage, everything=False, sizes=False))


def _known(manifest: ManifestStore, lineage: list[LineageNode], *, everything: bool, sizes: bool) -> Known:
    snapshots: dict[int, list[SnapshotInfo]] = {}
    for each in in_order(lineage):
        with suppress(UnknownDatabase):  # gone, or just now
            snapshots[each.db_id] = manifest.snapshots.of(each.db_id)
    names = {db_id: {one.snapshot_id: one.name for one in found} for db_id, found in snapshots.items()}
    with manifest.read() as txn:
        records = dict(txn.databases())
        shares = _shares(txn, snapshots) if sizes else {}
    return Known(records, snapshots, names, shares, everything)


def _shares(txn: ReadTxn, snapshots: dict[int, list[SnapshotInfo]]) -> dict[tuple[int, int], Share]:
    shares = {(db_id, 0): live_share(txn, db_id) for db_id in snapshots}
    for db_id, found in snapshots.items():
        for each in found:
            shares[db_id, each.snapshot_id] = snapshots_share(txn, db_id, [each.snapshot_id])
    return shares


def _told(value: Any) -> dict[str, Any]:
    """A snapshot or a share as an object."""
    return share_json(value) if isinstance(value, Share) else plain(value)
