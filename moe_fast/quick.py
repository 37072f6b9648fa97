"""The short way of a fused layer's call: a plain forward that finds everything as the call before left it.

A call of the long way (`moe_fast.backend`) works out which engine a layer has, checks its parameters and its input, and
maps them onto the kernel's arguments. What it found is remembered; the next call only looks whether anything of it has
changed, and if nothing has, writes addresses and launches. Whatever is out of the ordinary (routing handed in,
statistics, gradients, autocast, replicas, a capacity, several ranks in one process, input that would be refused) takes
the long way, which does it or says what is wrong.

The kernel's launch is asynchronous, so the host's time only counts where the device waits for it: in small calls, and
there it is a fifth of the whole.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_fast.call import current_stream
from moe_fast.engine import Engine
from moe_fast.weights import ChainWeights

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer

VARIABLES = ("MOE_REF_SCHEDULER", "MOE_REF_TRANSPORT")
"""What the environment says about an engine, see `moe_fast.engine_choice`."""

_known: WeakKeyDictionary[MoELayer, Quick] = WeakKeyDictionary()


class Quick:
    """What the last long call of a layer found, and how to call again."""

    def __init__(self, layer: MoELayer, engine: Engine, weights: ChainWeights) -> None:
        """weights: as `layer_weights` gave them, checked, the router as the kernel takes it."""
        self.engine = engine
        self.decided = (layer.config, layer.placement, layer.world)
        self.variables = tuple(map(os.environ.get, VARIABLES))
        config, router = layer.config, layer.router
        self.dtype, self.hidden, self.most = config.torch_dtype, config.hidden, engine.max_tokens
        self.device: torch.device = weights.up_XUH.device
        shared: Any = layer._modules.get("shared_expert")
        self.modules = {"router": router, "shared_expert": shared}
        own, up = layer._parameters, layer.up_names
        self.places: list[tuple[dict[str, Any], str]] = [
            (router._parameters, "weight"), (own, up[0]), (own, "down_proj"), (router._buffers, "selection_bias"),
            (router._parameters, "bias"), (own, up[1]), (own, "down_proj_bias"),
        ]  # fmt: skip
        if shared is not None:
            self.places += [(shared._parameters, name) for name in ("up_proj", "down_proj", "gate")]
        found = [place.get(name) for place, name in self.places]
        self.complete = all(one is two for one, two in zip(found, weights, strict=False))
        # Of each what the long way has checked. Not the tensors themselves: one that is replaced is to be freed.
        self.seen = [
            (place, name, value.data_ptr(), value.dtype)
            for (place, name), value in zip(self.places, found, strict=True)
            if value is not None
        ]
        self.absent = [(p, n) for (p, n), value in zip(self.places, found, strict=True) if value is None]
        # that of the call that has just been: behind x, y and S the same as long as nothing has changed
        self.rest = engine.last_values[3:]

    def call(self, layer: MoELayer, x: Any) -> Tensor | None:
        """y, or None where the long way is to be taken."""
        if type(x) is not Tensor or x.dtype is not self.dtype or x.device != self.device or not x.is_contiguous():
            return None
        shape = x.shape
        tokens = x.numel() // self.hidden
        if not shape or shape[-1] != self.hidden or not 0 < tokens <= self.most:
            return None
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return None
        config, placement, world = self.decided
        if layer.config is not config or layer.placement is not placement or layer.world is not world:
            return None
        get = os.environ.get
        if self.variables != (get(VARIABLES[0]), get(VARIABLES[1])):
            return None
        modules = layer._modules
        if modules["router"] is not self.modules["router"]:
            return None
        if modules.get("shared_expert") is not self.modules["shared_expert"]:
            return None
        for place, name, address, dtype in self.seen:
            value = place.get(name)
            if value is None or value.data_ptr() != address or value.dtype is not dtype or not value.is_contiguous():
                return None
        for place, name in self.absent:
            if place.get(name) is not None:
                return None
        engine = self.engine
        engine.errors.raise_if_failed(engine.deadline_s)
        y = torch.empty_like(x)
        engine.enqueue(current_stream(self.device), (x.data_ptr(), y.data_ptr(), tokens, *self.rest))
        return y


def remember(layer: MoELayer, engine: Engine, weights: ChainWeights) -> None:
    """After a plain forward of the long way: let the next one take the short way, if the layer is one for it."""
    shape, bias = engine.shape, weights.selection_bias_E
    if shape.placed or shape.drops or shape.router_parts > 1:
        return
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        return
    quick = Quick(layer, engine, weights)
    if quick.complete:
        _known[layer] = quick


def call(layer: MoELayer, x: Any) -> Tensor | None:
    """y of a plain forward, or None where the long way is to be taken."""
    quick = _known.get(layer)
    return None if quick is None else quick.call(layer, x)


def forget() -> None:
    """Engines were closed."""
    _known.clear()
