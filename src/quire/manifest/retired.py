"""Reading `retired`: objects that nothing needs now, and that archived moments need (A8). Any thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.core.errors import ManifestDamaged
from quire.core.events import emit
from quire.manifest import tables as t
from quire.manifest.records import RetiredRecord

if TYPE_CHECKING:
    from quire.manifest.reads import ReadTxn


def retired(txn: ReadTxn) -> Iterator[tuple[bytes, RetiredRecord]]:
    """(digest, row) of every retired object; a damaged row is passed over, and its object stays."""
    for key, value in txn.raw_scan(t.RETIRED):
        try:
            yield t.RETIRED.key.unpack(key)[0], t.RETIRED.rows.decode(key, value)
        except ManifestDamaged as error:
            emit("warning", "archive.damaged_row", error=str(error))
