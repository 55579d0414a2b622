"""The record of the table `remote_namespace`; the rules of all records are in `records.py`."""

from quire.manifest.records import Record, UInt


class NamespaceRecord(Record, frozen=True):
    """Where remote objects live: joined with a compact suffix it gives the canonical object name."""

    url: str
    """Empty: the store's configured object store, wherever that is now."""
    prefix: str = ""
    encryption_profile: str = ""
    created_at_ms: UInt = 0
    owner_epoch: UInt = 0
    """The epoch whose objects are here; 0 for a place as a person registered it."""
    place_id: UInt = 0
    """Of an epoch's namespace: the namespace that a person registered; 0 is the store's configured object store."""
    ancestors: tuple[UInt, ...] = ()
    """Of an epoch's namespace: the owner epochs that this one follows, oldest first. Others are of another line."""
    legacy: bool = False
    """Of an epoch's namespace: the store is older than epochs, and may have objects below no prefix of its own."""
    name: str = ""
    """Of a place: what people call it, and its section in quire.toml; empty for one registered before places had names."""
    dropped_at_ms: UInt = 0
    """Of a place: when a person dropped it; until then a place with a name holds itself."""

    @property
    def holds_itself(self) -> bool:
        """Whether this is a place that people call by a name, and have not dropped."""
        return bool(self.name) and not self.dropped_at_ms
