"""Reading what a bucket or a disk has, and checking it: damage is believed when it is seen twice.

The bytes may have been garbled on the way, and a false alarm about stored data is expensive: a database that is closed for
repair, a copy that is thrown away.

Any thread. Raises what reading raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from quire.core.errors import Corruption
from quire.core.events import emit

T = TypeVar("T")


def checked_read(read: Callable[[], T]) -> T:
    """What `read` fetches and checks; if that is damaged it is fetched once more before it is called so."""
    try:
        return read()
    except Corruption as error:
        emit("info", "objects.read_again", error=str(error))
        return read()
