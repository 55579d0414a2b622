"""Executes the requests of a stream on its SQLite connection. It is independent of HTTP: every protocol is a translation of it.

Terms
  work      a generator that runs a request. It yields `None` where another connection holds the write lock: its driver waits,
            without a thread, and resumes it; the statement is then tried again. A driver that gives up throws `LockTimeout`
            into it. A cursor also yields bytes to be sent
  outcome   the result of a statement, with its rows already encoded, in batches

Rules
  1. No thread waits for a lock (W1): a statement that finds it taken has not begun, and the work is suspended.
  2. An answer, to all requests of a pipeline together, is bounded in rows and in bytes of columns, rows and errors, counted
     while it is produced. What an entry has besides is bounded by the number of entries (`protocol.py`). A cursor has one fetch
     in memory at a time.
  3. A failed statement is an error of its request, or of its step of a batch; the work continues with the next one.
  4. For a skipped step the condition `error` holds, as for a failed one (W3).

Threads: one at a time; a work may be resumed in another thread than the one it began in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from quire.durable.failpoints import hit
from quire.service.sql import protocol as p
from quire.service.sql.wire_values import decode_value
from quire.sqlite.statements import (
    Columns,
    LockRefused,
    RunningStatement,
    SqlValue,
    StatementFailed,
    StatementRunner,
)

STORED_SQLS_MAX = 250
STORED_BYTES_MAX = 4 << 20

T = TypeVar("T")
Work = Generator[None, None, T]
RowEncoder = Callable[[Sequence[Sequence[SqlValue]]], bytes]


class LockTimeout(Exception):
    """The time to wait for the lock is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """Limits of one answer."""

    rows_max: int = 1_000_000
    bytes_max: int = 32 << 20


@dataclass(slots=True, kw_only=True)
class StatementOutcome:
    """The result of a statement."""

    columns: list[p.WireColumn]
    row_batches: list[bytes] = field(default_factory=list)
    row_count: int = 0
    affected_rows: int = 0
    last_insert_rowid: int = 0
    seconds: float = 0.0

    def wire(self) -> p.StatementResult:
        """Return the outcome as JSON clients read it; its rows were encoded by `json_rows`."""
        return p.StatementResult(
            cols=self.columns,
            rows=msgspec.Raw(b"[" + b",".join(self.row_batches) + b"]"),
            affected_row_count=self.affected_rows,
            last_insert_rowid=str(self.last_insert_rowid),
            rows_read=self.row_count,
            rows_written=self.affected_rows,
            query_duration_ms=round(self.seconds * 1000, 3),
        )


class StoredSqls:
    """Texts that a client has stored under numbers: per stream over HTTP, per socket over WebSocket."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._texts)

    def store(self, sql_id: int, sql: str) -> None:
        """Store a text under a number."""
        if sql_id in self._texts:
            raise StatementFailed(f"SQL text {sql_id} is already stored", "SQL_STORE_EXISTS")
        if len(self._texts) >= STORED_SQLS_MAX or self._bytes + len(sql) > STORED_BYTES_MAX:
            raise StatementFailed("too many SQL texts are stored: close some", "SQL_STORE_TOO_MANY")
        self._texts[sql_id] = sql
        self._bytes += len(sql)

    def close(self, sql_id: int) -> None:
        """Discard a text; do nothing if it does not exist."""
        self._bytes -= len(self._texts.pop(sql_id, ""))

    def get(self, sql_id: int | None) -> str:
        """Return a stored text."""
        sql = None if sql_id is None else self._texts.get(sql_id)
        if sql is None:
            raise StatementFailed(f"SQL text {sql_id} is not stored", "SQL_STORE_NOT_FOUND")
        return sql


class SqlSession:
    """The session of one stream on its connection."""

    def __init__(self, runner: StatementRunner, limits: AnswerLimits, sqls: StoredSqls | None = None) -> None:
        # constant after construction
        self.runner = runner
        self.sqls = sqls if sqls is not None else StoredSqls()
        self.limits = limits
        # the limits of the current answer, used by the stream's requests
        self._answer_rows = 0
        self._answer_bytes = 0

    def begin_answer(self) -> None:
        """Begin another answer, with fresh limits (rule 2)."""
        self._answer_rows = self._answer_bytes = 0

    @property
    def is_autocommit(self) -> bool:
        """Whether it is outside a transaction."""
        return self.runner.is_autocommit()

    def sql_of(self, sql: str | None, sql_id: int | None) -> str:
        """Return a text, or the stored text of a number."""
        if (sql is None) == (sql_id is None):
            raise StatementFailed("a statement must have either `sql` or `sql_id`", "SQL_NOT_GIVEN")
        return sql if sql is not None else self.sqls.get(sql_id)

    # ── statements ────────────────────────────────────────────────────────────────────────────────────────────────────
    def execute(
        self,
        sql: str,
        bindings: Sequence[SqlValue] = (),
        *,
        want_rows: bool = True,
    ) -> Work[StatementOutcome]:
        """Run one statement to its end."""
        began, changed = time.perf_counter(), self.runner.total_changes()
        statement = yield from self._begin(sql, bindings)
        outcome = StatementOutcome(columns=wire_columns(statement.columns))
        counted = self._answer_rows, self._answer_bytes
        try:
            if outcome.columns:
                self._count(0, len(p.encode(outcome.columns)))
            if want_rows:
                self._collect(statement, outcome)
            else:
                outcome.row_count = statement.drain()
        except StatementFailed:
            statement.close()
            self._answer_rows, self._answer_bytes = counted  # what is not sent does not count
            raise
        self._finish(outcome, changed, began)
        hit("sql.executed")
        return outcome

    def _collect(self, statement: RunningStatement, outcome: StatementOutcome) -> None:
        for rows, encoded in _encoded_batches(statement, p.json_rows):
            self._count(rows, len(encoded))
            outcome.row_batches.append(encoded)
            outcome.row_count += rows

    def _count(self, rows: int, size: int) -> None:
        """Count rows and bytes of the answer; raise if they are too many for it."""
        limits = self.limits
        if self._answer_rows + rows > limits.rows_max or self._answer_bytes + size > limits.bytes_max:
            what = f"the answer has more than {limits.rows_max:,} rows or {limits.bytes_max:,} bytes"
            raise self.runner.too_large(f"{what}: use LIMIT, or a cursor")
        self._answer_rows += rows
        self._answer_bytes += size

    def _counted_error(self, failed: StatementFailed) -> p.WireError:
        """Return an error of the answer, without its text if that is too much for the answer."""
        error = p.WireError.of(failed)
        size = len(p.encode(error))
        if self._answer_bytes + size > self.limits.bytes_max:
            return p.WireError("the answer is too large for the text of this error", error.code, error.extended_code)
        self._answer_bytes += size
        return error

    def _finish(self, outcome: StatementOutcome, changed_before: int, began: float) -> None:
        runner = self.runner
        # `changes()` alone keeps the number of an earlier statement when this one changes no rows (DDL, SELECT)
        outcome.affected_rows = runner.changes() if runner.total_changes() != changed_before else 0
        outcome.last_insert_rowid = runner.last_insert_rowid()
        outcome.seconds = time.perf_counter() - began

    def _begin(self, sql: str, bindings: Sequence[SqlValue]) -> Work[RunningStatement]:
        """Begin a statement as soon as the lock it needs is free."""
        while True:
            try:
                return self.runner.run(sql, bindings)
            except LockRefused as refused:
                try:
                    yield
                except LockTimeout:
                    raise StatementFailed(f"{refused}: gave up waiting for it", "SQLITE_BUSY") from None

    def run_statement(self, stmt: p.WireStatement) -> Work[StatementOutcome]:
        """Run a statement of a request."""
        sql = self.sql_of(stmt.sql, stmt.sql_id)
        bindings = self.bindings(sql, stmt)
        return (yield from self.execute(sql, bindings, want_rows=stmt.want_rows is not False))

    def bindings(self, sql: str, stmt: p.WireStatement) -> Sequence[SqlValue]:
        """Return the arguments of a statement."""
        args = [decode_value(value) for value in stmt.args or ()]
        if not stmt.named_args:
            return args
        named = {argument.name: decode_value(argument.value) for argument in stmt.named_args}
        return self.runner.bindings(sql, args, named)

    def sequence(self, script: str) -> Work[None]:
        """Run the statements of a script, up to the first that fails."""
        position = 0
        while position < len(script):
            piece = self.runner.describe(script[position:])
            if not piece.text:
                return
            if not piece.is_empty:
                statement = yield from self._begin(piece.text, (None,) * len(piece.parameters))
                statement.drain()
                hit("sql.sequence")
            position += len(piece.text)

    def describe(self, sql: str) -> p.DescribeResult:
        """Describe a statement."""
        description = self.runner.describe(sql)
        if description.is_empty:
            raise StatementFailed("SQL string does not contain any statement", "SQL_NO_STATEMENT")
        result = p.DescribeResult(
            params=[p.DescribedParameter(name) for name in self.runner.parameter_names(description)],
            cols=wire_columns(description.columns),
            is_explain=description.is_explain,
            is_readonly=description.is_readonly,
        )
        self._count(0, len(p.encode(result)))
        return result

    # ── batches ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def batch(self, batch: p.WireBatch) -> Work[p.BatchResult]:
        """Run the steps whose conditions hold."""
        results: list[p.StatementResult | None] = []
        errors: list[p.WireError | None] = []
        for step in batch.steps:
            result: p.StatementResult | None = None
            error: p.WireError | None = None
            if self._holds(step.condition, results):
                try:
                    result = (yield from self.run_statement(step.stmt)).wire()
                except StatementFailed as failed:
                    error = self._counted_error(failed)
                hit("sql.batch_step")
            results.append(result)
            errors.append(error)
        return p.BatchResult(results, errors)

    def _holds(self, condition: p.WireCondition | None, done: Sequence[object | None], depth: int = 0) -> bool:
        """Return whether a step is to be executed; `done` is not `None` for the earlier steps that succeeded."""
        if depth > p.CONDITION_DEPTH_MAX:
            raise StatementFailed("conditions are nested too deeply", "BATCH_COND_TOO_DEEP")
        match condition:
            case None:
                return True
            case p.CondOk(step=step) | p.CondError(step=step):
                if not 0 <= step < len(done):
                    raise StatementFailed(f"a condition names step {step}, which does not come before it", BAD_STEP)
                return (done[step] is not None) == isinstance(condition, p.CondOk)
            case p.CondNot(cond=inner):
                return not self._holds(inner, done, depth + 1)
            case p.CondAnd(conds=inner_all):
                return all(self._holds(inner, done, depth + 1) for inner in inner_all)
            case p.CondOr(conds=inner_any):
                return any(self._holds(inner, done, depth + 1) for inner in inner_any)
            case p.CondIsAutocommit():
                return self.is_autocommit

    # ── cursors ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def cursor(self, batch: p.WireBatch) -> Generator[bytes | None, None, None]:
        """Run a batch; yield lines of JSON, a fetch at a time, and `None` where it waits for the lock."""
        done: list[bool | None] = []
        for number, step in enumerate(batch.steps):
            try:
                if not self._holds(step.condition, done):
                    done.append(None)
                    continue
                yield from self._cursor_step(number, step.stmt)
                done.append(True)
            except StatementFailed as failed:
                done.append(None)
                yield p.encode_lines([p.StepError(number, p.WireError.of(failed))])

    def _cursor_step(self, number: int, stmt: p.WireStatement) -> Generator[bytes | None, None, None]:
        began, changed = time.perf_counter(), self.runner.total_changes()
        sql = self.sql_of(stmt.sql, stmt.sql_id)
        statement = yield from self._begin(sql, self.bindings(sql, stmt))
        outcome = StatementOutcome(columns=wire_columns(statement.columns))
        try:
            ready = p.encode_lines([p.StepBegin(number, outcome.columns)])
            if stmt.want_rows is False:
                statement.drain()
            else:
                for rows, encoded in _encoded_batches(statement, p.json_entries):
                    outcome.row_count += rows
                    yield ready + encoded  # the step's beginning is sent with the first rows
                    ready = b""
                    hit("sql.cursor_bunch")
        finally:
            statement.close()
        self._finish(outcome, changed, began)
        end = p.StepEnd(
            affected_row_count=outcome.affected_rows,
            last_insert_rowid=str(outcome.last_insert_rowid),
            rows_read=outcome.row_count,
            rows_written=outcome.affected_rows,
            query_duration_ms=round(outcome.seconds * 1000, 3),
        )
        yield ready + p.encode_lines([end])

    # ── pipelines ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def answer(self, request: p.StreamRequest) -> Work[p.StreamOk | p.StreamError]:
        """Run one request of a pipeline; return its response or its error."""
        try:
            return p.StreamOk((yield from self.respond(request)))
        except StatementFailed as failed:
            return p.StreamError(self._counted_error(failed))

    def respond(self, request: p.StreamRequest) -> Work[p.WireResponse]:
        """Run a request and return its response; raise `StatementFailed`."""
        match request:
            case p.ExecuteRequest(stmt=stmt):
                return p.ExecuteResponse((yield from self.run_statement(stmt)).wire())
            case p.BatchRequest(batch=batch):
                return p.BatchResponse((yield from self.batch(batch)))
            case p.SequenceRequest(sql=sql, sql_id=sql_id):
                yield from self.sequence(self.sql_of(sql, sql_id))
                return p.PlainResponse("sequence")
            case p.DescribeRequest(sql=sql, sql_id=sql_id):
                return p.DescribeResponse(self.describe(self.sql_of(sql, sql_id)))
            case p.StoreSqlRequest(sql_id=sql_id, sql=sql):
                self.sqls.store(sql_id, sql)
                return p.PlainResponse("store_sql")
            case p.CloseSqlRequest(sql_id=sql_id):
                self.sqls.close(sql_id)
                return p.PlainResponse("close_sql")
            case p.GetAutocommitRequest():
                return p.GetAutocommitResponse(self.is_autocommit)
            case p.CloseRequest():
                self.runner.rollback()
                return p.PlainResponse("close")


BAD_STEP = "BATCH_COND_BAD_STEP"


def wire_columns(columns: Columns) -> list[p.WireColumn]:
    """Return columns as JSON clients read them."""
    return [p.WireColumn(name, decltype) for name, decltype in columns]


def _encoded_batches(statement: RunningStatement, encode: RowEncoder) -> Iterator[tuple[int, bytes]]:
    """Yield (number of rows, their bytes)."""
    while rows := statement.fetch_next():
        yield len(rows), encode(rows)
        if statement.is_over:
            return
