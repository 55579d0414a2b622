"""What a sweep lists, and which of the differences are real.

Terms
  space     (URL of an object store, prefix in it): the store's own, and each remote namespace
  range     a part of a space's keys: names of at most `RANGE_DATABASES` databases, about `RANGE_NAMES` of them that should be
            there. Ranges cover every possible key, and each is listed by one task
  orphan    an object with an artifact's name that nothing speaks of

Rules
  1. List first, read the manifest after (O3): what a listing calls a stray is one only if the manifest, read after it, knows no
     row of that name and no plan that may be writing it; what it calls missing only if the row still promises it.
  2. Spared are also names of generations that are not burned yet, and objects younger than a grace by the store's own clock.
  3. Names that are no artifacts' (manifest logs, tables, other people's files) are never orphans.
  4. The driver has the hashes of one wave of ranges in memory, and some differences at a time; never a listing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from typing import Any

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import object_key, parse_object_key
from quire.jobs.context import JobContext, artifact_row
from quire.jobs.sweep.run import ListTask, Stray, name_hash
from quire.manifest import tables as t
from quire.manifest.ops.base import Counter
from quire.manifest.reads import ReadTxn
from quire.manifest.records import Residency
from quire.objects.api import ObjectStore

RANGE_NAMES = 16_384
RANGE_DATABASES = 256

Space = tuple[str, str]


def spaces(ctx: JobContext, txn: ReadTxn) -> dict[int, Space]:
    """Namespace → where its objects are; 0 for the store's own."""
    from quire.pages.places import space_of

    numbers = [0, *(key[0] for key, _ in txn.scan(t.REMOTE_NAMESPACE))]
    return {number: space_of(txn, number, ctx.objects_url) for number in numbers}


def ranges(txn: ReadTxn, namespace_id: int, space: Space) -> Iterator[tuple[ListTask, list[int]]]:
    """The ranges of a space, one after the other, each with the hashes of the names that should be there."""
    url, prefix = space
    known: list[int] = []
    start, first, last = "", 0, (0, 0)

    def cut(border: str) -> tuple[ListTask, list[int]]:
        nonlocal known, start
        made = ListTask(url=url, prefix=prefix, start_after=start, until=border), known
        known, start = [], border
        return made

    for key, name in _names(txn, namespace_id, prefix):
        while key[0] >= first + RANGE_DATABASES:
            first += RANGE_DATABASES
            yield cut(_under(prefix, f"{first:08x}"))
        if len(known) >= RANGE_NAMES and key != last:
            yield cut(_under(prefix, f"{key[0]:08x}/{key[1]:08x}"))
        known.append(name_hash(name))
        last = key
    while first + RANGE_DATABASES < txn.next_id(Counter.DB):
        first += RANGE_DATABASES
        yield cut(_under(prefix, f"{first:08x}"))
    yield cut("")


def _under(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def _names(txn: ReadTxn, namespace_id: int, prefix: str) -> Iterator[tuple[tuple[int, int], str]]:
    """((origin, id), name) of every object that a row promises in a namespace, in the order of names."""
    for key, row in merge(
        _chunks(txn), _deltas(txn), _segments(txn), key=lambda item: (item[0].origin_db_id, item[0].id)
    ):
        if row.namespace_id == namespace_id and row.residency is not Residency.LOCAL:
            yield (key.origin_db_id, key.id), _under(prefix, row.suffix or object_key(key))


def _chunks(txn: ReadTxn) -> Iterator[tuple[ArtifactKey, Any]]:
    for (origin, slot, generation), row in txn.scan(t.CHUNK_CATALOG):
        yield ArtifactKey(origin, ArtifactKind.BASE, slot, generation), row


def _deltas(txn: ReadTxn) -> Iterator[tuple[ArtifactKey, Any]]:
    for (origin, slot, generation, number), row in txn.scan(t.CHUNK_DELTA_INDEX):
        yield ArtifactKey(origin, ArtifactKind.DELTA, slot, generation, number), row


def _segments(txn: ReadTxn) -> Iterator[tuple[ArtifactKey, Any]]:
    for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG):
        if row.origin_db_id == db_id:
            yield ArtifactKey(db_id, ArtifactKind.WAL, segment_id, 0), row


# ── after the listing ─────────────────────────────────────────────────────────────────────────────────────────────────
def real_orphans(
    txn: ReadTxn, strays: Iterable[Stray], spaces_by_id: dict[int, Space], before_ms: int
) -> Iterator[tuple[Stray, ArtifactKey]]:
    """Those strays that are orphans by the manifest as it is now (rules 1 to 3)."""
    prefixes: dict[str, list[str]] = {}
    for url, prefix in spaces_by_id.values():
        prefixes.setdefault(url, []).append(prefix)
    for stray in strays:
        key = _artifact(stray, prefixes.get(stray.url, []))
        if key is not None and stray.modified_ms < before_ms and not _is_spoken_of(txn, key):
            yield stray, key


def _artifact(stray: Stray, prefixes: list[str]) -> ArtifactKey | None:
    for prefix in sorted(prefixes, key=len, reverse=True):
        if not prefix or stray.key.startswith(f"{prefix}/"):
            return parse_object_key(stray.key[len(prefix) + 1 :] if prefix else stray.key)
    return None


def _is_spoken_of(txn: ReadTxn, key: ArtifactKey) -> bool:
    if artifact_row(txn, key) is not None or txn.refcount(key) is not None:
        return True
    if key.kind is ArtifactKind.WAL:
        return txn.get(t.WAL_CATALOG, key.origin_db_id, key.id) is not None
    record = txn.database(key.origin_db_id)
    if record is not None and key.generation >= record.next_generation:
        return True  # rule 2: nobody has burned it yet
    return txn.get(t.CHECKPOINT_PLAN, key.origin_db_id, key.generation) is not None


def really_missing(
    ctx: JobContext, txn: ReadTxn, missing: set[int], spaces_by_id: dict[int, Space], open_store: Any
) -> Iterator[tuple[ArtifactKey, str, int]]:
    """(artifact, object's name, bytes) of rows that still promise an object that is not there."""
    if not missing:
        return
    from quire.core.errors import ObjectNotFound
    from quire.jobs.verify.plan import place_to_verify

    for number, (_, prefix) in spaces_by_id.items():
        for key, row in merge(_chunks(txn), _deltas(txn), _segments(txn), key=lambda item: item[0]):
            if row.namespace_id != number or row.residency is Residency.LOCAL:
                continue
            if name_hash(_under(prefix, row.suffix or object_key(key))) not in missing:
                continue
            place = place_to_verify(ctx, txn, key)
            if place is None:
                continue  # it is about to be deleted
            store: ObjectStore = open_store(place.url)
            try:
                store.head(place.object_key)
            except ObjectNotFound:
                yield key, place.object_key, place.size_bytes
