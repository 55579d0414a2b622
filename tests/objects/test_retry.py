"""Backoff, jitter and the deadline without real time: the test provides the clock, sleep and random numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidConfig, ObjectNotFound, ObjectStoreUnavailable
from quire.objects.options import Retrier, RetryPolicy, Transient
from quire.testing.clock import ManualClock


class ManualRetrier:
    """A retrier on a manual clock, and a record of what it did."""

    def __init__(self, policy: RetryPolicy, uniform: Callable[[float, float], float] = max) -> None:
        self.clock = ManualClock()
        self.pauses: list[float] = []
        self.attempts = 0
        self.retrier = Retrier(policy=policy, clock=self.clock, sleep=self._sleep, uniform=uniform)

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.clock.advance(seconds)

    def run(self, failures: int, *, attempt_seconds: float = 0.0) -> int:
        """Fail this many times, then return the number of attempts."""

        def operation() -> int:
            self.attempts += 1
            self.clock.advance(attempt_seconds)
            if self.attempts <= failures:
                raise Transient(f"failure {self.attempts}")
            return self.attempts

        return self.retrier.call(operation, doing="testing", key="k")


def test_pauses_double_up_to_the_ceiling() -> None:
    manual = ManualRetrier(RetryPolicy(backoff_first_seconds=1, backoff_max_seconds=5, deadline_seconds=100))
    assert manual.run(failures=5) == 6
    assert manual.pauses == [1, 2, 4, 5, 5]


def test_jitter_is_full_from_zero_to_the_ceiling() -> None:
    ranges: list[tuple[float, float]] = []

    def lowest(low: float, high: float) -> float:
        ranges.append((low, high))
        return low

    manual = ManualRetrier(RetryPolicy(backoff_first_seconds=1, deadline_seconds=100), lowest)
    manual.run(failures=3)
    assert ranges == [(0, 1), (0, 2), (0, 4)]
    assert manual.pauses == [0, 0, 0]


def test_attempts_are_bounded_and_the_last_cause_is_reported() -> None:
    manual = ManualRetrier(RetryPolicy(attempts_max=3, backoff_first_seconds=1, deadline_seconds=100))
    with pytest.raises(ObjectStoreUnavailable, match="failure 3") as caught:
        manual.run(failures=99)
    assert manual.attempts == 3
    assert len(manual.pauses) == 2, "no pause after the last attempt"
    assert caught.value.where == {"key": "k", "attempts": 3, "seconds": 3.0}
    assert isinstance(caught.value.__cause__, Transient)


def test_no_pause_extends_past_the_deadline() -> None:
    manual = ManualRetrier(
        RetryPolicy(attempts_max=99, backoff_first_seconds=1, backoff_max_seconds=8, deadline_seconds=10)
    )
    with pytest.raises(ObjectStoreUnavailable):
        manual.run(failures=99)
    assert manual.pauses == [1, 2, 4]


def test_time_spent_in_attempts_counts() -> None:
    manual = ManualRetrier(RetryPolicy(attempts_max=99, backoff_first_seconds=0, deadline_seconds=10))
    with pytest.raises(ObjectStoreUnavailable):
        manual.run(failures=99, attempt_seconds=4)
    assert manual.attempts == 3


def test_long_retries_are_reported_once_before_they_end(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: a command with a wrong endpoint was silent for 20 seconds."""
    policy = RetryPolicy(backoff_first_seconds=1, deadline_seconds=100)
    ManualRetrier(policy).run(failures=2)
    assert capsys.readouterr().err == "", "a short disturbance is not worth a line"
    ManualRetrier(policy).run(failures=6)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "quire warning: objects.retrying doing='testing' error='failure 3' key='k'"


def test_other_errors_pass_at_once() -> None:
    manual = ManualRetrier(RetryPolicy())

    def operation() -> None:
        manual.attempts += 1
        raise ObjectNotFound("not there")

    with pytest.raises(ObjectNotFound):
        manual.retrier.call(operation, doing="testing")
    assert manual.attempts == 1


def test_one_attempt_means_no_retries() -> None:
    with pytest.raises(ObjectStoreUnavailable):
        ManualRetrier(RetryPolicy(attempts_max=1)).run(failures=1)


@pytest.mark.parametrize(
    "invalid",
    [{"attempts_max": 0}, {"deadline_seconds": -1}, {"backoff_first_seconds": -1}, {"backoff_max_seconds": -1}],
)
def test_invalid_policies_are_refused(invalid: dict[str, int]) -> None:
    with pytest.raises(InvalidConfig):
        RetryPolicy(**invalid)


@given(
    attempts_max=st.integers(1, 3000),
    deadline_seconds=st.floats(0, 1e4),
    backoff_first_seconds=st.floats(0, 100),
    fraction=st.floats(0, 1),
)
def test_with_any_policy_the_call_ends_in_time(
    attempts_max: int, deadline_seconds: float, backoff_first_seconds: float, fraction: float
) -> None:
    policy = RetryPolicy(
        attempts_max=attempts_max, deadline_seconds=deadline_seconds, backoff_first_seconds=backoff_first_seconds
    )
    manual = ManualRetrier(policy, lambda low, high: low + fraction * (high - low))
    with pytest.raises(ObjectStoreUnavailable):
        manual.run(failures=10_000)
    assert manual.attempts <= attempts_max
    assert sum(manual.pauses) <= deadline_seconds + 0.01
