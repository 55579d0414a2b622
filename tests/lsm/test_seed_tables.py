"""The key-value manifest document, table by table, in its order: each row has a test here or names a test elsewhere.

Headings are the document's. `ELSEWHERE` maps a row to the test that covers it in another file, and a test checks that
it exists.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from quire.core.errors import QuireError
from quire.core.settings import LsmSettings
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk, read_all
from quire.durable.log_reader import read_log
from quire.lsm.manifest import Manifest
from quire.lsm.manifest_data import (
    AddFrozenWal,
    AddSst,
    AllocateSstId,
    Compaction,
    ErrorKind,
    ManifestData,
    ManifestEvent,
    ManifestSstEntry,
    RemoveFrozenWal,
    RemoveSst,
    SetActiveWal,
    UpdateLsn,
    Version,
    kind_of,
)
from quire.lsm.manifest_format import decode_event, decode_snapshot
from tests.lsm.kv_helpers import open_kv
from tests.lsm.manifests import entry, fill, home_in, read_back

ELSEWHERE = {
    "Event Types: Version": "test_manifest_data.test_version_sets_the_version",
    "Event Types: SetActiveWal": "test_manifest_data.test_set_active_wal_switches_and_takes_the_id_from_the_frozen_list",
    "Event Types: AddFrozenWal": "test_manifest_data.test_add_frozen_wal_adds_once",
    "Event Types: RemoveFrozenWal": "test_manifest_data.test_remove_frozen_wal_removes",
    "Event Types: AddSst": "test_manifest_data.test_add_sst_skips_an_existing_id",
    "Event Types: RemoveSst": "test_manifest_data.test_remove_sst_removes_by_id",
    "Event Types: UpdateLsn": "test_manifest_data.test_update_lsn_only_advances",
    "Event Types: AllocateSstId": "test_manifest_data.test_allocate_sst_id_advances_past_the_id",
    "Event Types: Compaction": "test_manifest_data.test_compaction_adds_and_removes_in_one_event",
    "Event Types: all application is idempotent": "test_manifest_data.test_replaying_any_prefix_twice_gives_the_same_state",
    "SSTable ID Allocation: unique across crashes": "test_manifest.test_ids_are_unique_across_crashes",
    "Atomic Compaction: all of it or nothing": (
        "test_manifest_crash.test_power_loss_at_any_call_gives_a_state_that_was_acknowledged_or_attempted"
    ),
    "Checkpoint: a crash between any two steps": (
        "test_manifest_crash.test_power_loss_between_any_two_steps_of_a_checkpoint_loses_nothing"
    ),
    "Checkpoint: kill -9 there": "test_kill.test_killed_at_a_failpoint_nothing_acknowledged_is_lost",
    "Checkpoint: corrupt snapshots are errors": "test_manifest.test_a_corrupt_snapshot_is_an_error_and_never_ignored",
    "Concurrency: ManifestData, one mutex": "test_manifest.test_threads_can_use_a_manifest_concurrently",
    "File Layout": "test_manifest.test_the_file_layout_is_that_of_the_design_document",
}


@pytest.mark.parametrize("row", ELSEWHERE)
def test_the_test_that_a_row_names_exists(row: str) -> None:
    module, name = ELSEWHERE[row].split(".")
    assert callable(getattr(importlib.import_module(f"tests.lsm.{module}"), name))


# ── Tracked State ─────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("field", "events", "value"),
    [
        ("version", [Version(3)], 3),
        ("last_lsn", [UpdateLsn(7)], 7),
        ("active_wal", [SetActiveWal(2)], 2),
        ("frozen_wals", [AddFrozenWal(2), AddFrozenWal(1)], [1, 2]),
        ("sstables", [AddSst(entry(4))], [entry(4)]),
        ("next_sst_id", [AllocateSstId(9)], 10),
        ("dirty", [UpdateLsn(1)], True),
    ],
)
def test_every_field_of_manifest_data(field: str, events: list[ManifestEvent], value: object) -> None:
    assert getattr(ManifestData().apply_all(events), field) == value


@pytest.mark.parametrize(("field", "value"), [("id", 4), ("path", "sst/000004.sst")])
def test_every_field_of_an_entry(field: str, value: object) -> None:
    assert getattr(ManifestSstEntry(4, "sst/000004.sst"), field) == value


# ── Durability Model ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_recovery_applies_the_events_of_the_log_to_the_snapshot(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    with Manifest.open(OsDisk(), home) as manifest:
        manifest.update_lsn(5)
        manifest.checkpoint()
        manifest.update_lsn(6)
    snapshot = decode_snapshot(read_all(OsDisk(), home.manifest_snapshot), home.manifest_snapshot)
    assert snapshot.manifest_data.last_lsn == 5
    assert [decode_event(payload) for payload in read_log(OsDisk(), home.manifest_log).payloads] == [
        Version(2),
        UpdateLsn(6),
    ]
    assert read_back(home).last_lsn == 6


# ── Operations: Mutation Pattern ──────────────────────────────────────────────────────────────────────────────────────
MUTATIONS: dict[str, tuple[Callable[[Manifest], object], tuple[ManifestEvent, ...]]] = {
    "set_version": (lambda m: m.set_version(9), (Version(9),)),
    "set_active_wal": (lambda m: m.set_active_wal(5), (SetActiveWal(5),)),
    "add_frozen_wal": (lambda m: m.add_frozen_wal(5), (AddFrozenWal(5),)),
    "remove_frozen_wal": (lambda m: m.remove_frozen_wal(1), (RemoveFrozenWal(1),)),
    "add_sst": (lambda m: m.add_sst(entry(1)), (AddSst(entry(1)),)),
    "remove_sst": (lambda m: m.remove_sst(2), (RemoveSst(2),)),
    "update_lsn": (lambda m: m.update_lsn(99), (UpdateLsn(99),)),
    "allocate_sst_id": (lambda m: m.allocate_sst_id(), (AllocateSstId(4),)),
    "compaction": (lambda m: m.compaction([entry(1)], [2]), (Compaction((entry(1),), (2,)),)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_appended_then_synced_then_applied(tmp_path: Path, name: str) -> None:
    """Every change begins with its version."""
    mutate, expected = MUTATIONS[name]
    home, observed = home_in(tmp_path), list[tuple[str, int, bool]]()
    with Manifest.open(OsDisk(), home) as manifest:
        fill(manifest)
        if name != "set_version":
            expected = (Version(manifest.version + 1), *expected)
        before, logged_before = manifest.state(), len(read_log(OsDisk(), home.manifest_log).payloads)

        def observe(point: str) -> None:
            logged = len(read_log(OsDisk(), home.manifest_log).payloads) - logged_before
            observed.append((point, logged, manifest.state() == before))

        with armed("lsm.manifest.appended", observe), armed("lsm.manifest.synced", observe):
            mutate(manifest)
        assert observed == [
            ("lsm.manifest.appended", len(expected), True),
            ("lsm.manifest.synced", len(expected), True),
        ]
        assert manifest.state() == before.copy().apply_all(expected)
    events = [decode_event(payload) for payload in read_log(OsDisk(), home.manifest_log).payloads]
    assert tuple(events[logged_before:]) == expected


# ── Checkpoint (Snapshotting) ─────────────────────────────────────────────────────────────────────────────────────────
def test_the_nine_steps_of_a_checkpoint_are_in_order(tmp_path: Path) -> None:
    home, observed = home_in(tmp_path), list[tuple[str, bool, bool, bool]]()
    with Manifest.open(OsDisk(), home) as manifest:
        fill(manifest)

        def observe(point: str) -> None:
            temporary, snapshot = (os.path.exists(home.manifest_snapshot + end) for end in (".tmp", ""))
            logged = bool(read_log(OsDisk(), home.manifest_log).payloads)
            observed.append((point.rpartition(".")[2], temporary, snapshot, logged))

        points = ("begun", "built", "written", "synced", "renamed", "named", "truncated")
        failpoints = [armed(f"lsm.checkpoint.{point}", observe) for point in points]
        for failpoint in failpoints:
            failpoint.__enter__()
        manifest.checkpoint()
        for failpoint in failpoints:
            failpoint.__exit__(None, None, None)
        assert not manifest.state().dirty, "step 9"
    assert observed == [
        ("begun", False, False, True),
        ("built", False, False, True),  # steps 1 to 3: serialised, CRC32, the final snapshot
        ("written", True, False, True),  # 4
        ("synced", True, False, True),  # 5
        ("renamed", False, True, True),  # 6
        ("named", False, True, True),  # 7: the directory
        ("truncated", False, True, False),  # 8
    ]


# ── Concurrency ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_manifest_may_be_called_from_any_thread(tmp_path: Path) -> None:
    home, allocated = home_in(tmp_path), list[int]()
    with Manifest.open(OsDisk(), home) as manifest:
        threads = [Thread(target=lambda: allocated.append(manifest.allocate_sst_id())) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(allocated) == list(range(1, 13))


# ── Integration with Engine ───────────────────────────────────────────────────────────────────────────────────────────
def test_the_engine_logs_flush_and_compaction_as_documented(tmp_path: Path) -> None:
    with open_kv(tmp_path, settings=LsmSettings()) as kv:  # no checkpoint truncates the log
        log = kv.home.manifest_log
        for value in (b"1", b"2"):
            kv.put(b"k", value)
            kv.flush()
        kv.compact()
        event_types = [type(decode_event(payload)) for payload in read_log(OsDisk(), log).payloads]
    flush = [AddSst, RemoveFrozenWal]
    at = [number for number, event_type in enumerate(event_types) if event_type is AddSst]
    assert [event_types[number : number + 2] for number in at] == [flush, flush]
    assert event_types[-1] is Compaction
    with open_kv(tmp_path) as kv:
        assert kv.get(b"k") == b"2"
        assert len(kv.manifest.state().sstables) == len(os.listdir(f"{kv.home.path}/sst")) == 1


# ── Error Handling ────────────────────────────────────────────────────────────────────────────────────────────────────
def _wal(base: Path) -> None:
    """The first record of the log is damaged, and a later one proves that it was synced."""
    home = home_in(base)
    with Manifest.open(OsDisk(), home) as manifest:
        fill(manifest)
    data = bytearray(Path(home.manifest_log).read_bytes())
    data[70] ^= 1
    Path(home.manifest_log).write_bytes(data)
    Manifest.open(OsDisk(), home)


def _io(base: Path) -> None:
    home = home_in(base)
    with Manifest.open(OsDisk(), home) as manifest:
        os.mkdir(home.manifest_snapshot + ".tmp")  # the temporary file of the snapshot cannot be opened
        manifest.checkpoint()


def _encoding(_: Path) -> None:
    decode_event(b"\x05\x01")


def _checksum(base: Path) -> None:
    home = home_in(base)
    with Manifest.open(OsDisk(), home) as manifest:
        manifest.checkpoint()
    data = bytearray(Path(home.manifest_snapshot).read_bytes())
    data[-1] ^= 1
    Path(home.manifest_snapshot).write_bytes(data)
    Manifest.open(OsDisk(), home)


def _internal(base: Path) -> None:
    with Manifest.open(OsDisk(), home_in(base)) as manifest:
        manifest.add_sst(entry(7))  # an id that was never allocated


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (ErrorKind.WAL, _wal),
        (ErrorKind.IO, _io),
        (ErrorKind.ENCODING, _encoding),
        (ErrorKind.SNAPSHOT_CHECKSUM_MISMATCH, _checksum),
        (ErrorKind.INTERNAL, _internal),
    ],
)
def test_every_error_kind_has_its_cause(tmp_path: Path, kind: ErrorKind, cause: Callable[[Path], None]) -> None:
    with pytest.raises(QuireError) as caught:
        cause(tmp_path)
    assert kind_of(caught.value) is kind
    assert caught.value.where["kind"] == kind.value
