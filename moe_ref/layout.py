"""Where a row lives in the symmetric heap: pure integer arithmetic, no torch.

A routed row has one home in the memory of the rank that owns its expert, and its sender can compute that address
without asking anyone. Two layouts answer "where":

* `FixedLayout`, the paper's symmetric tensor L[P, R, B, X, C, H] (FlashMoE, section 3): every (sender, round, side,
  local expert) has C slots of its own. Nothing has to be known about the other senders; the price is padding.
* `CompactLayout`: exact offsets from the all-gathered counts. Rows stand expert-major, then by source rank, then by
  token; only the start of an expert is rounded up to a whole tile. Nothing is dropped, tiles mix source ranks, and the
  price is one exchange of P x E integers before the first row can be sent.

Both are free of write conflicts by construction: distinct rows have distinct coordinates (the tests enumerate them).

The functions at the top take Python ints *or* traced integers of the kernel's DSL and use only + - * // and
comparison-free arithmetic: the megakernel traces these very functions, so an offset can't differ between the two.
Operands are never negative (the DSL's // and % disagree there).

Letters: S tokens of a rank, H hidden, E experts (logical), K choices per token, P ranks, X local expert slots of a
rank, C capacity, R rounds (0 dispatch, 1 combine), B staging side, N routed rows, T tile rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from moe_ref.balance.plan import Plan

ROUNDS = 2
"""Round 0 carries tokens to the experts, round 1 carries results home."""

SIDES = 2
"""Staging sides alternate from call to call, so a fast rank never overwrites what a slow peer still reads."""


# --- shared with the kernel: loop-free integer arithmetic ----------------------------------------------------------


def ceil_div(value, divisor):
    """Smallest integer not below value / divisor; value >= 0, divisor > 0."""
    return (value + divisor - 1) // divisor


def align_up(value, multiple):
    """Smallest multiple of `multiple` not below `value`."""
    return ceil_div(value, multiple) * multiple


def compact_row(tile_start, rows_before, index, tile_rows):
    """Heap row of the `index`-th row that a source sends to an expert slot, in the compact layout.

    tile_start: tiles of all slots before this one on the same rank; rows_before: rows of lower source ranks for this
    slot; index: position among the source's own rows for the slot (token order).
    """
    return tile_start * tile_rows + rows_before + index


def fixed_row(source, round_, side, slot, index, slots, capacity):
    """Heap row of coordinate L[source, round, side, slot, index] in the paper's layout, H apart."""
    return (((source * ROUNDS + round_) * SIDES + side) * slots + slot) * capacity + index


def return_row(token, choice, top_k):
    """Row of choice `choice` of `token` in the home rank's result buffer: one row per choice, so no atomics."""
    return token * top_k + choice


def _consecutive(start, rows) -> np.ndarray:
    """start[i], start[i] + 1, ... (rows[i] numbers), one run after the other; int64."""
    start_N, rows_N = np.asarray(start, dtype=np.int64).ravel(), np.asarray(rows, dtype=np.int64).ravel()
    before_N = np.cumsum(rows_N) - rows_N
    return np.repeat(start_N - before_N, rows_N) + np.arange(int(rows_N.sum()), dtype=np.int64)


# --- the layouts as the reference uses them ------------------------------------------------------------------------


@dataclass(frozen=True)
class CompactLayout:
    """Exact offsets for one micro-batch, every rank's buffer at once.

    Attributes:
        tile_rows: T, rows of a tile; each expert slot starts on a multiple of it.
        quota_PGX: rows that source rank p sends to slot x of rank g, int64 [P, G, X] with G = P.
    """

    tile_rows: int
    quota_PGX: np.ndarray

    @classmethod
    def from_plan(cls, plan: Plan, tile_rows: int) -> CompactLayout:
        """Build from a plan; the result is a pure function of the plan."""
        return cls(tile_rows, plan.quota_by_slot())

    @property
    def num_ranks(self) -> int:
        return self.quota_PGX.shape[0]

    @property
    def slots(self) -> int:
        return self.quota_PGX.shape[2]

    @property
    def slot_rows_GX(self) -> np.ndarray:
        """Rows of each slot of each rank, all sources together."""
        return self.quota_PGX.sum(axis=0)

    @property
    def slot_tiles_GX(self) -> np.ndarray:
        """Tiles of each slot; a slot without rows has none."""
        return ceil_div(self.slot_rows_GX, self.tile_rows)

    @property
    def tile_start_GX(self) -> np.ndarray:
        """Exclusive running sum of tiles along a rank's slots."""
        tiles_GX = self.slot_tiles_GX
        return np.cumsum(tiles_GX, axis=1) - tiles_GX

    @property
    def rows_before_PGX(self) -> np.ndarray:
        """Rows of lower source ranks in the same slot."""
        return np.cumsum(self.quota_PGX, axis=0) - self.quota_PGX

    def heap_rows(self, rank: int) -> int:
        """Rows of the dispatch buffer of `rank`, tile padding included."""
        return int(self.slot_tiles_GX[rank].sum()) * self.tile_rows

    def first_row(self, source: int, rank: int, slot: int) -> int:
        """Heap row on `rank` of the first row that `source` sends to `slot`."""
        return int(
            compact_row(self.tile_start_GX[rank, slot], self.rows_before_PGX[source, rank, slot], 0, self.tile_rows)
        )

    def receive_rows(self, rank: int) -> np.ndarray:
        """Heap row of every row that `rank` receives, in the order (source, slot, token); int64 [N]."""
        start_PX = self.tile_start_GX[rank] * self.tile_rows + self.rows_before_PGX[:, rank]
        return _consecutive(start_PX, self.quota_PGX[:, rank])

    def send_rows(self, source: int) -> np.ndarray:
        """Heap row on its destination of every row that `source` sends, by (destination, slot, token); int64 [N]."""
        start_GX = compact_row(self.tile_start_GX, self.rows_before_PGX[source], 0, self.tile_rows)
        return _consecutive(start_GX, self.quota_PGX[source])

    def held_rows(self, rank: int) -> np.ndarray:
        """Heap row of every row that `rank` computes, in the order (slot, source, token); int64 [N]."""
        return _consecutive(self.tile_start_GX[rank] * self.tile_rows, self.slot_rows_GX[rank])

    def segments(self, rank: int) -> list[tuple[int, int, int]]:
        """(slot, first heap row, rows) for every slot of `rank` that has rows."""
        start_X, rows_X = self.tile_start_GX[rank] * self.tile_rows, self.slot_rows_GX[rank]
        return [(x, int(start_X[x]), int(rows_X[x])) for x in range(self.slots) if rows_X[x] > 0]


@dataclass(frozen=True)
class FixedLayout:
    """The paper's L[P, R, B, X, C, H]: capacity slots, padded in place by the receiver.

    Attributes:
        capacity: C, slots per (source rank, local expert).
        quota_PGX: rows that source rank p sends to slot x of rank g, int64; none may exceed the capacity.
        side: staging side of this call.
    """

    capacity: int
    quota_PGX: np.ndarray
    side: int = 0

    def __post_init__(self) -> None:
        if self.quota_PGX.size and int(self.quota_PGX.max()) > self.capacity:
            p, g, x = (int(i) for i in np.unravel_index(int(self.quota_PGX.argmax()), self.quota_PGX.shape))
            raise ValueError(
                f"rank {p} sends {int(self.quota_PGX.max())} rows to slot {x} of rank {g}, but the fixed layout has "
                f"{self.capacity} per source and slot; raise the capacity, set capacity_factor, or use layout='compact'"
            )

    @classmethod
    def from_plan(cls, plan: Plan, capacity: int, side: int = 0) -> FixedLayout:
        """Build from a plan; raises ValueError naming source, rank and slot where rows exceed the capacity."""
        return cls(capacity, plan.quota_by_slot(), side)

    @property
    def num_ranks(self) -> int:
        return self.quota_PGX.shape[0]

    @property
    def slots(self) -> int:
        return self.quota_PGX.shape[2]

    def heap_rows(self, rank: int) -> int:
        """Rows of the whole symmetric tensor, the same on every rank: P * R * B * X * C."""
        return self.num_ranks * ROUNDS * SIDES * self.slots * self.capacity

    def first_row(self, source: int, rank: int, slot: int) -> int:
        """Heap row on `rank` of the first row that `source` sends to `slot` in round 0."""
        return fixed_row(source, 0, self.side, slot, 0, self.slots, self.capacity)

    def first_return_row(self, owner: int, slot: int) -> int:
        """Heap row on the home rank where `owner` puts back the first result of its `slot` (round 1)."""
        return fixed_row(owner, 1, self.side, slot, 0, self.slots, self.capacity)

    def receive_rows(self, rank: int) -> np.ndarray:
        """Heap row of every row that `rank` receives, in the order (source, slot, token); int64 [N]."""
        source_P1, slot_X = np.arange(self.num_ranks)[:, None], np.arange(self.slots)
        start_PX = fixed_row(source_P1, 0, self.side, slot_X, 0, self.slots, self.capacity)
        return _consecutive(start_PX, self.quota_PGX[:, rank])

    def home_rows(self, rank: int) -> np.ndarray:
        """Heap row at home of every result that comes back to `rank`, in the order (owner, slot, token); int64."""
        owner_G1, slot_X = np.arange(self.num_ranks)[:, None], np.arange(self.slots)
        start_GX = fixed_row(owner_G1, 1, self.side, slot_X, 0, self.slots, self.capacity)
        return _consecutive(start_GX, self.quota_PGX[rank])

    def segments(self, rank: int) -> list[tuple[int, int, int]]:
        """(slot, first heap row, rows): one segment per (slot, source) that has rows, slot-major."""
        return [
            (x, self.first_row(p, rank, x), int(self.quota_PGX[p, rank, x]))
            for x in range(self.slots)
            for p in range(self.num_ranks)
            if self.quota_PGX[p, rank, x] > 0
        ]


Layout = CompactLayout | FixedLayout
