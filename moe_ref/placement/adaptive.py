"""When to re-place: a manager watches loads, predicts, and weighs the gain against the cost (FineMoE, section 6.4).

Token scheduling evens out every batch; the placement only has to keep up with the long run. At every check the manager
predicts loads by a moving average, asks the density formula what the present placement makes of the prediction and of
the batches that it averages (they show how far a batch strays), and if that is worse than a threshold makes an
asymmetric candidate. It moves if what the candidate saves until the next check is worth more than the move. While
nothing has to move, checks become rarer.

It proposes; who trains executes, between optimiser steps. It is deterministic: managers that saw the same loads propose
the same. Every check leaves a line in the log.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_ref.balance.checks import check_loads
from moe_ref.placement.asymmetric import asymmetric, mean_ratio
from moe_ref.placement.moves import MoveCost, MovePlan, plan_moves, relabelled
from moe_ref.replicas import Placement


@dataclass(frozen=True)
class Decision:
    """One check.

    Attributes:
        step: steps seen so far.
        ratio: predicted maximum over mean load of the present placement.
        candidate_ratio: the same of the candidate; None if none was made.
        gain_s: seconds that the candidate saves until the next check.
        cost_s: seconds of the move.
        plan: the transfers; None if none were planned.
        moved: whether the candidate became the placement.
        reason: in words.
    """

    step: int
    ratio: float
    candidate_ratio: float | None
    gain_s: float
    cost_s: float
    plan: MovePlan | None
    moved: bool
    reason: str


class PlacementManager:
    """Watches one layer's loads and proposes placements.

    Args:
        placement: the present one; its ranks must hold equally many replicas.
        cost: of moving a replica.
        step_s: seconds of expert computation of one step at perfect balance; at ratio r it takes r * step_s.
        window: steps of the moving average.
        threshold: predicted ratio up to which the present placement is kept without further thought.
        interval: steps between checks; doubles after every check that moves nothing, up to `max_interval`.
        max_interval: see there.
        always: make and take a candidate at every check, whatever it costs, to measure that cost.
    """

    def __init__(
        self,
        placement: Placement,
        cost: MoveCost,
        step_s: float,
        *,
        window: int = 20,
        threshold: float = 1.02,
        interval: int = 50,
        max_interval: int = 400,
        always: bool = False,
    ) -> None:
        for name, value in (("window", window), ("interval", interval), ("max_interval", max_interval)):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1 step")
        if not threshold >= 1.0:
            raise ValueError(f"threshold is {threshold}, expected a ratio of at least 1.0 (1.0 is perfect balance)")
        if not step_s > 0:
            raise ValueError(f"step_s is {step_s}, expected a positive number of seconds")
        placement.check_slots(placement.slots)
        self.placement = placement
        self.log: list[Decision] = []
        self._cost, self._step_s, self._always = cost, step_s, always
        self._threshold, self._first_interval, self._max_interval = threshold, interval, max(max_interval, interval)
        self._interval, self._since = interval, 0
        self._recent: deque[np.ndarray] = deque(maxlen=window)
        self._step = 0

    def prediction(self) -> np.ndarray:
        """Moving average of the experts' shares, as parts of 2^30, int64 [E]."""
        # Shares first: a batch with more tokens says no more about popularity than another.
        shares = [load / load.sum() for load in self._recent if load.sum()]
        if not shares:
            return np.ones(self.placement.num_experts, dtype=np.int64)
        return np.rint(np.mean(shares, axis=0) * 2**30).astype(np.int64)

    def observe(self, load_E: Any) -> Decision | None:
        """Take the loads of one step (all ranks together, int [E]); at a check, decide.

        Returns:
            The decision, or None between checks. If `moved`, `placement` is the new one and `plan` leads to it.

        Raises:
            ValueError: bad loads.
        """
        self._recent.append(check_loads(load_E, self.placement))
        self._step += 1
        self._since += 1
        if self._since < self._interval:
            return None
        self._since = 0
        decision = self._decide()
        self.log.append(decision)
        if decision.moved or self._always:
            self._interval = self._first_interval
        else:
            self._interval = min(self._interval * 2, self._max_interval)
        return decision

    def _decide(self) -> Decision:
        predicted = self.prediction()
        seen = np.stack([predicted, *self._recent])
        ratio = mean_ratio(self.placement, seen)
        if ratio <= self._threshold and not self._always:
            reason = f"predicted ratio {ratio:.3f} is within {self._threshold}"
            return Decision(self._step, ratio, None, 0.0, 0.0, None, False, reason)
        made = asymmetric(predicted, self.placement.num_ranks, self.placement.slots, seed=self._step)
        candidate = relabelled(made, self.placement)
        candidate_ratio = mean_ratio(candidate, seen)
        plan = plan_moves(self.placement, candidate, self._cost)
        gain_s = (ratio - candidate_ratio) * self._step_s * self._first_interval
        cost_s = self._cost.seconds(plan)
        moved = self._always or gain_s > cost_s
        saves = f"saves {gain_s:.3g} s until the next check and costs {cost_s:.3g} s"
        reason = f"ratio {ratio:.3f} -> {candidate_ratio:.3f} {saves}" + ("" if moved else ": not worth it")
        if moved:
            self.placement = candidate
        return Decision(self._step, ratio, candidate_ratio, gain_s, cost_s, plan, moved, reason)
