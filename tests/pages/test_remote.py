"""Readers that are clients of the owner: rows that survive it, renewals that are rarely written, and refusals."""

from __future__ import annotations

import pytest

from quire.core.errors import DatabaseTombstoned, InvalidInput, LeaseExpired, UnknownDatabase, UnknownReader
from quire.manifest import tables as t
from quire.manifest.ops.local import PutReader
from quire.manifest.records import ReaderRecord
from quire.pages.pagestore import PageStore
from quire.pages.readers import HEARTBEAT_SECONDS, LEASE_SECONDS
from quire.pages.remote import MARK_TAG
from tests.pages.engine_harness import Model, Pages, Version, assert_reads, image, small_segments, write


@pytest.fixture
def small_pages(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> Pages:
    small_segments(monkeypatch, frames=6)
    return pages


def rows(pages: Pages) -> dict[int, ReaderRecord]:
    with pages.manifest.read() as txn:
        return {key[1]: row for key, row in txn.scan(t.SNAPSHOT_READERS)}


def database_with_version(pages: Pages) -> tuple[PageStore, Model, Version]:
    """A database with a version that a client may read."""
    store, model = pages.database(), Model()
    version = write(store, model, {page: image() for page in range(9)})
    return store, model, version


def test_a_client_reads_its_version_until_it_closes(small_pages: Pages) -> None:
    pages, (store, model, version) = small_pages, database_with_version(small_pages)
    lease = pages.engine.lease_reader("shop", {"who": "flight"}, 20.0)
    assert (lease.db_id, lease.lsn, lease.size_pages, lease.page_size) == (store.db_id, version.lsn, 9, store.page_size)
    assert (lease.ttl_seconds, lease.tags) == (20.0, {"who": "flight"})
    write(store, model, {page: image() for page in range(12)})
    pages.checkpoint(store)
    assert pages.engine.floor(store.db_id) == version.lsn
    assert_reads(pages.engine.read_leased("shop", lease.reader_id), version)
    assert pages.engine.figures().databases[0].readers_active == 1, "the reader in memory and its row count once"
    pages.engine.close_reader("shop", lease.reader_id)
    assert pages.engine.floor(store.db_id) == model.newest.lsn
    assert rows(pages) == {}
    for call in (pages.engine.close_reader, pages.engine.renew_reader, pages.engine.read_leased):
        with pytest.raises(UnknownReader):
            call("shop", lease.reader_id)


def test_invalid_requests_are_refused_and_leave_nothing(pages: Pages) -> None:
    store, _, _ = database_with_version(pages)
    for ttl in (0.0, -1.0, 3601.0, float("nan")):
        with pytest.raises(InvalidInput):
            pages.engine.lease_reader("shop", ttl=ttl)
    with pytest.raises(InvalidInput, match="quire"):
        pages.engine.lease_reader("shop", {MARK_TAG: "1"})
    with pytest.raises(UnknownDatabase):
        pages.engine.lease_reader("nothing")
    assert len(store.readers) == 0
    assert rows(pages) == {}


def test_renewals_are_written_once_per_lease_and_not_with_every_heartbeat(pages: Pages) -> None:
    store, model, version = database_with_version(pages)
    lease = pages.engine.lease_reader("shop")
    write(store, model, {0: image()})
    horizons = {rows(pages)[lease.reader_id].expires_at_ms}
    for _ in range(60):
        pages.clock.advance(HEARTBEAT_SECONDS)
        pages.engine.renew_reader("shop", lease.reader_id)
        pages.engine.tick(store)
        row = rows(pages)[lease.reader_id]
        horizons.add(row.expires_at_ms)
        assert row.expires_at_ms >= pages.clock.now_ms() + LEASE_SECONDS * 1000, (
            "the row lasts as long as the lease in memory"
        )
        assert pages.engine.floor(store.db_id) == version.lsn
    assert len(horizons) <= 60 * HEARTBEAT_SECONDS / LEASE_SECONDS + 1


def test_a_silent_client_is_retired_with_a_warning_and_gets_an_error(
    pages: Pages, capsys: pytest.CaptureFixture[str]
) -> None:
    store, model, _ = database_with_version(pages)
    lease = pages.engine.lease_reader("shop", {"who": "gone"})
    write(store, model, {0: image()})
    pages.clock.advance(LEASE_SECONDS)
    pages.engine.tick(store)
    pages.manifest.record_metric(1, 1, 1.0).result()  # queued after it
    log = capsys.readouterr().err
    assert log.count("reader.heartbeat_lost") == 1
    assert "gone" in log
    assert rows(pages) == {}
    assert pages.engine.floor(store.db_id) == model.newest.lsn
    for call in (pages.engine.renew_reader, pages.engine.read_leased):
        with pytest.raises(LeaseExpired):
            call("shop", lease.reader_id)
    pages.engine.close_reader("shop", lease.reader_id)


def test_a_lease_survives_a_restart_of_the_owner(small_pages: Pages) -> None:
    """M10; Neon 9754, 8817: leases kept only in memory were lost at a restart."""
    pages, (store, model, version) = small_pages, database_with_version(small_pages)
    lease = pages.engine.lease_reader("shop", {"who": "flight"})
    pages.clock.advance(20)
    pages.engine.renew_reader("shop", lease.reader_id)
    write(store, model, {page: image() for page in range(9)})
    pages.crash()
    pages.clock.advance(LEASE_SECONDS - 1)
    store = pages.database()
    pages.checkpoint(store)
    assert pages.engine.floor(store.db_id) == version.lsn, "its row holds the floor before the client returns"
    again = pages.engine.renew_reader("shop", lease.reader_id)
    assert again == lease
    for _ in range(10):
        pages.clock.advance(HEARTBEAT_SECONDS)
        pages.engine.renew_reader("shop", lease.reader_id)
        pages.engine.tick(store)
    write(store, model, {page: image() for page in range(9)})
    pages.checkpoint(store)
    assert_reads(pages.engine.read_leased("shop", lease.reader_id), version)
    pages.engine.close_reader("shop", lease.reader_id)


def test_an_owner_that_was_down_for_long_grants_one_full_lease(
    pages: Pages, capsys: pytest.CaptureFixture[str]
) -> None:
    store, model, version = database_with_version(pages)
    lease, dead_lease = pages.engine.lease_reader("shop"), pages.engine.lease_reader("shop")
    write(store, model, {0: image()})
    pages.clock.advance(1)
    expired = rows(pages)[dead_lease.reader_id].opened_at_ms + 500
    pages.manifest.submit([PutReader(store.db_id, dead_lease.reader_id, 1, expired)]).result()
    pages.die()
    pages.clock.advance(86_400)
    pages.start()
    store = pages.database()
    pages.engine.tick(store)
    assert pages.engine.floor(store.db_id) == version.lsn
    assert capsys.readouterr().err.count("reader.heartbeat_lost") == 1, "one lease had expired before the owner ended"
    pages.clock.advance(LEASE_SECONDS)
    assert pages.engine.floor(store.db_id) == model.newest.lsn
    with pytest.raises(LeaseExpired):
        pages.engine.renew_reader("shop", lease.reader_id)
    with pytest.raises(LeaseExpired):
        pages.engine.renew_reader("shop", dead_lease.reader_id)


def test_a_renewal_below_a_granted_floor_is_refused(small_pages: Pages) -> None:
    """Neon 12435: a renewal below the applied cut-off was accepted."""
    pages, (store, model, version) = small_pages, database_with_version(small_pages)
    lease = pages.engine.lease_reader("shop")
    record = rows(pages)[lease.reader_id]
    pages.engine.close_reader("shop", lease.reader_id)
    write(store, model, {page: image() for page in range(9)})
    pages.checkpoint(store)
    # A row that reappears, as from a replica or a late write, protects nothing.
    horizon = pages.clock.now_ms() + 60_000
    pages.manifest.submit([PutReader(store.db_id, 77, version.lsn, horizon, record.tags)]).result()
    with pytest.raises(LeaseExpired) as caught:
        pages.engine.renew_reader("shop", 77)
    assert caught.value.where["floor"] > version.lsn
    pages.manifest.record_metric(1, 1, 1.0).result()
    assert rows(pages) == {}
    pages.manifest.submit([PutReader(store.db_id, 78, version.lsn, horizon, record.tags)]).result()
    pages.reopen()
    with pytest.raises(LeaseExpired):
        pages.engine.renew_reader("shop", 78)


def test_a_database_that_is_closed_and_opened_again_keeps_its_clients(pages: Pages) -> None:
    store, model, version = database_with_version(pages)
    lease = pages.engine.lease_reader("shop")
    write(store, model, {0: image()})
    pages.engine.close_database("shop")
    assert pages.engine.floor(store.db_id) == version.lsn
    assert_reads(pages.engine.read_leased("shop", lease.reader_id), version)
    assert pages.engine.renew_reader("shop", lease.reader_id) == lease
    pages.engine.close_reader("shop", lease.reader_id)


def test_clients_of_a_dropped_database_get_an_error(pages: Pages) -> None:
    store, _, _ = database_with_version(pages)
    lease = pages.engine.lease_reader("shop")
    pages.manifest.drop_db(store.db_id).result()
    pages.engine.tick(store)
    with pytest.raises(DatabaseTombstoned):
        pages.engine.renew_reader(store.db_id, lease.reader_id)
