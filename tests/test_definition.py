"""The sort-based reference against the definition in float64, forward and gradients, for every family of features."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import FAMILIES, dense, family, largest_error

from moe_ref import MoEConfig, MoELayer, Routing, cases
from moe_ref.definition import relative_error


def randomize_selection(layer: MoELayer) -> None:
    if layer.router.selection_bias is not None:
        generator = torch.Generator().manual_seed(9)
        layer.router.selection_bias.copy_(torch.randn(layer.config.experts, generator=generator) * 0.3)


@pytest.mark.parametrize("layout", ["compact", "fixed"])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_forward_and_gradients(name: str, ranks: int, layout: str) -> None:
    config = family(name, dtype="float64", layout=layout)
    layer = MoELayer(config, world=ranks, seed=3)
    randomize_selection(layer)
    x = cases.make_tokens(57, config, 1).requires_grad_()
    assert largest_error(layer, x, None, [x, *layer.parameters()]) <= 1e-12


@pytest.mark.parametrize("kind", cases.KINDS)
def test_routing_handed_in(kind: str) -> None:
    config = MoEConfig(hidden=24, intermediate=40, experts=9, top_k=4, dtype="float64", expert_bias=True)
    layer = MoELayer(config, world=3, seed=1)
    x = cases.make_tokens(41, config, 2).requires_grad_()
    routing = cases.make_routing(kind, 41, config, 3, layer.placement)
    weight = routing.weight_SK.clone().requires_grad_()
    inputs = [x, weight, layer.up_parameter, layer.down_proj, layer.up_bias_parameter, layer.down_proj_bias]
    assert largest_error(layer, x, Routing(routing.expert_SK, weight), inputs) <= 1e-12


def test_gradcheck_of_the_whole_layer() -> None:
    config = MoEConfig(hidden=6, intermediate=5, experts=4, top_k=2, dtype="float64", activation="gelu")
    layer = MoELayer(config, world=2, seed=5)
    x = cases.make_tokens(7, config, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: layer(v, routing=cases.make_routing("uniform", 7, config, 1)), (x,))


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2e-6), ("bfloat16", 4e-3), ("float16", 6e-4)])
@pytest.mark.parametrize("gated", [True, False])
def test_error_of_each_dtype(dtype: str, limit: float, gated: bool) -> None:
    """relative_error of the result against the float64 definition on the same weights and routing."""
    config = MoEConfig(hidden=64, intermediate=96, experts=8, top_k=2, dtype=dtype, gated=gated)
    layer = MoELayer(config, world=2, seed=1)
    x = cases.make_tokens(130, config, 1)
    routing = cases.make_routing("zipf", 130, config, 1)
    exact = MoELayer(config.replace(dtype="float64"), seed=1)
    exact.load_state_dict({k: v.double() for k, v in layer.state_dict().items()})
    y = layer(x, routing=routing)
    assert y.dtype == config.torch_dtype
    assert relative_error(y, dense(exact, x.double(), routing)) <= limit


def test_row_tile_height_does_not_change_the_meaning() -> None:
    config = MoEConfig(hidden=32, intermediate=16, experts=5, top_k=2, dtype="float64")
    x = cases.make_tokens(33, config)
    results = [MoELayer(config.replace(tile_rows=t), world=2)(x) for t in (1, 16, 128)]
    for other in results[1:]:
        assert relative_error(other, results[0]) <= 1e-14


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.integers(1, 6),
    st.integers(0, 40),
    st.sampled_from([None, *cases.KINDS]),
    st.sampled_from(["compact", "fixed"]),
    st.integers(0, 1000),
)
def test_gradients_of_any_layer(name: str, ranks: int, tokens: int, kind: str | None, layout: str, seed: int) -> None:
    """Forward and gradients equal the definition's for any family, world, size, routing and layout."""
    config = family(name, dtype="float64", layout=layout)
    layer = MoELayer(config, world=ranks, seed=seed)
    x = cases.make_tokens(tokens, config, seed).requires_grad_()
    routing = None if kind is None else cases.make_routing(kind, tokens, config, seed, layer.placement)
    assert largest_error(layer, x, routing, [x, layer.up_parameter, layer.down_proj]) <= 1e-12
