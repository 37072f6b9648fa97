"""Dispatch: every routed row goes to the heap of the rank that computes it, at the layout's coordinate.

    1. Each source orders its routes by (destination rank, slot, token, choice).
    2. The rows cross (`world.exchange`: what one-sided puts do on GPUs).
    3. Each receiver places them at the layout's heap rows. All other heap rows hold NaN: whoever reads one shows it.

`dispatch` returns the heaps and the frozen metadata that `combine` takes; nothing is remembered anywhere else.

Letters: S tokens of a rank, H hidden, E experts, K choices, P ranks, G destination ranks, N routed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_ref.balance.plan import Plan
from moe_ref.gate import Routing
from moe_ref.layout import Layout
from moe_ref.world import World


@dataclass(frozen=True)
class Dispatch:
    """What combine must know about a dispatch.

    Attributes:
        route_N: for each local rank the flat routes (token * K + choice) that were sent, in sending order; int64.
        sizes_PG: rows from rank p to rank g; int64.
        layout: where the rows lie.
    """

    route_N: tuple[Tensor, ...]
    sizes_PG: np.ndarray
    layout: Layout


def count_routes(expert_SK: Tensor, experts: int) -> np.ndarray:
    """Rows of one rank for each expert, masked routes left out; int64 [E]."""
    flat_N = expert_SK.flatten()
    return torch.bincount(flat_N[flat_N >= 0], minlength=experts).cpu().numpy().astype(np.int64)


def send_order(expert_SK: Tensor, plan: Plan, source: int) -> np.ndarray:
    """Flat routes of rank `source` in sending order: by destination rank, slot, token, choice; int64 [N].

    A source's rows for one expert fill its replicas in replica order, each up to its quota (moe_ref.balance.plan).
    """
    placement = plan.placement
    expert_N = expert_SK.flatten().cpu().numpy()
    route_N = np.flatnonzero(expert_N >= 0)
    expert_N = expert_N[route_N]
    by_expert_N = np.argsort(expert_N, kind="stable")
    route_N, expert_N = route_N[by_expert_N], expert_N[by_expert_N]

    counts_E = plan.counts_PE[source]
    position_N = np.arange(len(route_N)) - np.repeat(np.cumsum(counts_E) - counts_E, counts_E)
    filled_ED = np.cumsum(plan.quota_PED[source], axis=1)
    replica_N = (position_N[:, None] >= filled_ED[expert_N]).sum(axis=1)

    key_N = placement.rank_ED[expert_N, replica_N] * placement.slots + placement.slot_ED[expert_N, replica_N]
    return route_N[np.argsort(key_N, kind="stable")]


def place_rows(rows_NH: Tensor, where_N: Tensor, size: int, elsewhere: float) -> Tensor:
    """A new tensor [size, H] with `rows_NH` at its rows `where_N` and the number `elsewhere` in all others."""
    free_N = torch.ones(size, dtype=torch.bool, device=rows_NH.device).index_fill_(0, where_N, False).nonzero()[:, 0]
    placed_NH = rows_NH.new_empty(size, rows_NH.shape[1]).index_fill_(0, free_N, elsewhere)
    return placed_NH.index_copy_(0, where_N, rows_NH)


def dispatch(
    world: World, x_SH: Sequence[Tensor], routing: Sequence[Routing], plan: Plan, layout: Layout, anchor: Tensor | None
) -> tuple[list[Tensor], Dispatch]:
    """Move every routed row to its heap row.

    Args:
        x_SH, routing: per local rank; anchor: see World.exchange.

    Returns:
        For each local rank its heap [layout.heap_rows(rank), H] with NaN in every row that no one wrote, and the
        metadata for combine.
    """
    sizes_PG = plan.quota_by_slot().sum(axis=2)
    routes = []
    rows = []
    for i, rank in enumerate(world.local_ranks):
        top_k = routing[i].expert_SK.shape[1]
        route_N = torch.from_numpy(send_order(routing[i].expert_SK, plan, rank)).to(x_SH[i].device)
        routes.append(route_N)
        rows.append(x_SH[i].index_select(0, route_N // top_k))
    received = world.exchange(rows, sizes_PG, anchor)
    del rows
    heaps = []
    for rank in world.local_ranks:
        rows_NH = received.pop(0)  # let go of as soon as they are in the heap
        where_N = torch.from_numpy(layout.receive_rows(rank)).to(rows_NH.device)
        heaps.append(place_rows(rows_NH, where_N, layout.heap_rows(rank), float("nan")))
    return heaps, Dispatch(tuple(routes), sizes_PG, layout)
