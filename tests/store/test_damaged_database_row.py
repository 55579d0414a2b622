"""A damaged row of one database leaves the others usable: commands name it, and none of its data is deleted (decision
028)."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.core.errors import ManifestDamaged
from quire.jobs.leftovers import has_dropped_streams
from quire.manifest import tables as t
from quire.manifest.records import JobState, RetentionRecord
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.manifest.test_check import Vandal
from tests.service.web.http_client import HttpClient, web_served
from tests.store.test_closed_databases import KINDS, YEAR, clean_up, files, fill, flip, open_store

DAMAGED = ("sqlite1", "stream1", "kv1")
OTHERS = ["child", "kv2", "kv3", "sqlite2", "sqlite3", "stream2", "stream3"]
START_MS = 1_750_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_MS)


@pytest.fixture
def root(tmp_path: Path, clock: ManualClock) -> Path:
    """A directory with a store: three databases of each kind and a fork; then one row of each kind is damaged."""
    with open_store(tmp_path, clock) as store:
        ids = {f"{kind}{number}": fill(store, kind, f"{kind}{number}") for kind in KINDS for number in (1, 2, 3)}
        store.fork("sqlite1", "child")
        store.feed.register(name="follower")
    vandal = Vandal(str(tmp_path / "store" / "manifest.lmdb"))
    for name in DAMAGED:
        flip(vandal, t.DB, ids[name])
    vandal.done()
    return tmp_path


@pytest.fixture
def owner(root: Path, clock: ManualClock) -> Iterator[Store]:
    with open_store(root, clock) as store:
        yield store


def run(root: Path, *arguments: str) -> tuple[int, str, str]:
    """The exit code, output and errors of one command on the store."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main.run([*arguments, "--store", str(root / "store")])
    return code, out.getvalue(), err.getvalue()


READS = {
    "ls": ("ls",),
    "info": ("info",),
    "tree": ("tree", "--sizes"),
    "stats": ("stats",),
    "why": ("why", "sqlite2"),
    "metrics": ("metrics",),
    "audit": ("audit",),
    "jobs": ("jobs", "ls"),
    "namespaces": ("namespace", "ls"),
    "checkpoint, dry": ("checkpoint", "--all", "--dry-run"),
    "snapshot show": ("snapshot", "show", "sqlite2", "first"),
    "manifest verify": ("manifest", "verify"),
}
WRITES = {
    "checkpoint": ("checkpoint", "--all"),
    "snapshot": ("snapshot", "create", "sqlite2", "second"),
    "put": ("kv", "put", "kv2", "key", "new"),
    "append": ("stream", "append", "stream2", "record"),
    "gc": ("gc",),
}


FAILED = {"gc": 1}
"""Commands whose exit code reports that a job failed: the round includes one of a damaged database."""
SHOWN = {"jobs": ["sqlite1"]}
"""Commands that read only the rows they show, and the damaged databases among these."""


@pytest.mark.parametrize("command", [*READS, *WRITES])
def test_a_command_works_for_the_others_and_names_the_damaged_ones(root: Path, command: str) -> None:
    code, out, err = run(root, *(READS | WRITES)[command])
    assert code == FAILED.get(command, 0), err
    named = SHOWN.get(command, DAMAGED)
    for name in named:
        assert name in err
    assert "quire manifest check" in err
    if command == "tree":
        assert "sqlite1  damaged; see `quire manifest check`" in out
    if command == "stats":
        assert "damaged databases " in out
        assert "dropped databases" not in out


def test_ls_lists_exactly_the_others(root: Path) -> None:
    _, out, _ = run(root, "ls")
    assert [line.split()[0] for line in out.splitlines()[1:]] == OTHERS
    (child,) = [line for line in out.splitlines() if line.startswith("child")]
    assert child.endswith("sqlite1"), "a parent with a damaged row is not shown as dropped"


def test_the_feed_continues(root: Path) -> None:
    code, out, _ = run(root, "feed", "tail", "--from", "1")
    assert code == 0
    assert "RegisterDb" in out
    assert "follower" in run(root, "feed", "cursors")[1]


def test_verify_reads_the_others_and_reports_only_the_rows(root: Path) -> None:
    code, out, err = run(root, "verify")
    assert code == 1
    assert err.count("verify.file_damaged kind='manifest'") == len(DAMAGED)
    assert "db_names is wrong" not in err, "the index of names is correct; the rows it refers to are not"
    assert re.search(r"^altered +0$", out, re.MULTILINE)


def test_every_other_database_is_read_and_written(owner: Store) -> None:
    with owner.sqlite("sqlite2") as connection:
        connection.execute("insert into t values (1)")
        assert connection.execute("select count(*) from t").fetchone() == (2,)
    stream = owner.stream("stream2")
    stream.append(b"new").result()
    owner.kv("kv2").put(b"key", b"new")
    assert owner.kv("kv2").get(b"key") == b"new"
    with owner.sqlite("child") as connection:
        assert connection.execute("select count(*) from t").fetchone() == (1,)
    for use in (lambda: owner.sqlite("sqlite1"), lambda: owner.stream("stream1"), lambda: owner.kv("kv1")):
        with pytest.raises(ManifestDamaged, match=r"the database is closed.*check --repair"):
            use()


def test_the_dashboard_and_the_metrics_name_them(root: Path) -> None:
    with web_served(root / "store") as (_, web):
        client = HttpClient(web.address)
        overview = client.get("/api/overview").json
        assert [row["name"] for row in overview["databases_damaged"]] == list(DAMAGED)
        assert [row["name"] for row in overview["databases"]] == OTHERS
        for path in ("/api/lineage", "/api/jobs", "/api/feed", "/api/verification", "/api/why?subject=sqlite2"):
            assert client.get(path).status == 200, path
        metrics = client.get("/metrics").body.decode()
        assert "quire_databases_damaged 3.0" in metrics
        assert 'quire_databases{kind="pages"} 3.0' in metrics


def test_nothing_is_deleted_while_rows_are_damaged(root: Path, owner: Store, clock: ManualClock) -> None:
    before = files(root)
    clean_up(owner, clock)
    # Segments that a checkpoint of another database has absorbed are deleted as usual.
    absorbed = tuple(f"pages/{owner.database(name).db_id:08x}/wal/" for name in ("sqlite2", "sqlite3"))
    assert [path for path in before if path not in files(root) and not path.startswith(absorbed)] == []


def test_a_row_damaged_while_the_store_is_open_stops_every_sweep(tmp_path: Path, clock: ManualClock) -> None:
    """Its database is not closed: data that no intact row refers to may belong to it."""
    with open_store(tmp_path, clock) as store:
        ids = {kind: fill(store, kind, kind) for kind in KINDS}
        other = fill(store, "sqlite", "other")
        # Otherwise the database may have commits to publish when the store is closed, which its damaged row prevents.
        store.pages.close_database(ids["sqlite"])
        before = files(tmp_path)
        for kind in KINDS:
            damage_open(store, ids[kind])
        clock.advance(YEAR)
        for sweep in (store.streams.sweep, store.kvs.sweep, lambda: has_dropped_streams(store.heavy._wiring.context)):
            with pytest.raises(ManifestDamaged):
                sweep()
        store.maintain()
        store.heavy.sweep(delete=True, grace_seconds=-20 * YEAR)
        assert [path for path in before if path not in files(tmp_path) and f"{other:08x}" not in path] == []
        assert [info.name for info in store.databases()] == ["other"]
        with store.manifest.read() as txn:
            assert txn.damaged_databases() == {ids[kind]: kind for kind in KINDS}


def damage_open(store: Store, db_id: int, table: t.Table[Any] = t.DB) -> None:
    """Flip a bit of a database's first row in a table, without the knowledge of the owning process."""
    env, first = store.manifest.env, table.key.prefix(db_id)
    with env.begin_write() as txn:
        with txn.cursor(db=env.handles[table.name]) as cursor:
            assert cursor.set_range(first)
            key, raw = map(bytes, cursor.item())
        assert key.startswith(first)
        txn.put(key, raw[:-1] + bytes([raw[-1] ^ 1]), db=env.handles[table.name])


READ: dict[str, tuple[t.Table[Any], ...]] = {
    "checkpoint_all": (t.DB, t.WAL_CATALOG, t.LIVE_LEAF, t.SNAPSHOT_INDEX),
    "merge_all": (t.DB, t.LIVE_LEAF),
    "retention_all": (t.DB, t.SNAPSHOT_INDEX, t.RETENTION),
}
"""Tables whose rows a call over all databases needs of each."""


@pytest.mark.parametrize(("call", "table"), [(call, table) for call, tables in READ.items() for table in tables])
def test_a_row_damaged_while_the_store_is_open_fails_only_its_own_job(
    tmp_path: Path, clock: ManualClock, call: str, table: t.Table[Any]
) -> None:
    names = ("one", "two", "three")
    with open_store(tmp_path, clock) as store:
        ids = [fill(store, "sqlite", name) for name in names]
        for name in names:
            store.manifest.retention.set(name, RetentionRecord(keep_last=1))
            with store.sqlite(name) as connection:
                connection.execute("insert into t values (1)")
            store.pages.close_database(store.database(name).db_id)
        damage_open(store, ids[1], table)
        results = getattr(store.heavy, call)()
        assert [failure.db_id for failure in results.failures] == [ids[1]]
        assert "ManifestDamaged" in results.failures[0].error
        assert (len(results), results.states[JobState.SUCCEEDED], results.skipped) == (3, 2, 0)


def test_repair_restores_them(root: Path, clock: ManualClock) -> None:
    code, out, _ = run(root, "manifest", "check")
    assert (code, out.count("repairable")) == (1, len(DAMAGED))
    assert run(root, "manifest", "check", "--repair")[0] == 0
    with open_store(root, clock) as store:
        assert [info.name for info in store.databases()] == sorted([*OTHERS, *DAMAGED])
        with store.sqlite("sqlite1") as connection:
            assert connection.execute("select count(*) from t").fetchone() == (1,)
        assert len(list(store.stream("stream1").read())) == 200
        assert store.kv("kv1").get(b"key") == b"value" * 1000


def test_without_the_change_log_a_backup_is_suggested(tmp_path: Path, clock: ManualClock) -> None:
    """The log no longer starts with the first change: the row cannot be recomputed, and the others still work."""
    with open_store(tmp_path, clock) as store:
        damaged = fill(store, "kv", "damaged")
        fill(store, "kv", "other")
        clock.advance(YEAR)
        store.manifest.feed.maintain()
    vandal = Vandal(str(tmp_path / "store" / "manifest.lmdb"))
    flip(vandal, t.DB, damaged)
    vandal.done()
    with open_store(tmp_path, clock) as store:
        assert store.kv("other").get(b"key") == b"value" * 1000
        with pytest.raises(ManifestDamaged, match="restore the manifest from a backup"):
            store.kv("damaged")
