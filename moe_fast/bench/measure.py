"""Setting a layer up on this rank, the dense floor, and the one measuring loop of all figures.

Times are milliseconds of CUDA events, median over repetitions, of the slowest rank. Every repetition starts with all
ranks at a barrier, a short sleep kernel and a tiny all-reduce, so that neither the host's launches nor ranks that begin
at different times are in the figure.

Letters: S tokens of a rank, H hidden, D intermediate, E experts, K choices, P ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_fast.engine import Engine
from moe_fast.heap import local_heap, symmetric_heap
from moe_fast.kernel.regions import heap_regions
from moe_fast.kernel.shapes import KernelShape
from moe_fast.router import router_parts
from moe_fast.weights import ChainWeights
from moe_ref.config import MoEConfig

SLEEP_CYCLES = 2_500_000


@dataclass
class Setup:
    """One layer on this rank: engine, weights, tokens, and the router as the kernel takes it."""

    config: MoEConfig
    engine: Engine
    weights: ChainWeights
    x_SH: Tensor
    router: Tensor

    def forward(self, x_SH: Tensor, out: Tensor | None = None) -> Tensor:
        """Enqueue one call of the kernel, gate included."""
        return self.engine.launch(x_SH, self.router, self.weights.up_XUH, self.weights.down_XHD, out=out)


def place() -> tuple[int, int]:
    """(rank, ranks) of this process."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def set_up(
    config: MoEConfig,
    max_tokens: int,
    scheduler: str,
    trace: bool = False,
    seed: int = 0,
    paired: bool | None = None,
) -> Setup:
    """Allocate and fill; collective. Weights of a router and experts like those of a trained layer in scale.

    paired: whether processors are pairs of blocks, None for what a user gets.
    """
    rank, ranks = place()
    device = torch.device("cuda", torch.cuda.current_device())
    config = config.replace(max_tokens=max_tokens)
    shape = KernelShape.from_config(config, ranks, scheduler, trace, paired=paired)
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
    parts = router_parts(router, dtype) if shape.router_parts > 1 else router
    return Setup(config, engine, ChainWeights(router, up, down), x, parts)


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


def start_together(together: Tensor, hide_host: bool = True) -> None:
    """Before every call that is measured: what is enqueued next begins on all devices at one time. Collective.

    together: one element on this rank's device, for a sum that nobody reads.
    hide_host: let the host run ahead of the device, behind a sleep kernel.
    """
    _, ranks = place()
    torch.cuda.synchronize()
    if ranks > 1:
        dist.barrier()
        torch.cuda.synchronize()
    if hide_host:
        torch.cuda._sleep(SLEEP_CYCLES)
    if ranks > 1:
        # a host barrier alone leaves the devices 0.1 to 0.2 ms apart
        dist.all_reduce(together)


def interleaved(
    functions: dict[str, Callable[[], Any]], repetitions: int, hide_host: bool = True, calls: int = 1
) -> dict[str, dict[str, float]]:
    """Time functions in turn; per name the median and the fastest of the slowest rank's times, ms.

    hide_host: see `start_together`; without, the host's launches count.
    calls: so many calls in a row between two events, the time of one of them on average.
    """
    _, ranks = place()
    times: dict[str, list[float]] = {name: [] for name in functions}
    together = torch.zeros(1, device="cuda")
    for function in functions.values():
        function()
        function()
    for _ in range(repetitions):
        for name, function in functions.items():
            start_together(together, hide_host)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(calls):
                function()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / calls)
    out = {}
    for name, values in times.items():
        pair = torch.tensor([statistics.median(values), min(values)], device="cuda")
        if ranks > 1:
            dist.all_reduce(pair, op=dist.ReduceOp.MAX)
        out[name] = {"median": round(pair[0].item(), 4), "min": round(pair[1].item(), 4)}
    return out
