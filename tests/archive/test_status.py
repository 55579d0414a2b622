"""Status, traffic and metrics of an archive match its actual state."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

import quire
from quire.archive import status as s
from quire.archive.metrics import ArchiveCollector
from quire.archive.window import restorable_range
from quire.core.hourly import HOUR_SECONDS
from quire.objects.open import open_store
from tests.archive.archived_store import Gate, archived_store, fill, until

GOOD = s.DrillRecord(at_ms=5_000, seconds=2.0, restore_seconds=1.0, restored_at_ms=4_000, databases=3, bytes=9)


def test_a_quiet_store_is_archived_and_restorable_now(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        until(lambda: archived.archiver.status().state == "archived")
        status = archived.archiver.status()
        assert (status.mode, status.lag_seconds, status.memory_bytes, status.backlog_bytes) == ("async", 0.0, 0, 0)
        assert status.is_safe
        assert status.puts == archived.archiver.traffic.puts > 0
        assert status.put_bytes > 0
        assert abs(status.restorable_at_ms - archived.store.manifest.clock.now_ms()) < 5_000
        assert archived.store.info().archive is not None


def test_an_unavailable_bucket_is_reported(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        gate = Gate(archived.archiver)
        gate.is_down = True
        fill(archived.store, 100)
        until(lambda: archived.archiver.status().state == "behind")
        status = archived.archiver.status()
        assert not status.is_safe
        assert status.lag_seconds > 0
        assert status.memory_bytes > 0
        assert status.last_error
        gate.is_down = False
        archived.wait_archived()
        until(lambda: archived.archiver.status().state == "archived")


def test_the_oldest_and_the_newest_moment_are_found_in_the_bucket(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        first = archived.archiver.status().last_cut_at_ms
        fill(archived.store, 100)
        archived.wait_archived()
        with archived.store.manifest.read() as txn:
            store_id = txn.store_id()
        bucket = open_store(str(archived.bucket))
        window = restorable_range(bucket, store_id)
        bucket.close()
        assert window.oldest_at_ms <= first <= window.newest_at_ms
        assert window.oldest < window.newest
        restored = quire.restore(str(archived.bucket), archived.home / "oldest", at_ms=window.oldest_at_ms)
        assert restored.position >= window.oldest
        with pytest.raises(quire.InvalidInput, match="does not reach back"):
            quire.restore(str(archived.bucket), archived.home / "before", at_ms=window.oldest_at_ms - 1)


def test_rates_are_those_of_the_last_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000.0]
    monkeypatch.setattr("quire.core.hourly.time.monotonic", lambda: now[0])
    traffic = s.Traffic()
    for _ in range(7_200):
        now[0] += 1
        traffic.count(10)
    puts, size = traffic.per_hour()
    assert (traffic.puts, traffic.put_bytes) == (7_200, 72_000)
    assert puts == pytest.approx(3_600, rel=0.02)
    assert size == pytest.approx(36_000, rel=0.02)
    now[0] += 2 * HOUR_SECONDS
    assert traffic.per_hour() == (0.0, 0.0)
    status = s.ArchiveStatus(mode="async", state="archived", puts_per_hour=3_600.0, writes_per_hour=3_600.0)
    assert status.puts_per_month == 2_628_000
    assert status.dollars_per_month == pytest.approx(13.14)


def test_a_first_base_does_not_distort_the_rate() -> None:
    traffic = s.Traffic()
    traffic.count(600)
    assert traffic.per_hour() == pytest.approx((6.0, 3_600.0))


def values(status: s.ArchiveStatus | None, now_ms: int = 10_000) -> dict[str, float]:
    families = ArchiveCollector(lambda: status, lambda: now_ms).collect()
    return {
        sample.name.removeprefix("quire_archive_"): sample.value for family in families for sample in family.samples
    }


def test_metrics_match_the_status() -> None:
    assert set(values(None).values()) == {0.0}
    status = s.ArchiveStatus(
        mode="async",
        state="behind",
        interval_seconds=2.0,
        lag_seconds=30.0,
        memory_bytes=5,
        backlog_bytes=7,
        restorable_at_ms=4_000,
        puts=3,
        put_bytes=40,
        writes_per_hour=3_600.0,
        reads_per_hour=100.0,
        fenced=True,
        last_drill=GOOD,
    )
    metrics = values(status)
    assert (metrics["writes_per_hour"], metrics["reads_per_hour"]) == (3_600, 100)
    assert metrics["dollars_per_month"] == pytest.approx(13.17, abs=0.01)
    assert (metrics["enabled"], metrics["interval_seconds"], metrics["lag_seconds"]) == (1, 2, 30)
    assert (metrics["backlog_bytes"], metrics["restorable_age_seconds"], metrics["fenced"]) == (12, 6, 1)
    assert (metrics["puts_total"], metrics["put_bytes_total"]) == (3, 40)
    assert (metrics["last_drill_success"], metrics["last_drill_timestamp_seconds"], metrics["last_drill_seconds"]) == (
        1,
        5,
        2,
    )
    assert values(replace(status, last_drill=replace(GOOD, problems=("x",))))["last_drill_success"] == 0
