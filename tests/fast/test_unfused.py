"""The unfused chain on a CPU: its arithmetic against the reference layer, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_fast import unfused
from moe_fast.layers import check_layer, group_of
from moe_fast.routes import make_routes, planned_routes
from moe_fast.weights import ChainWeights, layer_weights
from moe_ref import MoEConfig, MoELayer
from moe_ref.balance import schedule
from moe_ref.definition import relative_error
from moe_ref.errors import UsageError
from moe_ref.gate import Routing
from moe_ref.placement import Placement


def layers(**changes) -> tuple[MoELayer, ChainWeights]:
    """A layer on one rank and its parameters as the chain takes them."""
    values = {"hidden": 64, "intermediate": 96, "experts": 8, "top_k": 2, "dtype": "bfloat16"}
    layer = MoELayer(MoEConfig(**{**values, **changes}))
    return layer, layer_weights(layer)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gated": False, "activation": "relu"},
        {"gated": False, "activation": "gelu", "top_k": 1, "renormalize": False},
        {"scoring": "sigmoid", "selection_bias": True, "routed_scaling": 2.5, "top_k": 4},
        {"top_k_order": "before_scores", "router_bias": True, "expert_bias": True, "interleaved": True,
         "activation": "clamped_swiglu", "renormalize": False, "clamp_limit": 0.5},
        {"num_groups": 4, "top_groups": 2, "shared_intermediate": 160, "renormalize": False, "routed_scaling": 16.0},
        {"scoring": "sigmoid", "selection_bias": True, "num_groups": 2, "group_score": "top2_sum"},
        {"shared_intermediate": 32, "shared_gate": True, "expert_bias": True},
        {"scoring": "sigmoid", "top_k_order": "before_scores", "gated": False, "expert_bias": True},
        {"dtype": "float32", "shared_intermediate": 32, "expert_bias": True},
    ],
)  # fmt: skip
def test_equals_the_reference(changes):
    """Same routing; results within the roundings that the library adds before the activation."""
    layer, weights = layers(**changes)
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(1)).to(layer.config.torch_dtype)
    if changes.get("selection_bias"):
        layer.router.selection_bias.copy_(torch.linspace(-0.2, 0.2, 8))
    want, stats = layer(x, return_stats=True)
    with torch.no_grad():
        ids, _ = unfused.gate(x, weights, layer.config)
        got = unfused.forward(x, weights, layer.config)
    assert torch.equal(ids, stats.record.routing[0].expert_SK)
    assert relative_error(got, want.double()) < 1e-2


def test_masked_routes_and_duplicates():
    """-1 contributes nothing, the same expert twice contributes twice, a token without a route is zero."""
    layer, weights = layers()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    ids = torch.tensor([[0, 1], [-1, 3], [5, 5], [-1, -1]])
    weight = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.25, 0.75], [1.0, 1.0]])
    want = layer(x, routing=Routing(ids, weight))
    with torch.no_grad():
        got = unfused.compute(x, weight, make_routes(ids, layer.config), weights, layer.config)
    assert relative_error(got, want.double()) < 1e-2
    assert not got[3].any()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"router_bias": True, "expert_bias": True, "shared_intermediate": 32, "shared_gate": True},
        {"top_k_order": "before_scores", "interleaved": True, "activation": "clamped_swiglu", "renormalize": False},
    ],
)
def test_gradients_are_the_references(changes):
    """Through routes, experts, biases, shared expert and combine weights."""
    layer, weights = layers(**changes)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(40, 64, generator=g).to(torch.bfloat16)
    upstream = torch.randn(40, 64, generator=g).to(torch.bfloat16)
    a, b = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
    layer(a).backward(upstream)
    expected = {name: p.grad.clone() for name, p in layer.named_parameters()} | {"x": a.grad}
    layer.zero_grad()
    unfused.forward(b, weights, layer.config).backward(upstream)
    actual = {name: p.grad for name, p in layer.named_parameters()} | {"x": b.grad}
    for name, want in expected.items():
        assert relative_error(actual[name], want.double()) < 3e-2, name


@pytest.mark.parametrize("change", [{"dtype": "float64"}, {"capacity_factor": 1.0}])
def test_what_the_chain_lacks_is_named(change):
    layer, _ = layers(**change)
    with pytest.raises(UsageError, match=next(iter(change))):
        check_layer("unfused", unfused.unsupported(layer.config))


def test_several_simulated_ranks_are_refused():
    with pytest.raises(UsageError, match="one rank per process"):
        group_of(MoELayer(MoEConfig(16, 16, 4, 1), world=2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no CUDA device")
def test_backends_say_why_they_cannot_run():
    from moe_fast.backend import FusedBackend

    assert "CUDA device" in str(unfused.UnfusedBackend().unavailable())
    assert "CUDA device" in str(FusedBackend().unavailable())


def test_planned_routes_order_rows_by_slot_then_source():
    """Under a plan, what a rank receives and arranges is what the reference's dispatch holds."""
    placement = Placement.from_replicas([[0, 2], [1], [2, 1, 0], [0, 1], [2]], 3)
    g = torch.Generator().manual_seed(2)
    ids = [torch.randint(-1, 5, (20 + p, 2), generator=g) for p in range(3)]
    counts = np.stack([np.bincount(i[i >= 0].flatten(), minlength=5) for i in ids])
    plan = schedule(counts, placement)
    routes = [planned_routes(i, plan, p) for p, i in enumerate(ids)]
    quota_PGX = plan.quota_by_slot()
    for rank in range(3):
        received = []
        for source in range(3):
            begin = sum(routes[source].send[:rank])
            mine = routes[source].order_N[begin : begin + routes[source].send[rank]]
            assert len(mine) == routes[rank].receive[source]
            received += [(source, int(route)) for route in mine]
        arranged = [received[int(i)] for i in routes[rank].arrange_N]
        first = 0
        for slot, end in enumerate(routes[rank].ends_X.tolist()):
            expert, part = placement.experts_of_rank[rank][slot], arranged[first:end]
            assert [s for s, _ in part] == [s for s in range(3) for _ in range(quota_PGX[s, rank, slot])]
            assert all(int(ids[s].flatten()[route]) == expert for s, route in part)
            assert part == sorted(part)
            first = end
        assert first == len(arranged)
