"""A placement: which ranks hold a replica of which expert.

This is the one place that converts logical expert ids (0 .. E-1, what the gate speaks) to physical ones
(rank, slot) and back. As a hypergraph (FineMoE, section 5): ranks are vertices, an expert is the hyperedge of the ranks
that hold it. The replicas of an expert are numbered in the order in which its ranks are listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Placement:
    """Replica sets of all experts.

    Attributes:
        ranks_of_expert: for each logical expert the ranks that hold it, in replica order.
        num_ranks: P.

    Raises:
        ValueError: an expert without replica, a rank twice in one expert's set (two copies on one GPU serve no
            purpose), or a rank outside [0, num_ranks); the message names the expert.
    """

    ranks_of_expert: tuple[tuple[int, ...], ...]
    num_ranks: int

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks is {self.num_ranks}, expected at least 1")
        if not self.ranks_of_expert:
            raise ValueError("a placement needs at least one expert")
        for expert, ranks in enumerate(self.ranks_of_expert):
            if not ranks:
                raise ValueError(f"expert {expert} has no replica; every expert needs at least one rank")
            if len(set(ranks)) != len(ranks):
                raise ValueError(f"expert {expert} is placed twice on one rank: {list(ranks)}; ranks must be distinct")
            for rank in ranks:
                if not 0 <= rank < self.num_ranks:
                    raise ValueError(f"expert {expert} is placed on rank {rank}, expected 0 to {self.num_ranks - 1}")

    def __reduce__(self) -> tuple[type[Placement], tuple[tuple[tuple[int, ...], ...], int]]:
        """Copy and pickle the replica sets only: tables and solver models that were built for them stay behind."""
        return type(self), (self.ranks_of_expert, self.num_ranks)

    @classmethod
    def from_replicas(cls, ranks_of_expert: Sequence[Sequence[int]], num_ranks: int) -> Placement:
        """Placement from the list of ranks of each expert, in replica order."""
        return cls(tuple(tuple(int(r) for r in ranks) for ranks in ranks_of_expert), num_ranks)

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> Placement:
        """Plain expert parallelism: one replica each, experts in blocks; the first E mod P ranks hold one more."""
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}, expected at least 1")
        base, extra = divmod(num_experts, num_ranks)
        owners = [rank for rank in range(num_ranks) for _ in range(base + (rank < extra))]
        return cls(tuple((rank,) for rank in owners), num_ranks)

    @cached_property
    def in_blocks(self) -> bool:
        """Whether this is plain expert parallelism, as `contiguous` makes it."""
        return self == Placement.contiguous(self.num_experts, self.num_ranks)

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.ranks_of_expert)

    @property
    def max_replicas(self) -> int:
        """Largest replica count of any expert."""
        return max(len(ranks) for ranks in self.ranks_of_expert)

    @cached_property
    def experts_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the logical experts that it holds, ascending; the position is the slot."""
        held: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for expert, ranks in enumerate(self.ranks_of_expert):
            for rank in ranks:
                held[rank].append(expert)
        return tuple(tuple(experts) for experts in held)

    @cached_property
    def replicas_of_rank(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each rank its (logical expert, replica) pairs, by expert: the edges of the hypergraph at this vertex."""
        held: list[list[tuple[int, int]]] = [[] for _ in range(self.num_ranks)]
        for expert, ranks in enumerate(self.ranks_of_expert):
            for replica, rank in enumerate(ranks):
                held[rank].append((expert, replica))
        return tuple(tuple(replicas) for replicas in held)

    @cached_property
    def replicas_by_rank(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each logical expert its (rank, replica) pairs, ranks ascending."""
        return tuple(
            tuple(sorted((rank, replica) for replica, rank in enumerate(ranks))) for ranks in self.ranks_of_expert
        )

    @cached_property
    def rounds(self) -> tuple[tuple[int, ...], ...]:
        """The experts with several replicas, in rounds: two of the same round share no rank, so a round's experts can
        be worked on at the same time. Each is in the first round, in the order of experts, that has its ranks free."""
        rounds: list[list[int]] = []
        busy: list[set[int]] = []
        for expert, ranks in enumerate(self.ranks_of_expert):
            if len(ranks) == 1:
                continue
            turn = next((n for n, taken in enumerate(busy) if taken.isdisjoint(ranks)), len(busy))
            if turn == len(busy):
                rounds.append([])
                busy.append(set())
            rounds[turn].append(expert)
            busy[turn].update(ranks)
        return tuple(tuple(experts) for experts in rounds)

    @cached_property
    def replica_counts(self) -> np.ndarray:
        """Number of replicas of each expert, int64 [E]."""
        return np.array([len(ranks) for ranks in self.ranks_of_expert], dtype=np.int64)

    @property
    def slots(self) -> int:
        """X: expert slots of the fullest rank; others leave their last slots empty."""
        return max(len(experts) for experts in self.experts_of_rank)

    def check_slots(self, slots: int | None = None) -> None:
        """Validate that the ranks hold equally many replicas: the memory of a rank is a fixed number of slots.

        Args:
            slots: replicas that every rank must hold; None for as equal as possible, differing by at most one.

        Raises:
            ValueError: naming a rank that holds too many or too few, and the numbers that would be legal.
        """
        held = [len(experts) for experts in self.experts_of_rank]
        total = sum(held)
        if slots is None:
            low, high = total // self.num_ranks, -(-total // self.num_ranks)
        else:
            low = high = slots
        for rank, count in enumerate(held):
            if not low <= count <= high:
                expected = f"{low}" if low == high else f"{low} or {high}"
                raise ValueError(
                    f"rank {rank} holds {count} replicas, expected {expected}: {total} replicas on {self.num_ranks} "
                    f"ranks; equal slots need a multiple of {self.num_ranks} replicas, such as "
                    f"{max(total // self.num_ranks, 1) * self.num_ranks} or "
                    f"{(total // self.num_ranks + 1) * self.num_ranks}"
                )

    @cached_property
    def slot_ED(self) -> np.ndarray:
        """Slot of replica j of expert e on its rank, int64 [E, max_replicas]; -1 where there is no such replica."""
        slot_of = [{expert: x for x, expert in enumerate(experts)} for experts in self.experts_of_rank]
        table = np.full((self.num_experts, self.max_replicas), -1, dtype=np.int64)
        for expert, ranks in enumerate(self.ranks_of_expert):
            for replica, rank in enumerate(ranks):
                table[expert, replica] = slot_of[rank][expert]
        return table

    @cached_property
    def rank_ED(self) -> np.ndarray:
        """Rank of replica j of expert e, int64 [E, max_replicas]; -1 where there is no such replica."""
        table = np.full((self.num_experts, self.max_replicas), -1, dtype=np.int64)
        for expert, ranks in enumerate(self.ranks_of_expert):
            table[expert, : len(ranks)] = ranks
        return table
