"""Object stores by URL: one protocol for directories, S3, GCS, Azure and memory."""

from typing import TYPE_CHECKING

from quire.core.lazy import lazy_names

if TYPE_CHECKING:
    from quire.objects.api import ExistingObject, ObjectInfo, ObjectStore, PutResult, Range, list_objects
    from quire.objects.open import open_store
    from quire.objects.options import StoreOptions

__all__ = [
    "ExistingObject",
    "ObjectInfo",
    "ObjectStore",
    "PutResult",
    "Range",
    "StoreOptions",
    "list_objects",
    "open_store",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "ExistingObject": "quire.objects.api",
            "ObjectInfo": "quire.objects.api",
            "ObjectStore": "quire.objects.api",
            "PutResult": "quire.objects.api",
            "Range": "quire.objects.api",
            "list_objects": "quire.objects.api",
            "open_store": "quire.objects.open",
            "StoreOptions": "quire.objects.options",
        },
    )
