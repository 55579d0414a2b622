"""A store with an archive, its expected contents, and a bucket that can be unavailable."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

import quire
from quire.archive.archiver import Archiver
from quire.archive.format import Header, Position, decode_object, log_key
from quire.archive.log_reader import epochs, log_positions
from quire.core.clock import Clock
from quire.core.errors import ObjectStoreUnavailable
from quire.core.settings import ArchiveSettings, LsmSettings, MaintenanceSettings, StoreSettings, StreamSettings
from quire.objects.open import open_store
from quire.store.store import Store

WAIT = 30.0


def settings(bucket: Path | str, lsm: Mapping[str, Any] | None = None, **archive: Any) -> StoreSettings:
    """Small parts, so that a few changes reach every kind of file; no background work."""
    small: dict[str, Any] = {
        "memtable_bytes": 16 << 10,
        "table_bytes": 16 << 10,
        "block_bytes": 1024,
        "level0_tables": 2,
    }
    return StoreSettings(
        object_store=str(bucket),
        archive=ArchiveSettings(**{"mode": "async", "interval_seconds": 0.02, **archive}),
        maintenance=MaintenanceSettings(enabled=False),
        lsm=LsmSettings(**{**small, **(lsm or {})}),
        stream=StreamSettings(segment_bytes=8 << 10, sync_seconds=0),
    )


class ArchivedStore:
    """A store at `home/store` whose objects are in `home/bucket`."""

    def __init__(self, home: Path, clock: Clock | None = None, **archive: Any) -> None:
        self.home, self.bucket, self.root = home, home / "bucket", home / "store"
        self.archive_settings = archive
        self.clock = clock
        self.store = self.open()

    def open(self, path: Path | None = None, **arguments: Any) -> Store:
        return quire.open(
            path or self.root, settings=settings(self.bucket, **self.archive_settings), clock=self.clock, **arguments
        )

    @property
    def archiver(self) -> Archiver:
        assert self.store.archive is not None
        return self.store.archive

    def wait_archived(self) -> None:
        self.archiver.wait(WAIT)

    def close(self) -> None:
        self.store.close()

    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()

    def restore(self, name: str = "restored", **arguments: Any) -> Path:
        quire.restore(str(self.bucket), self.home / name, clock=self.clock, **arguments)
        return self.home / name

    def restored_contents(self, name: str = "looked", **arguments: Any) -> dict[str, Any]:
        """What a restore returns now, from a copy of the bucket: no owner is deposed."""
        copy = self.home / f"{name}.bucket"
        shutil.copytree(self.bucket, copy)
        quire.restore(str(copy), self.home / name, clock=self.clock, **arguments)
        return read(self.home / name, clock=self.clock)

    # ── contents of the bucket ────────────────────────────────────────────────────────────────────────────────────────
    def headers(self, epoch: int = 1) -> list[Header]:
        with closing(open_store(str(self.bucket))) as bucket:
            return [
                decode_object(bucket.get(log_key(self.store_id, position)), "")[0]
                for position in log_positions(bucket, self.store_id, epoch)
            ]

    def epochs(self) -> list[int]:
        with closing(open_store(str(self.bucket))) as bucket:
            return epochs(bucket, self.store_id)

    @property
    def store_id(self) -> str:
        (folder,) = [path.name for path in self.bucket.iterdir() if (path / "archive").exists()]
        return folder

    def log_path(self, position: Position) -> Path:
        return self.bucket / log_key(self.store_id, position)


def kill(store: Store) -> None:
    """Close a store as a killed process would: nothing more is archived or written."""
    archiver = store.archive
    assert archiver is not None
    archiver.queue.close()
    with archiver._lock:
        archiver._outbox.break_chain(keep_first=False)
        archiver._arrivals.failure = archiver._arrivals.failure or ObjectStoreUnavailable("killed")
        archiver._changed.notify_all()
    for thread in archiver._threads:
        thread.join(10)
    store.close()


# ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def fill(store: Store, start: int, count: int = 20) -> None:
    """Change every kind of database; each gets the numbers from `start` on."""
    with closing(store.sqlite("shop", create=True)) as connection:
        connection.execute("create table if not exists t(a integer primary key, b)")
        for number in range(start, start + count):
            connection.execute("insert into t values(?, ?)", (number, "x" * (number * 37 % 900)))
    kv = store.kv("pairs", create=True)
    for number in range(start, start + count):
        kv.put(b"%06d" % number, bytes([number % 251]) * (number * 31 % 400))
    stream = store.stream("events", create=True)
    stream.append([b"record %d" % number for number in range(start, start + count)]).result()


def contents(store: Store) -> dict[str, Any]:
    """Everything that a user can read from a store, including its snapshots."""
    state: dict[str, Any] = {}
    for info in store.databases():
        name = info.name
        match info.kind.name:
            case "PAGES":
                with closing(store.sqlite(name)) as connection:
                    state[name] = rows(connection)
                for snapshot in store.manifest.snapshots.of(name):
                    if snapshot.name and not snapshot.tags:
                        with closing(store.sqlite(name, at=snapshot.name)) as connection:
                            state[f"{name}@{snapshot.name}"] = rows(connection)
            case "LSM":
                state[name] = dict(store.kv(name).scan())
                for snapshot in store.manifest.snapshots.of(name):
                    with store.kvs.open_snapshot(name, snapshot.name) as frozen:
                        state[f"{name}@{snapshot.name}"] = dict(frozen.scan())
            case _:
                state[name] = [(record.id, bytes(record.payload)) for record in store.stream(name).read()]
    return state


def rows(connection: Any) -> dict[int, str]:
    """The rows of the table, or none if it does not exist yet."""
    if not connection.execute("select 1 from sqlite_master where name = 't'").fetchall():
        return {}
    return dict(connection.execute("select a, b from t").fetchall())


def read(path: Path, **arguments: Any) -> dict[str, Any]:
    """The contents of a restored store, read by a takeover in its own directory with the archive off."""
    with quire.open(path, takeover=True, discard=True, settings=quiet(), **arguments) as store:
        assert store.manifest.check() == []
        return contents(store)


def quiet() -> StoreSettings:
    return StoreSettings(maintenance=MaintenanceSettings(enabled=False), archive=ArchiveSettings(mode="off"))


# ── a bucket that can be unavailable ──────────────────────────────────────────────────────────────────────────────────
class Gate:
    """Intercepts the archiver's access to its bucket."""

    def __init__(self, archiver: Archiver) -> None:
        self._objects = archiver._objects
        self.is_down = False
        self.error: Exception = ObjectStoreUnavailable("away")
        self.before_put: Callable[[str], None] = lambda _: None
        self.may_put = threading.Event()
        self.may_put.set()
        self.is_waiting = threading.Event()
        archiver._objects = lambda: self

    def __getattr__(self, name: str) -> Any:
        if self.is_down:
            raise self.error
        return getattr(self._objects(), name)

    def put(self, key: str, *arguments: Any, **options: Any) -> Any:
        self.before_put(key)
        self.is_waiting.set()
        assert self.may_put.wait(WAIT)
        if self.is_down:
            raise self.error
        return self._objects().put(key, *arguments, **options)


def until(condition: Callable[[], object], seconds: float = WAIT) -> None:
    """Wait until another thread has made the condition true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)


@contextmanager
def archived_store(home: Path, **arguments: Any) -> Iterator[ArchivedStore]:
    opened_store = ArchivedStore(home, **arguments)
    try:
        yield opened_store
    finally:
        opened_store.store.close()


def with_mode(store_settings: StoreSettings, mode: str) -> StoreSettings:
    return msgspec.structs.replace(store_settings, archive=msgspec.structs.replace(store_settings.archive, mode=mode))
