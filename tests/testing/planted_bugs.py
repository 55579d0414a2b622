"""Bugs that the simulation must detect: each function reintroduces a class of defect into the engines of one process.

A simulation that never fails may be unable to fail. There is one bug for every class that was once found in the engines: writes
that are acknowledged but not durable, recovery that removes what it cannot prove to be garbage, damage that is mistaken for a
torn end, rejected writes that are carried out later, damaged rows that control deletion, references that are not taken,
leftover files.

Each function is called in a process that ends with its life, so nothing is restored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from quire.jobs import maintenance
from quire.lsm import recovery as kv_recovery
from quire.lsm.projection import KvProjection
from quire.manifest import rows
from quire.stream import recovery as stream_recovery
from quire.stream.group_commit import AppendRound
from quire.stream.hot import HotLog
from quire.testing.crashdisk import CrashFile
from quire.testing.faults import Fault
from quire.testing.simulation import FAULTS, Trouble
from quire.testing.simulation_damage import ROW
from tests.machine import planted_faults

Bug = Callable[[], None]
SEEDS = 20
"""How many seeds may be needed to detect a bug; most are detected by the first two."""

_patch = pytest.MonkeyPatch()


def _do_nothing(*_: Any, **__: Any) -> None:
    """Replaces a function: does nothing."""


# ── acknowledged but not durable ──────────────────────────────────────────────────────────────────────────────────────
def _without_sync(path_part: str) -> None:
    sync = CrashFile.sync

    def sync_other_paths(self: CrashFile) -> None:
        if path_part not in self.path:
            sync(self)

    _patch.setattr(CrashFile, "sync", sync_other_paths)


def page_commits_are_not_synced() -> None:
    _without_sync("/wal/")


def records_of_streams_are_not_synced() -> None:
    _without_sync("/hot/")


def manifest_logs_are_not_synced() -> None:
    _without_sync(".mlog")


# ── recovery that removes or misses data ──────────────────────────────────────────────────────────────────────────────
def streams_remove_segments_that_their_log_does_not_name() -> None:
    _patch.setattr(stream_recovery, "log_behind", lambda *_: [])
    _patch.setattr(stream_recovery, "_not_garbage", _do_nothing)


def key_value_logs_that_are_not_named_are_removed() -> None:
    _patch.setattr(kv_recovery, "refuse_stale_manifest", _do_nothing)
    _patch.setattr(kv_recovery, "_is_foreign", lambda *_: False)
    _patch.setattr(KvProjection, "ends", _do_nothing)


def a_damaged_end_is_mistaken_for_a_torn_one() -> None:
    _patch.setattr(KvProjection, "ends", _do_nothing)


# ── rejected writes ────────────────────────────────────────────────────────────────────────────────────────────────────
def rejected_appends_are_written_later() -> None:
    def wait_only(log: HotLog, upto: int, append_round: AppendRound) -> None:  # rejected records stay pending
        log._group.wait_durable(upto, append_round)

    _patch.setattr(HotLog, "wait_durable", wait_only)


# ── rows that control deletion ────────────────────────────────────────────────────────────────────────────────────────
def checksums_of_rows_are_not_verified() -> None:
    _patch.setattr(rows, "crc32", lambda *_: rows.RESIDUE)


# ── references ────────────────────────────────────────────────────────────────────────────────────────────────────────
def a_fork_takes_no_reference_on_segments() -> None:
    planted_faults.a_fork_takes_no_reference_on_segments(_patch)


def a_shared_leaf_is_taken_over() -> None:
    planted_faults.a_shared_leaf_is_taken_over(_patch)


# ── space ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def leftovers_are_not_removed() -> None:
    _patch.setattr(maintenance, "sweep_leftovers", lambda _: 0)


@dataclass(frozen=True)
class Setting:
    """The options of the simulation that expose a bug."""

    kinds: tuple[str, ...] = ()
    """Kinds of files that are damaged before every life; empty if the bug needs no damage."""
    faults: tuple[Trouble, ...] = FAULTS


ALL: dict[Bug, Setting] = {
    page_commits_are_not_synced: Setting(),
    records_of_streams_are_not_synced: Setting(),
    manifest_logs_are_not_synced: Setting(),
    streams_remove_segments_that_their_log_does_not_name: Setting(("manifest log",)),
    key_value_logs_that_are_not_named_are_removed: Setting(("kv log", "kv manifest")),
    a_damaged_end_is_mistaken_for_a_torn_one: Setting(("kv log",)),
    rejected_appends_are_written_later: Setting(faults=(Trouble(1, Fault.ENOSPC, "[aw]*", 20, "*/hot/*"),)),
    checksums_of_rows_are_not_verified: Setting((ROW,)),
    a_fork_takes_no_reference_on_segments: Setting(),
    a_shared_leaf_is_taken_over: Setting(),
    leftovers_are_not_removed: Setting(
        faults=(Trouble(1, Fault.POWER_CUT, "link", 6),)
    ),  # in the middle of writing an object
}
