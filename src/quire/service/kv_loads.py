"""Tables on their way into a key-value database: ids for those who write them, and the step that takes them all.

Terms
  load    one job's tables, by number; begun by the first task that asks for ids, one for all of them
  shelf   what a task gets: ids that only it has, the load's lsn, the database's directory

Rules
  1. Ids come from the database's manifest, so that tasks and loads at the same time never collide.
  2. Only tables that the job names are published, in one event, and once: the database remembers the load's number
     (`lsm/load_notes.py`), so a commit whose answer was lost is asked for again, and answered.
  3. A load ends when it is published or dropped: the files of attempts that failed, or came second, go. One that nobody has
     asked for `IDLE_SECONDS` is dropped when another begins. What was begun before the owner restarted cannot be published.

Threads: any. Raises `NotFound`, `InvalidInput`, and what the engine raises.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from quire.core.errors import InvalidInput, NotFound, QuireError
from quire.core.events import emit
from quire.lsm.kv import Kv
from quire.lsm.loading import Load, begin_load, published
from quire.service import messages as m
from quire.service.api import StoreApi

IDS_MAX = 10_000
"""Ids of one call."""

OVER_MAX = 4_096
"""Loads that are remembered as over."""

IDLE_SECONDS = 24 * 3_600.0


@dataclass(slots=True, eq=False)
class _Begun:
    """A load that is under way."""

    database: str
    kv: Kv
    load: Load
    touched: float
    lock: threading.Lock = field(default_factory=threading.Lock)


class KvLoads:
    """See the rules above."""

    def __init__(self, store: StoreApi) -> None:
        self._store = store
        self._clock = store.manifest.clock
        # guarded by _lock
        self._lock = threading.Lock()
        self._begun: dict[int, _Begun] = {}
        self._over: OrderedDict[int, None] = OrderedDict()
        """Loads that were published or dropped: nothing more is taken of them."""

    def take(self, request: m.TakeIds) -> m.Shelf:
        """Ids for a task (rule 1)."""
        if not 0 < request.count <= IDS_MAX:
            raise InvalidInput(f"a task takes from 1 to {IDS_MAX:,} ids", count=request.count)
        begun = self._begin(request)
        with begun.lock:
            ids = tuple(begun.load.allocate(request.count))
        settings = begun.kv.settings
        return m.Shelf(
            begun.kv.home.path,
            begun.load.lsn,
            ids,
            settings.table_bytes,
            settings.block_bytes,
            settings.compression,
            settings.bloom_bits_per_key,
        )

    def _begin(self, request: m.TakeIds) -> _Begun:
        with self._lock:
            if request.load in self._over:  # a task that goes on after its job has ended
                raise NotFound("this load is over", hint="run the job again", load=request.load)
            begun = self._begun.get(request.load)
            if begun is None:
                kv = self._kv(request.database, create=request.create)
                if published(kv, request.load) is not None:
                    raise NotFound("this load is over", hint="run the job again", load=request.load)
                begun = _Begun(request.database, kv, begin_load(kv), 0.0)
                self._begun[request.load] = begun
            begun.touched = self._clock.monotonic()
            idle = [each for each, at in self._begun.items() if at.touched < begun.touched - IDLE_SECONDS]
        for each in idle:
            emit("warning", "kv.load_idle", load=each)
            self.drop(each)
        if begun.database != request.database:
            raise InvalidInput("a load is of one database", load=request.load, database=request.database)
        return begun

    def _kv(self, name: str, *, create: bool) -> Kv:
        return self._store.kvs.open(name, create=create)

    def publish(self, request: m.PublishTables) -> int:
        """Publish the tables that the job names, in one event and once (rule 2); the number of rows."""
        with self._lock:
            begun = self._begun.get(request.load)
        kv = self._kv(request.database, create=request.create)
        if begun is None:
            rows = published(kv, request.load)
            if rows is None and request.ids:
                hint = "has the owner restarted? Run the job again"
                raise NotFound("this load is not under way here", hint=hint, load=request.load)
            return rows or 0
        with begun.lock:
            rows = published(kv, request.load)  # two calls at once: the second finds what the first did
            if rows is None:
                rows = begun.load.publish(request.ids, number=request.load)
        self._end(request.load)
        return rows

    def drop(self, load: int) -> None:
        """Let a load's tables go; nothing, if it is over."""
        begun = self._end(load)
        if begun is not None:
            with begun.lock:
                try:
                    begun.load.close()
                except QuireError as error:  # the database was closed or dropped meanwhile: its files are swept
                    emit("warning", "kv.load_not_dropped", load=load, error=str(error))

    def _end(self, load: int) -> _Begun | None:
        with self._lock:
            self._over[load] = None
            while len(self._over) > OVER_MAX:
                self._over.popitem(last=False)
            return self._begun.pop(load, None)
