"""What a database is at one moment: the memtable, the frozen ones, the tables; and reading it at an lsn.

Rules
  1. A view never changes (its memtable grows, which reads at an lsn do not see); the engine replaces it as a whole. Who holds
     one reads on, whatever is flushed or compacted meanwhile.
  2. The newest version at or below the lsn counts, wherever it is.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from quire.durable.log_reader import LogEnd
from quire.lsm.levels import Levels
from quire.lsm.memtable import Memtable

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.lsm.merge import Hidden, Source
    from quire.lsm.sst_reader import Found

LSN_MAX = (1 << 64) - 1


class Frozen(msgspec.Struct, frozen=True):
    """A memtable that waits for its flush, and the WAL that it came from."""

    memtable: Memtable
    wal: int
    end: LogEnd
    """Of that WAL, which takes no more."""


class View(msgspec.Struct, frozen=True):
    """See the rules above."""

    memtable: Memtable
    frozen: tuple[Frozen, ...]
    """The newest first."""
    levels: Levels

    def get(self, key: bytes, lsn: int, hidden: Hidden = frozenset()) -> bytes | None:
        """The value of a key at an lsn."""
        if hidden:
            found = list(self.scan(key, key + b"\0", lsn, hidden=hidden))
            value: bytes | None = found[0].column(1)[0].as_py() if found else None
            return value
        best: Found | None = self.memtable.get(key, lsn)
        if best is None:
            for each in self.frozen:
                best = each.memtable.get(key, lsn)
                if best is not None:
                    break
        levels = self.levels
        if best is None or best[0] < levels.lsn_max:
            from quire.lsm.bloom import hash_key

            best = levels.get(key, hash_key(key), lsn, best)
        return best[1] if best is not None else None

    def scan(
        self, low: bytes, high: bytes | None, lsn: int, *, hidden: Hidden = frozenset(), reverse: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """The keys and values in [low, high) at an lsn, as batches in order, or in the opposite one."""
        from quire.lsm.merge import scan_parts

        sources: list[Source] = [self.memtable, *(each.memtable for each in self.frozen)]
        sources += self.levels.overlapping(low, high)
        return scan_parts(sources, low, high, lsn, hidden=hidden, reverse=reverse)


def prefix_end(prefix: bytes) -> bytes | None:
    """The smallest key above all that begin with a prefix; `None` if there is none.

    >>> prefix_end(b"ab"), prefix_end(b"a\\xff"), prefix_end(b"\\xff"), prefix_end(b"")
    (b'ac', b'b', None, None)
    """
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None
