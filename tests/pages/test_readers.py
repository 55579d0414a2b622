"""Leases and the floor, with a clock that only tests advance."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import LeaseExpired, SnapshotGone, UnknownReader
from quire.pages.readers import HEARTBEAT_SECONDS, LEASE_SECONDS, RETIRED_MAX, Readers
from quire.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def readers(clock: ManualClock) -> Readers:
    return Readers(7, clock)


def test_the_floor_is_the_lowest_live_version_or_the_newest(readers: Readers) -> None:
    assert readers.floor(10) == 10
    old, new = readers.open(10), readers.open(15)
    assert readers.floor(20) == 10
    readers.close(old.reader_id)
    assert readers.floor(20) == 15
    readers.close(new.reader_id)
    assert readers.floor(20) == 20


def test_no_lease_is_taken_below_a_granted_floor(readers: Readers) -> None:
    readers.floor(10)
    with pytest.raises(SnapshotGone):
        readers.open(9)
    assert readers.open(10).open


def test_a_floor_never_falls(readers: Readers) -> None:
    readers.floor(10)
    assert readers.floor(5) == 10


def test_a_lease_expires_unless_it_is_renewed(
    readers: Readers, clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    silent, alive = readers.open(1, tags={"who": "silent"}), readers.open(2)
    clock.advance(LEASE_SECONDS - 1)
    readers.renew(alive.reader_id)
    assert readers.expire() == []
    clock.advance(1)
    assert readers.expire() == [silent]
    assert "reader.heartbeat_lost" in capsys.readouterr().err
    assert readers.floor(9) == 2
    with pytest.raises(LeaseExpired):
        readers.require(silent)
    with pytest.raises(LeaseExpired):
        readers.renew(silent.reader_id)
    readers.close(silent.reader_id)  # it already got the error; closing is not a second one
    readers.require(alive)


def test_a_lease_protects_until_it_is_retired_however_late_that_is(readers: Readers, clock: ManualClock) -> None:
    lease = readers.open(3)
    clock.advance(10 * LEASE_SECONDS)
    assert readers.floor(9) == 3
    readers.require(lease)
    readers.expire()
    assert readers.floor(9) == 9


def test_holds_never_expire(readers: Readers, clock: ManualClock) -> None:
    hold = readers.open(3, ttl_seconds=None)
    clock.advance(1e9)
    assert readers.expire() == []
    assert readers.floor(9) == 3
    readers.close(hold.reader_id)


def test_an_unknown_reader_is_an_error(readers: Readers) -> None:
    closed = readers.open(1)
    readers.close(closed.reader_id)
    for call in (readers.renew, readers.close):
        with pytest.raises(UnknownReader):
            call(closed.reader_id)
    with pytest.raises(UnknownReader):
        readers.require(closed)


def test_leases_that_are_kept_alive_live_as_long_as_their_holder(readers: Readers, clock: ManualClock) -> None:
    class Holder:
        pass

    holder, lease = Holder(), readers.open(1)
    readers.keep_alive(holder, lease)
    for _ in range(20):
        clock.advance(HEARTBEAT_SECONDS)
        readers.beat()
        assert readers.expire() == []
    del holder
    gc.collect()
    clock.advance(LEASE_SECONDS)
    readers.beat()
    assert readers.expire() == [lease]


def test_outside_readers_hold_the_floor_too(clock: ManualClock) -> None:
    outside_floor: list[int | None] = [None]
    readers = Readers(1, clock, lambda: outside_floor[0])
    outside_floor[0] = 4
    assert readers.floor(9) == 4
    outside_floor[0] = None
    assert readers.floor(9) == 9


def test_a_long_reader_is_reported_once(readers: Readers, clock: ManualClock) -> None:
    lease = readers.open(1)
    for _ in range(40):
        clock.advance(10)
        readers.renew(lease.reader_id)
        readers.expire()
    assert lease.reported


def test_the_number_of_remembered_retired_leases_is_bounded(readers: Readers, clock: ManualClock) -> None:
    for _ in range(RETIRED_MAX + 100):
        readers.open(1)
    clock.advance(LEASE_SECONDS)
    readers.expire()
    assert len(readers._retired) == RETIRED_MAX


def test_opening_the_newest_version_never_conflicts_with_the_floor(readers: Readers) -> None:
    """A checkpoint that requests the floor between a reader's choice of version and its lease must not make the reader
    fail."""
    newest = [0]
    stop = threading.Event()
    versions: list[int] = []

    def move() -> None:
        while not stop.is_set():
            newest[0] += 1
            readers.floor(newest[0])

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(2000):
            lease, version = readers.open_newest(lambda: (newest[0], newest[0]))
            assert readers.given_floor <= lease.lsn == version
            versions.append(version)
            readers.close(lease.reader_id)
    finally:
        stop.set()
        mover.join()
    assert versions == sorted(versions)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("open"), st.integers(0, 30)),
            st.tuples(st.just("close"), st.integers(0, 9)),
            st.tuples(st.just("renew"), st.integers(0, 9)),
            st.tuples(st.just("advance"), st.integers(1, 40)),
            st.tuples(st.just("floor"), st.integers(0, 40)),
        ),
        max_size=40,
    )
)
def test_a_granted_floor_is_never_above_a_live_lease(steps: list[tuple[str, int]]) -> None:
    clock = ManualClock()
    readers, leases, newest = Readers(1, clock), [], 0
    for step, number in steps:
        if step == "open":
            with suppress(SnapshotGone):
                leases.append(readers.open(number))
        elif step == "advance":
            clock.advance(number)
            readers.expire()
        elif step == "floor":
            newest = max(newest, number)
            readers.floor(newest)
        elif number < len(leases):
            with suppress(LeaseExpired, UnknownReader):
                (readers.close if step == "close" else readers.renew)(leases[number].reader_id)
        assert all(readers.given_floor <= lease.lsn for lease in leases if lease.open)
        assert [lease for lease in leases if lease.open] == sorted(readers.peek(), key=lambda lease: lease.reader_id)
