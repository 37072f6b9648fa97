"""The counts exchange: how many rows every rank has for every expert, which all ranks must know before a plan.

It also carries what must stop a forward on all ranks alike: that some rank refused its input, or has other settings.

Letters: S tokens of a rank, E experts, P ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moe_ref.dispatch import count_routes
from moe_ref.gate import Routing

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer


def route(layer: MoELayer, x_SH: Sequence[Tensor], given: Sequence[Routing] | None) -> tuple[list[Routing], str]:
    """Gate or check every local rank's routing; returns it and the first error ("" if none).

    An error is not raised at once: the other ranks are already on their way to the counts exchange, which carries it.
    """
    routings, problem = [], ""
    for i, x in enumerate(x_SH):
        try:
            if given is None:
                routings.append(layer.gate(x))
            else:
                given[i].check_values(layer.config)
                routings.append(given[i])
        except (ValueError, TypeError) as error:
            at = f"rank {layer.world.local_ranks[i]}: " if layer.world.num_ranks > 1 else ""
            problem = problem or f"{at}{error}"
            nothing = x.new_zeros(x.shape[0], layer.config.top_k)
            routings.append(Routing(torch.full_like(nothing, -1, dtype=torch.int64), nothing))
    return routings, problem


_HEAD = 3
"""Integers before the counts of a rank: S, whether it refused its input, a hash of its settings."""


def _settings(layer: MoELayer, dtype: torch.dtype) -> int:
    """Hash of what all ranks must have alike in one forward, or their rows won't fit together."""
    return zlib.crc32(f"{dtype} {layer.schedule_method}".encode())


def refuse(layer: MoELayer) -> None:
    """Take part in the counts exchange only to say that this rank's input was refused; all other ranks then raise."""
    world = layer.world
    if len(world.local_ranks) < world.num_ranks:
        head = [[0, 1, 0, *[0] * (2 * layer.config.experts)]]
        world.gather(np.array(head))


def exchange_counts(
    layer: MoELayer, before: Sequence[Routing], after: Sequence[Routing], problem: str, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All-gather rows per expert (before and after capacity), S, errors and settings.

    Args:
        before, after: every local rank's routing before and after capacity.
        problem: what is wrong with a local rank's input, "" if nothing is.
        dtype: that the forward computes in.

    Returns:
        int64: S of every rank, [P]; rows per source rank and expert before and after capacity, [P, E].

    Raises:
        ValueError: some rank refused its input; every rank raises, so that nobody waits for it.
    """
    experts, world = layer.config.experts, layer.world
    mine = []
    for full, kept in zip(before, after, strict=True):
        head = [int(full.expert_SK.shape[0]), int(bool(problem)), _settings(layer, dtype)]
        counts = [count_routes(r.expert_SK, experts) for r in (full, kept)]
        mine.append(np.concatenate([head, *counts]))
    all_PN = world.gather(np.stack(mine))
    refused = np.flatnonzero(all_PN[:, 1])
    if len(refused):
        raise ValueError(problem or f"rank {int(refused[0])} refused its input; its own message says why")
    others = np.flatnonzero(all_PN[:, 2] != all_PN[0, 2])
    if len(others):
        raise ValueError(f"ranks {others.tolist()} run with another dtype (autocast?) or schedule_method than rank 0")
    tokens_P, before_PE, counts_PE = all_PN[:, 0], all_PN[:, _HEAD : _HEAD + experts], all_PN[:, _HEAD + experts :]
    if (before_PE.sum(axis=1) > tokens_P * layer.config.top_k).any():
        raise RuntimeError("a rank counted more routes than its tokens have: the gathered counts are not what was sent")
    return tokens_P, before_PE, counts_PE
