"""SQLite files that the owner of a store follows in the background, one thread per file, until stopped or closed.

A file gets a row in the manifest after its first look has succeeded. A server that opens the store later resumes it from the
position that its follower saved. Stopping removes the row first: a crash in between leaves a follower that ends with the
process. A follower waits for a file that is missing, locked or empty, and after a fault of the disk. An error that waiting
does not fix (another page size, the database dropped) ends the follower; the row stays, and its `trouble` gives the reason.

Files named in quire.toml (`[[follow]]`) get their rows when a server starts, which also removes the rows of files that it no
longer names; such a file need not exist yet. A database that cannot follow its file is reported, and the others are followed.

Threads: any; one for each file. Raises the errors of a look, `NotFound`, `Conflict`, `StoreClosed`.
"""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Callable, Sequence

import msgspec

from quire.core.errors import Conflict, NotFound, QuireError, StorageFault, StoreClosed
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
"""Seconds to wait after a fault of the disk."""


class FollowedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is followed, and the state of its follower."""

    db_id: int
    database: str
    path: str
    interval_seconds: float
    since_ms: int
    running: bool
    """Whether this process is following it now."""
    trouble: str = ""
    """Why it makes no progress; empty if it does."""
    done: Followed | None = None
    """Work done since this process started."""
    configured: bool = False
    """Whether quire.toml names it."""


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
        """Import a SQLite file and keep following it until `stop`, also after a restart of the server."""
        follower = self._follower(os.fspath(path), name)
        followed = next((file for file in self.files() if file.database == follower.name), None)
        if followed is None:
            follower.look()  # without the lock: the first look may take minutes
        elif followed.path != follower.path:
            hint = f"run `quire sqlite unfollow {shlex.quote(followed.database)}` first, or follow under another name"
            raise Conflict("the database follows another file", hint=hint, path=followed.path)
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
        """Stop following a database's file, and return what was followed. The database stays as it is."""
        followed = self.file(name)
        if followed.configured:
            hint = "remove its [[follow]] block from quire.toml, and restart the server"
            raise Conflict("the database follows this file because of quire.toml", hint=hint, path=followed.path)
        # The row first: a crash in between leaves a follower that ends with the process.
        self._manifest.submit([FollowSqliteFile(followed.db_id)]).result()
        with self._lock:
            self._end(followed.db_id)
        return msgspec.structs.replace(followed, running=False)

    def resume(self) -> list[FollowedFile]:
        """Resume every file that has a row and start those that quire.toml names. Called when a server starts."""
        with self._lock:
            self._require_open()
            self._configure()
            for followed in self.files():
                if followed.db_id not in self._tasks:
                    follower = self._follower(followed.path, followed.database)
                    self._begin(followed.db_id, follower, followed.interval_seconds)
        return self.files()

    def _configure(self) -> None:
        """Make the rows of configured files match quire.toml. REQUIRES the lock."""
        wanted = {}
        for entry in self._configured:
            path = os.path.normpath(os.path.join(os.path.abspath(self._root), entry.file))
            wanted[entry.database or name_for(path)] = (path, entry.interval_seconds)
        by_name = {file.database: file for file in self.files()}
        for name, file in by_name.items():
            if file.configured and name not in wanted:
                self._manifest.submit([FollowSqliteFile(file.db_id)]).result()
        for name, (path, seconds) in wanted.items():
            kept = by_name.get(name)
            if kept is not None and (kept.path, kept.interval_seconds, kept.configured) == (path, seconds, True):
                continue
            try:
                db_id = self._manifest.find_or_register(name, DbKind.PAGES)
                self._manifest.submit([FollowSqliteFile(db_id, path, round(seconds * 1000), configured=True)]).result()
            except QuireError as error:  # the name of a stream, for example: the others are followed
                emit("error", "sqlite.follow.refused", path=path, database=name, reason=str(error))

    def files(self) -> list[FollowedFile]:
        """Return all followed files, sorted by database name."""
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
        """Return the file that a database follows. Raises `NotFound` if there is none."""
        for followed in self.files():
            if followed.database == name:
                return followed
        raise NotFound("the database follows no file", hint="`quire sqlite follow FILE DB` follows one", database=name)

    def close(self) -> None:
        """End the threads. The rows of the files stay."""
        with self._lock:
            self._closed = True
            for db_id in list(self._tasks):
                self._end(db_id)

    def _follower(self, path: str, name: str) -> Follower:
        return Follower(manifest=self._manifest, pages=self._pages(), root=self._root, path=path, name=name)

    def _begin(self, db_id: int, follower: Follower, interval_seconds: float) -> None:
        """Start a follower. REQUIRES the lock."""
        self._tasks[db_id] = task = _Task(follower, interval_seconds)
        task.thread.start()

    def _end(self, db_id: int) -> None:
        """End a follower and wait for its thread. REQUIRES the lock."""
        task = self._tasks.pop(db_id, None)
        if task is not None:
            task.stop.set()
            task.thread.join()

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed", hint="open it again", path=self._root)
