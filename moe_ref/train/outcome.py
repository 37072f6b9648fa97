"""What a training run did, step by step.

Letters: T steps, L MoE layers, P ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moe_ref.placement import Placement
from moe_ref.stats import LayerStats
from moe_ref.train.balancing import plain_ratio


@dataclass
class Outcome:
    """What a run did; the same on every rank.

    Attributes:
        first_step: 0, or where it went on.
        losses: cross entropy of the global batch in bits per byte, per step, auxiliary losses apart.
        load_TLE: rows per expert, int64. counts_TLPE: the same per source rank. placement_TL: it was run with.
        scheduled_TL, plain_TL: maximum over mean rows of a rank, as it ran, and under plain expert parallelism.
        stage_seconds: per stage, summed over steps and layers, of the slowest rank. sync_seconds: likewise.
        moves, moved_bytes: experts re-placed. decisions: the managers' log.
        step_seconds: of each step, moves and checkpoints included, on this rank.
    """

    first_step: int = 0
    losses: list[float] = field(default_factory=list)
    load_TLE: list[np.ndarray] = field(default_factory=list)
    counts_TLPE: list[np.ndarray] = field(default_factory=list)
    placement_TL: list[list[Placement]] = field(default_factory=list)
    scheduled_TL: list[list[float]] = field(default_factory=list)
    plain_TL: list[list[float]] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    sync_seconds: float = 0.0
    moves: int = 0
    moved_bytes: int = 0
    decisions: list[dict[str, Any]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    def note_loads(self, all_stats: list[list[LayerStats]], replicas: int) -> None:
        """Add one step's loads (summed over its micro-batches) and ratios (averaged over them)."""
        counts = np.stack(
            [[s.record.counts_PE for s in stats if s.record.counts_PE is not None] for stats in all_stats]
        )
        self.counts_TLPE.append(counts.sum(axis=0))
        self.load_TLE.append(counts.sum(axis=(0, 2)))
        self.scheduled_TL.append(np.mean([[s.max_over_mean for s in stats] for stats in all_stats], axis=0).tolist())
        self.plain_TL.append(
            np.mean([[plain_ratio(c, replicas) for c in layers] for layers in counts], axis=0).tolist()
        )
        for stats in all_stats:
            for layer_stats in stats:
                for stage, seconds in layer_stats.record.seconds.items():
                    self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds
