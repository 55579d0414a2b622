"""`python -m bench NAME --profile`: the functions of quire in which a benchmark spends its processor time, in all threads.

The time of a function includes C functions and system calls that it calls, but not the time in which it waits. Each call costs
the profiler some of that time, so that small functions seem slower than they are: a profiled run says nothing about ratios.
Contenders are left out; opening stores is not. Needs Python 3.11: later versions allow one profiler per process, not per
thread.
"""

from __future__ import annotations

import cProfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import quire

SOURCE = str(Path(quire.__file__).parent)
ROWS = 12


def profiled(work: Callable[[], None]) -> str:
    """Run `work` and return a Markdown table of the functions that took the most time."""
    profiles: list[cProfile.Profile] = []

    def begin(*_: object) -> None:
        profiles.append(cProfile.Profile(time.thread_time, builtins=False))
        profiles[-1].enable()

    threading.setprofile(begin)  # every thread that starts calls it
    begin()
    try:
        work()
    finally:
        profiles[0].disable()
        threading.setprofile(None)
    return _table(profiles)


def _table(profiles: list[cProfile.Profile]) -> str:
    own: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for entry in (entry for profile in profiles for entry in profile.getstats()):
        code = entry.code
        if isinstance(code, CodeType) and code.co_filename.startswith(SOURCE):
            name = f"`{code.co_qualname}` ({Path(code.co_filename).name})"
            own[name] += entry.inlinetime
            calls[name] += entry.callcount
    total = sum(own.values())
    busiest = sorted(own.items(), key=lambda item: -item[1])[:ROWS]
    lines = [f"| {name} | {spent / total:.1%} | {calls[name]:,} |" for name, spent in busiest]
    return "\n".join(["| function | own time | calls |", "|---|---|---|", *lines])
