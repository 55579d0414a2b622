"""Replicas of Turso's sync engine (`pyturso`), against a store that another process serves (W6)."""

from __future__ import annotations

from pathlib import Path

import pytest
import turso
import turso.sync

from tests.service.replicas.served_store import ServedStore, TursoReplica
from tests.service.replicas.test_libsql import DIGEST, FILL

PAGE = 4096


def _same(served: ServedStore, replica: TursoReplica, name: str) -> None:
    assert replica.rows(DIGEST) == served.sql(DIGEST, name=name)
    assert replica.integrity() == "ok"


def test_a_new_replica_has_the_database_and_follows_it(served: ServedStore, name: str, local: Path) -> None:
    replica = TursoReplica(served, local, name)
    _same(served, replica, name)
    for number in range(3):
        served.sql(f"INSERT INTO t VALUES ({number})", name=name)
        replica.sync()
        _same(served, replica, name)
    before = replica.revision
    replica.sync()
    assert replica.revision == before


def test_a_replica_that_was_away_over_checkpoints_and_merges_gets_what_changed(
    served: ServedStore, name: str, local: Path
) -> None:
    served.sql(FILL.format(4000), name=name)
    served.do("run", name, "checkpoint")
    replica = TursoReplica(served, local, name)
    whole = replica.received_bytes
    replica.close()
    for number in range(4):
        served.sql(f"UPDATE t SET a = randomblob(999) WHERE rowid = {100 + number}", name=name)
        served.do("run", name, "checkpoint")
    served.do("run", name, "merge")
    replica.connect()
    replica.sync()
    _same(served, replica, name)
    assert whole > 1000 * PAGE
    assert replica.received_bytes < 12 * PAGE


def test_local_writes_are_pushed_as_sql(served: ServedStore, name: str, local: Path) -> None:
    replica = TursoReplica(served, local, name)
    replica.execute("INSERT INTO t VALUES ('from the replica')")
    served.sql("INSERT INTO t VALUES ('from the server')", name=name)
    replica.push()
    assert served.sql("SELECT count(*) FROM t WHERE a LIKE 'from%'", name=name) == [[2]]
    replica.sync()
    assert replica.rows("SELECT a FROM t ORDER BY a") == served.sql("SELECT a FROM t ORDER BY a", name=name)
    replica.push()
    assert served.sql("SELECT count(*) FROM t", name=name) == [[5]], "each write is pushed once"


def test_two_replicas_that_wrote_the_same_row_converge_to_the_server(
    served: ServedStore, name: str, tmp_path: Path
) -> None:
    served.sql("CREATE TABLE k(id INTEGER PRIMARY KEY, v)", "INSERT INTO k VALUES (1, 'begin')", name=name)
    first, second = (TursoReplica(served, tmp_path / f"{number}.db", name) for number in range(2))
    first.execute("UPDATE k SET v = 'first' WHERE id = 1")
    second.execute("UPDATE k SET v = 'second' WHERE id = 1")
    first.push()
    second.push()
    for replica in (first, second):
        replica.sync()
        assert replica.rows("SELECT v FROM k") == served.sql("SELECT v FROM k", name=name) == [["second"]]


@pytest.mark.parametrize("change", ["forked", "recreated", "rewound"])
def test_a_replica_of_another_history_gets_every_page(served: ServedStore, name: str, local: Path, change: str) -> None:
    served.sql(FILL.format(200), name=name)
    replica = TursoReplica(served, local, name)
    now = name
    if change == "forked":
        now = f"{name}-fork"
        served.do("fork", name, now)
        served.sql("INSERT INTO t VALUES ('only the origin')", name=name)
        replica.sync()
    elif change == "recreated":
        served.do("drop", name)
        served.sql("CREATE TABLE t(a)", "INSERT INTO t VALUES (9)", name=name)
    else:
        served.do("mark", name)
        served.sql("INSERT INTO t VALUES ('is undone')", name=name)
        replica.sync()
        served.do("rewind", name)
    served.sql("INSERT INTO t VALUES ('new')", name=now)
    replica.close()
    replica.connect(now)
    replica.sync()
    _same(served, replica, now)
    received = replica.received_bytes
    served.sql("INSERT INTO t VALUES ('and on')", name=now)
    replica.sync()
    _same(served, replica, now)
    assert replica.received_bytes - received < 10 * PAGE, "it follows the new history from then on"


def test_a_sync_with_a_recreated_empty_database_is_refused_and_mixes_nothing(
    served: ServedStore, name: str, local: Path
) -> None:
    replica = TursoReplica(served, local, name)
    served.do("drop", name)
    served.do("create", name)
    with pytest.raises(turso.Error, match="no pages yet"):
        replica.sync()
    assert replica.rows("SELECT count(*) FROM t") == [[3]], "the replica is unchanged"


def test_an_empty_database_can_be_replicated(served: ServedStore, local: Path) -> None:
    served.do("create", "nothing")
    replica = TursoReplica(served, local, "nothing")
    assert replica.rows("SELECT count(*) FROM sqlite_schema WHERE name = 't'") == [[0]]
    served.sql("CREATE TABLE t(a)", "INSERT INTO t VALUES (5)", name="nothing")
    replica.sync()
    assert replica.rows("SELECT a FROM t") == [[5]]


def test_a_first_sync_in_many_requests_reads_one_version(served: ServedStore, name: str, local: Path) -> None:
    served.sql(FILL.format(400), name=name)
    replica = TursoReplica(served, local, name, pull_bytes_threshold=8 * PAGE)
    _same(served, replica, name)


@pytest.mark.parametrize(
    "strategy",
    [turso.sync.PartialSyncPrefixBootstrap(length=16 * PAGE), turso.sync.PartialSyncQueryBootstrap("SELECT 1 FROM t")],
)
def test_a_partial_replica_reads_missing_pages_of_its_own_version(
    served: ServedStore, name: str, local: Path, strategy: object
) -> None:
    served.sql(FILL.format(1000), name=name)
    part = turso.sync.PartialSyncOpts(bootstrap_strategy=strategy)  # type: ignore[arg-type]  # either class
    replica = TursoReplica(served, local, name, partial_sync_experimental=part)
    assert replica.received_bytes < 100 * PAGE
    before = served.sql(DIGEST, name=name)
    served.sql("UPDATE t SET a = randomblob(1000) WHERE rowid % 3 = 0", name=name)
    assert replica.rows(DIGEST) == before, "pages fetched later belong to the replica's version"
    replica.sync()
    _same(served, replica, name)


def test_an_unchanged_page_is_read_from_a_newer_version_when_the_old_one_is_dropped(
    served: ServedStore, name: str, local: Path
) -> None:
    served.sql(FILL.format(1000), name=name)
    served.do("run", name, "checkpoint")
    start = turso.sync.PartialSyncPrefixBootstrap(length=PAGE)
    part = turso.sync.PartialSyncOpts(bootstrap_strategy=start, segment_size=PAGE)
    replica = TursoReplica(served, local, name, partial_sync_experimental=part)
    served.sql("UPDATE t SET a = randomblob(1000) WHERE rowid > 900", name=name)
    served.do("release_versions")
    served.do("run", name, "checkpoint")
    assert replica.rows("SELECT length(a) FROM t WHERE rowid = 10") == [[1000]]
    replica.sync()
    _same(served, replica, name)
