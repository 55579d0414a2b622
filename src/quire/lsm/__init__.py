"""Key-value sets: the public names other than `store.kv(name)`."""

from typing import TYPE_CHECKING

from quire.core.lazy import lazy_names

if TYPE_CHECKING:
    from quire.lsm.bulk import BulkWriter, Load, begin_load, published

__all__ = [
    "BulkWriter",
    "Load",
    "begin_load",
    "published",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "BulkWriter": "quire.lsm.bulk",
            "Load": "quire.lsm.bulk",
            "begin_load": "quire.lsm.bulk",
            "published": "quire.lsm.bulk",
        },
    )
