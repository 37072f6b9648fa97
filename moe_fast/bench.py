"""Benchmark: fused, unfused (eager and graph-captured) and the dense floor, the same inputs, interleaved in one run.

    python -m moe_fast.bench run --out docs/results/megakernel_bench_1gpu.json                      one GPU
    torchrun --nproc-per-node 2 -m moe_fast.bench run --out docs/results/megakernel_bench_2gpu.json
    python -m moe_fast.bench table docs/results/megakernel_bench_2gpu.json [--json]
    python -m moe_fast.bench dtypes | growth | blocks | predict      fp16 against bf16; cost against S and E; blocks of
                                                                     transformers; the simulator on unseen cells
    python -m moe_fast.bench schedulers | balance | transports | wire     variants of the kernel side by side

Also as `moe-ref bench ...`. Runs differ by a few per cent, and a GPU that has been busy is slower: compare within one
run.

"floor" is the same matrix products as dense GEMMs of the library, without routing or communication. Times are
milliseconds of CUDA events, median over repetitions, of the slowest rank. Every repetition starts with all ranks at a
barrier, a short sleep kernel and a tiny all-reduce, so that neither the host's launches nor ranks that begin at
different times are in the figure.

Letters: S tokens of a rank, H hidden, D intermediate, E experts, K choices, P ranks.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from moe_fast import unfused
from moe_fast.engine import Engine
from moe_fast.heap import local_heap, symmetric_heap
from moe_fast.kernel.shapes import KernelShape, heap_regions
from moe_ref.config import MoEConfig
from moe_ref.environment import local_rank_from_environment, world_size_from_environment
from moe_ref.errors import CheckFailed, UsageError
from moe_ref.limits import regular_file_size
from moe_ref.results import provenance, write_results

SLEEP_CYCLES = 2_500_000
WARM_CALLS, TRACED_CALLS = 8, 9
"""Calls before a timeline is kept, and timelines kept: the one of median length is reported."""
PACKAGES = ("nvidia-cutlass-dsl", "nvshmem4py-cu13", "nvidia-nvshmem-cu13")


def _paper(experts: int) -> MoEConfig:
    return MoEConfig(2048, 2048, experts, 2, activation="relu", gated=False, dtype="bfloat16")


LAYERS: dict[str, MoEConfig] = {
    "paper-e8": _paper(8),
    "paper-e32": _paper(32),
    "paper-e128": _paper(128),
    "qwen3": MoEConfig(2048, 768, 128, 8, dtype="bfloat16"),
    "mixtral": MoEConfig(4096, 14336, 8, 2, dtype="bfloat16"),
}
TOKENS: dict[str, tuple[int, ...]] = {
    "paper-e8": (32, 128, 1024, 4096, 8192, 16384),
    "paper-e32": (32, 128, 1024, 4096, 8192, 16384),
    "paper-e128": (32, 128, 1024, 4096, 8192, 16384),
    "qwen3": (32, 128, 1024, 4096, 8192, 16384),
    "mixtral": (32, 128, 1024, 4096, 8192),
}


TARGETS: dict[tuple[str, int], dict[int, float]] = {
    ("paper-e8", 2): {16384: 1.2, 8192: 1.3, 4096: 1.6},
    ("paper-e32", 2): {16384: 1.2, 8192: 1.3, 4096: 1.6},
    ("paper-e128", 2): {16384: 1.3, 8192: 1.5, 4096: 2.1},
    ("qwen3", 2): {16384: 1.3, 8192: 1.4, 4096: 1.75, 1024: 3.2},
    ("qwen3", 1): {16384: 1.3, 8192: 1.4, 4096: 1.65, 1024: 3.6},
    ("mixtral", 2): {8192: 1.08, 4096: 1.1, 1024: 1.35},
}
"""(layer, GPUs) -> S -> the time aimed at, in times the dense floor of the same run."""


@dataclass
class Setup:
    """One layer on this rank: engine, weights, tokens."""

    config: MoEConfig
    engine: Engine
    weights: unfused.ChainWeights
    x_SH: Tensor


def place() -> tuple[int, int]:
    """(rank, ranks) of this process."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def set_up(config: MoEConfig, max_tokens: int, scheduler: str, trace: bool = False, seed: int = 0) -> Setup:
    """Allocate and fill; collective. Weights of a router and experts like those of a trained layer in scale."""
    rank, ranks = place()
    device = torch.device("cuda", torch.cuda.current_device())
    config = config.replace(max_tokens=max_tokens)
    shape = KernelShape.from_config(config, ranks, scheduler, trace)
    size = heap_regions(shape, max_tokens)[1]
    heap = symmetric_heap(size, device) if ranks > 1 else local_heap(size, device)
    engine = Engine(shape, heap, max_tokens)
    heap.barrier()
    same = torch.Generator(device=device).manual_seed(seed)
    own = torch.Generator(device=device).manual_seed(seed + 1 + rank)
    low, high = shape.first_expert(rank), shape.first_expert(rank + 1)
    dtype = config.torch_dtype

    def normal(*dims: int, generator: torch.Generator, scale: float) -> Tensor:
        return (torch.randn(*dims, device=device, generator=generator) * scale).to(dtype)

    up = torch.empty(high - low, config.up_rows, config.hidden, device=device, dtype=dtype)
    down = torch.empty(high - low, config.hidden, config.intermediate, device=device, dtype=dtype)
    for i in range(high - low):
        up[i] = normal(config.up_rows, config.hidden, generator=own, scale=config.hidden**-0.5)
        down[i] = normal(config.hidden, config.intermediate, generator=own, scale=config.intermediate**-0.5)
    router = normal(config.experts, config.hidden, generator=same, scale=config.hidden**-0.5)
    x = normal(max_tokens, config.hidden, generator=own, scale=1.0)
    return Setup(config, engine, unfused.ChainWeights(router, up, down), x)


def floor_of(config: MoEConfig, rows: int) -> Callable[[], Any]:
    """The layer's products for `rows` rows as two dense GEMMs of the library."""
    device, dtype = torch.device("cuda", torch.cuda.current_device()), config.torch_dtype
    x = torch.randn(rows, config.hidden, device=device).to(dtype)
    up = torch.randn(config.up_rows, config.hidden, device=device).to(dtype)
    hidden = torch.randn(rows, config.intermediate, device=device).to(dtype)
    down = torch.randn(config.hidden, config.intermediate, device=device).to(dtype)
    out0, out1 = x.new_empty(rows, config.up_rows), x.new_empty(rows, config.hidden)

    def run() -> None:
        torch.mm(x, up.t(), out=out0)
        torch.mm(hidden, down.t(), out=out1)

    return run


def interleaved(
    functions: dict[str, Callable[[], Any]], repetitions: int, hide_host: bool = True
) -> dict[str, dict[str, float]]:
    """Time functions in turn; per name the median and the fastest of the slowest rank's times, ms.

    hide_host: let the host run ahead of the device, behind a sleep kernel; without, its launches count.
    """
    _, ranks = place()
    times: dict[str, list[float]] = {name: [] for name in functions}
    together = torch.zeros(1, device="cuda")
    for function in functions.values():
        function()
        function()
    for _ in range(repetitions):
        for name, function in functions.items():
            torch.cuda.synchronize()
            if ranks > 1:
                dist.barrier()
                torch.cuda.synchronize()
            if hide_host:
                torch.cuda._sleep(SLEEP_CYCLES)
            if ranks > 1:
                # the devices start together: a host barrier alone leaves them 0.1 to 0.2 ms apart
                dist.all_reduce(together)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    out = {}
    for name, values in times.items():
        pair = torch.tensor([statistics.median(values), min(values)], device="cuda")
        if ranks > 1:
            dist.all_reduce(pair, op=dist.ReduceOp.MAX)
        out[name] = {"median": round(pair[0].item(), 4), "min": round(pair[1].item(), 4)}
    return out


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


def with_targets(results: dict[str, Any]) -> dict[str, Any]:
    """Add to every row what was aimed at and whether it is met; None where nothing was."""
    rows = []
    for row in results["rows"]:
        target = TARGETS.get((row["layer"], row["gpus"]), {}).get(row["tokens"])
        rows.append({**row, "target": target, "met": None if target is None else row["fused_over_floor"] <= target})
    return {**results, "rows": rows}


def render(results: dict[str, Any]) -> str:
    """The table of a result file."""
    lines = [
        "milliseconds per call, median; S: tokens of each GPU; floor: the products as dense GEMMs of the library",
        f"{'layer':12} {'GPUs':>4} {'S':>6} {'floor':>8} {'fused':>8} {'eager':>8} {'graph':>8}"
        "  fused/floor  aim   eager/f  graph/f",
    ]
    for row in with_targets(results)["rows"]:
        ms = {name: f"{value['median']:.3f}" for name, value in row["ms"].items()}
        lines.append(
            f"{row['layer']:12} {row['gpus']:>4} {row['tokens']:>6} {ms['floor']:>8} {ms['fused']:>8} "
            f"{ms.get('eager', '-'):>8} {ms.get('graph', '-'):>8}  {row['fused_over_floor']:>11.2f}  "
            f"{'' if row['target'] is None else row['target']:<4}  "
            f"{row.get('eager_over_fused', float('nan')):>7.2f}  {row.get('graph_over_fused', float('nan')):>7.2f}"
        )
    return "\n".join(lines)


app = typer.Typer(help="Time the fused kernel against the chain it replaces and the dense floor.", no_args_is_help=True)


def _join() -> None:
    """Enter torchrun's process group, if there is one."""
    if not torch.cuda.is_available():
        raise UsageError("the benchmark needs a CUDA device of compute capability 9.0; none is visible")
    if world_size_from_environment() is not None and not dist.is_initialized():
        local = local_rank_from_environment()
        torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))


def _command() -> str:
    """The command line that repeats this run."""
    _, ranks = place()
    start = "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
    arguments = sys.argv[1:]
    while arguments and arguments[0] in ("bench",):
        arguments = arguments[1:]
    return f"{start} -m moe_fast.bench {shlex.join(arguments)}"


def _layers(text: str) -> list[str]:
    """Names of layers, checked."""
    chosen = [name for name in text.split(",") if name]
    unknown = sorted(set(chosen) - set(LAYERS))
    if unknown:
        raise UsageError(f"unknown layers {unknown}; known: {', '.join(LAYERS)}")
    return chosen


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Values of an option, separated by commas, checked."""
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise UsageError(f"{option} is {text!r}, expected numbers of at least 0, separated by commas")
    return found


@app.command("run")
def run_command(
    layers: str = typer.Option(",".join(LAYERS), help="Layers, separated by commas."),
    tokens: str = typer.Option("", help="Only these S, separated by commas."),
    repetitions: int = typer.Option(15, help="Timed calls of each contestant."),
    scheduler: str = typer.Option("spare_warps", help="spare_warps, os_block or tickets."),
    chains: bool = typer.Option(True, help="Time the unfused chain too."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
    as_json: bool = typer.Option(False, "--json", help="Print the results as one JSON object."),
) -> None:
    """Time every contestant."""
    chosen, sizes = _layers(layers), _numbers("--tokens", tokens, int) if tokens else None
    _join()
    rows = run_bench(chosen, sizes, repetitions, scheduler, chains)
    title = f"The megakernel's times on {place()[1]} GPU{'s' * (place()[1] > 1)}"
    description = "Fused kernel, unfused chain (eager, graph) and dense floor, interleaved in one run; ms, median."
    results = {"title": title, "description": description, **provenance(_command(), PACKAGES), "rows": rows}
    if place()[0] == 0:
        if out is not None:
            write_results(out, results)
        print(json.dumps(results) if as_json else render(results))


@app.command("trace")
def trace_command(
    cells: str = typer.Option("paper-e8:16384,qwen3:8192", help="LAYER:S, several by commas."),
    scheduler: str = typer.Option("spare_warps", help="spare_warps, os_block or tickets."),
    trace: Path | None = typer.Option(None, help="Write the last cell's trace here (Chrome format, for Perfetto)."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Utilisation of the processors and where the rest of the time went, from in-kernel timestamps."""
    _join()
    rows = []
    for cell in cells.split(","):
        layer, _, tokens = cell.partition(":")
        if layer not in LAYERS or not tokens.isdigit():
            raise UsageError(f"{cell!r} is no LAYER:S; layers: {', '.join(LAYERS)}")
        rows.append(run_trace(layer, int(tokens), scheduler, trace))
        if place()[0] == 0:
            print(json.dumps(rows[-1]), flush=True)
    if out is not None and place()[0] == 0:
        title = f"Where a processor's time goes, {place()[1]} GPU{'s' * (place()[1] > 1)}"
        description = "Shares of a call's wall time per kind of work, from in-kernel timestamps; rank 0."
        found = {"title": title, "description": description, **provenance(_command(), PACKAGES), "rows": rows}
        write_results(out, found)


@app.command("balance")
def balance_command(
    layers: str = typer.Option("paper-e8,paper-e32", help="Layers, separated by commas."),
    tokens: int = typer.Option(8192, help="S."),
    skews: str = typer.Option("0,0.5,1,1.2", help="Zipf exponents of the routing, uniform first."),
    replicas: int = typer.Option(2, help="Replicas of every expert."),
    repetitions: int = typer.Option(15, help="Timed calls of each contestant."),
    scheduler: str = typer.Option("spare_warps", help="spare_warps, os_block or tickets."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Replicas, balanced inside the kernel, against plain placement, at uniform and at skewed routing."""
    from moe_fast import variants

    _join()
    if not 1 <= replicas <= place()[1]:
        raise UsageError(f"--replicas is {replicas}, expected 1 to {place()[1]}: one a rank")
    chosen = _layers(layers)
    numbers = _numbers("--skews", skews, float)
    rows = [variants.run_layer(name, tokens, numbers, replicas, scheduler, repetitions) for name in chosen]
    title = f"Balanced inside the kernel: replicas against plain placement on {place()[1]} GPUs"
    description = (
        "ms of one forward, routing handed in with the given Zipf exponent; all contestants interleaved in one run. "
        "solver_us: what the kernel's solver takes, from its own timestamps."
    )
    results = {"title": title, "description": description, **provenance(_command(), PACKAGES), "rows": rows}
    if place()[0] == 0:
        if out is not None:
            write_results(out, results)
        print(json.dumps(results))
        print(variants.render(results), file=sys.stderr)


@app.command("transports")
def transports_command(
    layers: str = typer.Option("paper-e8,qwen3", help="Layers, separated by commas."),
    tokens: int = typer.Option(8192, help="S."),
    repetitions: int = typer.Option(15, help="Timed calls of each contestant."),
    scheduler: str = typer.Option("spare_warps", help="spare_warps, os_block or tickets."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Put-with-signal against direct stores, and the fixed layout against the compact one."""
    from moe_fast import variants

    _join()
    if place()[1] < 2:
        raise UsageError("several ranks are needed: torchrun --nproc-per-node 2 -m moe_fast.bench transports")
    chosen = _layers(layers)
    rows = [variants.run_transports(name, tokens, scheduler, repetitions) for name in chosen]
    title = f"Transports and layouts side by side on {place()[1]} GPUs"
    description = (
        "ms of one forward, routing handed in, uniform; all contestants interleaved in one run, with the same bits. "
        "The fixed layout with capacity factor 2."
    )
    results = {"title": title, "description": description, **provenance(_command(), PACKAGES), "rows": rows}
    if place()[0] == 0:
        if out is not None:
            write_results(out, results)
        print(json.dumps(results))


@app.command("wire")
def wire_command(
    layers: str = typer.Option("qwen3", help="Layers, separated by commas."),
    tokens: str = typer.Option("16384,8192,4096,1024", help="Values of S, separated by commas."),
    repetitions: int = typer.Option(15, help="Timed calls of each contestant."),
    scheduler: str = typer.Option("spare_warps", help="spare_warps, os_block or tickets."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Both wire formats: a row for each route, or one for each token and rank and a partial sum back."""
    from moe_fast import variants

    chosen, sizes = _layers(layers), _numbers("--tokens", tokens, int)
    _join()
    if place()[1] < 2:
        raise UsageError("several ranks are needed: torchrun --nproc-per-node 2 -m moe_fast.bench wire")
    rows = [row for name in chosen for row in variants.run_wire(name, sizes, scheduler, repetitions)]
    title = f"Wire formats side by side on {place()[1]} GPUs"
    description = (
        "ms of one forward, gate included, both formats interleaved in one run. remote_rows: sent by rank 0 to others, "
        "as many come back; remote_bytes: both ways, with what goes beside the rows, counted term by term."
    )
    results = {"title": title, "description": description, **provenance(_command(), PACKAGES), "rows": rows}
    if place()[0] == 0:
        if out is not None:
            write_results(out, results)
        print(json.dumps(results))


@app.command("schedulers")
def schedulers_command(
    layers: str = typer.Option("paper-e8,paper-e128,qwen3", help="Layers, separated by commas."),
    tokens: str = typer.Option("16384,8192,1024", help="Values of S, separated by commas."),
    repetitions: int = typer.Option(9, help="Timed calls of each contestant."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """The three schedulers side by side."""
    from moe_fast import variants

    chosen, sizes = _layers(layers), _numbers("--tokens", tokens, int)
    _join()
    rows = [row for name in chosen for row in variants.run_schedulers(name, sizes, repetitions)]
    gpus = place()[1]
    description = "ms of one forward, gate included; the three schedulers take turns in one run and give the same bits."
    results = {"rows": rows}
    text = variants.render_schedulers(results)
    _finish(f"Schedulers side by side, {gpus} GPU{'s' * (gpus > 1)}", description, results, out, text)


@app.command("table")
def table_command(
    path: Path = typer.Argument(Path("docs/results/megakernel_bench_2gpu.json"), help="Result file."),
    as_json: bool = typer.Option(False, "--json", help="Print the rows as JSON."),
) -> None:
    """Show a result file."""
    results = _read_results(path)
    print(json.dumps(with_targets(results)) if as_json else render(results))


def _read_results(path: Path) -> dict[str, Any]:
    regular_file_size(path, "results that `bench run --out` wrote")
    try:
        results = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} can't be read as JSON: {error}") from error
    rows = results.get("rows") if isinstance(results, dict) else None
    if not isinstance(rows, list) or not all(isinstance(r, dict) and {"layer", "ms", "gpus"} <= set(r) for r in rows):
        raise UsageError(f"{path} holds no rows of a benchmark, expected results that `bench run --out` wrote")
    return results


def _finish(title: str, description: str, body: dict[str, Any], out: Path | None, text: str) -> None:
    """Rank 0 writes the results and prints the text."""
    if place()[0] == 0:
        if out is not None:
            write_results(out, {"title": title, "description": description, **provenance(_command(), PACKAGES), **body})
        print(text)


@app.command("dtypes")
def dtypes_command(
    layers: str = typer.Option(",".join(LAYERS), help="Layers, separated by commas."),
    tokens: int = typer.Option(8192, help="Tokens of each GPU."),
    repetitions: int = typer.Option(15, help="Timed calls of each contestant."),
    scheduler: str = typer.Option("spare_warps", help="spare_warps, os_block or tickets."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """fp16 against bf16."""
    chosen = _layers(layers)
    _join()
    rows = run_dtypes(chosen, tokens, repetitions, scheduler)
    text = "\n".join(f"{r['layer']:12} {r['tokens']:>6}  fp16 / bf16 {r['fp16_over_bf16']:.3f}" for r in rows)
    _finish("fp16 against bf16", "Median ms of the fused kernel, interleaved in one run.", {"rows": rows}, out, text)


@app.command("growth")
def growth_command(
    repetitions: int = typer.Option(15, help="Timed calls of each cell."),
    scheduler: str = typer.Option("spare_warps", help="spare_warps, os_block or tickets."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Time against S from 32 to 16384 and against E from 8 to 256, beside three bounds."""
    from moe_fast import growth

    _join()
    results = growth.measure(repetitions, scheduler)
    description = "The paper's layer: ms per call, median, and three bounds; growth is against the row before."
    _finish(f"How the cost grows, GPUs: {place()[1]}", description, results, out, growth.render(results))


@app.command("plot")
def plot_command(
    path: Path = typer.Argument(Path("docs/results/megakernel_growth_1gpu.json"), help="Result of `growth`."),
    out: Path = typer.Option(Path("growth.svg"), help="Write the figure here."),
) -> None:
    """Plot a result of `growth`; needs matplotlib."""
    from moe_fast import growth

    growth.plot(json.loads(path.read_text()), out)


@app.command("blocks")
def blocks_command(
    repetitions: int = typer.Option(9, help="Timed calls of each contestant."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Blocks of transformers against the same layers on the fused kernel, one GPU."""
    from moe_fast import library_blocks

    _join()
    if place()[1] > 1:
        raise UsageError("blocks of transformers run on one GPU: start this without torchrun")
    rows = [row for family in library_blocks.BLOCKS for row in library_blocks.compare(family, repetitions)]
    results = {"rows": rows}
    description = "ms per forward, median, host included; the library's experts are its grouped_mm implementation."
    text = library_blocks.render(results)
    _finish("Blocks of transformers and the fused layer, one GPU", description, results, out, text)


@app.command("predict")
def predict_command(
    paths: list[Path] = typer.Argument(None, help="Results of `run`; by default the committed ones."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
) -> None:
    """Calibrate the simulator on half of the cells of benchmark results and predict the others; needs no GPU."""
    from moe_fast import prediction

    files = paths or [Path(f"docs/results/megakernel_bench_{gpus}gpu.json") for gpus in (1, 2)]
    results = prediction.predict(files)
    description = "Cells of the benchmark that the calibration has not seen; error is simulated / measured - 1."
    _finish("The simulator on cells it has not seen", description, results, out, prediction.render(results))


if __name__ == "__main__":
    app()
