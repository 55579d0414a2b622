"""Operations on the page-version index: the WAL frame of each version of each page. A page's head is its newest row.

Rows are packed, 48 bytes each, little-endian: page u32, frame_no u32, lsn u64, prev_lsn u64, frame_crc64 u64,
segment_id u32, origin_db_id u32, flags u32, reserved u32. Publishing a step of 4 MiB is one op with a thousand rows.
"""

import struct
from itertools import islice

from quire.core.errors import IllegalTransition, InvalidInput
from quire.manifest import tables as t
from quire.manifest.ops.base import Component, Op
from quire.manifest.overlay import Overlay
from quire.manifest.records import DbStatus, PageHeadRecord, UInt

ROW = struct.Struct("<IIQQQIIII")
VERSION_NAME = struct.Struct("<IQ")
"""A version as `DropPageVersions` names it: page, lsn."""
FORGET_ROWS = 4096
"""Maximum number of rows that `ForgetPages` removes: a commit of a few milliseconds."""
assert ROW.size == 48
assert VERSION_NAME.size == 12


class PublishPages(Op, frozen=True, tag=80):
    """Add page versions of a WAL segment to the index."""

    component = int(Component.PAGE_INDEX)
    db_id: UInt
    rows: bytes

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.writable(self.db_id, even="read_only")
        if len(self.rows) % ROW.size:
            raise InvalidInput("packed page versions must be whole rows", bytes=len(self.rows), row=ROW.size)
        if self.rows:
            # Imported here: commands that publish nothing need no numpy, which takes longer to load than most of them run.
            from quire.manifest.page_rows import newer, packed_rows

            index, heads = packed_rows(self.db_id, self.rows)
            tables.page_version_index.put_encoded(index)
            former = tables.page_version_head.get_encoded(list(heads))
            for key in newer(former, heads):
                del heads[key]
            tables.page_version_head.put_encoded(heads)


class DropPageVersions(Op, frozen=True, tag=81):
    """Remove page versions from the index; each is named by (page u32, lsn u64), packed."""

    component = int(Component.PAGE_INDEX)
    db_id: UInt
    versions: bytes

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.database(self.db_id)
        if len(self.versions) % VERSION_NAME.size:
            raise InvalidInput("packed version names must be whole", bytes=len(self.versions))
        dropped: dict[int, int] = {}
        for page, lsn in VERSION_NAME.iter_unpack(self.versions):
            tables.page_version_index.delete(t.PAGE_VERSION_INDEX.key.pack(self.db_id, page, lsn))
            dropped[page] = max(dropped.get(page, 0), lsn)
        for page, lsn in dropped.items():
            key = t.PAGE_VERSION_HEAD.key.pack(self.db_id, page)
            head = tables.page_version_head.get(key)
            if head is not None and head.lsn <= lsn:
                self._move_head(tables, page, key)

    def _move_head(self, tables: Overlay, page: int, key: bytes) -> None:
        newest: PageHeadRecord | None = None
        for row_key, row in tables.page_version_index.scan(t.PAGE_VERSION_INDEX.key.prefix(self.db_id, page)):
            newest = PageHeadRecord(t.PAGE_VERSION_INDEX.key.unpack(row_key)[2], row.segment_id)
        if newest is None:
            tables.page_version_head.delete(key)
        else:
            tables.page_version_head.put(key, newest)


class ForgetPages(Op, frozen=True, tag=82):
    """Remove the next part of a dropped database's index, whose pages can no longer be read."""

    component = int(Component.PAGE_INDEX)
    db_id: UInt
    limit: UInt = FORGET_ROWS

    def apply(self, tables: Overlay, at_ms: int) -> None:
        if tables.database(self.db_id).status is not DbStatus.TOMBSTONED:
            raise IllegalTransition("the database has not been dropped", hint="drop it first", db_id=self.db_id)
        index = tables.page_version_index
        keys = [key for key, _ in islice(index.scan(t.DB.key.pack(self.db_id)), self.limit)]
        for key in keys:
            index.delete(key)
        # Versions are removed oldest first, so the last page, whose versions may be cut in two, keeps its head and the
        # version it names: a store must be able to open between two parts.
        pages = sorted({t.PAGE_VERSION_INDEX.key.unpack(key)[1] for key in keys})
        for page in pages:
            if page != pages[-1] or not index.any(t.PAGE_VERSION_INDEX.key.prefix(self.db_id, page)):
                tables.page_version_head.delete(t.PAGE_VERSION_HEAD.key.pack(self.db_id, page))
