"""Records that were appended to a stream and are not written yet: their ids, the blocks they become, and what `append`
returns.

A run is records that become one block; a batch that needs more than one block, or is an Arrow column, is a run of its own.
Threads: any; one lock, around ids and what is pending. Raises `InvalidInput` for what is not records, `OutOfRange`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np

from quire.core.barrier import Barrier
from quire.core.errors import DiskFull, InvalidInput, OutOfRange, QuireError
from quire.core.ids import U64_MAX
from quire.core.recent_keys import RecentKeys, call_number
from quire.core.settings import StreamSettings
from quire.core.waiting import in_thread
from quire.stream.group_commit import AppendRound
from quire.stream.segment import BLOCK_BYTES, BLOCK_RECORDS_MAX, Body, body_of, body_of_arrow, parts

if TYPE_CHECKING:
    import pyarrow as pa


class Log(Protocol):
    """What records are appended to."""

    durable: int
    """The id behind the last durable record."""
    barrier: Barrier | None
    """What an acknowledgement waits behind in mode `sync` of the archive."""

    def require(self) -> None:
        """Raise what has made it unusable, if something has."""

    def until(self, upto: int, turn: AppendRound) -> None:
        """Return when everything below an id is durable; `DiskFull`: it is not, and never will be."""

    def told(self, count: int) -> None:
        """Somebody knows that so many of its records were refused."""


class Appended(msgspec.Struct, gc=False, eq=False):
    """What `append` returns: the ids, at once; that they are durable, when asked.

    A struct of C's making: one is made for every record, and takes a third of the time that a class of ours would.
    """

    _log: Log
    _turn: AppendRound
    record: int
    """The id of the first record, unless they are refused."""
    count: int
    _is_told: bool = False
    """Whether `result` has said that they were refused."""

    @property
    def done(self) -> bool:
        """Whether the records are durable."""
        end = self.record + self.count
        # The mark first, then the round: ids that were refused are given out again, so the mark alone proves nothing.
        return self._log.durable >= end and self._turn.refused_from >= end

    def result(self) -> int:
        """Return when the records are durable: the id of the first one.

        `DiskFull`: they are not and never will be, so they may be appended again. It is the same answer each time.
        """
        try:
            self._log.until(self.record + self.count, self._turn)
        except DiskFull:
            if not self._is_told:
                self._is_told = True
                self._log.told(self.count)
            raise
        if (barrier := self._log.barrier) is not None:
            barrier.hold()
        return self.record

    def __await__(self) -> Generator[Any, None, int]:
        if not self.done or self._log.barrier is not None:
            return (yield from in_thread(self.result))
        return self.record


_BYTES = (bytes, bytearray, memoryview)

Column: TypeAlias = Any
"""A `pyarrow.Array`."""
Records: TypeAlias = "bytes | bytearray | memoryview | Sequence[bytes] | pa.Array | pa.ChunkedArray"
"""What `append` takes: one record, or many."""


class Run(msgspec.Struct):
    """Pending records with consecutive ids."""

    first: int
    payloads: Any
    """A list, or of a batch that came as a column the column or the body of its one block."""
    size: int = BLOCK_BYTES
    """What it may take."""
    room: int = BLOCK_BYTES
    """What its block still takes, at 4 bytes a record on top: so it has no more than `BLOCK_RECORDS_MAX`."""
    call: int = 0
    """The idempotency key of the append, which is then alone in the run."""

    def bodies(self) -> list[Body]:
        """Those of its blocks."""
        payloads = self.payloads
        if type(payloads) is Body:
            return [payloads]
        is_list = type(payloads) is list
        encode = body_of if is_list else body_of_arrow
        if self.size <= BLOCK_BYTES and len(payloads) <= BLOCK_RECORDS_MAX:
            return [encode(payloads)]
        ends = list(accumulate(map(len, payloads))) if is_list else _sizes(payloads).cumsum()
        return [encode(payloads[start:stop]) for start, stop in parts(ends)]


FULL = Run(0, [], 0, -1)
"""Takes nothing."""


class Many(NamedTuple):
    """Records that were given together."""

    payloads: Any
    """As in `Run`."""
    records: int
    size: int
    """What they take in blocks, heads left out."""
    given: Any

    def largest(self) -> int:
        """The size of the largest record: no more than `size`, which is asked first."""
        given = self.given
        return max(map(len, given), default=0) if isinstance(given, list) else int(_sizes(given).max(initial=0))

    @property
    def is_small(self) -> bool:
        """Whether they go into a block together with others."""
        return type(self.payloads) is list and self.size <= BLOCK_BYTES and self.records <= BLOCK_RECORDS_MAX


class Pending:
    """What one stream has accepted and not written."""

    def __init__(
        self,
        log: Log,
        settings: StreamSettings,
        *,
        next_record: int,
        asked: Callable[[], None],
        relieve: Callable[[AppendRound, int, int], None],
        calls: RecentKeys | None = None,
    ) -> None:
        # constant after construction
        self._log = log
        self._record_bytes_max = settings.record_bytes_max
        self._small_max = min(settings.record_bytes_max + 4, BLOCK_BYTES)
        """What a record takes at most that shares a block with others."""
        self._bytes_max = settings.pending_bytes_max
        self._asked = asked
        self._relieve = relieve
        """Writes what is pending, because it is too much; raises if that of (turn, first, count) was refused."""
        self.require_writable: Callable[[], None] = lambda: None
        """Raises if the stream takes no writes; set by the engine."""
        # guarded by _lock
        self._lock = threading.Lock()
        self.next_record = next_record
        self._calls = calls if calls is not None else RecentKeys()
        self._runs: list[Run] = []
        self._run: Run = FULL
        """The last one, if more records may join it."""
        self._bytes = 0
        self._turn = AppendRound()
        """Which appends a refusal would meet now."""
        self._untold = 0
        """Records that were refused without their appender knowing yet."""

    def append(self, records: Records, *, key: bytes = b"") -> Appended:
        """Add a record, or many: their ids are fixed now, and they are durable when the result's `result()` returns.

        With a `key` they are added once, however often the call is repeated.
        """
        self.require_writable()
        if type(records) is bytes and not key and (size := len(records) + 4) <= self._small_max:
            with self._lock:
                run = self._run
                if (room := run.room - size) >= 0:
                    run.room = room
                    run.payloads.append(records)
                    first = self.next_record
                    self.next_record = first + 1
                    return Appended(self._log, self._turn, first, 1)
            return self._append_first(records, size)
        return self._append_many(
            many([bytes(records)] if isinstance(records, _BYTES) else records), call_number(key) if key else 0
        )

    def _append_first(self, record: bytes, size: int) -> Appended:
        """The same, if there was no run that it fits into."""
        with self._lock:
            first = self._reserve(1)
            run = self._run
            if size > run.room:  # somebody else may have begun one
                run = self._begin_run(Run(first, []))
            run.room -= size
            run.payloads.append(record)
            pending, turn = self._bytes, self._turn
        if pending > self._bytes_max:
            self._relieve(turn, first, 1)
        return Appended(self._log, turn, first, 1)

    def _append_many(self, given: Many, call: int) -> Appended:
        """The same, at leisure."""
        limit = self._record_bytes_max
        if given.size > limit and (largest := given.largest()) > limit:
            hint = "split it, or raise stream.record_bytes_max"
            raise OutOfRange("a record exceeds the stream's size limit", hint=hint, bytes=largest, max=limit)
        count = given.records
        with self._lock:
            if call and (done := self._calls.get(call)) is not None:
                return Appended(self._log, self._turn, done, count)
            first = self._reserve(count)
            if count and call:  # its blocks have the key, so they are its own
                self._begin_run(Run(first, given.payloads, max(given.size, 1), -1, call))
                self._calls.add(call, first)
            elif count and given.is_small:
                run = self._run
                if given.size > run.room:
                    run = self._begin_run(Run(first, []))
                run.payloads.extend(given.payloads)
                run.room -= given.size
            elif count:
                self._begin_run(Run(first, given.payloads, given.size, -1))
            pending, turn = self._bytes, self._turn
        if pending > self._bytes_max:
            self._relieve(turn, first, count)
        return Appended(self._log, turn, first, count)

    def _reserve(self, count: int) -> int:
        """The first of so many ids. REQUIRES the lock."""
        self._log.require()
        first = self.next_record
        if first + count > U64_MAX:
            raise OutOfRange("a stream holds at most 2**64 - 1 records", first_record=first)
        self.next_record = first + count
        return first

    def _begin_run(self, run: Run) -> Run:
        """REQUIRES the lock."""
        if not self._runs:
            self._asked()  # somebody should sync, if nobody waits for it
        self._runs.append(run)
        self._bytes += run.size
        self._run = run
        return run

    # ── for the writer ────────────────────────────────────────────────────────────────────────────────────────────────
    def take(self) -> list[Run]:
        """What is to be written now; nobody adds to it any more."""
        with self._lock:
            self._log.require()
            runs, self._runs, self._run, self._bytes = self._runs, [], FULL, 0
        return runs

    def put_back(self, runs: list[Run]) -> None:
        """What could not be written, in front of what came meanwhile."""
        with self._lock:
            self._runs[:0] = runs
            self._bytes += sum(run.size for run in runs)

    def refuse(self, turn: AppendRound, upto: int, why: QuireError) -> int:
        """Give up all that is pending, if something below `upto` of this turn is; how many records."""
        with self._lock:
            if turn is not self._turn or not self._runs or self._runs[0].first >= upto:
                return 0  # refused, or written, since
            first = self._runs[0].first
            for run in self._runs:
                self._calls.discard(run.call)
            count, self.next_record = self.next_record - first, first
            self._runs, self._run, self._bytes = [], FULL, 0
            self._untold += count
            self._turn = AppendRound()
            turn.why = why
            turn.refused_from = first  # last: whoever sees it finds the reason, and no id was given out again before
            return count

    def has_call(self, key: bytes) -> bool:
        """Whether records with this idempotency key were appended lately."""
        with self._lock:
            return self._calls.get(call_number(key)) is not None

    def newest_calls(self) -> tuple[tuple[int, int], ...]:
        """Idempotency keys of the newest appends, with their first records."""
        with self._lock:
            return tuple(self._calls.newest())

    def end(self) -> tuple[int, AppendRound]:
        """The id behind everything that was appended, and the turn it is of."""
        with self._lock:
            return self.next_record, self._turn

    def told(self, count: int) -> None:
        """Somebody knows that so many of its records were refused."""
        with self._lock:
            self._untold = max(self._untold - count, 0)

    def all_told(self) -> int:
        """How many refused records nobody knew of; from here on somebody does."""
        with self._lock:
            untold, self._untold = self._untold, 0
        return untold

    def stop(self) -> None:
        """Whoever appends next asks the log first, and hears what is wrong with it."""
        with self._lock:
            self._run = FULL

    def forked(self) -> None:
        """In the child of a fork() nobody holds the lock."""
        self._lock = threading.Lock()
        self._run = FULL


def many(records: Records) -> Many:
    """The records of an append."""
    if type(records) is not list and (isinstance(records, str) or not isinstance(records, Sequence)):
        return _column(_binary(records))
    payloads = list(records)
    if any(type(payload) is not bytes for payload in payloads):
        raise InvalidInput("records must be bytes", hint="encode them first")
    return Many(payloads, len(payloads), sum(map(len, payloads)) + 4 * len(payloads), payloads)


def _column(column: Column) -> Many:
    count = len(column)
    if not count:
        return Many([], 0, 0, [])
    body = body_of_arrow(column)
    size = len(body.pieces[-1]) + 4 * count
    fits = size <= BLOCK_BYTES and count <= BLOCK_RECORDS_MAX
    return Many(body if fits else column, count, size, column)


def _sizes(column: Column) -> Any:
    return np.diff(np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, column.offset * 4))


def _binary(records: Column) -> Column:
    """One binary column without nulls."""
    import pyarrow as pa

    if not isinstance(records, pa.Array | pa.ChunkedArray):
        raise InvalidInput("records must be bytes", hint="encode them first", type=type(records).__name__)
    column = records
    if isinstance(records, pa.ChunkedArray):
        column = pa.concat_arrays(records.chunks) if records.num_chunks else pa.array([], pa.binary())
    if column.null_count:
        raise InvalidInput("a record cannot be null", hint="drop the nulls, or fill them", nulls=column.null_count)
    if column.type == pa.binary():
        return column
    if pa.types.is_string(column.type):
        return column.view(pa.binary())
    if not pa.types.is_large_binary(column.type):
        raise InvalidInput("records must be a binary or string column", hint="cast it first", type=str(column.type))
    return column.cast(pa.binary())


assert BLOCK_BYTES // 4 <= BLOCK_RECORDS_MAX
