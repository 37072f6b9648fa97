"""Placements for known loads: more replicas for hot experts, and the best of many random arrangements.

Two steps (FineMoE, section 6.3). How many replicas: greedily one more for the expert with the largest load per replica,
until the slots are full. Where: draw arrangements at random and keep the one whose maximum density is smallest.

The density must not be scored on the predicted loads alone. There, arrangements look perfect that have no slack at all
(disjoint pairs of ranks, each pair exactly at the mean), and the first batch that differs breaks them. So every
candidate is scored on the same several noisy draws around the prediction.

Letters: G ranks, E experts, X slots of a rank.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from moe_ref.balance import flow_compiled
from moe_ref.balance.checks import as_counts
from moe_ref.replicas import Placement


def greedy_replica_counts(load_E: Any, total_slots: int, num_ranks: int) -> list[int]:
    """Replicas of each expert: all slots used, each expert at least once and at most once per rank.

    The next slot goes to the largest load per replica, ties to the lower id.

    Raises:
        ValueError: fewer slots than experts, or more than experts x ranks.

    >>> greedy_replica_counts([90, 30, 20, 0], 8, 4)
    [4, 2, 1, 1]
    """
    load = as_counts(load_E, ("expert",))
    experts = len(load)
    if not experts <= total_slots <= experts * num_ranks:
        raise ValueError(
            f"{total_slots} slots for {experts} experts on {num_ranks} ranks; expected {experts} (one replica each) to "
            f"{experts * num_ranks} (every expert on every rank)"
        )
    counts = [1] * experts
    heap = [(-float(load[e]), e) for e in range(experts)]
    heapq.heapify(heap)
    for _ in range(total_slots - experts):
        while counts[heap[0][1]] == num_ranks:
            heapq.heappop(heap)
        expert = heap[0][1]
        counts[expert] += 1
        heapq.heapreplace(heap, (-float(load[expert]) / counts[expert], expert))
    return counts


def random_arrangement(
    counts_E: list[int], load_E: np.ndarray, num_ranks: int, slots: int, rng: np.random.Generator
) -> Placement:
    """Put the replicas on ranks, hot experts first: on the ranks with most free slots, chance among equals.

    Taking the ranks with most free slots always works out, whatever the counts (Gale-Ryser). Single replicas can't give
    load away, so they go to the rank that is least loaded with single replicas so far.
    """
    free = np.full(num_ranks, slots)
    pinned = np.zeros(num_ranks)
    ranks_of: list[tuple[int, ...]] = [()] * len(counts_E)
    for expert in sorted(range(len(counts_E)), key=lambda e: (-counts_E[e], -int(load_E[e]), e)):
        count = counts_E[expert]
        order = np.lexsort((rng.random(num_ranks), pinned if count == 1 else np.zeros(num_ranks), -free))
        ranks = order[:count]
        free[ranks] -= 1
        if count == 1:
            pinned[ranks] += load_E[expert]
        ranks_of[expert] = tuple(int(r) for r in ranks)
    return Placement.from_replicas(ranks_of, num_ranks)


def noisy_draws(load_E: np.ndarray, draws: int, noise: float, rng: np.random.Generator) -> np.ndarray:
    """Loads around a prediction, times log-normal noise, rounded: int64 [draws, E]; the first is the prediction."""
    factor = np.exp(rng.normal(0.0, noise, (draws, len(load_E))))
    factor[0] = 1.0
    return np.rint(load_E * factor).astype(np.int64)


def mean_ratio(placement: Placement, load_NE: np.ndarray) -> float:
    """Mean over batches of the smallest possible maximum load, in units of the mean load (1.0 is perfect)."""
    ratios = []
    for load in load_NE:
        mean = int(load.sum()) / placement.num_ranks
        ratios.append(flow_compiled.solve(load, placement).max_load / mean if mean else 1.0)
    return float(np.mean(ratios))


def asymmetric(
    load_E: Any,
    num_ranks: int,
    slots: int,
    *,
    candidates: int = 24,
    draws: int = 12,
    noise: float = 0.8,
    uniform: float = 0.25,
    seed: int = 0,
) -> Placement:
    """A placement made for predicted loads; the same arguments give the same placement.

    Args:
        load_E: predicted rows of each expert, non-negative integers; only their proportions matter.
        num_ranks: G.
        slots: X, replicas that every rank holds.
        candidates: arrangements that are drawn.
        draws: noisy loads that each is scored on.
        noise: standard deviation of the logarithm of a load around its prediction.
        uniform: share of the load that is taken to be equal for all experts: what a prediction doesn't know. Without
            it an expert that was cold gets a single replica, and when it becomes hot, nothing can be done.
        seed: of arrangements and noise.

    Raises:
        ValueError: bad loads or too few or too many slots, see `greedy_replica_counts`.
    """
    load = as_counts(load_E, ("expert",))
    if not 0.0 <= uniform <= 1.0:
        raise ValueError(f"uniform is {uniform}, expected a share from 0 to 1")
    # As shares of 2^30, so that rounding to whole rows doesn't matter and nothing overflows.
    total = int(load.sum())
    share_E = load / total if total else np.full(len(load), 1 / len(load))
    load = np.rint(((1 - uniform) * share_E + uniform / len(load)) * 2**30).astype(np.int64)
    counts = greedy_replica_counts(load, num_ranks * slots, num_ranks)
    rng = np.random.default_rng(seed)
    trials = noisy_draws(load, draws, noise, rng)
    best, best_score = None, np.inf
    for _ in range(max(candidates, 1)):
        candidate = random_arrangement(counts, load, num_ranks, slots, rng)
        score = mean_ratio(candidate, trials)
        if best is None or score < best_score:
            best, best_score = candidate, score
    assert best is not None
    best.check_slots(slots)
    return best
