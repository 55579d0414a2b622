"""`quire.open_archive`: a store as it was at an archived moment, read from its bucket alone.

The manifest and the tails of logs are restored into scratch; everything large is read from the bucket on demand. Neither the
owner nor its directory is needed. Nothing is claimed, and nothing is written to the bucket. Databases are read-only, methods of
the store that would change something raise `ReadOnly`, and a server of it (`quire.spark.options_of`) refuses every change.

The scratch directory is removed when the store is closed; a killed process leaves it in the system's temporary directory.

Threads: one. Raises the errors of a restore.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quire.core.barrier import refuse_changes
from quire.core.clock import SystemClock
from quire.core.errors import ReadOnly
from quire.core.limits import BATCH_OPS_MAX
from quire.durable.files import OsDisk, remove_tree
from quire.durable.object_names import OWNER_FILE
from quire.manifest.ops.databases import UpdateDbStatus
from quire.manifest.records import DbStatus
from quire.store import restoring
from quire.store.opening import open_owner

if TYPE_CHECKING:
    from quire.objects.options import StoreOptions
    from quire.store.backup import Progress
    from quire.store.restoring import Restored
    from quire.store.store import Store


FOR_READERS = ("reserve_job_id", "reserve_generation")
"""Methods of the manifest that stay allowed: jobs that only read (verify, stats) still need rows in the copy's manifest."""


def open_archive(
    url: str,
    *,
    at: datetime | str | int | None = None,
    at_ms: int | None = None,
    store_id: str = "",
    options: StoreOptions | None = None,
    progress: Progress | None = None,
) -> Store:
    """Open for reading the store archived or backed up at `url`, as of its newest moment or the newest one not after `at`,
    which is given as to `quire.restore`.

    Use it as a context manager: closing it removes what was restored.
    """
    scratch = tempfile.mkdtemp(prefix="quire-archive-")
    try:
        restoring.restore(url, scratch, at=at, at_ms=at_ms, store_id=store_id, options=options, progress=progress)
        copy = _opened_copy(scratch)
    except BaseException:
        _remove(scratch)
        raise
    try:
        copy.copy_of = url
        active = [info.db_id for info in copy.databases() if info.status is DbStatus.ACTIVE]
        for start in range(0, len(active), BATCH_OPS_MAX):
            ids = active[start : start + BATCH_OPS_MAX]
            copy.manifest.submit([UpdateDbStatus(db_id, DbStatus.READ_ONLY) for db_id in ids]).result()
    except BaseException:
        copy.close()
        _remove(scratch)
        raise
    copy.after_close = lambda: _remove(scratch)
    refuse_changes(copy, partial(_refusal, url))
    refuse_changes(copy.manifest, partial(_refusal, url), but=FOR_READERS)
    return copy


def _refusal(url: str, method: str) -> ReadOnly:
    hint = "change the store itself; `quire.restore` creates a copy that can be written after a takeover"
    return ReadOnly("this is a read-only copy of an archive", hint=hint, url=url, call=method)


def restored_copy(
    url: str,
    scratch: str,
    *,
    at_ms: int | None = None,
    store_id: str = "",
    options: StoreOptions | None = None,
    progress: Progress | None = None,
) -> tuple[Restored, Store]:
    """Restore an archived moment into `scratch`, and open it. The copy can be written; it puts and deletes no object."""
    restored = restoring.restore(url, scratch, at_ms=at_ms, store_id=store_id, options=options, progress=progress)
    return restored, _opened_copy(scratch)


def _opened_copy(scratch: str) -> Store:
    """Open a restored copy as its owner, which opening key-value sets and streams requires. It puts and deletes no object."""
    disk = OsDisk()
    with suppress(FileNotFoundError):  # a restored backup has none
        # It marks the directory as disowned, which would refuse the opening.
        disk.remove(os.path.join(scratch, OWNER_FILE))
    settings = restoring.quiet_settings(disk, scratch)
    settings = replace(settings, stream=replace(settings.stream, compress=False, upload=False))
    copy = open_owner(scratch, settings, SystemClock(), disk)
    copy._open_copy = restored_copy
    copy.rights.refuse("a copy in scratch claims nothing")
    return copy


def _remove(scratch: str) -> None:
    with suppress(FileNotFoundError):
        remove_tree(OsDisk(), scratch)
