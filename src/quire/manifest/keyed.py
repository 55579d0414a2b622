"""The idempotency key of the call that a thread is doing: it goes into the batch by which the call takes effect (M11).

Whoever answers calls (`quire.service`) says whose key it is; methods of a store build their batches as always.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.manifest.guard import ManifestGuard
from quire.manifest.ops.base import Op


@dataclass(slots=True, eq=False)
class KeyedCall:
    """A call that is to take effect once."""

    key: bytes
    effects: tuple[type[Op], ...]
    """The operations, one of which is in the batch that makes the change."""
    answer: Callable[[Any], bytes]
    """From that operation to what is kept with the key."""
    guard: ManifestGuard | None = None
    """Of that batch, once it was submitted."""

    def effect_in(self, batch: Sequence[Op]) -> Op | None:
        """The operation of a batch by which the call takes effect; `None` if it is not there."""
        return next((op for op in batch if isinstance(op, self.effects)), None)


class _Current(threading.local):
    call: KeyedCall | None = None


current = _Current()
"""The call of this thread."""


@contextmanager
def keyed(call: KeyedCall) -> Iterator[KeyedCall]:
    """Until the end of the block, this thread submits for a call."""
    current.call = call
    try:
        yield call
    finally:
        current.call = None
