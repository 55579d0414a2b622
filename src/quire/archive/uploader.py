"""Uploads the objects that the archiver has encoded: artifacts first, then the log object that names them (A4, A6).

A log object's name is created once. If it exists already, the object is our own (a response was lost), one of a former life
that arrived late, or a successor's seal.

Threads: the archiver's uploading thread and that of a base. Raises `StoreFenced`, and the errors of disk and object store,
after which the archiver retries.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.archive.artifacts import Artifacts
from quire.archive.format import Kind, Position, decode_header, log_key
from quire.archive.outbox import Outgoing
from quire.archive.sealing import fenced_by
from quire.archive.status import Traffic
from quire.core.errors import AlreadyExists, ObjectNotFound
from quire.durable.failpoints import hit
from quire.durable.files import Disk, read_all
from quire.objects.api import ExistingObject, ObjectStore


class Uploader:
    """Uploads the objects of one archiver."""

    def __init__(
        self,
        disk: Disk,
        objects: Callable[[], ObjectStore],
        artifacts: Artifacts,
        traffic: Traffic,
        confirm: Callable[[], None],
    ) -> None:
        """Create an uploader. `confirm` checks in the bucket that the store is still ours, and raises `StoreFenced` if not."""
        # constant after construction
        self._disk = disk
        self._objects = objects
        self._artifacts = artifacts
        self._traffic = traffic
        self._confirm = confirm
        # used by the uploading thread only
        self._is_continued = False
        """Whether the object before the first one of this life has been seen in the bucket."""

    def put(self, store_id: str, outgoing: Outgoing) -> bool:
        """Upload the artifacts of a log object, then the object. Return `False` if the log does not end right before it: an
        object of a former life has its name, or the bucket has lost the object that archive.json names as the last one."""
        while outgoing.artifacts:
            key, path = outgoing.artifacts[0]
            self.put_artifact(key, path)
            # One by one: a retry continues with the first file that is not in the bucket.
            outgoing.artifacts.pop(0)
            self._artifacts.discard(path)
        data = outgoing.data if outgoing.data is not None else read_all(self._disk, outgoing.path)
        key = log_key(store_id, outgoing.header.position)
        # Once in a life: archive.json may name an object that the bucket has lost, and what follows a gap cannot be
        # restored.
        if not self._is_continued and outgoing.header.position.number:
            before = Position(outgoing.header.position.epoch, outgoing.header.position.number - 1)
            try:
                self._objects().head(log_key(store_id, before))
            except ObjectNotFound:
                return False
        self._is_continued = True
        hit("archive.log.before")
        try:
            # If a response was lost, the name holds exactly these bytes.
            self._objects().put(key, data, create_only=True, identity=lambda existing: existing.read_all() == data)
        except AlreadyExists:
            header = decode_header(self._objects().get(key), key)
            if header.kind is Kind.SEAL:
                raise fenced_by(header, key) from None
            # Not a seal, so it is an object of our own former life, unless another owner has claimed the store.
            self._confirm()
            return False
        hit("archive.log.put")
        self._traffic.count(len(data))
        return True

    def put_artifact(self, key: str, path: str) -> None:
        """Upload an immutable file."""
        size = self._disk.size(path)

        def is_same(existing: ExistingObject) -> bool:
            # The name contains inode, size and time of change: an object of that size is the one whose response was
            # lost.
            return existing.info.size_bytes == size

        hit("archive.artifact.before")
        self._objects().put_file(key, path, create_only=True, identity=is_same)
        hit("archive.artifact.put")
        self._traffic.count(size)

    def put_part(self, key: str, data: bytes) -> None:
        """Upload a part of a base, replacing one of a base that was abandoned."""
        hit("archive.part.before")
        self._objects().put(key, data)
        hit("archive.part.put")
        self._traffic.count(len(data))
