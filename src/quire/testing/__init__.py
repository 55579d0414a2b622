"""Tools for testing programs that use quire: a clock, disks that fail or lose power, object stores that fail, and checks."""

from typing import TYPE_CHECKING

from quire.core.lazy import lazy_names

if TYPE_CHECKING:
    from quire.testing.clock import ManualClock
    from quire.testing.crashdisk import CrashDisk
    from quire.testing.faults import Fault, FaultyDisk, FaultyStore, ObjectFault, ObjectFaults, PowerCut, each_fault
    from quire.testing.manifest import assert_clean, assert_replays
    from quire.testing.simulation import simulate

__all__ = [
    "CrashDisk",
    "Fault",
    "FaultyDisk",
    "FaultyStore",
    "ManualClock",
    "ObjectFault",
    "ObjectFaults",
    "PowerCut",
    "assert_clean",
    "assert_replays",
    "each_fault",
    "simulate",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "ManualClock": "quire.testing.clock",
            "CrashDisk": "quire.testing.crashdisk",
            "Fault": "quire.testing.faults",
            "FaultyDisk": "quire.testing.faults",
            "FaultyStore": "quire.testing.faults",
            "ObjectFault": "quire.testing.faults",
            "ObjectFaults": "quire.testing.faults",
            "PowerCut": "quire.testing.faults",
            "each_fault": "quire.testing.faults",
            "assert_clean": "quire.testing.manifest",
            "assert_replays": "quire.testing.manifest",
            "simulate": "quire.testing.simulation",
        },
    )
