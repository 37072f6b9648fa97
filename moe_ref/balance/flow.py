"""Perfect balance per micro-batch by moving tokens between replicas: exact, in whole tokens, in plain Python.

The problem (FineMoE, section 4.1): x[e, j] rows of expert e are computed by its replica j. Minimise the load of the
busiest rank, subject to sum over j of x[e, j] = load[e] and x >= 0.

The method: take any division of the loads and a target t, at first what nobody can do without: the mean, or one
expert's load divided by its replicas, rounded up. Ranks above t have rows to give away, ranks below t have room. An arc
u -> v exists when some expert has rows on u and a replica on v. A path from a rank above t to one below it is a chain
of such moves: push as many rows as its narrowest part allows, and repeat.

If no path is left, look at the set S of ranks that were reached. Every expert with rows in S has *all* its replicas in
S, or the search had gone on. These rows are trapped: they must be computed by the |S| ranks of S whatever anyone plans,
so the busiest of them computes at least ceil(load(S) / |S|). That is the new target, and S is the proof: its
*certificate*. The loop ends at exactly the largest such bound, the maximum density of an induced subgraph
(section 5): the theorem of the paper, run as a program.

What it computes is a pure function of its arguments: integers only, ties by id, nothing remembered from the last call.
Every rank runs it alone and gets the same plan. The compiled twin in `flow_compiled` takes the same steps in the same
order and gives the same answer.

Letters: E experts, P ranks, D replicas of an expert (at most).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from moe_ref.layout import ceil_div
from moe_ref.replicas import Placement


@dataclass(frozen=True)
class ReplicaLoads:
    """How the load of each expert is divided between its replicas.

    Attributes:
        rows_ED: rows of replica j of expert e, int64 [E, D]; 0 where there is no such replica.
        max_load: rows of the busiest rank.
        certificate: the ranks whose trapped load proves that `max_load` is optimal; all ranks if it is the mean, those
            of the first expert whose load they can't undercut if it is that bound.
    """

    rows_ED: np.ndarray
    max_load: int
    certificate: frozenset[int]


def fill_evenly(amount: int, ranks: Sequence[int], load: list[int]) -> list[int]:
    """Pour `amount` rows over `ranks` so that the lowest loads rise together; `load` is updated in place.

    Returns the rows for each of `ranks`. A remainder goes to the lower loads, ties to the earlier rank of the list.

    >>> fill_evenly(7, [0, 1, 2], [5, 1, 2])
    [0, 4, 3]
    """
    if len(ranks) == 1:
        load[ranks[0]] += amount
        return [amount]
    if len(ranks) == 2:
        a, b = ranks
        # The rows that end on a lift it to half of the common level, within [0, amount].
        to_a = min(max((load[b] - load[a] + amount + (load[a] <= load[b])) // 2, 0), amount)
        load[a] += to_a
        load[b] += amount - to_a
        return [to_a, amount - to_a]
    order = sorted(range(len(ranks)), key=lambda j: (load[ranks[j]], j))
    # The `width` lowest ranks share the rows: widen while the next rank still lies below their common level.
    width, below = 1, load[ranks[order[0]]]
    while width < len(ranks) and (next_load := load[ranks[order[width]]]) * width - below < amount:
        below += next_load
        width += 1
    level, extra = divmod(below + amount, width)
    parts = [0] * len(ranks)
    for position, j in enumerate(order[:width]):
        parts[j] = level + (position < extra) - load[ranks[j]]
        load[ranks[j]] += parts[j]
    return parts


def pour(rest_E: Sequence[int], placement: Placement, load: list[int]) -> list[list[int]]:
    """A first division: each expert's rows over its replicas, evening out the ranks; `load` is updated in place.

    Experts with one replica come first: they have no choice. The others follow in rounds that share no rank
    (`Placement.rounds`): whoever has a thread for each rank pours a round at once.
    """
    ranks_of = placement.ranks_of_expert
    rows = [[0] * len(ranks) for ranks in ranks_of]
    alone = [expert for expert, ranks in enumerate(ranks_of) if len(ranks) == 1]
    for experts in (alone, *placement.rounds):
        for expert in experts:
            if rest_E[expert]:
                rows[expert] = fill_evenly(rest_E[expert], ranks_of[expert], load)
    return rows


def level(rows: list[list[int]], load: list[int], placement: Placement, target: int) -> tuple[int, list[int] | None]:
    """Move rows between replicas until no rank is above the smallest possible target.

    Args:
        rows: rows[e][j] of replica j of expert e; changed in place, like `load`.
        load: rows of each rank.
        placement: replica sets.
        target: largest load that is allowed; raised where a certificate shows that it can't be kept.

    Returns:
        The target that was reached, and the certificate of its last raise (None if it was never raised).
    """
    certificate = None
    while max(load) > target:
        moved, reached = search(rows, load, placement, target)
        if not moved:
            # Nothing leaves the reached set: what is in it is trapped in it.
            target = ceil_div(sum(load[rank] for rank in reached), len(reached))
            certificate = sorted(reached)
    return target, certificate


Step = tuple[int, int, int, int]
"""How a search came to a rank: from which rank, by which expert, its replica there and its replica here."""


def search(rows: list[list[int]], load: list[int], placement: Placement, target: int) -> tuple[int, list[int]]:
    """One breadth-first search from all ranks above the target, pushing rows to every rank below it that it finds.

    A rank has one path in a search, and once that is used up, so are the rank and all that it would lead to: whatever
    is still above the target then is the next search's.

    Args:
        rows: what may be moved, rows[e][j]; changed in place, like `load`.

    Returns:
        The rows that were moved, and the ranks that were reached.
    """
    ranks_of, held = placement.replicas_by_rank, placement.replicas_of_rank
    seen = [amount > target for amount in load]
    reached = [rank for rank, above in enumerate(seen) if above]
    came: list[Step | None] = [None] * len(load)
    moved = 0
    for u in reached:
        carried = left = _carries(u, came, rows, load, target)
        for expert, j in held[u]:
            for v, i in ranks_of[expert]:
                if not left or not rows[expert][j]:
                    break
                if seen[v]:
                    continue
                amount = max(min(left, rows[expert][j], target - load[v]), 0)
                rows[expert][j] -= amount
                rows[expert][i] += amount
                load[v] += amount
                left -= amount
                if load[v] >= target:  # no room (left): others may be reached through it
                    seen[v] = True
                    came[v] = (u, expert, j, i)
                    reached.append(v)
        _carry(u, carried - left, came, rows, load)
        moved += carried - left
    return moved, reached


def _carries(v: int, came: list[Step | None], rows: list[list[int]], load: list[int], target: int) -> int:
    """Rows that the path to rank v can bring: as many as its narrowest part, of what its first rank has to give."""
    narrowest = None
    while (step := came[v]) is not None:
        v, expert, j, _ = step
        narrowest = rows[expert][j] if narrowest is None else min(narrowest, rows[expert][j])
    return load[v] - target if narrowest is None else min(narrowest, load[v] - target)


def _carry(v: int, amount: int, came: list[Step | None], rows: list[list[int]], load: list[int]) -> None:
    """Bring rows along the path to rank v, instead of those that v has given away."""
    while (step := came[v]) is not None:
        v, expert, j, i = step
        rows[expert][j] -= amount
        rows[expert][i] += amount
    load[v] -= amount


def solve(
    load_E: np.ndarray, placement: Placement, start_ED: np.ndarray | None = None, target: int = 0
) -> ReplicaLoads:
    """The optimal integer division of checked loads.

    Args:
        load_E: rows of each expert, int64 [E], non-negative.
        placement: replica sets.
        start_ED: rows that replica j of expert e begins with, int64 [E, D], in sum at most load_E; they stay as far as
            balance allows. Give each rank's own rows to its own replica (`routing.local_rows`): the same maximum load,
            far fewer rows that travel than by balancing first.
        target: a larger maximum load to be content with, if there is a reason to; the certificate then proves the mean
            only.
    """
    load = [0] * placement.num_ranks
    target = max(target, ceil_div(int(load_E.sum()), placement.num_ranks))
    # The ranks of one expert are a certificate as well: at least its own rows are trapped there.
    replicas = placement.replica_counts.tolist()
    bounds = [ceil_div(amount, count) for amount, count in zip(load_E.tolist(), replicas, strict=True)]
    proof: Collection[int] = range(placement.num_ranks)
    if max(bounds) > target:
        target = max(bounds)
        proof = placement.ranks_of_expert[bounds.index(target)]
    start: list[list[int]] = [] if start_ED is None else start_ED.tolist()
    rest_E = load_E if start_ED is None else load_E - start_ED.sum(axis=1)
    for ranks, parts in zip(placement.ranks_of_expert, start, strict=False):
        for rank, part in zip(ranks, parts, strict=False):
            load[rank] += part
    rows = pour(rest_E.tolist(), placement, load)
    if start:
        # First only what was poured moves; what replicas began with gives way where that isn't enough.
        while max(load) > target and search(rows, load, placement, target)[0]:
            pass
        rows = [[a + b for a, b in zip(have, parts, strict=False)] for have, parts in zip(rows, start, strict=True)]
    max_load, trapped = level(rows, load, placement, target)
    certificate = frozenset(proof if trapped is None else trapped)
    rows_ED = np.zeros_like(placement.rank_ED)
    for expert, parts in enumerate(rows):
        rows_ED[expert, : len(parts)] = parts
    return ReplicaLoads(rows_ED, max_load, certificate)
