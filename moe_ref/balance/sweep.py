"""Skew sweep: the paper's Figure 8, all rivals in one table.

For each skew s: batches from the load model, each rival's maximum load per batch in units of the mean (1.0 is perfect
balance). Those that plan ahead get the true popularity and, in a second column, a stale one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moe_ref.balance.loads import LoadModel, as_prediction
from moe_ref.balance.rivals import PREDICTIVE, RIVALS

SKEWS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)


def max_over_mean(rows_TP: np.ndarray, mean_T: np.ndarray) -> np.ndarray:
    """Rows of the busiest rank over the mean of each batch, float64 [T]; 1.0 for a batch without rows."""
    return np.where(mean_T > 0, rows_TP.max(axis=1) / np.where(mean_T > 0, mean_T, 1.0), 1.0)


def skew_sweep(
    num_ranks: int,
    num_experts: int,
    replicas: int,
    steps: int,
    *,
    skews: Sequence[float] = SKEWS,
    noise: float = 0.2,
    rows_per_rank: int = 8192,
    seed: int = 0,
    progress: Callable[[float], Any] = lambda skew: None,
) -> list[dict[str, Any]]:
    """One row per skew: {"zipf": s, "<rival>": {"mean", "worst"}, "<rival>_stale": {...}}, ratios to the mean load.

    For "padded", whose padding is work as well, the ratio is to the mean of the real rows.

    Args:
        num_ranks, num_experts, replicas: P, E and copies of an expert (slots in all: E * replicas, a multiple of P).
        steps: batches per skew.
        skews: Zipf exponents.
        noise, rows_per_rank, seed: of the load model.
        progress: called with each skew when it is done.
    """
    table = []
    for skew in skews:
        model = LoadModel(num_ranks, num_experts, skew, noise, rows_per_rank, seed)
        counts_TPE = np.stack(list(model.batches(steps)))
        mean_T = counts_TPE.sum(axis=(1, 2)) / num_ranks
        true, stale = as_prediction(model.popularity()), as_prediction(model.stale_popularity())
        row: dict[str, Any] = {"zipf": skew}
        for name, rival in RIVALS.items():
            for suffix, planned in (("", true), ("_stale", stale)) if name in PREDICTIVE else (("", true),):
                ratio = max_over_mean(rival(counts_TPE, planned, replicas), mean_T)
                row[name + suffix] = {"mean": float(ratio.mean()), "worst": float(ratio.max())}
        table.append(row)
        progress(skew)
    return table
