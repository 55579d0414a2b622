"""Finds which store of a bucket is meant: several can share one, such as a store and its clones.

Without an id, the only store with an archive is meant; clones that are registered with their parents do not count. An id may be
shortened to a prefix that no other id has.

Threads: any. Reads only the bucket. Raises `ObjectNotFound`, `InvalidInput`, and the object store's errors.
"""

from __future__ import annotations

import os

from quire.archive.clones import CloneRegistration, clone_keys, registrations
from quire.archive.log_reader import STORE_ID, epochs, find, log_positions, store_ids
from quire.core.clock import moment
from quire.core.errors import Corruption, InvalidInput, ObjectNotFound, QuireError
from quire.durable.names import MANIFEST
from quire.objects.api import ObjectStore
from quire.objects.ownership import newest_owner

HINT = "name one with --store-id; the beginning of its id is enough"


def choose_store(store: ObjectStore, wanted: str = "") -> str:
    """Return the id of the store that `wanted` names: an id, the beginning of one, or empty for the only store."""
    if STORE_ID.fullmatch(wanted):
        return wanted
    ids = store_ids(store)
    candidates = [store_id for store_id in ids if store_id.startswith(wanted)] if wanted else _with_archive(store, ids)
    if len(candidates) > 1 and not wanted:
        clones = {key.rpartition("/")[2] for parent_id in candidates for key in clone_keys(store, parent_id)}
        # A clone of a clone is registered with both; if every store is a clone, the first parent was deleted.
        candidates = [store_id for store_id in candidates if store_id not in clones] or candidates
    if len(candidates) == 1:
        return candidates[0]
    if not ids:
        hint = "check the URL and its prefix"
        if os.path.exists(os.path.join(store.url, MANIFEST)):
            hint = "this is the directory of a store: name its bucket, which is `object_store` in its quire.toml"
        raise ObjectNotFound("this bucket contains no store", hint=hint, store=store.url)
    what = "several stores share this bucket" if candidates else "no store in this bucket has this id"
    raise InvalidInput(what, hint=HINT, stores=_described(store, candidates or ids))


def _with_archive(store: ObjectStore, ids: list[str]) -> list[str]:
    """Return the stores that have a log: the backup of a clone also contains objects of its parents."""
    if len(ids) < 2:
        return ids
    return [store_id for store_id in ids if _has_log(store, store_id)] or ids


def _has_log(store: ObjectStore, store_id: str) -> bool:
    return any(log_positions(store, store_id, epoch) for epoch in epochs(store, store_id))


def _clones(store: ObjectStore, store_id: str) -> list[CloneRegistration]:
    try:
        return registrations(store, store_id)
    except Corruption:  # of one registration: the stores can be listed without it
        return []


def _described(store: ObjectStore, ids: list[str]) -> list[str]:
    """Describe stores so that a person can choose: whether it is a clone, where it is, and its last upload."""
    parents = {clone.clone_id: (parent, clone) for parent in ids for clone in _clones(store, parent)}
    described = []
    for store_id in ids:
        parent, clone = parents.get(store_id, ("", None))
        role = (
            f"a clone of {parent}, created at {clone.host}:{clone.path}"
            if clone is not None
            else _owner(store, store_id)
        )
        described.append(f"{store_id} ({role}; {_last_upload(store, store_id)})")
    return described


def _owner(store: ObjectStore, store_id: str) -> str:
    newest = newest_owner(store, store_id)
    return f"owned on {newest[2].host}" if newest is not None and newest[2] is not None else "owner unknown"


def _last_upload(store: ObjectStore, store_id: str) -> str:
    try:
        at_ms = find(store, store_id).at_ms
    except QuireError:  # without an archive, or damaged: the list is still useful
        return "not restorable"
    return f"last upload {moment(at_ms)}"
