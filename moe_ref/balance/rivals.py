"""What others do about imbalance, one function each, all with the same signature.

Each takes the counts of some batches and returns what every rank computes in each of them. None is a copy of the system
it is named after: each keeps that system's idea of what may change (placement, replica counts, or where tokens go) and
how often (per batch, or only with the long-run prediction). All have the same memory: replicas x E slots in all.

Name            replicas             placement             tokens of a batch
plain           one per EP group     fixed                 stay in their EP group (Megatron-LM)
padded          one per EP group     fixed                 every expert padded to the largest (DeepSpeed)
smartmoe_style  one per EP group     by long-run load      stay in their EP group
flexmoe_style   adapt step by step   by long-run load      split evenly over the replicas
eplb_style      greedy by load       sorted packing        split evenly over the replicas
lplb_style      at most two          fixed topology        LP over the two copies
merged          one per EP group     fixed                 scheduled inside equal replica sets
symmetric       `replicas` each      symmetric graph       scheduled (this project, no prediction)
asymmetric      greedy by load       Monte Carlo           scheduled (this project, with prediction)

Letters: T batches, P ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moe_ref.balance import flow_compiled
from moe_ref.placement.asymmetric import asymmetric as asymmetric_placement
from moe_ref.placement.asymmetric import greedy_replica_counts
from moe_ref.placement.names import merged as merged_placement
from moe_ref.placement.symmetric import symmetric as symmetric_construction
from moe_ref.replicas import Placement

Rival = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""(counts int64 [T, P, E], predicted load int64 [E], replicas) -> rows per rank, float64 [T, P]."""


def _groups(num_ranks: int, replicas: int) -> int:
    """Expert-parallel groups that fit: `replicas`, or a single one where the ranks can't be divided so."""
    return replicas if num_ranks % replicas == 0 else 1


def _per_group(counts_TPE: np.ndarray, owner_E: np.ndarray, groups: int, padded: bool = False) -> np.ndarray:
    """Rows per rank when each group of consecutive ranks serves its own tokens; owner_E: rank within the group."""
    steps, num_ranks, experts = counts_TPE.shape
    degree = num_ranks // groups
    load_TGE = counts_TPE.reshape(steps, groups, degree, experts).sum(axis=2)
    if padded:
        load_TGE = np.broadcast_to(load_TGE.max(axis=(1, 2), keepdims=True), load_TGE.shape)
    rows_TGD = np.zeros((steps, groups, degree))
    for rank in range(degree):
        rows_TGD[:, :, rank] = load_TGE[:, :, owner_E == rank].sum(axis=2)
    return rows_TGD.reshape(steps, num_ranks)


def _contiguous(num_experts: int, degree: int) -> np.ndarray:
    return np.array([ranks[0] for ranks in Placement.contiguous(num_experts, degree).ranks_of_expert])


def _even_split(counts_TPE: np.ndarray, placement: Placement) -> np.ndarray:
    """Rows per rank when the rows of an expert are split evenly over its replicas."""
    load_TE = counts_TPE.sum(axis=1)
    share_EP = np.zeros((placement.num_experts, placement.num_ranks))
    for expert, ranks in enumerate(placement.ranks_of_expert):
        share_EP[expert, list(ranks)] = 1 / len(ranks)
    return load_TE @ share_EP


def _scheduled(counts_TPE: np.ndarray, placement: Placement) -> np.ndarray:
    """Rows per rank under the exact flow."""
    rows_TP = np.zeros(counts_TPE.shape[:2])
    rank_ED = placement.rank_ED
    there = rank_ED >= 0
    for step, load_E in enumerate(counts_TPE.sum(axis=1)):
        rows_ED = flow_compiled.solve(load_E, placement).rows_ED
        rows_TP[step] = np.bincount(rank_ED[there], weights=rows_ED[there], minlength=placement.num_ranks)
    return rows_TP


def _pack(counts_E: list[int], load_E: np.ndarray, num_ranks: int, slots: int) -> Placement:
    """Sorted packing: heaviest replica first, each to the least loaded rank with a free slot and no copy of it.

    Where every rank with a free slot holds a copy already, one of them trades a replica with a rank that does not.
    """
    held: list[set[int]] = [set() for _ in range(num_ranks)]
    weight = np.zeros(num_ranks)
    per_copy = [float(load_E[e]) / counts_E[e] for e in range(len(counts_E))]
    for expert in sorted(range(len(counts_E)), key=lambda e: (-per_copy[e], e)):
        for _ in range(counts_E[expert]):
            able = [r for r in range(num_ranks) if len(held[r]) < slots and expert not in held[r]]
            if able:
                rank = min(able, key=lambda r: (weight[r], r))
            else:
                full = next(r for r in range(num_ranks) if len(held[r]) < slots)
                rank = min((r for r in range(num_ranks) if expert not in held[r]), key=lambda r: (weight[r], r))
                given = min(held[rank] - held[full])
                held[rank].remove(given)
                held[full].add(given)
                weight[rank] -= per_copy[given]
                weight[full] += per_copy[given]
            held[rank].add(expert)
            weight[rank] += per_copy[expert]
    ranks_of = [[r for r in range(num_ranks) if e in held[r]] for e in range(len(counts_E))]
    return Placement.from_replicas(ranks_of, num_ranks)


def _slots(num_experts: int, num_ranks: int, replicas: int) -> int:
    if num_experts * replicas % num_ranks:
        raise ValueError(
            f"{num_experts} experts x {replicas} replicas don't fill {num_ranks} ranks evenly; rivals are compared "
            f"where experts x replicas is a multiple of {num_ranks}"
        )
    return num_experts * replicas // num_ranks


def plain(counts_TPE: np.ndarray, planned_E: np.ndarray, replicas: int) -> np.ndarray:
    """Plain expert parallelism: each group of ranks holds every expert once, in blocks, for its own tokens."""
    groups = _groups(counts_TPE.shape[1], replicas)
    return _per_group(counts_TPE, _contiguous(counts_TPE.shape[2], counts_TPE.shape[1] // groups), groups)


def padded(counts_TPE: np.ndarray, planned_E: np.ndarray, replicas: int) -> np.ndarray:
    """Plain, but every expert is padded to the rows of the largest, so that all matrix products have one size."""
    groups = _groups(counts_TPE.shape[1], replicas)
    owner_E = _contiguous(counts_TPE.shape[2], counts_TPE.shape[1] // groups)
    return _per_group(counts_TPE, owner_E, groups, padded=True)


def smartmoe_style(counts_TPE: np.ndarray, planned_E: np.ndarray, replicas: int) -> np.ndarray:
    """One replica per group, moved by long-run load: heaviest expert first, to the lightest rank with a free slot."""
    _, num_ranks, experts = counts_TPE.shape
    groups = _groups(num_ranks, replicas)
    degree = num_ranks // groups
    placement = _pack([1] * experts, planned_E, degree, -(-experts // degree))
    return _per_group(counts_TPE, np.array([ranks[0] for ranks in placement.ranks_of_expert]), groups)


def flexmoe_style(counts_TPE: np.ndarray, planned_E: np.ndarray, replicas: int) -> np.ndarray:
    """Replica counts adapt step by step: expand the fullest expert, shrink the emptiest, as long as one step in
    eight still helps."""
    _, num_ranks, experts = counts_TPE.shape
    slots, counts = _slots(experts, num_ranks, replicas), [replicas] * experts
    best = _pack(counts, planned_E, num_ranks, slots)
    level, patience = _even_split(planned_E[None, None], best).max(), 8
    while patience:
        copies = np.array(counts)
        grow = int(np.where(copies < num_ranks, planned_E / copies, -1.0).argmax())
        shrink = int(np.where(copies > 1, planned_E / np.maximum(copies - 1, 1), np.inf).argmin())
        if grow == shrink or copies[shrink] == 1 or copies[grow] == num_ranks:
            break
        counts[grow] += 1
        counts[shrink] -= 1
        candidate = _pack(counts, planned_E, num_ranks, slots)
        reached = _even_split(planned_E[None, None], candidate).max()
        patience -= 1
        if reached < level:
            best, level, patience = candidate, reached, 8
    return _even_split(counts_TPE, best)


def eplb_placement(planned_E: np.ndarray, num_ranks: int, slots: int) -> Placement:
    """Placement of the EPLB-style rival: greedy replica counts, sorted packing."""
    return _pack(greedy_replica_counts(planned_E, num_ranks * slots, num_ranks), planned_E, num_ranks, slots)


def eplb_style(counts_TPE: np.ndarray, planned_E: np.ndarray, replicas: int) -> np.ndarray:
    """Greedy replica counts, sorted packing, rows of an expert split evenly over its replicas."""
    _, num_ranks, experts = counts_TPE.shape
    return _even_split(counts_TPE, eplb_placement(planned_E, num_ranks, _slots(experts, num_ranks, replicas)))


def lplb_style(counts_TPE: np.ndarray, planned_E: np.ndarray, replicas: int) -> np.ndarray:
    """A linear program over a fixed topology: each expert at home and, at most, once more on a neighbour of home.

    Neighbours of rank g: g xor 2^i where the ranks are a power of two (a hypercube), else g + 2^i. Slot i of a rank is
    copied to its i-th neighbour, hot experts in low slots.
    """
    _, num_ranks, experts = counts_TPE.shape
    owner_E = _contiguous(experts, num_ranks)
    copies = min(experts * (replicas - 1), experts)
    links = max((num_ranks - 1).bit_length(), 1)
    cube = num_ranks & (num_ranks - 1) == 0
    hot_first = sorted(range(experts), key=lambda e: (-int(planned_E[e]), e))
    ranks_of = [[int(owner)] for owner in owner_E]
    used = [0] * num_ranks
    for expert in hot_first[:copies] if num_ranks > 1 else []:
        home = int(owner_E[expert])
        step = 1 << used[home] % links
        used[home] += 1
        ranks_of[expert].append(home ^ step if cube else (home + step) % num_ranks)
    return _scheduled(counts_TPE, Placement.from_replicas(ranks_of, num_ranks))


def merged(counts_TPE: np.ndarray, planned_E: np.ndarray, replicas: int) -> np.ndarray:
    """Expert-parallel groups merged without shuffling: load moves inside equal replica sets only."""
    _, num_ranks, experts = counts_TPE.shape
    return _scheduled(counts_TPE, merged_placement(num_ranks, experts, _groups(num_ranks, replicas)))


def symmetric(counts_TPE: np.ndarray, planned_E: np.ndarray, replicas: int) -> np.ndarray:
    """Token scheduling on a symmetric placement, which knows nothing of the loads."""
    _, num_ranks, experts = counts_TPE.shape
    return _scheduled(counts_TPE, symmetric_construction(num_ranks, experts, replicas).placement)


def asymmetric(counts_TPE: np.ndarray, planned_E: np.ndarray, replicas: int) -> np.ndarray:
    """Token scheduling on a placement made for the predicted loads."""
    _, num_ranks, experts = counts_TPE.shape
    return _scheduled(counts_TPE, asymmetric_placement(planned_E, num_ranks, _slots(experts, num_ranks, replicas)))


RIVALS: dict[str, Rival] = {
    "plain": plain,
    "padded": padded,
    "smartmoe_style": smartmoe_style,
    "flexmoe_style": flexmoe_style,
    "eplb_style": eplb_style,
    "lplb_style": lplb_style,
    "merged": merged,
    "symmetric": symmetric,
    "asymmetric": asymmetric,
}

PREDICTIVE = ("smartmoe_style", "flexmoe_style", "eplb_style", "lplb_style", "asymmetric")
"""Those that use the prediction, and so can be handed a stale one."""
