"""Tries again what may succeed later: exponential backoff with full jitter, under one total deadline.

Terms
  transient  a failure that says nothing about the request: the server is overloaded, a connection broke, a body was cut
  attempt    one request (or one multipart upload); the policy counts all of them, the first included

Rules
  1. Only `Transient` is retried. Whatever else the operation raises passes at once: "not found", "exists", "denied" and
     "precondition failed" are answers, and asking again only costs time.
  2. No sleep begins that would end after the deadline. An attempt under way is not interrupted: the call may overrun
     the deadline by at most one request timeout.
  3. When attempts or time run out the caller gets `ObjectStoreUnavailable` with attempts, time and the last cause.
  4. This is the *only* retry loop: obstore's own is switched off. Two loops multiply attempts, and obstore's would
     retry a create-only put without telling us, so that our own object would look like somebody else's (P11).

Threads: a `Retrier` has no state of its own and may be shared.

Raises: `ObjectStoreUnavailable`, and whatever the operation raises.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from quire.core.clock import Clock, SystemClock
from quire.core.errors import InvalidConfig, ObjectStoreUnavailable

T = TypeVar("T")


class Transient(Exception):
    """Inside `objects/` only: the attempt failed in a way that may pass. Never leaves a `Retrier`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long and how often to try. The defaults ride out a restart or a throttled minute, not an outage."""

    attempts_max: int = 10
    deadline_seconds: float = 60.0
    backoff_first_seconds: float = 0.1
    backoff_max_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.attempts_max < 1:
            raise InvalidConfig(
                "attempts_max counts the first attempt too and must be at least 1", value=self.attempts_max
            )
        if min(self.deadline_seconds, self.backoff_first_seconds, self.backoff_max_seconds) < 0:
            raise InvalidConfig("retry times may not be negative")

    def backoff_ceiling(self, attempt: int) -> float:
        """The longest pause after the `attempt`-th failure (1-based).

        >>> [RetryPolicy().backoff_ceiling(n) for n in (1, 2, 3, 20)]
        [0.1, 0.2, 0.4, 10.0]
        """
        # The exponent is capped because 2.0**1024 overflows; 2**64 pauses are above any ceiling anyway.
        return min(self.backoff_max_seconds, self.backoff_first_seconds * 2.0 ** min(attempt - 1, 64))


NO_RETRIES = RetryPolicy(attempts_max=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrier:
    """Runs operations under a policy. Clock, sleep and dice are injected so that tests take no time."""

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    clock: Clock = field(default_factory=SystemClock)
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform

    def call(self, operation: Callable[[], T], *, doing: str, **where: object) -> T:
        """The result of `operation`, tried again while it raises `Transient` and the policy allows."""
        policy = self.policy
        started = self.clock.monotonic()
        attempt = 0
        while True:
            attempt += 1
            try:
                return operation()
            except Transient as failure:
                # Full jitter: clients that failed together must not come back together.
                pause = self.uniform(0.0, policy.backoff_ceiling(attempt))
                elapsed = self.clock.monotonic() - started
                if attempt >= policy.attempts_max or elapsed + pause > policy.deadline_seconds:
                    raise ObjectStoreUnavailable(
                        f"the object store kept failing while {doing}: {failure}",
                        hint="check the network and the store's health, then try again",
                        **where,
                        attempts=attempt,
                        seconds=round(elapsed, 3),
                    ) from failure
            self.sleep(pause)
