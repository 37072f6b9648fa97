"""Row tiles of a few rows that go along with the tile before them.

An expert's last row tile may hold a handful of rows; a task of its own would stream all of the expert's weights for
them. Where it holds at most CARRIED_ROWS, and isn't the expert's only one, its rows are computed by the tasks of the
full tile before, from the same weights in shared memory. Its place in the dispatch buffer, its arrival counter and its
hidden rows stay what they are; only nobody deals its tasks.

What is dealt has numbers of its own, without gaps: tile t of the dispatch buffer is number t less the carried tiles
before it. `tile_slot` and `tile_rows` go by these numbers, and two tables translate: `tile_at` and, behind it,
`dealt_at`.

Arithmetic of Python ints or of the kernel's integers, without a branch.
"""

from __future__ import annotations

from moe_fast.kernel.constants import CARRIED_ROWS, TILE_ROWS
from moe_ref.runtime.encoding import ROW_BITS

CARRIED_SHIFT = ROW_BITS
"""In the planner's sums over experts, at most 256: row tiles below, carried ones above."""


def at_most(value, limit: int):
    """-1 if value <= limit, else 0; for values far from the ends of int32."""
    return (value - (limit + 1)) >> 31


def carried_tiles(rows):
    """1 if the last row tile of an expert with `rows` rows is carried, else 0."""
    rest = rows % TILE_ROWS
    few = at_most(rest, CARRIED_ROWS) & ~at_most(rest, 0)
    return few & ~at_most(rows, TILE_ROWS) & 1


def task_rows(rows, begun):
    """Rows of the tasks of the row tile that begins at row `begun` of an expert with `rows` rows: 1 to T, T + 1 to
    T + CARRIED_ROWS where it carries the next one, 0 where it is carried itself."""
    left = rows - begun
    carried = at_most(left, CARRIED_ROWS) & ~at_most(begun, 0)
    whole = ~at_most(left, TILE_ROWS + CARRIED_ROWS)
    return ((left & ~whole) | (TILE_ROWS & whole)) & ~carried


def carries(filled):
    """1 if a task of `filled` rows carries a second row tile, else 0."""
    return ~at_most(filled, TILE_ROWS) & 1
