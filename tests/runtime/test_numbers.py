"""Numerical mode: the actors' tensors against the reference layer, and the same bits in every order."""

from __future__ import annotations

import pytest
import torch

from moe_ref.config import MoEConfig
from moe_ref.definition import relative_error
from moe_ref.gate import Routing
from moe_ref.layer import MoELayer
from moe_ref.placement import Placement
from moe_ref.runtime.checker import random_order
from moe_ref.runtime.machine import Noise, machine
from moe_ref.runtime.numbers import Numbers, plan_call, run_layer

TOLERANCE = {"float32": 1e-6, "float64": 1e-13}


def _tokens(sizes, config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, config.hidden, generator=generator, dtype=config.torch_dtype) for s in sizes]


def _config(**changes) -> MoEConfig:
    base = MoEConfig(hidden=48, intermediate=40, experts=8, top_k=3, dtype="float64", max_tokens=64)
    return base.replace(**changes)


def _compare(layer, batches, routing=None, tile_columns=16, **options):
    """Largest relative error of any call and rank against backend="ref"."""
    given = routing or [None] * len(batches)
    calls = [plan_call(layer, x, r, tile_columns, e) for e, (x, r) in enumerate(zip(batches, given, strict=True))]
    ys, run = run_layer(layer, calls, machine("h200-8"), processors=5, **options)
    worst = 0.0
    for x, r, y in zip(batches, given, ys, strict=True):
        with torch.no_grad():
            want = layer(x, routing=r)
        for rank, (mine, theirs) in enumerate(zip(y, want, strict=True)):
            assert mine.shape == theirs.shape, f"rank {rank}"
            assert torch.isfinite(mine).all(), f"rank {rank}: a NaN of an unwritten buffer reached the result"
            worst = max(worst, relative_error(mine, theirs))
    return worst, run


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", ["compact", "fixed"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_equal_to_the_reference(ranks, gated, layout, dtype):
    config = _config(gated=gated, layout=layout, dtype=dtype, expert_bias=True)
    layer = MoELayer(config, world=ranks)
    sizes = [[(7 * r + 31 * e + 5) % 60 for r in range(ranks)] for e in range(3)]
    for e in range(3):
        sizes[e][e % ranks] = 0 if ranks > 1 or e == 1 else 33
    worst, run = _compare(layer, [_tokens(s, config, e) for e, s in enumerate(sizes)])
    assert worst <= TOLERANCE[dtype]
    assert run.tasks > 0


def test_tile_columns_that_do_not_divide_and_other_ffns():
    for changes in (
        {"interleaved": True},
        {"activation": "clamped_swiglu", "interleaved": True, "expert_bias": True},
        {"gated": False, "activation": "gelu"},
        {"shared_intermediate": 24, "shared_gate": True},
        {"top_k": 1, "renormalize": False},
        {"capacity_factor": 0.5, "layout": "fixed"},
        {"capacity_factor": 0.5},
    ):
        config = _config(**changes)
        layer = MoELayer(config, world=3)
        assert _compare(layer, [_tokens([20, 0, 35], config)], tile_columns=14)[0] <= 1e-13, changes


def test_masked_and_doubled_routes():
    config = _config(top_k=2)
    layer = MoELayer(config, world=2)
    x = _tokens([3, 2], config)
    routing = [
        Routing(torch.tensor([[-1, -1], [4, 4], [-1, 7]]), torch.rand(3, 2, dtype=torch.float64)),
        Routing(torch.tensor([[0, -1], [-1, -1]]), torch.rand(2, 2, dtype=torch.float64)),
    ]
    assert _compare(layer, [x], [routing])[0] <= 1e-13


@pytest.mark.parametrize("layout", ["compact", "fixed"])
def test_replicas_where_a_plan_is_given(layout):
    owners = [[0, 1], [1], [2, 0, 1], [2], [0], [1, 2], [2], [0, 2]]
    config = _config(layout=layout)
    layer = MoELayer(config, world=3, placement=Placement.from_replicas(owners, 3))
    assert layer.placement.max_replicas == 3
    assert _compare(layer, [_tokens([40, 3, 11], config, e) for e in range(2)])[0] <= 1e-13


def test_sixteen_bit_layers_round_as_the_reference_does():
    config = _config(dtype="bfloat16")
    layer = MoELayer(config, world=2)
    worst, _ = _compare(layer, [_tokens([30, 17], config)])
    assert worst <= 1e-2


@pytest.mark.parametrize("layout", ["compact", "fixed"])
def test_bits_do_not_depend_on_the_order_of_messages(layout):
    config = _config(dtype="float32", layout=layout, hidden=32, intermediate=24, capacity_factor=None, top_k=2)
    layer = MoELayer(config, world=3)
    calls = [plan_call(layer, _tokens(s, config, e), None, 16, e) for e, s in enumerate([(9, 0, 20), (4, 17, 1)])]
    first, _ = run_layer(layer, calls, machine("h200-8"), processors=2)
    differing = 0
    for seed in range(6):
        noise = Noise(jitter=1.5, launch_jitter_us=50.0, straggler=seed % 3, slowdown=4.0, seed=seed)
        again, run = run_layer(layer, calls, machine("h200-8"), noise, processors=1 + seed)
        differing += sum(
            not torch.equal(a, b) for y, z in zip(first, again, strict=True) for a, b in zip(y, z, strict=True)
        )
        assert run.events > 0
    with torch.no_grad():
        for seed in range(60):
            data = Numbers(layer, calls)
            random_order([c.plan for c in calls], seed, processors=1 + seed % 3, data=data)
            for y, z in zip(first, data.y_SH, strict=True):
                differing += sum(not torch.equal(a, b) for a, b in zip(y, z, strict=True))
    assert differing == 0


def test_wrong_input_is_named():
    layer = MoELayer(_config(), world=2)
    with pytest.raises(ValueError, match="x of 1 ranks was given"):
        plan_call(layer, _tokens([3], layer.config))
