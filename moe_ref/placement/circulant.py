"""Circulant graphs whose steps are found by their spectrum.

A circulant on Z_G joins g with g + s for each step s. It is regular whatever the steps, but not equally good: load
spreads over the graph like heat, and the second largest eigenvalue of the adjacency matrix says how slowly. Steps 1, 2,
3, 4 on 64 ranks make a thick ring in which a hot neighbourhood stays hot; steps such as 1, 7, 19, 27 make an expander.
The eigenvalues of a circulant are sums of cosines, so thousands of step sets are scored with one matrix product.
"""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np

MAX_SCORED = 40_000
"""Step sets that are scored; where there are more, that many are drawn with a fixed seed."""


def second_eigenvalue(num_ranks: int, step_sets: np.ndarray) -> np.ndarray:
    """Largest eigenvalue but the trivial one, of each circulant; float64 [N] for steps int [N, number of steps].

    >>> bool(second_eigenvalue(4, np.array([[1]]))[0] < 1e-9)   # the square: 2, 0, 0, -2
    True
    """
    frequency = np.arange(1, num_ranks // 2 + 1)
    # Edges g, g + s contribute 2 cos(2 pi f s / G); a step of half the ring is its own inverse and counts once.
    wave_SF = 2 * np.cos(2 * np.pi * np.outer(np.arange(num_ranks), frequency) / num_ranks)
    if num_ranks % 2 == 0:
        wave_SF[num_ranks // 2] /= 2
    used_NS = np.zeros((len(step_sets), num_ranks))
    np.add.at(used_NS, (np.arange(len(step_sets))[:, None], step_sets), 1.0)
    return (used_NS @ wave_SF).max(axis=1)


def best_steps(num_ranks: int, count: int, half_step: bool = False) -> tuple[int, ...]:
    """Distinct steps in 1 .. (num_ranks - 1) // 2 with the smallest second eigenvalue, ties to the smaller steps.

    Args:
        num_ranks: G.
        count: number of steps, each worth G edges.
        half_step: add the step G / 2 (G even), worth G / 2 edges.
    """
    choices = range(1, (num_ranks - 1) // 2 + 1)
    if not 0 <= count <= len(choices):
        raise ValueError(f"{num_ranks} ranks have {len(choices)} distinct steps, {count} were asked for")
    tail = [num_ranks // 2] if half_step else []
    if count in (0, len(choices)):
        return (*choices[:count], *tail)
    if comb(len(choices), count) <= MAX_SCORED:
        sets = np.array(list(combinations(choices, count)))
    else:
        rng = np.random.default_rng(num_ranks * 1000 + count)
        sets = np.sort(rng.random((MAX_SCORED, len(choices))).argpartition(count, axis=1)[:, :count] + 1, axis=1)
        sets = np.unique(sets, axis=0)
    full = np.concatenate([sets, np.full((len(sets), len(tail)), num_ranks // 2, dtype=sets.dtype)], axis=1)
    score = np.round(second_eigenvalue(num_ranks, full), 9)
    # Multiplying all steps by a unit of Z_G gives the same graph with other names: among equals take the smallest.
    return tuple(int(s) for s in full[int(score.argmin())])


def circulant_edges(num_ranks: int, steps: tuple[int, ...]) -> list[tuple[int, int]]:
    """Edges of a circulant, step by step; but for the step G / 2, every rank is the first replica equally often."""
    edges = []
    for step in steps:
        starts = step if 2 * step == num_ranks else num_ranks
        edges += [(g, (g + step) % num_ranks) for g in range(starts)]
    return edges


def matching_edges(num_ranks: int) -> list[list[tuple[int, int]]]:
    """The rounds of a round-robin tournament: num_ranks - 1 perfect matchings that together are the complete graph.

    Only for an even number of ranks. Rank G - 1 stays, the others rotate.
    """
    if num_ranks % 2:
        raise ValueError(f"perfect matchings need an even number of ranks, not {num_ranks}")
    moving = num_ranks - 1
    rounds = []
    for r in range(moving):
        pairs = [(moving, r)]
        pairs += [((r + i) % moving, (r - i) % moving) for i in range(1, num_ranks // 2)]
        rounds.append(pairs)
    return rounds
