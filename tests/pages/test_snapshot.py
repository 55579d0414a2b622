"""Readers: each has one version, is renewed or expires, and gets specific errors for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.core.errors import LeaseExpired, OutOfRange, ReadOnly, UnknownReader
from quire.core.ids import Epoch
from quire.pages.readers import LEASE_SECONDS, Lease
from tests.pages.engine_harness import PAGE, Model, Pages, assert_reads, image, write


def test_a_snapshot_shows_its_version_whatever_happens(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image(), 1: image()})
    with store.open_snapshot(tags={"job": "report"}) as reader:
        version = model.newest
        write(store, model, {0: image(), 5: image()})
        store.wal.publish()
        write(store, model, {0: image()}, truncate=1)
        store.wal.seal()
        pages.checkpoint(store)
        assert_reads(reader, version)
        assert reader.tags == {"job": "report"}
        assert reader.epoch == Epoch(version.lsn, 1)
        assert reader.time_ms == pages.clock.now_ms()
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)


def test_a_snapshot_refuses_writes(pages: Pages) -> None:
    with pages.database().open_snapshot() as reader, pytest.raises(ReadOnly):
        reader.write_page(0, image())


def test_pages_outside_the_version_are_errors(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image(), 3: image()})
    with store.open_snapshot() as reader:
        write(store, model, {9: image()})
        for page in (-1, 4, 9, 2**40):
            with pytest.raises(OutOfRange):
                reader.read_page(page)
            with pytest.raises(OutOfRange):
                reader.read_pages([0, page])
    with store.open_snapshot() as reader:
        assert reader.read_page(9)


def test_a_page_in_the_cache_is_not_shown_beyond_the_end_of_a_smaller_version(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {page: image() for page in range(5)})
    write(store, model, {}, truncate=2)
    with store.open_snapshot() as reader:
        with pytest.raises(OutOfRange):
            reader.read_page(3)
        assert list(dict(reader.scan())) == [0, 1]


def test_a_silent_reader_expires_and_gets_an_error(pages: Pages, capsys: pytest.CaptureFixture[str]) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    silent, renewed = store.open_snapshot(tags={"who": "me"}), store.open_snapshot()
    assert silent.read_page(0) == model.newest.page(0)
    for _ in range(5):
        pages.clock.advance(LEASE_SECONDS / 3)
        renewed.renew()
        pages.engine.tick(store)
    for call in (lambda: silent.read_page(0), lambda: silent.read_pages([0]), silent.renew):
        with pytest.raises(LeaseExpired):
            call()
    assert "'who': 'me'" in capsys.readouterr().err
    assert not silent.is_open
    silent.close()
    assert_reads(renewed, model.newest)
    renewed.close()
    with pytest.raises(UnknownReader):
        renewed.renew()
    with pytest.raises(UnknownReader):
        renewed.read_page(0)
    renewed.close()


def test_a_snapshot_used_as_a_context_manager_renews_itself(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    with store.open_snapshot() as reader:
        for _ in range(30):
            pages.clock.advance(LEASE_SECONDS / 2)
            pages.engine.tick(store)
        assert_reads(reader, model.newest)
    assert not reader.is_open
    assert len(store.readers) == 0


def test_an_expired_reader_whose_pages_are_gone_gets_lease_expired(pages: Pages) -> None:
    """Not that the database is damaged."""
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    reader = store.open_snapshot()
    lease = reader._lease
    assert isinstance(lease, Lease)
    write(store, model, {0: image()})
    lease.open = True
    store.readers._retire([lease])
    lease.open = True  # it seems alive until the next check: the moment between two checks
    pages.checkpoint(store)
    pages.engine.cache._turn(10**9)
    original = store.versions.read

    def read(page: int, lsn: int) -> bytes:
        lease.open = False
        return original(page, lsn)

    store.versions.read = read  # type: ignore[method-assign]
    with pytest.raises(LeaseExpired):
        reader.read_page(0)


def test_bulk_reads_and_scans_agree_with_single_reads(tmp_path: Path) -> None:
    pages, model = Pages(tmp_path), Model()
    store = pages.database()
    for number in range(6):
        write(store, model, {page: image() for page in range(number * 3, number * 3 + 12)})
        if number == 2:
            pages.checkpoint(store)
        if number == 3:
            store.wal.publish()
    with store.open_snapshot() as reader:
        single = {page: reader.read_page(page) for page in range(reader.size_pages)}
        pages.engine.cache._turn(10**9)
        assert reader.read_pages([5, 1, 5, 20]) == {page: single[page] for page in (5, 1, 20)}
        assert dict(reader.scan(3, 9)) == {page: single[page] for page in range(3, 9)}
        assert dict(reader.scan(cold=False)) == single
        assert single == {page: model.newest.page(page) for page in range(model.newest.size)}
    pages.stop()


def test_a_cold_scan_does_not_change_the_cache(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {page: image() for page in range(40)})
    pages.checkpoint(store)
    write(store, model, {page: image() for page in range(10)})
    cache = pages.engine.cache
    cache._turn(10**9)
    cache._turn(10**9)
    before = cache.used_bytes
    with store.open_snapshot() as reader:
        assert dict(reader.scan(cold=True)) == {page: model.newest.page(page) for page in range(40)}
        assert cache.used_bytes == before == 0
        assert len(pages.engine.sources._chunks) == 0
        reader.read_pages(range(40))
        assert cache.used_bytes >= 40 * PAGE


def test_a_cold_scan_is_held_to_its_limit(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {page: image() for page in range(40)})
    throttle = pages.engine.sources.throttle
    assert throttle is not None
    throttle.bytes_per_second, throttle._left, throttle._sleep = 10 * PAGE, 0.0, pages.clock.advance
    before = pages.clock.monotonic()
    with store.open_snapshot() as reader:
        reader.read_pages(range(40), cold=True)
    assert pages.clock.monotonic() - before >= 4.0
