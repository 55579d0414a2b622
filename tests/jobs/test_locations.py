"""The locations of an artifact's bytes, and the copies there: named, pickled, fetched, removed."""

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
from tests.jobs.job_store import ARCHIVED, BOTH, EVICTED, LOCAL, JobStore

BASE = ArtifactKey(7, ArtifactKind.BASE, 42, 3)
WAL = ArtifactKey(7, ArtifactKind.WAL, 31, 0)
CHUNK = ChunkRecord(ARCHIVED, 10, 0)


def test_files_are_named_after_their_artifacts() -> None:
    segment = WalRecord(7, WalState.SEALED)
    assert local_name(BASE, CHUNK) == "pages/00000007/cache/00000007/0000002a/base:00000003"
    assert local_name(WAL, segment) == "pages/00000007/wal/0000001f.seg"
    stream = WalRecord(7, WalState.SEALED, WalFormat.APPEND_ONLY)
    assert local_name(WAL, stream) == "streams/7/hot/000000000000001f.seg"


def test_objects_are_in_the_store_s_own_object_store_or_in_their_namespace() -> None:
    canonical = "00000007/0000002a/base:00000003"
    assert remote_name(BASE, CHUNK, None, "/own") == ("/own", canonical)
    in_namespace = ChunkRecord(ARCHIVED, 10, 0, namespace_id=5)
    namespace = NamespaceRecord("s3://bucket", "tenant")
    assert remote_name(BASE, in_namespace, namespace, "/own") == ("s3://bucket", f"tenant/{canonical}")
    renamed = ChunkRecord(ARCHIVED, 10, 0, namespace_id=5, suffix="a/b")
    assert remote_name(BASE, renamed, namespace, "/own") == ("s3://bucket", "tenant/a/b")
    with pytest.raises(InvalidInput):
        remote_name(BASE, in_namespace, None, "/own")


def location(root: str, **changes: object) -> ArtifactLocation:
    base_location = ArtifactLocation(
        key=BASE,
        residency=EVICTED,
        local=os.path.join(root, "pages/x/file"),
        url=root + "/objects",
        object_key="a/b",
        size_bytes=3,
        sha256=b"",
    )
    return replace(base_location, **changes)  # type: ignore[arg-type]


def test_a_location_says_which_copies_exist() -> None:
    flags = {
        residency: (item.has_local, item.has_remote, item.may_have_remote)
        for residency in (LOCAL, BOTH, ARCHIVED, EVICTED)
        for item in [location("/r", residency=residency)]
    }
    assert flags == {
        LOCAL: (True, False, False),
        BOTH: (True, True, True),
        ARCHIVED: (False, True, True),
        EVICTED: (False, True, True),
    }
    assert location("/r", residency=LOCAL, is_announced=True).may_have_remote
    assert location("/r").staged == "/r/pages/x/file.tmp"
    assert pickle.loads(pickle.dumps(location("/r"))) == location("/r")


def test_without_a_digest_an_existing_file_is_fetched_again(tmp_path: Path) -> None:
    """Without a digest it is unknown whether the file is the right one."""
    target = location(str(tmp_path))
    store = open_store(target.url)
    store.put("a/b", b"new")
    Path(target.local).parent.mkdir(parents=True)
    Path(target.local).write_bytes(b"old")
    assert fetch(target, str(tmp_path), disk=OsDisk(), store=store)
    assert Path(target.local).read_bytes() == b"new"


def test_a_longer_staging_file_of_an_earlier_fetch_is_not_part_of_the_next(tmp_path: Path) -> None:
    target = location(str(tmp_path))
    open_store(target.url).put("a/b", b"new")
    Path(target.staged).parent.mkdir(parents=True)
    Path(target.staged).write_bytes(b"garbage of an earlier life")
    assert fetch(target, str(tmp_path), disk=OsDisk(), store=open_store(target.url))
    assert Path(target.local).read_bytes() == b"new"
    assert not os.path.exists(target.staged)


def test_files_that_may_reappear_after_a_crash_are_not_reported_as_removed(tmp_path: Path) -> None:
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
    assert len(opened) == 3, "a closed pool can be used again"


def test_the_context_has_no_location_for_artifacts_outside_the_catalog(local_store: JobStore) -> None:
    local_store.database()
    with local_store.manifest.read() as txn:
        for key in (BASE, WAL, ArtifactKey(7, ArtifactKind.LEAF, 0, 1)):
            assert local_store.ctx.place(txn, key) is None
