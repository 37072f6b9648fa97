"""Check every level of the ladder against fp32 arithmetic, then time all of them in turn beside the library.

    python -m moe_fast.ladder --out docs/results/ladder_h200.json
    torchrun --nproc-per-node 2 -m moe_fast.ladder --out docs/results/ladder_h200.json     two GPUs: level 7 as well

The rows are those that the layer's gate sends to its experts, the same for every level. A rate counts the two products
over real rows, padding left out, whatever else a level does: the megakernel's call contains gate, dispatch, return and
combine. Under torchrun each rank runs levels 0 to 6 on its own GPU, and the slowest rank's times are reported.

Letters: S tokens of a rank, H hidden, E experts, K choices, N rows.
"""

from __future__ import annotations

import json
import os
import shlex
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
from moe_fast.bench import LAYERS, PACKAGES, floor_of, interleaved, place, set_up
from moe_fast.engine import Engine
from moe_fast.heap import local_heap
from moe_fast.kernel.regions import heap_regions
from moe_fast.kernel.shapes import KernelShape
from moe_fast.ladder.problem import LEVELS, Problem, caller, random_weights
from moe_fast.weights import ChainWeights
from moe_ref.config import MoEConfig
from moe_ref.errors import CheckFailed, UsageError
from moe_ref.limits import check_output_path
from moe_ref.results import provenance, write_results

TOLERANCE = 4e-3
"""Relative error (Frobenius) of bfloat16 results against fp32 arithmetic on the same rounded inputs."""
IDEAS = {
    "plain": "tiles through shared memory, ordinary multiply-adds",
    "wgmma": "tensor cores; copy, then multiply, in turn",
    "tma": "the TMA unit copies; still in turn",
    "pipeline": "four stages; one warp loads, two warpgroups multiply",
    "persistent": "a block per multiprocessor walks an ordered list",
    "fused": "both products in one launch, counters between them",
    "megakernel": "gate, dispatch, return and combine as well, one GPU",
    "megakernel on 2": "the same on two GPUs, half the experts on each",
    "grouped": "library: grouped_mm, activation, grouped_mm",
    "dense": "library: two dense products of the same size",
}


def relative(value: Tensor, expected: Tensor) -> float:
    """|value - expected| / |expected|, Frobenius."""
    return float((value.double() - expected.double()).norm() / expected.double().norm())


@dataclass
class Layer:
    """A layer that fits on this rank's GPU alone: its engine, weights, tokens, and the rows behind its gate."""

    config: MoEConfig
    engine: Engine
    weights: ChainWeights
    x_SH: Tensor
    y_SH: Tensor
    problem: Problem
    place_SK: Tensor
    weight_SK: Tensor

    @classmethod
    def make(cls, config: MoEConfig, tokens: int, scheduler: str) -> Layer:
        """Random weights and tokens; one call of the megakernel routes them."""
        rank, _ = place()
        device = torch.device("cuda", torch.cuda.current_device())
        shape = KernelShape.from_config(config.replace(max_tokens=tokens), 1, scheduler)
        engine = Engine(shape, local_heap(heap_regions(shape, tokens)[1], device), tokens)
        g = torch.Generator(device=device).manual_seed(1 + rank)
        router = (torch.randn(config.experts, config.hidden, device=device, generator=g) * config.hidden**-0.5).to(
            torch.bfloat16
        )
        first, second = random_weights(config.experts, config.hidden, config.intermediate, device, seed=rank)
        weights = ChainWeights(router, first, second)
        x = torch.randn(tokens, config.hidden, device=device, generator=g).to(torch.bfloat16)
        y = engine.launch(x, router, weights.up_XUH, weights.down_XHD)
        engine.check()
        seen = engine.buffers(tokens)
        problem, place_SK = Problem.of_routes(x, seen.expert_SK.long(), first, second)
        return cls(config, engine, weights, x, y, problem, place_SK, seen.weight_SK.clone())

    def run(self) -> None:
        """Level 6."""
        w = self.weights
        self.engine.launch(self.x_SH, w.router_EH, w.up_XUH, w.down_XHD, out=self.y_SH)

    def grouped(self) -> Callable[[], Any]:
        """The library's chain on the same rows without padding."""
        at = torch.sort(self.place_SK.flatten()).values
        rows_NH = self.problem.rows_NH[at]
        ends = torch.tensor(self.problem.rows_X, device=rows_NH.device).cumsum(0).to(torch.int32)
        return lambda: unfused.feed_forward(rows_NH, ends, self.weights, self.config)


def check_level(name: str, run: Callable[[], Any], problem: Problem, hidden: Tensor, out: Tensor) -> float:
    """Relative error of a level's result.

    Raises:
        CheckFailed: it is wrong, leaves an element unwritten, differs between two calls, or a wait expired.
    """
    results = []
    for _ in range(2):
        problem.hidden_ND.fill_(float("nan"))
        problem.out_NH.fill_(float("nan"))
        run()
        torch.cuda.synchronize()
        results.append(problem.out_NH.clone())
    if bool(problem.failed.any()):
        raise CheckFailed(f"level {name}: a loader waited for hidden rows until its patience ended")
    errors = {"hidden": relative(problem.hidden_ND, hidden), "out": relative(problem.out_NH, out)}
    for what, error in errors.items():
        if not error < TOLERANCE:
            raise CheckFailed(f"level {name}: {what} differs from fp32 arithmetic by {error:.2e} (Frobenius)")
    if not torch.equal(*results):
        raise CheckFailed(f"level {name}: two calls differ")
    return errors["out"]


def run_ladder(config: MoEConfig, tokens: int, repetitions: int, scheduler: str) -> dict[str, Any]:
    """Check and time all levels; collective."""
    _, ranks = place()
    layer = Layer.make(config, tokens, scheduler)
    p = layer.problem
    hidden, out = p.expected()
    functions: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    for name in LEVELS:
        functions[name] = caller(name, p)
        errors[name] = check_level(name, functions[name], p, hidden, out)
    layer.run()
    layer.engine.check()
    expected_y = (out[layer.place_SK] * layer.weight_SK.unsqueeze(-1)).sum(1)
    errors["megakernel"] = relative(layer.y_SH, expected_y)
    functions["megakernel"] = layer.run
    engines = [layer.engine]
    if ranks > 1:
        two = set_up(config, tokens, scheduler)
        w, y = two.weights, torch.empty_like(two.x_SH)
        functions["megakernel on 2"] = lambda: two.engine.launch(two.x_SH, w.router_EH, w.up_XUH, w.down_XHD, out=y)
        functions["megakernel on 2"]()
        two.engine.check()
        with torch.no_grad():
            other = unfused.forward(two.x_SH, w, config, None, ranks)
        # the chain rounds once more, before the activation
        errors["megakernel on 2"] = relative(y, other)
        engines.append(two.engine)
    for name, limit in (("megakernel", TOLERANCE), ("megakernel on 2", 2e-2)):
        if not errors.get(name, 0.0) < limit:
            raise CheckFailed(f"level {name}: y differs by {errors[name]:.2e}")
    with torch.no_grad():
        functions["grouped"] = layer.grouped()
        functions["dense"] = floor_of(config, sum(p.rows_X))
        times = interleaved(functions, repetitions)
    for engine in engines:
        engine.check()
    launches = {**dict.fromkeys(LEVELS[:5], 2), "fused": 1, "megakernel": 1, "megakernel on 2": 1, "grouped": 3}
    rows = []
    for name, ms in times.items():
        level = list(functions).index(name) if name not in ("grouped", "dense") else None
        rate = p.flops / ms["median"] * 1e-9
        error = errors.get(name)
        rows.append(
            {
                "level": level,
                "name": name,
                "idea": IDEAS[name],
                "launches": launches.get(name, 2),
                "ms": ms,
                "tflops": round(rate, 1),
                "of_dense": round(times["dense"]["median"] / ms["median"], 3),
                "relative_error": None if error is None else float(f"{error:.2e}"),
            }
        )
    padded = len(p.rows_NH)
    return {"gpus": ranks, "tokens": tokens, "rows": sum(p.rows_X), "padded_rows": padded, "levels": rows}


def render(results: dict[str, Any]) -> str:
    """The levels as text, one a line."""
    lines = [f"{'level':>5} {'':<16} {'ms':>8} {'TFLOP/s':>8} {'of dense':>8}"]
    for row in results["levels"]:
        level = "" if row["level"] is None else row["level"]
        lines.append(
            f"{level:>5} {row['name']:<16} {row['ms']['median']:>8.3f} {row['tflops']:>8.1f} {row['of_dense']:>8.1%}"
            f"  {row['idea']}"
        )
    return "\n".join(lines)


def main(
    layer: str = typer.Option("paper-e32", help="A layer of the benchmark with relu and no gated FFN."),
    tokens: int = typer.Option(8192, help="S, tokens of each GPU."),
    repetitions: int = typer.Option(9, help="Timed calls of each level."),
    scheduler: str = typer.Option("spare_warps", help="Of the megakernel: spare_warps, os_block or tickets."),
    out: Path | None = typer.Option(None, help="Write the results with provenance here."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Check and time the ladder of kernels."""
    if not torch.cuda.is_available():
        raise UsageError("the ladder needs a CUDA device of compute capability 9.0; none is visible")
    if out is not None:
        check_output_path("--out", out)
    config = LAYERS.get(layer)
    if config is None or config.gated or config.activation != "relu":
        fit = [name for name, c in LAYERS.items() if not c.gated and c.activation == "relu"]
        raise UsageError(f"{layer!r} is no layer of the ladder; there are {', '.join(fit)}")
    if "RANK" in os.environ:
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))
    rank, ranks = place()
    if ranks > 2:
        raise UsageError(f"the ladder runs on one GPU or two, not on {ranks}")
    results = run_ladder(config, tokens, repetitions, scheduler)
    if rank == 0:
        start = "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
        command = shlex.join([*start.split(), "-m", "moe_fast.ladder", *sys.argv[1:]])
        head = {
            "title": "From a plain tile loop to the megakernel",
            "description": f"Layer {layer}; rate of the two products over real rows; interleaved in one run, medians.",
            "layer": layer,
        }
        if out is not None:
            write_results(out, {**head, **provenance(command, PACKAGES), **results})
        print(json.dumps({**head, **results}) if as_json else render(results))


if __name__ == "__main__":
    try:
        typer.run(main)
    except (UsageError, CheckFailed) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
