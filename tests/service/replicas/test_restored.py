"""Replicas of a store that was restored from its bucket and taken over, after changes were lost (A10, W6)."""

from __future__ import annotations

from pathlib import Path

import quire
from tests.service.replicas.served_store import LibsqlReplica, ServedStore, TursoReplica
from tests.service.replicas.test_libsql import DIGEST, FILL

KINDS: tuple[type[LibsqlReplica | TursoReplica], ...] = (LibsqlReplica, TursoReplica)


def test_replicas_that_have_lost_changes_get_every_page_of_the_successor(tmp_path: Path) -> None:
    bucket = str(tmp_path / "bucket")
    former = ServedStore(tmp_path / "former", "127.0.0.1:0", bucket)
    former.sql("CREATE TABLE t(a)", FILL.format(100))
    former.do("archive")
    quire.restore(bucket, tmp_path / "successor")
    former.sql("UPDATE t SET a = 'lost' WHERE rowid < 50")
    for kind in KINDS:
        replica = kind(former, tmp_path / f"{kind.__name__}.db")
        replica.sync()
        assert replica.rows("SELECT count(*) FROM t WHERE a = 'lost'") == [[49]]
        replica.close()
    former.do("archive")
    former.kill()
    successor = ServedStore(tmp_path / "successor", former.address, bucket, "takeover")
    successor.sql("INSERT INTO t VALUES ('after')")
    for kind in KINDS:
        replica = kind(successor, tmp_path / f"{kind.__name__}.db")
        replica.sync()
        assert replica.rows(DIGEST) == successor.sql(DIGEST)
        assert replica.rows("SELECT count(*) FROM t WHERE a = 'lost'") == [[0]]
        assert replica.integrity() == "ok"
        successor.sql("INSERT INTO t VALUES ('and on')")
        replica.sync()
        assert replica.rows(DIGEST) == successor.sql(DIGEST)
        replica.close()
    successor.close()
