"""Revisions: how a replica names the version of the database that it has.

The text `1-STORE-DATABASE-RANGE-LSN-CHECKSUM` names the store, the id of the database, the range of numbers that the store's
owner began with (A10; 0 if it was never taken over or restored), and the lsn of a commit. A fork and its origin can have the
same lsn, a recreated database has another id, a restored store another range: a revision of another history is never mistaken
for one of this history. The checksum detects text that was truncated or typed by hand. It is not a proof and need not be: a
client that may read the database only damages its own replica with a wrong revision.

Threads: any; pure functions. Raises `InvalidInput` for text that is not a revision.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from zlib import crc32

from quire.core.errors import InvalidInput
from quire.manifest.reads import ReadTxn

_FORM = re.compile(r"1-([0-9A-Za-z]{1,64})-([0-9a-f]{1,8})-([0-9a-f]{1,16})-([0-9a-f]{1,16})-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class HistoryId:
    """One history of one database: a linear sequence of versions."""

    store_id: str
    db_id: int
    range_start: int

    @classmethod
    def of(cls, txn: ReadTxn, db_id: int) -> HistoryId:
        """Return the current history of a database."""
        return cls(txn.store_id().replace("-", ""), db_id, txn.first_number())


@dataclass(frozen=True, slots=True)
class Revision:
    """A version of a history."""

    history: HistoryId
    lsn: int

    def __str__(self) -> str:
        history = self.history
        text = f"1-{history.store_id}-{history.db_id:x}-{history.range_start:x}-{self.lsn:x}"
        return f"{text}-{crc32(text.encode()):08x}"

    @classmethod
    def parse(cls, text: str) -> Revision:
        """Parse a revision."""
        match = _FORM.fullmatch(text)
        if match is None or crc32(text[:-9].encode()) != int(match[5], 16):
            raise InvalidInput(
                "this revision does not belong to a database of this store",
                hint="sync a new replica",
                revision=text[:80],
            )
        return cls(HistoryId(match[1], int(match[2], 16), int(match[3], 16)), int(match[4], 16))
