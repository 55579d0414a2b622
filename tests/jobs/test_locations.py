"""Where an artifact's bytes are, and the copies there: named, pickled, fetched, removed."""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from quire.core.errors import InvalidInput
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.files import OsDisk
from quire.jobs.copies import fetch, remove_files
from quire.jobs.locations import ArtifactLocation, StorePool, local_name, remote_name
from quire.manifest.records import ChunkRecord, NamespaceRecord, WalFormat, WalRecord, WalState
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.testing.faults import Fault, FaultyDisk
from tests.jobs.world import ARCHIVED, BOTH, EVICTED, LOCAL, World

BASE = ArtifactKey(7, ArtifactKind.BASE, 42, 3)
WAL = ArtifactKey(7, ArtifactKind.WAL, 31, 0)
CHUNK = ChunkRecord(ARCHIVED, 10, 0)


def test_files_are_named_after_what_they_are() -> None:
    segment = WalRecord(7, WalState.SEALED)
    assert local_name(BASE, CHUNK) == "pages/00000007/cache/00000007/0000002a/base:00000003"
    assert local_name(WAL, segment) == "pages/00000007/wal/0000001f.seg"
    stream = WalRecord(7, WalState.SEALED, WalFormat.APPEND_ONLY)
    assert local_name(WAL, stream) == "streams/7/hot/000000000000001f.seg"


def test_objects_are_in_the_store_s_own_object_store_or_in_their_namespace() -> None:
    canonical = "00000007/0000002a/base:00000003"
    assert remote_name(BASE, CHUNK, None, "/own") == ("/own", canonical)
    there = ChunkRecord(ARCHIVED, 10, 0, namespace_id=5)
    space = NamespaceRecord("s3://bucket", "tenant")
    assert remote_name(BASE, there, space, "/own") == ("s3://bucket", f"tenant/{canonical}")
    renamed = ChunkRecord(ARCHIVED, 10, 0, namespace_id=5, suffix="a/b")
    assert remote_name(BASE, renamed, space, "/own") == ("s3://bucket", "tenant/a/b")
    with pytest.raises(InvalidInput):
        remote_name(BASE, there, None, "/own")


def place(root: str, **more: object) -> ArtifactLocation:
    made = ArtifactLocation(
        key=BASE,
        residency=EVICTED,
        local=os.path.join(root, "pages/x/file"),
        url=root + "/objects",
        object_key="a/b",
        size_bytes=3,
        sha256=b"",
    )
    return replace(made, **more)  # type: ignore[arg-type]


def test_a_place_says_where_to_look() -> None:
    flags = {
        residency: (p.has_local, p.has_remote, p.may_have_remote)
        for residency in (LOCAL, BOTH, ARCHIVED, EVICTED)
        for p in [place("/r", residency=residency)]
    }
    assert flags == {
        LOCAL: (True, False, False),
        BOTH: (True, True, True),
        ARCHIVED: (False, True, True),
        EVICTED: (False, True, True),
    }
    assert place("/r", residency=LOCAL, is_announced=True).may_have_remote
    assert place("/r").staged == "/r/pages/x/file.tmp"
    assert pickle.loads(pickle.dumps(place("/r"))) == place("/r")


def test_without_a_digest_a_file_that_is_there_is_fetched_again(tmp_path: Path) -> None:
    """Nobody could tell whether it is the right one."""
    here = place(str(tmp_path))
    store = open_store(here.url)
    store.put("a/b", b"new")
    Path(here.local).parent.mkdir(parents=True)
    Path(here.local).write_bytes(b"old")
    assert fetch(here, str(tmp_path), disk=OsDisk(), store=store)
    assert Path(here.local).read_bytes() == b"new"


def test_a_longer_staging_file_of_an_earlier_fetch_is_no_part_of_the_next(tmp_path: Path) -> None:
    here = place(str(tmp_path))
    open_store(here.url).put("a/b", b"new")
    Path(here.staged).parent.mkdir(parents=True)
    Path(here.staged).write_bytes(b"garbage of an earlier life")
    assert fetch(here, str(tmp_path), disk=OsDisk(), store=open_store(here.url))
    assert Path(here.local).read_bytes() == b"new"
    assert not os.path.exists(here.staged)


def test_what_may_come_back_after_a_crash_is_not_called_removed(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a/1", "a/2", "b/1", "never/1")]
    for path in paths[:3]:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(b"x")
    disk = FaultyDisk(OsDisk(), Fault.EIO, fail_at=1, operation="sync_dir", path=str(tmp_path / "a"))
    assert remove_files(paths, disk).keys() == set(paths[:2])
    assert remove_files(paths, OsDisk()) == {}
    assert remove_files([], OsDisk()) == {}


def test_object_stores_are_opened_once_per_url(tmp_path: Path) -> None:
    opened: list[str] = []

    def opener(url: str) -> ObjectStore:
        opened.append(url)
        return open_store(url)

    pool = StorePool(opener)
    threads = [threading.Thread(target=pool, args=(str(tmp_path / "x"),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool(str(tmp_path / "y")) is pool(str(tmp_path / "y"))
    assert sorted(opened) == [str(tmp_path / "x"), str(tmp_path / "y")]
    pool.close()
    pool(str(tmp_path / "y"))
    assert len(opened) == 3, "closed, it can be used again"


def test_the_context_knows_no_place_of_what_is_not_in_the_catalog(local: World) -> None:
    local.database()
    with local.manifest.read() as txn:
        for key in (BASE, WAL, ArtifactKey(7, ArtifactKind.LEAF, 0, 1)):
            assert local.ctx.place(txn, key) is None
