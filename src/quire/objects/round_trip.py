"""Tries an object store by writing to it: listing works with credentials that may not write.

Threads: any. Raises: what the object store raises.
"""

from __future__ import annotations

import os

from quire.objects.api import DeletableStore
from quire.objects.collector import Collector, Owned

PROBE_BYTES = 1024


def round_trip(objects: DeletableStore) -> bool:
    """Put an object below a prefix that nothing else uses, read it back and delete it. Return whether it was unchanged."""
    prefix, body = f"doctor/{os.urandom(8).hex()}", os.urandom(PROBE_BYTES)
    key, ours = f"{prefix}/probe", Owned(current=frozenset({(objects.url, prefix)}))
    objects.put(key, body, create_only=True)
    try:
        return objects.get(key) == body
    finally:
        Collector(lambda _: objects, lambda: ours).delete(objects.url, [key])
