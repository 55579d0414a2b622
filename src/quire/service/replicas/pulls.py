"""Plans the answer to a replica's revision: which pages, of which version.

  revision of this history   the pages that may have changed since, or none
  no revision                all pages
  of another history         all pages, too: the database was forked, rewound, restored, recreated, or its store was taken
                             over. Two histories are never mixed, because every page of the replica is replaced.

A replica that fetches in several requests, or that has only part of the pages, requests pages of an older revision (`at`). That
version is read if it is held or kept; if not, those of its pages that have not changed since are the same in the newest
version. If one of the requested pages has changed, `SnapshotGone` is raised: the contents of a version are never guessed.

Threads: any; blocks. Raises `InvalidInput`, `Conflict`, `SnapshotGone`, and what opening a database raises.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyroaring import BitMap

from quire.core.errors import Conflict, EpochLost, InvalidInput, SnapshotGone
from quire.core.events import emit
from quire.manifest.store import ManifestStore
from quire.pages.engine import PageEngine
from quire.pages.pagestore import PageStore
from quire.pages.snapshot import Snapshot
from quire.service.replicas.held_versions import HeldVersions, closed_on_failure
from quire.service.replicas.pull_messages import PullRequest
from quire.service.replicas.revisions import HistoryId, Revision

PAGE_SIZE = 4096
"""The only page size that both kinds of clients support."""

QUERY_PAGES = 32
"""Pages sent first to a replica that wants the pages of a query: it fetches the others when it reads them."""


@dataclass(frozen=True, slots=True)
class PullPlan:
    """The answer: pages of the version that a reader has open."""

    reader: Snapshot
    revision: str
    pages: BitMap
    is_resync: bool = False
    """Whether the replica had a revision of another history."""


def open_replicated(pages: PageEngine, name: str) -> PageStore:
    """Open a database that replicas can follow."""
    store = pages.open(name)
    if store.page_size != PAGE_SIZE:
        raise InvalidInput(
            "replicas need a database with pages of 4,096 bytes",
            hint="export it, VACUUM it with `PRAGMA page_size=4096`, and import it under another name",
            page_size=store.page_size,
        )
    return store


def history_of(manifest: ManifestStore, db_id: int) -> HistoryId:
    """Return the current history of a database."""
    with manifest.read() as txn:
        return HistoryId.of(txn, db_id)


def pages_since(store: PageStore, since: int, reader: Snapshot) -> BitMap | None:
    """Return the pages that take a replica from `since` to the reader's version; `None` if it needs all of them."""
    if since >= reader.lsn:
        return BitMap() if since == reader.lsn else None
    try:
        pages = store.changed(since, reader.mark)
    except EpochLost:
        return None
    if reader.size_pages:
        pages.add(0)  # a transaction has at least one page, and the last one carries the size
    return pages


def plan_pull(store: PageStore, manifest: ManifestStore, held: HeldVersions, request: PullRequest) -> PullPlan:
    """Plan the answer to a request of Turso's sync engine."""
    history = history_of(manifest, store.db_id)
    if request.at:
        return _plan_at(store, held, history, request)
    with closed_on_failure(held.newest(store, hold=request.pages is not None or bool(request.query))) as reader:
        pages, is_resync = _since(store, history, request.since, reader)
        if request.query:
            pages &= BitMap(range(QUERY_PAGES))
        if request.pages is not None:
            pages &= request.pages
        return PullPlan(reader, str(Revision(history, reader.lsn)), pages, is_resync)


def _since(store: PageStore, history: HistoryId, since: str, reader: Snapshot) -> tuple[BitMap, bool]:
    """Return the pages that a replica needs, and whether it needs them because it has another history."""
    everything = BitMap(range(reader.size_pages))
    if not since:
        return everything, False
    revision = Revision.parse(since)
    pages = pages_since(store, revision.lsn, reader) if revision.history == history else None
    if pages is not None:
        return pages, False
    require_pages(reader)
    emit("info", "replica.resync", db_id=store.db_id, had=since, lsn=reader.lsn, pages=len(everything))
    return everything, True


def require_pages(reader: Snapshot) -> None:
    """Raise if the version has no pages: the protocol has no message for that to a replica of another history."""
    if not reader.size_pages:
        raise Conflict(
            "the database was replaced by a new one, which has no pages yet",
            hint="write to it, or create a new replica",
        )


def _plan_at(store: PageStore, held: HeldVersions, history: HistoryId, request: PullRequest) -> PullPlan:
    """Plan pages of the version that the replica names."""
    revision = Revision.parse(request.at)
    if revision.history != history:
        raise Conflict(
            "this replica belongs to another history of the database: it was forked, restored, rewound or recreated",
            hint="pull again, or sync a new replica",
            revision=request.at,
        )
    wanted = request.pages
    try:
        with closed_on_failure(held.at(store, revision.lsn)) as reader:
            # An lsn that is not a commit's opens the version that was current then, which is not the one that was named.
            if reader.lsn == revision.lsn:
                pages = BitMap(range(reader.size_pages))
                if request.since:
                    pages = _since(store, history, request.since, reader)[0]
                return PullPlan(reader, request.at, pages if wanted is None else pages & wanted)
        reader.close()
    except SnapshotGone:
        pass
    with closed_on_failure(held.newest(store, hold=False)) as reader:
        changed = pages_since(store, revision.lsn, reader)
        if wanted is None or changed is None or wanted & changed:
            raise SnapshotGone(
                "this version is no longer kept, and the pages have changed since",
                hint="pull again; set maintenance.time_travel_seconds to keep versions for partial replicas",
                revision=request.at,
            )
        return PullPlan(reader, request.at, wanted & BitMap(range(reader.size_pages)))
