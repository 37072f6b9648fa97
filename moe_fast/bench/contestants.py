"""The contestants on one layer: fused, floor, eager and graph chain; the kernel's timeline; fp16 beside bf16."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_fast import unfused
from moe_fast.bench.layers import LAYERS, TOKENS
from moe_fast.bench.measure import SLEEP_CYCLES, Setup, floor_of, interleaved, place, set_up
from moe_ref.errors import CheckFailed

WARM_CALLS, TRACED_CALLS = 8, 9
"""Calls before a timeline is kept, and timelines kept: the one of median length is reported."""


def bench_cell(setup: Setup, tokens: int, repetitions: int, chains: bool) -> dict[str, Any]:
    """All contestants at one S."""
    _, ranks = place()
    group = None
    config, engine, weights = setup.config, setup.engine, setup.weights
    x = setup.x_SH[:tokens]
    y = torch.empty_like(x)

    def fused() -> None:
        engine.launch(x, weights.router_EH, weights.up_XUH, weights.down_XHD, out=y)

    functions: dict[str, Callable[[], Any]] = {"fused": fused, "floor": floor_of(config, tokens * config.top_k)}
    with torch.no_grad():
        if chains:
            functions["eager"] = lambda: unfused.forward(x, weights, config, group, ranks)
            functions["graph"] = unfused.Captured(x, weights, config, group, ranks)
            fused()
            engine.check()
            other = functions["graph"]()
            torch.cuda.synchronize()
            difference = float((y.double() - other.double()).norm() / other.double().norm())
            if not difference < 2e-2:
                raise CheckFailed(
                    f"fused and unfused differ by {difference:.2e} at S={tokens}; not timing wrong results"
                )
        result = interleaved(functions, repetitions)
    engine.check()
    return result


def run_bench(
    layers: list[str], tokens: list[int] | None, repetitions: int, scheduler: str, chains: bool
) -> list[dict[str, Any]]:
    """Rows of the result: one per layer and S. Collective; prints progress from rank 0 to stderr."""
    rank, ranks = place()
    rows = []
    for layer in layers:
        sizes = [s for s in TOKENS[layer] if tokens is None or s in tokens]
        if not sizes:
            continue
        setup = set_up(LAYERS[layer], max(sizes), scheduler)
        for s in sizes:
            times = bench_cell(setup, s, repetitions, chains)
            row = {"layer": layer, "gpus": ranks, "tokens": s, "scheduler": scheduler, "ms": times}
            row["fused_over_floor"] = round(times["fused"]["median"] / times["floor"]["median"], 3)
            for name in ("eager", "graph"):
                if name in times:
                    row[f"{name}_over_fused"] = round(times[name]["median"] / times["fused"]["median"], 3)
            rows.append(row)
            if rank == 0:
                print(json.dumps(row), file=sys.stderr, flush=True)
        setup.engine.heap.close()
        del setup
        torch.cuda.empty_cache()
    return rows


def run_trace(layer: str, tokens: int, scheduler: str, path: Path | None) -> dict[str, Any]:
    """Utilisation and share of time of one call of a traced kernel; optionally the trace itself (rank 0's)."""
    from moe_fast.timeline import read_timeline
    from moe_ref.runtime.trace import write_trace

    rank, ranks = place()
    setup = set_up(LAYERS[layer], tokens, scheduler, trace=True)
    w = setup.weights
    together = torch.zeros(1, device="cuda")
    lines = []
    # the first calls on fresh memory pay for address translation, a peer's more than the own
    for number in range(WARM_CALLS + TRACED_CALLS):
        torch.cuda.synchronize()
        setup.engine.heap.barrier()
        setup.engine.trace.zero_()
        # a host that was busy with the last timeline is slow to launch: longer than in `interleaved`
        torch.cuda._sleep(4 * SLEEP_CYCLES)
        if ranks > 1:
            dist.all_reduce(together)
        setup.engine.launch(setup.x_SH, w.router_EH, w.up_XUH, w.down_XHD)
        setup.engine.check()
        if number >= WARM_CALLS:
            lines.append(read_timeline(setup.engine))
    # in some calls one rank starts late and the others' time is waiting for it: the call of median length
    line = sorted(lines, key=lambda one: one.wall_us)[len(lines) // 2]
    if path is not None and rank == 0:
        write_trace(path, line.intervals, True, layer=layer, tokens=tokens, gpus=ranks)
    setup.engine.heap.close()
    starts: dict[str, list[float]] = {}
    for i in line.intervals:
        if i.actor.startswith("processor"):
            starts.setdefault(i.name, []).append(i.start_us)
    first = {name: round(statistics.median(v) if name in ("gate", "list", "push", "combine") else min(v), 1)
             for name, v in starts.items()}  # fmt: skip
    return {
        "layer": layer,
        "gpus": ranks,
        "tokens": tokens,
        "scheduler": scheduler,
        "wall_us": round(line.wall_us, 1),
        "utilisation": round(line.utilisation, 4),
        "main_loops": round(line.main_loops, 4),
        "share": {name: round(value, 4) for name, value in line.share.items()},
        "starts_us": first,
        "dropped_events": line.dropped,
    }


def run_dtypes(layers: list[str], tokens: int, repetitions: int, scheduler: str) -> list[dict[str, Any]]:
    """The kernel in bf16 and in fp16, interleaved; rows with both times and fp16's in times bf16's. Collective."""
    _, ranks = place()
    rows = []
    for layer in layers:
        size = min(tokens, max(TOKENS[layer]))
        setups = {
            dtype: set_up(LAYERS[layer].replace(dtype=dtype), size, scheduler) for dtype in ("bfloat16", "float16")
        }

        def call(setup: Setup) -> Callable[[], Any]:
            x, w = setup.x_SH, setup.weights
            y = torch.empty_like(x)
            return lambda: setup.engine.launch(x, w.router_EH, w.up_XUH, w.down_XHD, out=y)

        with torch.no_grad():
            times = interleaved({dtype: call(setup) for dtype, setup in setups.items()}, repetitions)
        for setup in setups.values():
            setup.engine.check()
            setup.engine.heap.close()
        ratio = times["float16"]["median"] / times["bfloat16"]["median"]
        rows.append({"layer": layer, "gpus": ranks, "tokens": size, "ms": times, "fp16_over_bf16": round(ratio, 4)})
    return rows
