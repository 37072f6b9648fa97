"""Counts exchange, exact offsets and the send list: from "who goes where" to "which row of whose buffer".

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
from cutlass import Boolean, Int32, Int64

from moe_fast.kernel import replicas
from moe_fast.kernel.constants import HOME_BITS, TILE_ROWS, Counter, PlanWord, Status
from moe_fast.kernel.dispatch import boost_rows
from moe_fast.kernel.scans import CONSUMERS, scan, sync_consumers
from moe_fast.kernel.shapes import KernelShape, dropped
from moe_fast.kernel.signals import (
    Args,
    Role,
    Wait,
    aborted,
    add,
    dealt_at,
    fail,
    home_row,
    peer,
    read,
    side_counters,
    wait_reached,
    write,
)
from moe_fast.kernel.tile_pairs import (
    EARLY,
    count_pairs,
    dealt_tiles,
    field_few,
    field_rows,
    field_split,
    own_tiles,
    pack_dealt,
    pack_fields,
    place_tile,
)
from moe_fast.kernel.transport import put_counts
from moe_ref.layout import SIDES, ceil_div, compact_row, fixed_row
from moe_ref.runtime.encoding import counts_signal, next_target

TARGETS_AHEAD = 2
"""Arrival targets that a thread asks for before it needs them: of 512 row tiles."""
BATCH = 32
"""Histogram rows that a thread has in flight while it sums over token tiles."""


def tiles_per_part(k: KernelShape, token_tiles):
    """Token tiles that one part of the planner's threads sums."""
    return ceil_div(token_tiles, k.plan_parts)


@cute.jit
def sum_histograms(k: cutlass.Constexpr[KernelShape], a: Args, token_tiles: Int32, part: Int32, expert: Int32) -> Int32:
    """Routes of one part of the token tiles to an expert; leaves in the histogram the routes of the part's tiles before
    each one."""
    per_part = tiles_per_part(k, token_tiles)
    begin = part * per_part
    end = min(begin + per_part, token_tiles)
    total = Int32(0)
    batch = cute.make_rmem_tensor(BATCH, Int32)
    for first in range(begin, end, BATCH):
        for i in cutlass.range_constexpr(BATCH):
            batch[i] = 0
            if first + i < end:
                batch[i] = read(a.histogram, (first + i) * k.experts + expert)
        for i in cutlass.range_constexpr(BATCH):
            if first + i < end:
                write(a.histogram, (first + i) * k.experts + expert, total)
            total += batch[i]
    return total


def told_at(k, a):
    """Where in a heap counts come in, behind where they then are: [side, rank, counts_stride] words of 8 bytes, the
    count below, the signal of the call above."""
    return a.counts_at + SIDES * k.ranks * k.counts_stride * 4


@cute.jit
def tell(
    k: cutlass.Constexpr[KernelShape], a: Args, base: Int64, word: Int32, value: Int32, epoch: Int32,
    told: cutlass.Constexpr,
):  # fmt: skip
    """One word of my row of counts into the heap at `base`: with the call's signal, or as it is."""
    if cutlass.const_expr(told):
        both = (Int64(value) & 0xFFFFFFFF) | (Int64(counts_signal(epoch)) << 32)
        write(base + told_at(k, a), word, both, Int64, sem="relaxed", scope="sys")
    else:
        write(base + a.counts_at, word, value)


@cute.jit
def hear(k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, column: Int32, epoch: Int32, scratch: cute.Pointer):
    """One thread: wait for one column of all ranks' counts and leave it as it is. If that fails, scratch[8] is 0."""
    words = a.heap + told_at(k, a)
    signal = counts_signal(epoch)
    seen = cute.make_rmem_tensor(k.ranks, Int64)
    start = cute.arch.globaltimer()
    turns = Int32(0)
    go = Boolean(True)
    while go:
        missing, last = Int32(k.ranks), signal
        for p in cutlass.range_constexpr(k.ranks):
            at = (side * k.ranks + p) * Int32(k.counts_stride) + column
            seen[p] = read(words, at, Int64, sem="relaxed", scope="sys")
        for p in cutlass.range_constexpr(k.ranks):
            if Int32(seen[p] >> 32) != signal:
                missing, last = Int32(p), Int32(seen[p] >> 32)
        go = missing < k.ranks
        turns += 1
        if go and (turns & 15) == 0:
            if aborted(a):
                cute.arch.store(scratch + 8, Int32(0))
                go = Boolean(False)
            elif Int64(cute.arch.globaltimer() - start) > a.deadline:
                fail(a, Role.PLANNER, Wait.COUNTS, missing, last, signal)
                cute.arch.store(scratch + 8, Int32(0))
                go = Boolean(False)
    for p in cutlass.range_constexpr(k.ranks):
        at = (side * k.ranks + p) * Int32(k.counts_stride) + column
        write(a.heap + a.counts_at, at, Int32(seen[p] & 0xFFFFFFFF))


@cute.jit
def make_plan(
    k: cutlass.Constexpr[KernelShape], a: Args, epoch: Int32, side: Int32, token_tiles: Int32, scratch: cute.Pointer,
    thread: Int32,
):  # fmt: skip
    """The planner. scratch: 2304 words of shared memory; with replicas 8192."""
    # scratch: 0-7 scan, 8 whether all is well, 64-319 one word per thread, 512- one word per rank, twice, 1024- four
    # words per slot, or five
    counters = side_counters(a, side)
    if cutlass.const_expr(k.placed):
        replicas.load_tables(k, a, scratch, thread)
    # with put-with-signal into this rank's own memory, from where a warp puts it
    bases = [a.heap] if k.put or k.ranks == 1 else [peer(a, p) for p in range(k.ranks)]
    ok = Boolean(True)
    if thread == 0:
        ok = wait_reached(counters, Counter.ROUTED, token_tiles, a, Role.PLANNER, Wait.ROUTED, token_tiles, "gpu")
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
        here = sum_histograms(k, a, token_tiles, part, expert)
    cute.arch.store(sums + thread, here)
    sync_consumers()
    mine = Int32(0)
    before_part = Int32(0)
    for p in cutlass.range_constexpr(k.plan_parts):
        other = cute.arch.load(sums + p * width + expert, Int32)
        mine += other
        if p < part:
            before_part += other
    if thread >= k.experts:
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
    sync_consumers()

    if cutlass.const_expr(k.placed):
        place_replicas(k, a, side, scratch, thread, start)
    else:
        place_experts(k, a, side, scratch, thread, start, kept)


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
    publish_plan(k, a, side, scratch, thread, slot_rows, slot_tile, held, row_tiles, near, far, usable, status)


@cute.jit
def place_experts(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, scratch: cute.Pointer, thread: Int32, start: Int32,
    mine: Int32,
):  # fmt: skip
    """The planner's second half, experts in blocks: where every expert begins in its owner's tiles and in my send list.

    start, mine: of thread e, my routes to experts before e and to e.
    """
    counts = a.heap + a.counts_at
    stride = Int32(k.counts_stride)
    # the same arithmetic on every rank: rows, rows of lower ranks, tiles, first tile on the owner
    rows = Int32(0)
    before = Int32(0)
    owner = Int32(k.ranks)
    status = Int32(0)
    for p in cutlass.range_constexpr(k.ranks):
        status = status | read(counts, (side * k.ranks + p) * stride + k.experts)
    if thread < k.experts:
        owner = Int32(k.owner(thread))
        for p in cutlass.range_constexpr(k.ranks):
            count = read(counts, (side * k.ranks + p) * stride + thread)
            rows += count
            if p < a.rank:
                before += count
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
            # of an expert's rows, those that all warps of this rank send first
            earlier = start - cute.arch.load(list_at + a.rank, Int32)
            pushed = min(max(boost_rows(near) - earlier, Int32(0)), mine)
            cute.arch.store(slot_tile + k.slots + slot, before)
            cute.arch.store(slot_tile + 2 * k.slots + slot, before + pushed)
    sync_consumers()
    held = first_expert_of(k, a.rank + 1) - first_expert_of(k, a.rank)
    publish_plan(k, a, side, scratch, thread, slot_rows, slot_tile, held, row_tiles, near, far, usable, status)


@cute.jit
def publish_plan(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, scratch: cute.Pointer, thread: Int32,
    slot_rows: cute.Pointer, slot_tile: cute.Pointer, held: Int32, row_tiles: Int32, near: Int32, far: Int32,
    usable: Boolean, status: Int32,
):  # fmt: skip
    """The tables of my row tiles, then the plan's words and the signal that all is there.

    slot_rows, slot_tile: rows and first tile of each of my `held` slots, in the fixed layout of each (slot, source).
    near: rows that stay here. far: units of rows for the peer that gets most.
    """
    dealt = row_tiles
    if cutlass.const_expr(k.paired):
        dealt = publish_pairs(k, a, side, scratch, thread, slot_rows, slot_tile, held, row_tiles)
    else:
        publish_tiles(k, a, side, thread, slot_rows, slot_tile, held, row_tiles)
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
    slot_tile: cute.Pointer, held: Int32, row_tiles: Int32,
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
        write(targets, place, next_target(read(targets, place), filled))


@cute.jit
def publish_pairs(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, scratch: cute.Pointer, thread: Int32,
    slot_rows: cute.Pointer, slot_tile: cute.Pointer, held: Int32, row_tiles: Int32,
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
        write(targets, tile, next_target(target, here))
        dealt = Int32(0)
        if inside < own_tiles(rows, k.carries):
            number, fields = place_tile(inside, rows, cute.arch.load(slot_pairs + slot, Int32), total, k.carries)
            end = begun + field_rows(fields)
            if field_few(fields) > 0:
                end = rows
            dealt = number
            for member in cutlass.range_constexpr(2):
                if member == 0 or field_split(fields) != 0:
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


def first_expert_of(k: KernelShape, rank):
    """First expert of a run-time rank, without a branch."""
    base, extra = divmod(k.experts, k.ranks)
    over = (rank - extra) & ~((rank - extra) >> 31)  # max(rank - extra, 0)
    return rank * base + (rank - over)


@cute.jit
def wait_plan(a: Args, side: Int32, role: cutlass.Constexpr) -> Boolean:
    """Wait until the plan is published; False if that failed."""
    return wait_reached(side_counters(a, side), Counter.PLANNED, Int32(1), a, role, Wait.PLAN, Int32(0), "gpu")


@cute.jit
def load_routes(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, tile: Int32, height: Int32, routes: tuple, thread: Int32
):
    """What the send list needs to know about a token tile and doesn't depend on the plan: asked for ahead.

    All of it was written by this block: the routes by its gate, with barriers since, the counter's target in the last
    call of this side.

    height: tokens of a tile. routes: of this thread's routes (every 256th of the tile's) the expert and the number
    within the tile and expert; then how many rows its token will get back (not with a capacity: that depends on the
    plan), and what its arrival counter was waiting for last time.
    """
    expert, index, token_rows = routes
    first = tile * (height * k.top_k)
    for j in cutlass.range_constexpr(routes_per_thread(k)):
        expert[j], index[j] = -1, 0
        r = thread + j * CONSUMERS
        if r < height * k.top_k and first + r < a.tokens * k.top_k:
            expert[j] = read(a.expert, first + r)
            index[j] = read(a.index, first + r)
    token = tile * height + thread
    token_rows.fill(0)
    if thread < height and token < a.tokens:
        token_rows[1] = read(a.back_target + Int64(side * a.max_tokens) * 4, token)
        if cutlass.const_expr(not k.drops):
            for j in cutlass.range_constexpr(k.top_k):
                if read(a.expert, first + thread * k.top_k + j) >= 0:
                    token_rows[0] = token_rows[0] + 1


def starts_of(k, tile, token_tiles):
    """Where in `list_start` the places of a token tile's part of the tiles are."""
    return tile // tiles_per_part(k, token_tiles) * k.experts


def place_of(k, a, tile, starts, expert, index):
    """Place of a route among all of this rank's routes by expert; starts: `starts_of` its token tile, index: among the
    routes of the tile."""
    return read(a.list_start, starts + expert) + read(a.histogram, tile * k.experts + expert) + index


@cute.jit
def keep_within(k: cutlass.Constexpr[KernelShape], a: Args, route: Int32, expert: Int32, place: Int32) -> Boolean:
    """Whether a route is within its expert's capacity, if there is one: first come, first served. The rest is masked
    from here on."""
    fits = Boolean(True)
    if cutlass.const_expr(k.drops):
        fits = place - read(a.list_start, expert) < a.capacity
        if not fits:
            write(a.expert, route, dropped(expert))
    return fits


def routes_per_thread(k: KernelShape) -> int:
    """Routes of a token tile that each of the 256 threads has at most."""
    return ceil_div(TILE_ROWS * k.top_k, CONSUMERS)


@cute.jit
def list_routes(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, tile: Int32, height: Int32, token_tiles: Int32,
    routes: tuple, places: tuple, thread: Int32,
):  # fmt: skip
    """Enter the routes of one token tile into the send list, and the returned rows that its tokens will expect.

    height, routes: see `load_routes`. places: becomes each route's place in the send list, -1 for none, and the row
    where it lands.
    """
    expert, index, token_rows = routes
    place, row = places
    first = tile * (height * k.top_k)
    starts = starts_of(k, tile, token_tiles)
    # all loads are on their way before the first place is known
    for j in cutlass.range_constexpr(routes_per_thread(k)):
        place[j], row[j] = -1, 0
        if expert[j] >= 0:
            place[j] = place_of(k, a, tile, starts, expert[j], index[j])
            if cutlass.const_expr(not k.placed):
                row[j] = read(a.row_shift, expert[j])
    for j in cutlass.range_constexpr(routes_per_thread(k)):
        route = first + thread + j * CONSUMERS
        fits = place[j] >= 0
        if cutlass.const_expr(k.drops):
            if fits:
                fits = keep_within(k, a, route, expert[j], place[j])
                if not fits:
                    place[j] = -1
        if fits:
            target = expert[j]
            if cutlass.const_expr(k.placed):
                target, moved = replicas.choose_replica(k, a, expert[j], place[j])
                place[j] = moved
                row[j] = read(a.row_shift, target)
            row[j] = row[j] + place[j]
            # an entry of the send list: the route, and the row where it lands
            write(a.send, place[j], Int64(route) | (Int64(row[j]) << 32), Int64)
            if cutlass.const_expr(k.fixed):
                write(a.where, route, home_row(a, row[j], read(a.placement, target), a.rank))
            if cutlass.const_expr(k.by_place):
                # beside the place how the pieces of its lines lie
                write(a.where, route, place[j] | ((row[j] % 8) << HOME_BITS))
    token = tile * height + thread
    if thread < height and token < a.tokens:
        valid = token_rows[0]
        if cutlass.const_expr(k.drops):
            for j in cutlass.range_constexpr(k.top_k):
                route = first + thread * k.top_k + j
                chosen = read(a.expert, route)
                # another thread may be masking the route just now: it is judged by its place, like there
                if chosen < -1:
                    chosen = dropped(chosen)
                if chosen >= 0:
                    earlier = place_of(k, a, tile, starts, chosen, read(a.index, route)) - read(a.list_start, chosen)
                    if earlier < a.capacity:
                        valid += 1
        if cutlass.const_expr(k.shared_intermediate > 0):
            # and one row of the shared expert for every token
            valid += 1
        write(a.back_target + Int64(side * a.max_tokens) * 4, token, next_target(token_rows[1], valid))


@cute.jit
def publish_list(a: Args, side: Int32, thread: Int32):
    """This block has entered all of its token tiles."""
    # the release below covers what all threads wrote before this barrier
    sync_consumers()
    if thread == 0:
        add(side_counters(a, side), Counter.LISTED, 1, "gpu", "release")
