"""The plan: from "who goes where" to "which row of whose buffer", exactly.

Every rank writes its row of counts into every peer's memory, each with the number of the call beside it: 8 bytes in one
store, so that who sees the number has the count, and nobody fences or signals. (A put of NVSHMEM is followed by a
signal instead.) From the gathered counts_PE every rank derives the same tiles and offsets (`moe_ref.layout`, traced
here). This exchange is also what makes two staging sides enough: a rank gets past it only when every rank has begun
this call, so has ended the one before.

Run by the 256 consumer threads of one block, thread e for expert e.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from moe_fast.kernel import replicas
from moe_fast.kernel.constants import TILE_ROWS, Counter, PlanWord, Status
from moe_fast.kernel.dispatch import boost_rows
from moe_fast.kernel.exchange import hear, tell
from moe_fast.kernel.scans import CONSUMERS, scan, sync_consumers
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import (
    Args,
    Role,
    Wait,
    peer,
    read,
    side_counters,
    wait_reached,
    write,
)
from moe_fast.kernel.tables import publish_plan
from moe_fast.kernel.transport import put_counts
from moe_ref.layout import ceil_div, compact_row
from moe_ref.runtime.encoding import counts_signal

BATCH = 32
"""Histogram rows that a thread has in flight while it sums over token tiles."""


def tiles_per_part(k: KernelShape, token_tiles):
    """Token tiles that one part of the planner's threads sums."""
    return ceil_div(token_tiles, k.plan_parts)


@cute.jit
def sum_histograms(
    k: cutlass.Constexpr[KernelShape], a: Args, token_tiles: Int32, part: Int32, expert: Int32, real: Boolean
) -> Int32:
    """Routes of one part of the token tiles to an expert; leaves in the histogram the routes of the part's tiles before
    each one. real: see `make_plan`."""
    per_part = tiles_per_part(k, token_tiles)
    begin = part * per_part
    end = min(begin + per_part, token_tiles)
    total = Int32(0)
    # Few experts are many parts of few tiles each: code for more would be fetched from memory in vain.
    size = min(BATCH, max(256 // k.plan_parts, 8))
    batch = cute.make_rmem_tensor(size, Int32)
    for first in range(begin, end, size):
        for i in cutlass.range_constexpr(size):
            batch[i] = 0
            if first + i < end:
                batch[i] = read(a.histogram, (first + i) * k.experts + expert)
        for i in cutlass.range_constexpr(size):
            if first + i < end and real:
                write(a.histogram, (first + i) * k.experts + expert, total)
            total += batch[i]
    return total


@cute.jit
def make_plan(
    k: cutlass.Constexpr[KernelShape], a: Args, epoch: Int32, side: Int32, token_tiles: Int32, scratch: cute.Pointer,
    thread: Int32, real: Boolean,
):  # fmt: skip
    """The planner. scratch: 2304 words of shared memory; with replicas 8192.

    real: else a rehearsal while the routes aren't known yet, of one token's to the first K experts. Its code runs once
    a call and is long: fetched from memory while everybody waits for the plan, it takes longer than what it does. A
    rehearsal writes only what the plan will overwrite before anybody reads it, and tells nobody.
    """
    # scratch: 0-7 scan, 8 whether all is well, 64-319 one word per thread, 512- one word per rank, twice, 1024- four
    # words per slot, or five
    counters = side_counters(a, side)
    if cutlass.const_expr(k.placed):
        replicas.load_tables(k, a, scratch, thread)
    ok = Boolean(True)
    if thread == 0:
        routed = token_tiles
        if not real:
            routed = Int32(0)
        ok = wait_reached(counters, Counter.ROUTED, routed, a, Role.PLANNER, Wait.ROUTED, token_tiles, "gpu")
        cute.arch.store(scratch + 8, Int32(ok))
    sync_consumers()
    # thread -> (part of the token tiles, expert)
    width = 256 // k.plan_parts
    part, expert = thread // width, thread % width
    sums = scratch + 64
    here = Int32(0)
    # asked for here, used when the counts leave
    status = read(a.plan, PlanWord.STATUS)
    if expert < k.experts:
        here = sum_histograms(k, a, token_tiles, part, expert, real)
    cute.arch.store(sums + thread, here)
    sync_consumers()
    mine = Int32(0)
    before_part = Int32(0)
    for p in cutlass.range_constexpr(k.plan_parts):
        other = cute.arch.load(sums + p * width + expert, Int32)
        mine += other
        if p < part:
            before_part += other
    if not real:
        mine = Int32(1)
    if thread >= k.experts or not (real or thread < k.top_k):
        mine = Int32(0)
    kept = mine
    if cutlass.const_expr(k.drops):
        kept = min(mine, a.capacity)
    start = scan(kept, scratch, thread)
    # from here on thread e is expert e; every part needs its own place in the list
    sync_consumers()
    cute.arch.store(sums + thread, start)
    sync_consumers()
    if expert < k.experts:
        write(a.list_start, part * k.experts + expert, cute.arch.load(sums + expert, Int32) + before_part)

    if real:
        tell_counts(k, a, epoch, side, scratch, thread, kept, mine, status)
    sync_consumers()

    if cutlass.const_expr(k.placed):
        place_replicas(k, a, side, scratch, thread, start)
    else:
        place_experts(k, a, side, scratch, thread, start, kept, status, real)


@cute.jit
def tell_counts(
    k: cutlass.Constexpr[KernelShape], a: Args, epoch: Int32, side: Int32, scratch: cute.Pointer, thread: Int32,
    kept: Int32, mine: Int32, status: Int32,
):  # fmt: skip
    """The ranks exchange their rows of counts. kept, mine: of thread e, this rank's routes to expert e, within its
    capacity and all. status: this rank's."""
    # with put-with-signal into this rank's own memory, from where a warp puts it
    bases = [a.heap] if k.put or k.ranks == 1 else [peer(a, p) for p in range(k.ranks)]
    # my row of counts to every rank
    row = (side * k.ranks + a.rank) * Int32(k.counts_stride)
    told = not k.put and k.ranks > 1
    for p in cutlass.range_constexpr(len(bases)):
        if thread < k.experts:
            tell(k, a, bases[p], row + thread, kept, epoch, told)
            if cutlass.const_expr(k.drops):
                tell(k, a, bases[p], row + k.experts + 2 + thread, mine, epoch, told)
        if thread == 0:
            tell(k, a, bases[p], row + k.experts, status, epoch, told)
            tell(k, a, bases[p], row + k.experts + 1, a.tokens, epoch, told)
    if cutlass.const_expr(told):
        if thread < k.experts:
            hear(k, a, side, thread, epoch, scratch)
            if cutlass.const_expr(k.drops):
                hear(k, a, side, k.experts + 2 + thread, epoch, scratch)
        if thread >= CONSUMERS - 2:
            hear(k, a, side, k.experts + CONSUMERS - 1 - thread, epoch, scratch)
    if cutlass.const_expr(k.put):
        sync_consumers()
        if thread < 32:
            put_counts(k, a, row, counts_signal(epoch))
        if cutlass.const_expr(k.ranks > 1):
            if thread < k.ranks:
                if thread == a.rank:
                    write(
                        a.heap + a.counts_flag_at, thread * k.signal_words, counts_signal(epoch), sem="release",
                        scope="sys",
                    )  # fmt: skip
                heard = wait_reached(
                    a.heap + a.counts_flag_at, thread * k.signal_words, counts_signal(epoch), a, Role.PLANNER,
                    Wait.COUNTS, thread, "sys",
                )  # fmt: skip
                if not heard:
                    cute.arch.store(scratch + 8, Int32(0))


@cute.jit
def place_replicas(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, scratch: cute.Pointer, thread: Int32, start: Int32
):
    """The planner's second half where experts have replicas; see `replicas`. start: as in `place_experts`."""
    counts = a.heap + a.counts_at
    status = replicas.divide_rows(k, a, side, scratch, thread)
    row_tiles, near, far, status = replicas.place_slots(k, a, scratch, thread, start, status)
    for p in cutlass.range_constexpr(k.ranks):
        status = status | read(counts, (side * k.ranks + p) * Int32(k.counts_stride) + k.experts)
    usable = (cute.arch.load(scratch + 8, Int32) != 0) and (status & (Status.OVERFLOW | Status.BAD_PLAN)) == 0
    if cutlass.const_expr(k.fixed):
        slot_rows, slot_tile, row_tiles = replicas.own_pairs(k, a, scratch, thread)
        held = Int32(k.slots * k.ranks)
    else:
        slot_rows, slot_tile = replicas.own_slots(k, a, scratch, thread)
        held = Int32(k.slots)
    if not usable:
        row_tiles = Int32(0)
        near = Int32(0)
        far = Int32(0)
    publish_plan(
        k, a, side, scratch, thread, slot_rows, slot_tile, held, row_tiles, near, far, usable, status, Boolean(True)
    )


@cute.jit
def place_experts(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, scratch: cute.Pointer, thread: Int32, start: Int32,
    mine: Int32, known: Int32, real: Boolean,
):  # fmt: skip
    """The planner's second half, experts in blocks: where every expert begins in its owner's tiles and in my send list.

    start, mine: of thread e, my routes to experts before e and to e. known: this rank's status. real: see `make_plan`.
    """
    counts = a.heap + a.counts_at
    stride = Int32(k.counts_stride)
    # the same arithmetic on every rank: rows, rows of lower ranks, tiles, first tile on the owner
    rows = Int32(0)
    before = Int32(0)
    owner = Int32(k.ranks)
    status = Int32(0)
    # of a rank alone they are known already
    others = k.ranks if k.ranks > 1 else 0
    if cutlass.const_expr(others == 0):
        rows, status = mine, known
    for p in cutlass.range_constexpr(others):
        status = status | read(counts, (side * k.ranks + p) * stride + k.experts)
    if thread < k.experts:
        owner = Int32(k.owner(thread))
        for p in cutlass.range_constexpr(others):
            count = read(counts, (side * k.ranks + p) * stride + thread)
            rows += count
            if p < a.rank:
                before += count
        if not real:
            # nobody has told anything yet
            rows, before = mine, Int32(0)
    tiles = Int32(ceil_div(rows, TILE_ROWS))
    tiles_before = scan(tiles, scratch, thread)
    # where each rank's experts begin, in tiles and in my send list: one word per rank from the thread that knows it
    tile_at = scratch + 512
    list_at = scratch + 512 + k.ranks + 1
    for p in cutlass.range_constexpr(k.ranks):
        if thread == k.first_expert(p):
            cute.arch.store(tile_at + p, tiles_before)
            cute.arch.store(list_at + p, start)
    if thread == k.experts - 1:
        cute.arch.store(tile_at + k.ranks, tiles_before + tiles)
        cute.arch.store(list_at + k.ranks, start + mine)
    sync_consumers()

    far = Int32(0)
    for p in cutlass.range_constexpr(k.ranks):
        first = cute.arch.load(tile_at + p, Int32)
        if (cute.arch.load(tile_at + p + 1, Int32) - first) * TILE_ROWS > a.rows:
            status = status | Status.OVERFLOW
        sent = cute.arch.load(list_at + p + 1, Int32) - cute.arch.load(list_at + p, Int32)
        if p != a.rank:
            far = max(far, Int32(ceil_div(sent, k.far_unit)))
    near = cute.arch.load(list_at + a.rank + 1, Int32) - cute.arch.load(list_at + a.rank, Int32)
    first_here = cute.arch.load(tile_at + a.rank, Int32)
    row_tiles = cute.arch.load(tile_at + a.rank + 1, Int32) - first_here
    usable = (cute.arch.load(scratch + 8, Int32) != 0) and (status & Status.OVERFLOW) == 0
    if not usable:
        row_tiles = Int32(0)
        near = Int32(0)
        far = Int32(0)
    if thread < k.experts:
        first = cute.arch.load(tile_at + owner, Int32)
        shift = compact_row(tiles_before - first, before, 0, TILE_ROWS) - start
        write(a.row_shift, thread, shift)
    if thread <= k.ranks:
        # the last words of list_start hold where each rank's part of the send list begins
        write(a.list_start, k.plan_parts * k.experts + thread, cute.arch.load(list_at + thread, Int32))
    # my row tiles, one thread each: rows and first tile of each of my slots, then a binary search
    slot_rows = scratch + 1024
    slot_tile = scratch + 1024 + k.slots
    if owner == a.rank:
        slot = thread - first_expert_of(k, a.rank)
        cute.arch.store(slot_rows + slot, rows)
        cute.arch.store(slot_tile + slot, tiles_before - first_here)
        if cutlass.const_expr(k.early):
            # of an expert's rows, those that all warps of this rank push first
            earlier = start - cute.arch.load(list_at + a.rank, Int32)
            pushed = min(max(boost_rows(near) - earlier, Int32(0)), mine)
            cute.arch.store(slot_tile + k.slots + slot, before)
            cute.arch.store(slot_tile + 2 * k.slots + slot, before + pushed)
    sync_consumers()
    held = first_expert_of(k, a.rank + 1) - first_expert_of(k, a.rank)
    publish_plan(k, a, side, scratch, thread, slot_rows, slot_tile, held, row_tiles, near, far, usable, status, real)


def first_expert_of(k: KernelShape, rank):
    """First expert of a run-time rank, without a branch."""
    base, extra = divmod(k.experts, k.ranks)
    over = (rank - extra) & ~((rank - extra) >> 31)  # max(rank - extra, 0)
    return rank * base + (rank - over)


@cute.jit
def wait_plan(a: Args, side: Int32, role: cutlass.Constexpr) -> Boolean:
    """Wait until the plan is published; False if that failed."""
    return wait_reached(side_counters(a, side), Counter.PLANNED, Int32(1), a, role, Wait.PLAN, Int32(0), "gpu")
