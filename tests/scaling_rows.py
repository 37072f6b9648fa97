"""Rows as a scaling run's cells give them, with times that follow from the cell alone: what tests measure with."""

from __future__ import annotations

from typing import Any

from moe_fast.bench import balanced
from moe_fast.bench.scaling import Cell, Store, plan, run
from moe_ref.results import PROVENANCE_KEYS

CONDITIONS = {**dict.fromkeys(PROVENANCE_KEYS, "x"), "packages": {"torch": "1"}, "date": "2026-01-02T03:04:05Z"}


def median(value: float) -> dict[str, float]:
    return {"median": round(value, 4), "min": round(0.9 * value, 4)}


def measured(cell: Cell, gpus: int = 8) -> dict[str, Any]:
    """A row. A call of the paper's layers takes tokens / 16384 * (1 + gpus / 100) ms; others are multiples of that."""
    about = {"layer": cell.layer, "dtype": cell.dtype, "gpus": gpus, "tokens": cell.tokens}
    t = cell.tokens / 16384 * (1 + gpus / 100)
    if cell.figure == "latency":
        ms = {"fused": median(t), "floor": median(0.8 * t), "eager": median(4 * t), "graph": median(2 * t)}
        if cell.dtype == "float32":
            del ms["graph"]
        return {**about, "experts": cell.config.experts, "ms": ms}
    if cell.figure == "wire":
        count = {"routes": 1000, "tokens": 500}
        return {**about, "ms": {"routes": median(t), "tokens": median(0.7 * t)}, "remote_bytes": count}
    if cell.figure == "timeline":
        return {
            **about,
            "wall_us": 1e3 * t,
            "utilisation": 0.9,
            "main_loops": 0.8,
            "share": {"gemm0": 0.5, "wait": 0.1},
        }
    if cell.figure == "costs":
        found = {"symmetric": 1 << 30, "workspace": 1 << 28, "experts": 1 << 29, "eager": 1 << 28}
        return {**about, "gpu_operations": {"fused": 1, "eager": 40}, "bytes": found}
    if cell.figure == "balance":
        over = {"plain": 1 + 0.3 * cell.skew, "eplb": 1.05, "symmetric": 1.02, "given": 1.01, "asymmetric": 1.01}
        times = {name: median(t * value) for name, value in {**over, "balanced": 1.0}.items()}
        stages = {name: {**dict.fromkeys((*balanced.STAGES, "busy", "solve", "wall"), 1.0)} for name in times}
        return {
            **about, "zipf": cell.skew, "ms": times, "over_balanced": over, "solving_ms": 0.004,
            "max_over_mean_load": dict.fromkeys(balanced.PLACED, 1.0), "stages_us": stages,
        }  # fmt: skip
    return {
        "backend": cell.dtype,
        "balancing": cell.layer,
        "gpus": gpus,
        "tokens": 2048,
        "ms": 12.5,
        "loss": [8.0, 4.0],
    }


def a_run(gpus: int, path: Any = None, figures: tuple[str, ...] | None = None) -> dict[str, Any]:
    """The whole result of a run on so many GPUs."""
    planned = plan(gpus, **({} if figures is None else {"figures": figures}))
    head = {"title": "t", "description": "d", **CONDITIONS, "gpus": gpus, "repetitions": 15, "scheduler": "spare_warps"}
    store = Store.open(path, head)
    store.expect(planned)
    run(planned.cells, lambda cell: measured(cell, gpus), store)
    return store.values
