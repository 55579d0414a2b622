"""A tar file as an object store, for backups in one file: each object is a member, its key the member's name.

A new file is written under a temporary name; `finish` gives it its final name. Before that, the final name does not exist.
Nothing is compressed, so a range of an object is a range of the file, and `tar xf` creates a directory that is the same store.

Threads: any to read; one to write. Raises: `ObjectNotFound`, `AlreadyExists`, `OutOfRange`, `Conflict`
(another backup is writing the file), and what the disk raises.
"""

from __future__ import annotations

import fcntl
import io
import os
import tarfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import BinaryIO

from quire.core.errors import Conflict, Corruption, InvalidInput, NotFound, ObjectNotFound
from quire.durable.failpoints import hit
from quire.durable.files import OsDisk, translated
from quire.durable.names import TEMPORARY
from quire.objects.api import (
    PAGE_OBJECTS,
    Buffer,
    Identity,
    NameIsTaken,
    ObjectInfo,
    PutResult,
    Range,
    check_digest_before_put,
    check_key,
    check_listing,
    check_prefix,
    check_range,
    create_or_adopt,
    past_the_end,
    read_verified,
)

SUFFIX = ".tar"


class TarStore:
    """An `ObjectStore` in one file, which is either written once or read."""

    def __init__(self, path: str, *, write: bool = False) -> None:
        self._path = os.path.abspath(path)
        self._is_writing = write
        self._lock = threading.Lock()
        self._members: dict[str, tuple[int, int]] = {}
        """Key → (offset in the file, size), in bytes."""
        if write:
            self._refuse_existing()
        with translated(self._path, "opening the backup"):
            try:
                self._file = _new_file(self._path + TEMPORARY) if write else open(self._path, "rb")  # noqa: SIM115 - see `close`
            except FileNotFoundError:
                raise NotFound("no such file or directory", path=self._path) from None
        if write:
            try:
                self._refuse_existing()  # again, with the lock: another backup may have ended before we took it
            except InvalidInput:
                self.close()
                raise
            self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        else:
            self._read_members()

    def _refuse_existing(self) -> None:
        if os.path.exists(self._path):
            hint = "choose another name; `--since` creates a backup based on an earlier one"
            raise InvalidInput("the file already exists", hint=hint, path=self._path)

    def _read_members(self) -> None:
        try:
            with tarfile.open(fileobj=self._file, mode="r:") as tar:
                for member in tar:
                    if member.isreg():
                        self._members[member.name.removeprefix("./")] = (member.offset_data, member.size)
        except tarfile.TarError as error:
            self._file.close()
            hint = "it is incomplete or damaged: copy it again, or restore another backup"
            raise Corruption("this is not a backup: the tar file cannot be read", hint=hint, path=self._path) from error

    @property
    def url(self) -> str:
        return self._path

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def put(
        self,
        key: str,
        data: Buffer,
        *,
        create_only: bool = False,  # noqa: ARG002 - always: a member is never replaced
        identity: Identity | None = None,
        sha256: bytes | None = None,
    ) -> PutResult:
        check_digest_before_put(key, data, sha256)
        return self._put(key, io.BytesIO(data), len(data), identity)

    def put_file(
        self,
        key: str,
        path: str,
        *,
        create_only: bool = False,  # noqa: ARG002 - the same
        identity: Identity | None = None,
    ) -> PutResult:
        with open(path, "rb") as file:
            return self._put(key, file, os.fstat(file.fileno()).st_size, identity)

    def _put(self, key: str, content: BinaryIO | io.BytesIO, size: int, identity: Identity | None) -> PutResult:
        """Add a member. An existing member is never replaced."""
        check_key(key)

        def create() -> PutResult:
            if key in self._members:
                raise NameIsTaken
            info = tarfile.TarInfo(key)
            info.size, info.mode = size, 0o600
            with self._lock, translated(self._path, "writing the backup"):
                self._tar.addfile(info, content)
                end = self._file.tell()
                # `addfile` pads the body to whole blocks, and the headers before it vary in length: count back from the
                # end.
                blocks = -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                self._members[key] = (end - blocks, size)
            return PutResult(key=key, size_bytes=size, etag=None, adopted=False)

        return create_or_adopt(self, key, create, identity)

    def finish(self) -> None:
        """Make the complete file durable, then give it its name."""
        disk = OsDisk()
        with translated(self._path, "writing the backup"):
            self._tar.close()
            self._file.flush()
        with closing(disk.open(self._path + TEMPORARY)) as written:
            written.sync()
        hit("backup.tar.synced")
        disk.rename(self._path + TEMPORARY, self._path)
        disk.sync_dir(os.path.dirname(self._path))
        self._is_writing = False

    def close(self) -> None:
        """Close the file, and remove it if it is unfinished."""
        if self._is_writing:
            self._is_writing = False
            with suppress(FileNotFoundError):
                os.unlink(self._path + TEMPORARY)  # before its lock is released: the name may then be another backup's
        self._file.close()

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def get(self, key: str) -> bytes:
        return self.get_range(key, 0, self._member(key)[1])

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        check_range(key, offset, length)
        start, size = self._member(key)
        if offset + length > size:
            raise past_the_end(key, offset, length, size)
        with self._lock, translated(self._path, "reading the backup"):
            if self._is_writing:
                self._file.flush()
            self._file.seek(start + offset)
            data: bytes = self._file.read(length)
            if self._is_writing:
                self._file.seek(0, os.SEEK_END)
        if len(data) != length:
            raise Corruption("the tar file ends in the middle of an object", path=self._path, key=key)
        return data

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        return [self.get_range(key, span.offset, span.length) for span in ranges]

    def get_verified(
        self, key: str, *, size_bytes: int, sha256: bytes | None = None, crc64: int | None = None
    ) -> bytes:
        return read_verified(self, key, size_bytes=size_bytes, sha256=sha256, crc64=crc64)

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key=key, size_bytes=self._member(key)[1], etag=None, modified_ms=0)

    def list_pages(
        self, prefix: str = "", *, start_after: str = "", page_objects: int = PAGE_OBJECTS
    ) -> Iterator[Sequence[ObjectInfo]]:
        prefix = check_listing(prefix, start_after, page_objects)
        below = f"{prefix}/" if prefix else ""
        keys = sorted((key for key in self._members if key.startswith(below) and key > start_after), key=str.encode)
        for start in range(0, len(keys), page_objects):
            yield [self.head(key) for key in keys[start : start + page_objects]]

    def list_prefixes(self, prefix: str = "") -> list[str]:
        folder = check_prefix(prefix)
        folder = f"{folder}/" if folder else ""
        rests = (key.removeprefix(folder) for key in self._members if key.startswith(folder))
        return sorted({folder + rest.partition("/")[0] for rest in rests if "/" in rest})

    def _member(self, key: str) -> tuple[int, int]:
        if (member := self._members.get(key)) is None:
            raise ObjectNotFound("no such object", store=self.url, key=key)
        return member


def _new_file(path: str) -> BinaryIO:
    """Open a file that only this backup writes, and empty it: a killed backup may have left one."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A file that got its final name, or was removed, between `open` and the lock is not this backup's.
        if not os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        file.close()
        raise Conflict("another backup is writing this file", hint="choose another name", path=path) from None
    file.truncate()
    return file
