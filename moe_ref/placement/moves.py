"""From one placement to another: which replica goes where, in which order, and what it costs.

A rank that gets an expert receives it from some rank that holds it at that time. In one round a rank sends at most one
replica and receives at most one, so the transfers of a round don't compete for a link. To make room, a rank drops an
expert that it won't keep, but never the last copy in existence. Every rank has one spare slot besides its X: with it
the order always exists. (If every receiver were full of last copies, each would owe more experts to others than it
waits for; all of them together can't.)

What moves with a replica: weights, fp32 master weights, both moments of the optimiser. Only between optimiser steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_ref.replicas import Placement


@dataclass(frozen=True)
class Move:
    """One transfer.

    Attributes:
        expert: logical expert.
        source, target: ranks.
        slot: slot of the expert on the target in the new placement.
        drops: expert that the target drops to make room; None if its spare or an empty slot is free.
        round: transfers of one round run at the same time.
        num_bytes: size of the replica.
    """

    expert: int
    source: int
    target: int
    slot: int
    drops: int | None
    round: int
    num_bytes: int


@dataclass(frozen=True)
class MovePlan:
    """All transfers between two placements, in order."""

    moves: tuple[Move, ...]
    rounds: int

    @property
    def num_bytes(self) -> int:
        """Bytes over the network."""
        return sum(move.num_bytes for move in self.moves)


@dataclass(frozen=True)
class MoveCost:
    """What a transfer costs.

    Attributes:
        bytes_per_replica: of one layer's expert with all its state.
        intra_bytes_per_s, inter_bytes_per_s: from rank to rank inside a node, and between nodes.
        ranks_per_node: consecutive ranks that share a node.
        round_latency_s: start of a round and its barrier.
    """

    bytes_per_replica: int
    intra_bytes_per_s: float = 450e9
    inter_bytes_per_s: float = 50e9
    ranks_per_node: int = 8
    round_latency_s: float = 50e-6

    def __post_init__(self) -> None:
        for name in ("bytes_per_replica", "intra_bytes_per_s", "inter_bytes_per_s", "ranks_per_node"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a positive number")

    def seconds(self, plan: MovePlan) -> float:
        """Time of a plan: per round its latency and its slowest transfer."""
        slowest = [0.0] * plan.rounds
        for move in plan.moves:
            near = move.source // self.ranks_per_node == move.target // self.ranks_per_node
            speed = self.intra_bytes_per_s if near else self.inter_bytes_per_s
            slowest[move.round] = max(slowest[move.round], move.num_bytes / speed)
        return sum(slowest) + plan.rounds * self.round_latency_s


def plan_moves(old: Placement, new: Placement, cost: MoveCost) -> MovePlan:
    """Transfers that turn `old` into `new`; deterministic.

    Sources are taken inside the target's node first, then by rank.

    Raises:
        ValueError: the placements differ in ranks or experts.
    """
    if (old.num_ranks, old.num_experts) != (new.num_ranks, new.num_experts):
        raise ValueError(
            f"placements of {old.num_experts} experts on {old.num_ranks} ranks and of {new.num_experts} on "
            f"{new.num_ranks}; moves are planned between placements of the same sizes"
        )
    holders = [set(ranks) for ranks in old.ranks_of_expert]
    held = [set(experts) for experts in old.experts_of_rank]
    wanted = [set(experts) for experts in new.experts_of_rank]
    capacity = max(old.slots, new.slots) + 1
    pending = [(e, rank) for e, ranks in enumerate(new.ranks_of_expert) for rank in ranks if rank not in holders[e]]
    moves, rounds = [], 0
    while pending:
        sending: set[int] = set()
        receiving: set[int] = set()
        arrivals, later = [], []
        for expert, target in pending:
            node = target // cost.ranks_per_node
            sources = sorted(holders[expert] - sending, key=lambda rank: (rank // cost.ranks_per_node != node, rank))
            drops = None
            full = len(held[target]) >= capacity
            if full:
                drops = min((f for f in held[target] - wanted[target] if len(holders[f]) > 1), default=None)
            if target in receiving or not sources or (full and drops is None):
                later.append((expert, target))
                continue
            if drops is not None:
                held[target].remove(drops)
                holders[drops].remove(target)
                sources = [rank for rank in sources if rank in holders[expert]]
            sending.add(sources[0])
            receiving.add(target)
            arrivals.append((expert, target))
            slot = new.experts_of_rank[target].index(expert)
            moves.append(Move(expert, sources[0], target, slot, drops, rounds, cost.bytes_per_replica))
        for expert, target in arrivals:  # what arrives in a round can be sent on from the next round
            held[target].add(expert)
            holders[expert].add(target)
        assert arrivals, "no transfer is possible although one spare slot per rank guarantees one"
        pending, rounds = later, rounds + 1
    return MovePlan(tuple(moves), rounds)


def relabelled(new: Placement, old: Placement) -> Placement:
    """The same hypergraph with its ranks renamed so that many experts are where they were: fewer moves.

    Greedy: the pair of (new, old) rank with most experts in common first, ties by id.
    """
    common = {
        (a, b): len(set(new.experts_of_rank[a]) & set(old.experts_of_rank[b]))
        for a in range(new.num_ranks)
        for b in range(old.num_ranks)
    }
    name: dict[int, int] = {}
    taken: set[int] = set()
    for a, b in sorted(common, key=lambda pair: (-common[pair], pair)):
        if a not in name and b not in taken:
            name[a] = b
            taken.add(b)
    return Placement.from_replicas([[name[rank] for rank in ranks] for ranks in new.ranks_of_expert], new.num_ranks)
