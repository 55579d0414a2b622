"""The record of the table `followed_files`; the rules of all records are in `records.py`."""

from quire.manifest.records import Record, UInt


class FollowedFileRecord(Record, frozen=True):
    """A SQLite file that the owner follows into a page database, for as long as it serves."""

    path: str
    interval_ms: UInt
    """Between two looks."""
    since_ms: UInt
