"""Pictures of the command `balance` (matplotlib, drawn without a display)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_LABELS = {
    "plain": "plain EP",
    "padded": "padded EP (leaves the scale)",
    "smartmoe_style": "SmartMoE-style",
    "flexmoe_style": "FlexMoE-style",
    "eplb_style": "EPLB-style",
    "lplb_style": "LPLB-style",
    "merged": "merged, same placement",
    "symmetric": "symmetric + scheduling",
    "asymmetric": "asymmetric + scheduling",
}
_OURS = ("symmetric", "asymmetric")


def _ranks(axes: Axes, values: dict[str, Any]) -> None:
    before, after = (np.array(values[name]["rank_loads"]) for name in ("before", "after"))
    mean = after.mean() or 1.0
    rank = np.arange(len(after))
    axes.bar(rank - 0.2, before / mean, 0.4, label="plain EP", color="tab:gray")
    axes.bar(rank + 0.2, after / mean, 0.4, label="scheduled", color="tab:purple")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="rank", ylabel="rows / mean", title="Mean load of each rank")
    axes.legend()


def _steps(axes: Axes, values: dict[str, Any]) -> None:
    for name, label, color in (("before", "plain EP", "tab:gray"), ("after", "scheduled", "tab:purple")):
        axes.plot(values[name]["ratio_per_step"], label=label, color=color)
    axes.set(xlabel="step", ylabel="max / mean load", title="Balance per step (1.0 is perfect)")
    axes.legend()


def _sweep(axes: Axes, table: list[dict[str, Any]]) -> None:
    skews = [row["zipf"] for row in table]
    for name, label in _LABELS.items():
        width, style = (2.5, "-") if name in _OURS else (1.2, "--")
        means = [row[name]["mean"] for row in table]
        axes.plot(skews, means, style, marker="o", markersize=3, linewidth=width, label=label)
    stale = [row["asymmetric_stale"]["mean"] for row in table]
    axes.plot(skews, stale, ":", linewidth=2, label="asymmetric + scheduling, stale plan")
    # Padding multiplies the load many times; the scale is that of the others.
    top = 1.2 * max(row["plain"]["mean"] for row in table)
    axes.set(xlabel="Zipf skew s", ylabel="max / mean load", title="Skew sweep", ylim=(0.9, top))
    axes.legend(fontsize=6.5, loc="upper left", ncols=2)


def _trade_off(axes: Axes, curve: list[dict[str, float]]) -> None:
    axes.plot([p["communication"] for p in curve], [p["compute"] for p in curve], "o-", color="tab:purple")
    for point in curve:
        axes.annotate(f"{point['alpha']:g}", (point["communication"], point["compute"]), fontsize=7)
    axes.set(xlabel="weighted rows received / mean load", ylabel="max / mean load", title="By weight of communication")


def _timing(axes: Axes, solvers: dict[str, dict[str, Any]]) -> None:
    names = list(solvers)
    place = np.arange(len(names))
    axes.barh(place + 0.2, [solvers[n]["median_us"] for n in names], 0.4, label="loads per replica")
    axes.barh(place - 0.2, [solvers[n]["quota_median_us"] for n in names], 0.4, label="quotas per source rank")
    least = min(timed["median_us"] for timed in solvers.values())
    axes.set(yticks=place, xlabel="microseconds (median)", title="Time of a plan", xscale="log", xlim=(least / 3, None))
    axes.set_yticklabels(names)
    axes.legend(loc="lower right")


def plot_balance(values: dict[str, Any], path: Path) -> None:
    """Draw what `values` has: loads per rank, balance per step, skew sweep (Figure 8), trade-off, solver times."""
    panels: list[tuple[Any, Any]] = [(_ranks, values), (_steps, values)]
    if "sweep" in values:
        panels.append((_sweep, values["sweep"]))
    if "trade_off" in values:
        panels.append((_trade_off, values["trade_off"]))
    if values.get("solvers"):
        panels.append((_timing, values["solvers"]))
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(12, 4.5 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (draw, what) in zip(np.atleast_1d(figure.subplots(rows, 2)).ravel(), panels, strict=False):
        draw(axes, what)
    for axes in figure.axes[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(f"{values['ranks']} ranks, {values['experts']} experts, placement {values['placement']}")
    figure.savefig(path, dpi=130)
