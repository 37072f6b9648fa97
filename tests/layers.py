"""Layer configurations that tests share: one per family of features, small enough to be quick."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_ref import MoEConfig, MoELayer, Routing
from moe_ref.definition import definition, relative_error

SMALL = {"hidden": 32, "intermediate": 48, "experts": 10, "top_k": 3}

FAMILIES: dict[str, dict] = {
    "gated_silu": {},
    "gated_gelu": {"activation": "gelu"},
    "gated_relu": {"activation": "relu"},
    "plain_relu": {"gated": False, "activation": "relu"},
    "plain_gelu_bias": {"gated": False, "activation": "gelu", "expert_bias": True},
    "plain_silu": {"gated": False, "activation": "silu"},
    "not_renormalized": {"renormalize": False, "routed_scaling": 2.5},
    "sigmoid_bias_groups": {
        "scoring": "sigmoid",
        "selection_bias": True,
        "num_groups": 5,
        "top_groups": 2,
        "group_score": "top2_sum",
    },
    "softmax_groups": {"num_groups": 5, "top_groups": 3, "group_score": "max", "renormalize": False},
    "gpt_oss": {
        "activation": "clamped_swiglu",
        "interleaved": True,
        "expert_bias": True,
        "router_bias": True,
        "top_k_order": "before_scores",
        "renormalize": False,
        "clamp_limit": 0.4,
    },
    "sigmoid_before": {"scoring": "sigmoid", "top_k_order": "before_scores"},
    "shared": {"shared_intermediate": 24},
    "shared_gate": {"shared_intermediate": 40, "shared_gate": True},
    "shared_plain": {"gated": False, "activation": "relu", "shared_intermediate": 24},
    "top_1": {"top_k": 1, "renormalize": False},
    "top_all": {"top_k": 10},
}


def family(name: str, **changes) -> MoEConfig:
    """The config of a family, with changes."""
    return MoEConfig(**{**SMALL, **FAMILIES[name], **changes})


def dense(layer: MoELayer, x_SH: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The definition with a layer's weights."""
    biases = layer.up_bias_parameter, layer.down_proj_bias
    return definition(
        x_SH, routing, layer.config, layer.up_parameter, layer.down_proj, *biases, shared_SH=layer.shared(x_SH)
    )


def largest_error(
    layer: MoELayer, x_SH: torch.Tensor, routing: Routing | None, inputs: Sequence[torch.Tensor]
) -> float:
    """Of a layer against the definition: relative error of its output, and of its gradients with regard to `inputs`.

    routing: handed in; None for the layer's own gate, whose gradients are then compared, too.
    """
    y, expected = layer(x_SH, routing=routing), dense(layer, x_SH, routing or layer.gate(x_SH))
    got = torch.autograd.grad(y.square().sum(), inputs)
    want = torch.autograd.grad(expected.square().sum(), inputs)
    return max(relative_error(a, b) for a, b in zip((y, *got), (expected, *want), strict=True))
