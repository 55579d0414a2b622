"""standby.json: how far a standby has come, and whether it is becoming the owner (A11).

The file is replaced whole, durably, after everything it speaks of is durable. While it is there, nobody opens the directory to
write except through a promotion.

What is on disk in each phase, and what the next life does:
  begun       perhaps `.next/`, half a restore               removes it, restores again
  swapping    `.next/`, a whole restore; parts moved         moves the rest, replaces the rows
  following   the store at `position`; perhaps some of the   applies the next object, from its beginning
              object after it
  promoting   owner.json with a claim, perhaps its object    claims it, seals, goes on
              in the bucket, perhaps a seal
  sealed      everything the former owner acknowledged       removes `.files/`, takes over
  (no file)   the owner's directory                          opens it

Threads: the standby's. Raises `Corruption`, `FormatTooNew`, and what the disk raises.
"""

from __future__ import annotations

import os
from enum import StrEnum

import msgspec

from quire.archive.format import NO_DIGEST, Position
from quire.core.errors import Corruption, FormatTooNew
from quire.durable.files import Disk, read_all, write_atomic

STANDBY_FILE = "standby.json"
FORMAT = 1


class Phase(StrEnum):
    """What a standby's directory is in the middle of."""

    BEGUN = "begun"
    SWAPPING = "swapping"
    FOLLOWING = "following"
    PROMOTING = "promoting"
    SEALED = "sealed"


class StandbyState(msgspec.Struct, frozen=True, kw_only=True):
    """standby.json."""

    format: int = FORMAT
    store_id: str
    url: str
    phase: Phase = Phase.BEGUN
    position: Position = Position(0, 0)
    """The last log object that was applied."""
    digest: bytes = NO_DIGEST
    """Its SHA-256: the next one names it."""
    at_ms: int = 0
    """The owner's clock when it was cut."""
    oldest_change: int = 0
    """The feed begins here: earlier changes were not in the base."""
    owner_epoch: int = 0
    """Of a promotion: the epoch that is claimed."""


def read_state(disk: Disk, root: str) -> StandbyState | None:
    """How far the standby in this directory has come; `None` if there is none."""
    path = os.path.join(root, STANDBY_FILE)
    try:
        state = msgspec.json.decode(read_all(disk, path), type=StandbyState)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        hint = "remove the directory and begin the standby again"
        raise Corruption("standby.json is damaged", hint=hint, path=path, cause=str(error)) from error
    if state.format > FORMAT:
        raise FormatTooNew("standby.json was written by a newer quire", hint="upgrade quire", path=path)
    return state


def write_state(disk: Disk, root: str, state: StandbyState) -> None:
    """Replace it, durably."""
    write_atomic(disk, os.path.join(root, STANDBY_FILE), msgspec.json.encode(state))
