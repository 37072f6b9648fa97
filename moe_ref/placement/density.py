"""How good a placement can be: the maximum density of an induced subgraph, exactly (FineMoE, section 5).

Ranks are vertices, an expert is a hyperedge over its replica set, its load the weight of the edge. Load is trapped in a
set S of ranks if its expert has all replicas in S; whoever schedules, some rank of S computes at least the trapped load
divided by |S|. The largest such quotient over all S is the optimum of the linear program, so

    m = max over non-empty S of  load(S) / |S|

and m divided by the mean load per rank is what the placement costs: 1.0 is perfect balance.

Exact arithmetic: the flow gives the maximum rounded up to whole rows and a set that proves it. Scale the loads by |S|
of the best set so far, and a better set, if there is one, shows up as a whole row more. The density grows with every
round, so it ends; two or three rounds are usual.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from moe_ref.balance import flow_compiled
from moe_ref.balance.checks import MAX_TOTAL, check_loads
from moe_ref.replicas import Placement


@dataclass(frozen=True)
class Density:
    """The densest set of ranks.

    Attributes:
        value: m, rows per rank, exact.
        witness: the set S with load(S) / |S| = m; all ranks where balance can be perfect.
        mean: total load / number of ranks.
    """

    value: Fraction
    witness: frozenset[int]
    mean: Fraction

    @property
    def max_over_mean(self) -> float:
        """What the busiest rank computes at least, in units of the mean; 1.0 for no load at all."""
        return float(self.value / self.mean) if self.mean else 1.0


def trapped_load(load_E: np.ndarray, placement: Placement, ranks: frozenset[int]) -> int:
    """Load of the experts whose replicas all lie in `ranks`: load(S)."""
    return sum(int(load_E[e]) for e, held_by in enumerate(placement.ranks_of_expert) if ranks.issuperset(held_by))


def max_density(load_E: Any, placement: Placement) -> Density:
    """The exact maximum induced-subgraph density and a set that attains it.

    Args:
        load_E: rows of each logical expert, non-negative integers [E]; in sum below 2^62 / ranks.

    Raises:
        ValueError: bad loads, see `moe_ref.balance.checks`.

    >>> placement = Placement.from_replicas([[0, 1], [1, 2], [2, 0]], num_ranks=3)
    >>> densest = max_density([9, 1, 2], placement)
    >>> densest.value, sorted(densest.witness)
    (Fraction(9, 2), [0, 1])
    """
    load = check_loads(load_E, placement)
    total, ranks = int(load.sum()), placement.num_ranks
    if total * ranks >= MAX_TOTAL:
        raise ValueError(f"loads add up to {total}, expected less than 2^62 / {ranks} ranks for an exact density")
    witness = frozenset(range(ranks))
    while True:
        trapped, size = trapped_load(load, placement, witness), len(witness)
        found = flow_compiled.solve(load * size, placement)
        if found.max_load == trapped:
            return Density(Fraction(trapped, size), witness, Fraction(total, ranks))
        witness = found.certificate
