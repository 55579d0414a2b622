"""The steps of a simulated life (what users, jobs, upkeep, a second process and the clock do to a store), and the model that
the store is compared with.

The model is every database by name with its contents. It is a value, so the model before a step stays available. A step that
changes something first states the model after it (`_change`); after an error either of the two may hold, except for `DiskFull`,
which in every engine means that nothing was done. Arguments are drawn before anything is done, so that the same seed always
does the same. `observe` reads everything that the model has, through the public API only, and returns the differences. Reads of
damaged bytes may be refused with a typed error; they never return other data.

Threads: one, the life's. Used by `quire.testing.simulation`.
"""

from __future__ import annotations

import os
import pickle
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import quire
from quire.core.errors import DiskFull, ObjectStoreUnavailable, QuireError
from quire.manifest.check import check
from quire.manifest.records import RetentionRecord
from quire.store.store import Store
from quire.testing.clock import ManualClock

State = dict[Any, bytes] | tuple[bytes, ...]

TABLE = "create table if not exists t(k integer primary key, v blob)"


@dataclass(frozen=True)
class ModelDatabase:
    """One database: its newest state, and its versions that can be read."""

    kind: str
    state: State
    snapshots: dict[str, State] = field(default_factory=dict)
    """Name → state, oldest first."""
    epochs: dict[int, State] = field(default_factory=dict)
    """Versions of a page database that may be read by time travel."""
    keep_last: int = 0
    """Retention: how many snapshots are kept; 0 for all."""
    created_as: str = ""
    """Its first name, which no other database of the run has."""

    def rows(self) -> dict[Any, bytes]:
        """Return a copy of the state, which must be rows or pairs."""
        assert isinstance(self.state, dict), self.kind
        return dict(self.state)

    def retained(self) -> ModelDatabase:
        """Return the database as it is after retention was applied."""
        if not self.keep_last:
            return self
        return replace(self, snapshots=dict(list(self.snapshots.items())[-self.keep_last :]))


Model = dict[str, ModelDatabase]


def read_state(store: Store, name: str, kind: str, at: str | int | None = None) -> State:
    """Read the contents of a database, or of a version of it."""
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
    """Read the rows of the table; none if it does not exist yet."""
    if not connection.execute("select 1 from sqlite_master where name = 't'").fetchall():
        return {}
    return dict(connection.execute("select k, v from t"))


def observe(store: Store, model: Model, *, damaged: bool = False) -> list[str]:
    """Return everything in which a store differs from the model. With `damaged`, typed errors are not findings."""
    findings: list[str] = []
    names = {info.name for info in store.databases()}
    if damaged:
        with store.manifest.read() as txn:  # damaged databases are left out of lists and reported (docs/decisions/028)
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
        policy = store.manifest.retention.get(name)
        if (policy.keep_last if policy is not None else 0) != expected.keep_last:
            findings.append(f"{name} keeps other snapshots than {expected.keep_last}: {policy}")


def _is_lent(info: Any) -> bool:
    """Return whether a snapshot is the store's own: kept for time travel, or for a reader."""
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
    """Return whether an error is typed: one of quire's, or one of SQLite's (apsw, which only `quire.sqlite` imports)."""
    return isinstance(error, QuireError) or type(error).__module__ == "apsw"


def difference(actual: State, expected: State) -> str:
    """Describe briefly how two states differ."""
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


DATABASES_MAX = 8
KEYS = 40
_LENGTH = struct.Struct("<I")


class StepInterrupted(Exception):
    """A fault interrupted a step: the store is in the state before or after it."""


class Steps:
    """A store, its model, and the steps that can be run on them."""

    choices: ClassVar[tuple[tuple[int, Callable[[Any], None]], ...]]
    """(weight, step)."""

    def __init__(
        self,
        store: Store,
        model: Model,
        clock: ManualClock,
        draw: random.Random,
        log: list[str],
        reader: Reader,
        life: int,
        is_damaged: Callable[[], bool] = lambda: False,
    ) -> None:
        """`life` is its number, for names that no other life uses; `is_damaged` returns whether bytes may be damaged by now."""
        self.store = store
        self.model = model
        self.possible: list[Model] = [model]
        """What the store may hold: the model, or the models before and after the step in progress."""
        self.findings: list[str] = []
        self._clock = clock
        self._draw = draw
        self._log = log
        self._reader = reader
        self._committed: dict[str, list[State]] = {name: [db.state] for name, db in model.items()}
        """States of page databases in this life, oldest first: what a second process may see."""
        self._held: tuple[str, Any, State] | None = None
        """A connection with an open read transaction, and the state that it must continue to see."""
        self._next = 1_000 * life
        self._is_damaged = is_damaged

    def run(self, steps: int) -> None:
        """Run this many steps, or until there is a finding."""
        for _ in range(steps):
            step = self._draw.choices([step for _, step in self.choices], [weight for weight, _ in self.choices])[0]
            self._log.append(step.__name__)
            step(self)
            if self.findings:
                return
        self.release_reader()

    # ── how a step changes the model ──────────────────────────────────────────────────────────────────────────────────
    def _change(self, after: Model, act: Callable[[], object], what: str = "") -> bool:
        """Call `act`, after which the model is `after`. Return `False` if the disk was full and nothing was done."""
        self._log[-1] += f" {what}"
        self.possible = [self.model, after]
        try:
            act()
        except Exception as error:
            self._log[-1] += f": {type(error).__name__}: {error}"[:160]
            if not is_refusal(error):
                raise
            if not _is_full(error):
                raise StepInterrupted from error
            self.possible = [self.model]
            return False
        self.model = after
        self.possible = [after]
        return True

    def _work(self, act: Callable[[], object], what: str = "") -> None:
        """Call `act`, which changes no contents. An error ends the life, except a full disk or an unavailable object store."""

        def unless_unavailable() -> None:
            try:
                act()
            except ObjectStoreUnavailable as error:
                self._log[-1] += f": {error}"[:160]

        self._change(self.model, unless_unavailable, what)

    def _with(self, name: str, database: ModelDatabase) -> Model:
        return {**self.model, name: database}

    def _any(self, *kinds: str) -> str | None:
        names = [name for name in sorted(self.model) if self.model[name].kind in kinds]
        return self._draw.choice(names) if names else None

    def _new_name(self, stem: str) -> str:
        self._next += 1
        return f"{stem}{self._next}"

    def _bytes(self, most: int) -> bytes:
        return self._draw.randbytes(self._draw.randint(0, most) if self._draw.random() < 0.8 else most * 10)

    # ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def create(self) -> None:
        kind = self._draw.choice(("pages", "stream", "lsm"))
        if len(self.model) >= DATABASES_MAX:
            return
        name = self._new_name(kind)
        self._change(
            self._with(name, ModelDatabase(kind, () if kind == "stream" else {}, created_as=name)),
            lambda: self.store.create(name, kind),
            name,
        )

    def drop(self) -> None:
        name = self._any("pages", "stream", "lsm")
        if name is None or len(self.model) < 4 or self._draw.random() < 0.5:
            return
        self.release_reader()
        after = {other: database for other, database in self.model.items() if other != name}
        self._change(after, lambda: self.store.drop(name, snapshots=True), name)

    def rename(self) -> None:
        name = self._any("pages", "stream", "lsm")
        if name is None:
            return
        new = self._new_name("renamed")
        self.release_reader()
        after = {new if other == name else other: database for other, database in self.model.items()}
        if self._change(after, lambda: self.store.rename(name, new), f"{name} to {new}") and name in self._committed:
            self._committed[new] = self._committed.pop(name)

    def write_rows(self) -> None:
        """Write several rows in one transaction, occasionally rolled back, sometimes larger than a segment's initial size."""
        name = self._any("pages")
        if name is None:
            return
        database = self.model[name]
        rows = database.rows()
        changes: list[tuple[int, bytes | None]] = []
        for _ in range(self._draw.randint(1, 12)):
            key = self._draw.randrange(KEYS)
            value = None if self._draw.random() < 0.2 else self._bytes(900)
            changes.append((key, value))
            if value is None:
                rows.pop(key, None)
            else:
                rows[key] = value
        rolls_back = self._draw.random() < 0.1
        epoch: list[int] = []

        def act() -> None:
            with closing(self.store.sqlite(name)) as connection:
                connection.execute("begin immediate")
                connection.execute(TABLE)
                for key, value in changes:
                    if value is None:
                        connection.execute("delete from t where k = ?", (key,))
                    else:
                        connection.execute("insert or replace into t values (?, ?)", (key, value))
                connection.execute("rollback" if rolls_back else "commit")
                epoch.append(int(connection.pragma("quire_epoch")))

        if rolls_back:
            self._work(act, f"{name}, rolled back")
        elif self._change(self._with(name, replace(database, state=rows)), act, name):
            epochs = {**dict(list(database.epochs.items())[-20:]), epoch[0]: rows}
            self.model = self._with(name, replace(database, state=rows, epochs=epochs))
            self.possible = [self.model]
            self._committed.setdefault(name, [{}]).append(rows)

    def append_records(self) -> None:
        name = self._any("stream")
        if name is None:
            return
        database = self.model[name]
        records = [self._bytes(400) for _ in range(self._draw.randint(1, 8))]
        after = self._with(name, replace(database, state=(*database.state, *records)))
        self._change(after, lambda: self.store.stream(name).append(records).result(), f"{name}, {len(records)}")

    def write_pairs(self) -> None:
        name = self._any("lsm")
        if name is None:
            return
        database = self.model[name]
        batch = {
            b"%03d" % self._draw.randrange(KEYS * 3): None if self._draw.random() < 0.2 else self._bytes(300)
            for _ in range(self._draw.randint(1, 10))
        }
        pairs = {key: value for key, value in {**database.rows(), **batch}.items() if value is not None}
        self._change(self._with(name, replace(database, state=pairs)), lambda: self.store.kv(name).write(batch), name)

    # ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def snapshot(self) -> None:
        name = self._any("pages", "lsm")
        if name is None or len(self.model[name].snapshots) >= 6:
            return
        snapshot, database = self._new_name("s"), self.model[name]
        self._clock.advance(0.001)  # snapshots are ordered by time
        after = replace(database, snapshots={**database.snapshots, snapshot: database.state})
        self._change(self._with(name, after), lambda: self.store.snapshot(name, snapshot), f"{name}@{snapshot}")

    def drop_snapshot(self) -> None:
        name = self._any("pages", "lsm")
        if name is None or not self.model[name].snapshots:
            return
        database = self.model[name]
        snapshot = self._draw.choice(sorted(database.snapshots))
        left = {other: state for other, state in database.snapshots.items() if other != snapshot}
        after = self._with(name, replace(database, snapshots=left))
        undoable, label = self._draw.random() < 0.5, f"{name}@{snapshot}"
        dropped = self._change(after, lambda: self.store.drop_snapshot(name, snapshot, undoable=undoable), label)
        if dropped and undoable and self._draw.random() < 0.5:
            before = self._with(name, database)
            self._change(before, lambda: self.store.undrop_snapshot(name, snapshot), f"{label}, back")

    def fork(self) -> None:
        name = self._any("pages", "lsm")
        if name is None or len(self.model) >= DATABASES_MAX:
            return
        database, new = self.model[name], self._new_name("fork")
        at = self._draw.choice([None, *sorted(database.snapshots)])
        state = database.state if at is None else database.snapshots[at]
        after = self._with(new, ModelDatabase(database.kind, state, created_as=new))
        self._change(after, lambda: self.store.fork(name, new, at=at), f"{name}@{at} to {new}")
        self._committed[new] = [state]

    def travel(self) -> None:
        """Read a version that was committed earlier: it is as it was, or refused as gone."""
        name = self._any("pages")
        if name is None or not self.model[name].epochs:
            return
        epoch, state = self._draw.choice(list(self.model[name].epochs.items()))
        try:
            actual = read_state(self.store, name, "pages", epoch)
        except QuireError:
            return
        if actual != state:
            self.findings.append(f"{name} at epoch {epoch} reads wrong: {difference(actual, state)}")

    def retain(self) -> None:
        """Set a retention policy, which `maintain` applies."""
        name = self._any("pages")
        if name is None:
            return
        keep = self._draw.randint(1, 3)
        policy = RetentionRecord(keep_last=keep, keep_named=False)
        after = self._with(name, replace(self.model[name], keep_last=keep))
        self._change(after, lambda: self.store.manifest.retention.set(name, policy), f"{name} keeps {keep}")

    def hold_reader(self) -> None:
        """Open a read transaction that stays open during later steps."""
        self.release_reader()
        name = self._any("pages")
        if name is None:
            return
        connection = self.store.sqlite(name)
        connection.execute("begin")
        connection.execute("select count(*) from sqlite_master").fetchall()
        self._held = name, connection, self.model[name].state

    def release_reader(self) -> None:
        if self._held is None:
            return
        (name, connection, state), self._held = self._held, None
        with closing(connection):
            actual = read_rows(connection)
        if actual != state:
            self.findings.append(f"an open reader of {name} sees other data: {difference(actual, state)}")

    # ── jobs and upkeep ───────────────────────────────────────────────────────────────────────────────────────────────
    def checkpoint(self) -> None:
        if name := self._any("pages"):
            self._work(lambda: self.store.checkpoint(name, runner="threads"), name)

    def merge(self) -> None:
        if name := self._any("pages"):
            self._work(lambda: self.store.merge(name, runner="threads"), name)

    def flush_or_compact(self) -> None:
        if name := self._any("lsm"):
            kv = self.store.kv(name)
            self._work(kv.flush if self._draw.random() < 0.6 else kv.compact, name)

    def move_segments(self) -> None:
        """Seal, compress, upload, evict or hydrate the segments of a stream."""
        if name := self._any("stream"):
            stream = self.store.stream(name)
            move = self._draw.choice(
                (stream.seal, stream.compress, stream.upload, stream.evict, stream.hydrate, stream.tick)
            )
            self._work(move, f"{name} {move.__name__}")

    def maintain(self) -> None:
        """Run upkeep: retention, leases, jobs, deletions."""
        after = {name: database.retained() for name, database in self.model.items()}
        self._change(after, self.store.maintain)

    def sweep(self) -> None:
        self._work(lambda: self.store.heavy.sweep(delete=True, runner="threads", grace_seconds=0.0))

    def verify(self) -> None:
        """Verify every byte: nothing may be found."""
        self._work(lambda: self.store.heavy.verify(runner="threads"))
        if (damaged := self.store.heavy.damaged()) and not self._is_damaged():
            self.findings.append(f"verification found damage: {damaged[:3]}")
        with self.store.manifest.read() as txn:
            self.findings += [f"the manifest breaks a rule: {problem}" for problem in check(txn) if not problem.leak]

    def advance(self) -> None:
        self.release_reader()  # leases are renewed in real time, which this clock does not follow
        self._clock.advance(self._draw.choice((1.0, 30.0, 90.0, 4_000.0)))

    def jump(self) -> None:
        self._clock.jump(self._draw.choice((-86_400.0, -3_600.0, -5.0, 5.0, 3_600.0, 86_400.0)))

    def read_beside(self) -> None:
        """Read from a second process: each database must be as it was at some moment of this life."""
        for name, state in self._reader.read().items():
            if name in self._committed and name in self.model and state not in self._committed[name]:
                self.findings.append(f"a second process reads {name} as it never was ({len(state)} rows)")

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def drop_everything(self, root: str) -> list[str]:
        """Drop all databases, run maintenance, and return what is left of their bytes."""
        self.release_reader()
        for name in sorted(self.model):
            self.store.drop(name, snapshots=True)
        self.model = {}
        self.possible = [{}]
        self._clock.advance(30 * 86_400.0)  # a clock that was set back delays every grace period by as much
        for _ in range(6):
            self._clock.advance(7_200.0)
            self.store.maintain()
        # Only a sweep finds objects that nothing names. Unfinished files and local files of databases must be removed by upkeep
        # alone, and a sweep would remove them too: look for them before the sweep.
        left = [path for path in leftovers(root) if path.startswith(("store/", "bucket/.tmp/"))]
        self.store.heavy.sweep(delete=True, runner="threads", grace_seconds=0.0)
        return [f"left behind by upkeep: {path}" for path in left] + [
            f"left behind by a sweep: {path}" for path in leftovers(root)
        ]


def leftovers(root: str) -> list[str]:
    """Return the files of databases and the objects below a simulated machine's root."""
    paths: list[str] = []
    for part in ("store/pages", "store/streams", "store/lsm", "store/objects", "store/scratch", "bucket"):
        for folder, _, files in os.walk(os.path.join(root, part)):
            paths += [os.path.relpath(os.path.join(folder, file), root) for file in files]
    return [path for path in sorted(paths) if "/owner/" not in path]


def _is_full(error: BaseException | None) -> bool:
    """Return whether the disk was full, as reported by an engine or by SQLite (`SQLITE_FULL`)."""
    return isinstance(error, DiskFull) or type(error).__name__ == "FullError"


Steps.choices = (
    (6, Steps.create), (1, Steps.drop), (1, Steps.rename), (24, Steps.write_rows), (14, Steps.append_records),
    (14, Steps.write_pairs), (5, Steps.snapshot), (2, Steps.drop_snapshot), (3, Steps.fork), (3, Steps.travel),
    (1, Steps.retain), (3, Steps.hold_reader), (5, Steps.checkpoint), (2, Steps.merge), (4, Steps.flush_or_compact),
    (8, Steps.move_segments), (5, Steps.maintain), (1, Steps.sweep), (1, Steps.verify), (3, Steps.advance),
    (2, Steps.jump), (1, Steps.read_beside),
)  # fmt: skip


class Reader:
    """A second process that opens the store for reading on request."""

    def __init__(self, path: str) -> None:
        """Fork the process. REQUIRES that this process has no threads yet."""
        asked, self._asking = os.pipe()
        answered, answering = os.pipe()
        if os.fork() == 0:
            os.close(self._asking)
            os.close(answered)
            try:
                while os.read(asked, 1):
                    raw = pickle.dumps(_read_all(path))
                    os.write(answering, _LENGTH.pack(len(raw)) + raw)
            finally:
                os._exit(0)
        os.close(asked)
        os.close(answering)
        self._answered = os.fdopen(answered, "rb")

    def read(self) -> dict[str, State]:
        """Return the page databases as the second process sees them now."""
        os.write(self._asking, b"?")
        (size,) = _LENGTH.unpack(self._answered.read(_LENGTH.size))
        answer = pickle.loads(self._answered.read(size))
        assert isinstance(answer, dict), answer
        return answer


class NoReader(Reader):
    """Stands for a reader where there is no second process."""

    def __init__(self) -> None:
        pass

    def read(self) -> dict[str, State]:
        return {}


def _read_all(path: str) -> dict[str, State] | str:
    states: dict[str, State] = {}
    try:
        with quire.open(path, "r") as store:
            for info in store.databases():
                if info.kind.name == "PAGES":
                    with suppress(QuireError):  # the database was dropped in the meantime
                        states[info.name] = read_state(store, info.name, "pages")
    except Exception as error:
        return repr(error)
    return states
