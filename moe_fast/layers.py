"""What both backends ask about a layer and the machine before they run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from moe_ref.errors import UsageError
from moe_ref.world import DistributedWorld

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer


def group_of(layer: MoELayer) -> tuple[int, int, Any]:
    """(rank, ranks, process group) of a layer whose process holds one rank.

    Raises:
        UsageError: several simulated ranks in one process.
    """
    world = layer.world
    if isinstance(world, DistributedWorld):
        return world.rank, world.num_ranks, world.group
    if world.num_ranks != 1:
        raise UsageError(
            f"this backend runs one rank per process, the layer simulates {world.num_ranks}; use --ranks 1 or torchrun "
            '(backend="fused" runs several ranks on one GPU)'
        )
    return 0, 1, None


def is_placed(layer: MoELayer) -> bool:
    """Whether a plan decides where rows go: any placement other than experts in blocks, one replica each."""
    return not layer.placement.in_blocks


def check_layer(name: str, problems: Sequence[str]) -> None:
    """Raise UsageError, naming everything about the layer that a backend can't do."""
    if problems:
        raise UsageError(f'backend="{name}" can\'t run this layer: ' + "; ".join(problems) + '. Use backend="ref".')


def no_device() -> str | None:
    """Why no CUDA device can be used; None if one can."""
    if torch.cuda.is_available():
        return None
    built = "this torch is a CPU build" if torch.version.cuda is None else "no device or driver is visible"
    return f"needs a CUDA device: {built}"
