"""`quire.open_archive`: a store as it was at an archived moment, read from its bucket alone.

The manifest and the tails of logs are restored into scratch; everything large is read from the bucket on demand. The owner's
directory is not needed, and the owner is not asked. Nothing is claimed, and nothing is written to the bucket. Databases are
read-only, the store's own methods that change something raise `ReadOnly`, and a server of it (`quire.spark.options_of`) refuses
every change.

The scratch directory goes when the store is closed; a killed process leaves it in the system's temporary directory.

Threads: one. Raises what restoring raises.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quire.core.barrier import refuse_changes
from quire.core.errors import ReadOnly
from quire.core.limits import BATCH_OPS_MAX
from quire.durable.files import OsDisk, remove_tree
from quire.durable.object_names import OWNER_FILE
from quire.manifest.ops.databases import UpdateDbStatus
from quire.manifest.records import DbStatus
from quire.store import opening, restoring

if TYPE_CHECKING:
    from quire.objects.options import StoreOptions
    from quire.store.restoring import Progress
    from quire.store.store import Store


FOR_READERS = ("reserve_job_id", "reserve_generation")
"""Of the manifest: jobs that only read (verify, stats) are rows of a copy, too."""


def open_archive(
    url: str,
    *,
    at_ms: int | None = None,
    store_id: str = "",
    options: StoreOptions | None = None,
    progress: Progress | None = None,
) -> Store:
    """The store in the bucket (or backup) at `url`, as of its newest archived moment or the newest one not after `at_ms`, to be
    read. Use it as a context manager: closing it removes what was restored."""
    scratch = tempfile.mkdtemp(prefix="quire-archive-")
    try:
        restoring.restore(url, scratch, at_ms=at_ms, store_id=store_id, options=options, progress=progress)
        copy = opened_copy(scratch)
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
    hint = "change the store itself; `quire.restore` makes a copy that can be written after a takeover"
    return ReadOnly("this is a copy of an archive, to be read", hint=hint, url=url, call=method)


def opened_copy(scratch: str) -> Store:
    """The restored copy, whole: sets and streams are opened by owners only. It puts and deletes nothing."""
    disk = OsDisk()
    with suppress(FileNotFoundError):  # a backup's has none
        disk.remove(
            os.path.join(scratch, OWNER_FILE)
        )  # it says that the directory is nobody's; this one is ours for a while
    settings = restoring.quiet_settings(disk, scratch)
    settings = replace(settings, stream=replace(settings.stream, compress=False, upload=False))
    copy = opening.open(scratch, create=False, settings=settings)
    copy.rights.refuse("a copy in scratch claims nothing")
    return copy


def _remove(scratch: str) -> None:
    with suppress(FileNotFoundError):
        remove_tree(OsDisk(), scratch)
