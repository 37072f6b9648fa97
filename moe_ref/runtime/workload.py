"""A layer and a batch by their sizes, for timing: no weights, no tokens, only who goes where.

Letters: S tokens of a rank, H hidden, D intermediate, E experts, K choices per token, P ranks, T tile rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from moe_ref.errors import UsageError
from moe_ref.layout import align_up, ceil_div
from moe_ref.replicas import Placement
from moe_ref.runtime.callplan import CallPlan, count_experts, make_call
from moe_ref.runtime.tasks import TileShape, check_fields


@dataclass(frozen=True)
class Workload:
    """What to simulate.

    Attributes:
        ranks, tokens (per rank), experts, top_k, hidden, intermediate, gated: P, S, E, K, H, D, kind of FFN.
        element_size: bytes; 2 is bf16, 4 is fp32.
        tile_rows, tile_columns: of a GEMM tile.
        token_rows: tokens of a Combine tile; small, since all Combine tiles become ready near the end and should then
            fill the processors.
        layout: "compact" or "fixed" (the paper's, with capacity ceil(capacity_factor * S * K / E), or as many slots as
            the fullest needs if capacity_factor is None).
        capacity_factor: drops routes beyond the capacity, in token order; None drops nothing.
        skew: 0 routes evenly; otherwise expert e is drawn with a weight proportional to (e' + 1) ** -skew, e' a random
            permutation of the experts that is the same on all ranks.
        seed: of the routing.
    """

    ranks: int
    tokens: int
    experts: int
    top_k: int = 2
    hidden: int = 2048
    intermediate: int = 2048
    gated: bool = False
    element_size: int = 2
    tile_rows: int = 128
    tile_columns: int = 256
    token_rows: int = 32
    layout: Literal["compact", "fixed"] = "compact"
    capacity_factor: float | None = None
    skew: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("ranks", "experts", "top_k", "hidden", "intermediate", "tile_rows", "tile_columns", "token_rows"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.tokens < 0:
            raise UsageError(f"tokens is {self.tokens}, expected at least 0")
        if self.top_k > self.experts:
            raise UsageError(f"top_k is {self.top_k}, expected at most experts = {self.experts}")
        if not 0 <= self.skew < np.inf:
            raise UsageError(f"skew is {self.skew}, expected 0 (even) or more")
        if self.layout not in ("compact", "fixed"):
            raise UsageError(f"layout is {self.layout!r}, expected compact or fixed")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < np.inf:
            raise UsageError(f"capacity_factor is {self.capacity_factor}, expected a positive number or none")

        shape = self.shape
        check_fields(max(self.slots, self.ranks), 1, max(shape.columns0, shape.columns1))

    def replace(self, **changes: Any) -> Workload:
        """A copy with some sizes changed, checked again."""
        return replace(self, **changes)

    @property
    def shape(self) -> TileShape:
        """Tile sizes."""
        return TileShape(
            self.hidden,
            self.intermediate,
            self.top_k,
            self.gated,
            self.tile_rows,
            self.tile_columns,
            self.token_rows,
            self.element_size,
        )

    @property
    def slots(self) -> int:
        """X = ceil(E / P)"""
        return ceil_div(self.experts, self.ranks)

    @property
    def flops_per_rank(self) -> int:
        """S * K * (2 H * up columns + 2 D H): the routed rows' products, padding left out, balanced."""
        return self.tokens * self.top_k * 2 * self.hidden * (self.shape.up_columns + self.intermediate)

    @property
    def memory_bytes(self) -> int:
        """What a simulation of one call keeps at least: routes in a few int64 arrays, some 1 kB per row tile."""
        routes = self.ranks * self.tokens * self.top_k
        drawn = 0 if self.skew == 0 and self.top_k**2 <= self.experts else self.tokens * self.experts * 16
        return 32 * routes + 1000 * (routes // self.tile_rows) + drawn

    def capacity(self) -> int | None:
        """C = ceil(factor * S * K / E), None when dropless."""
        if self.capacity_factor is None:
            return None
        return ceil_div(int(np.ceil(self.capacity_factor * self.tokens * self.top_k)), self.experts)

    def routing(self) -> list[np.ndarray]:
        """Expert of every (token, choice) of every rank, int64 [S, K]; K distinct experts each, -1 where dropped."""
        out = []
        for rank in range(self.ranks):
            rng = np.random.default_rng((self.seed, rank))
            ids = _draw(rng, self.tokens, self.experts, self.top_k, self._weights())
            capacity = self.capacity()
            out.append(ids if capacity is None else _keep(ids, self.experts, capacity))
        return out

    def _weights(self) -> np.ndarray | None:
        if self.skew == 0:
            return None
        order = np.random.default_rng((self.seed, 1 << 20)).permutation(self.experts)
        return (order + 1.0) ** -self.skew

    def call(self, epoch: int = 0, routing: list[np.ndarray] | None = None) -> CallPlan:
        """Geometry of one call; another epoch draws another routing unless one is given."""
        ids = (replace(self, seed=self.seed + epoch) if epoch else self).routing() if routing is None else routing
        placement = Placement.contiguous(self.experts, self.ranks)
        capacity = None
        if self.layout == "fixed":
            fullest = max(int(count_experts(i, self.experts).max(initial=0)) for i in ids)
            capacity = align_up(self.capacity() or max(fullest, 1), self.tile_rows)
        early = self.capacity_factor is not None
        return make_call(ids, placement, self.shape, capacity=capacity, epoch=epoch, early_dispatch=early)


def _draw(rng: np.random.Generator, tokens: int, experts: int, top_k: int, weights: np.ndarray | None) -> np.ndarray:
    """K distinct experts per token."""
    if weights is not None:
        # Gumbel trick: the K largest of log weight + noise are a draw without replacement.
        noisy = np.log(weights) + rng.gumbel(size=(tokens, experts))
        return np.argpartition(-noisy, top_k - 1, axis=1)[:, :top_k].astype(np.int64)
    if top_k * top_k > experts:
        return np.argpartition(rng.random((tokens, experts)), top_k - 1, axis=1)[:, :top_k].astype(np.int64)
    ids = rng.integers(experts, size=(tokens, top_k))
    again = np.arange(tokens)
    while len(again):
        ordered = np.sort(ids[again], axis=1)
        again = again[(ordered[:, 1:] == ordered[:, :-1]).any(axis=1)]
        ids[again] = rng.integers(experts, size=(len(again), top_k))
    return ids


def _keep(ids_SK: np.ndarray, experts: int, capacity: int) -> np.ndarray:
    """Mask the routes beyond `capacity` per expert, first come, first served."""
    flat = ids_SK.ravel()
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=experts)
    position = np.empty_like(flat)
    position[order] = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.where(position < capacity, flat, -1).reshape(ids_SK.shape)
