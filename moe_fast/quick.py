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
from moe_fast.weights import ChainWeights, stored_weights

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer

_environment: Any = os.environ
_VARIABLES = [_environment.encodekey(name) for name in ("MOE_REF_SCHEDULER", "MOE_REF_TRANSPORT")]
"""What the environment says about an engine, and how to ask; see `moe_fast.engine_choice`."""

_known: WeakKeyDictionary[MoELayer, Quick] = WeakKeyDictionary()


class Quick:
    """What the last long call of a layer found, and how to call again.

    Of the layer it keeps no tensor and no module: what is replaced is to be freed.
    """

    def __init__(self, layer: MoELayer, engine: Engine, weights: ChainWeights, values: tuple[int, ...]) -> None:
        """weights: as `layer_weights` gave them, checked, the router as the kernel takes it. values: what the kernel
        was launched with; behind x, y and S they stay as they are as long as nothing has changed."""
        self.engine, self.deadline_s, self.rest = engine, engine.deadline_s, values[3:]
        self.decided = (layer.config, layer.placement, layer.world)
        self.variables = [*map(_environment._data.get, _VARIABLES)]
        self.dtype, self.hidden, self.most = layer.config.torch_dtype, layer.config.hidden, engine.max_tokens
        self.device = weights.up_XUH.device
        self.kind = self.device.type
        self.seen = [None if value is None else (value.data_ptr(), value.dtype, value.shape) for value in weights]

    def holds(self, layer: MoELayer) -> bool:
        """Whether everything that the kernel was launched with, but x, is as it was."""
        config, placement, world = self.decided
        if layer.config is not config or layer.placement is not placement or layer.world is not world:
            return False
        if self.engine.deadline_s != self.deadline_s or self.variables != [*map(_environment._data.get, _VARIABLES)]:
            return False
        try:
            weights = stored_weights(layer)
        except KeyError:
            return False
        for value, seen in zip(weights, self.seen, strict=True):
            if value is None or seen is None:
                if value is not seen:
                    return False
                continue
            address, dtype, shape = seen
            # in this order: a tensor that isn't strided has no address
            if not value.is_contiguous() or value.data_ptr() != address:
                return False
            if value.dtype is not dtype or value.shape != shape:
                return False
        return True

    def call(self, layer: MoELayer, x: Any) -> Tensor | None:
        """y, or None where the long way is to be taken."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self.kind):
            return None
        if type(x) is not Tensor or x.dtype is not self.dtype or x.device != self.device or not x.is_contiguous():
            return None
        shape = x.shape
        tokens = x.numel() // self.hidden
        if not shape or shape[-1] != self.hidden or not 0 < tokens <= self.most or not self.holds(layer):
            return None
        engine = self.engine
        engine.errors.raise_if_failed(self.deadline_s)
        # a dimension of size 1 can have any stride; the long way keeps it only where x isn't viewed as [S, H]
        y = torch.empty_like(x) if len(shape) == 2 else torch.empty_like(x, memory_format=torch.contiguous_format)
        engine.enqueue(current_stream(self.device), (x.data_ptr(), y.data_ptr(), tokens, *self.rest))
        return y


def remember(layer: MoELayer, engine: Engine, weights: ChainWeights, x: Tensor, y: Tensor) -> None:
    """After a plain forward of the long way: let the next one take the short way, if the layer is one for it."""
    shape, bias, values = engine.shape, weights.selection_bias_E, engine.last_values
    if shape.placed or shape.drops or shape.router_parts > 1:
        return
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        return
    # not so where there are no tokens, or where another thread has launched meanwhile, with another layer's parameters
    if values[:2] != (x.data_ptr(), y.data_ptr()):
        return
    known = _known.get(layer)
    if known is None or not known.holds(layer):
        _known[layer] = Quick(layer, engine, weights, values)


def call(layer: MoELayer, x: Any) -> Tensor | None:
    """y of a plain forward, or None where the long way is to be taken."""
    quick = _known.get(layer)
    return None if quick is None else quick.call(layer, x)


def forget() -> None:
    """Engines were closed."""
    _known.clear()
