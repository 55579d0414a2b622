"""Embedded replicas of PyPI's `libsql`, against a store that another process serves (W6)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.replicas.served_store import LibsqlReplica, ServedStore

FILL = (
    "INSERT INTO t SELECT randomblob(1000) FROM "
    "(WITH RECURSIVE g(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM g WHERE i < {}) SELECT i FROM g)"
)
DIGEST = "SELECT count(*), sum(length(a)), min(rowid), max(rowid), group_concat(hex(substr(a, 1, 4)), '') FROM t"


def _same(served: ServedStore, replica: LibsqlReplica, name: str) -> None:
    assert replica.rows(DIGEST) == served.sql(DIGEST, name=name)
    assert replica.integrity() == "ok"


def test_a_new_replica_has_the_database_and_follows_it(served: ServedStore, name: str, local: Path) -> None:
    replica = LibsqlReplica(served, local, name)
    replica.sync()
    _same(served, replica, name)
    positions = {replica.position}
    for number in range(3):
        served.sql(f"INSERT INTO t VALUES ({number})", name=name)
        replica.sync()
        positions.add(replica.position)
        _same(served, replica, name)
    assert len(positions) == 4
    before = replica.position
    replica.sync()
    assert replica.position == before, "no change to fetch"
    served.sql("CREATE TABLE u(b)", "INSERT INTO u VALUES (7)", name=name)
    replica.sync()
    assert replica.rows("SELECT b FROM u") == [[7]]


def test_a_replica_that_was_away_over_checkpoints_and_merges_gets_what_changed(
    served: ServedStore, name: str, local: Path
) -> None:
    served.sql(FILL.format(4000), name=name)
    served.do("run", name, "checkpoint")
    replica = LibsqlReplica(served, local, name)
    replica.sync()
    generation, frame = replica.position
    replica.close()
    for number in range(4):
        served.sql(f"UPDATE t SET a = randomblob(999) WHERE rowid = {100 + number}", name=name)
        served.do("run", name, "checkpoint")
    served.do("run", name, "merge")
    assert served.do("chains", name)[0] == 1
    replica.connect()
    replica.sync()
    _same(served, replica, name)
    assert replica.position[0] == generation
    assert 0 < replica.position[1] - frame < 12, "only a few pages are sent, not all 1,000"


def test_a_shrunk_database_shrinks_its_replicas(served: ServedStore, name: str, local: Path) -> None:
    served.sql(FILL.format(500), name=name)
    replica = LibsqlReplica(served, local, name)
    replica.sync()
    served.sql("DELETE FROM t WHERE rowid > 20", name=name)
    served.do("vacuum", name)
    replica.sync()
    _same(served, replica, name)
    assert replica.rows("SELECT count(*) FROM t") == [[20]]


def test_replicas_at_different_versions_never_share_a_number(served: ServedStore, name: str, tmp_path: Path) -> None:
    replicas = [LibsqlReplica(served, tmp_path / f"{number}.db", name) for number in range(3)]
    for replica in replicas:
        replica.sync()
    for step in range(6):
        served.sql(f"INSERT INTO t VALUES (randomblob({1500 * step}))", name=name)
        for number, replica in enumerate(replicas):
            if step % (number + 1) == 0:
                replica.sync()
                _same(served, replica, name)
    for replica in replicas:
        replica.sync()
        _same(served, replica, name)


def test_a_write_through_a_replica_goes_to_the_server_and_is_read_here(
    served: ServedStore, name: str, local: Path
) -> None:
    replica = LibsqlReplica(served, local, name)
    replica.sync()
    replica.execute("INSERT INTO t VALUES ('mine')")
    assert served.sql("SELECT count(*) FROM t WHERE a = 'mine'", name=name) == [[1]]
    replica.sync()
    _same(served, replica, name)


def test_an_empty_database_can_be_replicated(served: ServedStore, local: Path) -> None:
    served.do("create", "empty")
    replica = LibsqlReplica(served, local, "empty")
    replica.sync()
    assert replica.rows("SELECT count(*) FROM sqlite_schema") == [[0]]
    served.sql("CREATE TABLE t(a)", "INSERT INTO t VALUES (5)", name="empty")
    replica.sync()
    assert replica.rows("SELECT a FROM t") == [[5]]


@pytest.mark.parametrize("change", ["forked", "recreated", "rewound"])
def test_a_replica_of_another_history_gets_every_page(served: ServedStore, name: str, local: Path, change: str) -> None:
    served.sql(FILL.format(200), name=name)
    replica = LibsqlReplica(served, local, name)
    replica.sync()
    before = replica.position
    now = name
    if change == "forked":
        now = f"{name}-fork"
        served.do("fork", name, now)
        served.sql("INSERT INTO t VALUES ('only the origin')", name=name)
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
    assert replica.position[0] != before[0]
    served.sql("INSERT INTO t VALUES ('and on')", name=now)
    generation, frame = replica.position
    replica.sync()
    _same(served, replica, now)
    assert replica.position[0] == generation
    assert replica.position[1] - frame < 10, "it follows the new history from then on"


def test_a_restarted_server_recognises_its_replicas(tmp_path: Path) -> None:
    served = ServedStore(tmp_path / "store")
    served.sql("CREATE TABLE t(a)", FILL.format(300))
    replica = LibsqlReplica(served, tmp_path / "replica.db")
    replica.sync()
    served.kill()
    served.start()
    served.sql("INSERT INTO t VALUES (1)")
    generation, frame = replica.position
    replica.sync()
    _same(served, replica, "shop")
    assert replica.position[0] == generation
    assert replica.position[1] - frame < 10
    served.close()
