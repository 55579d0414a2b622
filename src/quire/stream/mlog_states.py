"""The states of a segment and the declared table of transitions between them.

A state has five facets: the segment's life, its tier 1, tier 2 and tier 0 copies, and its hydration. There are 432 states, each
with a number, its *code*. `RULES` is the table: what must hold before an event, and what the event changes. The last copy is
never removed silently: eviction needs another copy, and only `SEGMENT_RETIRED` ends a segment, after its object is deleted.

              ┌─────────── hydration ───────────┐
  tier 0   resident ──LocalEvicted──▶ evicted ──┘
  tier 1   none ──▶ compressing ──▶ done ──▶ none          (failed ──▶ compressing)
  tier 2   none ──▶ uploading ──▶ done ──▶ deleting ──▶ deleted ──▶ uploading    (failed ──▶ uploading, done)

Threads: any (pure functions and tables). Importable on executors.

    >>> state = next_state(next_state(NOTHING, Event.OPENED), Event.SEALED)
    >>> is_valid(state, Event.COMPRESSION_STARTED), is_valid(state, Event.LOCAL_EVICTED)
    (True, False)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from itertools import product
from typing import NamedTuple

import msgspec


class Life(IntEnum):
    ABSENT = 0
    OPEN = 1
    SEALED = 2


class Warm(IntEnum):
    NONE = 0
    COMPRESSING = 1
    DONE = 2
    FAILED = 3


class Remote(IntEnum):
    NONE = 0
    UPLOADING = 1
    DONE = 2
    FAILED = 3
    DELETING = 4
    DELETED = 5


class Hot(IntEnum):
    ABSENT = 0
    RESIDENT = 1


class Hydration(IntEnum):
    IDLE = 0
    RUNNING = 1
    FAILED = 2


class State(NamedTuple):
    """All facets of a segment."""

    life: Life
    warm: Warm
    remote: Remote
    hot: Hot
    hydration: Hydration


class Event(IntEnum):
    """The events that records describe; numbers below 14 are those of the record types."""

    OPENED = 0
    SEALED = 1
    COMPRESSION_STARTED = 2
    COMPRESSION_DONE = 3
    COMPRESSION_FAILED = 4
    UPLOAD_STARTED = 5
    UPLOAD_DONE = 6
    UPLOAD_FAILED = 7
    DELETE_QUEUED = 8
    DELETED = 9
    HYDRATION_STARTED = 10
    HYDRATION_DONE = 11
    HYDRATION_FAILED = 12
    LOCAL_EVICTED = 13
    WARM_EVICTED = 14
    RETIRED = 15
    NEEDS_REPAIR = 16
    REPAIRED = 17


STATES = [State(*facets) for facets in product(Life, Warm, Remote, Hot, Hydration)]
NOTHING = STATES[0]
_CODES = {state: code for code, state in enumerate(STATES)}


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table: the allowed values of each facet, the tiers that must have a copy, and the new values."""

    when: Mapping[str, frozenset[int]]
    copies: frozenset[int] = frozenset()
    """Tiers of which at least one must hold a complete copy; empty: no copy is required."""
    then: Mapping[str, int] = msgspec.field(default_factory=dict)


def _one(*values: int) -> frozenset[int]:
    return frozenset(values)


_SEALED = _one(Life.SEALED)
RULES: dict[Event, Rule] = {
    Event.OPENED: Rule(when={"life": _one(Life.ABSENT)}, then={"life": Life.OPEN, "hot": Hot.RESIDENT}),
    Event.SEALED: Rule(when={"life": _one(Life.OPEN)}, then={"life": Life.SEALED}),
    Event.COMPRESSION_STARTED: Rule(
        when={"life": _SEALED, "warm": _one(Warm.NONE, Warm.FAILED), "hot": _one(Hot.RESIDENT)},
        then={"warm": Warm.COMPRESSING},
    ),
    Event.COMPRESSION_DONE: Rule(when={"warm": _one(Warm.COMPRESSING)}, then={"warm": Warm.DONE}),
    Event.COMPRESSION_FAILED: Rule(when={"warm": _one(Warm.COMPRESSING)}, then={"warm": Warm.FAILED}),
    Event.UPLOAD_STARTED: Rule(
        when={"life": _SEALED, "remote": _one(Remote.NONE, Remote.FAILED, Remote.DELETED)},
        copies=_one(0, 1),
        then={"remote": Remote.UPLOADING},
    ),
    Event.UPLOAD_DONE: Rule(
        when={"remote": _one(Remote.UPLOADING, Remote.FAILED)},  # a retried upload need not be started again
        then={"remote": Remote.DONE},
    ),
    Event.UPLOAD_FAILED: Rule(when={"remote": _one(Remote.UPLOADING, Remote.FAILED)}, then={"remote": Remote.FAILED}),
    Event.DELETE_QUEUED: Rule(
        when={"remote": _one(Remote.DONE, Remote.FAILED)},  # a failed upload may have left an object
        then={"remote": Remote.DELETING},
    ),
    Event.DELETED: Rule(when={"remote": _one(Remote.DELETING)}, then={"remote": Remote.DELETED}),
    Event.HYDRATION_STARTED: Rule(
        when={
            "life": _SEALED,
            "hot": _one(Hot.ABSENT),
            "hydration": _one(Hydration.IDLE, Hydration.FAILED),
        },
        copies=_one(1, 2),
        then={"hydration": Hydration.RUNNING},
    ),
    Event.HYDRATION_DONE: Rule(
        when={"hydration": _one(Hydration.RUNNING)}, then={"hydration": Hydration.IDLE, "hot": Hot.RESIDENT}
    ),
    Event.HYDRATION_FAILED: Rule(when={"hydration": _one(Hydration.RUNNING)}, then={"hydration": Hydration.FAILED}),
    Event.LOCAL_EVICTED: Rule(
        when={"life": _SEALED, "hot": _one(Hot.RESIDENT), "warm": _one(Warm.NONE, Warm.DONE, Warm.FAILED)},
        copies=_one(1, 2),
        then={"hot": Hot.ABSENT},
    ),
    Event.WARM_EVICTED: Rule(when={"warm": _one(Warm.DONE)}, copies=_one(0, 2), then={"warm": Warm.NONE}),
    # These two change no facet: whether a segment needs repair is kept separately from its state.
    Event.NEEDS_REPAIR: Rule(when={"life": _SEALED, "remote": _one(Remote.DONE)}),
    Event.REPAIRED: Rule(when={"life": _SEALED}),
    Event.RETIRED: Rule(
        when={
            "life": _SEALED,
            "warm": _one(Warm.NONE, Warm.DONE, Warm.FAILED),
            "remote": _one(Remote.NONE, Remote.DELETED),
            "hydration": _one(Hydration.IDLE, Hydration.FAILED),
        },
        then={"life": Life.ABSENT, "warm": 0, "remote": 0, "hot": 0, "hydration": 0},
    ),
}


def tiers_of(state: State) -> frozenset[int]:
    """Return the tiers that hold a complete copy. An object that is being deleted no longer counts."""
    tiers = (state.hot is Hot.RESIDENT, state.warm is Warm.DONE, state.remote is Remote.DONE)
    return frozenset(tier for tier, there in enumerate(tiers) if there)


def is_valid(state: State, event: Event) -> bool:
    """Return whether an event is allowed in a state."""
    return TABLE[event][_CODES[state]] >= 0


def next_state(state: State, event: Event) -> State:
    """Return the state after an allowed event."""
    assert is_valid(state, event), (state, event)
    return STATES[TABLE[event][_CODES[state]]]


def state_of(facets: Mapping[str, int]) -> State:
    """Return the state with these facets; raise `ValueError` for an invalid number."""
    return State(
        Life(facets["life"]),
        Warm(facets["warm"]),
        Remote(facets["remote"]),
        Hot(facets["hot"]),
        Hydration(facets["hydration"]),
    )


def code_of(state: State) -> int:
    """Return a state's code."""
    return _CODES[state]


_FACETS = {"life": Life, "warm": Warm, "remote": Remote, "hot": Hot, "hydration": Hydration}


def _row(rule: Rule) -> list[int]:
    """Return, for the code of every state, the code after the rule's event; -1 where the event is not allowed."""
    row, step = [-1] * len(STATES), len(STATES)
    codes = [(0, 0)]  # partial codes before and after the event, from the facets handled so far
    for name, facet in _FACETS.items():
        step //= len(facet)
        becomes = rule.then.get(name)
        values = [
            (step * value, step * (value if becomes is None else becomes)) for value in rule.when.get(name, facet)
        ]
        codes = [(before + one, after + other) for before, after in codes for one, other in values]
    for before, after in codes:
        if not rule.copies or rule.copies & tiers_of(STATES[before]):
            row[before] = after
    return row


TABLE: list[list[int]] = [_row(RULES[event]) for event in Event]
"""`TABLE[event][code]`: the code after the event, -1 if it is not allowed."""
