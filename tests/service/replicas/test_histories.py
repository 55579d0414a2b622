"""Random histories, and kills of the server at every point of a sync: a replica always equals a version of its database."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from quire.service.replicas.positions import STEP
from tests.service.replicas.served_store import LibsqlReplica, ServedStore, TursoReplica
from tests.service.replicas.test_libsql import DIGEST, FILL

_names = itertools.count()

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.integers(0, 9_000)),
        st.tuples(st.just("update"), st.integers(1, 40)),
        st.tuples(st.just("delete"), st.integers(1, 40)),
        st.tuples(st.sampled_from(["vacuum", "checkpoint", "merge", "fork", "rewind", "libsql", "turso"])),
    ),
    min_size=4,
    max_size=16,
)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[ServedStore]:
    served = ServedStore(tmp_path / "store")
    served.sql("CREATE TABLE t(a)", FILL.format(300))
    yield served
    served.close()


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(steps=STEPS)
def test_a_replica_is_what_the_database_is_after_any_history(
    served: ServedStore, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    directory, name = tmp_path_factory.mktemp("replicas"), f"history-{next(_names)}"
    served.sql("CREATE TABLE t(a)", "INSERT INTO t VALUES ('first')", name=name)
    replicas: dict[str, LibsqlReplica | TursoReplica] = {}

    def sync(kind: str) -> None:
        """Sync with the database that has the name now, and compare."""
        replica = replicas.get(kind)
        if replica is None:
            replica_class = {"libsql": LibsqlReplica, "turso": TursoReplica}[kind]
            replica = replicas[kind] = replica_class(served, directory / f"{kind}.db", name)
        replica.sync()
        assert replica.rows(DIGEST) == served.sql(DIGEST, name=name)
        assert replica.integrity() == "ok"

    for step, *more in steps:
        if step == "insert":
            served.sql(f"INSERT INTO t VALUES (randomblob({more[0]}))", name=name)
        elif step == "update":
            served.sql(f"UPDATE t SET a = randomblob({more[0] * 100}) WHERE rowid % {more[0]} = 0", name=name)
        elif step == "delete":
            served.sql(f"DELETE FROM t WHERE rowid % {more[0]} = 1", name=name)
        elif step == "fork":
            served.do("replace_by_fork", name)
        elif step == "rewind":
            served.do("mark", name)
            served.sql("INSERT INTO t VALUES ('is undone')", name=name)
            served.do("rewind", name)
        elif step in ("libsql", "turso"):
            sync(step)
        elif step == "vacuum":
            served.do("vacuum", name)
        else:
            served.do("run", name, step)
    for kind in ("libsql", "turso"):
        sync(kind)
    for replica in replicas.values():
        replica.close()


POINTS = (
    ("replicas.position", "kill"),
    ("replicas.header", "kill"),
    ("replicas.batch", "kill"),
    ("replicas.batch", "1*off->kill"),
    ("replicas.sent", "kill"),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LibsqlReplica, TursoReplica])
def test_a_server_killed_during_a_sync_leaves_a_replica_that_is_a_version(
    fresh: ServedStore, tmp_path: Path, kind: type[LibsqlReplica | TursoReplica]
) -> None:
    replica = kind(fresh, tmp_path / "replica.db")
    replica.sync()
    for point, script in POINTS:
        if point == "replicas.position" and kind is TursoReplica:
            continue
        versions = [replica.rows(DIGEST)]
        fresh.sql("UPDATE t SET a = randomblob(1100)", FILL.format(1200))
        versions.append(fresh.sql(DIGEST))
        fresh.arm(point, script)
        with pytest.raises((ValueError, Exception)):  # each client has its own error classes
            replica.sync()
        fresh.wait()
        for _ in range(2):  # also after it is reopened
            assert replica.rows(DIGEST) in versions
            assert replica.integrity() == "ok"
            replica.close()
            if not fresh.is_alive:
                fresh.start()
            replica.connect()
        fresh.sql("INSERT INTO t VALUES ('after')")
        replica.sync()
        assert replica.rows(DIGEST) == fresh.sql(DIGEST)
        assert replica.integrity() == "ok"


@pytest.mark.slow
def test_a_server_killed_during_a_first_sync_leaves_nothing_that_passes_for_a_replica(
    fresh: ServedStore, tmp_path: Path
) -> None:
    for number, (kind, point) in enumerate(itertools.product((LibsqlReplica, TursoReplica), POINTS[1:3])):
        path = tmp_path / f"{number}.db"
        fresh.arm(*point)
        with pytest.raises((ValueError, Exception)):
            kind(fresh, path).sync()
        fresh.wait()
        fresh.start()
        replica = kind(fresh, path)
        replica.sync()
        assert replica.rows(DIGEST) == fresh.sql(DIGEST)


@pytest.mark.slow
def test_an_interrupted_long_answer_is_restarted(fresh: ServedStore, tmp_path: Path) -> None:
    replica = LibsqlReplica(fresh, tmp_path / "replica.db")
    replica.sync()
    before = replica.rows(DIGEST)
    fresh.sql("UPDATE t SET a = randomblob(1100)", FILL.format(600))
    fresh.do("cut_frames_at", STEP)
    fresh.arm("replicas.header", "2*off->kill")
    with pytest.raises(ValueError, match=r"."):
        replica.sync()
    assert replica.rows(DIGEST) == before
    fresh.wait()
    fresh.start()
    fresh.do("cut_frames_at", STEP)
    replica.sync()
    assert replica.rows(DIGEST) == fresh.sql(DIGEST)
    fresh.sql("INSERT INTO t VALUES (1)")
    replica.sync()
    assert replica.rows(DIGEST) == fresh.sql(DIGEST)
