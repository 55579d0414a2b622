"""Settings for the whole test run."""

import os

from hypothesis import HealthCheck, settings

# Deadlines measure the machine, not the code: a slow disk would make a property fail.
settings.register_profile(
    "default", deadline=None, max_examples=60, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "torture", settings.get_profile("default"), max_examples=2_000, stateful_step_count=100, print_blob=True
)
settings.load_profile(os.environ.get("QUIRE_HYPOTHESIS_PROFILE", "default"))
