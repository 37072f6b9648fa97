"""Several scheduling groups in one world (FineMoE, sections 3 and 7).

A scheduling group is `group_size` consecutive ranks that hold every expert at least once and keep their tokens among
themselves. There are two reasons to have several:

* data parallelism is wider than replicas times expert parallelism: the same placement is repeated, group by group;
* a very large world: one group would balance best, but the all-to-all grows with it. Smaller groups balance less well,
  because a batch that is uneven between groups stays so; `balance_cost` says how much.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moe_ref.balance import flow_compiled
from moe_ref.balance.plan import Plan
from moe_ref.replicas import Placement


def repeat_placement(placement: Placement, groups: int) -> Placement:
    """The placement of a group, repeated over `groups` groups of consecutive ranks."""
    if groups < 1:
        raise ValueError(f"groups is {groups}, expected at least 1")
    size = placement.num_ranks
    return Placement.from_replicas(
        [[g * size + rank for g in range(groups) for rank in ranks] for ranks in placement.ranks_of_expert],
        groups * size,
    )


def split_placement(placement: Placement, group_size: int) -> list[tuple[Placement, np.ndarray]]:
    """Each group's own placement, ranks counted from its first; and the replica numbers in the world, int64 [E, D].

    Raises:
        ValueError: group_size doesn't divide the ranks, or an expert has no replica in a group.
    """
    if group_size < 1 or placement.num_ranks % group_size:
        legal = [n for n in range(1, placement.num_ranks + 1) if placement.num_ranks % n == 0]
        raise ValueError(f"group_size is {group_size}, expected a divisor of {placement.num_ranks} ranks: {legal}")
    kept = placement.__dict__.setdefault("_groups", {})
    if group_size not in kept:
        parts = []
        for first in range(0, placement.num_ranks, group_size):
            inside = [
                [(j, rank - first) for j, rank in enumerate(ranks) if first <= rank < first + group_size]
                for ranks in placement.ranks_of_expert
            ]
            for expert, replicas in enumerate(inside):
                if not replicas:
                    raise ValueError(
                        f"expert {expert} has no replica on ranks {first} to {first + group_size - 1}; every "
                        "scheduling group needs every expert (see moe_ref.balance.groups.repeat_placement)"
                    )
            part = Placement.from_replicas([[rank for _, rank in replicas] for replicas in inside], group_size)
            number_ED = np.full(part.rank_ED.shape, -1, dtype=np.int64)
            for expert, replicas in enumerate(inside):
                number_ED[expert, : len(replicas)] = [j for j, _ in replicas]
            parts.append((part, number_ED))
        kept[group_size] = parts
    return kept[group_size]


def plan_groups(
    counts_PE: np.ndarray, placement: Placement, group_size: int, solver: Callable[[np.ndarray, Placement], Plan]
) -> Plan:
    """One plan for the world in which every group serves its own tokens; the certificate is the busiest group's."""
    quota_PED = np.zeros((*counts_PE.shape, placement.max_replicas), dtype=np.int64)
    busiest, certificate = -1, frozenset[int]()
    for g, (part, number_ED) in enumerate(split_placement(placement, group_size)):
        first = g * group_size
        plan = solver(np.ascontiguousarray(counts_PE[first : first + group_size]), part)
        expert, replica = np.nonzero(number_ED >= 0)
        group_quota = quota_PED[first : first + group_size]
        group_quota[:, expert, number_ED[expert, replica]] = plan.quota_PED[:, expert, replica]
        if plan.max_load > busiest:
            busiest, certificate = plan.max_load, frozenset(first + rank for rank in plan.certificate)
    return Plan(placement, quota_PED, certificate)


def balance_cost(counts_PE: np.ndarray, placement: Placement, group_size: int) -> float:
    """Maximum load with groups divided by maximum load with one group over the same placement; 1.0 costs nothing."""
    whole = flow_compiled.solve(counts_PE.sum(axis=0), placement).max_load
    parts = split_placement(placement, group_size)
    grouped = max(
        flow_compiled.solve(counts_PE[g * group_size : (g + 1) * group_size].sum(axis=0), part).max_load
        for g, (part, _) in enumerate(parts)
    )
    return grouped / whole if whole else 1.0
