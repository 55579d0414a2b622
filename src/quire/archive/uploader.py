"""Puts what the archiver has encoded into the bucket: artifacts first, then the log object that names them (A4, A6).

A log object's name is created once. If it is taken, the object is our own (an answer was lost), one of a former life that
arrived late, or a successor's seal.

Threads: the archiver's uploading thread and that of a base. Raises `StoreFenced`, and what disk and object store raise: the
archiver tries again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.archive.artifacts import Artifacts
from quire.archive.format import Kind, Position, decode_header, log_key
from quire.archive.sealing import fenced_by
from quire.archive.status import Traffic
from quire.core.errors import AlreadyExists, ObjectNotFound
from quire.durable.failpoints import hit
from quire.durable.files import Disk, read_all
from quire.objects.api import ExistingObject, ObjectStore


@dataclass(slots=True)
class Outgoing:
    """A log object that is encoded and not in the bucket yet."""

    position: Position
    digest: bytes
    end: int
    taken_at: float
    restorable: int
    base: int
    breaks: int = 0
    """How often the chain had been broken when it was encoded."""
    artifacts: list[tuple[str, str]] = field(default_factory=list)
    """(object name, local file): to be uploaded first."""
    data: bytes | None = None
    path: str = ""
    """Where it waits, if it does not wait in memory."""
    size_bytes: int = 0
    at_ms: int = 0
    """The owner's clock when it was cut."""


class Uploader:
    """The way of one archiver to its bucket."""

    def __init__(
        self,
        disk: Disk,
        objects: Callable[[], ObjectStore],
        artifacts: Artifacts,
        traffic: Traffic,
        confirm: Callable[[], None],
    ) -> None:
        """`confirm` asks the bucket whether the store is still ours: `StoreFenced` if not."""
        # constant after construction
        self._disk = disk
        self._objects = objects
        self._artifacts = artifacts
        self._traffic = traffic
        self._confirm = confirm
        # the uploading thread's own
        self._is_continued = False
        """Whether the object before the first one of this life was seen in the bucket."""

    def put(self, store_id: str, outgoing: Outgoing) -> bool:
        """Upload a log object, and before it its artifacts. False if the log does not end before it: an object of a
        former life has its name, or the bucket has lost what archive.json speaks of."""
        while outgoing.artifacts:
            key, path = outgoing.artifacts[0]
            self.put_artifact(key, path)
            hit("archive.artifact.put")
            outgoing.artifacts.pop(0)
            self._artifacts.discard(path)
        data = outgoing.data if outgoing.data is not None else read_all(self._disk, outgoing.path)
        key = log_key(store_id, outgoing.position)
        if not self._is_continued and outgoing.position.number:
            before = Position(outgoing.position.epoch, outgoing.position.number - 1)
            try:
                self._objects().head(log_key(store_id, before))
            except ObjectNotFound:
                return False
        self._is_continued = True
        hit("archive.log.before")
        try:
            self._objects().put(key, data, create_only=True, identity=lambda existing: existing.read_all() == data)
        except AlreadyExists:
            header = decode_header(self._objects().get(key), key)
            if header.kind is Kind.SEAL:
                raise fenced_by(header, key) from None
            self._confirm()
            return False
        hit("archive.log.put")
        self._traffic.count(len(data))
        return True

    def put_artifact(self, key: str, path: str) -> None:
        """Upload a file that never changes."""
        size = self._disk.size(path)

        def is_same(existing: ExistingObject) -> bool:
            return existing.info.size_bytes == size

        self._objects().put_file(key, path, create_only=True, identity=is_same)
        self._traffic.count(size)

    def put_part(self, key: str, data: bytes) -> None:
        """Upload a part of a base; one of a base that was given up is replaced."""
        self._objects().put(key, data)
        self._traffic.count(len(data))
