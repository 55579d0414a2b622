"""The operation that begins an owner epoch: from here on, objects get names that no other owner of the store has.

Terms
  place   where objects may go: the store's configured object store (0), or a namespace that a person has registered
  epoch   counts the takeovers of a store; every place has one namespace per epoch (A1)

Rules
  1. Epochs rise. The current one is the highest that a namespace has.
  2. A namespace of the current epoch holds a reference of its own, so that it stays while nothing is in it; the former epoch's
     let go of theirs, and stay as long as something is in them.
  3. A place with a name holds itself too, until a person drops it; then it and its namespace of the current epoch let go
     together, so that neither stays behind.
  4. No plan outlives its epoch: it names objects of that (P10). The batch that begins an epoch abandons them first, so that
     what they wrote is garbage in the former epoch's namespaces before these let go.
"""

from msgspec.structs import replace

from quire.core.errors import InvalidInput, StalePlan, StillReferenced, UnknownNamespace
from quire.core.ids import some_u32
from quire.manifest import tables as t
from quire.manifest.ops.base import Component, Counter, Op, raise_watermark
from quire.manifest.ops.refs import doom, namespace_key, release, release_epochs, retain_namespace
from quire.manifest.overlay import Overlay
from quire.manifest.records import NamespaceRecord, UInt


class BeginOwnerEpoch(Op, frozen=True, tag=113):
    """A store was made or taken over: new namespaces, one for each place."""

    component = int(Component.REMOTE)
    owner_epoch: UInt
    namespaces: list[tuple[UInt, NamespaceRecord]]
    """(id, record) of the namespace of each place in this epoch."""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        some_u32("owner_epoch", self.owner_epoch)
        rows = [(key, row) for key, row in tables.remote_namespace.scan() if row.owner_epoch]
        former = max((row.owner_epoch for _, row in rows), default=0)
        if self.owner_epoch <= former:
            raise StalePlan(
                "the store is in this owner epoch or beyond it", hint="look again", now=former, asked=self.owner_epoch
            )
        if tables.checkpoint_plan.any(b""):
            raise StalePlan("a plan of the former epoch is stored", hint="abandon it in the same batch, before this")
        for namespace_id, record in self.namespaces:
            place = tables.remote_namespace.get(t.REMOTE_NAMESPACE.key.pack(record.place_id))
            if place is not None and place.dropped_at_ms:
                raise StalePlan("a place was dropped meanwhile", hint="look again", namespace_id=record.place_id)
            self._put(tables, namespace_id, record)
        for key, row in rows:
            if row.owner_epoch == former and not row.dropped_at_ms:
                release(tables, namespace_key(t.REMOTE_NAMESPACE.key.unpack(key)[0]), at_ms)

    def _put(self, tables: Overlay, namespace_id: int, record: NamespaceRecord) -> None:
        key = t.REMOTE_NAMESPACE.key.pack(some_u32("namespace_id", namespace_id))
        if record.owner_epoch != self.owner_epoch or tables.remote_namespace.has(key):
            raise InvalidInput("not a new namespace of this epoch", namespace_id=namespace_id, epoch=self.owner_epoch)
        tables.remote_namespace.put(key, record)
        raise_watermark(tables, Counter.NAMESPACE, namespace_id)
        retain_namespace(tables, namespace_id)


class DropNamespace(Op, frozen=True, tag=160):
    """A person gives up a place that no database uses: it goes after the grace, with its namespaces of owner epochs."""

    component = int(Component.REMOTE)
    namespace_id: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, count_key = t.REMOTE_NAMESPACE.key.pack(self.namespace_id), namespace_key(self.namespace_id)
        place = tables.remote_namespace.get(key)
        if place is None or place.owner_epoch:
            raise UnknownNamespace("no such namespace is registered", namespace_id=self.namespace_id)
        if place.dropped_at_ms:
            return
        count = tables.gc_refcounts.get(count_key)
        users = (count.in_use if count is not None else 0) - place.holds_itself
        if users > 0:
            raise StillReferenced(
                "databases use the namespace",
                hint="drop them first; a dropped one lets go when its objects are deleted (`quire namespace ls`)",
                namespace=place.name or self.namespace_id,
                users=users,
            )
        tables.remote_namespace.put(key, replace(place, dropped_at_ms=at_ms))
        if place.holds_itself:
            release(tables, count_key, at_ms)
        elif count is None:
            doom(tables, count_key, at_ms)
        release_epochs(tables, self.namespace_id, at_ms)
