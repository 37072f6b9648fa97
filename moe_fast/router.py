"""The router's weight as the kernel takes it: one of fp32 goes in parts that tensor cores multiply.

Letters: H hidden, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer


def router_parts(router_EH: Tensor, dtype: torch.dtype) -> Tensor:
    """A router of fp32 as the kernel takes it: summands side by side, [E, 3 H] in 16 bits for a layer of 16 bits, and
    [E, 2 H], what TF32 has of it and the rest, for a layer of fp32.

    In bfloat16 their sum is the router's every bit; in float16 it is what lies above 2**-25.
    """
    rest, parts = router_EH.float(), []
    if dtype == torch.float32:
        high = (rest.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
        return torch.cat([high, rest - high], dim=1)
    for _ in range(3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return torch.cat(parts, dim=1)


def is_fp32_router(layer: MoELayer) -> bool:
    """Whether the router is kept in more bits than the layer has (DeepSeek)."""
    return layer.router.weight.dtype.itemsize > layer.config.element_size


_parts: dict[int, tuple[ref[Tensor], tuple[int, int], Tensor]] = {}
"""By id of a router's weight of fp32: the weight, its version and address, and its parts, until the weight is gone. A
CUDA graph keeps the parts of its capture."""


def router_operand(layer: MoELayer, weight: Tensor) -> Tensor:
    """The router's weight as the kernel takes it; one of fp32 is split again only after it has changed."""
    dtype = layer.config.torch_dtype
    if weight.dtype.itemsize <= dtype.itemsize < 4:
        return weight
    if weight.is_inference():
        # made under torch.inference_mode, where nothing counts its changes
        return router_parts(weight, dtype)
    key, now = id(weight), (weight._version, weight.data_ptr())
    found = _parts.get(key)
    if found is None or found[0]() is not weight or found[1] != now:
        held = ref(weight, lambda _: _parts.pop(key, None))
        found = _parts[key] = (held, now, router_parts(weight.detach(), dtype))
    return found[2]
