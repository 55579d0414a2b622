"""Lists databases by name. A separate module because completion uses it and must not load the manifest's operations.

Pure functions of a read transaction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from quire.core.errors import ManifestDamaged
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbRecord
from quire.service.values import DatabaseFilter

Match = tuple[int, DbRecord]

PATTERN = re.compile(r"[*?[]")
"""What makes a prefix a pattern."""


def by_name(txn: ReadTxn, wanted: DatabaseFilter) -> Iterator[Match]:
    """Yield (id, record) of the live databases that match the filter, sorted by name, ignoring its limit."""
    # Only names that begin like a pattern can match it, so that its scan is as short as that of a prefix.
    prefix, after = PATTERN.split(wanted.prefix, maxsplit=1)[0].encode(), wanted.after.encode()
    start = max(prefix, after)
    for key, raw in txn.raw_scan(t.DB_NAMES, start=(start.decode(),) if start else None):
        if not key.startswith(prefix):
            return
        if key == after:
            continue
        try:
            db_id = t.DB_NAMES.rows.decode(key, raw).value
        except ManifestDamaged:
            continue  # `quire manifest check` rebuilds the index
        if (match := matching_record(txn, db_id, wanted)) is not None:
            yield match


def matching_record(txn: ReadTxn, db_id: int, wanted: DatabaseFilter) -> Match | None:
    """Return (id, record) of a database if it matches the filter. A damaged row is reported and does not match."""
    try:
        record = txn.database(db_id)
    except ManifestDamaged as error:
        txn.report_damage(db_id, error)
        return None
    if record is None or record.is_dropped or not is_named(record.name, wanted.prefix):
        return None
    if wanted.kind and record.kind.name.lower() != wanted.kind:
        return None
    if wanted.tag:
        key, is_valued, value = wanted.tag.partition("=")
        if record.tags.get(key) != value if is_valued else key not in record.tags:
            return None
    return db_id, record


def is_named(name: str, prefix: str) -> bool:
    """Return whether a name begins with the prefix, or matches it if it is a pattern: `tenant-*`, `shop-?`, `[ab]*`."""
    return name.startswith(prefix) or (PATTERN.search(prefix) is not None and fnmatchcase(name, prefix))
