"""The interface of a store for the service (the store passes itself in: nothing here imports upwards), and `CallContext`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from quire.core.settings import StoreSettings
from quire.manifest.snapshots import SnapshotInfo
from quire.manifest.store import ManifestStore
from quire.service.grants import Grant
from quire.service.values import DatabaseFilterOptions, DatabaseInfo, DroppedDatabase, StoreInfo

if TYPE_CHECKING:
    from datetime import datetime

    from quire.core.ids import Epoch
    from quire.jobs.context import JobContext
    from quire.jobs.worker import Worker
    from quire.lsm.engine import KvEngine
    from quire.manifest.snapshots import RolledBack
    from quire.pages.engine import PageEngine


class StoreApi(Protocol):
    """A store opened by its owner."""

    path: str
    settings: StoreSettings
    copy_of: str

    @property
    def mode(self) -> str: ...

    @property
    def objects_url(self) -> str: ...

    @property
    def manifest(self) -> ManifestStore: ...

    @property
    def pages(self) -> PageEngine: ...

    @property
    def context(self) -> JobContext: ...

    @property
    def worker(self) -> Worker: ...

    @property
    def kvs(self) -> KvEngine: ...

    @property
    def followers(self) -> Any: ...

    def create(
        self, name: str, kind: str, *, tags: dict[str, str] | None = None, namespace: str = ""
    ) -> DatabaseInfo: ...

    def drop(self, name: str, *, snapshots: bool = False, undoable: bool = False) -> DatabaseInfo: ...

    def undrop(self, name: str | int, *, new_name: str = "") -> DatabaseInfo: ...

    def purge(self, name: str | int) -> DroppedDatabase: ...

    def dropped(self) -> list[DroppedDatabase]: ...

    def rename(self, old: str, new: str) -> DatabaseInfo: ...

    def set_status(self, name: str, status: str) -> DatabaseInfo: ...

    def set_options(self, name: str, *, tags: dict[str, str] | None = None, compression: str = "") -> DatabaseInfo: ...

    @property
    def namespaces(self) -> Any: ...

    def snapshot(self, name: str, snapshot: str = "", *, tags: dict[str, str] | None = None) -> SnapshotInfo: ...

    def drop_snapshot(self, db: int | str, snapshot: int | str, *, undoable: bool = False) -> SnapshotInfo: ...

    def undrop_snapshot(self, db: int | str, snapshot: int | str, *, new_name: str = "") -> SnapshotInfo: ...

    def fork(
        self,
        name: str,
        new_name: str,
        *,
        at: int | str | Epoch | datetime | None = None,
        tags: dict[str, str] | None = None,
        compression: str = "",
    ) -> DatabaseInfo: ...

    def rollback(self, name: str, *, to: Any) -> RolledBack: ...

    def sqlite(
        self,
        name: str,
        *,
        at: Any = None,
        create: bool = False,
        fork_of: str | None = None,
        fork_at: Any = None,
        timeout: float = 5.0,
    ) -> Any: ...

    def stream(self, name: str, *, create: bool = False) -> Any: ...

    @property
    def streams(self) -> Any: ...

    def databases(self, **wanted: Unpack[DatabaseFilterOptions]) -> list[DatabaseInfo]: ...

    def database(self, name: str | int) -> DatabaseInfo: ...

    def info(self) -> StoreInfo: ...


# ── calls ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class CallContext:
    """One call, as passed to a handler."""

    key: bytes
    """The key of a keyed action; otherwise empty."""
    grant: Grant
    """What the caller may do."""
    is_over: Callable[[], bool]
    """Returns whether the client has left or the server stops: a waiting handler should then return."""
    client: str = ""
    """The id that the client sends: its holdings at the owner are found by it (`client_holdings.py`)."""
    is_local: bool = False
    """Whether it came through the Unix socket."""
    has_left: Callable[[], bool] = lambda: False
    """Returns whether the client has left."""
