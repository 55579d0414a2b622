"""Removes what standbys and clones have put to make themselves known: nothing else below a store's prefix goes this way.

All other deletions pass the collector (A3): its question, whose object this is, has another answer here. A standby's entry is
the standby's own, and a clone's entry is removed by the clone, or by a person who names it.

Threads: any. Raises `ForeignObject`, and what the object store raises.
"""

from __future__ import annotations

import re

from quire.core.errors import ForeignObject
from quire.objects.api import DeletableStore

_REGISTRATION = re.compile(r"[0-9a-f-]{36}/(standby|clones)/[0-9a-f-]{36}")


def withdraw(store: DeletableStore, key: str) -> None:
    """Remove a registration; one that is missing is fine."""
    if not _REGISTRATION.fullmatch(key):
        raise ForeignObject("this is no registration of a standby or a clone", store=store.url, key=key)
    store.delete(key)
