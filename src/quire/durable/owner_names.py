"""The names of owner objects: who may write below a store's prefix of a bucket.

Terms
  owner epoch   counts the takeovers of a store, its creation included
  session       counts the openings of one epoch that put something

The same rules as in `quire.durable.names`, whose neighbour this is: build and parse are inverse, foreign texts are `None`. Both
numbers have a fixed width, so the last name of a listing is the newest owner.

Pure functions, any thread; importable on executors. Raises `OutOfRange`.

    >>> owner_key("1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19", 1, 7)
    '1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19/owner/00000001.00000007'
    >>> parse_owner_key("1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19/owner/00000001.00000007")
    ('1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19', 1, 7)
"""

from __future__ import annotations

import re

from quire.core.ids import some_u32, u32

OWNER_FILE = "owner.json"
"""In a store's directory: which session of which epoch this directory has claimed."""

LEGACY_OWNER = "legacy-owner"
"""At the root of a place: which store owns the objects there that are below no store's prefix."""

_KEY = re.compile(r"([^/]+)/owner/([0-9a-f]{8})\.([0-9a-f]{8})")


def owner_prefix(store_id: str) -> str:
    """Below it are the owner objects of a store, and nothing else."""
    return f"{store_id}/owner"


def owner_key(store_id: str, epoch: int, session: int) -> str:
    """The object that says that a session of an epoch has begun. Session 0 never has: it sorts before all others."""
    return f"{owner_prefix(store_id)}/{some_u32('owner_epoch', epoch):08x}.{u32('session', session):08x}"


def parse_owner_key(key: str) -> tuple[str, int, int] | None:
    """(store_id, epoch, session); `None` for a foreign name."""
    match = _KEY.fullmatch(key)
    if match is None or int(match[2], 16) == 0 or int(match[3], 16) == 0:
        return None
    return match[1], int(match[2], 16), int(match[3], 16)
