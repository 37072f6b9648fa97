"""From a layer's call to its engines' launches: the plan, where the kernel doesn't make it, and the arguments.

Letters: E experts, P ranks, D replicas of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moe_fast import unfused
from moe_fast.engine import Engine
from moe_fast.local_ranks import LocalRanks
from moe_fast.router import router_operand
from moe_fast.weights import ChainWeights, check_weights, layer_weights
from moe_ref.balance.plan import Plan

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer


def in_kernel(layer: MoELayer) -> bool:
    """Whether the kernel's own solver makes the plan: the exact flow, for all ranks as one group."""
    return layer.planner is None and layer.schedule_method in ("flow", "flow_compiled")


def plan_first(
    layer: MoELayer, xs: Sequence[Tensor], ids: Sequence[Tensor] | None, weights: Sequence[Tensor] | None
) -> tuple[list[Tensor], list[Tensor], Plan]:
    """Gate, counts and plan before the launch, for a planner that the kernel doesn't have; waits for the device.

    Of every local rank tokens, and ids and weights if they are given. Returns ids and weights, which the launch is
    handed (so that counts and choices are the same), and the plan.
    """
    config = layer.config
    if ids is None or weights is None:
        routed = [unfused.gate(x, layer_weights(layer), config) for x in xs]
        ids, weights = [one for one, _ in routed], [weight for _, weight in routed]
    counts = []
    for x, one in zip(xs, ids, strict=True):
        inside_N = one.flatten()
        counts_E = torch.bincount(inside_N[(inside_N >= 0) & (inside_N < config.experts)], minlength=config.experts)
        capacity = config.capacity(x.shape[0])
        counts.append(counts_E if capacity is None else counts_E.clamp_max(capacity))
    plan = layer.make_plan(layer.world.gather(torch.stack(counts).cpu().numpy().astype(np.int64)))
    return list(ids), list(weights), plan


def launch(
    engine: Engine,
    layer: MoELayer,
    weights: ChainWeights,
    x: Tensor,
    ids: Tensor | None,
    weight: Tensor | None,
    quota_PED: Tensor | None,
    together: list[Callable[[int], None]] | None = None,
) -> Tensor:
    """One forward of a rank: its tokens, ids and weights that were handed in, the experts that it holds."""
    bias = weights.selection_bias_E
    check_weights(weights, layer.config.torch_dtype, x.device)
    return engine.launch(
        x,
        router_operand(layer, weights.router_EH),
        weights.up_XUH,
        weights.down_XHD,
        selection_bias_E=None if bias is None else bias.float().contiguous(),
        router_bias_E=weights.router_bias_E,
        first_bias_XU=weights.up_bias_XU,
        second_bias_XH=weights.down_bias_XH,
        shared_first_VH=weights.shared_up_VH,
        shared_second_HW=weights.shared_down_HW,
        shared_gate_1H=weights.shared_gate_1H,
        expert_SK=ids,
        weight_SK=None if weight is None else weight.contiguous(),
        placement=layer.placement if engine.shape.placed else None,
        quota_PED=quota_PED,
        together=together,
    )


def quota_on(plan: Plan, device: torch.device) -> Tensor:
    """A plan as the kernel takes it."""
    return torch.from_numpy(plan.quota_PED.astype(np.int32)).to(device)


def launch_together(
    engines: LocalRanks,
    layer: MoELayer,
    weights: ChainWeights,
    xs: Sequence[Tensor],
    ids: Sequence[Tensor] | None,
    given: Sequence[Tensor | None] | None,
    plan: Plan | None,
) -> list[Tensor]:
    """One forward of every local rank; everything that needs memory or the device comes before the first launch."""
    starts: list[Callable[[int], None]] = []
    quota = None if plan is None else quota_on(plan, xs[0].device)
    none = [None] * len(xs)
    of_ranks = zip(engines.engines, rank_weights(engines, layer, weights), xs, ids or none, given or none, strict=True)
    ys = [launch(engine, layer, own, x, one, weight, quota, starts) for engine, own, x, one, weight in of_ranks]
    engines.start(starts)
    return ys


def rank_weights(engines: LocalRanks, layer: MoELayer, weights: ChainWeights) -> list[ChainWeights]:
    """Parameters of each of several local ranks as its kernel takes them, slot after slot.

    A simulated world's layer holds all E experts: a rank's are a view of them where they are neighbours (experts in
    blocks), else a copy, made anew for each call.
    """
    experts = ("up_XUH", "down_XHD", "up_bias_XU", "down_bias_XH")
    parts = {name: value.detach() for name in experts if (value := getattr(weights, name)) is not None}
    return [
        weights._replace(**{name: value[where] for name, value in parts.items()})
        for where in engines.held(layer.placement)
    ]
