"""What the tests of replicas in the layer run on each rank of a real world; here because child processes import it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_ref import DistributedWorld, MoEConfig, MoELayer, Placement, cases
from moe_ref.balance import schedule
from moe_ref.balance.agreement import PlanMismatch, check_same_plan


def gather_strings(mine: str) -> list[str]:
    """All ranks' strings: what `check_same_plan` takes."""
    strings: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(strings, mine)
    return strings


def inputs(config: MoEConfig, sizes: list[int], rank: int, kind: str | None, seed: int):
    """Tokens and routing of one rank, the same in every kind of world and for every placement."""
    x = cases.make_tokens(sizes[rank], config, seed * 100 + rank)
    return x, None if kind is None else cases.make_routing(kind, sizes[rank], config, seed * 100 + rank)


def replicated_forwards(
    rank: int, config: MoEConfig, sizes: list[int], kind: str | None, placements: list[list[list[int]]], seed: int
) -> list[dict[str, Any]]:
    """The same tokens through one layer per placement and method, all with the weights of one checkpoint."""
    whole = MoELayer(config, seed=seed).state_dict()
    x, routing = inputs(config, sizes, rank, kind, seed)
    results = []
    for replicas in placements:
        for method in ("flow", "flow_compiled", "lp"):
            layer = MoELayer(
                config, world=DistributedWorld(), placement=Placement.from_replicas(replicas, len(sizes)), seed=seed + 1
            )
            layer.schedule_method = method
            layer.load_logical_state_dict(whole)
            with torch.no_grad():
                y, stats = layer(x, routing=routing, return_stats=True)
            plan = stats.record.plan
            check_same_plan(plan, gather_strings)
            results.append(
                {
                    "y": y.double().numpy(),
                    "digest": plan.digest(),
                    "rank_loads": plan.rank_loads,
                    "optimal": plan.is_optimal,
                    "total": int(plan.quota_PED.sum()),
                }
            )
    return results


def both(rank: int, *arguments: Any) -> tuple[list[dict[str, Any]], str]:
    """`replicated_forwards` and `own_view` in one set of processes: starting them is what takes time."""
    return replicated_forwards(rank, *arguments), own_view(rank)


def own_view(rank: int) -> str:
    """Rank 2 plans from its own counts only; every rank must hear of it."""
    placement = Placement.from_replicas([[0, 1], [1, 2], [2, 3], [3, 0]], 4)
    gathered = np.arange(16).reshape(4, 4)
    seen = np.where(np.arange(4)[:, None] == rank, gathered, 0) if rank == 2 else gathered
    try:
        check_same_plan(schedule(seen, placement), gather_strings)
    except PlanMismatch as error:
        return str(error)
    return "no error"
