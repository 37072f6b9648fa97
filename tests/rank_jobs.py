"""What the tests run on each rank of a real world (see ranks.run_ranks); here because child processes import it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moe_ref import DistributedWorld, MoEConfig, MoELayer, Placement, Routing, cases


def logical_gradients(layer: MoELayer) -> dict[str, dict[int, np.ndarray]]:
    """Expert gradients by name and logical expert."""
    names = [name for name in ("gate_up_proj", "up_proj", "down_proj") if hasattr(layer, name)]
    result = {}
    for name in names:
        gradient = getattr(layer, name).grad
        assert gradient is not None or not layer.held_experts, f"{name} has no gradient"
        result[name] = {e: gradient[i].float().numpy() for i, e in enumerate(layer.held_experts)}
    return result


def forward_and_backward(
    rank: int, config: MoEConfig, sizes: list[int], kind: str | None, replicas: list[list[int]] | None, seed: int
) -> dict[str, Any]:
    """One training step of a layer: result, loads, gradients of this rank."""
    world = DistributedWorld()
    placement = None if replicas is None else Placement.from_replicas(replicas, len(sizes))
    layer = MoELayer(config, world=world, placement=placement, seed=seed)
    x, routing = rank_input(config, sizes, rank, kind, seed)
    x.requires_grad_()
    y, stats = layer(x, routing=routing, return_stats=True)
    (y.double().square().sum()).backward()
    return {
        "y": y.detach().to(torch.float64).numpy(),
        "x_grad": x.grad.to(torch.float64).numpy(),
        "expert_load": stats.expert_load,
        "rank_load": stats.rank_load,
        "bytes_remote": stats.bytes_remote,
        "dropped": stats.dropped,
        "tokens": stats.tokens_per_rank,
        "plan": stats.record.plan.digest(),
        "expert_grads": logical_gradients(layer),
        "router_grad": None if layer.router.weight.grad is None else layer.router.weight.grad.float().numpy(),
    }


def rank_input(config: MoEConfig, sizes: list[int], rank: int, kind: str | None, seed: int):
    """Tokens and routing of one rank, the same in every kind of world."""
    x = cases.make_tokens(sizes[rank], config, seed * 100 + rank)
    return x, None if kind is None else cases.make_routing(kind, sizes[rank], config, seed * 100 + rank)


def many_forwards(rank: int, jobs: list[tuple]) -> list[dict[str, Any]]:
    """Several cases in one set of processes: starting them is what takes time."""
    return [forward_and_backward(rank, *job) for job in jobs]


def different_configs(rank: int) -> str:
    """Ranks disagree about top_k; every rank must hear of it."""
    try:
        MoELayer(MoEConfig(hidden=8, intermediate=8, experts=4, top_k=1 + rank), world=DistributedWorld())
    except ValueError as error:
        return str(error)
    return "no error"


def one_bad_rank(rank: int) -> str:
    """Rank 1 has NaN in its tokens; every rank must raise, none may hang."""
    config = MoEConfig(hidden=8, intermediate=8, experts=4, top_k=1)
    layer = MoELayer(config, world=DistributedWorld())
    x = torch.zeros(3, 8)
    if rank == 1:
        x[2, 0] = float("nan")
    try:
        layer(x)
    except ValueError as error:
        return str(error)
    return "no error"


def checkpoint_round_trip(rank: int) -> np.ndarray:
    """A checkpoint of all experts, loaded into the slots of this rank, then run."""
    config = MoEConfig(hidden=16, intermediate=24, experts=5, top_k=2)
    whole = MoELayer(config, seed=11)
    layer = MoELayer(config, world=DistributedWorld(), seed=0)
    layer.load_logical_state_dict(whole.state_dict())
    with torch.no_grad():
        return layer(cases.make_tokens(9, config, rank)).numpy()


def refused(rank: int) -> list[str]:
    """Rank 1 is given what is refused at the border, in several ways; every rank must raise each time."""
    config = MoEConfig(hidden=8, intermediate=8, experts=4, top_k=1, capacity_factor=2.0, max_tokens=9)
    layer = MoELayer(config, world=DistributedWorld())
    good = (torch.zeros(3, 8), Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)))
    bad: list[tuple[Any, Any]] = [
        (torch.zeros(3, 7), None),
        (torch.zeros(3, 8, dtype=torch.float64), None),
        (torch.zeros(10, 8), None),
        (good[0], Routing(torch.zeros(3, 1, dtype=torch.uint8), torch.ones(3, 1))),
        (good[0], Routing(torch.full((3, 1), 4), torch.ones(3, 1))),
        (good[0], "no routing"),
    ]
    messages = []
    for x, routing in bad:
        mine = (x, routing) if rank == 1 else (good[0], None if routing is None else good[1])
        try:
            layer(*mine)
            messages.append("no error")
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    y = layer(*good)  # and the world still works
    return [*messages, f"{tuple(y.shape)}"]


def different_settings(rank: int) -> str:
    """Rank 1 runs under autocast, the others don't."""
    layer = MoELayer(MoEConfig(hidden=8, intermediate=8, experts=4, top_k=1), world=DistributedWorld())
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
            layer(torch.zeros(3, 8))
    except ValueError as error:
        return str(error)
    return "no error"


def frozen_router(rank: int) -> list[bool]:
    """More ranks than experts, router frozen, tokens need a gradient on rank 0 only: the backward must not wait."""
    layer = MoELayer(MoEConfig(hidden=8, intermediate=8, experts=2, top_k=1), world=DistributedWorld())
    layer.router.requires_grad_(False)
    x = cases.make_tokens(5, layer.config, rank).requires_grad_(rank == 0)
    layer(x).sum().backward()
    return [x.grad is not None, layer.down_proj.grad is not None]


def second_derivative(rank: int) -> np.ndarray:
    """Gradient of the squared norm of the gradient, through two exchanges."""
    config = MoEConfig(hidden=6, intermediate=5, experts=4, top_k=2, dtype="float64", activation="gelu")
    layer = MoELayer(config, world=DistributedWorld(), seed=3)
    layer.check_plans = True
    x = cases.make_tokens(7, config, rank).requires_grad_()
    routing = cases.make_routing("uniform", 7, config, rank)
    (first,) = torch.autograd.grad(layer(x, routing=routing).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return second.numpy()
