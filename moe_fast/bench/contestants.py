"""The contestants on one layer: fused, floor, eager and graph chain; the kernel's timeline; fp16 beside bf16."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType

from moe_fast import unfused
from moe_fast.bench.layers import LAYERS, TOKENS, layer_config
from moe_fast.bench.measure import SLEEP_CYCLES, Setup, floor_of, interleaved, place, set_up, start_together
from moe_fast.engine import Engine
from moe_fast.timeline import Timeline, timeline_in
from moe_ref.errors import CheckFailed

WARM_CALLS, TRACED_CALLS = 8, 9
"""Calls before a timeline is kept, and timelines kept: the one of median length is reported."""
CLOCK_CYCLES, CLOCK_RUNS = 600_000, 2
"""Cycles that a clock is watched for, 0.3 to 0.4 ms, and calls that are enqueued beside it."""


def bench_cell(setup: Setup, tokens: int, repetitions: int, chains: bool) -> dict[str, Any]:
    """All contestants at one S."""
    _, ranks = place()
    group = None
    config, engine, weights = setup.config, setup.engine, setup.weights
    x = setup.x_SH[:tokens]
    y = torch.empty_like(x)

    def fused() -> None:
        setup.forward(x, y)

    functions: dict[str, Callable[[], Any]] = {"fused": fused, "floor": floor_of(config, tokens * config.top_k)}
    with torch.no_grad():
        if chains:
            functions["eager"] = lambda: unfused.forward(x, weights, config, group, ranks)
            # where the library has no grouped product of the dtype the chain asks the host, which no graph can
            if unfused.capturable(config.torch_dtype):
                functions["graph"] = unfused.Captured(x, weights, config, group, ranks)
            fused()
            engine.check()
            other = functions["graph" if "graph" in functions else "eager"]()
            torch.cuda.synchronize()
            difference = float((y.double() - other.double()).norm() / other.double().norm())
            if not difference < 2e-2:
                raise CheckFailed(
                    f"fused and unfused differ by {difference:.2e} at S={tokens}; not timing wrong results"
                )
        with tensor_cores(config.dtype):
            result = interleaved(functions, repetitions)
    engine.check()
    return result


@contextmanager
def tensor_cores(dtype: str) -> Iterator[None]:
    """For float32 the library's products on TF32 tensor cores, as the kernel's are; nothing changes for 16 bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or dtype == "float32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def operations(call: Callable[[], Any]) -> int:
    """GPU operations of a call, counted by the profiler."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profile.events() or ())


def run_costs(setup: Setup, tokens: int) -> dict[str, Any]:
    """GPU operations of one forward of every contestant, and bytes: this rank's buffers, and what the chain takes.

    symmetric: the heap that peers write; workspace: what only this rank touches; experts: this rank's weights;
    eager: the most that one forward of the eager chain allocates beside its inputs.
    """
    _, ranks = place()
    config, engine, weights = setup.config, setup.engine, setup.weights
    x = setup.x_SH[:tokens]
    y = torch.empty_like(x)

    def eager() -> None:
        unfused.forward(x, weights, config, None, ranks)

    calls: dict[str, Callable[[], Any]] = {"fused": lambda: setup.forward(x, y), "eager": eager}
    with torch.no_grad():
        if unfused.capturable(config.torch_dtype):
            calls["graph"] = unfused.Captured(x, weights, config, None, ranks)
        counted = {name: operations(call) for name, call in calls.items()}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        eager()
        torch.cuda.synchronize()
    engine.check()
    parts = (weights.up_XUH, weights.down_XHD)
    found = {
        "symmetric": engine.heap.size,
        "workspace": engine.memory.workspace.numel(),
        "experts": sum(t.numel() * t.element_size() for t in parts),
        "eager": torch.cuda.max_memory_allocated() - before,
    }
    return {"gpu_operations": counted, "bytes": found}


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


def median_timeline(engine: Engine, call: Callable[[], Any]) -> Timeline:
    """This rank's timeline of a call of a traced engine: of TRACED_CALLS the one of median length. Collective.

    The length of a call is that on the rank where it is longest, so that all ranks show the same call.
    """
    _, ranks = place()
    together = engine.trace.new_zeros(1)
    kept = engine.trace.new_empty(TRACED_CALLS, engine.trace.numel())
    # the first calls on fresh memory pay for address translation, a peer's more than the own
    for number in range(-WARM_CALLS, TRACED_CALLS):
        engine.trace.zero_()
        start_together(together)
        call()
        if number >= 0:
            # read after the last call: between calls that are timed devices don't idle for as long as reading takes
            kept[number].copy_(engine.trace)
    engine.check()
    lines = [timeline_in(words, engine) for words in kept.cpu()]
    length = kept.new_tensor([line.wall_us for line in lines], dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(length, op=dist.ReduceOp.MAX)
    return lines[int(length.argsort()[len(lines) // 2])]


def run_trace(layer: str, tokens: int, scheduler: str, path: Path | None) -> dict[str, Any]:
    """Utilisation and share of time of one call of a traced kernel; optionally the trace itself (rank 0's)."""
    from moe_ref.runtime.trace import write_trace

    rank, ranks = place()
    config = layer_config(layer)
    setup = set_up(config, tokens, scheduler, trace=True)
    y = torch.empty_like(setup.x_SH)
    line = median_timeline(setup.engine, lambda: setup.forward(setup.x_SH, y))
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
        "clock_ghz": round(line.clock_ghz, 3),
        "library_clock_ghz": round(clock_beside(floor_of(config, tokens * config.top_k)), 3),
        "share": {name: round(value, 4) for name, value in line.share.items()},
        "starts_us": first,
        "dropped_events": line.dropped,
    }


def clock_beside(run: Callable[[], Any]) -> float:
    """The SMs' clock in GHz while `run` does, on average: a kernel of one thread that waits for CLOCK_CYCLES runs
    beside it, and is timed. Not for kernels that leave no room on any SM: those would wait for it."""
    aside, found = torch.cuda.Stream(), []
    for _ in range(TRACED_CALLS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        aside.wait_stream(torch.cuda.current_stream())
        for _ in range(CLOCK_RUNS):
            run()
        with torch.cuda.stream(aside):
            begin.record()
            torch.cuda._sleep(CLOCK_CYCLES)
            end.record()
        torch.cuda.synchronize()
        found.append(CLOCK_CYCLES / begin.elapsed_time(end) / 1e6)
    return statistics.median(found)


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
            x = setup.x_SH
            y = torch.empty_like(x)
            return lambda: setup.forward(x, y)

        with torch.no_grad():
            times = interleaved({dtype: call(setup) for dtype, setup in setups.items()}, repetitions)
        for setup in setups.values():
            setup.engine.check()
            setup.engine.heap.close()
        ratio = times["float16"]["median"] / times["bfloat16"]["median"]
        rows.append({"layer": layer, "gpus": ranks, "tokens": size, "ms": times, "fp16_over_bf16": round(ratio, 4)})
    return rows
