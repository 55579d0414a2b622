"""Pipelines with an idempotency key are executed once, however often they are sent, even if the server is killed in between.

The pipeline is one transaction: key and answer are written by the transaction that has its effects, into the table
`quire_idempotency` of the same database. So no crash leaves one without the other, and there is no second log that must agree
with the first (decision 049). A repeated pipeline finds the key and gets the first answer. A key belongs to its pipeline: with
another one it is refused. Keys are kept for a day.

BEGIN, COMMIT and ROLLBACK of the client are savepoints of that transaction. A pipeline in which every request failed leaves
neither effects nor a key, and may be sent again. So does one whose transaction SQLite has rolled back (`OR ROLLBACK`,
`RAISE(ROLLBACK)`, an interrupted write, a full disk): the requests after it fail.

Threads: as a session.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence

from quire.durable.failpoints import hit
from quire.service.sql import protocol as p
from quire.service.sql.session import SqlSession, Work
from quire.sqlite.statements import RunningStatement, SqlValue, StatementFailed, first_word

TABLE = "quire_idempotency"
KEEP_MS = 24 * 3600 * 1000
ANSWER_BYTES_MAX = 1 << 20
KEY_CHARACTERS_MAX = 128
FORGET_ROWS = 64
"""Expired keys that are deleted with each new one."""

_CREATE = (
    f"create table if not exists {TABLE}"
    "(key text primary key, digest blob not null, answer blob not null, at_ms integer not null) without rowid"
)
_INDEX = f"create index if not exists {TABLE}_at_ms on {TABLE}(at_ms)"
_FORGET = (
    f"delete from {TABLE} where key in (select key from {TABLE} where at_ms < ? order by at_ms limit {FORGET_ROWS})"
)
_COMMENT = re.compile(r"--[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_TO_SAVEPOINT = re.compile(r"[\s;\ufeff]*rollback(?:\s+transaction\b.*)?\s+to\b", re.IGNORECASE | re.DOTALL)
_NESTED = "quire_client"


class NestedSession(SqlSession):
    """A session inside a transaction of the server: the client's transactions are savepoints."""

    _is_nested = False

    @property
    def is_autocommit(self) -> bool:
        """Whether the client is outside a transaction."""
        return not self._is_nested or self.runner.is_autocommit()

    def _begin(self, sql: str, bindings: Sequence[SqlValue]) -> Work[RunningStatement]:
        # SQLite has rolled back the transaction of the pipeline: from here on each statement would be committed by itself,
        # without the key.
        if self.runner.is_autocommit():
            what = "an earlier statement has rolled back the whole pipeline, which is one transaction: nothing was done"
            raise StatementFailed(what, "SQLITE_ABORT", "SQLITE_ABORT_ROLLBACK")
        word = first_word(sql)
        if word == "begin":
            if self._is_nested:
                raise StatementFailed("cannot start a transaction within a transaction", "SQLITE_ERROR")
            sql, self._is_nested = f"savepoint {_NESTED}", True
        elif word in ("commit", "end", "rollback") and not _TO_SAVEPOINT.match(_COMMENT.sub(" ", sql)):
            if not self._is_nested:
                raise StatementFailed(f"cannot {word} - no transaction is active", "SQLITE_ERROR")
            if word == "rollback":
                yield from super()._begin(f"rollback to {_NESTED}", ())
            sql, self._is_nested = f"release {_NESTED}", False
        return (yield from super()._begin(sql, bindings))

    def close_nested(self) -> Work[None]:
        """Roll back the transaction that the client left open."""
        if self._is_nested:
            yield from self._begin("rollback", ())


def keyed_pipeline(
    session: SqlSession, key: str, requests: Sequence[p.StreamRequest], now_ms: Callable[[], int]
) -> Work[bytes]:
    """Execute a pipeline once and return its encoded answer."""
    if not 1 <= len(key) <= KEY_CHARACTERS_MAX:
        raise StatementFailed(
            f"an idempotency key must have 1 to {KEY_CHARACTERS_MAX} characters", "IDEMPOTENCY_KEY_INVALID"
        )
    digest = hashlib.sha256(p.encode(requests)).digest()
    # Immediate: the key is looked up with the write lock held, so of two equal pipelines the second finds the key of
    # the first.
    yield from session.execute("begin immediate")
    if (kept := _kept(session, key, now_ms())) is not None:
        session.runner.rollback()
        if kept[0] != digest:
            raise StatementFailed("this idempotency key belongs to another pipeline", "IDEMPOTENCY_KEY_REUSED")
        return kept[1]
    nested = NestedSession(session.runner, session.limits, session.sqls)
    results = []
    for request in requests:
        results.append((yield from nested.answer(request)) if not isinstance(request, p.CloseRequest) else _CLOSED)
        hit("sql.keyed_request")
    answer = p.encode(p.PipelineAnswer(None, None, results))
    if session.is_autocommit:  # an error has rolled back the whole transaction
        return answer
    yield from nested.close_nested()
    if not any(isinstance(result, p.StreamOk) and result is not _CLOSED for result in results):
        session.runner.rollback()
        return answer
    yield from _keep(session, key, digest, answer, now_ms())
    hit("sql.keyed_commit")
    yield from session.execute("commit")
    return answer


_CLOSED = p.StreamOk(p.PlainResponse("close"))


def _kept(session: SqlSession, key: str, now_ms: int) -> tuple[bytes, bytes] | None:
    """Return (digest, answer) of an executed pipeline; `None` if there is none."""
    runner = session.runner
    # The table is created with the first key that is kept: looking up a key must not change the database.
    there = runner.run("select 1 from sqlite_schema where type = 'table' and name = ?", (TABLE,)).rows(1)
    if not there:
        return None
    query = f"select digest, answer from {TABLE} where key = ? and at_ms >= ?"
    for digest, answer in runner.run(query, (key, now_ms - KEEP_MS)).rows(2):
        if isinstance(digest, bytes) and isinstance(answer, bytes):
            return digest, answer
    return None


def _keep(session: SqlSession, key: str, digest: bytes, answer: bytes, now_ms: int) -> Work[None]:
    if len(answer) > ANSWER_BYTES_MAX:
        session.runner.rollback()
        what = f"the answer is larger than {ANSWER_BYTES_MAX:,} bytes, and cannot be kept with an idempotency key"
        raise StatementFailed(f"{what}: nothing was done", "RESPONSE_TOO_LARGE")
    statements: list[tuple[str, tuple[SqlValue, ...]]] = [
        (_CREATE, ()),
        (_INDEX, ()),
        (_FORGET, (now_ms - KEEP_MS,)),
        (f"insert or replace into {TABLE} values (?, ?, ?, ?)", (key, digest, answer, now_ms)),
    ]
    for sql, bindings in statements:
        yield from session.execute(sql, bindings)
