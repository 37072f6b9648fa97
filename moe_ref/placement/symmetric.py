"""Placements for unknown loads: nothing is known about the experts, so no rank and no pair of ranks is special.

A symmetric placement gives every expert d replicas and spreads the replica sets so that no set of ranks traps more
experts than another (FineMoE, section 6.2). Which graph is best depends on how many edges there are to draw:

replicas  experts                 recipe
1         any                     round robin: no freedom, for comparison
2         G(G-1)/2 or more        every pair of ranks equally often; 8 x 32: complete graph + perfect matching
2         exactly G^2/4           complete bipartite graph K_{n,n}
2         fewer                   circulant with steps by spectral search
3 and up  any                     translates of base blocks in Z_G whose differences are flat
all       any                     every expert everywhere

Distinct edges before repeated ones: a second expert on the same pair of ranks adds load where a new pair would add a
way out. What is left over when E is no multiple of an orbit goes to the emptiest ranks, to pairs not used yet; slots
then differ by at most one where E * d is no multiple of G.

Letters: G ranks, E experts, d replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from moe_ref.placement.circulant import best_steps, circulant_edges, matching_edges
from moe_ref.replicas import Placement

MAX_BLOCKS = 1500
"""Base blocks that are looked at for each choice; where there are more, that many are drawn with a fixed seed."""


@dataclass(frozen=True)
class Construction:
    """A placement and the name of how it was made."""

    placement: Placement
    recipe: str


def check_sizes(num_ranks: int, num_experts: int, replicas: int) -> None:
    """Refuse sizes for which there is no placement; the message names legal ones.

    Raises:
        ValueError: less than one rank, expert or replica; more replicas than ranks (two copies on one rank serve no
            purpose); or so few replicas in all that a rank would hold nothing.
    """
    for name, value in (("ranks", num_ranks), ("experts", num_experts), ("replicas", replicas)):
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    if replicas > num_ranks:
        raise ValueError(
            f"{replicas} replicas of an expert need as many ranks, there are {num_ranks}; use 1 to {num_ranks} replicas"
        )
    if num_experts * replicas < num_ranks:
        least = -(-num_ranks // num_experts)
        raise ValueError(
            f"{num_experts} experts x {replicas} replicas leave {num_ranks - num_experts * replicas} of {num_ranks} "
            f"ranks empty; use at least {least} replicas, at least {-(-num_ranks // replicas)} experts, or at most "
            f"{num_experts * replicas} ranks"
        )


def fill_blocks(blocks: list[tuple[int, ...]], count: int, num_ranks: int, size: int) -> None:
    """Append `count` blocks of `size` ranks: the emptiest ranks first, among them pairs that meet least; ties by id.

    Taking the emptiest ranks every time keeps the slots within one of each other if they were so before.
    """
    slots = np.zeros(num_ranks, dtype=np.int64)
    meets = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for given in blocks:
        slots[list(given)] += 1
        for a, b in combinations(given, 2):
            meets[a, b] += 1
            meets[b, a] += 1
    for _ in range(count):
        block: list[int] = []
        for _ in range(size):
            met = meets[block].sum(axis=0)
            taken = np.zeros(num_ranks, dtype=bool)
            taken[block] = True
            block.append(int(np.lexsort((np.arange(num_ranks), met, slots, taken))[0]))
        for a, b in combinations(block, 2):
            meets[a, b] += 1
            meets[b, a] += 1
        slots[block] += 1
        blocks.append(tuple(block))


def _pairs(num_ranks: int, num_experts: int) -> tuple[list[tuple[int, ...]], str]:
    """Two replicas: as many distinct edges as there are, evenly drawn."""
    every = num_ranks * (num_ranks - 1) // 2
    sweeps, rest = divmod(num_experts, num_ranks)
    edges: list[tuple[int, ...]] = []
    if num_experts >= every:
        # One sweep g - g + s per step s = 1, 2, .., G - 1, 1, ..: after G - 1 of them every pair was drawn twice.
        steps = [1 + sweep % (num_ranks - 1) for sweep in range(sweeps)]
        for step in steps:
            edges += [(g, (g + step) % num_ranks) for g in range(num_ranks)]
        whole, extra = divmod(num_experts, every)
        names = ["complete graph" if whole == 1 else f"complete graph x {whole}"]
        if extra:
            matching = num_ranks % 2 == 0 and extra == num_ranks // 2
            names.append("perfect matching" if matching else f"{extra} more edges by the same sweeps")
        if num_ranks % 2 == 0 and rest >= num_ranks // 2:
            done = 2 * steps.count(num_ranks // 2) > steps.count(1) + steps.count(num_ranks - 1)
            edges += matching_edges(num_ranks)[0] if done else [(g, g + num_ranks // 2) for g in range(num_ranks // 2)]
            rest -= num_ranks // 2
        fill_blocks(edges, rest, num_ranks, 2)
        rest = 0
    elif num_ranks % 2 == 0 and num_experts == (num_ranks // 2) ** 2:
        edges += circulant_edges(num_ranks, tuple(range(1, num_ranks // 2 + 1, 2)))
        names, rest = [f"complete bipartite graph K_{{{num_ranks // 2},{num_ranks // 2}}}"], 0
    else:
        half = num_ranks % 2 == 0 and rest >= num_ranks // 2
        steps = best_steps(num_ranks, sweeps, half)
        edges += circulant_edges(num_ranks, steps)
        names = [f"circulant with steps {', '.join(map(str, steps))}"] if steps else []
        rest -= num_ranks // 2 * half
    if rest:
        fill_blocks(edges, rest, num_ranks, 2)
        names.append(f"{rest} edges between the emptiest ranks")
    return edges, " + ".join(names)


def _rotations(block: Sequence[int], num_ranks: int) -> set[tuple[int, ...]]:
    return {tuple(sorted((x + g) % num_ranks for x in block)) for g in range(num_ranks)}


def base_blocks(num_ranks: int, count: int, size: int) -> list[tuple[int, ...]]:
    """Base blocks whose translates cover every difference, and so every pair of ranks, as equally as possible.

    Greedy: each block is the candidate that keeps the sum of squared difference counts smallest, after candidates whose
    translates are already there, and after those that a translation maps to themselves (their translates repeat).
    """
    rest = range(1, num_ranks)
    if comb(num_ranks - 1, size - 1) <= MAX_BLOCKS:
        candidates = np.array([(0, *others) for others in combinations(rest, size - 1)])
    else:
        rng = np.random.default_rng(num_ranks * 1000 + size)
        drawn = rng.random((MAX_BLOCKS, num_ranks - 1)).argpartition(size - 1, axis=1)[:, : size - 1] + 1
        candidates = np.unique(np.concatenate([np.zeros((MAX_BLOCKS, 1), int), np.sort(drawn, axis=1)], 1), axis=0)
    n = len(candidates)
    difference = (candidates[:, :, None] - candidates[:, None, :]) % num_ranks
    counts_ND = np.zeros((n, num_ranks), dtype=np.int64)
    np.add.at(counts_ND, (np.repeat(np.arange(n), size * size), difference.ravel()), 1)
    # A block is mapped to itself by g exactly if the difference g occurs `size` times in it.
    periodic_N = (counts_ND[:, 1:] == size).any(axis=1)
    counts_ND[:, 0] = 0
    used_N = np.zeros(n, dtype=np.int64)
    index = {tuple(int(x) for x in block): i for i, block in enumerate(candidates)}
    total_D = np.zeros(num_ranks, dtype=np.int64)
    chosen = []
    for _ in range(count):
        spread_N = ((total_D + counts_ND) ** 2).sum(axis=1)
        best = int(np.lexsort((np.arange(n), spread_N, periodic_N, used_N))[0])
        block = tuple(int(x) for x in candidates[best])
        for rotation in _rotations(block, num_ranks):
            if rotation in index:
                used_N[index[rotation]] += 1
        total_D += counts_ND[best]
        chosen.append(block)
    return chosen


def symmetric(num_ranks: int, num_experts: int, replicas: int) -> Construction:
    """A placement with `replicas` copies of every expert, made without knowing loads; deterministic.

    Every rank holds E * d / G experts; where that is no integer, some hold one more.

    Raises:
        ValueError: see `check_sizes`.

    >>> symmetric(8, 32, 2).recipe
    'complete graph + perfect matching'
    """
    check_sizes(num_ranks, num_experts, replicas)
    if replicas == 1:
        blocks: list[tuple[int, ...]] = [(e % num_ranks,) for e in range(num_experts)]
        recipe = "round robin"
    elif replicas == num_ranks:
        blocks = [tuple((e + g) % num_ranks for g in range(num_ranks)) for e in range(num_experts)]
        recipe = "every expert on every rank"
    elif replicas == 2:
        blocks, recipe = _pairs(num_ranks, num_experts)
    else:
        count, rest = divmod(num_experts, num_ranks)
        bases = base_blocks(num_ranks, count, replicas)
        blocks = [tuple((x + g) % num_ranks for x in base) for base in bases for g in range(num_ranks)]
        names = [f"translates of {count} base block{'s' * (count > 1)} in Z_{num_ranks}"] if count else []
        if rest:
            fill_blocks(blocks, rest, num_ranks, replicas)
            names.append(f"{rest} blocks of the emptiest ranks")
        recipe = " + ".join(names)
    placement = Placement.from_replicas(blocks, num_ranks)
    placement.check_slots()
    return Construction(placement, recipe)
