"""Writes a base: everything a store has, as events, read while the store is in use (A7).

Nothing is held or locked. The log, from the object that was due when reading began, corrects whatever changed meanwhile: events
state the result of a change, and files are identified by inode. A file that is renamed while directories are read may be missed
under both names; the recorder remembers such files, and they are read at the end. Rows are read in many short transactions: a
transaction that stays open while the bucket is slow would keep LMDB from reusing pages.

Threads: the base's own. Raises the errors of manifest, disk and object store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Protocol

from quire.archive.format import (
    OBJECT_BYTES,
    AnyEvent,
    BaseEvent,
    CommitEvent,
    DirectoryEvent,
    Position,
    base_key,
)
from quire.archive.recorder import Recorder, Shipping, shipping, whole_file
from quire.durable import names
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.manifest import tables as t
from quire.manifest.row_image import image
from quire.manifest.store import ManifestStore

ArtifactOf = Callable[[str, str], AnyEvent]
"""Called with (path, path in the store) of an immutable file. Uploads it if needed, and returns its event."""


class BaseSink(Protocol):
    """The destination of a base."""

    recorder: Recorder

    def put_part(self, key: str, events: list[AnyEvent], first: Position) -> tuple[str, int, bytes]:
        """Upload a part. Return its name, size and digest."""

    def artifact(self, first: Position, path: str, relative: str) -> AnyEvent:
        """Upload an immutable file if needed. Return its event."""


def write_base(
    sink: BaseSink, first: Position, store_id: str, manifest: ManifestStore, disk: Disk, root: str
) -> BaseEvent:
    """Read the whole store while it is in use, and upload it in parts."""
    parts: list[tuple[str, int, bytes]] = []
    held: list[AnyEvent] = []
    size = 0
    sink.recorder.watch_renames()
    try:
        hit("archive.base.begun")
        for event in base_records(manifest, disk, root, sink.recorder, partial(sink.artifact, first)):
            held.append(event)
            size += event.size_bytes()
            if size >= OBJECT_BYTES:
                parts.append(sink.put_part(base_key(store_id, first, len(parts)), held, first))
                held, size = [], 0
        parts.append(sink.put_part(base_key(store_id, first, len(parts)), held, first))
    finally:
        sink.recorder.end_watch()
    hit("archive.base.put")
    return BaseEvent(first.number, tuple(parts))


def base_records(
    manifest: ManifestStore, disk: Disk, root: str, recorder: Recorder, artifact: ArtifactOf
) -> Iterator[AnyEvent]:
    """Yield the manifest's rows, then directories and files, as events."""
    with manifest.read() as txn:
        oldest, head = txn.feed_bounds()
        # Cursors are restored, too, and must find the changes that they have not read.
        unread = [row.acked_sequence for _, row in txn.scan(t.CHANGE_CURSORS)]
    for block in image(manifest.read, max(min([head, *unread]), oldest)):
        yield CommitEvent((block,))
    seen: set[int] = set()
    for path in _paths(disk, root, root):
        yield from _events(disk, root, path, seen, artifact)
    while renamed := [path for path, number in recorder.renamed().items() if number not in seen]:
        for path in renamed:
            yield from _events(disk, root, path, seen, artifact)


def _paths(disk: Disk, root: str, directory: str) -> Iterator[str]:
    """Yield the files and directories below `directory` that are shipped."""
    with suppress(FileNotFoundError):
        for name in disk.names(directory):
            path = os.path.join(directory, name)
            relative = os.path.relpath(path, root)
            if os.path.isdir(path):
                if relative.split("/")[0] in (names.PAGES, names.STREAMS, names.LSM, names.QUARANTINE):
                    yield path
                    yield from _paths(disk, root, path)
            elif shipping(relative) is not Shipping.NOT:
                yield path


def _events(disk: Disk, root: str, path: str, seen: set[int], artifact: ArtifactOf) -> Iterator[AnyEvent]:
    relative = os.path.relpath(path, root)
    try:
        if os.path.isdir(path):
            yield DirectoryEvent(relative)
        elif shipping(relative) is Shipping.BYTES:
            yield from whole_file(disk, path, relative, seen)
        elif not path.endswith(names.TEMPORARY):
            yield artifact(path, relative)
    except FileNotFoundError:
        return  # removed meanwhile: its event is in the log
