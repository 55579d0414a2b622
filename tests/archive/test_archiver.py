"""What the archiver promises while the bucket answers, is away, comes back, and across lives of the store."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

import quire
from quire.archive import base_writer
from quire.archive.format import Position
from quire.core.errors import AccessDenied, NotArchived
from quire.core.limits import MIB
from quire.testing.clock import ManualClock
from tests.archive.world import WAIT, Gate, World, contents, fill, kill, quiet, read, settings, until, world


def test_a_clean_close_continues_without_a_base(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        fill(w.store, 0)
        w.reopen()
        bases = {header.base for header in w.headers()}
        fill(w.store, 100)
        w.archived()
        assert {header.base for header in w.headers()} == bases
        expected = contents(w.store)
    assert read(w.restore()) == expected


def test_a_kill_leads_to_a_base(tmp_path: Path) -> None:
    w = World(tmp_path)
    fill(w.store, 0)
    w.archived()
    last = w.headers()[-1]
    kill(w.store)
    w.store = w.open()
    fill(w.store, 100)
    w.archived()
    assert w.headers()[-1].base > last.position.number
    expected = contents(w.store)
    w.close()
    assert read(w.restore()) == expected


def test_changes_of_a_life_without_an_archive_are_in_the_next_base(tmp_path: Path) -> None:
    """A life with mode "off" left archive.json as it was; key-value writes change no row of the manifest, so the next life went
    on without a base, and what was written between was missing in the bucket."""
    w = World(tmp_path)
    fill(w.store, 0)
    w.close()
    with quire.open(w.root, settings=quiet()) as store:
        store.kv("pairs").put(b"between", b"lives")
    w.store = w.open()
    fill(w.store, 100)
    w.archived()
    expected = contents(w.store)
    w.close()
    assert read(w.restore()) == expected
    assert expected["pairs"][b"between"] == b"lives"


# ── a bucket that is away ─────────────────────────────────────────────────────────────────────────────────────────────
def test_work_goes_on_while_the_bucket_is_away_and_nothing_is_lost(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        fill(w.store, 0)
        w.archived()
        gate = Gate(w.archiver)
        gate.is_away = True
        fill(w.store, 100)
        w.store.kv("pairs").flush()
        w.store.kv("pairs").compact()
        with pytest.raises(NotArchived, match="not yet in the bucket"):
            w.archiver.wait(0.2)
        until(lambda: w.archiver.lag_seconds() > 0.3)
        assert w.archiver.last_error
        gate.is_away = False
        w.archived()
        until(lambda: w.archiver.lag_seconds() == 0.0)
        assert w.archiver.last_error == ""
        expected = contents(w.store)
    assert read(w.restore()) == expected


def test_the_lag_is_shown_when_the_bucket_never_answered(tmp_path: Path) -> None:
    """Nothing was taken from the queue yet, and the lag was 0."""
    w = World(tmp_path)
    w.close()
    bucket, away = tmp_path / "bucket", tmp_path / "away"
    (w.root / "archive.json").unlink()
    os.rename(bucket, away)
    bucket.write_bytes(b"a file: nothing can be listed or put")
    w.store = w.open()
    fill(w.store, 0)
    until(lambda: w.archiver.lag_seconds() > 0.3)
    bucket.unlink()
    os.rename(away, bucket)
    w.archived()
    until(lambda: w.archiver.lag_seconds() == 0.0)
    w.close()


def test_a_permanent_error_is_shown(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        fill(w.store, 0)
        w.archived()
        gate = Gate(w.archiver)
        gate.error, gate.is_away = AccessDenied("access denied"), True
        fill(w.store, 100)
        with pytest.raises(NotArchived) as refused:
            w.archiver.wait(0.3)
        assert "access denied" in str(refused.value)
        assert "access denied" in w.archiver.last_error
        gate.is_away = False
        w.archived()


def test_more_than_memory_waits_on_disk(tmp_path: Path) -> None:
    with world(tmp_path, memory_bytes=MIB) as w:
        fill(w.store, 0)
        w.archived()
        gate = Gate(w.archiver)
        gate.is_away = True
        bulk(w, 0, 24)
        until(lambda: list((w.root / "archive").glob("*.log")))
        gate.is_away = False
        w.archived()
        until(lambda: not list((w.root / "archive").iterdir()))
        assert {header.base for header in w.headers()[-3:]} == {w.headers()[-1].base}
        expected = contents(w.store)
    assert read(w.restore()) == expected


def bulk(w: World, start: int, count: int, size: int = 200_000) -> None:
    """Incompressible records, each in a cut of its own if the archiver is quick."""
    stream = w.store.stream("events")
    for _ in range(start, start + count):
        stream.append([os.urandom(size)]).result()
        time.sleep(0.03)


def test_a_broken_chain_is_restorable_up_to_the_break_and_after_the_next_base(tmp_path: Path) -> None:
    with world(tmp_path, memory_bytes=MIB, backlog_bytes=2 * MIB) as w:
        fill(w.store, 0)
        w.archived()
        before = contents(w.store)
        gate = Gate(w.archiver)
        gate.is_away = True
        breaks = w.archiver._breaks
        while w.archiver._breaks == breaks:
            bulk(w, 0, 10)
        assert w.look("during") == before
        fill(w.store, 100)
        gate.is_away = False
        w.archived()
        numbers = [header.position.number for header in w.headers()]
        assert numbers == list(range(len(numbers))), "numbers have no gaps"
        expected = contents(w.store)
    assert read(w.restore("after")) == expected


def test_nobody_is_told_that_what_a_break_dropped_is_archived(tmp_path: Path) -> None:
    """The object that was on its way when the chain broke arrived, and the queue was empty: `wait` returned before the base."""
    with world(tmp_path, memory_bytes=MIB, backlog_bytes=0) as w:
        fill(w.store, 0)
        w.archived()
        gate = Gate(w.archiver)
        gate.held.clear()
        gate.is_waiting.clear()
        w.store.kv("pairs").put(b"first", b"on its way")
        assert gate.is_waiting.wait(WAIT)
        base_may_begin = threading.Event()
        write_base = w.archiver._write_base

        def later() -> None:
            assert base_may_begin.wait(WAIT)
            write_base()

        w.archiver._write_base = later  # type: ignore[method-assign]
        breaks = w.archiver._breaks
        while w.archiver._breaks == breaks:
            bulk(w, 0, 4)
        gate.held.set()
        until(lambda: not w.archiver._outbox)
        time.sleep(0.2)
        with pytest.raises(NotArchived):
            w.archiver.wait(0.2)
        base_may_begin.set()
        w.archived()
        expected = contents(w.store)
    assert read(w.restore()) == expected


def test_tables_that_a_break_dropped_are_uploaded_by_the_base_after_it(tmp_path: Path) -> None:
    """They were remembered as uploaded: the base named objects that the bucket never got."""
    with world(tmp_path, memory_bytes=MIB, backlog_bytes=0) as w:
        fill(w.store, 0)
        w.archived()
        gate = Gate(w.archiver)
        gate.is_away = True
        w.store.kv("pairs").put(b"x", b"on its way")
        until(lambda: w.archiver._outbox)
        breaks = w.archiver._breaks
        fill(w.store, 100)
        w.store.kv("pairs").flush()  # a table in a cut that is dropped
        until(lambda: not w.archiver.queue.size_bytes)
        while w.archiver._breaks == breaks:
            bulk(w, 0, 4)
        gate.is_away = False
        w.archived()
        until(lambda: not list((w.root / "archive").iterdir()))  # those of tables that were dropped, too
        expected = contents(w.store)
    assert read(w.restore()) == expected


def test_a_base_that_began_before_a_break_does_not_count(tmp_path: Path) -> None:
    with world(tmp_path, memory_bytes=MIB, backlog_bytes=0, base_seconds=0.5) as w:
        fill(w.store, 0)
        w.archived()
        gate = Gate(w.archiver)
        gate.before = lambda key: gate.held.clear() if "/base/" in key else None
        gate.is_waiting.clear()
        start = 1000
        while gate.held.is_set():
            fill(w.store, start, 1)
            start += 1
        breaks = w.archiver._breaks  # a base is being read: its parts wait
        while w.archiver._breaks == breaks:
            bulk(w, 0, 4)
        gate.before = lambda _: None
        gate.held.set()
        w.archived()
        expected = contents(w.store)
    assert read(w.restore()) == expected


# ── lives ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_object_of_a_former_life_that_arrives_late_deposes_nobody(tmp_path: Path) -> None:
    """A put whose process was killed may be carried out after the next life has looked for the end of the log."""
    w = World(tmp_path)
    fill(w.store, 0)
    w.archived()
    number = w.headers()[-1].position.number
    late = w.log_path(Position(1, number + 1))
    fill(w.store, 100)
    w.archived()
    data = late.read_bytes()
    kill(w.store)
    for header in w.headers():
        if header.position.number > number:
            w.log_path(header.position).unlink()
    w.store = w.open()
    until(lambda: w.archiver._next is not None)
    if not late.exists():  # the first object of this life is written when a base has begun or something was changed
        late.write_bytes(data)
    fill(w.store, 200)
    w.archived()
    expected = contents(w.store)
    w.close()
    assert read(w.restore()) == expected


def test_moments_never_fall_when_the_clock_goes_back(tmp_path: Path) -> None:
    clock = ManualClock(4_000_000_000_000)
    w = World(tmp_path, clock=clock)
    fill(w.store, 0)
    w.archived()
    expected = contents(w.store)
    moment = clock.now_ms()
    clock.jump(-86_400.0)
    fill(w.store, 100)
    w.reopen()
    fill(w.store, 200)
    w.archived()
    clock.jump(2 * 86_400.0)
    fill(w.store, 300)
    w.close()
    moments = [header.at_ms for header in w.headers()]
    assert moments == sorted(moments)
    assert contents_of_shop(read(w.restore("past", at_ms=moment), clock=clock)) >= contents_of_shop(expected)


def contents_of_shop(state: dict[str, object]) -> int:
    shop = state["shop"]
    assert isinstance(shop, dict)
    return len(shop)


def test_what_comes_during_a_cut_waits_for_the_next_one(tmp_path: Path) -> None:
    """Objects followed each other without a pause while somebody wrote."""
    with world(tmp_path, interval_seconds=0.5) as w:
        fill(w.store, 0)
        w.archived()
        objects, begun = len(w.headers()), time.monotonic()
        kv = w.store.kv("pairs")
        while time.monotonic() - begun < 2.0:
            kv.put(b"hot", b"value")
        intervals = (time.monotonic() - begun) / 0.5
        assert len(w.headers()) - objects <= intervals + 2


def test_settings_given_to_open_are_those_of_the_archive(tmp_path: Path) -> None:
    """quire.toml says nothing of an archive; the settings that a program opens the store with do."""
    with quire.open(tmp_path / "store", settings=settings(tmp_path / "bucket")) as store:
        assert store.archive is not None
        fill(store, 0)
        store.archive.wait(WAIT)
        expected = contents(store)
    quire.restore(str(tmp_path / "bucket"), tmp_path / "restored")
    assert read(tmp_path / "restored") == expected


def test_a_base_that_waits_for_the_bucket_holds_no_transaction_of_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB uses no page again that an open reader may see: an outage during a base would have filled the map."""
    monkeypatch.setattr(base_writer, "OBJECT_BYTES", 1_000)  # parts end in the middle of the manifest's rows
    with world(tmp_path, base_seconds=0.3) as w:
        fill(w.store, 0)
        w.archived()
        gate = Gate(w.archiver)
        gate.before = lambda key: gate.held.clear() if "/base/" in key else None
        start = 1000
        while gate.held.is_set():
            fill(w.store, start, 1)
            start += 1
        readers = [thread for _, thread in w.store.manifest.env.gate.unreported(0.0)]
        gate.before = lambda _: None
        gate.held.set()
        w.archived()
        expected = contents(w.store)
    assert not [thread for thread in readers if "archive" in thread]
    assert read(w.restore()) == expected


@pytest.mark.timeout(60)
def test_a_base_does_not_wait_for_a_file_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(tmp_path) as w:
        path = w.root / "lsm" / "table.sst"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"table")
        put = w.archiver._uploader.put_artifact

        def removed(key: str, name: str) -> None:
            path.unlink()
            put(key, name)

        monkeypatch.setattr(w.archiver._uploader, "put_artifact", removed)
        with pytest.raises(FileNotFoundError):
            w.archiver.artifact(Position(1, 0), str(path), "lsm/table.sst")
