"""Where a large write transaction's pages wait for the commit: a scratch file without a name (P6).

Terms
  spill   to move images from memory into the file, when they are more than the limit together

Rules
  1. A page has one image, the last one written; older ones in the file are holes that nobody reads.
  2. The file has no name: it is unlinked as soon as it is open, so that neither a crash nor a forgotten transaction leaves it
     behind.
  3. What is spilled is checked when it is read back: a transaction must not commit bytes that nobody wrote.

Thread: the transaction's. Raises `DiskFull` and `StorageFault` from `take`; what was taken before stays readable.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping

from quire.core.errors import ChecksumMismatch
from quire.core.limits import MIB
from quire.durable.checksums import crc64
from quire.durable.files import Disk, File
from quire.durable.names import SCRATCH, scratch_dir

SPILL_BYTES = 64 * MIB
"""Images in memory before they are moved to the scratch file (P6)."""

_names = itertools.count(1 << 63)
"""Scratch directories are named after jobs; these numbers are no job's."""


class Spill:
    """Page → image, on disk."""

    __slots__ = ("_end", "_file", "_places", "_size")

    def __init__(self, disk: Disk, root: str, page_size: int) -> None:
        disk.make_dirs(os.path.join(root, SCRATCH))
        path = os.path.join(root, scratch_dir(next(_names)))
        self._file: File = disk.open(path, exclusive=True)
        try:
            disk.remove(path)  # rule 2
        except BaseException:
            self._file.close()
            raise
        self._size = page_size
        self._places: dict[int, tuple[int, int]] = {}
        """Page → (offset, crc64)."""
        self._end = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __contains__(self, page: int) -> bool:
        return page in self._places

    def take(self, images: Mapping[int, bytes]) -> None:
        """Move these images here."""
        moved = sorted(images.items())
        self._file.write_at(b"".join([image for _, image in moved]), self._end)
        for page, image in moved:
            self._places[page] = (self._end, crc64(image))
            self._end += self._size

    def drop(self, page: int) -> None:
        """Forget a page, if it is here."""
        self._places.pop(page, None)

    def drop_from(self, size: int) -> None:
        """Forget the pages at and beyond `size`."""
        self._places = {page: place for page, place in self._places.items() if page < size}

    def get(self, page: int) -> bytes | None:
        """The image of a page, if it is here."""
        place = self._places.get(page)
        if place is None:
            return None
        image = self._file.read_at(self._size, place[0])
        if crc64(image) != place[1]:
            raise ChecksumMismatch(
                "a page of a large transaction came back from its scratch file altered",
                hint="check the disk; the transaction cannot be committed, nothing else is affected",
                page=page,
                path=self._file.path,
            )
        return image

    def close(self) -> None:
        """Give the file back."""
        self._places = {}
        self._file.close()
