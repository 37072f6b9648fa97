"""The plan's tables of row tiles, which dispatchers, loaders and subscribers read, and the signal that they are there.

Run by the 256 consumer threads of the planner's block, a thread for each row tile.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from moe_fast.kernel.constants import TILE_ROWS, Counter, PlanWord
from moe_fast.kernel.scans import CONSUMERS, scan, sync_consumers
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import (
    Args,
    dealt_at,
    read,
    side_counters,
    write,
)
from moe_fast.kernel.tile_pairs import (
    EARLY,
    count_pairs,
    dealt_tiles,
    field_few,
    field_rows,
    field_wide,
    own_tiles,
    pack_dealt,
    pack_fields,
    place_tile,
)
from moe_ref.layout import fixed_row
from moe_ref.runtime.encoding import next_target

TARGETS_AHEAD = 2
"""Arrival targets that a thread asks for before it needs them: of 512 row tiles."""


@cute.jit
def publish_plan(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, scratch: cute.Pointer, thread: Int32,
    slot_rows: cute.Pointer, slot_tile: cute.Pointer, held: Int32, row_tiles: Int32, near: Int32, far: Int32,
    usable: Boolean, status: Int32, real: Boolean,
):  # fmt: skip
    """The tables of my row tiles, then the plan's words and the signal that all is there.

    slot_rows, slot_tile: rows and first tile of each of my `held` slots, in the fixed layout of each (slot, source).
    near: rows that stay here. far: units of rows for the peer that gets most. real: see `plan.make_plan`.
    """
    dealt = row_tiles
    if cutlass.const_expr(k.paired):
        dealt = publish_pairs(k, a, side, scratch, thread, slot_rows, slot_tile, held, row_tiles, real)
    else:
        publish_tiles(k, a, side, thread, slot_rows, slot_tile, held, row_tiles, real)
    if real:
        publish_words(k, a, side, thread, dealt, row_tiles, near, far, usable, status)


@cute.jit
def slot_of(most: cutlass.Constexpr, slot_tile: cute.Pointer, held: Int32, tile: Int32) -> Int32:
    """The slot, of the first `held` of at most `most`, that a row tile belongs to."""
    slot = Int32(0)
    for bit in cutlass.range_constexpr((most - 1).bit_length()):
        further = slot + (1 << ((most - 1).bit_length() - 1 - bit))
        if further < held:
            if cute.arch.load(slot_tile + further, Int32) <= tile:
                slot = further
    return slot


@cute.jit
def early_bit(
    k: cutlass.Constexpr[KernelShape], slot_tile: cute.Pointer, slot: Int32, begun: Int32, end: Int32
) -> Int32:
    """EARLY if a slot's rows `begun` to `end` are all among the first ones of this rank, else 0."""
    early = Int32(0)
    if cutlass.const_expr(k.early):
        lowest = cute.arch.load(slot_tile + k.slots + slot, Int32)
        if begun >= lowest and end <= cute.arch.load(slot_tile + 2 * k.slots + slot, Int32):
            early = Int32(EARLY)
    return early


@cute.jit
def publish_tiles(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, thread: Int32, slot_rows: cute.Pointer,
    slot_tile: cute.Pointer, held: Int32, row_tiles: Int32, real: Boolean,
):  # fmt: skip
    """The tables of my row tiles where each is dealt once, as itself; see `publish_plan`."""
    most = k.slots * k.ranks if k.fixed else k.slots
    targets = a.arrived_target + Int64(side * (a.rows // TILE_ROWS)) * 4
    for tile in range(thread, row_tiles, CONSUMERS):
        slot = slot_of(most, slot_tile, held, tile)
        begun = (tile - cute.arch.load(slot_tile + slot, Int32)) * TILE_ROWS
        filled = min(cute.arch.load(slot_rows + slot, Int32) - begun, Int32(TILE_ROWS))
        early = early_bit(k, slot_tile, slot, begun, begun + filled)
        place = tile
        if cutlass.const_expr(k.fixed):
            source = slot % k.ranks
            slot = slot // k.ranks
            place = fixed_row(source, 0, 0, slot, begun, k.slots, a.slot_capacity) // TILE_ROWS
            write(a.tile_at, tile, place)
        write(a.tile_slot, tile, slot)
        write(a.tile_rows, tile, pack_fields(filled, 0, 0, 0) | early)
        if real:
            write(targets, place, next_target(read(targets, place), filled))


@cute.jit
def publish_pairs(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, scratch: cute.Pointer, thread: Int32,
    slot_rows: cute.Pointer, slot_tile: cute.Pointer, held: Int32, row_tiles: Int32, real: Boolean,
) -> Int32:  # fmt: skip
    """The tables of my row tiles in a paired kernel, by the numbers of `tile_pairs`; returns how many are dealt.

    Into shared memory behind slot_tile go sums over the slots before each.
    """
    slot_pairs = slot_tile + (3 if k.early else 1) * k.slots
    targets = a.arrived_target + Int64(side * (a.rows // TILE_ROWS)) * 4
    # of the first tiles asked for here, used behind the sums
    before_call = cute.make_rmem_tensor(TARGETS_AHEAD, Int32)
    for i in cutlass.range_constexpr(TARGETS_AHEAD):
        before_call[i] = 0
        if thread + i * CONSUMERS < row_tiles:
            before_call[i] = read(targets, thread + i * CONSUMERS)
    counted = Int32(0)
    if thread < held:
        counted = count_pairs(cute.arch.load(slot_rows + thread, Int32), k.carries)
    before = scan(counted, scratch, thread)
    if thread < held:
        cute.arch.store(slot_pairs + thread, before)
    if thread == CONSUMERS - 1:
        cute.arch.store(scratch + 9, before + counted)
    sync_consumers()
    total = cute.arch.load(scratch + 9, Int32)
    for tile in range(thread, row_tiles, CONSUMERS):
        slot = slot_of(k.slots, slot_tile, held, tile)
        first = cute.arch.load(slot_tile + slot, Int32)
        rows = cute.arch.load(slot_rows + slot, Int32)
        inside = tile - first
        begun = inside * TILE_ROWS
        here = min(rows - begun, Int32(TILE_ROWS))
        target = Int32(0)
        for i in cutlass.range_constexpr(TARGETS_AHEAD):
            if tile // CONSUMERS == i:
                target = before_call[i]
        if tile >= TARGETS_AHEAD * CONSUMERS:
            target = read(targets, tile)
        if real:
            write(targets, tile, next_target(target, here))
        dealt = Int32(0)
        if inside < own_tiles(rows, k.carries):
            number, fields = place_tile(inside, rows, cute.arch.load(slot_pairs + slot, Int32), total, k.carries)
            end = begun + field_rows(fields)
            if field_few(fields) > 0:
                end = rows
            dealt = number
            for member in cutlass.range_constexpr(2):
                if member == 0 or field_wide(fields) != 0:
                    write(a.tile_slot, number + member, slot)
                    write(a.tile_rows, number + member, fields | early_bit(k, slot_tile, slot, begun, end))
                    write(a.tile_at, number + member, tile)
        write(dealt_at(k, a), tile, pack_dealt(dealt, here))
    dealt = dealt_tiles(total)
    if row_tiles == 0:
        dealt = Int32(0)
    return dealt


@cute.jit
def publish_words(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, thread: Int32, dealt: Int32, row_tiles: Int32,
    near: Int32, far: Int32, usable: Boolean, status: Int32,
):  # fmt: skip
    """The plan's words, after its tables, and the signal that all is there. dealt: numbers that are dealt."""
    counters = side_counters(a, side)
    if thread == 0:
        write(a.plan, PlanWord.ROW_TILES, dealt)
        if cutlass.const_expr(k.paired):
            write(a.plan, PlanWord.HELD_TILES, row_tiles)
        write(a.plan, PlanWord.NEAR_ROWS, near)
        write(a.plan, PlanWord.FAR_UNITS, far * (k.ranks - 1))
        write(a.plan, PlanWord.USABLE, Int32(usable))
        write(a.plan, PlanWord.STATUS, 0)
        if status != 0:
            write(a.record, 7, status)
            write(a.record, 1, a.rank)
    # the release below covers what all threads wrote before this barrier
    sync_consumers()
    if thread == 0:
        write(counters, Counter.PLANNED, 1, sem="release", scope="gpu")
