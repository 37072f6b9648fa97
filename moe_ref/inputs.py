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


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype of autocast on a kind of device, "cpu" or "cuda", or None where it is off."""
    known = kind in ("cuda", "cpu") or torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if known and torch.is_autocast_enabled(kind) else None


def compute_dtype(own: torch.dtype, cast: torch.dtype | None) -> torch.dtype:
    """What a layer of dtype `own` computes in, as a linear layer would, if autocast asks for `cast` (None: it is off):
    float64 is left alone."""
    return own if cast is None or own == torch.float64 else cast


def router_weight(layer: MoELayer) -> Tensor:
    """The parameter whose device and dtype stand for the layer's.

    Straight from where nn.Module keeps it, if nothing else (a parametrization, a plain tensor) stands in its place.
    """
    router: Any = layer._modules["router"]
    weight = router._parameters.get("weight")
    return router.weight if weight is None else weight


def tokens_per_rank(layer: MoELayer, x: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One [S_p, H] per local rank; a single tensor [..., H] is split over the simulated ranks.

    Raises:
        TypeError, ValueError: wrong type, shape, dtype or device, or more tokens than config.max_tokens.
    """
    config, world = layer.config, layer.world
    own, hidden = config.torch_dtype, config.hidden
    if isinstance(x, Tensor):
        if x.dim() == 0 or x.size(-1) != hidden:
            raise ValueError(f"x has shape {list(x.shape)}, expected [..., hidden] = [..., {hidden}]")
        parts = world.split(x if x.dim() == 2 else x.reshape(-1, hidden))
    else:
        count = len(world.local_ranks)
        want = f"a tensor [..., {hidden}] or a list of {count} tensors [tokens, {hidden}]"
        if not isinstance(x, (list, tuple)):
            raise TypeError(f"x is {type(x).__name__}, expected {want}")
        other = next((type(part).__name__ for part in x if not isinstance(part, Tensor)), None)
        if len(x) != count or other:
            raise TypeError(f"x is a list of {len(x)} items{f', one a {other}' if other else ''}, expected {want}")
        parts = list(x)
    weight = router_weight(layer)
    device, held = weight.device, weight.dtype
    if held != own and layer.down_proj.dtype != own:
        raise TypeError(
            f"the layer's parameters are {held} but its config says {own}; "
            "build the layer with config.replace(dtype=...) instead of casting it"
        )
    for rank, part in zip(world.local_ranks, parts, strict=True):
        if part.dim() != 2 or part.size(1) != hidden:
            raise ValueError(f"{_of(rank, layer)} has shape {list(part.shape)}, expected [tokens, {hidden}]")
        if part.dtype != own and not _casts(part.dtype, own, device):
            raise TypeError(f"{_of(rank, layer)} is {part.dtype}, expected {own}; x.to(layer.config.torch_dtype)")
        if part.device != device:
            raise ValueError(f"{_of(rank, layer)} is on {part.device}, but the layer is on {device}; move one of them")
        if part.size(0) > config.max_tokens:
            raise ValueError(
                f"{_of(rank, layer)} has {part.shape[0]} tokens, but buffers are sized for {config.max_tokens}; "
                "raise MoEConfig.max_tokens or split the batch"
            )
    return parts


def _casts(given: torch.dtype, own: torch.dtype, device: torch.device) -> bool:
    """Whether autocast takes tokens of another dtype."""
    cast = compute_dtype(own, autocast_dtype(device.type))
    return cast != own and given.is_floating_point and given.itemsize < 8


def _of(rank: int, layer: MoELayer) -> str:
    """What an error calls a rank's tokens."""
    return f"x of rank {rank}" if layer.world.num_ranks > 1 else "x"


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
