"""Where the unfused chain's rows go: order of sending, splits of the all-to-all, order of the received rows.

Letters: S tokens of a rank, K choices, P ranks, E experts, G destinations, X local slots, N routed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ref.balance.plan import Plan
from moe_ref.config import MoEConfig
from moe_ref.dispatch import send_order


@dataclass
class Routes:
    """Where rows go, for one batch: integers only.

    order_N: routes sorted by expert (masked ones left out); send, receive: rows per peer (host lists); arrange_N:
    received rows into expert-major order; ends_X: int32 ends of the local experts; counts_PE: on the host; plan: where
    experts have replicas.
    """

    order_N: Tensor
    send: list[int]
    receive: list[int]
    arrange_N: Tensor | None
    ends_X: Tensor
    counts_PE: np.ndarray
    plan: Plan | None = None


def local_experts(config: MoEConfig, rank: int, ranks: int) -> tuple[int, int]:
    """First and last + 1 expert of a rank: blocks, the first E mod P ranks hold one more."""
    base, extra = divmod(config.experts, ranks)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def make_routes(
    expert_SK: Tensor,
    config: MoEConfig,
    group: Any = None,
    ranks: int = 1,
    planner: Callable[[np.ndarray], Plan] | None = None,
) -> Routes:
    """Sort routes by expert and agree on the splits; asks the host once (three times with several ranks).

    planner: from the gathered counts to a plan, where experts have replicas; None for experts in blocks.
    """
    flat_N = expert_SK.flatten()
    valid = int((flat_N >= 0).sum())
    keyed = torch.where(flat_N >= 0, flat_N, config.experts)
    order_N = torch.sort(keyed, stable=True).indices[:valid]
    mine_E = torch.bincount(keyed, minlength=config.experts + 1)[: config.experts]
    if ranks == 1:
        ends_X = mine_E.cumsum(0).to(torch.int32)
        return Routes(order_N, [valid], [valid], None, ends_X, mine_E.cpu().numpy()[None])
    rank = dist.get_rank(group)
    all_PE = mine_E.new_empty(ranks, config.experts)
    dist.all_gather_into_tensor(all_PE, mine_E, group=group)
    counts_PE = all_PE.cpu().numpy()
    if planner is not None:
        return planned_routes(expert_SK, planner(counts_PE.astype(np.int64)), rank)
    bounds = [local_experts(config, p, ranks) for p in range(ranks)]
    low, high = bounds[rank]
    send = [int(counts_PE[rank, a:b].sum()) for a, b in bounds]
    receive = [int(counts_PE[p, low:high].sum()) for p in range(ranks)]
    # received: by source, then expert; wanted: by expert, then source
    here_PX = all_PE[:, low:high]
    expert_N = (
        torch.arange(high - low, device=flat_N.device)
        .repeat(ranks)
        .repeat_interleave(here_PX.flatten(), output_size=sum(receive))
    )
    arrange_N = torch.sort(expert_N, stable=True).indices
    ends_X = here_PX.sum(0).cumsum(0).to(torch.int32)
    return Routes(order_N, send, receive, arrange_N, ends_X, counts_PE)


def planned_routes(expert_SK: Tensor, plan: Plan, rank: int) -> Routes:
    """Routes of a rank under a plan: rows travel by destination, slot and token, and lie by slot, then source."""
    device, held = expert_SK.device, len(plan.placement.experts_of_rank[rank])
    quota_PGX = plan.quota_by_slot()
    here_PX = quota_PGX[:, rank, :held]
    slot_N = np.repeat(np.tile(np.arange(held), len(here_PX)), here_PX.ravel())
    return Routes(
        torch.from_numpy(send_order(expert_SK, plan, rank)).to(device),
        quota_PGX[rank].sum(axis=1).tolist(),
        here_PX.sum(axis=1).tolist(),
        torch.from_numpy(np.argsort(slot_N, kind="stable")).to(device),
        torch.from_numpy(here_PX.sum(axis=0).cumsum().astype(np.int32)).to(device),
        plan.counts_PE,
        plan,
    )
