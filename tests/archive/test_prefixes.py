"""Every prefix of the archive's queue is a state that a killed process could have left (A5)."""

from __future__ import annotations

import pytest

from tests.archive import prefixes


@pytest.mark.parametrize("seed", [1, 2])
def test_a_prefix_of_the_queue_is_a_store(seed: int) -> None:
    assert prefixes.run(seed, steps=60, stride=30) > 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 106))
def test_every_prefix_of_the_queue_is_a_store(seed: int) -> None:
    assert prefixes.run(seed) > 50
