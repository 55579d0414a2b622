"""Operations on `retired`: objects that nothing needs now, and that archived moments need (A8).

A name is retired once: it never comes back into use (M5), so the first moment counts, however often it is handed over.
"""

from quire.manifest import tables as t
from quire.manifest.ops.base import Component, Op
from quire.manifest.overlay import Overlay
from quire.manifest.records import RetiredRecord, UInt


class RetireObjects(Op, frozen=True, tag=180):
    """Objects are to be deleted when no archived moment needs them any more."""

    component = int(Component.REMOTE)
    url: str
    """Of the place they are in; empty: the store's own object store."""
    objects: list[tuple[str, UInt]]
    """(name, database; 0: not known)"""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        for name, db_id in self.objects:
            key = t.RETIRED.key.pack(t.retired_digest(self.url, name))
            if not tables.retired.has(key):
                tables.retired.put(key, RetiredRecord(at_ms, name, self.url, db_id))


class ForgetRetired(Op, frozen=True, tag=181):
    """Retired objects are gone."""

    component = int(Component.REMOTE)
    digests: list[bytes]

    def apply(self, tables: Overlay, at_ms: int) -> None:
        for digest in self.digests:
            tables.retired.delete(t.RETIRED.key.pack(digest))
