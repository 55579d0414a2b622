"""The operation that begins an owner epoch: from here on, objects get names that no other owner of the store has.

Terms
  place   where objects may go: the store's configured object store (0), or a namespace that a person has registered
  epoch   counts the takeovers of a store; every place has one namespace per epoch (A1)

Rules
  1. Epochs rise. The current one is the highest that a namespace has.
  2. A namespace of the current epoch holds a reference of its own, so that it stays while nothing is in it; the former epoch's
     let go of theirs, and stay as long as something is in them.
  3. No plan outlives its epoch: it names objects of that (P10). The batch that begins an epoch abandons them first, so that
     what they wrote is garbage in the former epoch's namespaces before these let go.
"""

from quire.core.errors import InvalidInput, StalePlan
from quire.core.ids import some_u32
from quire.manifest import tables as t
from quire.manifest.namespace_records import NamespaceRecord
from quire.manifest.ops.base import Component, Counter, Op, raise_watermark
from quire.manifest.ops.refs import namespace_key, release, retain_namespace
from quire.manifest.overlay import Overlay
from quire.manifest.records import UInt


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
            self._put(tables, namespace_id, record)
        for key, row in rows:
            if row.owner_epoch == former:
                release(tables, namespace_key(t.REMOTE_NAMESPACE.key.unpack(key)[0]), at_ms)

    def _put(self, tables: Overlay, namespace_id: int, record: NamespaceRecord) -> None:
        key = t.REMOTE_NAMESPACE.key.pack(some_u32("namespace_id", namespace_id))
        if record.owner_epoch != self.owner_epoch or tables.remote_namespace.has(key):
            raise InvalidInput("not a new namespace of this epoch", namespace_id=namespace_id, epoch=self.owner_epoch)
        tables.remote_namespace.put(key, record)
        raise_watermark(tables, Counter.NAMESPACE, namespace_id)
        retain_namespace(tables, namespace_id)
