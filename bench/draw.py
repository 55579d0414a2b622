"""`python -m bench.draw` draws docs/images/bench-NAME.svg from each docs/results/NAME.json, and the cost of an archive from
the run of `archive`. It writes the page docs/benchmark-results.md with all of them.

The length of a bar is value / target if higher is better, otherwise target / value, on a logarithmic axis. The line in the
middle is the target. `python -m bench NAME --save` writes the JSON of a run.
"""

from __future__ import annotations

import json
import math
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

from bench.report import MIB

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
IMAGES = ROOT / "docs" / "images"

LABEL, AXIS, VALUES, ROW, TOP = 430, 300, 150, 26, 48
OCTAVES = 3.0
"""The axis ends at 8 times better or worse than the target; longer bars are cut there."""

STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#0f172a}.s{font-size:11px;fill:#475569}"
)


def goodness(value: float, target: float, better: str) -> float:
    """Return by which factor a ratio is better than its target; below 1 the target is missed."""
    return value / target if better == "higher" else target / max(value, 1e-9)


def draw(result: dict[str, Any]) -> str:
    """Return the picture of one benchmark. Ratios without a value or a target are omitted."""
    rows = [(name, ratio) for name, ratio in result["ratios"].items() if ratio["value"] and ratio["target"]]
    width, height = LABEL + AXIS + VALUES, TOP + ROW * len(rows) + 12
    middle = LABEL + AXIS / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(result['bench'])}: ratios against their targets</title><style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for factor in (0.125, 0.25, 0.5, 1, 2, 4, 8):
        x = middle + AXIS / 2 * math.log2(factor) / OCTAVES
        label = "target" if factor == 1 else f"{factor:g}×"
        parts.append(f'<text class="s" x="{x:.1f}" y="{TOP - 20}" text-anchor="middle">{label}</text>')
        parts.append(
            f'<path d="M{x:.1f} {TOP - 12} V{height - 10}" stroke="#94a3b8" stroke-width="{1.5 if factor == 1 else 0.5}"/>'
        )
    for number, (name, ratio) in enumerate(rows):
        parts += _row(TOP + ROW * number, middle, name, ratio)
    return "\n".join([*parts, "</svg>", ""])


def _row(y: int, middle: float, name: str, ratio: dict[str, Any]) -> list[str]:
    good = goodness(ratio["value"], ratio["target"], ratio["better"])
    reach = AXIS / 2 * max(-1.0, min(1.0, math.log2(good) / OCTAVES))
    left, colour = min(middle, middle + reach), "#16a34a" if good >= 1 else "#dc2626"
    sign = "≥" if ratio["better"] == "higher" else "≤"
    shown = name if len(name) <= 56 else name[:55] + "…"
    return [
        f'<text x="{LABEL - 12}" y="{y + 14}" text-anchor="end">{escape(shown)}</text>',
        f'<rect x="{left:.1f}" y="{y + 2}" width="{max(2.0, abs(reach)):.1f}" height="{ROW - 10}" fill="{colour}"/>',
        f'<text x="{LABEL + AXIS + 12}" y="{y + 14}">{ratio["value"]:g} '
        f'<tspan class="s">target {sign} {ratio["target"]:g}</tspan></text>',
    ]


COST = re.compile(r"requests_per_hour_([0-9]+)_databases")


def draw_cost(result: dict[str, Any]) -> str:
    """Return a picture of requests and bytes per hour by the number of databases that change: one bar each, on axes that start
    at zero."""
    counts = sorted(int(match[1]) for name in result["ratios"] if (match := COST.fullmatch(name)))
    panels = [
        (
            "requests per hour",
            [result["ratios"][f"requests_per_hour_{count}_databases"]["value"] for count in counts],
            1,
        ),
        ("MiB per hour", [result["figures"][f"bytes_per_hour_{count}_databases"] for count in counts], MIB),
    ]
    panel, label, bar = 420, 120, 200
    width, height = panel * len(panels), TOP + ROW * len(counts) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>Requests and bytes per hour of an archive, one commit a second to each of so many databases</title>",
        f'<style>{STYLE}</style><rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for number, (what, values, unit) in enumerate(panels):
        left = number * panel + label
        parts.append(f'<text class="s" x="{left}" y="{TOP - 16}">{what}</text>')
        for row, (count, value) in enumerate(zip(counts, values, strict=True)):
            y, length = TOP + ROW * row, bar * value / max(values)
            name = "1 database" if count == 1 else f"{count:,} databases"
            parts.append(f'<text x="{left - 12}" y="{y + 14}" text-anchor="end">{name}</text>')
            parts.append(f'<rect x="{left}" y="{y + 2}" width="{length:.1f}" height="{ROW - 10}" fill="#2563eb"/>')
            shown = f"{value / unit:,.0f}" if unit == 1 else f"{value / unit:.1f}"
            parts.append(f'<text x="{left + length + 8:.1f}" y="{y + 14}">{shown}</text>')
    return "\n".join([*parts, "</svg>", ""])


def table(results: list[dict[str, Any]]) -> str:
    """Return the page of all results."""
    lines = [
        "# Results of benchmarks",
        "",
        "The newest run of each benchmark that was saved: `python -m bench NAME --save`, then `python -m bench.draw`, which",
        "writes this page. [Benchmarks](benchmarks.md) explains what is measured, and why targets are missed. A run of quick",
        "size has a tenth of the data: what is fixed, the start of a Spark job above all, weighs more in it. Some runs repeat",
        "only a part (`--only`); the rows of the others say when they were measured.",
    ]
    for result in results:
        run, name = result["run"], result["bench"]
        place = f"{run['cores']} cores ({run['machine']}), Python {run['python']}"
        facts = f"{run['date']}, {run['size']} size, {place}; load {run['load']:g} at its start"
        picture = f"![Ratios of {name} against their targets](images/bench-{name}.svg)"
        lines += [
            "",
            f"## {name}",
            "",
            f"{facts}.",
            "",
            picture,
            "",
            "| ratio | measured | target | | |",
            "|---|---|---|---|---|",
        ]
        lines += [_line(label, ratio) for label, ratio in result["ratios"].items()]
    return "\n".join([*lines, ""])


def _line(label: str, ratio: dict[str, Any]) -> str:
    value, target = ratio["value"], ratio["target"]
    sign = "≥" if ratio["better"] == "higher" else "≤"
    met = ""
    if value is not None and target is not None:
        met = "met" if goodness(value, target, ratio["better"]) >= 1 else "**missed**"
    cells = [
        label,
        "–" if value is None else f"{value:g}",
        "reported" if target is None else f"{sign} {target:g}",
        met,
        ratio.get("detail", "") + _when(ratio),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _when(ratio: dict[str, Any]) -> str:
    """Return when a ratio was measured, if a later run of other parts was saved since."""
    if "run" not in ratio:
        return ""
    return f" (earlier run: {ratio['run']['date']}, load {ratio['run']['load']:g})"


def drawn() -> dict[Path, str]:
    """Return the contents of every picture and of the page, by path."""
    results = {file.stem: json.loads(file.read_bytes()) for file in sorted(RESULTS.glob("*.json"))}
    pictures = {IMAGES / f"bench-{name}.svg": draw(result) for name, result in results.items()}
    pictures[IMAGES / "bench-archive-cost.svg"] = draw_cost(results["archive"])
    return {**pictures, ROOT / "docs" / "benchmark-results.md": table([*results.values()])}


def main() -> int:
    for path, text in drawn().items():
        path.write_text(text, "utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
