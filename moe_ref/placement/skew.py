"""Up to which skew a placement balances perfectly, whatever expert is the popular one.

Popularity follows Zipf's law: the k-th most popular expert has weight k^-s. A replica set can't hold more than its
share: with d replicas the hottest expert alone breaks perfection when its weight p1 > d / G. That is the limit for any
placement with d replicas; a good one comes close to it.
"""

from __future__ import annotations

import numpy as np

from moe_ref.balance import flow_compiled
from moe_ref.layout import ceil_div
from moe_ref.replicas import Placement

STEP = 0.01
LARGEST = 3.0


def zipf_popularity(num_experts: int, skew: float) -> np.ndarray:
    """Weights k^-s of the k-th most popular expert, k from 1, in sum 1; float64 [E]."""
    weight = np.arange(1, num_experts + 1, dtype=np.float64) ** -skew
    return weight / weight.sum()


def is_perfect(load_E: np.ndarray, placement: Placement) -> bool:
    """Whether some schedule gives no rank more than the mean, rounded up."""
    mean = ceil_div(int(load_E.sum()), placement.num_ranks)
    return flow_compiled.solve(load_E, placement).max_load == mean


def perfect_up_to_zipf(
    placement: Placement, orders: int = 20, seed: int = 0, rows_per_rank: int = 8192
) -> float | None:
    """Largest skew s, in steps of 0.01, up to which loads without noise balance perfectly in every order of popularity.

    Args:
        placement: replica sets.
        orders: random orders of popularity that must all be perfect.
        seed: of the orders.
        rows_per_rank: mean load of a rank.

    Returns:
        The skew, at most 3.0 (where it stops looking); None if not even equal loads are balanced.
    """
    rng = np.random.default_rng(seed)
    shuffled = [rng.permutation(placement.num_experts) for _ in range(orders)]
    reached = None
    for step in range(round(LARGEST / STEP) + 1):
        rows = np.rint(zipf_popularity(placement.num_experts, step * STEP) * rows_per_rank * placement.num_ranks)
        load_E = rows.astype(np.int64)
        if not all(is_perfect(load_E[order], placement) for order in shuffled):
            return reached
        reached = round(step * STEP, 2)
    return reached


def zipf_limit(num_ranks: int, num_experts: int, replicas: int) -> float:
    """Largest skew, to 0.01 and at most 3.0, at which the hottest expert still fits: p1 * G / d <= 1."""
    fits = [
        step
        for step in range(round(LARGEST / STEP) + 1)
        if zipf_popularity(num_experts, step * STEP)[0] * num_ranks <= replicas
    ]
    return round(max(fits, default=0) * STEP, 2)
