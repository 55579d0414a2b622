"""What a benchmark says: a table for people, one JSON line for programs.

The last line of every run is `{"bench": NAME, "run": {…}, "ratios": {NAME: {"value", "target", "better", "detail"}},
"figures": {…}}`. `run` says when and on what it was measured; a target that could not be measured has the value null, and its
detail says why. Ratios are of medians over rounds that alternate between the contenders, so that a slow moment of the machine
hits both.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Ratio:
    """A measured ratio and what the project promises for it."""

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
    """Collects what one benchmark measured."""

    name: str
    run: dict[str, Any] = field(default_factory=dict)
    ratios: list[Ratio] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def ratio(self, name: str, value: float | None, target: float | None, better: str, detail: str = "") -> None:
        self.ratios.append(Ratio(name, value, target, better, detail))
        self._say(self.ratios[-1])

    def figure(self, name: str, value: float) -> None:
        """An absolute figure, to stand beside the ratios."""
        self.figures[name] = round(value, 6)

    def _say(self, ratio: Ratio) -> None:
        mark = {True: "✓", False: "✗", None: " "}[ratio.met]
        sign = "≥" if ratio.better == "higher" else "≤"
        target = f"{sign} {ratio.target:g}" if ratio.target is not None else "reported"
        value = f"{ratio.value:.2f}" if ratio.value is not None else "—"
        sys.stdout.write(f"{mark} {ratio.name:<34} {value:>7}  {target:<9} {ratio.detail}\n")
        sys.stdout.flush()

    def finish(self) -> str:
        """The JSON line."""
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
    """How long one call takes, with a clean heap before it."""
    gc.collect()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def alternate(rounds: int, *contenders: Callable[[], float]) -> list[float]:
    """Median of each contender's figure over rounds in which they take turns."""
    figures: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, seen in zip(contenders, figures, strict=True):
            seen.append(contender())
    return [statistics.median(seen) for seen in figures]


def rate(count: float) -> str:
    """A rate for people: 412 k/s."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}/s"
    return f"{count:.3g} /s"
