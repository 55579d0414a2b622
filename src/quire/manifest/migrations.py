"""The migration ledger: upgrades a store of an older schema to the current one.

Terms
  step     a named function that changes rows of an older schema; carried out once per store, in order
  ledger   the table `migrations`: the steps that this environment has completed
  schema   a number in `meta`; it rises with every step, so that older code refuses newer stores

A step and its ledger row are committed together in the step's last transaction. Work that is too much for one
transaction is done before by the step's `prepare`, in any number of transactions; repeating it must be harmless, so
opening again repairs a crash in the middle. Steps are never removed, reordered or changed once released; a new store is
created with all of them done.

Threads: runs at open, before the writer starts, in the opening thread. Raises `FormatTooNew`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import lmdb
import msgspec

from quire.core.clock import Clock
from quire.core.errors import FormatTooNew, ManifestDamaged
from quire.core.events import emit
from quire.core.packages import installed_version
from quire.durable.failpoints import hit
from quire.manifest import tables as t
from quire.manifest.checked_point import forget_point
from quire.manifest.codec import VERSION
from quire.manifest.env import ManifestEnv
from quire.manifest.reads import BORN_WITH_EPOCHS, ReadTxn
from quire.manifest.records import MetaRecord, MigrationRecord
from quire.manifest.rows import is_marked, sealed

SCHEMA = t.META.key.pack("schema")
STORE_ID = t.META.key.pack("store_id")
BASE_SCHEMA = 1


class Step(msgspec.Struct, frozen=True):
    """One migration: its last transaction and, if that is not all, the work done in other transactions before it."""

    name: str
    run: Callable[[ManifestEnv, lmdb.Transaction], None]
    prepare: Callable[[ManifestEnv], None] | None = None
    """Called with no transaction open. It begins its own (`env.begin_write`) and commits them, in this thread."""


MIGRATED_ROWS = 32_768
"""Rows that a step examines in one transaction."""


def _add_checksums(env: ManifestEnv) -> None:
    """Give every row of an older store its checksum (`rows.py`).

    Continues what a crash left half done: rows that have a checksum are left alone. Nothing vouches for the content of
    a row until then; rows that do not decode are left to the check.
    """
    for name, handle in env.handles.items():
        after: bytes | None = b""
        while after is not None:
            after = env.transact(partial(_add_some, name=name, handle=handle, after=after))


def _add_some(txn: Any, name: str, handle: Any, after: bytes) -> bytes | None:
    """Add checksums to the next rows of a table; return the last key examined, `None` at the end."""
    with txn.cursor(db=handle) as cursor:
        looked = list(islice(cursor.iternext(), MIGRATED_ROWS + 1)) if cursor.set_range(after) else []
        bare = [(key, raw) for key, raw in looked if len(raw) >= VERSION.size and not is_marked(raw)]
        cursor.putmulti([(key, sealed(name, key, raw)) for key, raw in bare])
    return looked[-1][0] if len(looked) > MIGRATED_ROWS else None


def _nothing_more(env: ManifestEnv, txn: lmdb.Transaction) -> None:
    """Do nothing: `prepare` did all of the step, or there is nothing to do."""


STEPS: Sequence[Step] = (
    Step("row_checksums", _nothing_more, _add_checksums),
    Step("owner_epochs", _nothing_more),  # keeps out older code, which does not handle the namespaces of epochs
)
"""All steps, oldest first. The schema of a store is `BASE_SCHEMA` plus the number of steps it has completed."""


def migrate(env: ManifestEnv, clock: Clock, steps: Sequence[Step] = STEPS) -> list[str]:
    """Bring the environment to the current schema; return the names of the steps carried out now."""
    meta, ledger = env.handles[t.META.name], env.handles[t.MIGRATIONS.name]

    def begin(txn: Any) -> None:
        if txn.get(SCHEMA, db=meta) is None:
            _initialise_store(txn, meta, ledger, clock, steps)
        refuse_newer(txn, env, steps)

    env.transact(begin)
    schemas = enumerate(steps, start=BASE_SCHEMA + 1)
    return [step.name for schema, step in schemas if _carry_out(env, step, schema, clock)]


def refuse_newer(txn: Any, env: ManifestEnv, steps: Sequence[Step] = STEPS) -> None:
    """Refuse a schema above the current one, or an unknown step."""
    if env.handles[t.META.name] is None:
        return
    newest_schema = BASE_SCHEMA + len(steps)
    names = {step.name for step in steps}
    strangers = []
    try:
        raw = txn.get(SCHEMA, db=env.handles[t.META.name])
        if (ledger := env.handles[t.MIGRATIONS.name]) is not None:
            with txn.cursor(db=ledger) as cursor:
                strangers = [key.decode() for key in cursor.iternext(values=False) if key.decode() not in names]
    except lmdb.Error as error:  # the first read of a manifest: LMDB found an invalid page
        raise ManifestDamaged(
            f"the manifest is damaged: {error}", hint="restore it from a backup", path=env.path
        ) from error
    stored = t.META.rows.decode(SCHEMA, raw).number if raw is not None else 0
    if stored > newest_schema or strangers:
        raise FormatTooNew(
            "the store was written by a newer quire",
            hint="upgrade quire to open it",
            schema=stored,
            known=newest_schema,
            unknown_steps=strangers,
        )


def _initialise_store(txn: lmdb.Transaction, meta: Any, ledger: Any, clock: Clock, steps: Sequence[Step]) -> None:
    """Initialise a new store, with every step done."""
    for step in steps:
        txn.put(*_ledger_row(step, clock), db=ledger)
    txn.put(SCHEMA, t.META.rows.encode(SCHEMA, MetaRecord(number=BASE_SCHEMA + len(steps))), db=meta)
    txn.put(STORE_ID, t.META.rows.encode(STORE_ID, MetaRecord(text=str(uuid.uuid4()))), db=meta)
    born = t.META.key.pack(BORN_WITH_EPOCHS)
    txn.put(born, t.META.rows.encode(born, MetaRecord(number=1)), db=meta)


def _carry_out(env: ManifestEnv, step: Step, schema: int, clock: Clock) -> bool:
    with ReadTxn(env) as ledger:
        if ledger.get(t.MIGRATIONS, step.name) is not None:
            return False
    emit("info", "manifest.migrating", step=step.name)
    forget_point(env)  # the change log does not name the rows that a step changes
    if step.prepare is not None:
        step.prepare(env)
        hit("manifest.migration.prepared")

    def finish(txn: Any) -> None:
        step.run(env, txn)
        hit("manifest.migration.ran")
        txn.put(*_ledger_row(step, clock), db=env.handles[t.MIGRATIONS.name])
        txn.put(SCHEMA, t.META.rows.encode(SCHEMA, MetaRecord(number=schema)), db=env.handles[t.META.name])
        hit("manifest.migration.recorded")

    env.transact(finish)
    hit("manifest.migration.durable")
    return True


def _ledger_row(step: Step, clock: Clock) -> tuple[bytes, bytes]:
    key = t.MIGRATIONS.key.pack(step.name)
    return key, t.MIGRATIONS.rows.encode(key, MigrationRecord(clock.now_ms(), installed_version() or "unknown"))
