"""From loads per replica to quotas per source rank: locality-aware routing (FineMoE, section 4.2, Algorithm 1).

The division of the loads is given and is kept exactly. What is free is who serves whom: a rank's own rows fill its own
replica first, then (with `ranks_per_node`) replicas of its node, and what remains goes wherever there is room, low
source ranks to low replicas. Integer arithmetic on whole arrays; the compiled path has the same rule as a loop.

Letters: P ranks, E experts, D replicas of an expert (at most).
"""

from __future__ import annotations

import numpy as np

from moe_ref.replicas import Placement


def local_rows(counts_PE: np.ndarray, placement: Placement) -> np.ndarray:
    """Rows of expert e that start on the rank of its replica j, int64 [E, D]; 0 where there is no such replica."""
    rank_ED = placement.rank_ED
    rows_ED = counts_PE[rank_ED, np.arange(placement.num_experts)[:, None]]
    return np.where(rank_ED >= 0, rows_ED, 0)


def _fill_in_order(supply_PE: np.ndarray, room_ED: np.ndarray) -> np.ndarray:
    """Rows of every (source, expert, replica) when sources, in order, fill the replicas, in order: int64 [P, E, D].

    Line up the rows of an expert by source, and its room by replica. Clipped to the room of one replica, the running
    sum over the sources grows exactly by what each of them sends there.
    """
    flow_PED = np.empty((*supply_PE.shape, room_ED.shape[1]), dtype=np.int64)
    running_PE = np.cumsum(supply_PE, axis=0)
    end_ED = np.cumsum(room_ED, axis=1)
    start_ED = end_ED - room_ED
    for j in range(room_ED.shape[1]):
        inside_PE = np.clip(running_PE, start_ED[:, j], end_ED[:, j])
        flow_PED[0, :, j] = inside_PE[0] - start_ED[:, j]
        flow_PED[1:, :, j] = inside_PE[1:] - inside_PE[:-1]
    return flow_PED


def route(
    counts_PE: np.ndarray,
    rows_ED: np.ndarray,
    placement: Placement,
    ranks_per_node: int | None = None,
    own_ED: np.ndarray | None = None,
    near_ED: np.ndarray | None = None,
) -> np.ndarray:
    """Quotas that keep every row and column sum: int64 [P, E, D].

    Args:
        counts_PE: rows of each source rank for each expert, int64.
        rows_ED: rows that each replica computes, int64; its row sums are the column sums of counts_PE.
        placement: replica sets.
        ranks_per_node: consecutive ranks that share a node; if given, replicas on the own node come second.
        own_ED, near_ED: at most so many rows from the own rank, and from the own node; None for as many as there are.
    """
    rank_ED = placement.rank_ED
    quota_PED = np.zeros((*counts_PE.shape, rank_ED.shape[1]), dtype=np.int64)
    expert, replica = np.nonzero(rank_ED >= 0)
    own = np.minimum(local_rows(counts_PE, placement), rows_ED)
    if own_ED is not None:
        own = np.minimum(own, own_ED)
    quota_PED[rank_ED[expert, replica], expert, replica] = own[expert, replica]
    if ranks_per_node is not None:
        for first in range(0, placement.num_ranks, ranks_per_node):
            node = slice(first, first + ranks_per_node)
            supply_PE = counts_PE[node] - quota_PED[node].sum(axis=2)
            on_node = (rank_ED >= first) & (rank_ED < first + ranks_per_node)
            room_ED = np.where(on_node, rows_ED - quota_PED.sum(axis=0), 0)
            if near_ED is not None:
                room_ED = np.minimum(room_ED, near_ED)
            quota_PED[node] += _fill_in_order(supply_PE, room_ED)
    quota_PED += _fill_in_order(counts_PE - quota_PED.sum(axis=2), rows_ED - quota_PED.sum(axis=0))
    return quota_PED
