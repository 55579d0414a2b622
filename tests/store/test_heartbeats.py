"""A standby takes over from an owner that is dead, and from no other: the owner's heartbeats say that it is alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

import quire
from quire.archive import standbys
from quire.archive.standbys import Heartbeat, read_heartbeat, registrations
from quire.core.errors import InvalidInput, ObjectStoreUnavailable, StoreFenced
from quire.durable import names
from quire.durable.failpoints import armed
from quire.durable.object_names import heartbeat_key
from quire.objects import api
from quire.objects.api import ObjectInfo, ObjectStore
from quire.objects.open import open_store
from quire.store.standby import Standby
from tests.archive.archived_store import WAIT, ArchivedStore, archived_store, contents, fill, kill, quiet, until

PROMOTE_AFTER = 2.0


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standbys, "HEARTBEAT_SECONDS", 0.3)
    monkeypatch.setattr(standbys, "LIST_SECONDS", 0.3)
    monkeypatch.setattr(standbys, "FIRST_LIST_SECONDS", 0.05)
    monkeypatch.setattr(standbys, "TICK_SECONDS", 0.05)
    monkeypatch.setattr("quire.store.standby.HEARTBEAT_SECONDS", 0.3)
    monkeypatch.setattr(standbys, "LISTEN_SECONDS", 0.1)


class RunningStandby:
    """A standby that follows in a thread, and promotes itself after PROMOTE_AFTER seconds of silence."""

    def __init__(self, standby: Standby) -> None:
        self.standby = standby
        self.results: list[Any] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.results.append(self.standby.run(promote_after=PROMOTE_AFTER, stop=self.stop))

    def wait_longer_than_it_waits(self) -> None:
        """Return when it would have taken over from a silent owner, which it must not have done."""
        end = time.monotonic() + 1.5 * PROMOTE_AFTER
        until(lambda: time.monotonic() > end or not self.thread.is_alive())
        assert self.thread.is_alive(), f"a healthy owner was replaced: {self.results}"


@contextmanager
def running_standby(archived: ArchivedStore, name: str = "standby") -> Iterator[RunningStandby]:
    with Standby(str(archived.bucket), archived.home / name) as standby:
        running = RunningStandby(standby)
        try:
            until(lambda: standby.status.is_named)
            yield running
        finally:
            running.stop.set()
            running.thread.join(WAIT)


def test_an_idle_owner_is_kept_and_a_dead_one_replaced(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        with running_standby(archived) as running:
            running.wait_longer_than_it_waits()
            expected = contents(archived.store)
            kill(archived.store)
            running.thread.join(WAIT)
            assert [promoted.owner_epoch for promoted in running.results] == [2]
        assert not (tmp_path / "standby" / names.STANDBY).exists()
        with quire.open(tmp_path / "standby", settings=quiet()) as store:
            assert contents(store) == expected


def test_an_owner_that_cuts_less_often_than_the_standby_waits_is_kept(tmp_path: Path) -> None:
    """Hazard: heartbeats waited for the next cut, so an owner whose `interval_seconds` exceeded `--promote-after` was deposed
    while it worked, and lost what it had not uploaded."""
    with archived_store(tmp_path, interval_seconds=3_600.0) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        with running_standby(archived) as running:
            fill(archived.store, 100)
            running.wait_longer_than_it_waits()


def test_an_owner_that_uploads_a_large_file_is_kept(tmp_path: Path) -> None:
    """Hazard: log objects, and heartbeats with them, waited for the upload of a file that they name. An owner with a large
    table was deposed meanwhile."""
    uploading, uploaded = threading.Event(), threading.Event()

    def upload(_: str) -> None:
        uploading.set()
        uploaded.wait(WAIT)

    with archived_store(tmp_path) as archived, armed("archive.artifact.before", upload):
        try:
            fill(archived.store, 0)
            archived.wait_archived()
            with running_standby(archived) as running:
                archived.store.kv("pairs").flush()
                assert uploading.wait(WAIT)
                running.wait_longer_than_it_waits()
        finally:
            uploaded.set()


def test_an_owner_that_uploads_while_it_is_closed_is_kept(tmp_path: Path) -> None:
    """Hazard: an owner put no heartbeats while `close` waited for its last uploads, which a promotion then lost."""
    uploading, uploaded = threading.Event(), threading.Event()

    def upload(_: str) -> None:
        uploading.set()
        uploaded.wait(WAIT)

    archived = ArchivedStore(tmp_path, close_seconds=WAIT)
    closing_thread = threading.Thread(target=archived.close)
    try:
        fill(archived.store, 0)
        archived.wait_archived()
        with running_standby(archived) as running, armed("archive.log.before", upload):
            archived.store.kv("pairs").put(b"late", b"1")
            assert uploading.wait(WAIT)
            closing_thread.start()
            running.wait_longer_than_it_waits()
            uploaded.set()
            running.thread.join(WAIT)  # a closed owner is replaced
            assert [promoted.owner_epoch for promoted in running.results] == [2]
        with quire.open(tmp_path / "standby", settings=quiet()) as store:
            assert store.kv("pairs").get(b"late") == b"1"
    finally:
        uploaded.set()
        closing_thread.join(WAIT)


def test_standbys_are_listed_again_soon_after_a_listing_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: an owner that had just restarted listed its standbys again only after a minute, and put no heartbeat until then.
    The standby, which the former process had named, took over."""
    failures = iter([True, True])

    def list_objects(store: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
        if next(failures, False):
            raise ObjectStoreUnavailable("away")
        return api.list_objects(store, prefix)

    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        with running_standby(archived) as running:
            kill(archived.store)
            monkeypatch.setattr(standbys, "LIST_SECONDS", 3_600.0)
            monkeypatch.setattr(standbys, "list_objects", list_objects)
            archived.store = archived.open()
            running.wait_longer_than_it_waits()
        assert next(failures, None) is None


def test_a_deposed_owner_without_changes_learns_it_and_puts_no_more_heartbeats(tmp_path: Path) -> None:
    """Hazard: an owner learns of a takeover from the bucket, and one without changes uploads nothing."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        with Standby(str(archived.bucket), tmp_path / "other") as other:
            other.poll()
            other._owner.register_if_due(archived.store_id, other.status.position, 0)
            until(lambda: archived.archiver.standbys.standby_ids == (other._owner.standby_id,))
            other.promote()
        until(lambda: archived.store.manifest.writer.failure is not None)
        assert isinstance(archived.store.manifest.writer.failure, StoreFenced)
        thread = archived.archiver.standbys._thread
        assert thread is not None
        thread.join(WAIT)
        assert not thread.is_alive()
        with suppress(StoreFenced):
            archived.store.close()


def put_heartbeat(archived: ArchivedStore, *, standby_ids: tuple[str, ...], owner_epoch: int = 1, nonce: str) -> None:
    heartbeat = Heartbeat(owner_epoch=owner_epoch, standbys=standby_ids, nonce=nonce)
    with closing(open_store(str(archived.bucket))) as bucket:
        bucket.put(heartbeat_key(archived.store_id), msgspec.json.encode(heartbeat))


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ArchivedStore, Standby]]:
    """An owner whose heartbeats the test puts itself, and a standby."""
    monkeypatch.setattr(standbys, "FIRST_LIST_SECONDS", 3_600.0)
    monkeypatch.setattr(standbys, "LISTEN_SECONDS", 0.0)
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        with Standby(str(archived.bucket), tmp_path / "standby") as standby:
            standby.poll()
            yield archived, standby


def silence_after(standby: Standby, *seconds: float) -> float:
    for passed in seconds:
        is_alive = standby._owner.has_new_heartbeat(standby.status.store_id, standby.status.position.epoch)
        standby._count_silence(is_alive, passed)
    return standby.status.silent_seconds


def test_silence_counts_only_while_the_owner_names_the_standby(followed: tuple[ArchivedStore, Standby]) -> None:
    """Hazard: a standby that could not reach the bucket for minutes is forgotten by an idle owner, which then puts no more
    heartbeats. When the standby was back, it counted that as silence."""
    archived, standby = followed
    assert silence_after(standby, 2.0, 2.0) == 0, "no heartbeat yet"
    put_heartbeat(archived, standby_ids=("another",), nonce="a")
    assert silence_after(standby, 2.0, 2.0) == 0, "not named"
    put_heartbeat(archived, standby_ids=(standby._owner.standby_id,), nonce="b")
    assert silence_after(standby, 2.0) == 0, "the heartbeat itself"
    assert silence_after(standby, 2.0, 3_600.0) == 4.0  # suspended: nothing was received because nothing was polled
    put_heartbeat(archived, standby_ids=(standby._owner.standby_id,), nonce="c")
    assert silence_after(standby, 2.0) == 0
    assert silence_after(standby, 2.0) == 2.0
    put_heartbeat(archived, standby_ids=(), nonce="d")
    assert silence_after(standby, 2.0, 2.0) == 0, "forgotten"


def test_a_time_of_silence_that_a_healthy_owner_may_reach_is_refused(
    followed: tuple[ArchivedStore, Standby], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.store.standby.HEARTBEAT_SECONDS", 5.0)
    with pytest.raises(InvalidInput, match="more than 10 seconds"):
        followed[1].run(promote_after=10)


def test_heartbeats_of_another_owner_and_damaged_ones_are_no_sign_of_life(
    followed: tuple[ArchivedStore, Standby],
) -> None:
    """Hazard: a deposed owner that still runs would keep its dead successor from being replaced."""
    archived, standby = followed
    put_heartbeat(archived, standby_ids=(standby._owner.standby_id,), nonce="a")
    assert silence_after(standby, 2.0, 2.0) == 2.0
    put_heartbeat(archived, standby_ids=(), owner_epoch=2, nonce="b")
    assert silence_after(standby, 2.0) == 4.0
    (archived.bucket / heartbeat_key(archived.store_id)).write_bytes(b"\xff[[[")
    assert silence_after(standby, 2.0) == 6.0


def test_a_standby_that_is_gone_is_no_longer_named(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived, closing(open_store(str(archived.bucket))) as bucket:
        fill(archived.store, 0)
        archived.wait_archived()

        def named() -> tuple[str, ...] | None:
            heartbeat = read_heartbeat(bucket, archived.store_id)
            return heartbeat.standbys if heartbeat is not None else None

        with running_standby(archived) as running:
            assert named() == (running.standby._owner.standby_id,)
        until(lambda: named() == ())
        heartbeat = read_heartbeat(bucket, archived.store_id)
        time.sleep(1.0)
        assert read_heartbeat(bucket, archived.store_id) == heartbeat, "nobody reads further heartbeats"


def test_a_heartbeat_is_neither_a_standby_nor_garbage(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived, closing(open_store(str(archived.bucket))) as bucket:
        fill(archived.store, 0)
        archived.wait_archived()
        with running_standby(archived) as running:
            standby_id = running.standby._owner.standby_id
            assert [entry.standby_id for entry in registrations(bucket, archived.store_id)] == [standby_id]
            assert archived.archiver.standbys.standby_ids == (standby_id,)
        archived.store.maintain()
        archived.store._parts.window.look(now=True)
        assert archived.store.heavy.audit_archive().table().num_rows == 0
        assert bucket.head(heartbeat_key(archived.store_id)).size_bytes
