"""The numerical mode: the actors move and multiply real tensors.

Every task calls the reference's own functions (`moe_ref.experts`, `moe_ref.combine`) on its tile: a GEMM0 task on one
row tile and one column tile of the up projection, and so on. What is new here is only *who* calls them and *when*.
Buffers start as NaN, so an operand that nobody wrote shows in the result.

A result doesn't depend on the order of messages, to the bit: each task's operands are complete before it starts, each
result row has a place of its own, and choices are summed in choice order.

Letters: S tokens of a rank, H hidden, D intermediate, K choices, P ranks, T tile rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_ref.combine import combine
from moe_ref.config import MoEConfig
from moe_ref.definition import relative_error
from moe_ref.errors import CheckFailed
from moe_ref.experts import ExpertWeights, gemm0, gemm1
from moe_ref.gate import Routing, keep_within_capacity
from moe_ref.layer import MoELayer
from moe_ref.layout import CompactLayout, align_up
from moe_ref.limits import check_memory
from moe_ref.pipeline import make_layout
from moe_ref.runtime.callplan import CallPlan, RowTile, Segment, count_experts, make_call
from moe_ref.runtime.encoding import side_of
from moe_ref.runtime.machine import Machine, Noise
from moe_ref.runtime.messages import CountsPut, Data, Put, RowsPut, destination
from moe_ref.runtime.run import Run
from moe_ref.runtime.simulator import Simulator
from moe_ref.runtime.tasks import TileShape
from moe_ref.runtime.workload import Workload


@dataclass(frozen=True)
class Call:
    """One forward: per rank tokens [S, H] in the layer's dtype, routing (after capacity), and the geometry."""

    x_SH: tuple[Tensor, ...]
    routing: tuple[Routing, ...]
    plan: CallPlan


def plan_call(
    layer: MoELayer,
    x_SH: Sequence[Tensor],
    routing: Sequence[Routing] | None = None,
    tile_columns: int = 256,
    epoch: int = 0,
) -> Call:
    """Gate (or take the routing), apply the capacity, plan and lay out one forward of a layer on a simulated world.

    Args:
        layer: its world must be simulated; config, placement and layout are the layer's.
        x_SH: per rank [S, H]; routing: per rank, or None for the layer's gate.
        tile_columns: weight columns of a GEMM tile. epoch: number of the call.

    Raises:
        ValueError: a routing doesn't fit; the message names rank and place.
    """
    config, ranks = layer.config, layer.world.num_ranks
    if len(x_SH) != ranks or len(layer.world.local_ranks) != ranks:
        raise ValueError(f"x of {len(x_SH)} ranks was given, the layer's simulated world has {ranks}")
    full = [layer.gate(x) for x in x_SH] if routing is None else list(routing)
    for x, r in zip(x_SH, full, strict=True):
        r.checked(config, x.shape[0], x.device).check_values(config)
    kept = tuple(keep_within_capacity(r, config)[0] for r in full)
    ids = [r.expert_SK.cpu().numpy() for r in kept]
    plan = layer.make_plan(np.stack([count_experts(i, config.experts) for i in ids]))
    layout = make_layout(layer, plan, np.array([len(x) for x in x_SH]))
    capacity = None if isinstance(layout, CompactLayout) else layout.capacity
    shape = TileShape.from_config(config, tile_columns)
    # Without a capacity factor the slots of the fixed layout follow from the counts, so the rows wait for them.
    early = config.capacity_factor is not None
    return Call(tuple(x_SH), kept, make_call(ids, layer.placement, shape, plan, capacity, epoch, early))


class Numbers(Data):
    """Tensors of all ranks. Runs without gradients.

    Attributes:
        y_SH: per call and rank the results; NaN where no Combine task has run.
    """

    def __init__(self, layer: MoELayer, calls: Sequence[Call]) -> None:
        self.layer, self.calls, config = layer, calls, layer.config
        ranks, dtype, tile = layer.world.num_ranks, calls[0].x_SH[0].dtype, config.tile_rows

        def poisoned(rows: int, columns: int) -> Tensor:
            return torch.full((rows, columns), float("nan"), dtype=dtype)

        heap_rows = [max(c.plan.layout.heap_rows(r) for c in calls) for r in range(ranks)]
        routes = [max(len(c.x_SH[r]) for c in calls) * config.top_k for r in range(ranks)]
        self.rows_NH = [[poisoned(n, config.hidden) for n in heap_rows] for _ in range(2)]
        self.hidden_ND = [poisoned(align_up(n, tile), config.intermediate) for n in heap_rows]
        self.results_NH = [[poisoned(n, config.hidden) for n in routes] for _ in range(2)]
        self.y_SH = [[poisoned(len(x), config.hidden) for x in call.x_SH] for call in calls]
        self.weights = [layer.weights_of(r, dtype) for r in range(ranks)]

    def rows_payload(self, epoch: int, segment: Segment) -> Tensor:
        tokens = torch.from_numpy(segment.route_N // self.layer.config.top_k)
        return self.calls[epoch].x_SH[segment.source].index_select(0, tokens)

    def land(self, put: Put) -> None:
        if isinstance(put, CountsPut):
            return
        side, segment = side_of(put.epoch), put.segment
        if isinstance(put, RowsPut):
            heap = self.rows_NH[side][destination(put)]
            heap[segment.first_row : segment.first_row + segment.rows] = put.data
        else:
            start = put.column * self.calls[put.epoch].plan.shape.tile_columns
            routes = torch.from_numpy(segment.route_N)
            self.results_NH[side][destination(put)][routes, start : start + put.data.shape[1]] = put.data

    def _tile(self, rank: int, epoch: int, row_tile: int) -> tuple[RowTile, slice]:
        tile = self.calls[epoch].plan.tiles[rank][row_tile]
        return tile, slice(tile.first_row, tile.first_row + tile.rows)

    def gemm0(self, rank: int, epoch: int, row_tile: int, column: int) -> None:
        tile, rows = self._tile(rank, epoch, row_tile)
        columns = self._hidden_columns(epoch, column)
        weights = self._up_columns(self.weights[rank][tile.slot], columns)
        self.hidden_ND[rank][rows, columns] = gemm0(
            self.rows_NH[side_of(epoch)][rank][rows], weights, self.layer.config
        )

    def gemm1(self, rank: int, epoch: int, row_tile: int, column: int) -> list[Any]:
        tile, rows = self._tile(rank, epoch, row_tile)
        full, shape = self.weights[rank][tile.slot], self.calls[epoch].plan.shape
        start = column * shape.tile_columns
        columns = slice(start, start + shape.result_columns(column))
        bias = None if full.down_bias_H is None else full.down_bias_H[columns]
        weights = ExpertWeights(full.up_UH, full.down_HD[columns], None, bias)
        out = gemm1(self.hidden_ND[rank][rows], weights, self.layer.config)
        return list(out.split([segment.rows for segment in tile.segments]))

    def combine(self, rank: int, epoch: int, token_tile: int) -> None:
        call, config = self.calls[epoch], self.layer.config
        first = token_tile * call.plan.shape.token_rows
        tokens = slice(first, min(first + call.plan.shape.token_rows, len(call.x_SH[rank])))
        routing = Routing(call.routing[rank].expert_SK[tokens], call.routing[rank].weight_SK[tokens])
        returned = self.results_NH[side_of(epoch)][rank][tokens.start * config.top_k : tokens.stop * config.top_k]
        # A masked route has weight 0, but its row was never written, and 0 * NaN is NaN.
        returned = torch.where((routing.expert_SK >= 0).view(-1, 1), returned, 0)
        self.y_SH[epoch][rank][tokens] = combine(returned, routing, self.layer.shared(call.x_SH[rank][tokens]))

    def _hidden_columns(self, epoch: int, column: int) -> slice:
        shape = self.calls[epoch].plan.shape
        return slice(column * shape.hidden_columns, min((column + 1) * shape.hidden_columns, shape.intermediate))

    def _up_columns(self, full: ExpertWeights, columns: slice) -> ExpertWeights:
        """The rows of the up projection that make these hidden columns; gate rows and up rows if gated."""
        config = self.layer.config
        if not config.gated:
            pick: Any = columns
        elif config.interleaved:
            pick = slice(2 * columns.start, 2 * columns.stop)
        else:
            gate = torch.arange(columns.start, columns.stop)
            pick = torch.cat([gate, gate + config.intermediate])
        bias = None if full.up_bias_U is None else full.up_bias_U[pick]
        return ExpertWeights(full.up_UH[pick], full.down_HD, bias, None)


@torch.no_grad()
def run_layer(
    layer: MoELayer,
    calls: Sequence[Call],
    machine: Machine,
    noise: Noise | None = None,
    processors: int | None = None,
    record: bool = False,
) -> tuple[list[list[Tensor]], Run]:
    """Run forwards of a layer, one after the other, through the simulated actors.

    Returns:
        Per call and rank y [S, H], and what the simulation found.
    """
    data = Numbers(layer, calls)
    plans = [c.plan for c in calls]
    simulator = Simulator(plans, machine, layer.config.experts, noise, data, processors, record)
    run = simulator.run()
    return data.y_SH, run


@torch.no_grad()
def check_against_reference(
    work: Workload, preset: Machine, noise: Noise, calls: int, processors: int | None, dtype: str
) -> tuple[float, Run]:
    """Run a layer of this size with random weights and tokens; largest relative error against backend "ref".

    Raises:
        CheckFailed: the error exceeds a few roundings of the dtype.
    """
    config = MoEConfig(
        work.hidden, work.intermediate, work.experts, work.top_k, gated=work.gated, layout=work.layout,
        activation="silu" if work.gated else "relu", capacity_factor=work.capacity_factor, max_tokens=work.tokens,
        tile_rows=work.tile_rows, dtype=dtype,
    )  # fmt: skip
    weights = config.experts * config.parameters_per_expert * config.element_size
    check_memory(2 * weights, f"{config.experts} experts of {config.hidden} x {config.intermediate}", "lower the sizes")
    layer = MoELayer(config, world=work.ranks, seed=work.seed)
    generator = torch.Generator().manual_seed(work.seed)
    x = [
        [torch.randn(work.tokens, work.hidden, generator=generator).to(config.torch_dtype) for _ in range(work.ranks)]
        for _ in range(calls)
    ]
    planned = [plan_call(layer, tokens, tile_columns=work.tile_columns, epoch=e) for e, tokens in enumerate(x)]
    ys, run = run_layer(layer, planned, preset, noise, processors, record=True)
    errors = [
        relative_error(torch.cat(mine), torch.cat(list(layer(tokens)))) for mine, tokens in zip(ys, x, strict=True)
    ]
    if not max(errors) <= (1e-6 if dtype == "float32" else 2e-2):
        raise CheckFailed(f"the actors' result differs from the reference layer's by {max(errors):.3g} (relative)")
    return max(errors), run
