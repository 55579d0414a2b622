"""The checked point: a file next to the manifest that records what was checked, so that the next open checks only what
changed since (N3).

`manifest.lmdb-checked` is a line of JSON and a line with its SHA-256. It is only a hint, and therefore outside LMDB:
writing it takes no transaction, no archive contains it, and without a valid one everything is checked. It is written
when the manifest is closed cleanly, after the check of an open, when a recount has completed, and once a minute while an
owner works. It is deleted before rows are written that the change log does not name (by a migration, a repair, or an
image of rows from elsewhere), and when an open or a recount finds damage.

State on disk                                                             What the next open does
  no file, a damaged one, one of another store or ahead of the manifest   checks everything
  the point, and its transaction is the manifest's last one               nothing was written since: checks the rows of the
                                                                          store itself, leaves the rest to the recount
  the point, and later transactions (a crash)                             also checks the log since the point and the rows of
                                                                          what it names (changed_rows.py)
  the same, but the log does not have every change since, or these do     checks everything
  not lead from the point's generations to those of the manifest

Threads: any. Raises the errors of writing a file."""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec

from quire.core.decoding import UNDECODABLE, decode_with_digest, encode_with_digest
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
    """LMDB's last transaction at that moment."""
    sequence: int
    """The head of the feed at that moment."""
    generations: dict[int, int]
    """Component → its generation according to the change log up to `sequence`, including rows that were trimmed."""

    def is_of(self, txn: ReadTxn, transaction: int) -> bool:
        """Return whether the point can belong to this manifest: the same store, and not ahead of it."""
        return (
            self.format == FORMAT
            and self.store_id == txn.store_id()
            and self.transaction <= transaction
            and self.sequence <= txn.feed_bounds()[1]
        )


def transaction_of(txn: ReadTxn) -> int:
    """Return the id of the transaction whose state a snapshot shows."""
    return int(txn._txn.id())


def point_of(env: ManifestEnv) -> CheckedPoint:
    """Return the checked point of a manifest that is now known to be in order."""
    with ReadTxn(env) as txn:
        return CheckedPoint(
            store_id=txn.store_id(),
            transaction=transaction_of(txn),
            sequence=txn.feed_bounds()[1],
            generations={component: row.generation for (component,), row in txn.scan(t.GENERATION_WATERMARKS)},
        )


def read_point(env: ManifestEnv) -> CheckedPoint | None:
    """Return the stored point of this manifest; `None` if there is no valid one."""
    try:
        point = decode_with_digest(read_all(OsDisk(), env.path + SUFFIX), CheckedPoint)
    except (FileNotFoundError, StorageFault, *UNDECODABLE):
        return None
    with ReadTxn(env) as txn:
        if point is None or not point.is_of(txn, transaction_of(txn)):
            return None
    # From now on trimming keeps the changes after it.
    env.checked_sequence = point.sequence
    return point


def write_point(env: ManifestEnv, point: CheckedPoint) -> None:
    """Store a point. A failure does no harm: the next open checks more."""
    if not point.sequence:
        return  # a store that is being created: nothing to record
    try:
        write_atomic(OsDisk(), env.path + SUFFIX, encode_with_digest(point))
    except StorageFault as error:
        emit("warning", "manifest.point_not_written", path=env.path + SUFFIX, error=str(error))
    else:
        env.checked_sequence = point.sequence  # not before: the old point needs the changes since the old sequence


def forget_point(env: ManifestEnv) -> None:
    """Delete the point, because something is wrong or rows change that the log does not name: the next open checks all."""
    # Trimming may go on before the file is gone: a point whose changes the log lacks is not believed.
    env.checked_sequence = None
    with suppress(FileNotFoundError):
        OsDisk().remove(env.path + SUFFIX)
        OsDisk().sync_dir(os.path.dirname(env.path) or ".")
