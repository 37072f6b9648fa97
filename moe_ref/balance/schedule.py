"""One way in: counts and placement go in, a plan comes out.

Method        what it is
------        ----------
plain         no choice: every expert has one replica
flow          exact, plain Python, the default (`flow`)
flow_compiled the same steps and the same answer, compiled (`flow_compiled`)
lp            the paper's linear program in HiGHS, rounded to whole rows (`lp`)

All of them reach the same, smallest possible maximum load. `flow` and `flow_compiled` give the same plan bit for bit;
`lp` may divide the rows otherwise, but always in the same way for the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moe_ref.balance import flow, flow_compiled, lp
from moe_ref.balance.checks import check_counts, check_loads
from moe_ref.balance.flow import ReplicaLoads
from moe_ref.balance.groups import plan_groups
from moe_ref.balance.plan import Plan
from moe_ref.balance.routing import local_rows, route
from moe_ref.replicas import Placement


def _flow(counts_PE: np.ndarray, placement: Placement) -> Plan:
    loads = flow.solve(counts_PE.sum(axis=0), placement, local_rows(counts_PE, placement))
    return Plan(placement, route(counts_PE, loads.rows_ED, placement), loads.certificate)


METHODS: dict[str, Callable[[np.ndarray, Placement], Plan]] = {
    "plain": Plan.plain,
    "flow": _flow,
    "flow_compiled": flow_compiled.plan,
    "lp": lp.plan,
}

SOLVERS: dict[str, Callable[[np.ndarray, Placement], ReplicaLoads]] = {
    "flow": flow.solve,
    "flow_compiled": flow_compiled.solve,
    "lp": lp.solve,
}


def schedule(
    counts_PE: Any,
    placement: Placement,
    method: str = "flow",
    *,
    expected_total: int | None = None,
    group_size: int | None = None,
) -> Plan:
    """Plan of one micro-batch: how many rows every source rank sends to every replica of every expert.

    A pure function of its arguments: every rank that holds the same gathered counts gets the same plan.

    Args:
        counts_PE: rows of each source rank for each logical expert, gathered from all ranks; integers [P, E].
        placement: replica sets.
        method: "flow", "flow_compiled", "lp" or "plain"; see the head of this module.
        expected_total: tokens * top_k over all ranks; if given, the counts must add up to it.
        group_size: ranks of a scheduling group (see `groups`); None for one group of all ranks.

    Raises:
        ValueError: bad counts (the message names rank and expert), sizes that don't match, an unknown method.
        SolverError: the solver gave no answer or a wrong one. Never an old plan.

    >>> placement = Placement.from_replicas([[0, 1], [1, 2], [2, 0]], num_ranks=3)
    >>> plan = schedule([[4, 0, 2], [4, 0, 2], [0, 1, 2]], placement)
    >>> plan.rank_loads.tolist(), sorted(plan.certificate)
    ([5, 5, 5], [0, 1, 2])
    >>> plan = schedule([[4, 0, 0], [4, 1, 0], [4, 0, 2]], placement)  # twelve rows trapped on ranks 0 and 1
    >>> plan.rank_loads.tolist(), sorted(plan.certificate)
    ([6, 6, 3], [0, 1])
    """
    solver = METHODS.get(method)
    if solver is None:
        raise ValueError(f"unknown method {method!r}, expected one of {', '.join(METHODS)}")
    counts = check_counts(counts_PE, placement, expected_total)
    if group_size is None or group_size == placement.num_ranks:
        return solver(counts, placement)
    return plan_groups(counts, placement, group_size, solver)


def replica_loads(load_E: Any, placement: Placement, method: str = "flow") -> ReplicaLoads:
    """Division of loads between replicas, without saying which source rank sends what.

    Args:
        load_E: rows of each logical expert, integers [E].
        placement: replica sets.
        method: "flow", "flow_compiled" or "lp".

    Raises:
        ValueError, SolverError: as `schedule`.
    """
    solver = SOLVERS.get(method)
    if solver is None:
        raise ValueError(f"unknown method {method!r}, expected one of {', '.join(SOLVERS)}")
    return solver(check_loads(load_E, placement), placement)
