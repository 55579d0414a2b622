"""The index of a backup: what it contains, and which earlier backups and objects a new one builds on.

Names of objects are unique within one history of a store. A store that was restored from a backup gives the names of objects
that were lost to others, so it does not build on a backup of what it lost.

Threads: any; there is no state. Raises `InvalidInput`, `Conflict`, `Corruption`, and the errors of the object stores.
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import zstandard

from quire.archive.format import Position
from quire.archive.log_reader import header_of, owner_log
from quire.core.decoding import described
from quire.core.errors import Conflict, Corruption, InvalidInput, ObjectNotFound
from quire.durable.object_names import store_prefix
from quire.objects.api import ObjectStore, list_objects
from quire.objects.open import open_store
from quire.objects.tar import SUFFIX, TarStore

if TYPE_CHECKING:
    from quire.manifest.records import TimelineRecord
    from quire.objects.options import StoreOptions

INDEX_BYTES_MAX = 1 << 30


class Index(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a backup in addition to its base and log."""

    since: str
    """An earlier backup that has the objects this one lacks; a path is relative to the directory that contains this backup."""
    objects: list[tuple[str, int]]
    """(key, size) of every object that the store had."""
    beyond: list[str] | None = None
    """The backups that the earlier one was based on when this one was made; `None` in an index from before this field."""


def open_backup(url: str, *, options: StoreOptions | None = None, write: bool = False) -> ObjectStore:
    """Open the object store that holds a backup: a directory, a URL, or a tar file."""
    if "://" not in url and url.endswith(SUFFIX) and not os.path.isdir(url):
        return TarStore(url, write=write)
    return open_store(url, options=options)


# ── reading and writing it ────────────────────────────────────────────────────────────────────────────────────────────
def index_prefix(store_id: str) -> str:
    """Return what the names of a store's indexes begin with."""
    return f"{store_prefix(store_id)}/backup"


def put_index(place: ObjectStore, store_id: str, position: Position, index: Index) -> None:
    """Write the index of the backup whose last log object is at `position`."""
    data = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(index))
    place.put(f"{index_prefix(store_id)}/{position.epoch:08x}.{position.number:016x}", data)


def read_index(place: ObjectStore, store_id: str, position: Position) -> Index | None:
    """Read the index of a backup. Return `None` if this is an archive."""
    key = f"{index_prefix(store_id)}/{position.epoch:08x}.{position.number:016x}"
    try:
        data = place.get(key)
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=INDEX_BYTES_MAX)
        return msgspec.msgpack.decode(raw, type=described(Index))
    except ObjectNotFound:
        return None
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise Corruption("the index of the backup is damaged", hint="restore another backup", key=key) from error


def newest_index(place: ObjectStore, store_id: str) -> Index | None:
    """Read the index of the newest backup in a place, complete or not."""
    keys = [info.key for info in list_objects(place, index_prefix(store_id))]
    if not keys:
        return None
    epoch, _, number = keys[-1].rpartition("/")[2].partition(".")
    return read_index(place, store_id, Position(int(epoch, 16), int(number, 16)))


def earlier_objects(
    store_id: str, target: str, since: str, options: StoreOptions | None, restored: TimelineRecord | None
) -> tuple[dict[str, int], list[str]]:
    """Return key → size of the objects that need not be copied, which the target and earlier backups have, and the places of
    these backups. `restored`: the restore of a backup that this store began with."""
    skippable: dict[str, int] = {}
    earlier: list[str] = []
    if since:
        with closing(open_backup(since, options=options)) as place:
            _refuse_lost(place, store_id, restored)
            index = newest_index(place, store_id)
        if index is None:
            raise InvalidInput(
                "the target of --since has no backup of this store",
                hint="pass --since an earlier backup of the same store",
                since=since,
            )
        skippable.update(index.objects)
        earlier = earlier_places(since, store_id, index, options)
    if "://" in target or not target.endswith(SUFFIX):
        with closing(open_backup(target, options=options)) as place:
            sound = _refuse_lost(place, store_id, restored)
            present = list_objects(place, store_prefix(store_id))
            skippable.update((info.key, info.size_bytes) for info in present if sound is None or info.key in sound)
    return skippable, earlier


def _refuse_lost(place: ObjectStore, store_id: str, restored: TimelineRecord | None) -> set[str] | None:
    """Raise `Conflict` if a place has a backup of changes that this store lost when it was restored from an earlier backup.

    Names of objects are only unique within one history: this store gives those of the lost objects to others. Return the
    objects of the newest complete backup, `None` for all: others may be left of a lost backup that was interrupted.
    """
    if restored is None:
        return None
    positions = owner_log(place, store_id, restored.owner_epoch).positions
    for position in reversed(positions):
        at_ms = header_of(place, store_id, position).at_ms
        if restored.ended_at_ms < at_ms <= restored.began_at_ms:
            what = "this place has a backup that is newer than the one from which this store was restored"
            raise Conflict(what, hint="back up to another place", place=place.url, position=str(position))
        if at_ms <= restored.ended_at_ms:
            break
    index = read_index(place, store_id, positions[-1]) if positions else None
    return {key for key, _ in index.objects} if index is not None else set()


def relative_place(url: str, target: str) -> str:
    """Return a path to an earlier backup that stays valid when both are moved together. A URL is returned unchanged."""
    if "://" in url:
        return url
    path = os.path.abspath(url)
    return path if "://" in target else os.path.relpath(path, os.path.dirname(target))


def earlier_places(url: str, store_id: str, index: Index, options: StoreOptions | None) -> list[str]:
    """Return the place of a backup, and those of all backups that it is based on, each once."""
    places = [url if "://" in url else os.path.abspath(url)]
    while index.since:
        folder = os.path.dirname(places[-1])
        named = [index.since, *(index.beyond or ())]
        found = [place if "://" in place else os.path.normpath(os.path.join(folder, place)) for place in named]
        places += [place for place in dict.fromkeys(found) if place not in places]
        if index.beyond is not None or places[-1] != found[0]:
            break  # all are named, or two backups are based on each other
        # An older index names only the next one. The newest index there may be that of a later backup.
        with closing(open_backup(places[-1], options=options)) as place:
            following = newest_index(place, store_id)
        if following is None:
            raise missing_backup(places[-1])
        index = following
    return places


def missing_backup(url: str) -> ObjectNotFound:
    """Return the error for an earlier backup that is not where the index names it."""
    what = "the backup is based on an earlier one that is missing"
    return ObjectNotFound(what, hint=f"put {url} back, or restore another backup", earlier=url)
