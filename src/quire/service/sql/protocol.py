"""Hrana, the protocol of libSQL's clients, in JSON: requests and answers of versions 1, 2 and 3 as values.

HTTP (a pipeline of requests on one stream) and WebSocket (many streams, numbered requests) carry the same requests. The
versions differ in which requests exist, and every answer of an older version is a subset of the newer one's. Requests are
decoded by type: anything else is refused with the place of the mistake. Fields may be `null` where they may be missing.

Threads: any; pure functions. Importable on executors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.core.decoding import UNDECODABLE
from quire.core.errors import InvalidInput
from quire.service.sql.wire_values import WireValue, encode_rows
from quire.sqlite.statements import SqlValue, StatementFailed

CONDITION_DEPTH_MAX = 64
"""The deepest nesting of a batch step's conditions."""
ENTRIES_MAX = 100_000
"""The most requests and steps of one body or message: each has an entry in the answer, of up to about 200 bytes without its
columns, rows and error."""


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class NamedArgument(msgspec.Struct, frozen=True):
    """The value of a named parameter."""

    name: str
    value: WireValue


class WireStatement(msgspec.Struct, frozen=True):
    """A statement and its arguments."""

    sql: str | None = None
    sql_id: int | None = None
    args: list[WireValue] | None = None
    named_args: list[NamedArgument] | None = None
    want_rows: bool | None = None


class CondOk(msgspec.Struct, frozen=True, tag_field="type", tag="ok"):
    """The step succeeded."""

    step: int


class CondError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The step failed, or was skipped (W3)."""

    step: int


class CondNot(msgspec.Struct, frozen=True, tag_field="type", tag="not"):
    """The condition does not hold."""

    cond: WireCondition


class CondAnd(msgspec.Struct, frozen=True, tag_field="type", tag="and"):
    """All conditions hold."""

    conds: list[WireCondition]


class CondOr(msgspec.Struct, frozen=True, tag_field="type", tag="or"):
    """At least one condition holds."""

    conds: list[WireCondition]


class CondIsAutocommit(msgspec.Struct, frozen=True, tag_field="type", tag="is_autocommit"):
    """The stream is not in a transaction."""


WireCondition = CondOk | CondError | CondNot | CondAnd | CondOr | CondIsAutocommit


class BatchStep(msgspec.Struct, frozen=True):
    """A statement, and the condition under which it is executed."""

    stmt: WireStatement
    condition: WireCondition | None = None


class WireBatch(msgspec.Struct, frozen=True):
    """Statements that are sent together."""

    steps: list[BatchStep]


class ExecuteRequest(msgspec.Struct, frozen=True, tag_field="type", tag="execute"):
    """Execute a statement."""

    stmt: WireStatement
    stream_id: int = 0


class BatchRequest(msgspec.Struct, frozen=True, tag_field="type", tag="batch"):
    """Execute a batch."""

    batch: WireBatch
    stream_id: int = 0


class SequenceRequest(msgspec.Struct, frozen=True, tag_field="type", tag="sequence"):
    """Execute a script; its rows are dropped."""

    sql: str | None = None
    sql_id: int | None = None
    stream_id: int = 0


class DescribeRequest(msgspec.Struct, frozen=True, tag_field="type", tag="describe"):
    """Describe a statement."""

    sql: str | None = None
    sql_id: int | None = None
    stream_id: int = 0


class StoreSqlRequest(msgspec.Struct, frozen=True, tag_field="type", tag="store_sql"):
    """Store a text under a number."""

    sql_id: int
    sql: str


class CloseSqlRequest(msgspec.Struct, frozen=True, tag_field="type", tag="close_sql"):
    """Discard a stored text."""

    sql_id: int


class GetAutocommitRequest(msgspec.Struct, frozen=True, tag_field="type", tag="get_autocommit"):
    """Return whether the stream is outside a transaction."""

    stream_id: int = 0


class CloseRequest(msgspec.Struct, frozen=True, tag_field="type", tag="close"):
    """Close the stream of a pipeline."""


StreamRequest = (
    ExecuteRequest
    | BatchRequest
    | SequenceRequest
    | DescribeRequest
    | StoreSqlRequest
    | CloseSqlRequest
    | GetAutocommitRequest
    | CloseRequest
)


class PipelineBody(msgspec.Struct, frozen=True):
    """`POST /v2/pipeline`, `/v3/pipeline`."""

    requests: list[StreamRequest]
    baton: str | None = None


class CursorBody(msgspec.Struct, frozen=True):
    """`POST /v3/cursor`."""

    batch: WireBatch
    baton: str | None = None


class ExecuteBody(msgspec.Struct, frozen=True):
    """`POST /v1/execute`."""

    stmt: WireStatement


class BatchBody(msgspec.Struct, frozen=True):
    """`POST /v1/batch`."""

    batch: WireBatch


# ── requests of a WebSocket ───────────────────────────────────────────────────────────────────────────────────────────
class OpenStreamRequest(msgspec.Struct, frozen=True, tag_field="type", tag="open_stream"):
    """Open a stream under a number."""

    stream_id: int


class CloseStreamRequest(msgspec.Struct, frozen=True, tag_field="type", tag="close_stream"):
    """Close a stream; uncommitted changes are rolled back."""

    stream_id: int


class OpenCursorRequest(msgspec.Struct, frozen=True, tag_field="type", tag="open_cursor"):
    """Execute a batch whose rows are fetched."""

    stream_id: int
    cursor_id: int
    batch: WireBatch


class FetchCursorRequest(msgspec.Struct, frozen=True, tag_field="type", tag="fetch_cursor"):
    """Fetch the next entries."""

    cursor_id: int
    max_count: int


class CloseCursorRequest(msgspec.Struct, frozen=True, tag_field="type", tag="close_cursor"):
    """Close a cursor."""

    cursor_id: int


SocketRequest = (
    OpenStreamRequest
    | CloseStreamRequest
    | ExecuteRequest
    | BatchRequest
    | OpenCursorRequest
    | FetchCursorRequest
    | CloseCursorRequest
    | SequenceRequest
    | DescribeRequest
    | StoreSqlRequest
    | CloseSqlRequest
    | GetAutocommitRequest
)


class HelloMessage(msgspec.Struct, frozen=True, tag_field="type", tag="hello"):
    """The client's token."""

    jwt: str | None = None


class RequestMessage(msgspec.Struct, frozen=True, tag_field="type", tag="request"):
    """A request with its number."""

    request_id: int
    request: SocketRequest


ClientMessage = HelloMessage | RequestMessage


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class WireError(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error."""

    message: str
    code: str
    extended_code: str = ""

    @classmethod
    def of(cls, error: StatementFailed) -> WireError:
        """Return the error of a statement."""
        return cls(str(error), error.code, error.extended_code)


class WireColumn(msgspec.Struct, frozen=True):
    """A column of an answer."""

    name: str | None
    decltype: str | None = None


class StatementResult(msgspec.Struct, frozen=True):
    """The result of a statement."""

    cols: list[WireColumn]
    rows: msgspec.Raw
    affected_row_count: int
    last_insert_rowid: str
    rows_read: int
    rows_written: int
    query_duration_ms: float
    replication_index: str | None = None


class BatchResult(msgspec.Struct, frozen=True):
    """For each step its result, or its error, or neither if it was skipped."""

    step_results: list[StatementResult | None]
    step_errors: list[WireError | None]


class DescribedParameter(msgspec.Struct, frozen=True):
    """A parameter of a statement."""

    name: str | None


class DescribeResult(msgspec.Struct, frozen=True):
    """The description of a statement."""

    params: list[DescribedParameter]
    cols: list[WireColumn]
    is_explain: bool
    is_readonly: bool


class ExecuteResponse(msgspec.Struct, frozen=True, tag_field="type", tag="execute"):
    """See `ExecuteRequest`."""

    result: StatementResult


class BatchResponse(msgspec.Struct, frozen=True, tag_field="type", tag="batch"):
    """See `BatchRequest`."""

    result: BatchResult


class DescribeResponse(msgspec.Struct, frozen=True, tag_field="type", tag="describe"):
    """See `DescribeRequest`."""

    result: DescribeResult


class GetAutocommitResponse(msgspec.Struct, frozen=True, tag_field="type", tag="get_autocommit"):
    """See `GetAutocommitRequest`."""

    is_autocommit: bool


class PlainResponse(msgspec.Struct, frozen=True):
    """Success, without a result."""

    type: str


class FetchCursorResponse(msgspec.Struct, frozen=True, tag_field="type", tag="fetch_cursor"):
    """Entries of a cursor."""

    entries: list[msgspec.Raw]
    done: bool


WireResponse = (
    ExecuteResponse | BatchResponse | DescribeResponse | GetAutocommitResponse | PlainResponse | FetchCursorResponse
)


class StreamOk(msgspec.Struct, frozen=True, tag_field="type", tag="ok"):
    """A request of a pipeline that succeeded."""

    response: WireResponse


class StreamError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """A request of a pipeline that failed."""

    error: WireError


class PipelineAnswer(msgspec.Struct, frozen=True):
    """The answer to `PipelineBody`."""

    baton: str | None
    base_url: str | None
    results: list[StreamOk | StreamError]


class CursorAnswer(msgspec.Struct, frozen=True):
    """The first line of a cursor."""

    baton: str | None
    base_url: str | None


class StepBegin(msgspec.Struct, frozen=True, tag_field="type", tag="step_begin"):
    """A step is executed; rows follow."""

    step: int
    cols: list[WireColumn]


class RowEntry(msgspec.Struct, frozen=True, tag_field="type", tag="row", gc=False):
    """A row."""

    row: tuple[WireValue, ...]


class StepEnd(msgspec.Struct, frozen=True, tag_field="type", tag="step_end"):
    """The step was executed."""

    affected_row_count: int
    last_insert_rowid: str
    rows_read: int
    rows_written: int
    query_duration_ms: float


class StepError(msgspec.Struct, frozen=True, tag_field="type", tag="step_error"):
    """The step failed."""

    step: int
    error: WireError


class CursorError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The cursor failed."""

    error: WireError


class HelloOk(msgspec.Struct, frozen=True, tag_field="type", tag="hello_ok"):
    """The token was accepted."""


class HelloError(msgspec.Struct, frozen=True, tag_field="type", tag="hello_error"):
    """The token was refused."""

    error: WireError


class ResponseOk(msgspec.Struct, frozen=True, tag_field="type", tag="response_ok"):
    """The answer to a request."""

    request_id: int
    response: WireResponse


class ResponseError(msgspec.Struct, frozen=True, tag_field="type", tag="response_error"):
    """The error of a request."""

    request_id: int
    error: WireError


_encoder = msgspec.json.Encoder()
encode = _encoder.encode
encode_lines = _encoder.encode_lines

_pipeline = msgspec.json.Decoder(PipelineBody)
_cursor = msgspec.json.Decoder(CursorBody)
_execute = msgspec.json.Decoder(ExecuteBody)
_batch = msgspec.json.Decoder(BatchBody)
_message = msgspec.json.Decoder(ClientMessage)


def _read(decoder: msgspec.json.Decoder[Any], body: bytes | str) -> Any:
    try:
        return decoder.decode(body)
    except UNDECODABLE as error:
        raise InvalidInput(f"the request cannot be read: {error}", hint="see the Hrana specification") from None


def read_pipeline(body: bytes) -> PipelineBody:
    """Decode a body. Raises `InvalidInput`, as the other readers do."""
    value: PipelineBody = _read(_pipeline, body)
    _check_entries(value.requests)
    return value


def read_cursor(body: bytes) -> CursorBody:
    """Decode a body; see `read_pipeline`."""
    value: CursorBody = _read(_cursor, body)
    return value


def read_execute(body: bytes) -> ExecuteBody:
    """Decode a body; see `read_pipeline`."""
    value: ExecuteBody = _read(_execute, body)
    return value


def read_batch(body: bytes) -> BatchBody:
    """Decode a body; see `read_pipeline`."""
    value: BatchBody = _read(_batch, body)
    _check_entries([value])
    return value


def read_message(text: bytes | str) -> ClientMessage:
    """Decode a message; see `read_pipeline`."""
    value: ClientMessage = _read(_message, text)
    if isinstance(value, RequestMessage):
        _check_entries([value.request])
    return value


def _check_entries(requests: Sequence[object]) -> None:
    """Refuse more requests and steps than an answer can have."""
    steps = (len(request.batch.steps) for request in requests if isinstance(request, BatchRequest | BatchBody))
    if (count := len(requests) + sum(steps)) > ENTRIES_MAX:
        hint = "send several requests, or a script as `sequence`"
        raise InvalidInput("too many statements in one request", hint=hint, count=count, max=ENTRIES_MAX)


def json_rows(rows: Sequence[Sequence[SqlValue]]) -> bytes:
    """Return rows of an answer, without the surrounding brackets."""
    return encode(encode_rows(rows))[1:-1]


def json_entries(rows: Sequence[Sequence[SqlValue]]) -> bytes:
    """Return rows of a cursor, one line each."""
    return encode_lines([*map(RowEntry, encode_rows(rows))])
