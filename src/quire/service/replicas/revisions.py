"""Revisions: how a replica says which version of which database it has.

The text `1-STORE-DATABASE-RANGE-LSN-CHECKSUM` names the store, the id of the database, the range of numbers that the
store's owner began with (A10; 0 if it was never taken over or restored), and the lsn of a commit. A fork and its origin can
have the same lsn, a recreated database has another id, a restored store another range: a revision of another history never
passes for one of this one. The checksum finds text that was cut or typed by hand; it proves nothing, and need not: whoever
may read the database only spoils his own replica with a wrong one.

Pure functions. Raises `InvalidInput` for text that is no revision.
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
    """One history of one database: its versions follow one another."""

    store_id: str
    db_id: int
    range_start: int

    @classmethod
    def of(cls, txn: ReadTxn, db_id: int) -> HistoryId:
        """The history that a database has now."""
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
        """The revision that a text is."""
        match = _FORM.fullmatch(text)
        if match is None or crc32(text[:-9].encode()) != int(match[5], 16):
            raise InvalidInput("this is no revision of a database here", hint="sync a new replica", revision=text[:80])
        return cls(HistoryId(match[1], int(match[2], 16), int(match[3], 16)), int(match[4], 16))
