"""A plan: how many rows every source rank sends to every replica of every expert.

A plan is a pure function of (counts_PE, placement): every rank derives the same one from the gathered counts, whatever
happened before. Which of a rank's rows go to which replica needs no further word: its rows for an expert, in token
order, fill the replicas in replica order, each up to its quota.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from moe_ref.replicas import Placement


@dataclass(frozen=True)
class Plan:
    """Integer quotas of one micro-batch.

    Attributes:
        placement: the replica sets that the quotas speak of.
        quota_PED: rows from source rank p for expert e to its replica j, int64 [P, E, max_replicas].
        certificate: ranks whose trapped load proves that no plan has a smaller maximum (empty if not computed).
    """

    placement: Placement
    quota_PED: np.ndarray
    certificate: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def plain(cls, counts_PE: np.ndarray, placement: Placement) -> Plan:
        """The only plan there is when every expert has one replica (plain expert parallelism)."""
        if placement.max_replicas != 1:
            raise ValueError(
                f"the placement has up to {placement.max_replicas} replicas of an expert; "
                "use moe_ref.balance.schedule to divide the load between them"
            )
        return cls(placement, np.asarray(counts_PE, dtype=np.int64)[:, :, None])

    @property
    def counts_PE(self) -> np.ndarray:
        """Rows of each source rank for each expert."""
        return self.quota_PED.sum(axis=2)

    def quota_by_slot(self) -> np.ndarray:
        """Rows from source p to slot x of rank g, int64 [P, G, X]: the form that layouts take."""
        placement = self.placement
        out = np.zeros((self.quota_PED.shape[0], placement.num_ranks, placement.slots), dtype=np.int64)
        expert, replica = np.nonzero(placement.rank_ED >= 0)
        rank, slot = placement.rank_ED[expert, replica], placement.slot_ED[expert, replica]
        out[:, rank, slot] = self.quota_PED[:, expert, replica]
        return out

    @property
    def rank_loads(self) -> np.ndarray:
        """Rows that each rank computes, int64 [P]."""
        return self.quota_by_slot().sum(axis=(0, 2))

    @property
    def max_load(self) -> int:
        """Rows of the busiest rank."""
        return int(self.rank_loads.max())

    @property
    def lower_bound(self) -> int:
        """Rows that some rank computes under every plan: the load trapped in the certificate, divided by its ranks.

        The load of an expert is trapped if all its replicas lie in the certificate; 0 without a certificate.
        """
        if not self.certificate:
            return 0
        load_E = self.counts_PE.sum(axis=0)
        trapped = sum(
            int(load_E[expert])
            for expert, ranks in enumerate(self.placement.ranks_of_expert)
            if self.certificate.issuperset(ranks)
        )
        return -(-trapped // len(self.certificate))  # rounded up

    @property
    def is_optimal(self) -> bool:
        """Whether the certificate proves that no plan has a smaller maximum load."""
        return bool(self.certificate) and self.max_load == self.lower_bound

    @property
    def local_share(self) -> float:
        """Share of rows that never leave their rank; 1.0 for an empty batch."""
        by_slot = self.quota_by_slot()
        total = int(by_slot.sum())
        return float(by_slot.sum(axis=2).trace() / total) if total else 1.0

    def digest(self) -> str:
        """Hash of placement and quotas; equal on all ranks or something is wrong."""
        text = repr((self.placement.ranks_of_expert, self.placement.num_ranks)).encode()
        return hashlib.sha256(text + np.ascontiguousarray(self.quota_PED, dtype="<i8").tobytes()).hexdigest()
