"""Operations on the page-version index: which WAL frame holds which version of which page. A page's head is its newest row.

Rows travel packed, 48 bytes each, little-endian: page u32, frame_no u32, lsn u64, prev_lsn u64, frame_crc64 u64, segment_id
u32, origin_db_id u32, flags u32, reserved u32. A publication of a 4 MiB step is one op with a thousand rows.
"""

from __future__ import annotations

import struct
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

from quire.core.errors import IllegalTransition, InvalidInput
from quire.manifest import tables as t
from quire.manifest.ops.base import Component, Op
from quire.manifest.overlay import Overlay
from quire.manifest.records import DbStatus, PageHeadRecord, PageVersionRecord, UInt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROW = struct.Struct("<IIQQQIIII")
ROW_FIELDS = [
    ("page", "<u4"), ("frame_no", "<u4"), ("lsn", "<u8"), ("prev_lsn", "<u8"), ("frame_crc64", "<u8"),
    ("segment_id", "<u4"), ("origin_db_id", "<u4"), ("flags", "<u4"), ("reserved", "<u4"),
]  # fmt: skip
"""The same for numpy."""
VERSION_NAME = struct.Struct("<IQ")
"""How `DropPageVersions` names a version: page, lsn."""
FORGET_ROWS = 4096
"""Rows `ForgetPages` removes at most: a commit of a few milliseconds."""
assert ROW.size == 48
assert VERSION_NAME.size == 12


def packed_rows(db_id: int, rows: bytes) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
    """The rows of the index, and of each page's newest version among them the head, as key → row.

    All rows at a time, 0.5 µs for each: publishing one then costs 3 µs instead of 7.5, commit included. A busy writer publishes
    tens of thousands a second, on the thread that commits everyone's changes.
    """
    import numpy as np  # not at the top: commands that publish nothing go without its 260 ms

    layout, index_key, index_row, head_key, head_row = _layouts()
    versions = np.frombuffer(rows, layout)
    keys, values = np.empty(len(versions), index_key), np.empty(len(versions), index_row)
    keys["db_id"], keys["page"], keys["lsn"] = db_id, versions["page"], versions["lsn"]
    values["record_version"] = t.PAGE_VERSION_INDEX.codec.version
    for name in PageVersionRecord.__struct_fields__:
        values[name] = versions[name]
    index = dict(zip(_as_bytes(keys), _as_bytes(values), strict=True))
    # By page, then lsn; the last of each page is its newest. Of equal ones the first counts: hence the falling places.
    places = np.arange(len(versions), 0, -1)
    order = np.lexsort((places, versions["lsn"], versions["page"]))
    is_last = np.append(np.diff(versions["page"][order]) != 0, True)
    newest = versions[order[is_last]]
    keys, values = np.empty(len(newest), head_key), np.empty(len(newest), head_row)
    keys["db_id"], keys["page"] = db_id, newest["page"]
    values["record_version"], values["source"] = t.PAGE_VERSION_HEAD.codec.version, PageHeadRecord(0, 0).source
    values["lsn"], values["segment_id"] = newest["lsn"], newest["segment_id"]
    return index, dict(zip(_as_bytes(keys), _as_bytes(values), strict=True))


def _newer(former: dict[bytes, bytes], heads: dict[bytes, bytes]) -> list[bytes]:
    """The keys of heads that were there before and name a newer version."""
    import numpy as np

    layout = _layouts()[-1]
    before = np.frombuffer(b"".join(former.values()), layout)["lsn"]
    after = np.frombuffer(b"".join([heads[key] for key in former]), layout)["lsn"]
    keys = list(former)
    return [keys[place] for place in np.flatnonzero(before > after).tolist()]


def _as_bytes(rows: NDArray[np.void]) -> list[bytes]:
    """Each row's bytes."""
    return rows.view(f"V{rows.dtype.itemsize}").tolist()  # type: ignore[no-any-return]  # of plain voids it is bytes


@cache
def _layouts() -> tuple[np.dtype[np.void], ...]:
    """Of a packed row, of keys and rows of the index, and of the heads."""
    import numpy as np

    index, head = t.PAGE_VERSION_INDEX, t.PAGE_VERSION_HEAD
    fields = (
        ROW_FIELDS,
        index.key.numpy_fields(),
        index.codec.numpy_fields(),
        head.key.numpy_fields(),
        head.codec.numpy_fields(),
    )
    return tuple(np.dtype(layout) for layout in fields)


class PublishPages(Op, frozen=True, tag=80):
    """Page versions of a WAL segment become part of the index."""

    component = int(Component.PAGE_INDEX)
    db_id: UInt
    rows: bytes

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.writable(self.db_id, even="read_only")
        if len(self.rows) % ROW.size:
            raise InvalidInput("packed page versions must be whole rows", bytes=len(self.rows), row=ROW.size)
        if self.rows:
            index, heads = packed_rows(self.db_id, self.rows)
            tables.page_version_index.put_encoded(index)
            former = tables.page_version_head.get_encoded(list(heads))
            for key in _newer(former, heads):
                del heads[key]
            tables.page_version_head.put_encoded(heads)


class DropPageVersions(Op, frozen=True, tag=81):
    """Page versions leave the index; each is named by (page u32, lsn u64), packed."""

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
    """The next piece of a dropped database's index goes: nobody can ask for its pages any more."""

    component = int(Component.PAGE_INDEX)
    db_id: UInt
    limit: UInt = FORGET_ROWS

    def apply(self, tables: Overlay, at_ms: int) -> None:
        if tables.database(self.db_id).status is not DbStatus.TOMBSTONED:
            raise IllegalTransition("the database is alive", hint="drop it first", db_id=self.db_id)
        index = tables.page_version_index
        keys = [key for key, _ in islice(index.scan(t.DB.key.pack(self.db_id)), self.limit)]
        for key in keys:
            index.delete(key)
        # Versions go oldest first, so the last page, which may be cut in two, keeps its head and what it names: a
        # store must open between two pieces.
        pages = sorted({t.PAGE_VERSION_INDEX.key.unpack(key)[1] for key in keys})
        for page in pages:
            if page != pages[-1] or not index.any(t.PAGE_VERSION_INDEX.key.prefix(self.db_id, page)):
                tables.page_version_head.delete(t.PAGE_VERSION_HEAD.key.pack(self.db_id, page))
