"""Every rule of a manifest log: a valid log satisfies it, and the checker detects a violation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.errors import ManifestIntegrityError
from quire.core.settings import ManifestLogSettings
from quire.stream import mlog_records as r
from quire.stream.mlog_bundle import plan, publish, run
from quire.stream.mlog_format import CHUNK_BYTES, COPY_BYTES, SEALED, UPLOADED
from quire.stream.mlog_verify import inspect, verify
from quire.stream.mlog_writer import ManifestLogWriter
from tests.stream.logs import SMALL, append_all, opened
from tests.stream.tiers import LogHarness


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path)
    yield harness
    harness.close()


def rules(harness: LogHarness, *, tier2: bool = True, **options: bool) -> list[str]:
    problems = verify(harness.files, harness.objects if tier2 else None, settings=harness.settings, **options)  # type: ignore[arg-type]
    return [problem.rule for problem in problems if not problem.leak]


def test_a_log_in_use_keeps_all_rules(harness: LogHarness) -> None:
    for _ in range(6):
        harness.chunks(3)
        harness.append_records(4)
        harness.clock.advance(60)
        harness.log.tick()
        assert rules(harness) == []
    rows = list(inspect(harness.files, harness.objects))
    ordinals = [row.ordinal for row in rows]
    assert ordinals == list(range(ordinals[0], ordinals[0] + len(rows)))
    assert {row.tier2 for row in rows if row.record != "UploadDone"} == {"same", "here"}


def test_records_that_are_not_on_disk_are_shown_from_tier_2_and_bundles(harness: LogHarness) -> None:
    harness.chunks(10)
    harness.log.tick()
    assert harness.files.chunks()[0] > 6
    record_count = harness.log.index.records
    for bundled in (False, True):
        if bundled:
            (task,) = plan(harness.objects, now_ms=4_000_000_000_000, period_seconds=7 * 86_400.0)
            publish(harness.log, run(task, harness.store))
            harness.clock.advance(60)
            harness.log.tick()
            assert min(harness.objects.listing().bundles) == (0, 9)
        rows = list(inspect(harness.files, harness.objects, start_chunk=0))
        assert [row.ordinal for row in rows[:record_count]] == list(range(record_count))
        assert rows[0].tier2 == "there"
        assert not any(row.diverges for row in rows if row.record != "UploadDone"), (
            "the objects of the random history do not exist"
        )
    with pytest.raises(ManifestIntegrityError, match="missing"):
        list(inspect(harness.files, start_chunk=0))


def test_a_missing_object_of_a_segment_is_shown_at_its_record(harness: LogHarness) -> None:
    def uploaded(segment: int, key: str) -> list[tuple[r.Payload, int]]:
        values: list[r.Payload] = [opened(segment), r.SealSegment(1, 1), r.UploadStarted(key), r.UploadDone(key, "e")]
        return [(value, segment) for value in values]

    for segment, key in ((1, "k/1"), (2, "k/2"), (3, "k/3")):
        harness.store.put(key, b"data")
        append_all(harness.log, uploaded(segment, key))
    append_all(harness.log, [(r.Tier2DeleteQueued("k/3"), 3), (r.Tier2Deleted("k/3"), 3)])
    for key in ("k/2", "k/3"):
        harness.store.delete(key)
    divergences = [
        (row.record, row.segment_id, row.tier2) for row in inspect(harness.files, harness.objects) if row.diverges
    ]
    assert divergences == [("UploadDone", 2, "the segment's object is missing")], "3 was deleted by records"
    flip(harness.files.chunk(0), 100)
    with pytest.raises(ManifestIntegrityError):
        list(inspect(harness.files, harness.objects))
    flip(harness.files.chunk(0), 100)


def flip(path: str, offset: int) -> None:
    data = bytearray(Path(path).read_bytes())
    data[offset] ^= 1
    Path(path).write_bytes(data)


def test_each_broken_rule_is_reported(harness: LogHarness) -> None:
    harness.chunks(3)
    harness.log.snapshot()
    harness.chunks(2)
    harness.log.upload()
    assert rules(harness) == []
    flip(harness.files.chunk(4), 80)
    assert rules(harness) == ["L1"]
    flip(harness.files.chunk(4), 80)
    aside = Path(harness.files.chunk(2)).rename(harness.root / "aside")
    assert "L2" in rules(harness, tier2=False)
    aside.rename(harness.files.chunk(2))
    flip(harness.files.snapshot(1), 20)
    assert rules(harness) == ["L3"]
    flip(harness.files.snapshot(1), 20)
    harness.store.delete(harness.objects.chunk_key(1))
    assert rules(harness) == ["L5"]
    harness.store.put(harness.objects.chunk_key(1), harness.store.get(harness.objects.chunk_key(2)))
    assert set(rules(harness)) == {"L5"}


def test_chunks_that_retention_removed_or_kept_wrongly_are_reported(harness: LogHarness) -> None:
    """L6: chunks since the newest snapshot are on disk, whatever tier 2 has; older ones are eventually removed."""
    harness.settings = ManifestLogSettings(
        chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=1_000, sealed_kept=1_000
    )
    harness.reopen()
    harness.append_records(5)
    harness.log.snapshot()
    harness.chunks(6)
    harness.log.upload()
    aside = Path(harness.files.chunk(0)).rename(harness.root / "aside")
    problems = list(verify(harness.files, harness.objects, settings=harness.settings))
    assert [(problem.rule, problem.where, problem.leak) for problem in problems] == [("L6", {"chunk": 0}, False)]
    assert rules(harness, tier2=False) == ["L3"], "without tier 2 the state cannot be rebuilt"
    aside.rename(harness.files.chunk(0))
    harness.log.snapshot()
    few = ManifestLogSettings(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=3, sealed_kept=2)
    problems = [problem for problem in verify(harness.files, harness.objects, settings=few) if problem.rule == "L6"]
    assert [(problem.where, problem.leak) for problem in problems] == [({"count": 4}, True)], (
        "six, minus the newest two"
    )
    harness.settings = few
    harness.reopen().tick()
    assert list(verify(harness.files, harness.objects, settings=few)) == []


def test_a_damaged_object_is_detected_by_reading_it(harness: LogHarness) -> None:
    harness.chunks(2)
    harness.log.upload()
    data = bytearray(harness.store.get(harness.objects.chunk_key(0)))
    data[80] ^= 1
    harness.store.put(harness.objects.chunk_key(0), bytes(data))
    assert rules(harness) == ["L5"]
    assert rules(harness, deep=False) == []


def test_invalid_records_are_reported(harness: LogHarness) -> None:
    harness.log.close()
    with ManifestLogWriter.open(harness.files, clock=harness.clock, settings=SMALL) as writer:
        writer.append(opened(1), 1)
        writer.append(r.LocalEvicted(1), 1)
        writer.append(r.UploadStarted("k"), 5)
    problems = list(verify(harness.files))
    assert [problem.rule for problem in problems] == ["L4", "L4"]
    assert problems[0].where["ordinal"] == 1
    assert problems[1].where == {"segment": 5, "count": 1}
    harness.log = harness.open()


def test_segments_without_a_copy_are_reported(harness: LogHarness) -> None:
    records: list[tuple[r.Payload, int]] = [
        (opened(1), 1),
        (r.SealSegment(1, 1), 1),
        (r.UploadStarted("k"), 1),
        (r.UploadDone("k", "e"), 1),
        (r.LocalEvicted(1), 1),
    ]
    append_all(harness.log, records)
    assert list(verify(harness.files, object_exists=lambda _key: True)) == []
    (problem,) = verify(harness.files, object_exists=lambda _key: False)
    assert (problem.rule, problem.where) == ("L7", {"segment": 1, "key": "k"})


# ── damage that readers tolerate is reported all the same ─────────────────────────────────────────────────────────────
FIRST_BYTES = 128
"""The header, and the bytes after it."""


def with_each_byte_changed(path: Path, last: int, change: int = 0xFF) -> Iterator[int]:
    """Yields the offset of each changed byte: each of the first and the last ones in turn. Restores the file at the
    end.
    """
    original = path.read_bytes()
    for offset in (*range(FIRST_BYTES), *range(len(original) - last, len(original))):
        damaged = bytearray(original)
        damaged[offset] ^= change
        path.write_bytes(damaged)
        yield offset
    path.write_bytes(original)


@pytest.mark.parametrize("change", [0xFF, 0x01])
def test_any_changed_byte_of_an_object_is_reported(harness: LogHarness, change: int) -> None:
    """Also in the header, where readers do not notice because they use the commit copy."""
    harness.chunks(2)
    harness.log.upload()
    path = harness.root / "objects" / harness.objects.chunk_key(0)
    for offset in with_each_byte_changed(path, COPY_BYTES, change):
        assert set(rules(harness)) == {"L5"}, offset
    assert rules(harness) == []


def test_any_changed_byte_of_a_bundle_is_reported(harness: LogHarness) -> None:
    harness.chunks(10)
    harness.log.tick()
    (task,) = plan(harness.objects, now_ms=4_000_000_000_000, period_seconds=7 * 86_400.0)
    publish(harness.log, run(task, harness.store))
    (span,) = harness.objects.listing().bundles
    path = harness.root / "objects" / harness.objects.bundle_key(*span)
    for offset in with_each_byte_changed(path, COPY_BYTES):
        assert "L5" in rules(harness), offset
    assert rules(harness) == []


@pytest.mark.parametrize("change", [0xFF, 0x01])
def test_any_changed_byte_of_a_sealed_chunk_is_reported(harness: LogHarness, change: int) -> None:
    harness.chunks(2)
    harness.log.upload()
    harness.append_records(3)
    for offset in with_each_byte_changed(Path(harness.files.chunk(0)), COPY_BYTES, change):
        assert set(rules(harness, tier2=False)) == {"L1"}, offset
    assert rules(harness) == []


def test_a_header_that_a_crash_left_incomplete_is_not_damage(harness: LogHarness) -> None:
    """A crash at each step of a commit: the copy is newer than the header, or one of them is torn."""
    harness.chunks(1)
    harness.append_records(2)
    path = Path(harness.files.chunk(1))
    before = path.read_bytes()
    harness.append_records(2)
    after = path.read_bytes()
    harness.log.upload()
    for content, expected in (
        (before[:CHUNK_BYTES] + after[CHUNK_BYTES:], []),
        (after[: CHUNK_BYTES // 2] + before[CHUNK_BYTES // 2 : CHUNK_BYTES] + after[CHUNK_BYTES:], []),
        (bytes([before[0] ^ 255]) + after[1:], []),
        (before[:-COPY_BYTES] + after[-COPY_BYTES : -COPY_BYTES // 2] + before[-COPY_BYTES // 2 :], []),
        (
            after[:-COPY_BYTES] + before[-COPY_BYTES:],
            ["L1"],
        ),  # not possible after a crash: the copy is synced before the header is written
    ):
        path.write_bytes(content)
        assert rules(harness, tier2=False) == expected
    path.write_bytes(after)
    marked = Path(harness.files.chunk(0))
    data = bytearray(marked.read_bytes())
    assert data[56] == SEALED | UPLOADED
    data[56] = SEALED
    marked.write_bytes(data)
    assert rules(harness) == [], "the copy has the UPLOADED flag"


def test_a_missing_newest_chunk_is_reported(harness: LogHarness) -> None:
    """Tier 2 has it, and nothing on disk shows that it existed."""
    harness.chunks(3)
    harness.log.tick()
    harness.log.close()
    assert list(verify(harness.files, harness.objects, settings=harness.settings)) == []
    newest = harness.files.chunks()[-1]
    os.remove(harness.files.chunk(newest))
    problems = list(verify(harness.files, harness.objects, settings=harness.settings))
    assert ("L2", {"chunk": newest}) in [(problem.rule, problem.where) for problem in problems]
