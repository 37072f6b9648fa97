"""A placement manager per MoE layer, and the moves that it asks for (FineMoE, section 6.4)."""

from __future__ import annotations

import numpy as np

from moe_ref.placement.adaptive import PlacementManager
from moe_ref.placement.moves import MoveCost
from moe_ref.train.balancing import make_placement
from moe_ref.train.optimizer import ReplicaOptimizer
from moe_ref.train.outcome import Outcome
from moe_ref.train.replacement import bytes_per_expert, replace
from moe_ref.train.settings import TrainJob

FLOPS = 10e9
"""Nominal rate of a rank, and below of the link between two: all ranks must decide alike, so nothing is measured."""

BYTES_PER_S = 1e9


class Managers:
    """Watches all layers of a run. In mode eplb a check re-packs by the loads seen since the last one, without asking
    whether it pays; in mode plain nothing ever moves."""

    def __init__(self, job: TrainJob, optimizer: ReplicaOptimizer) -> None:
        self._job, self._optimizer = job, optimizer
        self._seen: dict[str, np.ndarray] = {}
        self._managers: dict[str, PlacementManager] = {}
        if job.balancing == "scheduled" and job.interval and job.group_size is None:
            rows = job.sequences * job.context * job.top_k / optimizer.training.world.num_ranks
            for name, layer in optimizer.training.layers.items():
                # forward, and twice as much backward
                step_s = 3 * rows * layer.config.flops_per_row / FLOPS
                cost = MoveCost(bytes_per_expert(optimizer, name), BYTES_PER_S, BYTES_PER_S)
                self._managers[name] = PlacementManager(
                    layer.placement, cost, step_s, window=job.interval, interval=job.interval, always=job.always
                )

    def observe(self, step: int, outcome: Outcome) -> None:
        """Take the loads of the step that has just ended, and move if it is time; every rank calls it."""
        names, loads = list(self._optimizer.training.layers), outcome.load_TLE[-1]
        placements = {}
        if self._job.balancing == "eplb" and self._job.interval:
            for name, load_E in zip(names, loads, strict=True):
                self._seen[name] = self._seen.get(name, 0) + load_E
            if (step + 1) % self._job.interval == 0:
                ranks = self._optimizer.training.world.num_ranks
                for name, load_E in self._seen.items():
                    placements[name] = make_placement("eplb", ranks, self._job.experts, self._job.replicas, load_E)
                self._seen = {}
        for (name, manager), load_E in zip(self._managers.items(), loads, strict=False):
            decision = manager.observe(load_E)
            if decision is None:
                continue
            outcome.decisions.append({"layer": name, "step": step + 1, "ratio": decision.ratio,
                                      "moved": decision.moved, "reason": decision.reason})  # fmt: skip
            if decision.moved:
                placements[name] = manager.placement
        if placements:
            report = replace(self._optimizer, placements)
            outcome.moves += report.moves
            outcome.moved_bytes += report.num_bytes
