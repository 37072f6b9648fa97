"""Subscribers: watch what peers put into this GPU's memory and turn complete row tiles into ready tasks.

96 lanes share the blocks of row tiles; a block whose tiles all have their rows is appended to the ready queue of GEMM0,
and so is at once one whose rows are all among the first ones of this rank: they are on their way. They use relaxed
loads: whoever computes a tile acquires its counter.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from moe_fast.kernel.constants import TILE_ROWS
from moe_fast.kernel.scheduler import make_ready
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import Args, Role, Wait, aborted, arrived_word, buffer_tile, fail, read
from moe_fast.kernel.tile_pairs import EARLY, carried_tile
from moe_ref.layout import ceil_div
from moe_ref.runtime.encoding import reached

LANES = 96


@cute.jit
def all_there(
    k: cutlass.Constexpr[KernelShape], a: Args, counters: Int64, targets: Int64, first: Int32, row_tiles: Int32
) -> Boolean:
    """Whether a block of row tiles has its rows, or they are on their way: its tasks needn't wait for their arrival.

    A loader that waits for rows on their way holds up nobody whom they wait for: the consumers of every block push them
    before they look at their first task, and for that wait for no product, only for the plan and for each other's
    lists. If one of them gives up instead, it has raised the flag that the loader's wait looks at.
    """
    early, lacking = Int32(EARLY if k.early else 0), Int32(0)
    # no branch between the loads of a kind: all are on their way before the first is looked at
    numbers = [min(first + i, row_tiles - 1) for i in range(k.block_tiles)]
    tiles = [read(a.tile_at, t) if k.paired else buffer_tile(k, a, t) for t in numbers]
    fields = [read(a.tile_rows, t) if k.carries or k.early else 0 for t in numbers]
    for i in cutlass.range_constexpr(k.block_tiles):
        early = early & fields[i]
    there = Boolean(early != 0)
    if not there:
        for i in cutlass.range_constexpr(k.block_tiles):
            if cutlass.const_expr(k.carries):
                second = carried_tile(fields[i], numbers[i] & 1, tiles[i])
                seen = read(counters, second * k.signal_words, sem="relaxed", scope="sys")
                lacking = lacking | (seen - read(targets, second))
            seen = read(counters, tiles[i] * k.signal_words, sem="relaxed", scope="sys")
            # negative once one of them is
            lacking = lacking | (seen - read(targets, tiles[i]))
        there = reached(lacking, 0)
    return there


@cute.jit
def subscribe(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, row_tiles: Int32, processors: Int32, first: Int32
):
    """One lane: watch blocks first, first + 96, ... in turn until all of them are ready."""
    size = k.block_tiles
    blocks = ceil_div(row_tiles, size)
    counters = a.heap + a.arrived_at + Int64(arrived_word(k, a, side, 0)) * 4
    targets = a.arrived_target + Int64(side * (a.rows // TILE_ROWS)) * 4
    # Lanes keep at most 32 blocks under watch at a time, one bit each; more come when those are through.
    base = first
    while base < blocks:
        count = min(Int32(ceil_div(blocks - base, LANES)), Int32(32))
        done = Int32(0)
        left = count
        start = cute.arch.globaltimer()
        while left > 0:
            for j in range(count):
                if ((done >> j) & 1) == 0:
                    block = base + j * LANES
                    if all_there(k, a, counters, targets, block * size, row_tiles):
                        make_ready(k, a, side, 0, block, row_tiles, processors)
                        done = done | (1 << j)
                        left -= 1
            if left > 0:
                if aborted(a):
                    left = Int32(0)
                elif Int64(cute.arch.globaltimer() - start) > a.deadline:
                    fail(a, Role.SUBSCRIBER, Wait.ARRIVALS, base, count - left, count)
                    left = Int32(0)
        base += LANES * 32
