"""Which engine a layer gets, and when that is worked out anew; without a GPU the making of engines is replaced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_fast import compiler, engine_choice
from moe_fast.engine_choice import deadline_s, engine_for
from moe_fast.weights import check_weights, layer_weights
from moe_ref import MoEConfig, MoELayer, results
from moe_ref.errors import UsageError
from moe_ref.placement import Placement


@pytest.fixture
def made(monkeypatch):
    """(scheduler, transport) of every engine that was looked for."""
    seen: list[tuple[str, str]] = []

    def find(layer, scheduler, transport):
        seen.append((scheduler, transport))
        return object()

    monkeypatch.setattr(engine_choice, "_find_engines", find)
    yield seen
    engine_choice._last.clear()


def test_a_layer_is_looked_at_once(made):
    layer = MoELayer(MoEConfig(32, 16, 4, 2), world=2)
    assert engine_for(layer) is engine_for(layer)
    assert made == [("spare_warps", "auto")]


def test_whatever_decides_the_engine_is_looked_at_again(made, monkeypatch):
    layer = MoELayer(MoEConfig(32, 16, 4, 2), world=2)
    engines = [engine_for(layer)]
    layer.placement = Placement.from_replicas([[0, 1]] * 4, 2)
    engines.append(engine_for(layer))
    layer.config = layer.config.replace(max_tokens=7)
    engines.append(engine_for(layer))
    engines.append(engine_for(layer, transport="put_signal"))
    monkeypatch.setenv("MOE_REF_SCHEDULER", "tickets")
    engines.append(engine_for(layer))
    layer.double()
    engines.append(engine_for(layer))
    assert len({id(engine) for engine in engines}) == len(engines) == len(made)
    assert made[3:] == [("spare_warps", "put_signal"), ("tickets", "auto"), ("tickets", "auto")]


def test_an_empty_variable_is_as_good_as_none(made, monkeypatch):
    layer = MoELayer(MoEConfig(32, 16, 4, 2), world=2)
    for name in ("SCHEDULER", "TRANSPORT", "DEADLINE_S", "CACHE", "NO_CACHE", "COMMIT"):
        monkeypatch.delenv(f"MOE_REF_{name}", raising=False)
    unset = (compiler.cache_folder(), deadline_s(), results._commit())
    for name in ("SCHEDULER", "TRANSPORT", "DEADLINE_S", "CACHE", "NO_CACHE", "COMMIT"):
        monkeypatch.setenv(f"MOE_REF_{name}", "")
    engine_for(layer)
    assert made == [("spare_warps", "auto")]
    assert (compiler.cache_folder(), deadline_s(), results._commit()) == unset


ODD = {
    "router": (lambda layer: layer.router.half(), "router_EH is torch.float16 in a layer of torch.bfloat16"),
    "router's bias": (lambda layer: layer.router.float(), "router_bias_E is torch.float32"),
    "down": (lambda layer: setattr(layer, "down_proj", nn.Parameter(layer.down_proj.float())), "down_XHD is"),
    "strides": (
        lambda layer: setattr(layer, "down_proj", nn.Parameter(layer.down_proj.transpose(1, 2).contiguous().mT)),
        "down_XHD is not contiguous",
    ),
    "device": (lambda layer: layer.shared_expert.to("meta"), "shared_up_VH is on meta, but x is on cpu"),
    "bias's device": (
        lambda layer: layer.router.register_buffer("selection_bias", torch.zeros(4, device="meta")),
        "selection_bias_E is on meta, but x is on cpu",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_weights_that_the_kernel_would_misread_are_refused(name: str) -> None:
    """A parameter that was changed alone, after the layer was made."""
    config = MoEConfig(32, 16, 4, 2, dtype="bfloat16", router_bias=True, selection_bias=True, shared_intermediate=16)
    layer = MoELayer(config)
    check_weights(layer_weights(layer), torch.bfloat16, torch.device("cpu"))
    change, message = ODD[name]
    change(layer)
    with pytest.raises(UsageError, match=f"parameter {message}.*kernel takes it as it lies"):
        check_weights(layer_weights(layer), torch.bfloat16, torch.device("cpu"))


def test_a_router_in_fp32_is_no_odd_weight() -> None:
    layer = MoELayer(MoEConfig(32, 16, 4, 2, dtype="bfloat16"))
    layer.router.float()
    check_weights(layer_weights(layer), torch.bfloat16, torch.device("cpu"))
