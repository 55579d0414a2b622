"""SQLite files that the owner of a store follows by itself, each in a thread, until it is told to stop or closes.

A row of the manifest keeps a file after its first look has succeeded: who opens the store to serve it goes on with it, from
the position that its follower has saved. Stopping removes the row first: a crash in between leaves a follower that ends with
the process. A file that is gone, locked or empty is waited for, and so is a fault of the disk. What no waiting mends (another
page size, the database dropped) ends the follower; the row stays, and its `trouble` says why.

Files that quire.toml names (`[[follow]]`) are entered when a server begins, and taken out with it: the file need not exist
yet. A database that cannot follow its file is reported, and the others are followed.

Threads: any; one for each file. Raises what a look does, `NotFound`, `Conflict`, `StoreClosed`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from quire.core.errors import Conflict, NotFound, QuireError, StorageFault, StoreClosed, UnknownDatabase
from quire.core.events import emit
from quire.core.settings import FollowSettings
from quire.manifest import tables as t
from quire.manifest.ops.local import FollowSqliteFile
from quire.manifest.records import DbKind
from quire.manifest.store import ManifestStore
from quire.pages.engine import PageEngine
from quire.sqlite.follow import INTERVAL_SECONDS, Followed, Follower
from quire.sqlite.importing import name_for

RETRY_SECONDS = 5.0
"""After a fault of the disk."""


class FollowedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is kept, and what its follower does."""

    db_id: int
    database: str
    path: str
    interval_seconds: float
    since_ms: int
    running: bool
    """Whether this process follows it now."""
    trouble: str = ""
    """Why it does not get on, if it does not."""
    done: Followed | None = None
    """Since this process began."""
    configured: bool = False
    """By quire.toml."""


class _Task:
    """One follower and its thread."""

    def __init__(self, follower: Follower, interval_seconds: float) -> None:
        self.follower = follower
        self.stop = threading.Event()
        self._interval_seconds = interval_seconds
        self.thread = threading.Thread(target=self._run, name=f"quire-follow-{follower.name}", daemon=True)

    def _run(self) -> None:
        while not self.stop.wait(self._interval_seconds):
            try:
                self.follower.run(self.stop, self._interval_seconds)
            except StorageFault as error:
                self.follower._report(error, "warning", "sqlite.follow.waiting")
                self.stop.wait(RETRY_SECONDS)
            except StoreClosed:
                return
            except QuireError as error:
                self.follower._report(error, "error", "sqlite.follow.ended")
                return


class FileFollowers:
    """The files that one store follows; `store.followers`."""

    def __init__(
        self,
        *,
        manifest: ManifestStore,
        root: str,
        pages: Callable[[], PageEngine],
        configured: Sequence[FollowSettings] = (),
    ) -> None:
        self._configured = configured
        self._manifest = manifest
        self._root = root
        self._pages = pages
        # guarded by _lock
        self._lock = threading.Lock()
        self._tasks: dict[int, _Task] = {}
        self._closed = False

    def follow(
        self, path: str | os.PathLike[str], name: str = "", *, interval_seconds: float = INTERVAL_SECONDS
    ) -> FollowedFile:
        """Take over what a SQLite file has, and go on with what comes, until `stop`; also after a restart of the server."""
        follower = self._follower(os.fspath(path), name)
        known = next((file for file in self.files() if file.database == follower.name), None)
        if known is None:
            follower.look()  # without the lock: the first one may take minutes
        elif known.path != follower.path:
            hint = f"`quire sqlite unfollow {known.database}` first, or follow under another name"
            raise Conflict("the database follows another file", hint=hint, path=known.path)
        with self._lock:
            self._require_open()
            with self._manifest.read() as txn:
                db_id = txn.database_id(follower.name)
            interval_ms = round(interval_seconds * 1000)
            self._manifest.submit([FollowSqliteFile(db_id, follower.path, interval_ms)]).result()
            self._end(db_id)
            self._begin(db_id, follower, interval_seconds)
        return self.file(follower.name)

    def stop(self, name: str) -> FollowedFile:
        """Follow a database's file no more; what was followed. The database stays as it is."""
        followed = self.file(name)
        if followed.configured:
            hint = "take its [[follow]] out of quire.toml, and restart the server"
            raise Conflict("quire.toml says that the database follows this file", hint=hint, path=followed.path)
        self._manifest.submit([FollowSqliteFile(followed.db_id)]).result()
        with self._lock:
            self._end(followed.db_id)
        return msgspec.structs.replace(followed, running=False)

    def resume(self) -> list[FollowedFile]:
        """Go on with every file that is kept, and begin with those that quire.toml names; what a server does when it begins."""
        with self._lock:
            self._require_open()
            self._configure()
            for known in self.files():
                if known.db_id not in self._tasks:
                    follower = self._follower(known.path, known.database)
                    self._begin(known.db_id, follower, known.interval_seconds)
        return self.files()

    def _configure(self) -> None:
        """Make the rows of configured files what quire.toml says. REQUIRES the lock."""
        wanted = {}
        for entry in self._configured:
            path = os.path.normpath(os.path.join(os.path.abspath(self._root), entry.file))
            wanted[entry.database or name_for(path)] = (path, entry.interval_seconds)
        known = {file.database: file for file in self.files()}
        for name, file in known.items():
            if file.configured and name not in wanted:
                self._manifest.submit([FollowSqliteFile(file.db_id)]).result()
        for name, (path, seconds) in wanted.items():
            kept = known.get(name)
            if kept is not None and (kept.path, kept.interval_seconds, kept.configured) == (path, seconds, True):
                continue
            try:
                db_id = self._made(name)
                self._manifest.submit([FollowSqliteFile(db_id, path, round(seconds * 1000), configured=True)]).result()
            except QuireError as error:  # the name of a stream, say: the others are followed
                emit("error", "sqlite.follow.refused", path=path, database=name, reason=str(error))

    def _made(self, name: str) -> int:
        """The database of this name, made if there is none: its first page decides the page size."""
        with suppress(UnknownDatabase), self._manifest.read() as txn:
            return txn.database_id(name)
        return self._manifest.register_db(name, DbKind.PAGES)

    def files(self) -> list[FollowedFile]:
        """The files that are kept, by the names of their databases."""
        with self._manifest.read() as txn:
            rows = [(key[0], row, txn.database(key[0])) for key, row in txn.scan(t.FOLLOWED_FILES)]
        kept = [
            FollowedFile(
                db_id=db_id,
                database=record.name if record is not None else "",
                path=row.path,
                interval_seconds=row.interval_ms / 1000,
                since_ms=row.since_ms,
                running=(task := self._tasks.get(db_id)) is not None and task.thread.is_alive(),
                trouble=task.follower.trouble if task is not None else "",
                done=task.follower.done if task is not None else None,
                configured=row.configured,
            )
            for db_id, row, record in rows
        ]
        return sorted(kept, key=lambda file: file.database)

    def file(self, name: str) -> FollowedFile:
        """What a database follows; raises if it follows nothing."""
        for known in self.files():
            if known.database == name:
                return known
        raise NotFound("the database follows no file", hint="`quire sqlite follow FILE DB` begins it", database=name)

    def close(self) -> None:
        """End the threads; the files stay kept."""
        with self._lock:
            self._closed = True
            for db_id in list(self._tasks):
                self._end(db_id)

    def _follower(self, path: str, name: str) -> Follower:
        return Follower(manifest=self._manifest, pages=self._pages(), root=self._root, path=path, name=name)

    def _begin(self, db_id: int, follower: Follower, interval_seconds: float) -> None:
        """REQUIRES the lock."""
        self._tasks[db_id] = task = _Task(follower, interval_seconds)
        task.thread.start()

    def _end(self, db_id: int) -> None:
        """REQUIRES the lock."""
        task = self._tasks.pop(db_id, None)
        if task is not None:
            task.stop.set()
            task.thread.join()

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed", hint="open it again", path=self._root)
