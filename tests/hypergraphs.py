"""Random placements and loads for property tests, and the definition of the optimum by brute force."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from moe_ref.placement import Placement

LARGEST = 10**12


@st.composite
def placements(draw, max_ranks: int = 10, max_experts: int = 12) -> Placement:
    """Any placement: any replica counts, ranks that hold nothing included."""
    ranks = draw(st.integers(1, max_ranks))
    sets = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True)
    return Placement.from_replicas(draw(st.lists(sets, min_size=1, max_size=max_experts)), ranks)


@st.composite
def loads(draw, experts: int) -> np.ndarray:
    """Any loads: zeros, ties, up to 10^12, or one expert with everything."""
    size = draw(st.sampled_from([1, 3, 1000, LARGEST]))
    load = np.array(draw(st.lists(st.integers(0, size), min_size=experts, max_size=experts)), dtype=np.int64)
    if draw(st.integers(0, 9)) == 0:
        keep = draw(st.integers(0, experts - 1))
        load[np.arange(experts) != keep] = 0
    return load


@st.composite
def instances(draw, max_ranks: int = 10, max_experts: int = 12) -> tuple[Placement, np.ndarray]:
    """A placement and loads for it."""
    placement = draw(placements(max_ranks, max_experts))
    return placement, draw(loads(placement.num_experts))


@st.composite
def count_instances(draw, max_ranks: int = 6, max_experts: int = 8) -> tuple[Placement, np.ndarray]:
    """A placement and counts [P, E] for it, from a seed: ranks and experts without rows are frequent."""
    placement = draw(placements(max_ranks, max_experts))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (placement.num_ranks, placement.num_experts)
    counts = rng.integers(0, draw(st.sampled_from([2, 50, 10**9])), size=shape)
    counts *= rng.random(shape[0])[:, None] < 0.8
    return placement, counts * (rng.random(shape[1]) < 0.8)


def brute_force_density(load: np.ndarray, placement: Placement) -> Fraction:
    """max over all non-empty sets of ranks of (load of experts inside) / (number of ranks), by trying every set."""
    subsets = np.arange(1, 2**placement.num_ranks)
    trapped = np.zeros(len(subsets), dtype=np.int64)
    for expert, ranks in enumerate(placement.ranks_of_expert):
        members = sum(1 << rank for rank in ranks)
        trapped += np.where(subsets & members == members, load[expert], 0)
    sizes = np.array([int(s).bit_count() for s in subsets])
    return max(Fraction(int(trapped[sizes == size].max()), int(size)) for size in np.unique(sizes))


def rank_loads(rows_ED: np.ndarray, placement: Placement) -> np.ndarray:
    """Rows of each rank under a division."""
    there = placement.rank_ED >= 0
    total = np.zeros(placement.num_ranks, dtype=np.int64)
    np.add.at(total, placement.rank_ED[there], rows_ED[there])
    return total
