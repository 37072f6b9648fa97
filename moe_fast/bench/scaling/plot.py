"""Scaling runs as one figure: latency against tokens and experts, throughput and overlap efficiency, balance."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from moe_fast.bench.scaling.figures import Result, Rows, balance, speed
from moe_ref.errors import UsageError

CONTESTANTS = ("fused", "floor", "eager", "graph")


def plot(results: list[Result], path: Path) -> None:
    """Write the figure; what is not measured yet is left empty.

    Raises:
        UsageError: nothing to draw.
    """
    rows = [row for row in speed(results) if row["dtype"] == "bfloat16" and row["layer"].startswith("paper")]
    skews = balance(results)
    if not rows and not skews:
        raise UsageError("no latency and no balance cell is measured yet, so there is nothing to plot")
    figure = Figure(figsize=(10, 7))
    axes = figure.subplots(2, 2)
    if rows:
        most = max(row["gpus"] for row in rows)
        _latency(axes[0, 0], [r for r in rows if r["gpus"] == most and r["experts"] == 32], "tokens", most)
        size = max(row["tokens"] for row in rows)
        _latency(axes[0, 1], [r for r in rows if r["gpus"] == most and r["tokens"] == size], "experts", most)
        if len({row["gpus"] for row in rows}) > 1:
            _scaling(axes[1, 0], [row for row in rows if row["tokens"] == size])
        else:
            _throughput(axes[1, 0], rows)
    if skews:
        _balance(axes[1, 1], [row for row in skews if row["gpus"] == max(row["gpus"] for row in skews)])
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _lines(axes: Axes, at: list[Any], several: Iterable[tuple[str, list[float | None]]]) -> None:
    for label, values in several:
        there = [(x, y) for x, y in zip(at, values, strict=True) if y is not None]
        if there:
            axes.plot(*zip(*there, strict=True), "o-", label=label)
    if axes.lines:
        axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _latency(axes: Axes, rows: Rows, against: str, gpus: int) -> None:
    rows = sorted(rows, key=lambda row: row[against])
    at = [row[against] for row in rows]
    _lines(axes, at, ((name, [row["ms"].get(name) for row in rows]) for name in CONTESTANTS))
    label, rest = "tokens of a GPU", f"{rows[0]['experts']} experts" if rows else ""
    if against == "experts":
        label, rest = "experts", f"{rows[0]['tokens']} tokens of a GPU" if rows else ""
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="ms per call", title=f"Latency, {gpus} GPUs, {rest}")
    axes.set_xticks(at, [str(v) for v in at])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _scaling(axes: Axes, rows: Rows) -> None:
    """Million tokens a second against GPUs, and what two GPUs' rate would scale to."""
    at = sorted({row["gpus"] for row in rows})
    by = {(row["experts"], row["gpus"]): row["million_tokens_per_s"] for row in rows}
    experts = sorted({row["experts"] for row in rows})
    _lines(axes, at, ((f"{e} experts", [by.get((e, gpus)) for gpus in at]) for e in experts))
    size = rows[0]["tokens"]
    axes.set(xlabel="GPUs", ylabel="million tokens / s", title=f"Throughput, S = {size}", ylim=(0, None))
    axes.set_xticks(at)


def _throughput(axes: Axes, rows: Rows) -> None:
    """Million tokens a second against tokens, of the only number of GPUs."""
    at = sorted({row["tokens"] for row in rows})
    by = {(row["experts"], row["tokens"]): row["million_tokens_per_s"] for row in rows}
    # an amount of experts at one size only is a point, no line
    experts = [
        e for e in sorted({row["experts"] for row in rows}) if sum(key[0] == e for key in by) > 1 or len(at) == 1
    ]
    _lines(axes, at, ((f"{e} experts", [by.get((e, tokens)) for tokens in at]) for e in experts))
    title = f"Throughput, {rows[0]['gpus']} GPUs"
    axes.set(xscale="log", xlabel="tokens of a GPU", ylabel="million tokens / s", title=title, ylim=(0, None))
    axes.set_xticks(at, [str(v) for v in at])
    axes.minorticks_off()


def _balance(axes: Axes, rows: Rows) -> None:
    rows = sorted(rows, key=lambda row: row["zipf"])
    names = list(rows[0]["over_balanced"])
    _lines(axes, [row["zipf"] for row in rows], ((n, [row["over_balanced"][n] for row in rows]) for n in names))
    # from 1, perfectly balanced, and not so close that noise looks like a result
    top = max(1.2, 1.02 * max(value for row in rows for value in row["over_balanced"].values()))
    axes.set(xlabel="Zipf skew", ylabel="times perfectly balanced", title=f"Layer time, {rows[0]['gpus']} GPUs")
    axes.set_ylim(min(1.0, *(value for row in rows for value in row["over_balanced"].values())), top)
