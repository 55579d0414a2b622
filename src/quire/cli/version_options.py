"""What people type for a version of a database, understood: `--at` of fork, sqlite export and sqlite shell.

Rules
  1. A version is named by a snapshot, by its epoch (`3:4711`, as exports print it), or by a moment: the first that fits, in
     this order. Nothing means the database as it is now.
  2. What is none of them is told as a snapshot that is not there: that is what people name most.

Raises `UnknownSnapshot`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from quire.cli.declarations import Option
from quire.cli.durations import moment_of
from quire.cli.formatting import moment
from quire.cli.lookup import snapshot_named, title_of
from quire.core.clock import SystemClock
from quire.core.errors import InvalidInput, UnknownSnapshot
from quire.core.ids import Epoch

if TYPE_CHECKING:
    from quire.manifest.snapshots import SnapshotInfo

At = Annotated[
    str, Option("--at", metavar="VERSION", help="A snapshot, an epoch or a moment.", show_default="as it is now")
]


@dataclass(frozen=True)
class Version:
    """Which version is meant: a snapshot, what was current at an epoch or a time, or (neither) the newest."""

    text: str
    snapshot: SnapshotInfo | None = None
    at: Epoch | datetime | None = None

    @property
    def then(self) -> str:
        """How a sentence goes on that began with the database's name: `was at snapshot monday (id 1)`."""
        return self.text.replace("as of ", "was at ").removeprefix("as it ")


def version_of(where: Any, database: str, text: str) -> Version:
    """What people typed for a version (rule 1); `where` knows the snapshots: a manifest, a store, or its owner."""
    if not text:
        return Version("as it is now")
    try:
        found = snapshot_named(where, database, text)
        return Version(f"as of snapshot {title_of(found)}", snapshot=found)
    except UnknownSnapshot as unknown:
        if (epoch := _epoch(text)) is not None:
            return Version(f"as of epoch {text}", at=epoch)
        try:
            now_ms = SystemClock().now_ms()
            at_ms = moment_of(text, "--at", now_ms=now_ms)
        except InvalidInput:
            also = "an epoch (3:4711) or a moment (15m, 2026-05-01T14:30) names a version, too"
            raise UnknownSnapshot(unknown.what, hint=f"{unknown.hint}; {also}", **unknown.where) from None
        if at_ms > now_ms:
            raise InvalidInput(
                "this moment is still to come", hint="leave `--at` out for the newest version", given=text
            ) from None

    return Version(f"as it was {moment(at_ms)}", at=datetime.fromtimestamp(at_ms / 1000, UTC))


def _epoch(text: str) -> Epoch | None:
    """`3:4711`: the segment, and the lsn."""
    segment, colon, lsn = text.partition(":")
    digits = segment + lsn
    if not (colon and segment and lsn and digits.isascii() and digits.isdecimal()):
        return None
    if len(segment) > 10 or len(lsn) > 20:
        return None
    return Epoch(int(lsn), int(segment))
