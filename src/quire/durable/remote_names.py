"""Where a store's objects are in its bucket: everything of a store is below its identity, so two never share a name.

Terms
  store_id      the identity of a store, drawn when it is made: a UUID in its usual text
  owner epoch   counts the takeovers of a store: its creation is 1; 0 is a store that was made before there were epochs

The same rules as in `quire.durable.names`, whose neighbour this is: build and parse are inverse, foreign texts are `None`.

Pure functions, any thread; importable on executors. Raises `InvalidName`, `OutOfRange`.

    >>> epoch_prefix("1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19", 1)
    '1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19/e/00000001'
    >>> parse_epoch_key("1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19/e/00000001/00000007/00000002/base:00000003")
    ('1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19', 1, '00000007/00000002/base:00000003')
"""

from __future__ import annotations

import re

from quire.core.errors import InvalidName
from quire.core.ids import some_u32

_STORE_ID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_EPOCH_KEY = f"({_STORE_ID})/e/([0-9a-f]{{8}})/(.+)"


def store_prefix(store_id: str) -> str:
    """What the names of all objects of a store begin with."""
    if not re.fullmatch(_STORE_ID, store_id):
        raise InvalidName("not the identity of a store", hint="it is a UUID in lower case", store_id=store_id[:64])
    return store_id


def epoch_prefix(store_id: str, owner_epoch: int) -> str:
    """What the names of all objects begin with that are written in an owner epoch."""
    return f"{store_prefix(store_id)}/e/{some_u32('owner_epoch', owner_epoch):08x}"


def kv_backups_prefix(store_id: str) -> str:
    """Where the backups of a store's key-value databases are."""
    return f"{store_prefix(store_id)}/backups/kv"


def parse_epoch_key(key: str) -> tuple[str, int, str] | None:
    """(store_id, owner epoch, suffix) of an object's key; `None` if it is not below the prefix of an epoch."""
    match = re.fullmatch(_EPOCH_KEY, key)
    if match is None or int(match[2], 16) == 0:
        return None
    return match[1], int(match[2], 16), match[3]
