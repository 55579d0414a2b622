"""The buffer of records that were appended to a stream and are not written yet. It assigns ids and forms blocks.

A *run* is a sequence of records that become one block. A batch that needs more than one block, an Arrow column, or an append
with an idempotency key is a separate run.

Threads: any; one lock, for ids and pending records. Raises: `InvalidInput` for values that are not records, `OutOfRange`."""

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
    """The log to which records are appended."""

    durable: int
    """The id after the last durable record."""
    barrier: Barrier | None
    """The archive's barrier, which an acknowledgement waits for in mode `sync`."""

    def require(self) -> None:
        """Raise the error that has made the log unusable, if any."""

    def wait_durable(self, upto: int, append_round: AppendRound) -> None:
        """Wait until everything below an id is durable. `DiskFull`: it is not, and never will be."""

    def mark_reported(self, count: int) -> None:
        """Note that the refusal of `count` records was reported to their caller."""


class Appended(msgspec.Struct, gc=False, eq=False):
    """The return value of `append`: the ids at once, and durability on request.

    A msgspec struct, because one is created for every append and takes a third of the time of a Python class.
    """

    _log: Log
    _round: AppendRound
    record: int
    """The id of the first record, unless the records are refused."""
    count: int
    _is_reported: bool = False
    """Whether `result` has reported that the records were refused."""

    @property
    def done(self) -> bool:
        """Whether the records are durable."""
        end = self.record + self.count
        # The mark first, then the round: refused ids are assigned again, so the mark alone proves nothing.
        return self._log.durable >= end and self._round.refused_from >= end

    def result(self) -> int:
        """Wait until the records are durable, and return the id of the first one.

        `DiskFull`: they are not and never will be, so they may be appended again. Repeated calls have the same outcome.
        """
        try:
            self._log.wait_durable(self.record + self.count, self._round)
        except DiskFull:
            if not self._is_reported:
                self._is_reported = True
                self._log.mark_reported(self.count)
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
"""The argument of `append`: one record, or many."""


class Run(msgspec.Struct):
    """Pending records with consecutive ids."""

    first: int
    payloads: Any
    """A list; for a batch given as an Arrow column, the column or the body of its single block."""
    size: int = BLOCK_BYTES
    """The bytes that the run may take."""
    room: int = BLOCK_BYTES
    """Bytes left in its block, counting 4 extra bytes per record: this also limits it to `BLOCK_RECORDS_MAX` records."""
    call: int = 0
    """The idempotency key of the append, which is then the only one in the run."""

    def bodies(self) -> list[Body]:
        """Return the bodies of its blocks."""
        payloads = self.payloads
        if type(payloads) is Body:
            return [payloads]
        is_list = type(payloads) is list
        encode = body_of if is_list else body_of_arrow
        if self.size <= BLOCK_BYTES and len(payloads) <= BLOCK_RECORDS_MAX:
            return [encode(payloads)]
        ends = list(accumulate(map(len, payloads))) if is_list else _sizes(payloads).cumsum()
        return [encode(payloads[start:stop]) for start, stop in parts(ends)]


FULL_RUN = Run(0, [], 0, -1)
"""A run that accepts no records."""


class CheckedRecords(NamedTuple):
    """The records of one append."""

    payloads: Any
    """As in `Run`."""
    records: int
    size: int
    """The bytes that they take in blocks, without heads."""
    given: Any

    def largest(self) -> int:
        """Return the size of the largest record. It is at most `size`, which is cheaper to check first."""
        given = self.given
        return max(map(len, given), default=0) if isinstance(given, list) else int(_sizes(given).max(initial=0))

    @property
    def is_small(self) -> bool:
        """Whether the records may share a block with other appends."""
        return type(self.payloads) is list and self.size <= BLOCK_BYTES and self.records <= BLOCK_RECORDS_MAX


class Pending:
    """The pending records of one stream: accepted and not written."""

    def __init__(
        self,
        log: Log,
        settings: StreamSettings,
        *,
        next_record: int,
        request_sync: Callable[[], None],
        relieve: Callable[[AppendRound, int, int], None],
        calls: RecentKeys | None = None,
    ) -> None:
        # constant after construction
        self._log = log
        self._record_bytes_max = settings.record_bytes_max
        self._small_max = min(settings.record_bytes_max + 4, BLOCK_BYTES)
        """The most bytes that a record may take in a shared block."""
        self._bytes_max = settings.pending_bytes_max
        self._request_sync = request_sync
        self._relieve = relieve
        """Writes the pending records when there are too many; raises if the append was refused."""
        self.require_writable: Callable[[], None] = lambda: None
        """Raises if the stream accepts no writes; set by the engine."""
        # guarded by _lock
        self._lock = threading.Lock()
        self.next_record = next_record
        self._calls = calls if calls is not None else RecentKeys()
        self._runs: list[Run] = []
        self._run: Run = FULL_RUN
        """The last run, if more records may join it."""
        self._bytes = 0
        self._round = AppendRound()
        """The round of the appends that the next refusal affects."""
        self._unreported = 0
        """Refused records whose callers have not been notified yet."""

    def append(self, records: Records, *, key: bytes = b"") -> Appended:
        """Append one or more records. Their ids are assigned now; they are durable when `Appended.result` returns.

        With a `key` they are appended once, however often the call is repeated.
        """
        self.require_writable()
        if type(records) is bytes and not key and (size := len(records) + 4) <= self._small_max:
            with self._lock:
                run = self._run
                # A failed log is not checked for here: `stop` leaves a run without room, and `_next_ids` raises.
                if (room := run.room - size) >= 0:
                    first = self.next_record
                    # The call last: signal handlers run after calls, so none can part a record from its id.
                    run.room, self.next_record = room, first + 1
                    run.payloads.append(records)
                    return Appended(self._log, self._round, first, 1)
            return self._append_first(records, size)
        return self._append_many(
            check_records([bytes(records)] if isinstance(records, _BYTES) else records), call_number(key) if key else 0
        )

    def _append_first(self, record: bytes, size: int) -> Appended:
        """Append one record that does not fit into the current run."""
        with self._lock:
            first = self._next_ids(1)
            self._add(first, [record], size)
            pending, append_round = self._bytes, self._round
        if pending > self._bytes_max:
            self._relieve(append_round, first, 1)
        return Appended(self._log, append_round, first, 1)

    def _append_many(self, given: CheckedRecords, call: int) -> Appended:
        """Append many records, or records with an idempotency key."""
        limit = self._record_bytes_max
        if given.size > limit and (largest := given.largest()) > limit:
            hint = "split it, or raise stream.record_bytes_max"
            raise OutOfRange("a record exceeds the stream's size limit", hint=hint, bytes=largest, max=limit)
        count = given.records
        with self._lock:
            # Under the lock that also adds the key, so that two concurrent calls with one key append once. The current
            # round fits the earlier append: keys of refused appends are removed (`refuse`).
            if call and (done := self._calls.get(call)) is not None:
                return Appended(self._log, self._round, done, count)
            first = self._next_ids(count)
            if count and call:  # its blocks carry the key, so no other append may share them
                self._add_with_key(Run(first, given.payloads, max(given.size, 1), -1, call), count)
            elif count and given.is_small:
                self._add(first, given.payloads, given.size)
            elif count:
                self._begin_run(Run(first, given.payloads, given.size, -1), count)
            pending, append_round = self._bytes, self._round
        if pending > self._bytes_max:
            self._relieve(append_round, first, count)
        return Appended(self._log, append_round, first, count)

    def _next_ids(self, count: int) -> int:
        """Return the first of the next `count` ids, which the caller assigns. REQUIRES the lock."""
        self._log.require()
        first = self.next_record
        if first + count > U64_MAX:
            raise OutOfRange("a stream holds at most 2**64 - 1 records", first_record=first)
        return first

    # In these three the last call adds the records, and nothing is called between it and the assignment of their ids:
    # signal handlers run after calls, so an interrupted append is added with its ids, or not at all.
    def _add(self, first: int, payloads: list[bytes], size: int) -> None:
        """Add records to the last run, or to a new one if it has no room. REQUIRES the lock."""
        run, end = self._run, first + len(payloads)
        if size > run.room:
            self._begin_run(Run(first, payloads, room=BLOCK_BYTES - size), len(payloads))
        else:
            run.room, self.next_record = run.room - size, end
            run.payloads.extend(payloads)

    def _add_with_key(self, run: Run, count: int) -> None:
        """Add a run of `count` records with an idempotency key. REQUIRES the lock."""
        try:
            self._calls.add(run.call, run.first)
            self._begin_run(run, count)
        except BaseException:
            if self.next_record == run.first:  # not added: a repeated call must append them
                self._calls.discard(run.call)
            raise

    def _begin_run(self, run: Run, count: int) -> None:
        """Add a run of `count` records, to which later ones may be appended. REQUIRES the lock."""
        if not self._runs:
            self._request_sync()  # the keeper syncs if no caller does
        self._bytes += run.size
        self._run, self.next_record = run, run.first + count
        self._runs.append(run)

    # ── for the writer ────────────────────────────────────────────────────────────────────────────────────────────────
    def take(self) -> list[Run]:
        """Remove and return the pending runs. No record is added to them any more."""
        with self._lock:
            self._log.require()
            runs, self._runs, self._run, self._bytes = self._runs, [], FULL_RUN, 0
        return runs

    def put_back(self, runs: list[Run]) -> None:
        """Return runs that could not be written, ahead of those appended meanwhile."""
        with self._lock:
            self._runs[:0] = runs
            self._bytes += sum(run.size for run in runs)

    def refuse(self, append_round: AppendRound, upto: int, why: QuireError) -> int:
        """Discard all pending records, if one below `upto` of this round is pending; return how many."""
        with self._lock:
            if append_round is not self._round or not self._runs or self._runs[0].first >= upto:
                return 0  # refused or written meanwhile
            first, next_round = self._runs[0].first, AppendRound()
            for run in self._runs:
                self._calls.discard(run.call)
            # No calls from here on: a signal handler cannot part the records from their refusal.
            # All later records go too, whichever thread appended them: ids have no gaps (decision 020).
            count, self.next_record = self.next_record - first, first
            self._runs, self._run, self._bytes = [], FULL_RUN, 0
            self._unreported += count
            self._round = next_round
            append_round.why = why
            # Last: readers of it find `why` set, and no id has been reassigned before.
            append_round.refused_from = first
            return count

    def has_call(self, key: bytes) -> bool:
        """Return whether records with this idempotency key were appended recently."""
        with self._lock:
            return self._calls.get(call_number(key)) is not None

    def newest_calls(self) -> tuple[tuple[int, int], ...]:
        """Return the idempotency keys of the newest appends, with their first records."""
        with self._lock:
            return tuple(self._calls.newest())

    def end(self) -> tuple[int, AppendRound]:
        """Return the id after the last appended record, and the current round."""
        with self._lock:
            return self.next_record, self._round

    def mark_reported(self, count: int) -> None:
        """Note that the refusal of `count` records was reported to their caller."""
        with self._lock:
            self._unreported = max(self._unreported - count, 0)

    def take_unreported(self) -> int:
        """Return how many refused records were not reported yet, and count them as reported."""
        with self._lock:
            unreported, self._unreported = self._unreported, 0
        return unreported

    def stop(self) -> None:
        """Have the next append check the log first, which raises its failure."""
        with self._lock:
            self._run = FULL_RUN

    def forked(self) -> None:
        """Replace the lock in the child of a fork(): the thread that held it does not exist there."""
        self._lock = threading.Lock()
        self._run = FULL_RUN


def check_records(records: Records) -> CheckedRecords:
    """Check and measure the records of an append."""
    if type(records) is not list and (isinstance(records, str) or not isinstance(records, Sequence)):
        return _column(_binary(records))
    payloads = list(records)
    if any(type(payload) is not bytes for payload in payloads):
        raise InvalidInput("records must be bytes", hint="encode them first")
    return CheckedRecords(payloads, len(payloads), sum(map(len, payloads)) + 4 * len(payloads), payloads)


def _column(column: Column) -> CheckedRecords:
    count = len(column)
    if not count:
        return CheckedRecords([], 0, 0, [])
    body = body_of_arrow(column)
    size = len(body.pieces[-1]) + 4 * count
    fits = size <= BLOCK_BYTES and count <= BLOCK_RECORDS_MAX
    return CheckedRecords(body if fits else column, count, size, column)


def _sizes(column: Column) -> Any:
    return np.diff(np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, column.offset * 4))


def _binary(records: Column) -> Column:
    """Convert a column to one binary array without nulls."""
    import pyarrow as pa

    if not isinstance(records, pa.Array | pa.ChunkedArray):
        raise InvalidInput("records must be bytes", hint="encode them first", type=type(records).__name__)
    column = records
    if isinstance(records, pa.ChunkedArray):
        column = pa.concat_arrays(records.chunks) if records.num_chunks else pa.array([], pa.binary())
    if column.null_count:
        raise InvalidInput("a record cannot be null", hint="drop or fill the nulls", nulls=column.null_count)
    if column.type == pa.binary():
        return column
    if pa.types.is_string(column.type):
        return column.view(pa.binary())
    if not pa.types.is_large_binary(column.type):
        raise InvalidInput("records must be a binary or string column", hint="cast it first", type=str(column.type))
    return column.cast(pa.binary())


assert BLOCK_BYTES // 4 <= BLOCK_RECORDS_MAX
