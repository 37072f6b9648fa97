"""The reference forward, stage by stage.

    gate -> counts -> plan -> dispatch -> gemm0 -> gemm1 -> return -> combine

What crosses in dispatch and return is the wire format's: rows of routes (`dispatch`, `combine`) or of tokens (`wire`).

One function, `run`, is the layer's forward and the instrument of the differential harness: it can keep every
intermediate, stop after any stage, or take the results of earlier stages instead of computing them. A megakernel does
the same stages without barriers between them; their order per row is the same.

Letters: S tokens of a rank, H hidden, D intermediate, E experts, K choices, P ranks, N rows that a rank computes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moe_ref import replay, wire
from moe_ref.balance.agreement import check_same_plan
from moe_ref.balance.plan import Plan
from moe_ref.combine import combine, return_rows
from moe_ref.counts import exchange_counts, route
from moe_ref.dispatch import dispatch
from moe_ref.errors import UsageError
from moe_ref.experts import ExpertWeights, gemm0, gemm1
from moe_ref.gate import Routing, keep_within_capacity
from moe_ref.layout import CompactLayout, FixedLayout, Layout, align_up

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer

STAGES = ("gate", "counts", "plan", "dispatch", "gemm0", "gemm1", "return", "combine")
"""Stages in order; `run` computes gemm0 and gemm1 block by block, in one go."""


@dataclass
class Record:
    """Results of the stages of one forward; lists have one entry per local rank.

    Attributes:
        routing: after capacity (dropped routes are -1).
        before_PE, counts_PE: rows per source rank and expert before and after capacity, int64.
        tokens_P: S of every rank.
        plan, layout: of this micro-batch.
        rows_NH: dispatched rows as the owner holds them, in the order (slot, source, token), padding left out.
        hidden_ND, output_NH: after GEMM0 + activation, after GEMM1; same order.
        returned_NH: [S * K, H] at home, row token * K + choice; in the wire format "routes".
        partial_NH: [S * P, H] at home, row token * P + rank: the rank's part of the sum as it crossed, zero where none
            did; in the wire format "tokens".
        sent_PG: rows that crossed or stayed in the dispatch, from rank p to rank g, int64.
        y_SH: results.
        seconds: time per stage.
    """

    routing: list[Routing] | None = None
    before_PE: np.ndarray | None = None
    counts_PE: np.ndarray | None = None
    tokens_P: np.ndarray | None = None
    plan: Plan | None = None
    layout: Layout | None = None
    rows_NH: list[Tensor] | None = None
    hidden_ND: list[Tensor] | None = None
    output_NH: list[Tensor] | None = None
    returned_NH: list[Tensor] | None = None
    partial_NH: list[Tensor] | None = None
    sent_PG: np.ndarray | None = None
    y_SH: list[Tensor] | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@contextmanager
def _timed(record: Record, stage: str, device: torch.device):
    start = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    record.seconds[stage] = record.seconds.get(stage, 0.0) + time.perf_counter() - start


def make_layout(layer: MoELayer, plan: Plan, tokens_P: np.ndarray) -> Layout:
    """The config's layout for this plan; the fixed layout, when dropless, has as many slots as the fullest needs."""
    config = layer.config
    if config.layout == "compact":
        return CompactLayout.from_plan(plan, config.tile_rows)
    capacity = config.capacity(int(tokens_P.max()))
    if capacity is None:
        capacity = int(plan.quota_by_slot().max())
    return FixedLayout.from_plan(plan, align_up(max(capacity, 1), config.tile_rows))


def expert_tiles(heap_NH: Tensor, segments: Sequence[tuple[int, int, int]], tile_rows: int) -> list[Tensor]:
    """The rows of each segment in whole tiles: the receiver fills up a segment's last tile with zeros, in the heap.

    Segments start on tiles, so the row-tile rule costs no copy of the rows, only the zeros. One split instead of a
    slice per segment: its backward writes each gradient once.

    Returns:
        One view of the heap per segment, [rows rounded up to tile_rows, H].
    """
    sizes, part_at, padding, position = [], {}, [], 0
    for _, first, rows in sorted(segments, key=lambda segment: segment[1]):
        end = first + align_up(rows, tile_rows)
        padding += range(first + rows, end)
        sizes += [first - position, end - first]
        part_at[first] = len(sizes) - 1
        position = end
    heap_NH = heap_NH.index_fill_(0, torch.tensor(padding, dtype=torch.int64, device=heap_NH.device), 0.0)
    parts = heap_NH.split([*sizes, heap_NH.shape[0] - position])
    return [parts[part_at[first]] for _, first, _ in segments]


def compute_experts(
    tiles_NH: Sequence[Tensor],
    segments: Sequence[tuple[int, int, int]],
    weights: Sequence[ExpertWeights],
    layer: MoELayer,
    hidden_ND: Tensor | None = None,
    keep_hidden: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """GEMM0 and GEMM1 of one rank, segment by segment; returns outputs and, if kept, hidden activations.

    A segment's rows come with or without the zeros that fill up its last tile; its results are without. Without
    `keep_hidden` only one segment's hidden rows live at a time. A rank that got no row computes an empty block with its
    first expert: its weights stay in the graph, their gradients are zeros, and the backward of the exchange is entered
    on every rank.
    """
    config = layer.config
    given = hidden_ND.split([rows for _, _, rows in segments]) if hidden_ND is not None and segments else None
    outputs, hiddens = [], []
    for i, ((slot, _, rows), tiles) in enumerate(zip(segments, tiles_NH, strict=True)):
        hidden = gemm0(tiles, weights[slot], config) if given is None else given[i]
        if config.expert_bias:
            hidden = hidden[:rows]  # a bias leaves no zeros in the padding; gemm1 pads anew
        outputs.append(gemm1(hidden, weights[slot], config)[:rows])
        if keep_hidden:
            hiddens.append(hidden[:rows])
    return outputs, hiddens


def run(
    layer: MoELayer,
    x_SH: Sequence[Tensor],
    routing: Sequence[Routing] | None = None,
    *,
    given: Record | None = None,
    stop_after: str = "combine",
    keep: bool = False,
) -> Record:
    """One forward over all local ranks.

    Args:
        x_SH: per local rank its tokens in the compute dtype.
        routing: per local rank, or None to use the gate.
        given: results of earlier stages to start from (`rows_NH`, `hidden_ND` or `output_NH`); the latest one counts.
        stop_after: last stage to run, one of STAGES.
        keep: keep every intermediate in the record; otherwise only what the result needs.

    Raises:
        ValueError: a rank's input was refused (raised on every rank), or an unknown stage.
    """
    if stop_after not in STAGES:
        raise UsageError(f"unknown stage {stop_after!r}, expected one of {', '.join(STAGES)}")
    last = STAGES.index(stop_after)
    world, config, record = layer.world, layer.config, Record()
    device, anchor = x_SH[0].device, layer.anchor()

    with _timed(record, "gate", device):
        before, problem = route(layer, x_SH, routing)
        record.routing = [keep_within_capacity(r, config)[0] for r in before]
    if last == 0:
        if problem:
            raise ValueError(problem)
        return record
    memory = replay.active()
    if memory is None or not memory.recall(record, layer, problem):
        with _timed(record, "counts", device):
            gathered = exchange_counts(layer, before, record.routing, problem, x_SH[0].dtype)
            record.tokens_P, record.before_PE, record.counts_PE = gathered
        assert record.counts_PE is not None
        assert record.tokens_P is not None
        if last == 1:
            return record
        with _timed(record, "plan", device):
            record.plan = layer.make_plan(record.counts_PE)
            if layer.check_plans:
                check_same_plan(record.plan, world.gather_text)
        record.layout = make_layout(layer, record.plan, record.tokens_P)
        if memory is not None:
            memory.keep(record)
    if last <= 2:
        return record
    assert record.plan is not None
    assert record.layout is not None

    layout = record.layout
    segments = [layout.segments(rank) for rank in world.local_ranks]
    with _timed(record, "dispatch", device):
        if isinstance(layout, CompactLayout) and config.wire_format == "tokens":
            heaps, sent = wire.dispatch_tokens(world, x_SH, record.routing, record.plan, layout, anchor)
        else:
            heaps, sent = dispatch(world, x_SH, record.routing, record.plan, layout, anchor)
        record.sent_PG = sent.sizes_PG
        nothing = [heap[:0].clone() for heap in heaps]  # in the graph like a heap's rows, but holds no heap
        tiles = [expert_tiles(heap, parts, config.tile_rows) for heap, parts in zip(heaps, segments, strict=True)]
        del heaps
        for i, rank in enumerate(world.local_ranks):
            if not tiles[i] and layer.experts_of(rank):
                segments[i], tiles[i] = [(0, 0, 0)], [nothing[i]]
        if given is not None and given.rows_NH is not None:
            tiles = [
                list(full.split([rows for _, _, rows in parts])) if parts else []
                for full, parts in zip(given.rows_NH, segments, strict=True)
            ]
        if keep:
            record.rows_NH = [
                _cat([tile[:rows] for tile, (_, _, rows) in zip(mine, parts, strict=True)], like)
                for mine, parts, like in zip(tiles, segments, nothing, strict=True)
            ]
    if last == 3:
        return record

    with _timed(record, "experts", device):
        outputs, hiddens = [], []
        for i, rank in enumerate(world.local_ranks):
            start = given.hidden_ND[i] if given is not None and given.hidden_ND is not None else None
            weights = layer.weights_of(rank, x_SH[i].dtype)
            out, hidden = compute_experts(tiles[i], segments[i], weights, layer, start, keep)
            tiles[i] = []
            outputs.append(_cat(out, nothing[i]))
            hiddens.append(_cat(hidden, nothing[i].new_empty(0, config.intermediate)))
            del out, hidden
        if given is not None and given.output_NH is not None:
            outputs = list(given.output_NH)
        if keep:
            record.hidden_ND, record.output_NH = hiddens, outputs
    if last <= 5:
        return record

    with _timed(record, "return", device):
        returned: list = []
        if isinstance(sent, wire.TokenDispatch):
            returned = wire.return_partials(world, outputs, sent, anchor)
            if keep:
                record.partial_NH = wire.crossed(world, returned, sent, [x.shape[0] for x in x_SH])
        else:
            returned = return_rows(world, outputs, sent, record.routing, anchor)
            if keep:
                record.returned_NH = returned
        del outputs
    if last == 6:
        return record
    with _timed(record, "combine", device):
        if isinstance(sent, wire.TokenDispatch):
            record.y_SH = [
                wire.combine_partials(partial_GMH, token_GM, x, layer.shared(x))
                for partial_GMH, token_GM, x in zip(returned, sent.token_GM, x_SH, strict=True)
            ]
        else:
            record.y_SH = [
                combine(rows, r, layer.shared(x)) for rows, r, x in zip(returned, record.routing, x_SH, strict=True)
            ]
    return record


def _cat(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else like
