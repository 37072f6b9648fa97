"""Gradients of a fused call: the forward is the kernel, the backward recomputes the unfused chain with its routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_fast import unfused
from moe_fast.engine import Engine
from moe_fast.launching import launch, launch_together, quota_on
from moe_fast.layers import group_of, is_placed
from moe_fast.local_ranks import LocalRanks
from moe_fast.routes import make_routes
from moe_fast.weights import ChainWeights
from moe_ref.balance.plan import Plan

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer


class FusedFunction(torch.autograd.Function):
    """Forward: the kernel. Backward: the unfused chain, recomputed with the forward's routing.

    Inputs are x, the handed-in weights and the fields of ChainWeights; `there` says which of them exist, `present` are
    those.
    """

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        layer: MoELayer,
        plan: Plan | None,
        ids: Tensor | None,
        there: list[bool],
        *present: Tensor,
    ) -> Tensor:
        x, weight, *parameters = _spread(present, there)
        quota = None if plan is None else quota_on(plan, x.device)
        y = launch(engine, layer, ChainWeights(*parameters), x, ids, weight, quota)
        # the choice is remembered, not recomputed: a tie could fall otherwise in other arithmetic
        chosen = kept = ids
        if chosen is None or kept is None or engine.shape.drops:
            chosen, kept = engine.readback.expert_ids(x.shape[0])
        ctx.layer, ctx.given, ctx.plan, ctx.placed = layer, ids is not None, plan, is_placed(layer)
        ctx.there = there
        ctx.save_for_backward(chosen, kept, *present)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        chosen, kept, *saved = ctx.saved_tensors
        # the selection bias is a buffer that chooses and never weighs: it has no gradient
        needed = [t.detach().requires_grad_(True) for t in saved]
        with torch.enable_grad():
            x, weight, *parameters = _spread(needed, ctx.there)
            y = _recompute(ctx, chosen, kept, x, weight, parameters, group_of(ctx.layer))
        return (None,) * 5 + torch.autograd.grad(y, needed, grads[0], allow_unused=True)


class TogetherFunction(torch.autograd.Function):
    """`FusedFunction` of several ranks on one GPU: a result and x of each, then their handed-in weights.

    The backward is the chain of one rank with all tokens and all experts: a token's result doesn't depend on where it
    is computed, and an expert's replicas are one parameter here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        engines: LocalRanks,
        layer: MoELayer,
        plan: Plan | None,
        ids: list[Tensor] | None,
        there: list[bool],
        *present: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.count = count = len(engines.engines)
        tensors = _spread(present, there)
        xs, weights = tensors[:count], tensors[count : 2 * count]
        ys = launch_together(engines, layer, ChainWeights(*tensors[2 * count :]), xs, ids, weights, plan)
        chosen = kept = ids
        if chosen is None or kept is None or engines.shape.drops:
            pairs = [engine.readback.expert_ids(x.shape[0]) for engine, x in zip(engines.engines, xs, strict=True)]
            chosen, kept = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        ctx.layer, ctx.given, ctx.plan, ctx.placed = layer, ids is not None, plan, is_placed(layer)
        ctx.there = there
        ctx.save_for_backward(torch.cat(chosen), torch.cat(kept), *present)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (chosen, kept, *saved), count = ctx.saved_tensors, ctx.count
        needed = [t.detach().requires_grad_(True) for t in saved]
        with torch.enable_grad():
            tensors = _spread(needed, ctx.there)
            x, weight = torch.cat(tensors[:count]), torch.cat(tensors[count : 2 * count]) if ctx.given else None
            y = _recompute(ctx, chosen, kept, x, weight, tensors[2 * count :], (0, 1, None))
        return (None,) * 5 + torch.autograd.grad(y, needed, torch.cat(grads), allow_unused=True)


def _recompute(
    ctx: Any,
    chosen: Tensor,
    kept: Tensor,
    x: Tensor,
    weight: Tensor | None,
    parameters: Sequence[Any],
    chain: tuple[int, int, Any],
) -> Tensor:
    """The forward by the unfused chain, with the routing that the kernel had. chain: its rank, ranks and group."""
    layer, config, weights = ctx.layer, ctx.layer.config, ChainWeights(*parameters)
    _, ranks, group = chain
    if weight is None:
        weight = unfused.weigh(*unfused.gate_scores(x, weights, config), chosen, config)
    # the forward's plan: the one that was handed in, or the same function of the same counts
    planner = (lambda counts_PE: ctx.plan or layer.make_plan(counts_PE)) if ctx.placed else None
    routes = make_routes(kept, config, group, ranks, planner)
    return unfused.compute(x, weight, routes, weights, config, group, ranks)


def _spread(present: Sequence[Tensor], there: list[bool]) -> list[Any]:
    """The tensors in their places, None where there is none."""
    rest = iter(present)
    return [next(rest) if here else None for here in there]
