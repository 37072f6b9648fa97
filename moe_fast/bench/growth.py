"""How a call's time grows with its tokens and its experts, beside three bounds.

    python -m moe_fast.bench growth --out docs/results/megakernel_growth_1gpu.json --plot growth.svg

Bounds of a cell, ms: the products as dense GEMMs of the library (measured), the weights of the experts that get rows
once from memory at MEMORY_BYTES_PER_S, and the rows that leave this GPU (dispatch, and results for others) at
LINK_BYTES_PER_S. A cliff is a step to the next cell in which the time grows more than CLIFF times as much as the
largest bound.

Letters: S tokens of a rank, H hidden, D intermediate, E experts, K choices, P ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moe_fast.bench.layers import LAYERS
from moe_fast.bench.measure import Setup, floor_of, interleaved, place, set_up
from moe_ref.config import MoEConfig

MEMORY_BYTES_PER_S = 4.3e12
"""Device memory of an H200, as copies measure it."""
LINK_BYTES_PER_S = 325e9
"""One direction of an H200's NVLink, as peer stores measure it."""
CLIFF = 1.3
TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
EXPERTS = (8, 16, 32, 64, 128, 256)
FIXED_EXPERTS, FIXED_TOKENS = 32, 4096


def layer_of(experts: int) -> MoEConfig:
    """The paper's layer: H = D = 2048, ReLU, K = 2."""
    return LAYERS["paper-e32"].replace(experts=experts)


def bounds(config: MoEConfig, tokens: int, ranks: int) -> dict[str, float]:
    """Memory and link bound of a call with random routing, ms. Experts that get no row aren't read."""
    c = config
    got_rows = 1.0 - (1.0 - c.top_k / c.experts) ** (tokens * ranks)
    weights = c.experts / ranks * got_rows * c.hidden * (c.up_rows + c.intermediate) * 2
    away = 2 * tokens * c.top_k * (ranks - 1) / ranks * c.hidden * 2
    return {"memory": 1e3 * weights / MEMORY_BYTES_PER_S, "link": 1e3 * away / LINK_BYTES_PER_S}


def cell(setup: Setup, tokens: int, ranks: int, repetitions: int) -> dict[str, Any]:
    """Time and bounds of one call, ms."""
    x = setup.x_SH[:tokens]
    y = torch.empty_like(x)
    functions = {
        "fused": lambda: setup.forward(x, y),
        "arithmetic": floor_of(setup.config, tokens * setup.config.top_k),
    }
    with torch.no_grad():
        times = interleaved(functions, repetitions)
    setup.engine.check()
    found = {"arithmetic": times["arithmetic"]["median"], **bounds(setup.config, tokens, ranks)}
    return {
        "gpus": ranks,
        "tokens": tokens,
        "experts": setup.config.experts,
        "ms": times["fused"]["median"],
        "bounds_ms": {name: round(value, 4) for name, value in found.items()},
    }


def with_growth(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to every cell but the first how much the time and the largest bound grew since the cell before."""
    out: list[dict[str, Any]] = []
    for one in cells:
        row = {**one, "growth": None, "bound_growth": None}
        if out:
            row["growth"] = round(one["ms"] / out[-1]["ms"], 3)
            row["bound_growth"] = round(max(one["bounds_ms"].values()) / max(out[-1]["bounds_ms"].values()), 3)
        out.append(row)
    return out


def cliffs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells to which the time grew more than CLIFF times as much as the largest bound."""
    return [r for r in rows if r["growth"] is not None and r["growth"] > CLIFF * r["bound_growth"]]


def measure(repetitions: int, scheduler: str) -> dict[str, list[dict[str, Any]]]:
    """Both sweeps; collective."""
    _, ranks = place()
    setup = set_up(layer_of(FIXED_EXPERTS), max(TOKENS), scheduler)
    by_tokens = [cell(setup, s, ranks, repetitions) for s in TOKENS]
    setup.engine.heap.close()
    by_experts = []
    for experts in EXPERTS:
        setup = set_up(layer_of(experts), FIXED_TOKENS, scheduler)
        by_experts.append(cell(setup, FIXED_TOKENS, ranks, repetitions))
        setup.engine.heap.close()
    return {"tokens": with_growth(by_tokens), "experts": with_growth(by_experts)}


def plot(results: dict[str, Any], path: Path) -> None:
    """Time and bounds against S and against E, both axes logarithmic."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for ax, name, label in zip(axes, ("tokens", "experts"), ("tokens per GPU", "experts"), strict=True):
        rows = results[name]
        at = [r[name] for r in rows]
        ax.plot(at, [r["ms"] for r in rows], "o-", label="fused")
        for bound in ("arithmetic", "memory", "link"):
            values = [r["bounds_ms"][bound] for r in rows]
            if max(values) > 0:
                ax.plot(at, values, "--", label=f"bound: {bound}")
        ax.set(xscale="log", yscale="log", xlabel=label)
        ax.set_xticks(at, [str(v) for v in at], rotation=45)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("ms per call")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def render(results: dict[str, Any]) -> str:
    """Both sweeps as text."""
    lines = ["milliseconds per call, median; growth: against the line before"]
    for name in ("tokens", "experts"):
        lines.append(f"{name:>8} {'fused':>8} {'arith.':>8} {'memory':>8} {'link':>8}  growth  of bound")
        for r in results[name]:
            b = r["bounds_ms"]
            grown = "" if r["growth"] is None else f"{r['growth']:7.2f}  {r['bound_growth']:8.2f}"
            lines.append(
                f"{r[name]:>8} {r['ms']:8.3f} {b['arithmetic']:8.3f} {b['memory']:8.3f} {b['link']:8.3f} {grown}"
            )
        found = [str(r[name]) for r in cliffs(results[name])]
        lines.append(f"cliffs: {', '.join(found) or 'none'}")
    return "\n".join(lines)
