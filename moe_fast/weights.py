"""Parameters of one rank's part of a layer, as both backends take them.

Letters: H hidden, D intermediate, U = D or 2 D (gated), E experts, X local slots, V and W the shared expert's U and D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moe_ref.errors import UsageError

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer


class ChainWeights(NamedTuple):
    """Parameters of one rank, None where the layer has none: router [E, H] and its bias [E], up [X, U, H] and its bias
    [X, U], down [X, H, D] and its bias [X, H], the shared expert's up [V, H], down [H, W] and gate [1, H]."""

    router_EH: Tensor
    up_XUH: Tensor
    down_XHD: Tensor
    selection_bias_E: Tensor | None = None
    router_bias_E: Tensor | None = None
    up_bias_XU: Tensor | None = None
    down_bias_XH: Tensor | None = None
    shared_up_VH: Tensor | None = None
    shared_down_HW: Tensor | None = None
    shared_gate_1H: Tensor | None = None


def layer_weights(layer: MoELayer) -> ChainWeights:
    """A layer's parameters as the chain takes them."""
    try:
        return stored_weights(layer)
    except KeyError:
        # something else stands in a parameter's place: a parametrization, a plain tensor
        router, shared = layer.router, layer.shared_expert
        return ChainWeights(
            router.weight,
            layer.up_parameter,
            layer.down_proj,
            router.selection_bias,
            router.bias,
            layer.up_bias_parameter,
            layer.down_proj_bias,
            *(() if shared is None else (shared.up_proj, shared.down_proj, shared.gate)),
        )


OWN, ROUTER, BUFFERS, SHARED = range(4)
"""Which of `parameter_stores`."""


def parameter_stores(layer: MoELayer) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any] | None]:
    """Where nn.Module keeps a layer's parameters, the router's, its buffers, and the shared expert's if there is one:
    as attributes they are found only after Python has searched the class in vain."""
    modules: dict[str, Any] = layer._modules
    router, shared = modules["router"], modules.get("shared_expert")
    return layer._parameters, router._parameters, router._buffers, None if shared is None else shared._parameters


def parameter_places(layer: MoELayer) -> tuple[tuple[int, str], ...]:
    """(OWN, ROUTER, BUFFERS or SHARED; name there) of every parameter in the order of `ChainWeights`, without those of
    a shared expert that the layer doesn't have."""
    up, up_bias = layer.up_names
    shared = () if layer._modules.get("shared_expert") is None else ("up_proj", "down_proj", "gate")
    return (
        (ROUTER, "weight"), (OWN, up), (OWN, "down_proj"), (BUFFERS, "selection_bias"), (ROUTER, "bias"),
        (OWN, up_bias), (OWN, "down_proj_bias"), *((SHARED, name) for name in shared),
    )  # fmt: skip


def stored_weights(layer: MoELayer) -> ChainWeights:
    """`layer_weights` straight from where nn.Module keeps them.

    Raises:
        KeyError: something else stands in a parameter's place.
    """
    stores: Any = parameter_stores(layer)
    return ChainWeights(*[stores[store][name] for store, name in parameter_places(layer)])


def check_weights(weights: ChainWeights, dtype: torch.dtype, device: torch.device) -> None:
    """The kernel is handed addresses and believes what it was compiled for; a layer can be changed tensor by tensor.

    Raises:
        UsageError: a parameter of another dtype than the layer's (the router may be fp32), on another device, or not
            contiguous; the message names it. The selection bias is copied if need be: it only has to be on the device.
    """
    for name, value in zip(ChainWeights._fields, weights, strict=True):
        if value is None or (value.dtype is dtype and value.device == device and value.is_contiguous()):
            continue
        found, legal = value.dtype, (dtype, torch.float32) if name == "router_EH" else (dtype,)
        if value.device != device:
            problem, remedy = f"is on {value.device}, but x is on {device}", f".to({str(device)!r})"
        elif name == "selection_bias_E":
            continue
        elif found not in legal:
            problem, remedy = f"is {found} in a layer of {dtype}", f".to({dtype})"
        elif not value.is_contiguous():
            problem, remedy = "is not contiguous", ".contiguous()"
        else:
            continue
        raise UsageError(f"parameter {name} {problem}; the kernel takes it as it lies in memory: {remedy}")
