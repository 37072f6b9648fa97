"""The second wire format: a token crosses once to each rank that computes any of it, and one row comes back.

    wire_format="routes"    a row for each route (token, choice) there, its result back
    wire_format="tokens"    a row for each (token, rank) there, one partial sum of the rank's results back

With many small experts (K choices on P ranks, K > P) most tokens have several experts on one rank, so "tokens" moves
up to min(K, X) times fewer rows, both ways. What it costs: the sender must say where on the other side each token goes,
the receiver copies rows from its own memory instead of the wire, and sums before it sends back.

    partial[s, g] = sum over k in k order, expert[s, k] on rank g, of weight[s, k] * row[s, k]       fp32
    y_s = sum over ranks g in rank order of partial[s, g]  (+ shared expert)                          fp32, rounded once

A partial that crosses is rounded once, to the layer's dtype; that of the token's own rank stays in fp32. So bits depend
on which experts share a rank, unlike those of "routes"; on one rank the two formats are the same.

Step by step:

    1. A source orders its routes as always, by (destination rank, slot, token, choice). The first route of a token to
       a rank leads: its place in the order is when the token is sent.
    2. Beside each token go K heap rows (-1 where that choice is on another rank) and K weights.
    3. The receiver copies each token to all of its heap rows; from here on the layer is as with "routes".
    4. It sums each token's results, and the partials go back the way the tokens came.

Letters: S tokens of a rank, H hidden, K choices, P ranks, G destination ranks, M rows sent or received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_ref.balance.plan import Plan
from moe_ref.dispatch import place_rows, send_order
from moe_ref.experts import accumulate_dtype
from moe_ref.gate import Routing
from moe_ref.layout import CompactLayout
from moe_ref.world import World


@dataclass(frozen=True)
class TokenDispatch:
    """What return and combine must know about a dispatch; tuples have one entry per local rank.

    Attributes:
        token_GM: tokens that were sent to each rank, in sending order; int64.
        place_MK: of each token that arrived the index of its results among the rank's outputs, in the order
            (slot, source, token), -1 where a choice is on another rank; int64.
        weight_MK: their weights, 0 where there is none; differentiable.
        sizes_PG: tokens from rank p to rank g; int64.
    """

    token_GM: tuple[tuple[Tensor, ...], ...]
    place_MK: tuple[Tensor, ...]
    weight_MK: tuple[Tensor, ...]
    sizes_PG: np.ndarray


def sent_tokens(
    expert_SK: Tensor, plan: Plan, layout: CompactLayout, source: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What rank `source` sends: tokens in sending order [M], heap rows on their destination [M, K], tokens for each
    rank [G]; all int64."""
    tokens, top_k = expert_SK.shape
    route_N = send_order(expert_SK, plan, source)
    destination_N = np.repeat(np.arange(layout.num_ranks), layout.quota_PGX[source].sum(axis=1))
    pair_N = destination_N * tokens + route_N // top_k
    _, leader_U, pair_of_N = np.unique(pair_N, return_index=True, return_inverse=True)
    # pairs come sorted by token; they are sent when their first route would be
    order_M = np.argsort(leader_U)
    number_U = np.empty_like(order_M)
    number_U[order_M] = np.arange(len(order_M))
    place_MK = np.full((len(order_M), top_k), -1, dtype=np.int64)
    place_MK[number_U[pair_of_N.reshape(-1)], route_N % top_k] = layout.send_rows(source)
    leader_M = leader_U[order_M]
    sizes_G = np.bincount(destination_N[leader_M], minlength=layout.num_ranks).astype(np.int64)
    return route_N[leader_M] // top_k, place_MK, sizes_G


def count_tokens(expert_SK: Tensor, plan: Plan, source: int) -> np.ndarray:
    """Different tokens that rank `source` has for each rank, what it sends in the format "tokens"; int64 [G]."""
    return sent_tokens(expert_SK, plan, CompactLayout.from_plan(plan, 1), source)[2]


def dispatch_tokens(
    world: World,
    x_SH: Sequence[Tensor],
    routing: Sequence[Routing],
    plan: Plan,
    layout: CompactLayout,
    anchor: Tensor | None,
) -> tuple[list[Tensor], TokenDispatch]:
    """Move every token to the ranks that compute any of it, and there to all of its heap rows.

    Args:
        x_SH, routing: per local rank; anchor: see World.exchange.

    Returns:
        For each local rank its heap [layout.heap_rows(rank), H] with NaN in every row that no one wrote, and the
        metadata for the way back.
    """
    tokens, places, weights, rows, sizes = [], [], [], [], []
    for i, rank in enumerate(world.local_ranks):
        token_M, place_MK, sizes_G = sent_tokens(routing[i].expert_SK, plan, layout, rank)
        token_M, place_MK = (torch.from_numpy(v).to(x_SH[i].device) for v in (token_M, place_MK))
        weight_MK = routing[i].weight_SK.index_select(0, token_M)
        tokens.append(token_M.split(sizes_G.tolist()))
        places.append(place_MK)
        weights.append(torch.where(place_MK >= 0, weight_MK, 0))
        rows.append(x_SH[i].index_select(0, token_M))
        sizes.append(sizes_G)
    sizes_PG = world.gather(np.stack(sizes))
    # Weights before rows: the backward takes them the other way round, on every rank alike.
    places = world.exchange(places, sizes_PG)
    weights = world.exchange(weights, sizes_PG, anchor)
    received = world.exchange(rows, sizes_PG, anchor)
    del rows
    heaps, results = [], []
    for i, rank in enumerate(world.local_ranks):
        which_N, choice_N = (places[i] >= 0).nonzero(as_tuple=True)
        routed_NH = received[i].index_select(0, which_N)
        heap_NH = place_rows(routed_NH, places[i][which_N, choice_N], layout.heap_rows(rank), float("nan"))
        heaps.append(heap_NH)
        received[i] = received[i][:0]
        # outputs stand without the padding of the heap
        dense_of = torch.full((layout.heap_rows(rank) + 1,), -1, device=heap_NH.device)
        held = torch.from_numpy(layout.held_rows(rank)).to(heap_NH.device)
        dense_of[held] = torch.arange(len(held), device=heap_NH.device)
        results.append(dense_of[places[i]])  # row -1, the last, is no row
    return heaps, TokenDispatch(tuple(tokens), tuple(results), tuple(weights), sizes_PG)


def sum_results(output_NH: Tensor, place_MK: Tensor, weight_MK: Tensor) -> Tensor:
    """Partial sums of one rank: outputs [N, H] -> [M, H] in fp32 (fp64), in k order."""
    dtype = accumulate_dtype(output_NH.dtype)
    partial_MH = output_NH.new_zeros(place_MK.shape[0], output_NH.shape[1], dtype=dtype)
    weight_MK = weight_MK.to(dtype)
    for k in range(place_MK.shape[1]):
        (which_N,) = (place_MK[:, k] >= 0).nonzero(as_tuple=True)
        rows_NH = output_NH.index_select(0, place_MK[which_N, k]).to(dtype)
        partial_MH = partial_MH.index_add(0, which_N, weight_MK[which_N, k : k + 1] * rows_NH)
    return partial_MH


def return_partials(
    world: World, output_NH: Sequence[Tensor], sent: TokenDispatch, anchor: Tensor | None
) -> list[list[Tensor]]:
    """Sum on the ranks that computed, and send each sum home.

    Args:
        output_NH: per local rank the outputs of the rows it computed, in the order (slot, source, token).

    Returns:
        Per local rank one tensor [M_g, H] per rank g, in the order in which the tokens were sent there: rounded to the
        layer's dtype, but that of the rank itself in fp32 (fp64).
    """
    own, rows = [], []
    for i, rank in enumerate(world.local_ranks):
        partial_MH = sum_results(output_NH[i], sent.place_MK[i], sent.weight_MK[i])
        arrived_P = sent.sizes_PG[:, rank].tolist()
        parts = list(partial_MH.split(arrived_P))
        own.append(parts[rank])
        parts[rank] = partial_MH[:0]
        rows.append(torch.cat(parts).to(output_NH[i].dtype))
    back_PG = sent.sizes_PG.T.copy()
    np.fill_diagonal(back_PG, 0)
    home = world.exchange(rows, back_PG, anchor) if world.num_ranks > 1 else rows
    result = []
    for i, rank in enumerate(world.local_ranks):
        parts = list(home[i].split(back_PG[:, rank].tolist()))
        parts[rank] = own[i]
        result.append(parts)
    return result


def combine_partials(
    partial_GMH: Sequence[Tensor], token_GM: Sequence[Tensor], x_SH: Tensor, shared_SH: Tensor | None
) -> Tensor:
    """Sum of one rank's partials in rank order: y [S, H], rounded once to the tokens' dtype.

    Args:
        partial_GMH: as `return_partials` gives them; token_GM: the tokens that they belong to.
        x_SH: the rank's tokens; only their shape and dtype count.
    """
    wide = accumulate_dtype(x_SH.dtype)
    y_SH = x_SH.new_zeros(x_SH.shape, dtype=wide)
    for part_MH, token_M in zip(partial_GMH, token_GM, strict=True):
        y_SH = y_SH.index_add(0, token_M, part_MH.to(wide))
    if shared_SH is not None:
        y_SH = y_SH + shared_SH.to(wide)
    return y_SH.to(x_SH.dtype)


def crossed(
    world: World, partials: Sequence[Sequence[Tensor]], sent: TokenDispatch, tokens: Sequence[int]
) -> list[Tensor]:
    """The partials that came over the wire as buffers to compare: per local rank [S * P, H], row token * P + source;
    zero where none came, that of the rank itself included.

    tokens: S of each local rank.
    """
    result, ranks = [], world.num_ranks
    for i, rank in enumerate(world.local_ranks):
        parts = partials[i]
        out_NH = parts[rank].new_zeros(tokens[i] * ranks, parts[rank].shape[1], dtype=parts[rank - 1].dtype)
        for g in range(ranks):
            if g != rank:
                out_NH = out_NH.index_copy(0, sent.token_GM[i][g] * ranks + g, parts[g])
        result.append(out_NH)
    return result
