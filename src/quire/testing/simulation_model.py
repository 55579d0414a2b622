"""What a simulated store must hold: databases, their versions, and what a faulty step may have left in doubt.

Terms
  state     the contents of a database: rows of a table by key, pairs by key, or the payloads of a stream in order
  model     every database by name; a value: steps make a new one, so that the one before a step is still there
  finding   a sentence about something that is not as promised

Rules
  1. `observe` reads through the public API only, everything that the model knows, and says what differs.
  2. Bytes that were damaged may be refused with a typed error; they are never answered with other data.

Thread: one. Used by `quire.testing.simulation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from quire.core.errors import QuireError
from quire.store.store import Store

State = dict[Any, bytes] | tuple[bytes, ...]

TABLE = "create table if not exists t(k integer primary key, v blob)"


@dataclass(frozen=True)
class ModelDatabase:
    """One database: its newest state, and the versions of it that can be asked for."""

    kind: str
    state: State
    snapshots: dict[str, State] = field(default_factory=dict)
    """By name, the oldest first."""
    epochs: dict[int, State] = field(default_factory=dict)
    """Versions of a page database that time travel may be asked for."""
    keep_last: int = 0
    """Retention: how many snapshots stay; 0 for all."""

    def rows(self) -> dict[Any, bytes]:
        """A copy of a state that is rows or pairs."""
        assert isinstance(self.state, dict), self.kind
        return dict(self.state)

    def retained(self) -> ModelDatabase:
        """What is left when retention has been applied."""
        if not self.keep_last:
            return self
        return replace(self, snapshots=dict(list(self.snapshots.items())[-self.keep_last :]))


Model = dict[str, ModelDatabase]


def read_state(store: Store, name: str, kind: str, at: str | int | None = None) -> State:
    """The contents of a database, or of a version of it."""
    if kind == "pages":
        with closing(store.sqlite(name, at=at)) as connection:
            return read_rows(connection)
    if kind == "lsm":
        if at is None:
            return dict(store.kv(name).scan())
        with store.kvs.open_snapshot(name, at) as frozen:
            return dict(frozen.scan())
    return tuple(record.payload for record in store.stream(name).read())


def read_rows(connection: Any) -> State:
    """The rows of the table, none if it was not made yet."""
    if not connection.execute("select 1 from sqlite_master where name = 't'").fetchall():
        return {}
    return dict(connection.execute("select k, v from t"))


def observe(store: Store, model: Model, *, damaged: bool = False) -> list[str]:
    """Everything in which a store differs from the model. `damaged`: typed refusals are no finding (rule 2)."""
    findings: list[str] = []
    names = {info.name for info in store.databases()}
    if damaged:
        with store.manifest.read() as txn:  # left out and reported, instead of refused (decision 028)
            names.update(name for name in txn.damaged_databases().values() if name)
    if names != set(model):
        findings.append(f"databases are {sorted(names)}, not {sorted(model)}")
    for name in sorted(names & set(model)):
        _observe_database(store, name, model[name], damaged, findings)
    return findings


def _observe_database(store: Store, name: str, expected: ModelDatabase, damaged: bool, findings: list[str]) -> None:
    versions: list[tuple[str | int | None, State]] = [(None, expected.state), *expected.snapshots.items()]
    for at, state in versions:
        label = name if at is None else f"{name}@{at}"
        with _refusing(label, damaged, findings):
            actual = read_state(store, name, expected.kind, at)
            if actual != state:
                findings.append(f"{label} ({expected.kind}) reads wrong: {difference(actual, state)}")
    with _refusing(f"snapshots of {name}", damaged, findings):
        listed = {info.name for info in store.manifest.snapshots.of(name) if info.name and not _is_lent(info)}
        if listed != set(expected.snapshots):
            findings.append(f"{name} has snapshots {sorted(listed)}, not {sorted(expected.snapshots)}")


def _is_lent(info: Any) -> bool:
    """Whether a snapshot is the store's own: kept for time travel, or lent to a reader."""
    return bool(info.tags)


@contextmanager
def _refusing(label: str, damaged: bool, findings: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_refusal(error):
            findings.append(f"{label} fails with an untyped error: {error!r}")
        elif not damaged:
            findings.append(f"{label} cannot be read: {type(error).__name__}: {error}")


def is_refusal(error: BaseException) -> bool:
    """Whether a store refused: with an error of its own, or one of SQLite's (apsw, which only `quire.sqlite` imports)."""
    return isinstance(error, QuireError) or type(error).__module__ == "apsw"


def difference(actual: State, expected: State) -> str:
    """Where two states part, in a few words."""
    if isinstance(actual, tuple) and isinstance(expected, tuple):
        if actual == expected[-len(actual) :] and actual:
            return f"the first {len(expected) - len(actual)} of {len(expected)} records are missing"
        if actual == expected[: len(actual)]:
            return f"the last {len(expected) - len(actual)} of {len(expected)} records are missing"
        return f"{len(actual)} records instead of {len(expected)}, or other ones"
    assert isinstance(actual, dict)
    assert isinstance(expected, dict)
    missing, added = expected.keys() - actual.keys(), actual.keys() - expected.keys()
    changed = [key for key in actual.keys() & expected.keys() if actual[key] != expected[key]]
    return f"missing {sorted(missing)[:5]}, added {sorted(added)[:5]}, changed {sorted(changed)[:5]}"
