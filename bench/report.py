"""The output of a benchmark: a table for the terminal, one line of JSON for programs. Also the clock and the units it uses.

The last line of every run is `{"bench": NAME, "run": {…}, "ratios": {NAME: {"value", "target", "better", "detail"}},
"figures": {…}}`. `run` has the date and the machine. A ratio that could not be measured has the value null, and its detail is
the reason. Ratios are of medians over rounds in which the contenders alternate, so that a slow moment of the machine affects
both.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Ratio:
    """A measured ratio and its target; `None` as a target means that the ratio is reported only."""

    name: str
    value: float | None
    target: float | None
    better: str
    """"higher" or "lower"."""
    detail: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None or self.target is None:
            return None
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


@dataclass(slots=True)
class Report:
    """Collects and prints the ratios and figures of one benchmark."""

    name: str
    run: dict[str, Any] = field(default_factory=dict)
    ratios: list[Ratio] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def ratio(self, name: str, value: float | None, target: float | None, better: str, detail: str = "") -> None:
        self.ratios.append(Ratio(name, value, target, better, detail))
        self._print(self.ratios[-1])

    def figure(self, name: str, value: float) -> None:
        """Record an absolute figure. It is not printed in the table."""
        self.figures[name] = round(value, 6)

    def _print(self, ratio: Ratio) -> None:
        mark = {True: "✓", False: "✗", None: " "}[ratio.met]
        sign = "≥" if ratio.better == "higher" else "≤"
        target = f"{sign} {ratio.target:g}" if ratio.target is not None else "reported"
        value = f"{ratio.value:.2f}" if ratio.value is not None else "—"
        sys.stdout.write(f"{mark} {ratio.name:<34} {value:>7}  {target:<9} {ratio.detail}\n")
        sys.stdout.flush()

    def finish(self) -> str:
        """Return the line of JSON."""
        ratios: dict[str, Any] = {
            ratio.name: {
                "value": None if ratio.value is None else round(ratio.value, 3),
                "target": ratio.target,
                "better": ratio.better,
            }
            | ({"detail": ratio.detail} if ratio.detail else {})
            for ratio in self.ratios
        }
        return json.dumps({"bench": self.name, "run": self.run, "ratios": ratios, "figures": self.figures})


def seconds(work: Callable[[], Any]) -> float:
    """Return the duration of one call, after a garbage collection."""
    gc.collect()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def drop_page_cache() -> str:
    """Drop the cached pages of all files; return why that is not possible, or nothing."""
    os.sync()  # pages that were not written back stay in the cache
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        return f"the page cache cannot be dropped: {error.strerror}"
    return ""


def alternate(rounds: int, *contenders: Callable[[], float]) -> list[float]:
    """Return the median of each contender's figures, over rounds in which the contenders alternate."""
    figures: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, values in zip(contenders, figures, strict=True):
            values.append(contender())
    return [statistics.median(values) for values in figures]


def rate(count: float) -> str:
    """Format a rate for display: 412 k/s."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}/s"
    return f"{count:.3g} /s"
