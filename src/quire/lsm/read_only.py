"""A key-value database of a store that was opened for reading: next to its owner, on a standby, or in a restored directory.

The files are read as recovery would read them, and nothing is written, cut or removed: at any moment they are in a state that
a killed owner could have left. A batch becomes visible when the owner has appended it to the log, as for readers inside the
owner. Each read first checks for new writes of the owner: records appended to the log are added to the memtable; if the
manifest has changed, everything is read again.

What the owner does meanwhile, and what a reader sees
  removes a table or a log     the file stays readable through the view that uses it, which holds it open
  flushes, compacts            the previous view; the next read uses the new one
  writes while files are read  the manifest is found changed after everything was read, and everything is read again

A snapshot holds its view, because the owner's compactions do not keep versions for it.

Threads: any. Raises `ReadOnly`, and the errors of reading."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from quire.core.barrier import refuse_changes
from quire.core.errors import Corruption, StoreClosed
from quire.core.read_only import OwnerOnly, refusal
from quire.core.settings import LsmSettings
from quire.durable.files import Disk, read_all
from quire.durable.log_format import NAMED_HEADER_BYTES, LogHeader, decode_header
from quire.durable.log_reader import LogEnd, read_on, scan
from quire.durable.names import LsmHome
from quire.lsm.kv import Kv, Stats, stats_of
from quire.lsm.manifest import ReadManifest, read_manifest
from quire.lsm.manifest_data import ManifestData
from quire.lsm.memtable import Memtable
from quire.lsm.reading import HeldLsns, KvSnapshot
from quire.lsm.recovery import wals_in_order
from quire.lsm.view import Frozen, KvView, Levels, open_table
from quire.lsm.wal import LOG_KIND, Buffer, batches_of, decode_batch
from quire.lsm.witnesses import REPAIR, Owner

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire.lsm.block_cache import BlockCache
    from quire.lsm.sst_reader import SSTable

RACES_MAX = 250
RACE_SECONDS = 0.02
"""How often inconsistent files are read again, and the pause in between: the owner, or a standby, may be writing them."""


class _LogPosition(NamedTuple):
    """How far the active log was read."""

    path: str
    header: LogHeader
    end: int


class ReadOnlyKv(Kv):
    """A key-value database, opened for reading; made by `store.kv(name)` of a store with mode "r"."""

    def __init__(  # does not call `Kv.__init__`: the owner's parts do not exist here, and their use is refused
        self,
        disk: Disk,
        home: LsmHome,
        owner: Owner,
        name: str,
        settings: LsmSettings,
        cache: BlockCache,
        *,
        files_created: bool,
        line: Callable[[], int] = lambda: 0,
    ) -> None:
        """Open the database. `files_created`: whether its files have ever existed. `line` returns the first number of the
        store's current range (A10): tables of different ranges may have the same ids."""
        # constant after construction
        self.disk = disk
        self.home = home
        self.owner = Owner(database=owner.database)
        self.settings = settings
        self.cache = cache
        self._name = name
        self._files_created = files_created
        self._line_now = line
        self.projection = None
        self.barrier = None
        self.first_lsn = 0
        self.manifest = self.upkeep = self.stalls = cast(Any, OwnerOnly("the database", name=name))
        refuse_changes(self, lambda _: refusal("the database", name=name))
        self.snapshots = HeldLsns()
        # guarded by _reading
        self._reading = threading.Lock()
        self._manifest_read: ReadManifest | None = None
        self._tail: _LogPosition | None = None
        self._tables: dict[int, SSTable] = {}
        self._line = 0
        # guarded by _visibility, which is taken after _reading
        self._visibility = threading.Lock()
        self._lsn = 0
        self._loading: set[int] = set()
        # replaced under _reading, read without a lock
        self.view = KvView(Memtable(), (), Levels())
        # only ever set
        self.failure = None
        self.refresh()

    # ── following ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def refresh(self) -> None:
        """Catch up with the owner's writes."""
        with self._reading:
            self.require_open()
            # First the log, then the manifest: if that is unchanged, no record went to another log meanwhile.
            if self._manifest_read is None or not self._read_on() or not self._is_current():
                self._load()

    def _is_current(self) -> bool:
        try:
            return self._manifest_read is not None and self._manifest_read.is_current(self.disk, self.home)
        except Corruption:  # the log is being replaced
            return False

    def _read_on(self) -> bool:
        """Add the records appended to the active log to the memtable. Return `False` if the log is now another file."""
        tail = self._tail
        if tail is None:
            return True
        try:
            file = self.disk.open(tail.path, write=False)
        except FileNotFoundError:
            return False
        try:
            if decode_header(file.read_at(NAMED_HEADER_BYTES, 0), tail.path) != tail.header:
                return False
            records, offsets, end = read_on(file, tail.header, tail.end)
        except Corruption:
            return False
        finally:
            file.close()
        for record, offset in zip(records, offsets):
            batch = decode_batch(record, tail.path, offset)
            with self._visibility:
                if batch.items and batch.lsn > self.view.levels.lsn_max:
                    self.view.memtable.put_all(batch.lsn, batch.items, batch.size, self.snapshots.newest)
                    self._lsn = max(self._lsn, batch.lsn)
        self._tail = tail._replace(end=end)
        return True

    def _load(self) -> None:
        """Read everything, and retry until the files are consistent. REQUIRES `_reading`."""
        for race in range(RACES_MAX):
            try:
                self._load_once()
                return
            except (Corruption, FileNotFoundError) as error:
                if race == RACES_MAX - 1:
                    if isinstance(error, FileNotFoundError):
                        what = "a file of the database is missing"
                        raise Corruption(what, hint=REPAIR, path=self.home.path, cause=str(error)) from error
                    raise
            time.sleep(RACE_SECONDS)

    def _load_once(self) -> None:
        manifest = read_manifest(self.disk, self.home, self.owner)
        if manifest.header is None and self._files_created:
            raise Corruption("the database's files are missing", hint=REPAIR, path=self.home.path, name=self._name)
        state, line = manifest.data, self._line_now()
        opened = self._tables if line == self._line else {}
        tables = {
            entry.id: opened.get(entry.id)
            or open_table(self.disk, f"{self.home.path}/{entry.path}", entry.id, self.cache)
            for entry in state.sstables
        }
        levels = Levels(tables.values())
        frozen, memtable, tail = self._replayed(state, levels.lsn_max)
        # Checked last: if nothing was logged meanwhile, tables and logs belong to the manifest that was read.
        if not manifest.is_current(self.disk, self.home):
            raise Corruption(
                "the manifest was written while the tables were read", hint="try again", path=self.home.path
            )
        lsns = (log.memtable.lsn_max for log in frozen)
        with self._visibility:
            self.view = KvView(memtable, tuple(reversed(frozen)), levels)
            self._lsn = max(state.last_lsn, levels.lsn_max, memtable.lsn_max, *lsns)
        self._manifest_read, self._tail, self._tables, self._line = manifest, tail, tables, line

    def _replayed(self, state: ManifestData, in_tables: int) -> tuple[list[Frozen], Memtable, _LogPosition | None]:
        """Return the memtables of the frozen logs, oldest first; the memtable of the active log; and how far that was read."""
        frozen: list[Frozen] = []
        memtable, tail = Memtable(), None
        for number in wals_in_order(state) if state.active_wal else ():
            path, memtable = self.home.wal(number), Memtable()
            contents = scan(read_all(self.disk, path), path, kind=LOG_KIND)
            self.owner.require(contents.header, number, path)
            for batch in batches_of(contents):
                if batch.items and batch.lsn > in_tables:  # otherwise a table has it already (recovery.py)
                    memtable.put_all(batch.lsn, batch.items, batch.size, 0)
            if number != state.active_wal:
                memtable.freeze()
                end = LogEnd(salt=contents.header.salt, end=contents.end, link=contents.link)
                frozen.append(Frozen(memtable, number, end))
            tail = _LogPosition(path, contents.header, contents.end)
        return frozen, memtable, tail

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def get(self, key: Buffer) -> bytes | None:
        """Return the value of a key, or `None`."""
        self.refresh()
        return super().get(key)

    @property
    def last_lsn(self) -> int:
        """The lsn of the newest batch."""
        self.refresh()
        return self._lsn

    def snapshot(self) -> KvSnapshot:
        """Return a snapshot of the database as it is now, readable until it is closed."""
        self.refresh()
        with self._visibility:
            held = self.snapshots.hold((self._lsn,))
            return KvSnapshot(self, self._lsn, frozenset(), held, self.view)

    def stats(self) -> Stats:
        """Return the current statistics."""
        self.refresh()
        view, manifest = self.view, self._manifest_read
        assert manifest is not None
        log_bytes = manifest.end - (manifest.header.size if manifest.header is not None else 0)
        return stats_of(view, self._lsn, log_bytes, manifest.data.version)

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Close the database for reading. Idempotent."""
        with self._reading:
            self.failure = self.failure or StoreClosed("the database is closed", hint="open it again")
            self._tables = {}

    abandon = close

    def forked(self, failure: StoreClosed) -> None:
        """Invalidate the database in the child of a fork()."""
        self.failure = failure
        self._reading, self._visibility = threading.Lock(), threading.Lock()
