"""The object store that the owner gives its engines and jobs: it checks before each put that this process may still write, and
counts requests.

Reads are not checked. A bulk deletion is checked once for the whole call.

Threads: any. Raises what the store raises, and what the checks raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from quire.objects.api import PAGE_OBJECTS, Buffer, DeletableStore, Identity, ObjectInfo, ObjectStore, PutResult, Range
from quire.objects.local import LocalStore
from quire.objects.requests import RequestCount


@dataclass(frozen=True, slots=True)
class GuardedStore:
    """The store `inner`, with `before_put` called before each put, `before_delete` before each deletion, and its requests
    counted."""

    inner: DeletableStore
    before_put: Callable[[], None]
    before_delete: Callable[[], None]
    requests: RequestCount = field(default_factory=RequestCount)

    @property
    def url(self) -> str:
        return self.inner.url

    def put(
        self,
        key: str,
        data: Buffer,
        *,
        create_only: bool = False,
        identity: Identity | None = None,
        sha256: bytes | None = None,
    ) -> PutResult:
        self.before_put()
        self.requests.count_write()
        return self.inner.put(key, data, create_only=create_only, identity=identity, sha256=sha256)

    def put_file(
        self, key: str, path: str, *, create_only: bool = False, identity: Identity | None = None
    ) -> PutResult:
        self.before_put()
        self.requests.count_write()
        return self.inner.put_file(key, path, create_only=create_only, identity=identity)

    def get(self, key: str) -> bytes:
        self.requests.count_read()
        return self.inner.get(key)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.requests.count_read()
        return self.inner.get_range(key, offset, length)

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        self.requests.count_read()
        return self.inner.get_ranges(key, ranges)

    def get_verified(
        self, key: str, *, size_bytes: int, sha256: bytes | None = None, crc64: int | None = None
    ) -> bytes:
        self.requests.count_read()
        return self.inner.get_verified(key, size_bytes=size_bytes, sha256=sha256, crc64=crc64)

    def head(self, key: str) -> ObjectInfo:
        self.requests.count_read()
        return self.inner.head(key)

    def list_pages(
        self, prefix: str = "", *, start_after: str = "", page_objects: int = PAGE_OBJECTS
    ) -> Iterator[Sequence[ObjectInfo]]:
        return self._counted(self.inner.list_pages(prefix, start_after=start_after, page_objects=page_objects))

    def _counted(self, pages: Iterator[Sequence[ObjectInfo]]) -> Iterator[Sequence[ObjectInfo]]:
        self.requests.count_write()  # an empty listing is a request too
        for number, page in enumerate(pages):
            if number:
                self.requests.count_write()
            yield page

    def list_prefixes(self, prefix: str = "") -> list[str]:
        self.requests.count_write()
        return self.inner.list_prefixes(prefix)

    def delete(self, key: str) -> None:
        self.before_delete()
        self.inner.delete(key)

    def delete_many(self, keys: Iterable[str]) -> None:
        self.before_delete()
        self.inner.delete_many(keys)

    def close(self) -> None:
        self.inner.close()


def path_store(store: ObjectStore) -> LocalStore | None:
    """Return the `LocalStore` that `store` is or wraps; `None` if it is a store of another kind."""
    while isinstance(store, GuardedStore):
        store = store.inner
    return store if isinstance(store, LocalStore) else None
