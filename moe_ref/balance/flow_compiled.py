"""The compiled twin of `flow` and `routing`, for the hot path: the same steps, the same ties, the same answer.

Read `flow` first; here the nested lists are flat int64 arrays and numba turns the loops into machine code. The
functions release the interpreter lock, so a worker thread plans while the main thread permutes (`overlap`). Compiled
code is kept on disk: the first call of a fresh installation takes some seconds (`warm_up`), later processes load it.

Letters: P ranks, E experts, D replicas of an expert (at most).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from moe_ref.balance.checks import check_counts, check_loads
from moe_ref.balance.flow import ReplicaLoads
from moe_ref.balance.plan import Plan
from moe_ref.replicas import Placement


def _compiled(function: Callable[..., Any]) -> Any:
    """numba.njit without the interpreter lock, kept on disk where there is a place for it."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written: compile in every process
        return njit(nogil=True)(function)


class _Tables(NamedTuple):
    """A placement as flat arrays: replicas of rank r are entries start_P1[r] to start_P1[r + 1] of the last two.

    order_E: experts with one replica, then the others round by round. replica_ED: replicas of an expert by rank.
    """

    rank_ED: np.ndarray
    count_E: np.ndarray
    order_E: np.ndarray
    replica_ED: np.ndarray
    start_P1: np.ndarray
    expert_held: np.ndarray
    replica_held: np.ndarray


def tables(placement: Placement) -> _Tables:
    """The flat form of a placement, built once and kept with it."""
    kept = placement.__dict__.get("_flow_tables")
    if kept is None:
        held = placement.replicas_of_rank
        start = np.concatenate(([0], np.cumsum([len(replicas) for replicas in held]))).astype(np.int64)
        flat = np.array([pair for replicas in held for pair in replicas], dtype=np.int64).reshape(-1, 2)
        alone = np.flatnonzero(placement.replica_counts == 1).tolist()
        order = np.array([*alone, *(expert for experts in placement.rounds for expert in experts)], dtype=np.int64)
        counts = placement.replica_counts
        # replicas that aren't there (-1) sort behind the others
        by_rank = np.argsort(np.where(placement.rank_ED < 0, placement.num_ranks, placement.rank_ED), axis=1)
        kept = _Tables(placement.rank_ED, counts, order, by_rank, start, flat[:, 0].copy(), flat[:, 1].copy())
        placement.__dict__["_flow_tables"] = kept
    return kept


@_compiled
def _fill_evenly(amount, expert, rank_ED, count, rows_ED, load_P, order):
    """`flow.fill_evenly` on the replicas of one expert; `order` is scratch of at least `count` entries."""
    if count == 1:
        load_P[rank_ED[expert, 0]] += amount
        rows_ED[expert, 0] += amount
        return
    if count == 2:
        a, b = rank_ED[expert, 0], rank_ED[expert, 1]
        to_a = (load_P[b] - load_P[a] + amount + (1 if load_P[a] <= load_P[b] else 0)) // 2
        to_a = min(max(to_a, 0), amount)
        load_P[a] += to_a
        load_P[b] += amount - to_a
        rows_ED[expert, 0] += to_a
        rows_ED[expert, 1] += amount - to_a
        return
    for j in range(count):  # insertion sort by (load, replica): stable, and short lists are its home
        i = j
        while i > 0 and load_P[rank_ED[expert, order[i - 1]]] > load_P[rank_ED[expert, j]]:
            order[i] = order[i - 1]
            i -= 1
        order[i] = j
    width, below = 1, load_P[rank_ED[expert, order[0]]]
    while width < count:
        next_load = load_P[rank_ED[expert, order[width]]]
        if next_load * width - below >= amount:
            break
        below += next_load
        width += 1
    level = (below + amount) // width
    extra = (below + amount) % width
    for position in range(width):
        j = order[position]
        part = level + (1 if position < extra else 0) - load_P[rank_ED[expert, j]]
        load_P[rank_ED[expert, j]] += part
        rows_ED[expert, j] += part


@_compiled
def _carries(v, from_rank, by_expert, out_of, rows_ED, load_P, target):
    """`flow._carries`: rows that the path to rank v can bring."""
    narrowest = np.int64(np.iinfo(np.int64).max)
    while from_rank[v] >= 0:
        narrowest = min(narrowest, rows_ED[by_expert[v], out_of[v]])
        v = from_rank[v]
    return min(narrowest, load_P[v] - target)


@_compiled
def _carry(v, amount, from_rank, by_expert, out_of, into, rows_ED, load_P):
    """`flow._carry`: bring rows along the path to rank v."""
    while from_rank[v] >= 0:
        rows_ED[by_expert[v], out_of[v]] -= amount
        rows_ED[by_expert[v], into[v]] += amount
        v = from_rank[v]
    load_P[v] -= amount


@_compiled
def _search(
    rows_ED, load_P, target, rank_ED, count_E, replica_ED, start_P1, expert_held, replica_held, seen, scratch_5P
):
    """`flow.search`: whether anything moved; `seen` becomes the mask of the ranks that were reached."""
    ranks = load_P.shape[0]
    from_rank, by_expert, out_of, into, queue = scratch_5P
    tail = 0
    for rank in range(ranks):
        above = load_P[rank] > target
        seen[rank] = above
        if above:
            from_rank[rank] = -1
            queue[tail] = rank
            tail += 1
    head, moved = 0, False
    while head < tail:
        u = queue[head]
        head += 1
        carried = _carries(u, from_rank, by_expert, out_of, rows_ED, load_P, target)
        left = carried
        for held in range(start_P1[u], start_P1[u + 1]):
            if left == 0:
                break
            expert, j = expert_held[held], replica_held[held]
            for n in range(count_E[expert]):
                if left == 0 or rows_ED[expert, j] == 0:
                    break
                i = replica_ED[expert, n]
                v = rank_ED[expert, i]
                if seen[v]:
                    continue
                amount = max(min(left, rows_ED[expert, j], target - load_P[v]), 0)
                rows_ED[expert, j] -= amount
                rows_ED[expert, i] += amount
                load_P[v] += amount
                left -= amount
                if load_P[v] >= target:
                    seen[v] = True
                    from_rank[v], by_expert[v], out_of[v], into[v] = u, expert, j, i
                    queue[tail] = v
                    tail += 1
        if left < carried:
            _carry(u, carried - left, from_rank, by_expert, out_of, into, rows_ED, load_P)
            moved = True
    return moved


@_compiled
def _solve(load_E, start_ED, use_start, rank_ED, count_E, order_E, replica_ED, start_P1, expert_held, replica_held):
    """`flow.solve`: rows of every replica, the maximum load and the mask of the certificate."""
    experts, ranks = rank_ED.shape[0], start_P1.shape[0] - 1
    rows_ED = np.zeros(rank_ED.shape, np.int64)
    load_P = np.zeros(ranks, np.int64)
    order = np.empty(rank_ED.shape[1], np.int64)
    trapped_P = np.ones(ranks, np.bool_)
    seen = np.empty(ranks, np.bool_)
    scratch_5P = np.empty((5, ranks), np.int64)
    total = 0
    for expert in range(experts):
        total += load_E[expert]
        if use_start:
            for j in range(count_E[expert]):
                load_P[rank_ED[expert, j]] += start_ED[expert, j]
    for expert in order_E:
        rest = load_E[expert]
        if use_start:
            for j in range(count_E[expert]):
                rest -= start_ED[expert, j]
        if rest > 0:
            _fill_evenly(rest, expert, rank_ED, count_E[expert], rows_ED, load_P, order)
    target = (total + ranks - 1) // ranks
    for expert in range(experts):
        bound = (load_E[expert] + count_E[expert] - 1) // count_E[expert]
        if bound > target:
            target = bound
            trapped_P[:] = False
            for j in range(count_E[expert]):
                trapped_P[rank_ED[expert, j]] = True
    if use_start:
        while load_P.max() > target and _search(
            rows_ED, load_P, target, rank_ED, count_E, replica_ED, start_P1, expert_held, replica_held, seen, scratch_5P
        ):
            pass
        for expert in range(experts):
            for j in range(count_E[expert]):
                rows_ED[expert, j] += start_ED[expert, j]
    while load_P.max() > target:
        if not _search(
            rows_ED, load_P, target, rank_ED, count_E, replica_ED, start_P1, expert_held, replica_held, seen, scratch_5P
        ):
            inside, size = 0, 0
            for rank in range(ranks):
                trapped_P[rank] = seen[rank]
                if seen[rank]:
                    inside += load_P[rank]
                    size += 1
            target = (inside + size - 1) // size
    return rows_ED, target, trapped_P


@_compiled
def _route(counts_PE, rows_ED, local_ED, rank_ED, count_E):
    """`routing.route` without nodes: own replica first, then low sources to low replicas; int64 [P, E, D]."""
    ranks, experts = counts_PE.shape
    width = rank_ED.shape[1]
    quota_PED = np.zeros((ranks, experts, width), np.int64)
    room_ED = rows_ED.copy()
    for expert in range(experts):
        for j in range(count_E[expert]):
            own = min(local_ED[expert, j], rows_ED[expert, j])
            quota_PED[rank_ED[expert, j], expert, j] = own
            room_ED[expert, j] -= own
    first_E = np.zeros(experts, np.int64)  # the first replica of each expert that still has room
    for p in range(ranks):
        for expert in range(experts):
            rest = counts_PE[p, expert]
            if rest == 0:
                continue
            for j in range(count_E[expert]):
                if rank_ED[expert, j] == p:
                    rest -= quota_PED[p, expert, j]
            j = first_E[expert]
            while rest > 0:
                amount = min(rest, room_ED[expert, j])
                quota_PED[p, expert, j] += amount
                room_ED[expert, j] -= amount
                rest -= amount
                if room_ED[expert, j] == 0 and j < count_E[expert] - 1:
                    j += 1
            first_E[expert] = j
    return quota_PED


@_compiled
def _plan(counts_PE, rank_ED, count_E, order_E, replica_ED, start_P1, expert_held, replica_held):
    """Sum over the ranks, divide, route: everything between the gathered counts and the quotas."""
    ranks, experts = counts_PE.shape
    load_E = np.zeros(experts, np.int64)
    for p in range(ranks):
        for expert in range(experts):
            load_E[expert] += counts_PE[p, expert]
    local_ED = np.zeros(rank_ED.shape, np.int64)
    for expert in range(experts):
        for j in range(count_E[expert]):
            local_ED[expert, j] = counts_PE[rank_ED[expert, j], expert]
    rows_ED, _, trapped_P = _solve(
        load_E, local_ED, True, rank_ED, count_E, order_E, replica_ED, start_P1, expert_held, replica_held
    )
    return _route(counts_PE, rows_ED, local_ED, rank_ED, count_E), trapped_P


def _members(mask_P: np.ndarray) -> frozenset[int]:
    return frozenset(np.flatnonzero(mask_P).tolist())


def solve(load_E: np.ndarray, placement: Placement, start_ED: np.ndarray | None = None) -> ReplicaLoads:
    """`flow.solve`, compiled: checked loads in, the same division out."""
    table = tables(placement)
    start = table.rank_ED if start_ED is None else start_ED
    rows_ED, max_load, trapped_P = _solve(load_E, start, start_ED is not None, *table)
    return ReplicaLoads(rows_ED, max_load, _members(trapped_P))


def plan(counts_PE: np.ndarray, placement: Placement) -> Plan:
    """The plan of checked counts, the same as by `flow`."""
    quota_PED, trapped_P = _plan(counts_PE, *tables(placement))
    return Plan(placement, quota_PED, _members(trapped_P))


def warm_up() -> None:
    """Compile (or load from disk) all that `solve` and `plan` use, so that the first batch doesn't pay for it."""
    placement = Placement.from_replicas([[0, 1]], 2)
    counts: Any = np.ones((2, 1), dtype=np.int64)
    plan(check_counts(counts, placement), placement)
    solve(check_loads([1], placement), placement)
