"""Information about one reader of a page database, as a value and as text."""

from __future__ import annotations

import msgspec

from quire.core.clock import moment


class ReaderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One reader of a page database."""

    reader: str
    """The id of its lease, or of its process."""
    lsn: int
    """The version that it reads."""
    pid: int = 0
    host: str = ""
    since_ms: int = 0
    tags: dict[str, str] = {}
    set_aside: bool = False
    """Whether a snapshot keeps its version, so that the reader no longer holds back checkpoints."""


def reader_text(info: ReaderInfo) -> str:
    """Describe a reader in one line of text.

    >>> reader_text(
    ...     ReaderInfo(reader="7", lsn=40, pid=12, host="box", since_ms=1_794_850_000_000, tags={"by": "sqlite"})
    ... )
    'reader 7 at lsn 40 (pid 12 on box, by=sqlite, since 2026-11-16 17:26:40Z)'
    """
    parts = [f"pid {info.pid}" + (f" on {info.host}" if info.host else "")] if info.pid else []
    parts += [f"{name}={value}" for name, value in info.tags.items()]
    parts += [f"since {moment(info.since_ms)}"] if info.since_ms else []
    parts += ["set aside"] if info.set_aside else []
    return f"reader {info.reader} at lsn {info.lsn}" + (f" ({', '.join(parts)})" if parts else "")
