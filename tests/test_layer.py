"""The layer on simulated ranks: what splitting, permuting, switching and saving must not change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import FAMILIES, family

from moe_ref import MoEConfig, MoELayer, Placement, Routing, SimulatedWorld, cases
from moe_ref.definition import relative_error
from moe_ref.errors import UsageError

BASE = MoEConfig(hidden=32, intermediate=48, experts=8, top_k=2)


@pytest.mark.parametrize("layout", ["compact", "fixed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_splitting_over_ranks_changes_no_bit(name: str, layout: str, one_thread, same_rows) -> None:
    config = family(name, layout=layout)
    x = cases.make_tokens(61, config, 1)
    alone = MoELayer(config, seed=2)(x)
    for ranks in (2, 4, 7, 12):
        assert same_rows(MoELayer(config, world=ranks, seed=2)(x), alone)


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 10_000), st.sampled_from(["compact", "fixed"])
)
def test_any_split_any_layout(sizes: list[int], seed: int, layout: str) -> None:
    """Splitting the batch over ranks changes no bit of a row (fp32, row-tile rule)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config = BASE.replace(layout=layout)
        whole = cases.make_tokens(sum(sizes), config, seed)
        parts = MoELayer(config, world=len(sizes), seed=seed)(list(whole.split(sizes)))
        assert [part.shape[0] for part in parts] == sizes
        assert relative_error(torch.cat(parts), MoELayer(config, seed=seed)(whole)) <= 1e-6
        from moe_ref.doctor import rows_are_invariant

        if rows_are_invariant():
            assert torch.equal(torch.cat(parts), MoELayer(config, seed=seed)(whole))
    finally:
        torch.set_num_threads(threads)


@settings(max_examples=30)
@given(st.integers(1, 50), st.integers(0, 10_000), st.integers(1, 4))
def test_permuting_tokens_permutes_outputs(tokens: int, seed: int, ranks: int) -> None:
    layer = MoELayer(BASE.replace(dtype="float64"), world=ranks, seed=1)
    x = cases.make_tokens(tokens, layer.config, seed)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    assert relative_error(layer(x[order]), layer(x)[order]) <= 1e-14


@settings(max_examples=40)
@given(st.integers(0, 60), st.integers(1, 5), st.sampled_from(sorted(cases.KINDS)), st.integers(0, 99))
def test_routes_are_conserved(tokens: int, ranks: int, kind: str, seed: int) -> None:
    """Every unmasked route becomes one row of one rank; loads, counts and bytes add up."""
    layer = MoELayer(BASE, world=ranks, seed=0)
    x = cases.make_tokens(tokens, BASE, seed)
    routing = cases.make_routing(kind, tokens, BASE, seed, layer.placement)
    _, stats = layer(x, routing=routing, return_stats=True)
    routed = int((routing.expert_SK >= 0).sum())
    assert int(stats.expert_load.sum()) == int(stats.rank_load.sum()) == routed
    assert stats.bytes_local + stats.bytes_remote == routed * BASE.row_bytes
    assert (
        stats.expert_load.tolist()
        == np.bincount(routing.expert_SK[routing.expert_SK >= 0].numpy(), minlength=8).tolist()
    )
    assert int(stats.tokens_per_rank.sum()) == tokens
    assert stats.dropped == 0


def test_stats_with_capacity() -> None:
    config = BASE.replace(capacity_factor=0.5)
    layer = MoELayer(config, world=2)
    x = cases.make_tokens(40, config, 3)
    y, stats = layer(x, return_stats=True)
    assert stats.dropped == int(stats.expert_load_before_capacity.sum() - stats.expert_load.sum()) > 0
    assert int(stats.expert_load_before_capacity.sum()) == 80
    assert stats.expert_load.max() <= 2 * config.capacity(20)
    assert torch.isfinite(y).all()
    assert f"8 experts, {80 - stats.dropped} rows on 2 ranks" in repr(stats)
    assert len(repr(stats)) < 200


def test_dropped_routes_add_nothing() -> None:
    """The result with drops equals the result of the same routing with those routes masked."""
    config = BASE.replace(capacity_factor=0.5, dtype="float64")
    layer = MoELayer(config, world=2)
    x = cases.make_tokens(40, config, 3)
    y, stats = layer(x, return_stats=True)
    kept = stats.record.routing
    masked = Routing(torch.cat([r.expert_SK for r in kept]), torch.cat([r.weight_SK for r in kept]))
    same = MoELayer(config.replace(capacity_factor=None), world=2)
    same.load_state_dict(layer.state_dict())
    assert torch.equal(same(x, routing=masked), y)


def test_auxiliary_losses_are_differentiable_and_rank_invariant() -> None:
    x = cases.make_tokens(50, BASE, 1)
    losses = []
    for ranks in (1, 4):
        layer = MoELayer(BASE, world=ranks)
        _, stats = layer(x, return_stats=True)
        (stats.balance_loss + stats.z_loss).backward()
        assert layer.router.weight.grad.abs().sum() > 0
        losses.append((float(stats.balance_loss.detach()), float(stats.z_loss.detach()), layer.router.weight.grad))
    assert losses[0][:2] == pytest.approx(losses[1][:2], rel=1e-6)
    assert relative_error(losses[1][2], losses[0][2]) <= 1e-5


def test_shapes_are_kept() -> None:
    layer = MoELayer(BASE, world=2)
    x = cases.make_tokens(30, BASE)
    assert torch.equal(layer(x.view(2, 3, 5, 32)).view(30, 32), layer(x))
    assert layer(x[0]).shape == (32,)
    assert layer(x[:0]).shape == (0, 32)


def test_state_dict_round_trip() -> None:
    for name in FAMILIES:
        config = family(name)
        a, b = MoELayer(config, seed=1), MoELayer(config, seed=2, world=3)
        b.load_state_dict(a.state_dict())
        x = cases.make_tokens(20, config)
        assert relative_error(b(x), a(x)) <= 1e-6
        assert all(torch.equal(u, v) for u, v in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_parameter_names_and_shapes() -> None:
    config = MoEConfig(32, 48, 10, 3, expert_bias=True, router_bias=True)
    assert {k: tuple(v.shape) for k, v in MoELayer(config).named_parameters()} == {
        "router.weight": (10, 32),
        "router.bias": (10,),
        "gate_up_proj": (10, 96, 32),
        "gate_up_proj_bias": (10, 96),
        "down_proj": (10, 32, 48),
        "down_proj_bias": (10, 32),
    }
    plain = {k: tuple(v.shape) for k, v in MoELayer(config.replace(gated=False, activation="relu")).named_parameters()}
    assert plain["up_proj"] == (10, 48, 32)
    assert plain["up_proj_bias"] == (10, 48)


def test_interleaved_rows_are_a_permutation_of_halves() -> None:
    config = BASE.replace(dtype="float64")
    halves, woven = MoELayer(config), MoELayer(config.replace(interleaved=True))
    state = halves.state_dict()
    gate_EDH, up_EDH = state["gate_up_proj"].chunk(2, dim=1)
    state["gate_up_proj"] = torch.stack([gate_EDH, up_EDH], dim=2).flatten(1, 2)
    woven.load_state_dict(state)
    x = cases.make_tokens(20, config)
    assert relative_error(woven(x), halves(x)) <= 1e-15


def test_autocast_computes_in_its_dtype() -> None:
    layer = MoELayer(BASE, world=2)
    x = cases.make_tokens(20, BASE)
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, stats = layer(x, return_stats=True)
        loss = y.float().square().mean() + stats.balance_loss
    loss.backward()
    assert y.dtype == torch.bfloat16
    assert 1e-5 < relative_error(y, exact) < 1e-2
    assert stats.record.routing[0].weight_SK.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_same_inputs_same_bits() -> None:
    layer = MoELayer(BASE, world=3)
    x = cases.make_tokens(64, BASE)
    first = layer(x)
    assert all(torch.equal(layer(x), first) for _ in range(3))


def test_initial_weights_do_not_depend_on_the_world() -> None:
    a, b = MoELayer(BASE, seed=7), MoELayer(BASE, seed=7, world=4)
    assert all(torch.equal(u, v) for u, v in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.down_proj, MoELayer(BASE, seed=8).down_proj)
    assert not torch.equal(a.down_proj[0], a.down_proj[1])


def test_replicas_change_no_bit(one_thread, same_rows) -> None:
    x = cases.make_tokens(64, BASE, 5)
    alone = MoELayer(BASE)(x)
    placement = Placement.from_replicas([(e % 4, (e + 1) % 4) for e in range(8)], 4)
    y, stats = MoELayer(BASE, world=4, placement=placement)(x, return_stats=True)
    assert same_rows(y, alone)
    assert int(stats.rank_load.sum()) == 128


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 31), r"x has shape \[3, 31\], expected \[..., hidden\] = \[..., 32\]"),
        (torch.zeros(3, 32, dtype=torch.float64), "x is torch.float64, expected torch.float32"),
        (torch.zeros(3, 32, dtype=torch.int64), "x is torch.int64, expected torch.float32"),
        ([torch.zeros(3, 32), torch.zeros(3, 32)], "x is a list of 2 items, expected a tensor"),
        ([3], "x is a list of 1 items, one a int, expected a tensor"),
        ("text", "x is str, expected a tensor"),
        (torch.zeros(3, 32, device="meta"), "x is on meta, but the layer is on cpu"),
    ],
)
def test_bad_input(x, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        MoELayer(BASE)(x)


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        ([[0, 8]], [[1.0, 1.0]], r"expert_SK\[0, 1\] is 8, expected an id in \[0, 8\) or -1"),
        ([[-2, 0]], [[1.0, 1.0]], r"expert_SK\[0, 0\] is -2"),
        ([[0]], [[1.0]], r"expert_SK has shape \[1, 1\], expected \[tokens, top_k\] = \[1, 2\]"),
        ([[0, 1]], [[1.0, float("nan")]], r"weight_SK\[0, 1\] is nan, expected a finite weight"),
        ([[0.0, 1.0]], [[1.0, 1.0]], "expert_SK is torch.float32, expected signed integers"),
    ],
)
def test_bad_routing(ids, weights, message: str) -> None:
    routing = Routing(torch.tensor(ids), torch.tensor(weights))
    with pytest.raises((ValueError, TypeError), match=message):
        MoELayer(BASE)(torch.zeros(1, 32), routing=routing)
    with pytest.raises((ValueError, TypeError)):
        MoELayer(BASE, world=2)(torch.zeros(1, 32), routing=routing)


def test_the_rank_with_bad_input_is_named() -> None:
    x = [torch.zeros(2, 32), torch.full((2, 32), float("nan"))]
    with pytest.raises(ValueError, match="rank 1: the gate's logit of token 0"):
        MoELayer(BASE, world=2)(x)


def test_bad_worlds_and_placements() -> None:
    with pytest.raises(UsageError, match="world of 0 ranks"):
        SimulatedWorld(0)
    with pytest.raises(UsageError, match="placement is for 8 experts on 2 ranks, expected 8 experts on 4"):
        MoELayer(BASE, world=4, placement=Placement.contiguous(8, 2))


def test_routing_is_checked_at_the_border() -> None:
    x, ones = torch.zeros(1, 32), torch.ones(1, 2)
    for layer in (MoELayer(BASE), MoELayer(BASE.replace(capacity_factor=1.0))):
        exact = layer(x, routing=Routing(torch.tensor([[0, 1]]), ones))
        for dtype in (torch.int8, torch.int16, torch.int32):
            assert torch.equal(layer(x, routing=Routing(torch.tensor([[0, 1]], dtype=dtype), ones)), exact)
    with pytest.raises(TypeError, match=r"expert_SK is torch.uint8, expected signed integers"):
        MoELayer(BASE)(x, routing=Routing(torch.zeros(1, 2, dtype=torch.uint8), ones))
    with pytest.raises(ValueError, match=r"expert_SK is on meta, but the tokens are on cpu"):
        MoELayer(BASE)(x, routing=Routing(torch.zeros(1, 2, dtype=torch.int64, device="meta"), ones))
    with pytest.raises(ValueError, match=r"weight_SK\[0, 0\] is inf, expected a finite weight"):
        MoELayer(BASE)(x, routing=Routing(torch.tensor([[0, 1]]), torch.full((1, 2), 1e300, dtype=torch.float64)))


def test_more_tokens_than_the_buffers_are_sized_for() -> None:
    layer = MoELayer(BASE.replace(max_tokens=4), world=2)
    assert layer([torch.zeros(4, 32), torch.zeros(0, 32)])[0].shape == (4, 32)
    with pytest.raises(ValueError, match=r"x of rank 1 has 5 tokens, but buffers are sized for 4; raise MoEConfig"):
        layer([torch.zeros(4, 32), torch.zeros(5, 32)])


def test_a_layer_that_was_cast_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"parameters are torch.float16 but its config says torch.float32; build"):
        MoELayer(BASE).half()(torch.zeros(1, 32, dtype=torch.float16))


def test_autocast_leaves_float64_alone_and_counts_its_bytes() -> None:
    layer = MoELayer(BASE.replace(dtype="float64"), world=2)
    x = cases.make_tokens(10, layer.config)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), layer(x.clone()))
        assert layer(x).dtype == torch.float64
        _, stats = MoELayer(BASE, world=2)(x.float(), return_stats=True)
    assert stats.bytes_local + stats.bytes_remote == 10 * 2 * 32 * 2, "bf16 rows have two bytes an element"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_selection_bias_that_is_not_finite(value: float) -> None:
    layer = MoELayer(BASE.replace(selection_bias=True, scoring="sigmoid"))
    layer.router.selection_bias[3] = value
    with pytest.raises(ValueError, match=r"selection_bias\[3\] is .*expected a finite number"):
        layer(torch.zeros(1, 32))


def test_the_selection_bias_stays_fp32() -> None:
    layer = MoELayer(BASE.replace(selection_bias=True))
    layer.router.selection_bias.fill_(1.0 + 2**-12)
    assert layer.bfloat16().router.selection_bias.dtype == torch.float32
    assert float(layer.router.selection_bias[0]) == 1.0 + 2**-12


def test_seeds() -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        other = MoELayer(BASE, seed=1)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(other.down_proj, MoELayer(BASE, seed=1).down_proj)
    assert not torch.equal(MoELayer(BASE, seed=2**32).down_proj, MoELayer(BASE, seed=0).down_proj)
    for seed in (-1, 1.5, None):
        with pytest.raises(UsageError, match=r"seed is .*, expected an integer of at least 0"):
            MoELayer(BASE, seed=seed)


def test_losses_of_a_routing_that_the_gate_made() -> None:
    layer = MoELayer(BASE, world=2)
    x = cases.make_tokens(21, BASE)
    _, own = layer(x, return_stats=True)
    _, given = layer(x, routing=layer.gate(x), return_stats=True)
    assert given.balance_loss.item() == pytest.approx(own.balance_loss.item())
    assert given.z_loss.item() == pytest.approx(own.z_loss.item())
