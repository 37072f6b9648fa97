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
from weakref import ref

import torch
from torch import Tensor

from moe_fast.call import current_stream
from moe_fast.engine import Engine
from moe_fast.weights import SHARED, ChainWeights, parameter_places, parameter_stores

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer

_environment: Any = os.environ
_VARIABLES = _SCHEDULER, _TRANSPORT = [_environment.encodekey(f"MOE_REF_{name}") for name in ("SCHEDULER", "TRANSPORT")]
"""What the environment says about an engine, and how to ask; see `moe_fast.engine_choice`."""

_known: dict[ref[MoELayer], Quick] = {}
"""By a weak reference to the layer. What `WeakKeyDictionary` is, but for a frame of Python at every look."""


class Quick:
    """What the last long call of a layer found, and how to call again.

    Of the layer it keeps no tensor and no module: what is replaced is to be freed.
    """

    def __init__(self, layer: MoELayer, engine: Engine, weights: ChainWeights, values: tuple[int, ...]) -> None:
        """weights: as `layer_weights` gave them, checked, the router as the kernel takes it. values: what the kernel
        was launched with; behind x, y and S they stay as they are as long as nothing has changed."""
        self.engine, self.deadline_s, self.rest = engine, engine.deadline_s, values[3:]
        self.config, self.placement, self.world = layer.config, layer.placement, layer.world
        self.variables = tuple(map(_environment._data.get, _VARIABLES))
        self.dtype, self.hidden, self.most = layer.config.torch_dtype, layer.config.hidden, engine.max_tokens
        self.device = weights.up_XUH.device
        self.kind = self.device.type
        places = list(zip(parameter_places(layer), weights, strict=False))
        self.has_shared = parameter_stores(layer)[SHARED] is not None
        self.present = [(*at, v.data_ptr(), v.dtype, v.shape) for at, v in places if v is not None]
        self.absent = [at for at, v in places if v is None]

    def holds(self, layer: MoELayer) -> bool:
        """Whether everything that the kernel was launched with, but x, is as it was."""
        if layer.config is not self.config or layer.placement is not self.placement or layer.world is not self.world:
            return False
        get, (scheduler, transport) = _environment._data.get, self.variables
        if get(_SCHEDULER) != scheduler or get(_TRANSPORT) != transport or self.engine.deadline_s != self.deadline_s:
            return False
        try:
            stores: Any = parameter_stores(layer)
            if (stores[SHARED] is not None) is not self.has_shared:
                return False
            for store, name, address, dtype, shape in self.present:
                value = stores[store][name]
                # in this order: a tensor that isn't strided has no address
                if value is None or not value.is_contiguous() or value.data_ptr() != address:
                    return False
                if value.dtype is not dtype or value.shape != shape:
                    return False
            for store, name in self.absent:
                if stores[store][name] is not None:
                    return False
        except KeyError:
            # something else stands in a parameter's place
            return False
        return True


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
    known = _known.get(ref(layer))
    if known is None or not known.holds(layer):
        # a key of the layer's own, with a callback: it goes with the layer
        _known.pop(ref(layer), None)
        _known[ref(layer, _forget_one)] = Quick(layer, engine, weights, values)


def _forget_one(key: ref[MoELayer]) -> None:
    """A layer is gone."""
    _known.pop(key, None)


def call(layer: MoELayer, x: Any) -> Tensor | None:
    """y of a plain forward, or None where the long way is to be taken."""
    quick = _known.get(ref(layer))
    if quick is None or torch.is_grad_enabled() or torch.is_autocast_enabled(quick.kind):
        return None
    if type(x) is not Tensor or x.dtype is not quick.dtype or x.device != quick.device or not x.is_contiguous():
        return None
    shape = x.shape
    tokens = x.numel() // quick.hidden
    if not shape or shape[-1] != quick.hidden or not 0 < tokens <= quick.most or not quick.holds(layer):
        return None
    engine = quick.engine
    engine.errors.raise_if_failed(quick.deadline_s)
    # a dimension of size 1 can have any stride; the long way keeps it only where x isn't viewed as [S, H]
    y = torch.empty_like(x) if len(shape) == 2 else torch.empty_like(x, memory_format=torch.contiguous_format)
    engine.enqueue(current_stream(quick.device), (x.data_ptr(), y.data_ptr(), tokens, *quick.rest))
    return y


def forget() -> None:
    """Engines were closed."""
    _known.clear()
