"""Refusing bad loads at the border, before any solver sees them.

A solver is the wrong place to find out: HiGHS refuses a NaN bound, keeps the old one and then reports "optimal" with
the plan of the step before; with a negative load it reports "infeasible" while its solution array still holds numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_ref.replicas import Placement

MAX_TOTAL = 2**62
"""Largest total load: sums of two loads still fit in int64."""


class SolverError(RuntimeError):
    """A solver gave no answer, or one that failed its verification; no plan was produced."""


def _where(index: tuple[int, ...], axes: Sequence[str]) -> str:
    return ", ".join(f"{name} {i}" for name, i in zip(axes, index, strict=True))


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape))


def as_counts(values: Any, axes: Sequence[str]) -> np.ndarray:
    """Non-negative integers as contiguous int64.

    Args:
        values: anything array-like with len(axes) dimensions; floats are taken if every one is an integer.
        axes: what the dimensions count, singular ("rank", "expert"); used in messages.

    Raises:
        ValueError: wrong number of dimensions, or a NaN, infinite, negative, fractional or too large entry; the message
            names the first offending index.
        TypeError: entries that are not numbers.
    """
    array = np.asarray(values)
    if array.ndim != len(axes):
        raise ValueError(
            f"loads have shape {array.shape}, expected {len(axes)} dimensions: {' x '.join(axes)}; "
            "schedule takes the gathered counts of all ranks, replica_loads their sum over ranks"
        )
    if array.dtype.kind == "f":
        for mask, what in ((np.isnan(array), "NaN"), (np.isinf(array), "infinite")):
            if mask.any():
                raise ValueError(f"load of {_where(_first(mask), axes)} is {what}, expected a non-negative integer")
        fractional = array != np.floor(array)
        if fractional.any():
            index = _first(fractional)
            raise ValueError(f"load of {_where(index, axes)} is {array[index]}, expected a whole number of rows")
        if array.size and np.abs(array).max() > 2**53:
            index = _first(np.abs(array) > 2**53)
            raise ValueError(
                f"load of {_where(index, axes)} is {array[index]}: floats are exact only to 2^53; pass integers"
            )
    elif array.dtype.kind not in "iu":
        raise TypeError(f"loads have dtype {array.dtype}, expected integers")
    elif array.dtype == np.uint64 and array.size and array.max() > MAX_TOTAL:
        index = _first(array > MAX_TOTAL)
        raise ValueError(f"load of {_where(index, axes)} is {array[index]}, expected at most 2^62")
    counts = np.ascontiguousarray(array, dtype=np.int64)
    if counts.size:
        if counts.min() < 0:
            index = _first(counts < 0)
            raise ValueError(f"load of {_where(index, axes)} is {counts[index]}, expected a non-negative integer")
        # The float sum can't overflow; the exact one is taken only where it can't either.
        if counts.max() > MAX_TOTAL // counts.size and counts.sum(dtype=np.float64) >= MAX_TOTAL:
            index = _first(counts == counts.max())
            raise ValueError(
                f"loads add up to 2^62 or more (largest: {counts[index]} at {_where(index, axes)}); "
                "expected a smaller total"
            )
    return counts


def check_counts(counts_PE: Any, placement: Placement, expected_total: int | None = None) -> np.ndarray:
    """Gathered counts, int64 [P, E], checked against the placement.

    Args:
        counts_PE: rows of each source rank for each logical expert.
        placement: gives the number of experts and ranks.
        expected_total: tokens * top_k over *all* ranks; catches counts that were not gathered.

    Raises:
        ValueError: see `as_counts`; also sizes that do not match, or a total other than expected.
    """
    counts = as_counts(counts_PE, ("rank", "expert"))
    expected = (placement.num_ranks, placement.num_experts)
    if counts.shape != expected:
        raise ValueError(
            f"counts have shape {counts.shape}, expected {expected} = ranks x logical experts of the placement; "
            "gather the counts of every rank (a rank without tokens sends zeros) and use logical expert ids"
        )
    if expected_total is not None and (total := int(counts.sum())) != expected_total:
        raise ValueError(
            f"counts add up to {total} rows, expected {expected_total} = tokens * top_k over all ranks; "
            "were they gathered from every rank?"
        )
    return counts


def check_loads(load_E: Any, placement: Placement) -> np.ndarray:
    """Loads per logical expert, int64 [E], checked against the placement; raises ValueError like `check_counts`."""
    load = as_counts(load_E, ("expert",))
    if load.shape[0] != placement.num_experts:
        raise ValueError(f"got loads of {load.shape[0]} experts, expected {placement.num_experts} as in the placement")
    return load
