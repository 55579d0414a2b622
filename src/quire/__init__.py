"""quire: a versioned, tiered storage engine for Python.

This is the only door: what is not named in `__all__` is private. It is lazy (PEP 562): `import quire` loads nothing, a
name loads its module when it is first used. So a command-line program that only prints its help, or an executor that
only needs the errors, pays neither for LMDB nor for Arrow.

    >>> import quire
    >>> issubclass(quire.StoreLocked, quire.QuireError)
    True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.core.errors import (
        AccessDenied,
        AlreadyExists,
        ArtifactGone,
        ChecksumMismatch,
        ConfigMismatch,
        Conflict,
        Corruption,
        CursorLost,
        DatabaseTombstoned,
        DiskFull,
        ForeignObject,
        FormatTooNew,
        IllegalTransition,
        Incompatible,
        InternalError,
        InvalidConfig,
        InvalidInput,
        InvalidName,
        JobAlreadyPending,
        LeaseExpired,
        ManifestDamaged,
        ManifestIntegrityError,
        NameTaken,
        NotFound,
        NotWritable,
        ObjectNotFound,
        ObjectStoreUnavailable,
        OutOfRange,
        Overloaded,
        QuireError,
        QuotaExceeded,
        ReadOnly,
        RefcountUnderflow,
        SnapshotChecksumMismatch,
        SnapshotGone,
        SparkUnavailable,
        StalePlan,
        StillReferenced,
        StorageFault,
        StoreClosed,
        StoreFenced,
        StoreLocked,
        StoreNotFound,
        StoreUnusable,
        TimedOut,
        TooManyOpenFiles,
        TooManyReaders,
        Unavailable,
        UnknownArtifact,
        UnknownCursor,
        UnknownDatabase,
        UnknownJob,
        UnknownNamespace,
        UnknownReader,
        UnknownSnapshot,
        WouldDropEverything,
        WrongKind,
        WrongThread,
    )
    from quire.service.client import connect
    from quire.store.opening import open  # noqa: A004 - `quire.open` reads as it should; inside, nobody opens files
    from quire.store.store import Store

    __version__: str

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "ArtifactGone",
    "ChecksumMismatch",
    "ConfigMismatch",
    "Conflict",
    "Corruption",
    "CursorLost",
    "DatabaseTombstoned",
    "DiskFull",
    "ForeignObject",
    "FormatTooNew",
    "IllegalTransition",
    "Incompatible",
    "InternalError",
    "InvalidConfig",
    "InvalidInput",
    "InvalidName",
    "JobAlreadyPending",
    "LeaseExpired",
    "ManifestDamaged",
    "ManifestIntegrityError",
    "NameTaken",
    "NotFound",
    "NotWritable",
    "ObjectNotFound",
    "ObjectStoreUnavailable",
    "OutOfRange",
    "Overloaded",
    "QuireError",
    "QuotaExceeded",
    "ReadOnly",
    "RefcountUnderflow",
    "SnapshotChecksumMismatch",
    "SnapshotGone",
    "SparkUnavailable",
    "StalePlan",
    "StillReferenced",
    "StorageFault",
    "Store",
    "StoreClosed",
    "StoreFenced",
    "StoreLocked",
    "StoreNotFound",
    "StoreUnusable",
    "TimedOut",
    "TooManyOpenFiles",
    "TooManyReaders",
    "Unavailable",
    "UnknownArtifact",
    "UnknownCursor",
    "UnknownDatabase",
    "UnknownJob",
    "UnknownNamespace",
    "UnknownReader",
    "UnknownSnapshot",
    "WouldDropEverything",
    "WrongKind",
    "WrongThread",
    "__version__",
    "connect",
    "open",
]

if not TYPE_CHECKING:  # a type checker that saw `__getattr__` would believe in every misspelt name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "__version__":
            value: Any = import_module("importlib.metadata").version(__name__)
        else:
            rooms = {"Store": "quire.store.store", "open": "quire.store.opening", "connect": "quire.service.client"}
            value = getattr(import_module(rooms.get(name, "quire.core.errors")), name)
        globals()[name] = value  # so that this function runs once per name
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
