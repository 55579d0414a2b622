"""What was checked of a manifest, remembered in a file beside it, so that the next open checks only what changed since (N3).

`manifest.lmdb-checked` is a line of JSON and a line with its SHA-256. It is a hint, and outside of LMDB for that reason:
writing it is no transaction, no archive ships it, and whoever doubts it checks everything. It is written when the manifest is
closed well, when a recount has ended, and once a minute while an owner works.

What is on disk, and what the next open does
  no file, a damaged one, one of another store or ahead of the manifest   checks everything
  the point, and its transaction is the manifest's last one               nothing was written since: checks the rows of the
                                                                          store itself, leaves the rest to the recount
  the point, and later transactions (a crash)                             checks everything but the log up to the point

Any thread. Raises what writing a file raises."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress

import msgspec

from quire.core.errors import StorageFault
from quire.core.events import emit
from quire.durable.files import OsDisk, read_all, write_atomic
from quire.manifest import tables as t
from quire.manifest.env import ManifestEnv
from quire.manifest.reads import ReadTxn

SUFFIX = "-checked"
FORMAT = 1


class CheckedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A moment at which the rules of the manifest held."""

    format: int = FORMAT
    store_id: str
    transaction: int
    """LMDB's last transaction then."""
    sequence: int
    """The head of the feed then."""
    generations: dict[int, int]
    """By component: what the change log up to `sequence` says, also where its rows are gone."""

    def is_of(self, txn: ReadTxn, transaction: int) -> bool:
        """Whether it can be about this manifest: the same store, no later than it."""
        return (
            self.format == FORMAT
            and self.store_id == txn.store_id()
            and self.transaction <= transaction
            and self.sequence <= txn.feed_bounds()[1]
        )


def point_of(env: ManifestEnv) -> CheckedPoint:
    """What is to be remembered of a manifest that is in order now."""
    with ReadTxn(env) as txn:
        return CheckedPoint(
            store_id=txn.store_id(),
            transaction=env.last_txn_id(),
            sequence=txn.feed_bounds()[1],
            generations={component: row.generation for (component,), row in txn.scan(t.GENERATION_WATERMARKS)},
        )


def read_point(env: ManifestEnv) -> CheckedPoint | None:
    """What is remembered of this manifest, if anything is."""
    try:
        line, _, check = read_all(OsDisk(), env.path + SUFFIX).partition(b"\n")
        point = msgspec.json.decode(line, type=CheckedPoint) if check == _digest(line) else None
    except (FileNotFoundError, StorageFault, msgspec.MsgspecError):
        return None
    with ReadTxn(env) as txn:
        return point if point is not None and point.is_of(txn, env.last_txn_id()) else None


def write_point(env: ManifestEnv, point: CheckedPoint) -> None:
    """Remember a point. Failing to is no harm: the next open checks more."""
    if not point.sequence:
        return  # a store that is being made: there is nothing to remember
    line = msgspec.json.encode(point)
    try:
        write_atomic(OsDisk(), env.path + SUFFIX, line + b"\n" + _digest(line))
    except StorageFault as error:
        emit("warning", "manifest.point_not_written", path=env.path + SUFFIX, error=str(error))


def forget_point(env: ManifestEnv) -> None:
    """Something is wrong: the next open checks everything."""
    with suppress(FileNotFoundError):
        OsDisk().remove(env.path + SUFFIX)
        OsDisk().sync_dir(os.path.dirname(env.path) or ".")


def _digest(line: bytes) -> bytes:
    return hashlib.sha256(line).hexdigest().encode() + b"\n"
