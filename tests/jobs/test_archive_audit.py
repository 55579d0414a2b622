"""The audit of an archive finds what is missing, what was altered and what nothing names; and nothing in a sound one (A8)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import quire
from quire.core.settings import ArchiveSettings, MaintenanceSettings, StoreSettings
from quire.jobs.archive_audit.audit import GRACE_MS, ArchiveAudit
from quire.store import opening
from quire.store.heavy import audit_bucket
from quire.store.store import Store
from quire.testing.clock import ManualClock

HOUR = 3_600.0


class Bucket:
    """A bucket with the archive of a store that has a bit of everything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = str(path / "bucket")
        self.clock = ManualClock()
        with self.open(path / "store") as store:
            self.store_id = store.info().store_id
            for value in (1, 2):
                connection = store.sqlite("shop", create=True)
                connection.execute("create table if not exists t(a, b)")
                with connection:
                    connection.execute("delete from t")
                    connection.executemany("insert into t values(?, ?)", ((value, os.urandom(64)) for _ in range(300)))
                connection.close()
                store.heavy.checkpoint_all()
            kv = store.kv("cart", create=True)
            for number in range(100):
                kv.put(b"%d" % number, os.urandom(64))
            kv.flush()
            stream = store.stream("events", create=True)
            for number in range(50):
                stream.append(b"record %d" % number)
            stream.seal()
            stream.tick()
            self.clock.advance(60)
            store.maintain()

    def open(self, path: Path) -> Store:
        settings = StoreSettings(
            object_store=self.url,
            archive=ArchiveSettings(mode="async", interval_seconds=0.02, base_seconds=HOUR, retain_seconds=HOUR),
            maintenance=MaintenanceSettings(enabled=False),
        )
        return opening.open(str(path), settings=settings, clock=self.clock)

    def audit(self, **more: object) -> ArchiveAudit:
        return audit_bucket(self.url, now_ms=self.now_ms(), **more)  # type: ignore[arg-type]

    def now_ms(self) -> int:
        """An hour after every object was put, by the clock of the machine: that is whose they have."""
        return max(int(path.stat().st_mtime * 1000) for path in self.files()) + GRACE_MS + 1_000

    def files(self, part: str = "") -> list[Path]:
        return sorted(path for path in Path(self.url).rglob("*") if path.is_file() and part in str(path))

    def one(self, part: str) -> Path:
        files = self.files(part)
        assert files, f"no {part}"
        return files[0]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Bucket:
    return Bucket(tmp_path_factory.mktemp("audited"))


@pytest.fixture
def bucket(original: Bucket, tmp_path: Path) -> Bucket:
    """A copy, to be damaged."""
    copy = object.__new__(Bucket)
    copy.path, copy.store_id, copy.clock = tmp_path, original.store_id, original.clock
    copy.url = str(tmp_path / "bucket")
    shutil.copytree(original.url, copy.url)
    return copy


PARTS = ["/log/", "/base/", "/file/", "/base:", "/wal:"]
"""Of the names of: log objects, parts of bases, tables, chunks, segments of streams."""


def test_a_sound_archive_has_no_differences_and_everything_was_read(original: Bucket) -> None:
    ticks: list[tuple[int, int]] = []
    audit = original.audit(progress=lambda done, total: ticks.append((done, total)))
    assert audit.is_sound
    assert (audit.problems, audit.orphans, audit.abandoned) == ([], [], {})
    assert 0 < audit.oldest_at_ms <= audit.newest_at_ms
    named = [path for part in ("/archive/", "/e/") for path in original.files(part) if "/manifest/" not in str(path)]
    assert audit.objects == len(named), "log, base, files, chunks and segments, each once"
    assert ticks == sorted(ticks)
    assert ticks[-1][0] == ticks[-1][1]


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_object_is_named(bucket: Bucket, part: str) -> None:
    files = bucket.files(part)
    assert files, [str(path) for path in bucket.files()]
    gone = files[len(files) // 2]
    gone.unlink()
    audit = bucket.audit()
    assert not audit.is_sound
    named = [row for row in audit.problems if row["state"] == "MISSING"]
    assert named
    if part != "/base/":
        assert str(gone).endswith(named[0]["artifact"])


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_byte_is_found(bucket: Bucket, part: str, place: str) -> None:
    altered = bucket.one(part)
    data = bytearray(altered.read_bytes())
    data[0 if place == "first" else -1] ^= 1
    altered.write_bytes(data)
    audit = bucket.audit()
    assert [row["state"] for row in audit.problems][:1] == ["ALTERED"], audit.problems
    assert str(altered).endswith(audit.problems[0]["artifact"])


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("part", PARTS)
def test_an_object_that_was_cut_is_found(bucket: Bucket, part: str, keep: int) -> None:
    """One that is shorter than a header ended the audit with `OutOfRange`."""
    for cut in {bucket.files(part)[0], bucket.files(part)[-1]}:
        data = cut.read_bytes()
        cut.write_bytes(data[:keep])
        audit = bucket.audit()
        assert "ALTERED" in [row["state"] for row in audit.problems if str(cut).endswith(row["artifact"])], (
            cut,
            audit.problems,
        )
        cut.write_bytes(data)


def _beside(part: str, name: str) -> Callable[[Bucket], Path]:
    return lambda bucket: bucket.one(part).parent / name


@pytest.mark.parametrize(
    "place",
    [
        _beside("/base:", "base:000000ff"),
        _beside("/log/", "notes.txt"),
        lambda bucket: Path(bucket.url) / bucket.store_id / "elsewhere" / "x",
    ],
    ids=["chunk", "archive", "prefix"],
)
def test_an_object_that_nothing_names_is_an_orphan_and_no_damage(
    bucket: Bucket, place: Callable[[Bucket], Path]
) -> None:
    path = place(bucket)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"nobody's")
    audit = bucket.audit()
    assert audit.is_sound
    assert [(row["state"], row["size_bytes"]) for row in audit.orphans] == [("ORPHANED", 8)]
    assert str(path).endswith(audit.orphans[0]["artifact"])
    assert audit.table().column("state").to_pylist() == ["ORPHANED"]


def test_an_object_that_may_be_on_its_way_is_no_orphan(bucket: Bucket) -> None:
    path = bucket.one("/base:").parent / "base:000000ff"
    now_ms = bucket.now_ms()
    path.write_bytes(b"soon")
    os.utime(path, (now_ms / 1000, now_ms / 1000))
    assert not audit_bucket(bucket.url, now_ms=now_ms).orphans


def test_a_gap_in_the_log_is_found(bucket: Bucket) -> None:
    files = bucket.files("/log/")
    assert len(files) > 3
    files[-2].unlink()
    audit = bucket.audit()
    assert any(str(files[-2]).endswith(row["artifact"]) for row in audit.problems)


def _sold(store: Store, value: int) -> None:
    with store.sqlite("shop") as connection:
        connection.executemany("insert into t values(?, ?)", ((value, os.urandom(64)) for _ in range(300)))
    store.heavy.checkpoint_all()


def test_what_an_owner_wrote_after_a_takeover_is_read_and_its_epoch_is_not_abandoned(
    bucket: Bucket, tmp_path: Path
) -> None:
    """Rows of the takeover itself are in the new owner's base alone: its chunks were not read, its epoch called abandoned."""
    quire.restore(bucket.url, tmp_path / "restored", takeover=True, clock=bucket.clock)
    with bucket.open(tmp_path / "restored") as store:
        _sold(store, 3)
    audit = bucket.audit()
    assert (audit.problems, audit.orphans, audit.abandoned) == ([], [], {})
    gone = bucket.files("/e/00000002/")[0]
    gone.unlink()
    assert [row["state"] for row in bucket.audit().problems] == ["MISSING"], gone


def test_what_an_owner_made_before_it_was_killed_is_no_orphan(bucket: Bucket, tmp_path: Path) -> None:
    """The rows of its last chunks were not in the log: the next life's base has them."""
    quire.restore(bucket.url, tmp_path / "restored", takeover=True, clock=bucket.clock)
    with bucket.open(tmp_path / "restored") as store:
        assert store.archive is not None
        store.archive.wait(30)
        store.archive.queue.close()  # what comes now is not handed over
        _sold(store, 3)
    (tmp_path / "restored" / "archive.json").unlink(missing_ok=True)  # as after a kill
    with bucket.open(tmp_path / "restored") as store:
        assert store.archive is not None
        store.archive.wait(30)
    audit = bucket.audit()
    assert (audit.problems, audit.orphans, audit.abandoned) == ([], [], {})
