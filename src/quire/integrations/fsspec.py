"""fsspec file system: versions of databases as SQLite files, `quire://store/shop@monday.sqlite`.

A store is a directory of files, one for each database (`shop.sqlite`) and each of its snapshots (`shop@monday.sqlite`).
`shop@4711.sqlite` and `shop@2026-01-31T12:00:00Z.sqlite` are the versions of an epoch and of a time. The text after
`quire://` is a path, as after `file://`: `quire:///data/store/shop.sqlite` is absolute. Files are read-only. Bytes are
fetched on demand, and an open file keeps the version that it was opened with.

fsspec finds it by an entry point.

Threads: any. Raises `FileNotFoundError` if the file does not exist, otherwise the errors of reading a store.
"""

from __future__ import annotations

import os
import threading
import weakref
from datetime import UTC, datetime
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from quire.core.errors import InvalidInput, NotFound, ReadOnly
from quire.integrations.database_versions import list_versions, open_version
from quire.service.version_address import parse_version
from quire.sqlite.files import read_part
from quire.store.sqlite_urls import open_for_reading
from quire.store.store import Store

SUFFIX = ".sqlite"
BLOCK_BYTES = 256 * 1024
"""Bytes that are read at once: programs that read SQLite files jump from page to page."""


class QuireFileSystem(AbstractFileSystem):
    """The file system of a store's versions."""

    protocol = "quire"
    root_marker = ""
    cachable = True

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List the files of a store, or the one file that the path names."""
        path = self._strip_protocol(path)
        if path.endswith(SUFFIX):
            entries = [self.info(path)]
        else:
            store, release = _open(path)
            try:
                entries = [
                    {
                        "name": f"{path}/{version.label}{SUFFIX}",
                        "type": "file",
                        "size": version.size_bytes,
                        "version": f"{version.db_id}-{version.lsn}",
                    }
                    for version in list_versions(store)
                ]
            finally:
                release()
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Describe a store or a version; the size of a version is exact."""
        path = self._strip_protocol(path)
        if not path.endswith(SUFFIX):
            _open(path)[1]()
            return {"name": path, "type": "directory", "size": 0}
        with _VersionReader(path) as reader:
            return {"name": path, "type": "file", "size": reader.size, "version": reader.version}

    def ukey(self, path: str) -> str:
        """Return a key that changes when the file does."""
        return str(self.info(path)["version"])

    def modified(self, path: str) -> datetime:
        """Return when the version was committed."""
        with _VersionReader(self._strip_protocol(path)) as reader:
            return datetime.fromtimestamp(reader.time_ms / 1000, UTC)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return bytes of a version. Negative positions count from the end."""
        with _VersionReader(self._strip_protocol(path)) as reader:
            first, last, _step = slice(start, end).indices(reader.size)
            return reader.read(first, last)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,  # noqa: ARG002 - fsspec's signature
        cache_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> VersionFile:
        if mode != "rb":
            hint = "write with SQL: quire.sqlite.dbapi"
            raise ReadOnly("versions of a database are read-only files", hint=hint, path=path, mode=mode)
        return VersionFile(self, path, block_size=block_size or BLOCK_BYTES, cache_options=cache_options, **options)


class VersionFile(AbstractBufferedFile):
    """An open version, with fsspec's buffer."""

    def __init__(self, fs: QuireFileSystem, path: str, **options: Any) -> None:
        self._reader = _VersionReader(path)
        try:
            super().__init__(fs, path, size=self._reader.size, **options)
        except BaseException:
            self._reader.close()
            raise

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._reader.read(start, end)

    def close(self) -> None:
        """Close the file and release the version."""
        super().close()
        self._reader.close()


class _VersionReader:
    """The pages of a version, as bytes of a file. A context manager."""

    def __init__(self, path: str) -> None:
        root, name = os.path.split(path)
        if not name.endswith(SUFFIX):
            raise FileNotFoundError(f"{path}: files of a store are called NAME{SUFFIX} or NAME@VERSION{SUFFIX}")
        store, release = _open(root or ".")
        self._release = weakref.finalize(self, release)  # releases once, however often the file is closed
        self._lock = threading.Lock()  # a reader belongs to one thread at a time
        try:
            self._pages = open_version(store, parse_version(store.manifest, name.removesuffix(SUFFIX)))
        except (NotFound, InvalidInput) as error:
            self._release()
            raise FileNotFoundError(f"{path}: {error}") from error
        except BaseException:
            self._release()
            raise
        self.size = self._pages.size_pages * self._pages.page_size
        self.version = f"{self._pages.db_id}-{self._pages.lsn}"
        self.time_ms = self._pages.time_ms

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to, not including, `end`."""
        pages = self._pages
        with self._lock:
            return read_part(pages.read_page, pages.page_size, pages.size_pages, end - start, start)

    def close(self) -> None:
        with self._lock:
            self._pages.close()
        self._release()

    def __enter__(self) -> _VersionReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(root: str) -> tuple[Store, Any]:
    try:
        return open_for_reading(root or ".")
    except NotFound as error:
        raise FileNotFoundError(f"{root}: {error}") from error
