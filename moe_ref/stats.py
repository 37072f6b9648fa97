"""What a forward did: loads, drops, bytes and auxiliary losses, returned on request and never kept as hidden state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_ref import gate
from moe_ref.config import MoEConfig
from moe_ref.pipeline import Record


@dataclass(frozen=True, repr=False)
class LayerStats:
    """What a forward did, over all ranks.

    Attributes:
        expert_load, expert_load_before_capacity: rows per logical expert, int64 [E].
        rank_load: rows that each rank computed, int64 [P]; tokens_per_rank: S of each.
        dropped: routes beyond capacity; bytes_local, bytes_remote: dispatched row bytes that stayed and that crossed,
            in the layer's wire format; as many come back.
        balance_loss, z_loss: differentiable scalars over this process' tokens; None where routing was handed in.
        record: plan, layout and the time of each stage.
    """

    expert_load: np.ndarray
    expert_load_before_capacity: np.ndarray
    rank_load: np.ndarray
    tokens_per_rank: np.ndarray
    dropped: int
    bytes_local: int
    bytes_remote: int
    balance_loss: Tensor | None
    z_loss: Tensor | None
    record: Record

    def __repr__(self) -> str:
        """One line: the arrays and the record hold thousands of numbers."""
        size = f"{len(self.expert_load)} experts, {int(self.rank_load.sum())} rows on {len(self.rank_load)} ranks"
        return (
            f"LayerStats({size}, max_over_mean={self.max_over_mean:.3f}, dropped={self.dropped}, "
            f"bytes_local={self.bytes_local}, bytes_remote={self.bytes_remote})"
        )

    @property
    def max_over_mean(self) -> float:
        """Load of the busiest rank over the mean; 1.0 is perfect (and an empty batch is)."""
        mean = float(self.rank_load.mean())
        return float(self.rank_load.max()) / mean if mean else 1.0

    @classmethod
    def of(cls, record: Record, config: MoEConfig, dtype: torch.dtype) -> LayerStats:
        """Statistics of a forward of a layer with this config that computed in `dtype`."""
        assert record.counts_PE is not None
        assert record.before_PE is not None
        assert record.plan is not None
        assert record.routing is not None
        assert record.tokens_P is not None
        sizes_PG = record.plan.quota_by_slot().sum(axis=2)
        sent_PG = sizes_PG if record.sent_PG is None else record.sent_PG
        total, local = int(sent_PG.sum()), int(sent_PG.trace())
        row_bytes = config.hidden * dtype.itemsize
        load_E = torch.from_numpy(record.before_PE.sum(axis=0))
        losses: dict[str, Tensor | None] = {"balance": None, "z": None}
        if all(r.scores_SE is not None for r in record.routing):
            share = [r.expert_SK.shape[0] for r in record.routing]
            whole = max(sum(share), 1)
            losses["balance"] = torch.stack(
                [gate.balance_loss(r, load_E) * (s / whole) for r, s in zip(record.routing, share, strict=True)]
            ).sum()
            losses["z"] = torch.stack(
                [gate.z_loss(r) * (s / whole) for r, s in zip(record.routing, share, strict=True)]
            ).sum()
        return cls(
            expert_load=record.counts_PE.sum(axis=0),
            expert_load_before_capacity=record.before_PE.sum(axis=0),
            rank_load=sizes_PG.sum(axis=0),
            tokens_per_rank=record.tokens_P,
            dropped=int(record.before_PE.sum() - record.counts_PE.sum()),
            bytes_local=local * row_bytes,
            bytes_remote=(total - local) * row_bytes,
            balance_loss=losses["balance"],
            z_loss=losses["z"],
            record=record,
        )
