"""How a training run balances its tokens: placement, planner and, for one of them, a manager that re-places.

    plain        expert parallelism: groups of P / d ranks hold every expert once, tokens stay in their group
    eplb         replica counts by predicted load, sorted packing, the rows of an expert split evenly (EPLB-style)
    scheduled    token scheduling over replicas, batch by batch (this project), symmetric or adaptive placement

All have the same memory: d E slots in all. Letters: E experts, P ranks, d replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moe_ref import balance
from moe_ref.balance.groups import repeat_placement
from moe_ref.balance.loads import split_evenly
from moe_ref.balance.rivals import eplb_placement, plain
from moe_ref.balance.routing import route
from moe_ref.errors import UsageError
from moe_ref.placement import Placement, by_name

MODES = ("plain", "eplb", "scheduled")

Planner = Callable[[np.ndarray, Placement], balance.Plan]


def check_sizes(mode: str, ranks: int, experts: int, replicas: int, group_size: int | None = None) -> None:
    """Raise UsageError, naming the option, unless these sizes can be trained with."""
    if ranks < 1:
        raise UsageError(f"--ranks is {ranks}, expected at least 1")
    if mode not in MODES:
        raise UsageError(f"balancing is {mode!r}, expected one of {', '.join(MODES)}")
    if not 1 <= replicas <= ranks:
        raise UsageError(f"--replicas is {replicas}, expected 1 to {ranks}, the number of ranks")
    if experts * replicas % ranks:
        legal = [e for e in range(1, 8 * ranks + 1) if e * replicas % ranks == 0][:6]
        raise UsageError(
            f"{experts} experts x {replicas} replicas don't fill {ranks} ranks evenly; with these ranks and replicas "
            f"--experts can be {', '.join(map(str, legal))}, ..."
        )
    if ranks % replicas:
        raise UsageError(f"{ranks} ranks can't be divided into {replicas} groups; --replicas must divide the ranks")
    if group_size is None:
        return
    if group_size < 1 or ranks % group_size:
        raise UsageError(f"--group-size is {group_size}, expected a divisor of {ranks} ranks")
    if mode != "scheduled":
        raise UsageError(f"--group-size divides the ranks that schedule together; balancing {mode!r} schedules nothing")
    if replicas % (ranks // group_size):
        raise UsageError(
            f"{ranks // group_size} groups each hold every expert equally often, so --replicas must be a multiple of "
            f"{ranks // group_size}, not {replicas}; or take --group-size {ranks}"
        )


def make_placement(
    mode: str, ranks: int, experts: int, replicas: int, load_E: Any = None, group_size: int | None = None
) -> Placement:
    """Where a run of this mode starts.

    Args:
        load_E: rows per expert seen so far, for eplb; None for none seen.
        group_size: ranks of a scheduling group, for scheduled; every group holds every expert.
    """
    if mode == "scheduled" and group_size not in (None, ranks):
        groups = ranks // group_size
        inside = replicas // groups
        part = by_name("symmetric" if inside > 1 else "plain", group_size, experts, inside).placement
        return repeat_placement(part, groups)
    if mode == "plain":
        return repeat_placement(Placement.contiguous(experts, ranks // replicas), replicas)
    if mode == "eplb":
        load = np.ones(experts, dtype=np.int64) if load_E is None else np.asarray(load_E, dtype=np.int64)
        return eplb_placement(load, ranks, experts * replicas // ranks)
    return by_name("symmetric", ranks, experts, replicas).placement


def make_planner(mode: str, ranks: int, replicas: int, group_size: int | None = None) -> Planner:
    """How a batch is divided over the replicas of a placement of this mode."""
    if mode == "plain":
        return lambda counts_PE, placement: balance.schedule(counts_PE, placement, group_size=ranks // replicas)
    if mode == "eplb":
        return even_plan
    return lambda counts_PE, placement: balance.schedule(counts_PE, placement, group_size=group_size)


def layer_planner(mode: str, ranks: int, replicas: int, group_size: int | None = None) -> Planner | None:
    """What a layer's `planner` is in this mode: that of `make_planner`, or None for all ranks as one scheduling group.

    A layer schedules like that by itself, and where no planner is set the fused backend does it in its kernel; planners
    run on the host, which waits for the counts.
    """
    if mode == "scheduled" and group_size in (None, ranks):
        return None
    return make_planner(mode, ranks, replicas, group_size)


def even_plan(counts_PE: np.ndarray, placement: Placement) -> balance.Plan:
    """The rows of an expert split evenly over its replicas, remainders to the first ones; no schedule.

    >>> placement = Placement.from_replicas([[0, 1], [1]], num_ranks=2)
    >>> even_plan(np.array([[5, 0], [0, 3]]), placement).rank_loads.tolist()
    [3, 5]
    """
    rows_ED = np.zeros_like(placement.rank_ED)
    for expert, load in enumerate(counts_PE.sum(axis=0)):
        replicas = len(placement.ranks_of_expert[expert])
        rows_ED[expert, :replicas] = split_evenly(np.array([load]), replicas)[:, 0]
    return balance.Plan(placement, route(counts_PE, rows_ED, placement))


def plain_ratio(counts_PE: np.ndarray, replicas: int) -> float:
    """Maximum over mean rows of a rank if this batch ran under plain expert parallelism; 1.0 for an empty batch."""
    experts = counts_PE.shape[1]
    rows_P = plain(counts_PE[None], np.ones(experts), replicas)[0]
    return float(rows_P.max() / rows_P.mean()) if rows_P.any() else 1.0
