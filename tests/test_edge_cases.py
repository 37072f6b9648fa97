"""Kinds of trouble that users of such layers reported elsewhere, each with the value that is right.

Numbers in the names are those of the table in the docs ("What goes wrong in practice").
"""

from __future__ import annotations

import pytest
import torch

from moe_ref import MoEConfig, MoELayer, Placement, Routing, cases
from moe_ref.definition import definition, relative_error
from moe_ref.dispatch import dispatch
from moe_ref.layout import CompactLayout

BASE = MoEConfig(hidden=16, intermediate=24, experts=6, top_k=2, dtype="float64")


def exact(layer: MoELayer, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    return definition(
        x, routing, layer.config, layer.up_parameter, layer.down_proj, layer.up_bias_parameter, layer.down_proj_bias
    )


@pytest.mark.parametrize("layout", ["compact", "fixed"])
@pytest.mark.parametrize("sizes", [[0, 0, 0], [0, 5, 0], [1, 0, 200], [17, 1, 3]])
def test_01_ranks_with_no_or_very_different_tokens(sizes: list[int], layout: str) -> None:
    layer = MoELayer(BASE.replace(layout=layout), world=3)
    xs = [cases.make_tokens(s, BASE, i).requires_grad_() for i, s in enumerate(sizes)]
    ys = layer(xs)
    assert [tuple(y.shape) for y in ys] == [(s, 16) for s in sizes]
    sum(y.sum() for y in ys).backward()
    assert all(p.grad is not None for p in (layer.up_parameter, layer.down_proj))
    for x, y in zip(xs, ys, strict=True):
        assert relative_error(y, exact(layer, x, layer.gate(x))) <= 1e-12


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 33, 127, 128, 129])
def test_02_no_multiple_of_the_tile(tokens: int) -> None:
    """Every valid row is written, and no row beyond: unused heap rows still hold the NaN they were made with."""
    config = BASE.replace(experts=2, top_k=1, tile_rows=16)
    layer = MoELayer(config)
    x = cases.make_tokens(tokens, config)
    routing = cases.make_routing("uniform", tokens, config, tokens)
    counts = torch.bincount(routing.expert_SK.flatten(), minlength=2)[None].numpy()
    plan = layer.make_plan(counts)
    layout = CompactLayout.from_plan(plan, 16)
    (heap,), _ = dispatch(layer.world, [x], [routing], plan, layout, None)
    written = torch.zeros(heap.shape[0], dtype=torch.bool)
    written[torch.from_numpy(layout.receive_rows(0))] = True
    assert heap[written].isfinite().all()
    assert heap[~written].isnan().all()
    assert relative_error(layer(x, routing=routing), exact(layer, x, routing)) <= 1e-12


def test_03_an_expert_without_tokens_has_zero_gradient() -> None:
    layer = MoELayer(BASE, world=2)
    routing = Routing(torch.tensor([[0, 2], [2, 0]]), torch.ones(2, 2, dtype=torch.float64))
    layer(cases.make_tokens(2, BASE), routing=routing).sum().backward()
    for parameter in (layer.up_parameter, layer.down_proj):
        assert parameter.grad is not None
        for expert in range(6):
            assert bool((parameter.grad[expert] == 0).all()) == (expert not in (0, 2))


@pytest.mark.parametrize("layout", ["compact", "fixed"])
def test_04_garbage_in_padding_never_shows(layout: str) -> None:
    """All unused heap rows hold NaN by construction; neither results nor gradients may see one."""
    layer = MoELayer(BASE.replace(layout=layout), world=3)
    x = cases.make_tokens(37, BASE).requires_grad_()
    y = layer(x, routing=cases.make_routing("masked", 37, BASE, 1))
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in (layer.up_parameter, layer.down_proj))


def test_05_the_same_expert_twice_counts_twice() -> None:
    layer = MoELayer(BASE)
    x = cases.make_tokens(3, BASE)
    twice = Routing(torch.full((3, 2), 4), torch.tensor([[0.25, 0.5]] * 3, dtype=torch.float64))
    once = Routing(torch.tensor([[4, -1]] * 3), torch.tensor([[0.75, 9.0]] * 3, dtype=torch.float64))
    assert relative_error(layer(x, routing=twice), layer(x, routing=once)) <= 1e-15


@pytest.mark.parametrize("kind", ["one_expert", "one_rank"])
@pytest.mark.parametrize("layout", ["compact", "fixed"])
def test_06_everything_to_one_expert_or_rank(kind: str, layout: str) -> None:
    config = BASE.replace(layout=layout, max_tokens=100)
    layer = MoELayer(config, world=3)
    xs = [cases.make_tokens(100, config, i) for i in range(3)]
    routing = [cases.make_routing(kind, 100, config, i, layer.placement) for i in range(3)]
    ys, stats = layer(xs, routing=routing, return_stats=True)
    assert int(stats.rank_load.max()) <= config.max_rows(3) == 2 * 100 * 3
    for x, y, r in zip(xs, ys, routing, strict=True):
        assert relative_error(y, exact(layer, x, r)) <= 1e-12


def test_08_sum_in_choice_order_rounded_once() -> None:
    """Values chosen so that a 16-bit running sum or another order gives another result."""
    config = MoEConfig(
        hidden=1,
        intermediate=1,
        experts=3,
        top_k=3,
        gated=False,
        activation="relu",
        dtype="bfloat16",
        renormalize=False,
    )
    layer = MoELayer(config, world=3)
    with torch.no_grad():
        layer.up_parameter.fill_(1.0)
        layer.down_proj.copy_(torch.tensor([256.0, 0.75, 0.75]).view(3, 1, 1))
    routing = Routing(torch.tensor([[0, 1, 2]]), torch.ones(1, 3))
    y = layer(torch.ones(1, 1, dtype=torch.bfloat16), routing=routing)
    assert y.tolist() == [[258.0]], "256 + 0.75 + 0.75 = 257.5 -> 258; a bf16 running sum stays at 256"


def test_13_masked_routes_do_not_alias_expert_0() -> None:
    layer = MoELayer(BASE, world=2)
    x = cases.make_tokens(4, BASE)
    y, stats = layer(
        x, routing=Routing(torch.full((4, 2), -1), torch.ones(4, 2, dtype=torch.float64)), return_stats=True
    )
    assert torch.equal(y, torch.zeros_like(y))
    assert stats.expert_load.tolist() == [0] * 6


@pytest.mark.parametrize("renormalize", [True, False])
def test_14_top_1_weight_is_applied_once(renormalize: bool) -> None:
    layer = MoELayer(BASE.replace(top_k=1, renormalize=renormalize))
    x = cases.make_tokens(5, BASE)
    routing = layer.gate(x)
    best = layer.gate(x).scores_SE.max(dim=1, keepdim=True).values
    weight = torch.ones_like(best) if renormalize else best
    plain = layer(x, routing=Routing(routing.expert_SK, torch.ones(5, 1, dtype=torch.float64)))
    assert relative_error(layer(x), weight * plain) <= 1e-14
    assert relative_error(routing.weight_SK, weight) <= 1e-14


def test_15_biases_are_weighted_and_stay_off_the_padding() -> None:
    config = BASE.replace(expert_bias=True, gated=False, activation="relu")
    layer = MoELayer(config)
    with torch.no_grad():
        layer.down_proj.zero_()
        layer.down_proj_bias.copy_(torch.arange(6.0).view(6, 1).expand(6, 16))
    routing = Routing(torch.tensor([[1, 5], [3, -1]]), torch.tensor([[0.5, 0.25], [2.0, 7.0]], dtype=torch.float64))
    y = layer(cases.make_tokens(2, config), routing=routing)
    assert y.tolist() == [[0.5 * 1 + 0.25 * 5] * 16, [2.0 * 3] * 16]


def test_16_capacity_overflow_is_counted() -> None:
    config = BASE.replace(capacity_factor=0.5)  # C = ceil(0.5 * 12 * 2 / 6) = 2
    layer = MoELayer(config)
    routing = Routing(torch.tensor([[0, 1]] * 12), torch.ones(12, 2, dtype=torch.float64))
    y, stats = layer(cases.make_tokens(12, config), routing=routing, return_stats=True)
    assert stats.dropped == 20
    assert bool((y[:2] != 0).any(dim=1).all())
    assert torch.equal(y[2:], torch.zeros_like(y[2:]))


@pytest.mark.parametrize(("experts", "ranks"), [(7, 3), (60, 8), (3, 5), (1, 2)])
def test_17_experts_no_multiple_of_ranks(experts: int, ranks: int) -> None:
    config = BASE.replace(experts=experts, top_k=1)
    layer = MoELayer(config, world=ranks)
    held = [len(layer.experts_of(rank)) for rank in range(ranks)]
    assert sum(held) == experts
    assert max(held) - min(held) <= 1
    x = cases.make_tokens(50, config)
    assert relative_error(layer(x), exact(layer, x, layer.gate(x))) <= 1e-12


def test_18_shared_expert_has_weight_one() -> None:
    config = BASE.replace(shared_intermediate=8, routed_scaling=0.0)
    layer = MoELayer(config, world=2)
    x = cases.make_tokens(9, config)
    assert torch.equal(layer(x), layer.shared(x))


def test_19_more_rows_than_the_fixed_layout_holds() -> None:
    """A capacity that was handed in too small is an error before anything moves."""
    from moe_ref.layout import FixedLayout

    layer = MoELayer(BASE)
    counts = torch.tensor([[9, 0, 0, 0, 0, 0]]).numpy()
    with pytest.raises(ValueError, match="sends 9 rows to slot 0 of rank 0, but the fixed layout has 8"):
        FixedLayout.from_plan(layer.make_plan(counts), 8)


def test_25_loads_are_gathered_over_all_ranks() -> None:
    layer = MoELayer(BASE, world=4)
    xs = [cases.make_tokens(10 + i, BASE, i) for i in range(4)]
    _, stats = layer(xs, return_stats=True)
    assert int(stats.expert_load.sum()) == sum(10 + i for i in range(4)) * BASE.top_k
    alone = [layer.gate(x).expert_SK for x in xs]
    assert stats.expert_load.tolist() == torch.bincount(torch.cat(alone).flatten(), minlength=6).tolist()


def test_26_logical_and_physical_ids() -> None:
    """With experts placed backwards, loads are still reported by logical expert and results do not move."""
    backwards = Placement.from_replicas([(2 - e // 2,) for e in range(6)], 3)
    plain, moved = MoELayer(BASE, world=3), MoELayer(BASE, world=3, placement=backwards)
    x = cases.make_tokens(30, BASE)
    (y, a), (z, b) = plain(x, return_stats=True), moved(x, return_stats=True)
    assert relative_error(y, z) <= 1e-14
    assert a.expert_load.tolist() == b.expert_load.tolist()
    assert a.rank_load.tolist() == b.rank_load.tolist()[::-1]


def test_29_loads_before_and_after_capacity_are_reported() -> None:
    config = BASE.replace(capacity_factor=0.8)
    _, stats = MoELayer(config, world=2)(cases.make_tokens(60, config), return_stats=True)
    assert int(stats.expert_load_before_capacity.sum()) == 120
    assert int(stats.expert_load.sum()) == 120 - stats.dropped
    assert int(stats.rank_load.sum()) == int(stats.expert_load.sum())
