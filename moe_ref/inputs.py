"""What a layer is given, checked once at the border: tokens and routing per local rank.

Nothing here reads a value from the device: shapes, dtypes and devices are known to the host, so a backend that must not
wait for the GPU can be called behind these checks. Values (ids in range, finite weights) are the reference's to check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_ref.gate import Routing

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer


def compute_dtype(layer: MoELayer) -> torch.dtype:
    """The config's dtype, or under autocast the autocast dtype, as for a linear layer (float64 is left alone)."""
    own, kind = layer.config.torch_dtype, layer.router.weight.device.type
    if own == torch.float64 or not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return own
    return torch.get_autocast_dtype(kind)


def tokens_per_rank(layer: MoELayer, x: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One [S_p, H] per local rank; a single tensor [..., H] is split over the simulated ranks.

    Raises:
        TypeError, ValueError: wrong type, shape, dtype or device, or more tokens than config.max_tokens.
    """
    config, count = layer.config, len(layer.world.local_ranks)
    own = config.torch_dtype
    if isinstance(x, Tensor):
        if x.dim() == 0 or x.shape[-1] != config.hidden:
            raise ValueError(f"x has shape {list(x.shape)}, expected [..., hidden] = [..., {config.hidden}]")
        parts = layer.world.split(x.reshape(-1, config.hidden))
    else:
        want = f"a tensor [..., {config.hidden}] or a list of {count} tensors [tokens, {config.hidden}]"
        if not isinstance(x, (list, tuple)):
            raise TypeError(f"x is {type(x).__name__}, expected {want}")
        other = next((type(part).__name__ for part in x if not isinstance(part, Tensor)), None)
        if len(x) != count or other:
            raise TypeError(f"x is a list of {len(x)} items{f', one a {other}' if other else ''}, expected {want}")
        parts = list(x)
    device, held = layer.router.weight.device, layer.router.weight.dtype
    if held != own and layer.down_proj.dtype != own:
        raise TypeError(
            f"the layer's parameters are {held} but its config says {own}; "
            "build the layer with config.replace(dtype=...) instead of casting it"
        )
    cast = compute_dtype(layer) != own
    for rank, part in zip(layer.world.local_ranks, parts, strict=True):
        at = f"x of rank {rank}" if layer.world.num_ranks > 1 else "x"
        if part.dim() != 2 or part.shape[1] != config.hidden:
            raise ValueError(f"{at} has shape {list(part.shape)}, expected [tokens, {config.hidden}]")
        if part.dtype != own and not (cast and part.dtype.is_floating_point and part.dtype.itemsize < 8):
            raise TypeError(f"{at} is {part.dtype}, expected {own}; x.to(layer.config.torch_dtype)")
        if part.device != device:
            raise ValueError(f"{at} is on {part.device}, but the layer is on {device}; move one of them")
        if part.shape[0] > config.max_tokens:
            raise ValueError(
                f"{at} has {part.shape[0]} tokens, but buffers are sized for {config.max_tokens}; "
                "raise MoEConfig.max_tokens or split the batch"
            )
    return parts


def routing_per_rank(layer: MoELayer, routing: Any, parts: list[Tensor]) -> list[Routing] | None:
    """One routing per local rank with int64 ids and fp32 (fp64) weights, or None for the gate.

    Raises:
        TypeError, ValueError: wrong type, shape, dtype or device.
    """
    if routing is None:
        return None
    sizes, device = [part.shape[0] for part in parts], parts[0].device
    if isinstance(routing, Routing):
        return routing.checked(layer.config, sum(sizes), device).split(sizes)
    if not isinstance(routing, (list, tuple)) or len(routing) != len(parts):
        got = f"a list of {len(routing)}" if isinstance(routing, (list, tuple)) else type(routing).__name__
        raise TypeError(f"routing is {got}, expected a moe_ref.Routing or a list of {len(parts)}")
    for item in routing:
        if not isinstance(item, Routing):
            raise TypeError(f"routing holds a {type(item).__name__}, expected moe_ref.Routing")
    return [item.checked(layer.config, size, device) for item, size in zip(routing, sizes, strict=True)]
