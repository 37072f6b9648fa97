"""Re-placement between optimiser steps: experts move with all that belongs to them (FineMoE, section 6.4).

What moves is a record per expert: weights, fp32 masters, both moments; the optimiser's step counter is the same
everywhere. Moves run in the rounds that `plan_moves` made, so that no rank sends or receives two experts at a time.
Nothing is recomputed or rounded on the way, so a forward just after a move gives the bits of one just before it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from moe_ref.errors import UsageError
from moe_ref.experts import accumulate_dtype
from moe_ref.placement import Placement
from moe_ref.placement.moves import MoveCost, plan_moves
from moe_ref.train.buckets import expert_parameters
from moe_ref.train.exchange import Messages, swap
from moe_ref.train.optimizer import ReplicaOptimizer
from moe_ref.train.replicated import set_held


@dataclass(frozen=True)
class MoveReport:
    """What a re-placement did: experts that moved, bytes over the network, rounds, seconds."""

    moves: int
    num_bytes: int
    rounds: int
    seconds: float


def bytes_per_expert(optimizer: ReplicaOptimizer, layer_name: str) -> int:
    """Bytes of one expert of a layer with all its state: weights, masters and two moments."""
    layer = optimizer.training.layers[layer_name]
    master = 8 if layer.config.dtype == "float64" else 4
    return layer.config.parameters_per_expert * (layer.config.element_size + 3 * master)


def replace(optimizer: ReplicaOptimizer, placements: Mapping[str, Placement]) -> MoveReport:
    """Move to new placements; every rank of the world calls it with the same arguments, between optimiser steps.

    Args:
        placements: new placement of each layer that changes, by the layer's name.

    Raises:
        RuntimeError: gradients are pending: a forward's backward, or an optimiser step, is missing.
        UsageError, ValueError: an unknown layer, or a placement of other sizes.
    """
    training = optimizer.training
    unknown = sorted(set(placements) - set(training.layers))
    if unknown:
        raise UsageError(f"no MoE layer {unknown[0]}; layers: {', '.join(training.layers)}")
    if training.gradients is not None or any(p.grad is not None for p in training.module.parameters()):
        raise RuntimeError("gradients are pending; re-place between optimiser steps, after step()")
    start = time.perf_counter()
    steps, scalars, records = optimizer.steps(), optimizer.scalars(), optimizer.export()
    moves = num_bytes = rounds = 0
    for name, placement in placements.items():
        layer = training.layers[name]
        old = layer.placement
        plan = plan_moves(old, placement, MoveCost(bytes_per_expert(optimizer, name)))
        moves, num_bytes, rounds = moves + len(plan.moves), num_bytes + plan.num_bytes, rounds + plan.rounds
        if len(training.world.local_ranks) == training.world.num_ranks:
            layer.placement = placement  # one process holds every expert: only the schedule changes
            continue
        rank = training.world.local_ranks[0]
        prefix = f"{name}." if name else ""
        keys = {
            expert: [f"{prefix}{p}/{expert}" for p in expert_parameters(layer)] for expert in range(old.num_experts)
        }
        fields = [_fields(optimizer, parameter) for parameter in expert_parameters(layer).values()]
        kinds = [
            parameter.new_empty(parameter.shape[1:], dtype=dtype)
            for parameter, names in zip(expert_parameters(layer).values(), fields, strict=True)
            for dtype in names.values()
        ]
        for round_ in range(plan.rounds):
            send: Messages = {}
            like: Messages = {}
            arriving: dict[int, int] = {}
            for move in plan.moves:
                if move.round == round_ and move.source == rank:
                    send[move.target] = [
                        records[key][name]
                        for key, names in zip(keys[move.expert], fields, strict=True)
                        for name in names
                    ]
                if move.round == round_ and move.target == rank:
                    like[move.source] = kinds
                    arriving[move.source] = move.expert
            for source, tensors in swap(training.world, send, like).items():
                values = iter(tensors)
                for key, names in zip(keys[arriving[source]], fields, strict=True):
                    records[key] = {name: next(values) for name in names}
        held = placement.experts_of_rank[rank]
        layer.placement = placement
        rows = {
            p: {expert: records[f"{prefix}{p}/{expert}"]["weight"] for expert in held} for p in expert_parameters(layer)
        }
        set_held(layer, held, rows)
    optimizer.load(records, steps, scalars)
    return MoveReport(moves, num_bytes, rounds, time.perf_counter() - start)


def _fields(optimizer: ReplicaOptimizer, parameter: nn.Parameter) -> dict[str, torch.dtype]:
    """Names and dtypes of what belongs to a parameter; the same on every rank, also on one that holds no expert."""
    fields = {"weight": parameter.dtype}
    if parameter.requires_grad:
        fields |= dict.fromkeys(["master", *optimizer.state_names()], accumulate_dtype(parameter.dtype))
    return fields
