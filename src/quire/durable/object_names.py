"""Builds and parses the object keys that are not artifacts: a store's prefix and owner objects, and a stream's manifest log.

Terms
  store_id      the identity of a store, generated when it is created: a UUID in its usual text form
  owner epoch   counts the takeovers of a store: its creation is 1; 0 is a store that was created before epochs existed
  session       counts the openings within one epoch that put an object

All objects of a store are below its identity, so two stores never share a name (A1). As in `names.py`, building and parsing are
inverse, and foreign text parses to `None`.

Threads: any; pure functions, importable on executors. Raises `InvalidName`, `OutOfRange`.

    >>> epoch_prefix("1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19", 1)
    '1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19/e/00000001'
    >>> parse_epoch_key("1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19/e/00000001/00000007/00000002/base:00000003")
    ('1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19', 1, '00000007/00000002/base:00000003')
    >>> parse_owner_key("1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19/owner/00000001.00000007")
    ('1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19', 1, 7)
    >>> parse_bundle_key(bundle_key(7, 0, 41))
    (7, 0, 41)
"""

from __future__ import annotations

import re

from quire.core.errors import InvalidName
from quire.core.ids import U64_MAX, some_u32, u32, u64

_STORE_ID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_EPOCH_KEY = f"({_STORE_ID})/e/([0-9a-f]{{8}})/(.+)"
_NUMBER = "(0|[1-9][0-9]{0,19})"

OWNER_FILE = "owner.json"
"""In a store's directory: the session and epoch that this directory has claimed."""

LEGACY_OWNER = "legacy-owner"
"""At the root of a bucket or directory: the store that owns the objects that are below no store's prefix."""


# ── a store's prefix ──────────────────────────────────────────────────────────────────────────────────────────────────
def store_prefix(store_id: str) -> str:
    """Return the prefix of all objects of a store."""
    if not re.fullmatch(_STORE_ID, store_id):
        raise InvalidName("not a store id", hint="use the UUID in lower case", store_id=store_id[:64])
    return store_id


def epoch_prefix(store_id: str, owner_epoch: int) -> str:
    """Return the prefix of all objects written in an owner epoch."""
    return f"{store_prefix(store_id)}/e/{some_u32('owner_epoch', owner_epoch):08x}"


def archive_epoch_prefix(store_id: str, owner_epoch: int) -> str:
    """Return the prefix of an owner epoch's archive: log, bases and files."""
    return f"{store_prefix(store_id)}/archive/{some_u32('owner_epoch', owner_epoch):08x}"


def kv_backups_prefix(store_id: str) -> str:
    """Return the prefix of the backups of a store's key-value databases."""
    return f"{store_prefix(store_id)}/backups/kv"


def parse_epoch_key(key: str) -> tuple[str, int, str] | None:
    """Return (store_id, owner epoch, suffix) of an object key; `None` if it is not below the prefix of an epoch."""
    match = re.fullmatch(_EPOCH_KEY, key)
    if match is None or int(match[2], 16) == 0:
        return None
    return match[1], int(match[2], 16), match[3]


# ── owner objects: who may write below a store's prefix ───────────────────────────────────────────────────────────────
def owner_prefix(store_id: str) -> str:
    """Return the prefix of a store's owner objects; nothing else is below it."""
    return f"{store_id}/owner"


def owner_key(store_id: str, epoch: int, session: int) -> str:
    """Return the key of the object that marks the start of a session. Session 0 never starts: it sorts before all others."""
    return f"{owner_prefix(store_id)}/{some_u32('owner_epoch', epoch):08x}.{u32('session', session):08x}"


def parse_owner_key(key: str) -> tuple[str, int, int] | None:
    """Return (store_id, epoch, session); `None` if it is foreign."""
    match = re.fullmatch(r"([^/]+)/owner/([0-9a-f]{8})\.([0-9a-f]{8})", key)
    if match is None or int(match[2], 16) == 0 or int(match[3], 16) == 0:
        return None
    return match[1], int(match[2], 16), int(match[3], 16)


# ── standbys and clones of a store ────────────────────────────────────────────────────────────────────────────────────
def standby_prefix(store_id: str) -> str:
    """Return the prefix under which standbys of a store register."""
    return f"{store_prefix(store_id)}/standby"


def standby_key(store_id: str, standby_id: str) -> str:
    """Return the key of the object of one standby."""
    return f"{standby_prefix(store_id)}/{store_prefix(standby_id)}"


def parse_standby_key(key: str) -> str | None:
    """Return the id of the standby that an object registers; `None` if it is another object."""
    match = re.fullmatch(f"{_STORE_ID}/standby/({_STORE_ID})", key)
    return match[1] if match is not None else None


def heartbeat_key(store_id: str) -> str:
    """Return the key of the object that an owner with standbys replaces every few seconds."""
    return f"{standby_prefix(store_id)}/heartbeat"


def clones_prefix(store_id: str) -> str:
    """Return the prefix under which clones that read a store's objects register."""
    return f"{store_prefix(store_id)}/clones"


def clone_key(store_id: str, clone_id: str) -> str:
    """Return the key of the object of one clone, named by the clone's own store_id."""
    return f"{clones_prefix(store_id)}/{store_prefix(clone_id)}"


# ── a stream's manifest log: chunks, snapshots, bundles ───────────────────────────────────────────────────────────────
def log_prefix(stream_id: int) -> str:
    """Return the prefix of all object keys of a stream's manifest log."""
    return f"manifest/{u64('stream_id', stream_id)}"


def manifest_log_key(stream_id: int, chunk_index: int) -> str:
    """Return the object key of a sealed chunk of a stream's manifest log."""
    return f"{log_prefix(stream_id)}/{u64('chunk_index', chunk_index)}.mlog"


def parse_manifest_log_key(text: str) -> tuple[int, int] | None:
    """Return (stream_id, chunk_index) of a manifest-log chunk's key; `None` if it is foreign."""
    match = re.fullmatch(f"manifest/{_NUMBER}/{_NUMBER}\\.mlog", text)
    if match is None or max(int(match[1]), int(match[2])) > U64_MAX:
        return None
    return int(match[1]), int(match[2])


def snapshot_key(stream_id: int, snapshot_id: int) -> str:
    """Return the object key of a snapshot of a stream's manifest log."""
    return f"{log_prefix(stream_id)}/snapshot_{u64('snapshot_id', snapshot_id)}.bin"


def bundle_key(stream_id: int, first: int, last: int) -> str:
    """Return the object key of a bundle: the chunks `first` to `last` as one object."""
    return f"{log_prefix(stream_id)}/bundle_{u64('first', first)}_{u64('last', last)}.mlog"


def is_log_key(text: str) -> bool:
    """Return whether a key belongs to a manifest log: a chunk, a bundle or a snapshot."""
    parsers = (parse_manifest_log_key, parse_bundle_key, parse_snapshot_key)
    return any(parse(text) is not None for parse in parsers)


def parse_snapshot_key(text: str) -> tuple[int, int] | None:
    """Return (stream_id, snapshot_id); `None` if it is foreign."""
    match = re.fullmatch(f"manifest/{_NUMBER}/snapshot_{_NUMBER}\\.bin", text)
    if match is None or max(map(int, match.groups())) > U64_MAX:
        return None
    return int(match[1]), int(match[2])


def parse_bundle_key(text: str) -> tuple[int, int, int] | None:
    """Return (stream_id, first, last); `None` if it is foreign."""
    match = re.fullmatch(f"manifest/{_NUMBER}/bundle_{_NUMBER}_{_NUMBER}\\.mlog", text)
    if match is None or max(map(int, match.groups())) > U64_MAX or int(match[2]) > int(match[3]):
        return None
    return int(match[1]), int(match[2]), int(match[3])
