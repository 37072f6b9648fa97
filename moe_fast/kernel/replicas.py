"""From counts to rows where experts have replicas: tables, the solver, and every slot's place in tiles and lists.

The plain planner's thread e speaks for expert e and its one owner. Here thread e divides expert e's rows between its
replicas once the solver has said how many each computes, and thread i speaks for slot i = rank * X + slot of all ranks.
A route's replica then follows from its place among its rank's routes to the expert: they fill the replicas in order,
each up to its quota (`moe_ref.balance.plan`).

In the fixed layout a row's place follows from its source, slot and index alone; tiles are counted for every
(slot, source) of this rank, a pair.

A plan may be handed in instead of solved: quotas [P, E, D]. Quotas that don't add up to the counts would make rows
collide, so they raise the status bit and nothing is sent.

Letters: E experts, D replicas of an expert (at most), P ranks, X slots of a rank.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from moe_fast.kernel import solver
from moe_fast.kernel.constants import TILE_ROWS, Status
from moe_fast.kernel.scans import CONSUMERS, scan, sync_consumers
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import Args, Phase, note, read, write
from moe_ref.layout import ceil_div, compact_row, fixed_row

SOLVER_AT = 512
"""Where the solver's arrays begin in the planner's shared memory, in words."""


def arrays(k: KernelShape, scratch):
    """The solver's arrays in the planner's shared memory."""
    return cute.make_tensor(scratch + SOLVER_AT, cute.make_layout(solver.words_of(k).total))


@cute.jit
def load_tables(k: cutlass.Constexpr[KernelShape], a: Args, scratch: cute.Pointer, thread: Int32):
    """Bring the placement's tables into shared memory: rank [E, D], held [P, X], turn [R, P] and the rounds."""
    w, m = solver.words_of(k), arrays(k, scratch)
    pairs, slots, turns = k.experts * k.replicas, k.ranks * k.slots, w.rounds + 1 - w.turn
    for i in range(thread, pairs + slots + turns, CONSUMERS):
        value = read(a.placement, i)
        if i < pairs:
            m[w.rank + i] = value
        elif i < pairs + slots:
            m[w.held + i - pairs] = value
        else:
            m[w.turn + i - pairs - slots] = value
    sync_consumers()
    if thread < k.experts:
        solver.begin_tables(k, m, thread)


@cute.jit
def own_slot(k: cutlass.Constexpr[KernelShape], a: Args, m: cute.Tensor, expert: Int32) -> tuple[Int32, Int32]:
    """(slot, replica) of an expert on this rank; slot X if it isn't here."""
    w = solver.words_of(k)
    slot, replica = Int32(k.slots), Int32(0)
    low, high = Int32(0), Int32(k.slots)
    # a rank's experts ascend; empty slots come last
    while low < high:
        middle = (low + high) // 2
        v = m[w.held + a.rank * k.slots + middle]
        if v < 0 or v // k.replicas >= expert:
            high = middle
            if v >= 0 and v // k.replicas == expert:
                slot = middle
                replica = v - expert * k.replicas
        else:
            low = middle + 1
    return slot, replica


@cute.jit
def fill_pairs(
    k: cutlass.Constexpr[KernelShape], a: Args, m: cute.Tensor, counts: cute.Tensor, stride: Int32,
    scratch: cute.Pointer, expert: Int32,
):  # fmt: skip
    """One thread, fixed layout: rows that every source sends to an expert's slot on this rank, if it has one."""
    slot, replica = own_slot(k, a, m, expert)
    if slot < k.slots:
        pairs = scratch + (SOLVER_AT + solver.words_of(k).total)
        before = cute.make_rmem_tensor(k.replicas, Int32)
        quota = cute.make_rmem_tensor(k.replicas, Int32)
        for p in range(k.ranks):
            solver.route_sources(k, m, expert, counts, stride, p, before, quota, Int32(1 << 30))
            mine = Int32(0)
            for j in cutlass.range_constexpr(k.replicas):
                if j == replica:
                    mine = quota[j]
            cute.arch.store(pairs + slot * k.ranks + p, mine)


@cute.jit
def take_quota(
    k: cutlass.Constexpr[KernelShape], a: Args, m: cute.Tensor, counts: cute.Tensor, stride: Int32,
    scratch: cute.Pointer, expert: Int32, limit: Int32,
) -> Int32:  # fmt: skip
    """One thread: an expert's rows in a handed-in plan, own quotas and those of lower ranks; returns status bits."""
    w, first = solver.words_of(k), expert * k.replicas
    ok, over = Boolean(True), Boolean(False)
    slot, replica = Int32(k.slots), Int32(0)
    if cutlass.const_expr(k.fixed):
        slot, replica = own_slot(k, a, m, expert)
    for j in cutlass.range_constexpr(k.replicas):
        m[w.rows + first + j] = 0
        m[w.before + first + j] = 0
    for p in range(k.ranks):
        total = Int32(0)
        for j in cutlass.range_constexpr(k.replicas):
            quota = read(a.quota, (p * k.experts + expert) * k.replicas + j)
            ok = ok and quota >= 0 and (quota == 0 or m[w.rank + first + j] >= 0)
            total += quota
            over = over or quota > limit
            if cutlass.const_expr(k.fixed):
                if j == replica and slot < k.slots:
                    cute.arch.store(scratch + (SOLVER_AT + w.total) + slot * k.ranks + p, quota)
            m[w.rows + first + j] = m[w.rows + first + j] + quota
            if p < a.rank:
                m[w.before + first + j] = m[w.before + first + j] + quota
            if p == a.rank:
                m[w.start + first + j] = quota
        ok = ok and total == counts[p * stride + expert]
    status = Int32(0)
    if not ok:
        status = Int32(Status.BAD_PLAN)
    elif over:
        status = Int32(Status.OVERFLOW)
    return status


@cute.jit
def divide_rows(k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, scratch: cute.Pointer, thread: Int32) -> Int32:
    """Rows of every replica, this rank's quotas and those of lower ranks, for all experts; returns status bits."""
    w, m = solver.words_of(k), arrays(k, scratch)
    stride = Int32(k.counts_stride)
    base = a.heap + a.counts_at + Int64(side * k.ranks) * stride * 4
    counts = cute.make_tensor(
        cute.make_ptr(Int32, base, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(k.ranks * stride)
    )
    status = Int32(0)
    limit = Int32(1 << 30)
    if cutlass.const_expr(k.fixed):
        limit = a.slot_capacity
    if a.planned == 0:
        if thread < k.experts:
            total = Int32(0)
            for p in cutlass.range_constexpr(k.ranks):
                total += counts[p * stride + thread]
            for j in cutlass.range_constexpr(k.replicas):
                rank = m[w.rank + thread * k.replicas + j]
                own = Int32(0)
                if rank >= 0:
                    own = counts[rank * stride + thread]
                m[w.start + thread * k.replicas + j] = own
            solver.begin_expert(k, m, thread, total)
            if cutlass.const_expr(k.replicas == 1):
                m[w.rows + thread] = total
        sync_consumers()
        if cutlass.const_expr(k.replicas > 1):
            if thread < solver.WARP:
                begun = Int64(0)
                if cutlass.const_expr(k.trace):
                    begun = Int64(cute.arch.globaltimer())
                solver.solve(k, m, thread)
                if cutlass.const_expr(k.trace):
                    if thread == 0:
                        block, _, _ = cute.arch.block_idx()
                        note(a, block, 0, begun, Int64(Phase.SOLVE))
        sync_consumers()
        if thread < k.experts:
            before = cute.make_rmem_tensor(k.replicas, Int32)
            quota = cute.make_rmem_tensor(k.replicas, Int32)
            if cutlass.const_expr(k.fixed):
                if solver.route_sources(k, m, thread, counts, stride, Int32(k.ranks - 1), before, quota, limit):
                    status = Int32(Status.OVERFLOW)
            solver.route_sources(k, m, thread, counts, stride, a.rank, before, quota, limit)
            if cutlass.const_expr(k.fixed):
                fill_pairs(k, a, m, counts, stride, scratch, thread)
            for j in cutlass.range_constexpr(k.replicas):
                m[w.start + thread * k.replicas + j] = quota[j]
                m[w.before + thread * k.replicas + j] = before[j]
    else:
        if thread < k.experts:
            status = take_quota(k, a, m, counts, stride, scratch, thread, limit)
    return status


@cute.jit
def place_slots(
    k: cutlass.Constexpr[KernelShape], a: Args, scratch: cute.Pointer, thread: Int32, start: Int32, status: Int32
) -> tuple[Int32, Int32, Int32, Int32]:
    """Where every slot begins in its owner's tiles and in my send list; the shifts from a route's place to its row.

    start: thread e's first place in my list of routes by expert. Returns (row tiles here, rows for myself, units for
    the busiest peer, status), the same on every thread.
    """
    w, m = solver.words_of(k), arrays(k, scratch)
    all_slots = k.ranks * k.slots
    # a plan that doesn't add up is refused by every thread
    if thread == 0:
        cute.arch.store(scratch + 9, Int32(0))
    sync_consumers()
    if status != 0:
        cute.arch.store(scratch + 9, status)
    sync_consumers()
    status = cute.arch.load(scratch + 9, Int32)
    tiles_done, listed_done = Int32(0), Int32(0)
    for c in cutlass.range_constexpr(ceil_div(all_slots, CONSUMERS)):
        place = c * CONSUMERS + thread
        tiles, mine = Int32(0), Int32(0)
        if place < all_slots:
            v = m[w.held + place]
            if v >= 0:
                tiles = Int32(ceil_div(m[w.rows + v], TILE_ROWS))
                mine = m[w.start + v]
        tile, listed = scan(tiles, scratch, thread), scan(mine, scratch, thread)
        if place < all_slots:
            m[w.tile + place] = tiles_done + tile
            m[w.listed + place] = listed_done + listed
        if thread == CONSUMERS - 1:
            cute.arch.store(scratch + 10, tile + tiles)
            cute.arch.store(scratch + 11, listed + mine)
        sync_consumers()
        tiles_done += cute.arch.load(scratch + 10, Int32)
        listed_done += cute.arch.load(scratch + 11, Int32)
        sync_consumers()
    if thread == 0:
        m[w.tile + all_slots] = tiles_done
        m[w.listed + all_slots] = listed_done
    sync_consumers()

    far = Int32(0)
    for p in cutlass.range_constexpr(k.ranks):
        if cutlass.const_expr(not k.fixed):
            if (m[w.tile + (p + 1) * k.slots] - m[w.tile + p * k.slots]) * TILE_ROWS > a.rows:
                status = status | Status.OVERFLOW
        if p != a.rank:
            sent = m[w.listed + (p + 1) * k.slots] - m[w.listed + p * k.slots]
            far = max(far, Int32(ceil_div(sent, k.far_unit)))
    row_tiles = m[w.tile + (a.rank + 1) * k.slots] - m[w.tile + a.rank * k.slots]
    near = m[w.listed + (a.rank + 1) * k.slots] - m[w.listed + a.rank * k.slots]
    for i in range(thread, all_slots, CONSUMERS):
        v = m[w.held + i]
        if v >= 0:
            if cutlass.const_expr(k.fixed):
                row = fixed_row(a.rank, 0, 0, i % k.slots, 0, k.slots, a.slot_capacity)
            else:
                first = m[w.tile + i // k.slots * k.slots]
                row = compact_row(m[w.tile + i] - first, m[w.before + v], 0, TILE_ROWS)
            write(a.row_shift, v, row - m[w.listed + i])
    if thread <= k.ranks:
        # the last words of list_start hold where each rank's part of the send list begins
        write(a.list_start, k.plan_parts * k.experts + thread, m[w.listed + thread * k.slots])
    # an expert's routes, in order, end at quota_end[j] for replica j; from there list_shift leads into the send list
    if thread < k.experts:
        end = start
        for j in cutlass.range_constexpr(k.replicas):
            write(a.list_shift, thread * k.replicas + j, -end)
            end += m[w.start + thread * k.replicas + j]
            write(a.quota_end, thread * k.replicas + j, end)
    sync_consumers()
    for i in range(thread, all_slots, CONSUMERS):
        v = m[w.held + i]
        if v >= 0:
            write(a.list_shift, v, read(a.list_shift, v) + m[w.listed + i])
    return row_tiles, near, far, status


@cute.jit
def own_slots(
    k: cutlass.Constexpr[KernelShape], a: Args, scratch: cute.Pointer, thread: Int32
) -> tuple[cute.Pointer, cute.Pointer]:
    """Rows and first tile of each of this rank's slots, in shared memory behind the solver's arrays."""
    w, m = solver.words_of(k), arrays(k, scratch)
    slot_rows = scratch + (SOLVER_AT + w.total)
    slot_tile = slot_rows + k.slots
    if thread < k.slots:
        place = a.rank * k.slots + thread
        v = m[w.held + place]
        rows = Int32(0)
        if v >= 0:
            rows = m[w.rows + v]
        cute.arch.store(slot_rows + thread, rows)
        cute.arch.store(slot_tile + thread, m[w.tile + place] - m[w.tile + a.rank * k.slots])
    sync_consumers()
    return slot_rows, slot_tile


@cute.jit
def own_pairs(
    k: cutlass.Constexpr[KernelShape], a: Args, scratch: cute.Pointer, thread: Int32
) -> tuple[cute.Pointer, cute.Pointer, Int32]:
    """Fixed layout: rows and first tile of every (slot, source) of this rank, and its row tiles."""
    w, m = solver.words_of(k), arrays(k, scratch)
    count = k.slots * k.ranks
    pair_rows = scratch + (SOLVER_AT + w.total)
    pair_tile = pair_rows + count
    done = Int32(0)
    for c in cutlass.range_constexpr(ceil_div(count, CONSUMERS)):
        pair = c * CONSUMERS + thread
        tiles = Int32(0)
        if pair < count:
            if m[w.held + a.rank * k.slots + pair // k.ranks] < 0:
                cute.arch.store(pair_rows + pair, Int32(0))
            tiles = Int32(ceil_div(cute.arch.load(pair_rows + pair, Int32), TILE_ROWS))
        tile = scan(tiles, scratch, thread)
        if pair < count:
            cute.arch.store(pair_tile + pair, done + tile)
        if thread == CONSUMERS - 1:
            cute.arch.store(scratch + 10, tile + tiles)
        sync_consumers()
        done += cute.arch.load(scratch + 10, Int32)
        sync_consumers()
    return pair_rows, pair_tile, done


@cute.jit
def choose_replica(k: cutlass.Constexpr[KernelShape], a: Args, expert: Int32, place: Int32) -> tuple[Int32, Int32]:
    """The replica that a route goes to, and its place in the send list, from its place among the routes by expert."""
    v = expert * k.replicas
    for j in cutlass.range_constexpr(k.replicas - 1):
        if place >= read(a.quota_end, expert * k.replicas + j):
            v += 1
    return v, place + read(a.list_shift, v)
