"""Pictures: what every actor does when (Gantt), how busy each model keeps the GPUs, and the paper's figures.

Colours are one per kind of work, the same in all pictures, chosen to stay apart in print and for colour-blind readers.

Letters: E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from moe_ref.runtime.models import Result
from moe_ref.runtime.paper import PAPER, Sweeps
from moe_ref.runtime.run import Interval
from moe_ref.runtime.trace import actor_key

COLOURS = {
    "gate": "#999999",
    "gemm0": "#0072B2",
    "gemm1": "#56B4E9",
    "combine": "#009E73",
    "rows out": "#D55E00",
    "results home": "#E69F00",
    "control": "#222222",
}
MODEL_COLOURS = {"bulk": "#D55E00", "chunked": "#E69F00", "megakernel": "#0072B2"}


def _kind(interval: Interval) -> str:
    """Key of COLOURS for something that an actor did."""
    name = interval.name
    if name in COLOURS:
        return name
    if name.startswith(("rows to", "all-to-all out", "out ")):
        return "rows out"
    if name.startswith(("results", "all-to-all home", "home")):
        return "results home"
    if name.startswith("product 0"):
        return "gemm0"
    if name.startswith("product 1"):
        return "gemm1"
    if name in ("weigh and sum", "unpermute"):
        return "combine"
    return "control" if name in ("mail", "ready", "counts") else "gate"


def _chosen(intervals: Sequence[Interval], rank: int, most: int) -> set[str]:
    """Processors of a rank to show: the first ones, but each kind of work is on one of them.

    A kind that none of the first ones did (a few combine tasks go to whoever is idle) comes with the processor that
    spent most time on it, in place of the last of the first ones.
    """
    time: dict[str, dict[str, float]] = {}
    for i in intervals:
        if i.rank == rank and i.actor.startswith("processor"):
            of_kind = time.setdefault(_kind(i), {})
            of_kind[i.actor] = of_kind.get(i.actor, 0.0) + i.duration_us
    everyone = sorted({actor for of_kind in time.values() for actor in of_kind}, key=actor_key)
    chosen = everyone[:most]
    kept: set[str] = set()
    for of_kind in time.values():
        if not kept.isdisjoint(of_kind):
            continue
        there = [actor for actor in chosen if actor in of_kind]
        kept.add(there[0] if there else max(of_kind, key=lambda actor: (of_kind[actor], actor)))
    rest = [actor for actor in chosen if actor not in kept]
    return kept | set(rest[: max(0, most - len(kept))])


def gantt(path: Path, intervals: Sequence[Interval], title: str, processors_shown: int = 12) -> None:
    """One row per actor, ranks one above another; of many processors a few are shown, every kind of work among them."""
    tracks: dict[int, list[str]] = {}
    for rank, actor in {(i.rank, i.actor) for i in intervals}:
        tracks.setdefault(rank, []).append(actor)
    rows: dict[tuple[int, str], int] = {}
    labels, y, borders = [], 0, []
    for rank in sorted(tracks):
        actors = sorted(tracks[rank], key=actor_key)
        chosen = _chosen(intervals, rank, processors_shown)
        hidden = sum(a.startswith("processor") for a in actors) - len(chosen)
        last = max(chosen, key=actor_key, default="")
        for actor in actors:
            if actor.startswith("processor") and actor not in chosen:
                continue
            rows[rank, actor] = y
            more = f" (+{hidden} more)" if hidden > 0 and actor == last else ""
            labels.append((y, f"rank {rank}  {actor}{more}"))
            y += 1
        borders.append(y - 0.5)
    # not pyplot: a caller's own figures and backend are none of this module's business
    figure = Figure(figsize=(13, max(2.5, 0.21 * y + 1.3)))
    axes = figure.subplots()
    by_colour: dict[str, list[tuple[int, float, float]]] = {}
    for i in intervals:
        row = rows.get((i.rank, i.actor))
        if row is not None:
            by_colour.setdefault(_kind(i), []).append((row, i.start_us, i.duration_us))
    # Control takes nanoseconds; a visible minimum width keeps its ticks on the picture.
    least = max(i.start_us + i.duration_us for i in intervals) / 3000
    for kind, found in by_colour.items():
        row, start, width = (np.array(column) for column in zip(*found, strict=True))
        edge = "none" if kind == "control" else "white"
        axes.barh(row, np.maximum(width, least), left=start, height=0.8, color=COLOURS[kind], edgecolor=edge, lw=0.25)
    for border in borders[:-1]:
        axes.axhline(border, color="black", lw=0.8)
    axes.set_yticks([y for y, _ in labels], [text for _, text in labels], fontsize=7)
    axes.set_ylim(y - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("time since the first launch, us")
    axes.set_title(title, fontsize=10)
    names = {"control": "counts / ready / mail"}
    handles = [Patch(color=COLOURS[k], label=names.get(k, k)) for k in COLOURS if k in by_colour]
    figure.legend(handles=handles, ncol=len(handles), fontsize=8, loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.25 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=130)


def _profile(result: Result, sms: int, steps: int = 400) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Share of all SMs (or of the links) that are busy over time, by kind."""
    edges = np.linspace(0, result.latency_us, steps + 1)
    ranks = len({i.rank for i in result.intervals})
    out: dict[str, np.ndarray] = {}
    for i in result.intervals:
        kind = _kind(i)
        if kind == "control":
            continue
        # A processor is one SM; the gate and a launch of a chain take all of them, a link is one per rank.
        share = 1 / (sms * ranks) if i.actor.startswith("processor") else 1 / ranks
        covered = np.interp(edges, [i.start_us, i.start_us + max(i.duration_us, 1e-9)], [0, i.duration_us])
        out[kind] = out.get(kind, np.zeros(steps)) + share * np.diff(covered) / (edges[1] - edges[0])
    return (edges[1:] + edges[:-1]) / 2, out


def models_figure(path: Path, results: dict[str, Result], sms: int, title: str) -> None:
    """How busy each model keeps the SMs over time (stacked), and when its links carry rows (line below)."""
    figure = Figure(figsize=(11, 1.0 + 2.0 * len(results)))
    all_axes = figure.subplots(len(results), 1, sharex=True, squeeze=False)
    end = max(r.latency_us for r in results.values())
    on_links = ("rows out", "results home")
    for axes, (model, result) in zip(all_axes[:, 0], results.items(), strict=True):
        time, shares = _profile(result, sms)
        compute = [k for k in COLOURS if k in shares and k not in on_links]
        axes.stackplot(time, [shares[k] for k in compute], colors=[COLOURS[k] for k in compute], lw=0)
        for kind in on_links:
            if kind in shares:
                busy = np.clip(shares[kind], 0, 1)
                axes.fill_between(time, -0.04, -0.04 - 0.22 * busy, color=COLOURS[kind], lw=0)
        axes.axvline(result.latency_us, color="black", lw=1)
        note = (
            f"{model}: {result.latency_us:.0f} us, {result.utilisation:.0%} of SM time, {result.gpu_ops} GPU operation"
        )
        axes.set_title(note + ("s" if result.gpu_ops > 1 else ""), fontsize=9, loc="left")
        axes.set_ylim(-0.3, 1.05)
        axes.set_yticks([-0.15, 0, 0.5, 1], ["links", "0", "0.5", "1"], fontsize=8)
        axes.set_ylabel("busy share", fontsize=8)
        axes.set_xlim(0, end * 1.02)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1, 0].set_xlabel("time since the first launch, us")
    names = {"gate": "gate and passes"}
    handles = [Patch(color=c, label=names.get(k, k)) for k, c in COLOURS.items() if k != "control"]
    figure.legend(handles=handles, ncol=len(handles), fontsize=8, loc="lower center", frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=130)


def paper_figures(path: Path, sweeps: Sweeps) -> None:
    """The paper's figures from the simulator, eight panels; published values as grey marks where there are any."""
    figure = Figure(figsize=(17, 8))
    panels = figure.subplots(2, 4)
    work = sweeps.work
    _lines(
        panels[0, 0],
        sweeps.tokens,
        "latency_us",
        1e-3,
        f"latency against tokens (8 GPUs, E = {work.experts})",
        "tokens per GPU",
    )
    panels[0, 0].set_ylabel("ms")
    _lines(
        panels[0, 1],
        sweeps.experts,
        "latency_us",
        1e-3,
        f"latency against experts (8 GPUs, S = {work.tokens})",
        "experts",
    )
    _lines(panels[0, 2], sweeps.gpus, "tokens_per_s", 1e-6, f"throughput against GPUs (S = {work.tokens})", "GPUs")
    panels[0, 2].set_ylabel("MTokens/s")
    panels[0, 2].plot([8], [PAPER["tokens_per_s_8_gpus"] / 1e6], "x", color="grey", ms=9, label="FlashMoE, published")
    panels[0, 2].plot([8], [sweeps.theirs.tokens_per_s / 1e6], "+", color="#0072B2", ms=11, label="at their tile rate")
    panels[0, 2].legend(fontsize=7, frameon=False)
    _lines(panels[0, 3], sweeps.gpus, "overlap_efficiency", 1, "overlap efficiency T(2) / T(P)", "GPUs")
    panels[0, 3].axhline(1, color="grey", lw=0.7, ls=":")

    at8 = sweeps.gpus[8]
    published = PAPER["utilisation"]
    _bars(
        panels[1, 0],
        {m: r.utilisation for m, r in at8.items()} | {f"{k} *": v for k, v in published.items()},
        "SM utilisation (8 GPUs; * published)",
        "{:.0%}",
    )
    ops = {m: r.gpu_ops for m, r in at8.items()} | {f"{k} *": v for k, v in PAPER["gpu_ops"].items()}
    _bars(panels[1, 1], ops, "GPU operations per layer (* published)", "{:.0f}", log=True)
    for axes, dtype in ((panels[1, 2], "float32"), (panels[1, 3], "bfloat16")):
        _memory(axes, sweeps, dtype)
    figure.suptitle(
        f"Simulated on {sweeps.machine.name}: H = D = 2048, top-2, fp32 (TF32 tiles), compact layout; only h200-2 was "
        "measured, this machine is scaled from it by data sheets",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _lines(axes: Axes, axis: dict[int, dict[str, Result]], name: str, scale: float, title: str, label: str) -> None:
    for model, colour in MODEL_COLOURS.items():
        values = [getattr(results[model], name) * scale for results in axis.values()]
        axes.plot(list(axis), values, "o-", color=colour, label=model, ms=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(axis), [str(x) for x in axis])
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(label, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)


def _bars(axes: Axes, values: Mapping[str, float], title: str, form: str, log: bool = False) -> None:
    colours = [MODEL_COLOURS.get(name, "#BBBBBB") for name in values]
    bars = axes.barh(list(values), list(values.values()), color=colours)
    axes.bar_label(bars, [form.format(v) for v in values.values()], fontsize=7, padding=2)
    axes.invert_yaxis()
    if log:
        axes.set_xscale("log")
        axes.set_xlim(0.7, 2000)
    else:
        axes.set_xlim(0, 1.15)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _memory(axes: Axes, sweeps: Sweeps, dtype: str) -> None:
    rows = [r for r in sweeps.memory if r["dtype"] == dtype]
    keys = list(dict.fromkeys((r["tokens"], r["experts"]) for r in rows))
    for offset, layout, colour in ((-0.2, "fixed", "#E69F00"), (0.2, "compact", "#0072B2")):
        shares = [100 * r["share"] for r in rows if r["layout"] == layout]
        label = "fixed, C = S K / E" if layout == "fixed" else "compact, never drops"
        axes.bar(np.arange(len(keys)) + offset, shares, 0.4, color=colour, label=label)
    touched = [100 * r["touched_bytes"] / sweeps.machine.memory_bytes for r in rows if r["layout"] == "compact"]
    axes.plot(np.arange(len(keys)) + 0.2, touched, "k_", ms=7, label="compact, touched by an even batch")
    axes.axhline(100 * PAPER["memory_share"], color="grey", lw=0.8, ls=":", label="2.15 %, published bound")
    axes.set_xticks(range(len(keys)), [f"{s // 1024}K/{e}" for s, e in keys], rotation=90, fontsize=7)
    axes.set_ylabel(f"% of {sweeps.machine.memory_bytes / 1e9:.0f} GB", fontsize=8)
    axes.set_title(f"symmetric memory, {dtype} (S / E)", fontsize=9)
    axes.legend(fontsize=7, frameon=False, loc="upper left")
    axes.set_ylim(top=1.35 * axes.get_ylim()[1])
    axes.spines[["top", "right"]].set_visible(False)
