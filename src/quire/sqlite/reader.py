"""A SQLite connection over anything that has the pages of one version: a view on a Spark executor, say.

    >>> import apsw
    >>> from quire.sqlite.reader import open_reader
    >>> made = apsw.Connection(":memory:")
    >>> _ = made.execute("create table t(a); insert into t values ('kept')")
    >>> image = made.serialize("main")
    >>> class Source:
    ...     lsn, page_size, size_pages = 1, 4096, len(image) // 4096
    ...
    ...     def read_page(self, page: int) -> bytes:
    ...         return image[page * 4096 : page * 4096 + 4096]
    ...
    ...     def close(self) -> None: ...
    >>> open_reader(Source()).execute("select a from t").get
    'kept'

Rules
  1. No manifest and no page engine is needed, and no lock is taken: the version does not change.
  2. The connection owns the source: closing the one closes the other.

Threads: any; a connection belongs to one at a time. Executor-safe.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping

import apsw

from quire.core.errors import UnknownDatabase
from quire.sqlite.files import PageReader, ReadOnlyFile
from quire.sqlite.vfs import QuireVfs, VfsFile

_numbers = itertools.count(1)


class _Shelf:
    """Sources that are about to be opened, by the name SQLite will ask for; one VFS for all, made when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[str, PageReader] = {}
        self._vfs: QuireVfs | None = None

    def put(self, source: PageReader) -> tuple[str, str]:
        """(name of the source, name of the VFS)."""
        with self._lock:
            self._vfs = self._vfs or QuireVfs("quire-reader", self._open)
            name = f"view-{next(_numbers)}"
            self._sources[name] = source
            return name, self._vfs.name

    def _open(self, name: str, _: Mapping[str, str], __: bool) -> tuple[VfsFile, bool]:
        source = self._sources.pop(name, None)
        if source is None:
            hint = "only files of the machine can be attached here, by their path"
            raise UnknownDatabase("a reader of one version knows no other database", hint=hint, name=name)
        return ReadOnlyFile.fixed(source), True


_shelf = _Shelf()


def open_reader(source: PageReader) -> apsw.Connection:
    """A read-only connection over a source."""
    name, vfs = _shelf.put(source)
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    return apsw.Connection(f"file:{name}?immutable=1", flags=flags, vfs=vfs)
