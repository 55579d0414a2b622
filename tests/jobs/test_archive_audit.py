"""The audit of an archive reports missing, altered and unreferenced objects, and nothing for a sound archive (A8)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.archive import base_writer
from quire.archive.format import CommitEvent, decode_object
from quire.core.settings import ArchiveSettings, MaintenanceSettings, StoreSettings
from quire.durable.failpoints import armed
from quire.jobs.archive_audit import audit as audit_module
from quire.jobs.archive_audit.audit import GRACE_MS, ArchiveAudit
from quire.manifest import tables as t
from quire.manifest.ops.plans import AbandonPlan
from quire.manifest.records import JobKind
from quire.manifest.row_image import RowImage
from quire.store.heavy import audit_bucket
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.archive.archived_store import archived_store

HOUR = 3_600.0


class Bucket:
    """A bucket with the archive of a store that has databases of every kind."""

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
                self._archive(store)
            kv = store.kv("cart", create=True)
            for number in range(100):
                kv.put(b"%d" % number, os.urandom(64))
            kv.flush()
            self._archive(store)
            stream = store.stream("events", create=True)
            for number in range(50):
                stream.append(b"record %d" % number)
            stream.seal()
            stream.tick()
            self.clock.advance(60)
            store.maintain()

    def _archive(self, store: Store) -> None:
        """End a log object here: how many there are does not depend on the machine."""
        assert store.archive is not None
        store.archive.wait(30)

    def open(self, path: Path) -> Store:
        settings = StoreSettings(
            object_store=self.url,
            archive=ArchiveSettings(mode="async", interval_seconds=0.02, base_seconds=HOUR, retain_seconds=HOUR),
            maintenance=MaintenanceSettings(enabled=False),
        )
        return quire.open(str(path), settings=settings, clock=self.clock)

    def audit(self, **options: object) -> ArchiveAudit:
        return audit_bucket(self.url, now_ms=self.now_ms(), **options)  # type: ignore[arg-type]

    def now_ms(self) -> int:
        """An hour after the last object was written, by the machine's clock, which sets their modification times."""
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
    """A copy that tests can damage."""
    copy = object.__new__(Bucket)
    copy.path, copy.store_id, copy.clock = tmp_path, original.store_id, original.clock
    copy.url = str(tmp_path / "bucket")
    shutil.copytree(original.url, copy.url)
    return copy


PARTS = ["/log/", "/base/", "/file/", "/base:", "/wal:"]
"""Parts of object names: of log objects, parts of bases, tables, chunks, stream segments."""


def test_a_sound_archive_has_no_differences_and_everything_was_read(original: Bucket) -> None:
    ticks: list[tuple[int, int]] = []
    audit = original.audit(progress=lambda done, total: ticks.append((done, total)))
    assert audit.is_sound
    assert (audit.problems, audit.orphans, audit.abandoned) == ([], [], {})
    assert 0 < audit.oldest_at_ms <= audit.newest_at_ms
    named = [path for part in ("/archive/", "/e/") for path in original.files(part) if "/manifest/" not in str(path)]
    assert audit.objects == len(named), "log, base, files, chunks and segments, each read once"
    assert ticks == sorted(ticks)
    assert ticks[-1][0] == ticks[-1][1]


@pytest.mark.parametrize("point", ["begun", "written"])
def test_the_names_of_an_abandoned_checkpoint_are_no_damage(bucket: Bucket, point: str) -> None:
    """Whether their objects were written is not recorded: they were reported as altered or missing."""
    path = bucket.path / "store"
    quire.restore(bucket.url, path, takeover=True)
    with bucket.open(path) as store:
        with store.sqlite("shop") as connection:
            connection.execute("delete from t where b is not null")
        with armed(f"jobs.checkpoint.{point}", "1*raise:EIO"):
            store.manifest.jobs.enqueue(JobKind.CHECKPOINT, store.database("shop").db_id)
            store.maintain()
        db_id = store.database("shop").db_id
        with store.manifest.read() as txn:
            ((_, generation), _), *_ = txn.scan(t.CHECKPOINT_PLAN, db_id)
        store.manifest.submit([AbandonPlan(db_id, generation)]).result()
    audit = bucket.audit()
    assert (audit.problems, audit.orphans) == ([], [])


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_object_is_reported(bucket: Bucket, part: str) -> None:
    files = bucket.files(part)
    assert files, [str(path) for path in bucket.files()]
    missing = files[len(files) // 2]
    missing.unlink()
    audit = bucket.audit()
    assert not audit.is_sound
    reported = [row for row in audit.problems if row["state"] == "MISSING"]
    assert reported
    if part != "/base/":
        assert str(missing).endswith(reported[0]["artifact"])


@pytest.mark.parametrize("byte", ["first", "last"])
@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_byte_is_reported(bucket: Bucket, part: str, byte: str) -> None:
    altered = bucket.one(part)
    data = bytearray(altered.read_bytes())
    data[0 if byte == "first" else -1] ^= 1
    altered.write_bytes(data)
    audit = bucket.audit()
    assert [row["state"] for row in audit.problems][:1] == ["ALTERED"], audit.problems
    assert str(altered).endswith(audit.problems[0]["artifact"])


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("part", PARTS)
def test_a_truncated_object_is_reported(bucket: Bucket, part: str, keep: int) -> None:
    """An object shorter than its header made the audit fail with `OutOfRange`."""
    for truncated in {bucket.files(part)[0], bucket.files(part)[-1]}:
        data = truncated.read_bytes()
        truncated.write_bytes(data[:keep])
        audit = bucket.audit()
        assert "ALTERED" in [row["state"] for row in audit.problems if str(truncated).endswith(row["artifact"])], (
            truncated,
            audit.problems,
        )
        truncated.write_bytes(data)


def _beside(part: str, name: str) -> Callable[[Bucket], Path]:
    return lambda bucket: bucket.one(part).parent / name


@pytest.mark.parametrize(
    "path_in",
    [
        _beside("/base:", "base:000000ff"),
        _beside("/log/", "notes.txt"),
        lambda bucket: Path(bucket.url) / bucket.store_id / "elsewhere" / "x",
    ],
    ids=["chunk", "archive", "prefix"],
)
def test_an_unreferenced_object_is_an_orphan_and_not_damage(bucket: Bucket, path_in: Callable[[Bucket], Path]) -> None:
    path = path_in(bucket)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"nobody's")
    audit = bucket.audit()
    assert audit.is_sound
    assert [(row["state"], row["size_bytes"]) for row in audit.orphans] == [("ORPHANED", 8)]
    assert str(path).endswith(audit.orphans[0]["artifact"])
    assert audit.table().column("state").to_pylist() == ["ORPHANED"]


def test_a_recent_object_is_not_an_orphan(bucket: Bucket) -> None:
    path = bucket.one("/base:").parent / "base:000000ff"
    now_ms = bucket.now_ms()
    path.write_bytes(b"soon")
    os.utime(path, (now_ms / 1000, now_ms / 1000))
    assert not audit_bucket(bucket.url, now_ms=now_ms).orphans


def test_a_gap_in_the_log_is_reported(bucket: Bucket) -> None:
    files = bucket.files("/log/")
    assert len(files) > 3
    files[-2].unlink()
    audit = bucket.audit()
    whats = {row["artifact"]: row["what"] for row in audit.problems}
    assert "those before it were not checked" in next(
        what for key, what in whats.items() if str(files[-2]).endswith(key)
    )


def test_a_gap_after_the_only_base_does_not_deny_the_moments_before_it(tmp_path: Path) -> None:
    """The audit said that nothing could be restored."""
    clock = ManualClock()
    with archived_store(tmp_path, clock=clock) as archived:
        for number in range(4):
            archived.store.kv("pairs", create=True).put(b"%d" % number, b"value")
            archived.wait_archived()
            clock.advance(5)
        before_ms = archived.headers()[-3].at_ms
    sorted(archived.bucket.glob("*/archive/*/log/*"))[-2].unlink()
    audit = audit_bucket(str(archived.bucket), now_ms=clock.now_ms())
    summaries = [row["what"] for row in audit.problems if not row["artifact"]]
    assert summaries == ["no base is complete after them: at most moments before them can be restored"]
    with quire.open(archived.restore(at_ms=before_ms), "r") as store:
        assert store.kv("pairs").get(b"0") == b"value"


def _insert_rows(store: Store, value: int) -> None:
    with store.sqlite("shop") as connection:
        connection.executemany("insert into t values(?, ?)", ((value, os.urandom(64)) for _ in range(300)))
    store.heavy.checkpoint_all()


def test_objects_written_after_a_takeover_are_read_and_their_epoch_is_not_abandoned(
    bucket: Bucket, tmp_path: Path
) -> None:
    """The rows of the takeover itself are only in the new owner's base. Its chunks were not read, and its epoch was
    reported as abandoned."""
    quire.restore(bucket.url, tmp_path / "restored", takeover=True, clock=bucket.clock)
    with bucket.open(tmp_path / "restored") as store:
        _insert_rows(store, 3)
    audit = bucket.audit()
    assert (audit.problems, audit.orphans, audit.abandoned) == ([], [], {})
    missing = bucket.files("/e/00000002/")[0]
    missing.unlink()
    assert [row["state"] for row in bucket.audit().problems] == ["MISSING"], missing


def test_the_parts_of_a_base_are_applied_one_at_a_time(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: the audit held all rows of a base that follows a takeover in memory, as many as the manifest has."""
    quire.restore(bucket.url, tmp_path / "restored", takeover=True, clock=bucket.clock)
    monkeypatch.setattr(base_writer, "OBJECT_BYTES", 1)
    with bucket.open(tmp_path / "restored") as store:
        _insert_rows(store, 3)
    unapplied, most = 0, 0
    apply = RowImage.apply

    def count_decoded(data: bytes, key: str) -> Any:
        nonlocal unapplied, most
        header, events = decode_object(data, key)
        unapplied += any(isinstance(event, CommitEvent) for event in events)
        most = max(most, unapplied)
        return header, events

    def count_applied(self: RowImage, *arguments: Any, **options: Any) -> None:
        nonlocal unapplied
        unapplied = 0
        apply(self, *arguments, **options)

    monkeypatch.setattr(audit_module, "decode_object", count_decoded)
    monkeypatch.setattr(RowImage, "apply", count_applied)
    assert bucket.audit().is_sound
    assert len(bucket.files("/base/")) > 3
    assert most == 1


def test_objects_written_before_an_owner_was_killed_are_not_orphans(bucket: Bucket, tmp_path: Path) -> None:
    """The rows of its last chunks were not in the log; the base of the next owner process contains them."""
    quire.restore(bucket.url, tmp_path / "restored", takeover=True, clock=bucket.clock)
    with bucket.open(tmp_path / "restored") as store:
        assert store.archive is not None
        store.archive.wait(30)
        store.archive.queue.close()  # later changes are not archived
        _insert_rows(store, 3)
    (tmp_path / "restored" / "archive.json").unlink(missing_ok=True)  # as after a kill
    with bucket.open(tmp_path / "restored") as store:
        assert store.archive is not None
        store.archive.wait(30)
    audit = bucket.audit()
    assert (audit.problems, audit.orphans, audit.abandoned) == ([], [], {})
