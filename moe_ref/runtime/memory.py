"""What the symmetric heap costs: formula, allocated bytes, and share of the GPU's memory, for both layouts.

    fixed      P * R * B * X * C * H * element size, C = ceil(capacity_factor * S * K / E) rounded up to whole tiles;
               drops what exceeds C
    compact    B * (align(min(K, X) * S * P, T) + X * T + K * S) * H * element size: rows in and results back; sized for
               the worst case, every rank sending all it can to one rank, and drops nothing

The worst case of the compact layout is large because "dropless" is a promise about every batch. What a batch really
touches is its own rows (plus less than a tile per expert): the last column, for an even routing.

Letters: S tokens of a rank, H hidden, E experts, K choices, P ranks, X local expert slots, C capacity, R rounds,
B sides, T tile rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from moe_ref.config import MoEConfig
from moe_ref.layout import ROUNDS, SIDES, CompactLayout, FixedLayout, align_up
from moe_ref.runtime.workload import Workload

EXPERTS = (8, 16, 32, 64, 128)
TOKENS = (4096, 8192, 16384)


@dataclass(frozen=True)
class HeapBytes:
    """Symmetric heap of one rank for one layer.

    Attributes:
        formula: as the config states it. allocated: bytes of the storage that tensors of that shape take.
        touched: bytes that a batch with even routing writes, both sides.
    """

    layout: str
    dtype: str
    experts: int
    tokens: int
    formula: int
    allocated: int
    touched: int

    def share(self, memory_bytes: float) -> float:
        """Of a memory of this size."""
        return self.allocated / memory_bytes


def heap_bytes(config: MoEConfig, ranks: int) -> HeapBytes:
    """Formula, allocation and use for a config's layout with S = max_tokens.

    The storage is really allocated (and given back untouched, so the pages are never used).
    """
    tokens, tile, row = config.max_tokens, config.tile_rows, config.row_bytes
    work = Workload(ranks, tokens, config.experts, config.top_k, config.hidden, element_size=config.element_size)
    work = work.replace(tile_rows=tile)
    if config.layout == "fixed":
        capacity = align_up(config.capacity(tokens) or tokens, tile)
        shape = (ranks, ROUNDS, SIDES, config.slots(ranks), capacity, config.hidden)
        allocated = _storage(shape, config.torch_dtype)
        call = work.replace(layout="fixed", capacity_factor=config.capacity_factor).call()
        assert isinstance(call.layout, FixedLayout)
        sent = int(call.layout.quota_PGX[0].sum()) + int(call.layout.quota_PGX[:, 0].sum())
        return HeapBytes(
            "fixed", config.dtype, config.experts, tokens, config.fixed_bytes(ranks), allocated, SIDES * sent * row
        )
    rows_in = align_up(config.max_rows(ranks), tile) + config.slots(ranks) * tile
    allocated = _storage((SIDES, rows_in, config.hidden), config.torch_dtype)
    back = (config.top_k if config.wire_format == "routes" else ranks - 1) * tokens
    allocated += _storage((SIDES, back, config.hidden), config.torch_dtype)
    call = work.call()
    assert isinstance(call.layout, CompactLayout)
    touched = max(call.layout.heap_rows(r) for r in range(ranks)) + back
    return HeapBytes(
        "compact", config.dtype, config.experts, tokens, config.compact_bytes(ranks), allocated, SIDES * touched * row
    )


def _storage(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.empty(tuple(shape), dtype=dtype).untyped_storage().nbytes()


@cache
def paper_table(ranks: int = 8) -> tuple[HeapBytes, ...]:
    """The paper's layer (H = D = 2048, K = 2): fixed layout with capacity factor 1.0, compact without drops."""
    out = []
    for dtype in ("float32", "bfloat16"):
        for tokens in TOKENS:
            for experts in EXPERTS:
                base = MoEConfig(
                    2048,
                    2048,
                    experts,
                    2,
                    activation="relu",
                    gated=False,
                    max_tokens=tokens,
                    tile_rows=128,
                    dtype=dtype,
                )
                out.append(heap_bytes(base.replace(layout="fixed", capacity_factor=1.0), ranks))
                out.append(heap_bytes(base, ranks))
    return tuple(out)


def table_rows(entries: Sequence[HeapBytes], memory_bytes: float) -> list[dict[str, Any]]:
    """Plain rows for a report: bytes, and shares of a memory of `memory_bytes`."""
    return [
        {
            "layout": e.layout,
            "dtype": e.dtype,
            "experts": e.experts,
            "tokens": e.tokens,
            "formula_bytes": e.formula,
            "allocated_bytes": e.allocated,
            "touched_bytes": e.touched,
            "share": e.share(memory_bytes),
        }
        for e in entries
    ]
