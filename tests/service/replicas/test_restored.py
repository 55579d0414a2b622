"""Replicas of a store that was restored from its bucket and taken over, after changes were lost (A10, W6)."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from tests.service.replicas.test_libsql import DIGEST, FILL
from tests.service.replicas.world import LibsqlReplica, ServedStore, TursoReplica


@pytest.mark.parametrize("kind", [LibsqlReplica, TursoReplica])
def test_a_replica_that_has_lost_changes_gets_every_page_of_the_successor(
    tmp_path: Path, kind: type[LibsqlReplica | TursoReplica]
) -> None:
    bucket = str(tmp_path / "bucket")
    former = ServedStore(tmp_path / "former", "127.0.0.1:0", bucket)
    former.sql("CREATE TABLE t(a)", FILL.format(100))
    former.do("archive")
    quire.restore(bucket, tmp_path / "successor")
    former.sql("UPDATE t SET a = 'lost' WHERE rowid < 50")
    replica = kind(former, tmp_path / "replica.db")
    replica.sync()
    assert replica.rows("SELECT count(*) FROM t WHERE a = 'lost'") == [[49]]
    replica.close()
    former.do("archive")
    former.kill()
    successor = ServedStore(tmp_path / "successor", former.address, bucket, "takeover")
    successor.sql("INSERT INTO t VALUES ('after')")
    replica = kind(successor, tmp_path / "replica.db")
    replica.sync()
    assert replica.rows(DIGEST) == successor.sql(DIGEST)
    assert replica.rows("SELECT count(*) FROM t WHERE a = 'lost'") == [[0]]
    assert replica.integrity() == "ok"
    successor.sql("INSERT INTO t VALUES ('and on')")
    replica.sync()
    assert replica.rows(DIGEST) == successor.sql(DIGEST)
    replica.close()
    successor.close()
