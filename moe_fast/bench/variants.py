"""Variants of the kernel side by side: replicas against plain placement, put-with-signal against stores, both layouts,
both wire formats, the three schedulers, processors of one block and of two.

Replicas: every expert lies on every rank (or on `replicas` of them); the kernel's solver divides the rows of each
batch. The routing is handed in, the same for all contestants, so that its skew is known: K different experts a token,
drawn by Zipf popularity in a fixed random order of the experts. All contestants take turns in one run, and give the
same bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_fast.bench.layers import LAYERS
from moe_fast.bench.measure import Setup, interleaved, place, set_up
from moe_fast.engine import Engine
from moe_fast.heap import local_heap, symmetric_heap
from moe_fast.kernel.constants import SCHEDULERS
from moe_fast.kernel.regions import heap_regions
from moe_fast.kernel.shapes import KernelShape
from moe_fast.timeline import read_timeline
from moe_ref import balance
from moe_ref.config import MoEConfig
from moe_ref.errors import CheckFailed
from moe_ref.layout import ceil_div
from moe_ref.placement import Placement
from moe_ref.placement.skew import zipf_popularity


def popularity(experts: int, skew: float) -> np.ndarray:
    """Share of every expert, float64 [E]: Zipf's, in a fixed random order of the experts."""
    return zipf_popularity(experts, skew)[np.random.default_rng(0).permutation(experts)]


def draw_routing(config: MoEConfig, tokens: int, skew: float, rank: int) -> tuple[Tensor, Tensor]:
    """(ids int64 [S, K], weights fp32 [S, K]) of a rank: K different experts a token, by Zipf popularity."""
    device = torch.device("cuda", torch.cuda.current_device())
    share_E = torch.from_numpy(popularity(config.experts, skew)).to(device)
    g = torch.Generator(device=device).manual_seed(1000 + rank)
    noise_SE = -torch.rand(tokens, config.experts, device=device, dtype=torch.float64, generator=g).log()
    # exponential races: the K first of them are a draw without replacement
    ids_SK = (noise_SE / share_E).topk(config.top_k, dim=1, largest=False).indices
    weight_SK = torch.rand(tokens, config.top_k, device=device, generator=g)
    return ids_SK, weight_SK / weight_SK.sum(1, keepdim=True)


def spread(experts: int, ranks: int, replicas: int) -> Placement:
    """Expert e on ranks e, e + 1, ... (modulo P): every rank holds equally many."""
    sets = [[(e * replicas + j) % ranks for j in range(replicas)] for e in range(experts)]
    return Placement.from_replicas(sets, ranks)


class Contestant:
    """One kernel with its buffers and its share of the weights, the same logical experts for every placement."""

    def __init__(
        self,
        config: MoEConfig,
        placement: Placement,
        scheduler: str,
        trace: bool = False,
        transport: str = "stores",
    ) -> None:
        rank, ranks = place()
        device = torch.device("cuda", torch.cuda.current_device())
        self.shape = KernelShape.from_config(config, ranks, scheduler, trace, placement=placement, transport=transport)
        size = heap_regions(self.shape, config.max_tokens)[1]
        heap = symmetric_heap(size, device, mapped=not self.shape.put) if ranks > 1 else local_heap(size, device)
        self.engine = Engine(self.shape, heap, config.max_tokens)
        heap.barrier()
        held = placement.experts_of_rank[rank]
        dtype = config.torch_dtype
        self.up = torch.empty(len(held), config.up_rows, config.hidden, device=device, dtype=dtype)
        self.down = torch.empty(len(held), config.hidden, config.intermediate, device=device, dtype=dtype)
        for slot, expert in enumerate(held):
            g = torch.Generator(device=device).manual_seed(expert)
            for value in (self.up[slot], self.down[slot]):
                value.copy_(torch.randn(value.shape, device=device, generator=g) * value.shape[1] ** -0.5)
        self.router = torch.zeros(config.experts, config.hidden, device=device, dtype=dtype)
        self.more: dict[str, Any] = {"placement": placement} if self.shape.placed else {}

    def call(
        self,
        x_SH: Tensor,
        ids_SK: Tensor,
        weight_SK: Tensor,
        out: Tensor | None = None,
        quota_PED: Tensor | None = None,
    ) -> Tensor:
        """Enqueue one forward; quota_PED: a plan instead of the kernel's own."""
        more = self.more if quota_PED is None else {**self.more, "quota_PED": quota_PED}
        return self.engine.launch(
            x_SH, self.router, self.up, self.down, expert_SK=ids_SK, weight_SK=weight_SK, out=out, **more
        )


def run_layer(
    layer: str, tokens: int, skews: list[float], replicas: int, scheduler: str, repetitions: int
) -> dict[str, Any]:
    """Times of replicas and plain placement at every skew, loads, and how long the solver takes in the kernel."""
    rank, ranks = place()
    config = LAYERS[layer].replace(max_tokens=tokens)
    placements = {
        "replicas": spread(config.experts, ranks, replicas),
        "plain": Placement.contiguous(config.experts, ranks),
    }
    contestants = {name: Contestant(config, placement, scheduler) for name, placement in placements.items()}
    g = torch.Generator(device="cuda").manual_seed(rank)
    x = torch.randn(tokens, config.hidden, device="cuda", generator=g).to(config.torch_dtype)
    routings = {skew: draw_routing(config, tokens, skew, rank) for skew in skews}
    out = torch.empty_like(x)
    for skew, routing in routings.items():
        first, second = (one.call(x, *routing) for one in contestants.values())
        for one in contestants.values():
            one.engine.check()
        if not torch.equal(first, second):
            raise CheckFailed(f"replicas and plain placement give different bits at skew {skew}; not timing them")

    def timed(one: Contestant, routing: tuple[Tensor, Tensor]) -> Any:
        return lambda: one.call(x, *routing, out=out)

    functions = {f"{n} {s:g}": timed(c, r) for n, c in contestants.items() for s, r in routings.items()}
    times = interleaved(functions, repetitions)
    rows = []
    for skew in skews:
        row: dict[str, Any] = {"zipf": skew}
        for name, one in contestants.items():
            one.call(x, *routings[skew], out=out)
            one.engine.check()
            counts_PE = one.engine.buffers(tokens).counts_PE.cpu().numpy().astype(np.int64)
            method = "flow" if one.shape.placed else "plain"
            plan = balance.schedule(counts_PE, placements[name], method=method)
            found, best = times[f"{name} {skew:g}"], times[f"{name} {skews[0]:g}"]
            row[name] = {
                "ms": found["median"],
                "over_uniform": round(found["median"] / best["median"], 3),
                "max_over_mean_load": round(plan.max_load / ceil_div(int(counts_PE.sum()), ranks), 4),
                "local_share": round(plan.local_share, 4),
            }
        rows.append(row)
    for one in contestants.values():
        one.engine.check()
        one.engine.heap.close()
    result = {"layer": layer, "gpus": ranks, "tokens": tokens, "replicas": replicas, "scheduler": scheduler}
    return result | {"rows": rows, "solver_us": solver_times(config, placements["replicas"], scheduler, x, routings)}


def run_transports(layer: str, tokens: int, scheduler: str, repetitions: int) -> dict[str, Any]:
    """Times of both transports and both layouts at uniform routing; the fixed layout with twice the mean capacity."""
    rank, ranks = place()
    config = LAYERS[layer].replace(max_tokens=tokens)
    placement = Placement.contiguous(config.experts, ranks)
    fixed = config.replace(layout="fixed", capacity_factor=2.0)
    contestants = {
        "stores": Contestant(config, placement, scheduler),
        "put_signal": Contestant(config, placement, scheduler, transport="put_signal"),
        "fixed": Contestant(fixed, placement, scheduler),
    }
    g = torch.Generator(device="cuda").manual_seed(rank)
    x = torch.randn(tokens, config.hidden, device="cuda", generator=g).to(config.torch_dtype)
    routing = draw_routing(config, tokens, 0.0, rank)
    out = torch.empty_like(x)
    results = {name: one.call(x, *routing) for name, one in contestants.items()}
    for name, one in contestants.items():
        one.engine.check()
        if not torch.equal(results[name], results["stores"]):
            raise CheckFailed(f"{name} gives other bits than direct stores; not timing it")
    counts_PE = contestants["stores"].engine.buffers(tokens).counts_PE.cpu().numpy().astype(np.int64)
    sent_PG = balance.schedule(counts_PE, placement, method="plain").quota_by_slot().sum(axis=2)
    remote = int(sent_PG[rank].sum() - sent_PG[rank, rank]), int(sent_PG[:, rank].sum() - sent_PG[rank, rank])
    counted = contestants["put_signal"].engine.readback.put_rows
    if counted != remote:
        raise CheckFailed(f"{counted} rows and results went by put-with-signal, {remote} were remote")

    def timed(one: Contestant) -> Any:
        return lambda: one.call(x, *routing, out=out)

    times = interleaved({name: timed(one) for name, one in contestants.items()}, repetitions)
    for one in contestants.values():
        one.engine.check()
        one.engine.heap.close()
    row: dict[str, Any] = {"layer": layer, "gpus": ranks, "tokens": tokens, "scheduler": scheduler, "ms": times}
    row |= {"remote_rows": remote[0], "rows_by_put": counted[0], "results_by_put": counted[1]}
    for name in list(contestants)[1:]:
        row[f"{name}_over_stores"] = round(times[name]["median"] / times["stores"]["median"], 3)
    return row


def run_schedulers(layer: str, sizes: list[int], repetitions: int) -> list[dict[str, Any]]:
    """Times of the three schedulers in turn, gate included, one row per S; raises CheckFailed if bits differ."""
    return _in_turn(layer, sizes, repetitions, {n: set_up(LAYERS[layer], max(sizes), n) for n in SCHEDULERS})


def run_pairs(layer: str, sizes: list[int], scheduler: str, repetitions: int) -> list[dict[str, Any]]:
    """Times with processors of one block and of two that share weights; raises CheckFailed if bits differ."""
    config, most = LAYERS[layer], max(sizes)
    setups = {name: set_up(config, most, scheduler, paired=name == "pairs") for name in ("single", "pairs")}
    return _in_turn(layer, sizes, repetitions, setups)


def _in_turn(layer: str, sizes: list[int], repetitions: int, setups: dict[str, Setup]) -> list[dict[str, Any]]:
    """Times of several kernels of one layer, gate included, one row per S; the ratios are to the first of them."""
    _, ranks = place()
    base, *others = setups
    rows = []
    for tokens in sizes:

        def timed(setup: Setup, tokens: int = tokens) -> Callable[[], Tensor]:
            x = setup.x_SH[:tokens]
            y = torch.empty_like(x)
            return lambda: setup.forward(x, y)

        functions = {name: timed(setup) for name, setup in setups.items()}
        results = {name: function().clone() for name, function in functions.items()}
        for name, setup in setups.items():
            setup.engine.check()
            if not torch.equal(results[name], results[base]):
                raise CheckFailed(f"{name} gives other bits than {base} at S={tokens}; not timing it")
        times = interleaved(functions, repetitions)
        row: dict[str, Any] = {"layer": layer, "gpus": ranks, "tokens": tokens, "ms": times}
        for name in others:
            row[f"{name}_over_{base}"] = round(times[name]["median"] / times[base]["median"], 3)
        rows.append(row)
    for setup in setups.values():
        setup.engine.check()
        setup.engine.heap.close()
    return rows


def render_in_turn(results: dict[str, Any]) -> str:
    """The table of a result of `run_schedulers` or `run_pairs`."""
    names = list(results["rows"][0]["ms"])
    lines = [f"{'layer':12} {'GPUs':>4} {'S':>6}" + "".join(f" {name:>12}" for name in names)]
    for row in results["rows"]:
        line = f"{row['layer']:12} {row['gpus']:>4} {row['tokens']:>6}"
        lines.append(line + "".join(f" {row['ms'][name]['median']:12.3f}" for name in names))
    return "\n".join(lines)


def run_wire(layer: str, sizes: list[int], scheduler: str, repetitions: int) -> list[dict[str, Any]]:
    """Times of both wire formats at every S, and what crosses in each."""
    rank, ranks = place()
    config = LAYERS[layer]
    formats = {name: set_up(config.replace(wire_format=name), max(sizes), scheduler) for name in ("routes", "tokens")}
    rows = []
    for tokens in sizes:
        inputs = formats["routes"].x_SH[:tokens]
        out = torch.empty_like(inputs)

        def timed(one: Setup, x: Tensor = inputs, out: Tensor = out) -> Any:
            return lambda: one.forward(x, out)

        results = {}
        for name, one in formats.items():
            results[name] = timed(one)().clone()
            one.engine.check()
        off = results["tokens"].float() - results["routes"].float()
        error = float(off.norm() / results["routes"].float().norm())
        if not error < 8e-3:
            raise CheckFailed(f"the wire formats differ by {error:.2e} at S = {tokens}; not timing them")
        counts_PE = formats["routes"].engine.buffers(tokens).counts_PE.cpu().numpy().astype(np.int64)
        placement = Placement.contiguous(config.experts, ranks)
        sent_PG = balance.schedule(counts_PE, placement, method="plain").quota_by_slot().sum(axis=2)
        found = formats["tokens"].engine.buffers(tokens).sent_PG
        assert found is not None
        remote = {name: int(s[rank].sum() - s[rank, rank]) for name, s in (("routes", sent_PG), ("tokens", found))}
        # beside a row of a route its home; beside tokens every row's home and leader, and of each token for each other
        # rank K places, K weights and their number
        beside = {
            "routes": remote["routes"] * 4,
            "tokens": remote["routes"] * 8 + tokens * (ranks - 1) * (2 * config.top_k + 1) * 4,
        }
        times = interleaved({name: timed(one) for name, one in formats.items()}, repetitions)
        row: dict[str, Any] = {"layer": layer, "gpus": ranks, "tokens": tokens, "scheduler": scheduler, "ms": times}
        row |= {"remote_rows": remote, "difference": float(f"{error:.2e}")}
        row["remote_bytes"] = {n: 2 * remote[n] * config.row_bytes + beside[n] for n in remote}
        row["tokens_over_routes"] = round(times["tokens"]["median"] / times["routes"]["median"], 3)
        rows.append(row)
    for one in formats.values():
        one.engine.check()
        one.engine.heap.close()
    return rows


def solver_times(
    config: MoEConfig, placement: Placement, scheduler: str, x: Tensor, routings: dict[float, tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """Microseconds between the counts and the quotas, from the kernel's own timestamps: the median of ten calls."""
    one = Contestant(config, placement, scheduler, trace=True)
    out = {}
    for skew, routing in routings.items():
        seen = []
        for _ in range(10):
            one.engine.heap.barrier()
            one.call(x, *routing)
            one.engine.check()
            seen += [i.duration_us for i in read_timeline(one.engine).intervals if i.name == "solve"]
        out[f"zipf {skew:g}"] = round(statistics.median(seen), 2)
    one.engine.heap.close()
    return out


def render(results: dict[str, Any]) -> str:
    """The table of a result."""
    lines = [
        f"{'layer':12} {'Zipf':>5} {'replicas':>9} {'/uniform':>9} {'plain':>9} {'/uniform':>9} {'load max/mean':>14}"
    ]
    for cell in results["rows"]:
        for row in cell["rows"]:
            r, p = row["replicas"], row["plain"]
            lines.append(
                f"{cell['layer']:12} {row['zipf']:>5g} {r['ms']:>9.3f} {r['over_uniform']:>9.3f} {p['ms']:>9.3f} "
                f"{p['over_uniform']:>9.3f} {r['max_over_mean_load']:>6.3f} / {p['max_over_mean_load']:.3f}"
            )
    return "\n".join(lines)
