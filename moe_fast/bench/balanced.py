"""Balance on real ranks: plain expert parallelism, an EPLB-style rival and token scheduling, all with the same memory.

    plain        groups of P / 2 ranks hold every expert once; the rows of a rank stay in its group (Megatron-LM)
    eplb         replicas by predicted load, sorted packing; the rows of an expert are divided evenly over them
    symmetric    two replicas of every expert, placed without knowing loads; the kernel's solver divides the rows
    given        the same, the same plan handed in: what solving costs is the difference
    asymmetric   replicas and places by predicted load; the kernel's solver divides the rows
    balanced     experts in blocks and a routing that gives all of them equally many rows: what there is to reach

The first five get the same routing with a known skew and give the same bits. Predicted load is what the routing's law
gives, not this batch's counts.

Letters: S tokens of a rank, E experts, K choices, P ranks, D replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_fast.bench.contestants import median_timeline
from moe_fast.bench.layers import layer_config
from moe_fast.bench.measure import interleaved, place
from moe_fast.bench.variants import Contestant, draw_routing, popularity
from moe_fast.timeline import Timeline
from moe_ref import balance
from moe_ref.balance.rivals import eplb_placement
from moe_ref.config import MoEConfig
from moe_ref.errors import CheckFailed
from moe_ref.placement import Placement, asymmetric, symmetric
from moe_ref.train.balancing import even_plan, make_placement, make_planner

REPLICAS = 2
DRAWS = 1 << 16
"""Tokens that are drawn to find the expected load of every expert."""
PLACED = ("plain", "eplb", "symmetric", "asymmetric")
STAGES = {"gate": ("gate",), "dispatch": ("push",), "compute": ("gemm0", "gemm1"), "combine": ("combine",)}
"""Stage -> kinds of work on the timeline. In one kernel they overlap: each has the time from its first to its last."""


def cannot(config: MoEConfig, ranks: int) -> str | None:
    """Why these contestants can't run on so many ranks; None if they can."""
    if ranks < 2 or ranks % REPLICAS:
        return f"{REPLICAS} replicas of every expert need a multiple of {REPLICAS} ranks, there are {ranks}"
    if config.experts * REPLICAS % ranks:
        return f"{config.experts} experts x {REPLICAS} replicas don't fill {ranks} ranks evenly"
    return None


def expected_load(config: MoEConfig, skew: float) -> np.ndarray:
    """What `draw_routing` gives every expert on average: rows of DRAWS tokens, int64 [E]."""
    share_E = popularity(config.experts, skew)
    noise_SE = np.random.default_rng(7).exponential(size=(DRAWS, config.experts))
    first_SK = np.argpartition(noise_SE / share_E, config.top_k - 1, axis=1)[:, : config.top_k]
    return np.bincount(first_SK.ravel(), minlength=config.experts)


def placements(config: MoEConfig, ranks: int, skew: float) -> dict[str, Placement]:
    """Of every contestant but "given", which has that of "symmetric"."""
    load_E, slots = expected_load(config, skew), config.experts * REPLICAS // ranks
    return {
        "plain": make_placement("plain", ranks, config.experts, REPLICAS),
        "eplb": eplb_placement(load_E, ranks, slots),
        "symmetric": symmetric(ranks, config.experts, REPLICAS).placement,
        "asymmetric": asymmetric(load_E, ranks, slots),
        "balanced": Placement.contiguous(config.experts, ranks),
    }


def plans(counts_PE: np.ndarray, places: dict[str, Placement]) -> dict[str, balance.Plan]:
    """How each contestant divides a batch; counts_PE: int64 [P, E]."""
    ranks = counts_PE.shape[0]
    return {
        "plain": make_planner("plain", ranks, REPLICAS)(counts_PE, places["plain"]),
        "eplb": even_plan(counts_PE, places["eplb"]),
        "symmetric": balance.schedule(counts_PE, places["symmetric"]),
        "asymmetric": balance.schedule(counts_PE, places["asymmetric"]),
    }


def even_routing(config: MoEConfig, tokens: int, rank: int) -> Tensor:
    """Ids int64 [S, K] that go through the experts in turn."""
    first = rank * tokens * config.top_k
    ids = torch.arange(first, first + tokens * config.top_k, device="cuda") % config.experts
    return ids.view(tokens, config.top_k)


def stage_times(line: Timeline) -> dict[str, float]:
    """Microseconds of every stage of this rank's call, from the stage's first event to its last; "busy": what a
    processor spends in products, on average; "solve": between the counts and the quotas; "wall": the call."""
    out = {}
    for stage, kinds in STAGES.items():
        mine = [i for i in line.intervals if i.name in kinds]
        out[stage] = max(i.start_us + i.duration_us for i in mine) - min(i.start_us for i in mine) if mine else 0.0
    solving = [i.duration_us for i in line.intervals if i.name == "solve"]
    return {**out, "busy": line.utilisation * line.wall_us, "solve": max(solving, default=0.0), "wall": line.wall_us}


def of_slowest_rank(times: dict[str, float]) -> dict[str, float]:
    """Of every time the largest of all ranks; collective."""
    values = torch.tensor(list(times.values()), device="cuda")
    if place()[1] > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return {name: round(float(value), 1) for name, value in zip(times, values, strict=True)}


def run_skew(layer: str, tokens: int, skew: float, scheduler: str, repetitions: int) -> dict[str, Any]:
    """One row: ms of every contestant in turn, over "balanced", loads, and from traced kernels the stages; collective.

    Raises:
        CheckFailed: two contestants give different bits for the same routing.
    """
    rank, ranks = place()
    config = layer_config(layer).replace(max_tokens=tokens)
    places = placements(config, ranks, skew)
    contestants = {name: Contestant(config, placement, scheduler) for name, placement in places.items()}
    g = torch.Generator(device="cuda").manual_seed(rank)
    x = torch.randn(tokens, config.hidden, device="cuda", generator=g).to(config.torch_dtype)
    ids, weight = draw_routing(config, tokens, skew, rank)
    even = even_routing(config, tokens, rank)
    solved = contestants["symmetric"]
    first = solved.call(x, ids, weight)
    solved.engine.check()
    counts_PE = solved.engine.buffers(tokens).counts_PE.cpu().numpy().astype(np.int64)
    divided = plans(counts_PE, places)
    quota = {
        name: torch.from_numpy(divided[of].quota_PED.astype(np.int32)).cuda()
        for name, of in (("plain", "plain"), ("eplb", "eplb"), ("given", "symmetric"))
    }
    out = torch.empty_like(x)

    def calls(made: dict[str, Contestant]) -> dict[str, Callable[[], Tensor]]:
        """A call of each contestant that is there."""

        def one(name: str, of: Contestant) -> Callable[[], Tensor]:
            routed = even if name == "balanced" else ids
            return lambda: of.call(x, routed, weight, out, quota.get(name))

        every = {**made, **({"given": made["symmetric"]} if "symmetric" in made else {})}
        return {name: one(name, of) for name, of in every.items()}

    functions = calls(contestants)
    for name, call in functions.items():
        result = call()
        contestants[name if name in contestants else "symmetric"].engine.check()
        if name != "balanced" and not torch.equal(result, first):
            raise CheckFailed(f"{name} gives other bits than symmetric at skew {skew:g}; not timing it")
    times = interleaved(functions, repetitions)
    for one in contestants.values():
        one.engine.check()
        one.engine.heap.close()
    del contestants, functions, solved
    torch.cuda.empty_cache()
    stages = {}
    for name, placement in places.items():
        traced = Contestant(config, placement, scheduler, trace=True)
        stages[name] = of_slowest_rank(stage_times(median_timeline(traced.engine, calls({name: traced})[name])))
        traced.engine.heap.close()
        del traced
    mean = float(counts_PE.sum()) / ranks
    best = times["balanced"]["median"]
    row: dict[str, Any] = {"layer": layer, "gpus": ranks, "tokens": tokens, "zipf": skew, "scheduler": scheduler}
    over = {name: round(one["median"] / best, 4) for name, one in times.items() if name != "balanced"}
    row |= {"ms": times, "over_balanced": over}
    row["max_over_mean_load"] = {name: round(divided[name].max_load / mean, 4) for name in PLACED}
    row["solving_ms"] = round(times["symmetric"]["median"] - times["given"]["median"], 4)
    return row | {"stages_us": stages}
