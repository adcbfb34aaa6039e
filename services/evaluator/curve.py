"""The learning curve, as a picture and in the terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REWARD = "reward"
TERMINAL_SIZE = (78, 18)
MAX_TICKS = 10


def draw(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write ``curve.png``: pass@1 with its interval over steps, the base's line, the best marked; below it the
    training reward and the share of turns whose tool call was not parsed.

    Args: summary: of ``results.write_summary``. metrics: lines of ``metrics.jsonl``.
    """
    # Without a backend named before the import matplotlib looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    _pass_at_1(top, summary)
    rewards = [(line["step"], line[REWARD]) for line in metrics if REWARD in line]
    middle.plot([step for step, _ in rewards], [value for _, value in rewards], color="tab:green", linewidth=1)
    middle.set_ylabel("training\nreward")
    unparsed = [
        (point["step"], point["unparsed_call_share"])
        for point in summary["checkpoints"]
        if point["unparsed_call_share"] is not None
    ]
    bottom.plot([step for step, _ in unparsed], [share for _, share in unparsed], "o-", color="tab:red", linewidth=1)
    bottom.set_ylabel("unparsed\ncalls a turn")
    highest = max([0.01, *(share for _, share in unparsed)])
    bottom.set_ylim(-0.1 * highest, 1.1 * highest)  # a point at 0 is drawn whole
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.set_xlabel("optimizer step")
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    aside = path.with_name(f".{path.name}")
    figure.savefig(aside, format="png", dpi=120)
    os.replace(aside, path)


def _pass_at_1(axes: Any, summary: Mapping[str, Any]) -> None:
    points = summary["checkpoints"]
    steps = [point["step"] for point in points]
    means = [point["pass_at_1"] for point in points]
    errors = [
        [point["pass_at_1"] - point["interval_95"][0] for point in points],
        [point["interval_95"][1] - point["pass_at_1"] for point in points],
    ]
    if points:
        axes.errorbar(steps, means, yerr=errors, fmt="o-", capsize=3, label="adapter, 95 % interval")
    if (base := summary["base"]) and base["pass_at_1"] is not None:
        axes.axhline(base["pass_at_1"], color="gray", linestyle="--", label="base")
        axes.axhspan(*base["interval_95"], color="gray", alpha=0.12, linewidth=0)
    for point in points:
        if point["label"] == summary["best"]:
            axes.plot(point["step"], point["pass_at_1"], "*", markersize=16, color="tab:orange", zorder=5, label="best")
    for number, alarm in enumerate(summary["collapse_alarms"]):
        axes.axvline(alarm["step"], color="tab:red", alpha=0.5, linewidth=1, label="_" * bool(number) + "collapse")
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("pass@1, held-out tasks")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize="small")


def terminal(summary: Mapping[str, Any]) -> str:
    """The curve in characters, without colour; empty with fewer than two checkpoints."""
    points = summary["checkpoints"]
    if len(points) < 2:
        return ""
    from plotext import figure

    figure.clear()
    figure.plot_size(*TERMINAL_SIZE)
    figure.title("pass@1 on held-out tasks, by optimizer step")
    figure.ruler("y").lim(0, 1)
    shown = points[:: -(-len(points) // MAX_TICKS)]
    figure.ruler("x").ticks([point["step"] for point in shown], [str(point["step"]) for point in shown])
    adapter = figure.signal(
        [point["step"] for point in points], [point["pass_at_1"] for point in points], marker="braille"
    )
    adapter.lines()
    adapter.label("adapter")
    figure.draw(adapter)
    if (base := summary["base"]) and base["pass_at_1"] is not None:
        figure.line(base["pass_at_1"], label="base")
    return str(figure.build().string(colorless=True))
