"""quire: a versioned, tiered storage engine for Python.

The public names are those in `__all__` here and in the packages `quire.sqlite`, `quire.spark`, `quire.objects`, `quire.lsm` and
`quire.testing`; everything else is private. A name loads its module when it is first used (`core/lazy.py`), so `import quire`
costs next to nothing.

    >>> import quire
    >>> issubclass(quire.StoreLocked, quire.QuireError)
    True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.core.lazy import lazy_names

if TYPE_CHECKING:
    from quire.core.async_bridge import iterate
    from quire.core.errors import (
        AccessDenied,
        AlreadyExists,
        ArchiveAhead,
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
        NotArchived,
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
    from quire.core.settings import (
        ArchiveSettings,
        FeedSettings,
        LsmSettings,
        MaintenanceSettings,
        ManifestLogSettings,
        ManifestSettings,
        ObjectSettings,
        PagesSettings,
        ServiceSettings,
        StoreSettings,
        StreamSettings,
    )
    from quire.lsm.kv import Kv
    from quire.manifest.records import DbKind, JobKind, JobState, RetentionRecord
    from quire.manifest.replica import Replica
    from quire.pages.view import SnapshotView
    from quire.service.client import connect
    from quire.store.archive_copy import open_archive
    from quire.store.backup import BackedUp
    from quire.store.cloning import Cloned, clone
    from quire.store.opening import open  # noqa: A004 - `quire.open` reads as it should; inside, nobody opens files
    from quire.store.restoring import Restored, restore
    from quire.store.standby import Promoted, Standby, StandbyStatus, promote
    from quire.store.store import Store
    from quire.stream.state import Retention
    from quire.stream.stream import Stream

    __version__: str

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "ArchiveAhead",
    "ArchiveSettings",
    "ArtifactGone",
    "BackedUp",
    "ChecksumMismatch",
    "Cloned",
    "ConfigMismatch",
    "Conflict",
    "Corruption",
    "CursorLost",
    "DatabaseTombstoned",
    "DbKind",
    "DiskFull",
    "FeedSettings",
    "ForeignObject",
    "FormatTooNew",
    "IllegalTransition",
    "Incompatible",
    "InternalError",
    "InvalidConfig",
    "InvalidInput",
    "InvalidName",
    "JobAlreadyPending",
    "JobKind",
    "JobState",
    "Kv",
    "LeaseExpired",
    "LsmSettings",
    "MaintenanceSettings",
    "ManifestDamaged",
    "ManifestIntegrityError",
    "ManifestLogSettings",
    "ManifestSettings",
    "NameTaken",
    "NotArchived",
    "NotFound",
    "NotWritable",
    "ObjectNotFound",
    "ObjectSettings",
    "ObjectStoreUnavailable",
    "OutOfRange",
    "Overloaded",
    "PagesSettings",
    "Promoted",
    "QuireError",
    "QuotaExceeded",
    "ReadOnly",
    "RefcountUnderflow",
    "Replica",
    "Restored",
    "Retention",
    "RetentionRecord",
    "ServiceSettings",
    "SnapshotChecksumMismatch",
    "SnapshotGone",
    "SnapshotView",
    "SparkUnavailable",
    "StalePlan",
    "Standby",
    "StandbyStatus",
    "StillReferenced",
    "StorageFault",
    "Store",
    "StoreClosed",
    "StoreFenced",
    "StoreLocked",
    "StoreNotFound",
    "StoreSettings",
    "StoreUnusable",
    "Stream",
    "StreamSettings",
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
    "clone",
    "connect",
    "iterate",
    "open",
    "open_archive",
    "promote",
    "restore",
]

if not TYPE_CHECKING:  # a type checker that saw `__getattr__` would accept every misspelt name
    _HOMES = dict.fromkeys(__all__, "quire.core.errors") | {
        "iterate": "quire.core.async_bridge",
        "ObjectSettings": "quire.core.settings",
        "ArchiveSettings": "quire.core.settings",
        "FeedSettings": "quire.core.settings",
        "LsmSettings": "quire.core.settings",
        "MaintenanceSettings": "quire.core.settings",
        "ManifestLogSettings": "quire.core.settings",
        "ManifestSettings": "quire.core.settings",
        "PagesSettings": "quire.core.settings",
        "ServiceSettings": "quire.core.settings",
        "StoreSettings": "quire.core.settings",
        "StreamSettings": "quire.core.settings",
        "Kv": "quire.lsm.kv",
        "DbKind": "quire.manifest.records",
        "JobKind": "quire.manifest.records",
        "JobState": "quire.manifest.records",
        "RetentionRecord": "quire.manifest.records",
        "Replica": "quire.manifest.replica",
        "SnapshotView": "quire.pages.view",
        "connect": "quire.service.client",
        "open_archive": "quire.store.archive_copy",
        "BackedUp": "quire.store.backup",
        "Cloned": "quire.store.cloning",
        "clone": "quire.store.cloning",
        "open": "quire.store.opening",
        "Promoted": "quire.store.standby",
        "Standby": "quire.store.standby",
        "StandbyStatus": "quire.store.standby",
        "promote": "quire.store.standby",
        "Restored": "quire.store.restoring",
        "restore": "quire.store.restoring",
        "Store": "quire.store.store",
        "Retention": "quire.stream.state",
        "Stream": "quire.stream.stream",
    }
    _load, __dir__ = lazy_names(__name__, _HOMES)

    def __getattr__(name: str) -> Any:
        return import_module("importlib.metadata").version(__name__) if name == "__version__" else _load(name)
