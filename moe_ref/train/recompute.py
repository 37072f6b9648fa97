"""Activation recomputation that keeps its plans: memory of activations for a second forward, without a second solve.

    y = recompute(block, x)    # as torch.utils.checkpoint: activations inside are dropped, and made again in backward

The recomputed forward moves tokens again, by the plan of the first: no counts are gathered, and nothing is solved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from moe_ref.replay import PlanMemory


def recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), its inner activations dropped and recomputed in the backward.

    Every rank must recompute the same regions in the same order: the exchanges inside are collective.
    """
    memory = PlanMemory()
    # Without this, a rank would stop recomputing at its own last saved tensor, perhaps before an exchange that others
    # enter.
    with set_checkpoint_early_stop(False):
        return checkpoint(
            function,
            *arguments,
            use_reentrant=False,
            context_fn=lambda: (memory.recording(), memory.replaying()),
            preserve_rng_state=False,
        )
