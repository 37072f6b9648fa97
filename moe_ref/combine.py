"""Return and combine: results travel home, one row per (token, choice), and are summed there in choice order.

    y_s = sum over k, in k order, of weight[s, k] * row[s, k]  (+ shared expert)      fp32, rounded once

Every choice has a row of its own, so no two writers meet and no atomics decide an order: two runs give the same bits.
(The shipped FlashMoE adds with 16-bit atomics in arrival order; at K = 1 it forgets the weight.)

Letters: S tokens of a rank, H hidden, K choices, N routed rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ref.dispatch import Dispatch, place_rows
from moe_ref.experts import accumulate_dtype
from moe_ref.gate import Routing
from moe_ref.layout import CompactLayout, FixedLayout
from moe_ref.world import World


def return_rows(
    world: World, output_NH: Sequence[Tensor], sent: Dispatch, routing: Sequence[Routing], anchor: Tensor | None
) -> list[Tensor]:
    """Send each expert output to its home rank.

    Args:
        output_NH: per local rank the outputs of the rows it computed, in the order (slot, source, token).

    Returns:
        Per local rank [S * K, H]: row token * K + choice; rows of masked routes are zero.
    """
    dense = CompactLayout(1, sent.layout.quota_PGX)
    rows = []
    for i, rank in enumerate(world.local_ranks):
        if world.num_ranks == 1:  # one source: the two orders are the same
            rows.append(output_NH[i])
            continue
        by_source_N = torch.from_numpy(dense.receive_rows(rank)).to(output_NH[i].device)
        rows.append(output_NH[i].index_select(0, by_source_N))
    home = world.exchange(rows, sent.sizes_PG.T, anchor)
    returned = []
    for i, rank in enumerate(world.local_ranks):
        rows_NH = home[i]
        if isinstance(sent.layout, FixedLayout):
            # Round 1 of the paper's tensor: results come back to the coordinate that mirrors the one they were sent to.
            where_N = torch.from_numpy(sent.layout.home_rows(rank)).to(rows_NH.device)
            heap_NH = place_rows(rows_NH, where_N, sent.layout.heap_rows(rank), float("nan"))
            rows_NH = heap_NH.index_select(0, where_N)
        routes = routing[i].expert_SK.numel()
        returned.append(place_rows(rows_NH, sent.route_N[i], routes, 0.0))
    return returned


def combine(returned_NH: Tensor, routing: Routing, shared_SH: Tensor | None) -> Tensor:
    """Weighted sum of one rank: returned [S * K, H] -> y [S, H], rounded once to the rows' dtype.

    The weight is applied exactly here, K = 1 included; the shared expert's output has weight 1.
    """
    tokens, top_k = routing.expert_SK.shape
    dtype = accumulate_dtype(returned_NH.dtype)
    weight_SK = torch.where(routing.expert_SK >= 0, routing.weight_SK, 0).to(dtype)
    rows_SKH = returned_NH.view(tokens, top_k, returned_NH.shape[1])
    y_SH = weight_SK[:, :1] * rows_SKH[:, 0].to(dtype)
    for k in range(1, top_k):
        y_SH += weight_SK[:, k : k + 1] * rows_SKH[:, k].to(dtype)
    if shared_SH is not None:
        y_SH = y_SH + shared_SH.to(dtype)
    return y_SH.to(returned_NH.dtype)
