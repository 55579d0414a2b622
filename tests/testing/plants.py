"""Bugs for the simulation to find: each puts a class of defect back into the engines of one process.

A simulation that never fails may be one that cannot. There is one of every class that was once found in the engines: writes
that are acknowledged and not durable, recovery that removes what it cannot prove to be garbage, damage that passes for a torn
end, refusals that are carried out later, rows that steer deletion and are believed, references that are not taken, leftovers.

Each is called in a process that ends with its life, so nothing is put back.
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
from quire.stream.hot import HotLog
from quire.testing.crashdisk import CrashFile
from quire.testing.faults import Fault
from quire.testing.simulation import FAULTS, Trouble
from quire.testing.simulation_damage import ROW
from tests.machine import plants as of_references

Plant = Callable[[], None]
SEEDS = 20
"""How many runs a bug may take to be found; most are found by the first two."""

_patch = pytest.MonkeyPatch()


def _nothing(*_: Any, **__: Any) -> None:
    """Is what is done instead."""


# ── acknowledged, and not durable ─────────────────────────────────────────────────────────────────────────────────────
def _without_sync(part: str) -> None:
    sync = CrashFile.sync

    def unless_there(self: CrashFile) -> None:
        if part not in self.path:
            sync(self)

    _patch.setattr(CrashFile, "sync", unless_there)


def page_commits_are_not_synced() -> None:
    _without_sync("/wal/")


def records_of_streams_are_not_synced() -> None:
    _without_sync("/hot/")


def manifest_logs_are_not_synced() -> None:
    _without_sync(".mlog")


# ── recovery that removes or overlooks ────────────────────────────────────────────────────────────────────────────────
def streams_remove_what_their_log_does_not_name() -> None:
    _patch.setattr(stream_recovery, "log_behind", lambda *_: [])
    _patch.setattr(stream_recovery, "_not_garbage", _nothing)


def key_value_logs_that_are_not_named_are_swept() -> None:
    _patch.setattr(kv_recovery, "refuse_stale_manifest", _nothing)
    _patch.setattr(kv_recovery, "_is_foreign", lambda *_: False)
    _patch.setattr(KvProjection, "ends", _nothing)


def a_damaged_end_passes_for_a_torn_one() -> None:
    _patch.setattr(KvProjection, "ends", _nothing)


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def refused_appends_are_written_later() -> None:
    _patch.setattr(
        HotLog, "until", lambda log, upto, turn: log._group.until(upto, turn)
    )  # what was refused stays pending


# ── rows that steer deletion ──────────────────────────────────────────────────────────────────────────────────────────
def rows_are_believed_unchecked() -> None:
    _patch.setattr(rows, "crc32", lambda *_: rows.RESIDUE)


# ── references ────────────────────────────────────────────────────────────────────────────────────────────────────────
def a_fork_takes_no_reference_on_segments() -> None:
    of_references.a_fork_takes_no_reference_on_segments(_patch)


def a_shared_leaf_is_taken_over() -> None:
    of_references.a_shared_leaf_is_taken_over(_patch)


# ── space ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def nobody_removes_leftovers() -> None:
    _patch.setattr(maintenance, "sweep_leftovers", lambda _: 0)


@dataclass(frozen=True)
class Setting:
    """What brings a bug out."""

    kinds: tuple[str, ...] = ()
    """Of files that are damaged before every life; none for bugs that need no damage."""
    faults: tuple[Trouble, ...] = FAULTS


ALL: dict[Plant, Setting] = {
    page_commits_are_not_synced: Setting(),
    records_of_streams_are_not_synced: Setting(),
    manifest_logs_are_not_synced: Setting(),
    streams_remove_what_their_log_does_not_name: Setting(("manifest log",)),
    key_value_logs_that_are_not_named_are_swept: Setting(("kv log", "kv manifest")),
    a_damaged_end_passes_for_a_torn_one: Setting(("kv log",)),
    refused_appends_are_written_later: Setting(faults=(Trouble(1, Fault.ENOSPC, "[aw]*", 20, "*/hot/*"),)),
    rows_are_believed_unchecked: Setting((ROW,)),
    a_fork_takes_no_reference_on_segments: Setting(),
    a_shared_leaf_is_taken_over: Setting(),
    nobody_removes_leftovers: Setting(faults=(Trouble(1, Fault.POWER_CUT, "link", 6),)),  # an object gets its name
}
