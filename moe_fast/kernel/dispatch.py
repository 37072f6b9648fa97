"""Dispatch: every routed row goes to its owner by direct stores, in the order in which the owner will compute it.

A warp claims a unit of rows of one destination, copies them with 16-byte stores, fences once and adds to the arrival
counters. With a row goes its home: source rank and route, which is where its result returns to.

Where `gather` reads local rows from where their tokens lie, they aren't copied: to push one is to write its home and to
count it. Its place in the owner's buffer stays reserved, so that homes, tiles and results are where they would be.

All warps together push the first local rows, so that every processor has a first task soon: where there are enough
blocks with tokens, each those of its own tokens, at once, else all of them from the send list. Then those spare warps
that send (see `spare`) alternate between remote rows, to all peers in turn so that every link is busy, and the
remaining local ones, which go slower until the remote ones have caught up (`near_follows`).

Rows lie in expert order (send list), so an owner's first tiles are complete long before the last row has left.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass._mlir import ir

from moe_fast.kernel.constants import BOOST_ROWS, BOOST_UNIT, HOME_BITS, TILE_ROWS, Counter, PlanWord
from moe_fast.kernel.scans import CONSUMERS
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import (
    SENT_ROWS,
    Args,
    Role,
    Wait,
    aborted,
    aborted_together,
    add,
    arrived_word,
    fetch_add,
    gmem,
    peer,
    read,
    side_counters,
    wait_reached,
    write,
)
from moe_fast.kernel.transport import add_signal, peer_mapped, put_rows, put_rows_in_place
from moe_ref.layout import ceil_div

VECTOR_BYTES = 16
IN_FLIGHT = 16
"""16-byte loads that a lane has in flight."""


@cute.jit
def copy_pair(
    k: cutlass.Constexpr[KernelShape], source0: Int64, source1: Int64, target0: Int64, target1: Int64, lane: Int32
):
    """One warp copies two rows; addresses are this lane's first vector of each row."""
    vector = ir.VectorType.get([4], Int32.mlir_type)
    step = 32 * VECTOR_BYTES
    per_row, tail = divmod(k.hidden * k.element_size, step)
    # a tail needs registers of its own, and so does what kernels of float32 keep around this
    in_flight = (IN_FLIGHT if tail == 0 and k.element_size == 2 else IN_FLIGHT - 2) // 2
    for first in cutlass.range_constexpr(0, per_row, in_flight):
        width = min(in_flight, per_row - first)
        near = [
            cute.arch.load(gmem(source0 + (first + i) * step, Int32, VECTOR_BYTES), vector, cop="cs")
            for i in range(width)
        ]
        far = [
            cute.arch.load(gmem(source1 + (first + i) * step, Int32, VECTOR_BYTES), vector, cop="cs")
            for i in range(width)
        ]
        for i in cutlass.range_constexpr(width):
            cute.arch.store(gmem(target0 + (first + i) * step, Int32, VECTOR_BYTES), near[i])
        for i in cutlass.range_constexpr(width):
            cute.arch.store(gmem(target1 + (first + i) * step, Int32, VECTOR_BYTES), far[i])
    if cutlass.const_expr(tail > 0):
        # rows that are no multiple of 512 bytes: some lanes have one vector more
        if lane * VECTOR_BYTES < tail:
            here = per_row * step
            one = cute.arch.load(gmem(source0 + here, Int32, VECTOR_BYTES), vector, cop="cs")
            two = cute.arch.load(gmem(source1 + here, Int32, VECTOR_BYTES), vector, cop="cs")
            cute.arch.store(gmem(target0 + here, Int32, VECTOR_BYTES), one)
            cute.arch.store(gmem(target1 + here, Int32, VECTOR_BYTES), two)


def fence_far(k: KernelShape):
    """Order rows stored to another rank before their counting. What is staged for a put is read by this warp alone."""
    if not k.put:
        cute.arch.fence_acq_rel_sys()


@cute.jit
def push_unit(
    k: cutlass.Constexpr[KernelShape],
    a: Args,
    side: Int32,
    destination: Int32,
    number: Int32,
    rows: cutlass.Constexpr,
    lane: Int32,
):
    """One warp pushes unit `number` of a destination, up to `rows` rows of it."""
    starts = k.plan_parts * k.experts
    begin = read(a.list_start, starts + destination) + number * rows
    end = read(a.list_start, starts + destination + 1)
    if begin < end:
        # what is put to a peer that isn't mapped is staged first, rows for this rank go to their place
        base = a.heap if k.put else peer(a, destination)
        row_bytes = k.hidden * k.element_size
        # Lane r knows row r. A lane beyond the last row repeats the last one: the same bytes to the same place.
        place = min(begin + lane % rows, end - 1)
        entry = read(a.send, place, Int64)
        route, row = Int32(entry & 0xFFFFFFFF), Int32(entry >> 32)
        source = a.x + Int64(route // k.top_k) * row_bytes
        target = base + a.rows_at + (Int64(side) * a.rows + row) * k.row_pitch
        # whether the warp doesn't copy these rows here
        direct = Boolean(False)
        if cutlass.const_expr(k.gathers):
            direct = destination == a.rank
        if cutlass.const_expr(k.put):
            if destination != a.rank:
                target = a.heap + a.wire_at + Int64(place) * k.row_pitch
                direct = peer_mapped(a, destination)
        inside = Int64(lane * VECTOR_BYTES)
        for r in cutlass.range_constexpr(0, rows, 2):
            if begin + r < end and not direct:
                copy_pair(
                    k,
                    cute.arch.shuffle_sync(source, r) + inside,
                    cute.arch.shuffle_sync(source, r + 1) + inside,
                    cute.arch.shuffle_sync(target, r) + inside,
                    cute.arch.shuffle_sync(target, r + 1) + inside,
                    lane,
                )
        mine = lane < rows and begin + lane < end
        if cutlass.const_expr(k.trace):
            if lane == 0 and destination != a.rank:
                add(a.control, SENT_ROWS, min(end - begin, Int32(rows)), "gpu")
        if mine:
            if cutlass.const_expr(k.put):
                if not direct:
                    write(target + row_bytes, 0, (a.rank << HOME_BITS) | route)
                    if cutlass.const_expr(k.by_place):
                        write(target + row_bytes, 1, (a.rank << HOME_BITS) | place)
            else:
                write(base + a.home_at, side * a.rows + row, (a.rank << HOME_BITS) | route)
        cute.arch.sync_warp()
        if destination == a.rank:
            cute.arch.fence_acq_rel_gpu()
        else:
            fence_far(k)
        cute.arch.sync_warp()
        if cutlass.const_expr(k.put):
            if destination == a.rank:
                if mine:
                    add_signal(a.heap + a.arrived_at + Int64(arrived_word(k, a, side, row // TILE_ROWS)) * 4, 1)
            elif direct:
                home, landing = (a.rank << HOME_BITS) | route, (a.rank << HOME_BITS) | place
                tail = (Int64(home) & 0xFFFFFFFF) | (Int64(landing) << 32)
                put_rows_in_place(k, a, side, destination, min(end - begin, Int32(rows)), source, tail, row, lane)
            else:
                put_rows(k, a, side, destination, begin, min(end - begin, Int32(rows)), row, lane)
        elif mine:
            add(base + a.arrived_at, arrived_word(k, a, side, row // TILE_ROWS), 1, "sys")
    cute.arch.sync_warp()


@cute.jit
def next_unit(a: Args, side: Int32, head: cutlass.Constexpr, lane: Int32) -> Int32:
    """Whole warp: the next unit of a list, or a number beyond all after a failure."""
    unit = Int32(0)
    if lane == 0:
        unit = fetch_add(side_counters(a, side), head)
        if aborted(a):
            unit = Int32(1 << 29)
    return cute.arch.shuffle_sync(unit, 0)


@cute.jit
def boost_rows(near_rows: Int32) -> Int32:
    """Local rows that all warps push before the first task."""
    return min(near_rows, Int32(BOOST_ROWS))


@cute.jit
def push_first(k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, warp: Int32, warps: Int32, lane: Int32):
    """Warp number `warp` of all consumer warps: its share of the first local rows."""
    if not aborted_together(a):
        units = ceil_div(boost_rows(read(a.plan, PlanWord.NEAR_ROWS)), BOOST_UNIT)
        for unit in range(warp, units, warps):
            push_unit(k, a, side, a.rank, unit, BOOST_UNIT, lane)


@cute.jit
def pushes_own(token_tiles: Int32, processors: Int32) -> Boolean:
    """Whether every block pushes the first rows of its own tokens, one tile of them, without waiting for the send list:
    only where there are enough blocks with tokens to share the work."""
    return token_tiles * 3 >= processors and token_tiles <= processors


def first_places(k: KernelShape, a):
    """Where this rank's own rows begin and end in the send list."""
    starts = k.plan_parts * k.experts
    return read(a.list_start, starts + a.rank), read(a.list_start, starts + a.rank + 1)


@cute.jit
def push_own(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, tile: Int32, height: Int32, own: tuple, places: tuple,
    thread: Int32,
):  # fmt: skip
    """A warp pushes those of its routes of token tile `tile` that are among the first local rows.

    height: tokens of a tile. own: `first_places`. places: of this thread's routes, every 256th of the tile's, the place
    in the send list and the row where it lands.

    As in `push_unit` a lane's fence, between two barriers of the warp, covers what all lanes have stored of the row it
    counts; of a row that is gathered that is its home alone.
    """
    place, row = places
    lane = thread % 32
    begin, end = own
    until = begin + boost_rows(end - begin)
    row_bytes = k.hidden * k.element_size
    inside = Int64(lane * VECTOR_BYTES)
    sources = a.x + inside
    targets = a.heap + a.rows_at + Int64(side) * a.rows * k.row_pitch + inside
    first = tile * (height * k.top_k) + thread
    # of the first of two rows, while there is no second
    held, held_source, held_target = Boolean(False), Int64(0), Int64(0)
    for j in cutlass.range_constexpr(cute.size(place)):
        mine = place[j] >= begin and place[j] < until
        route = first + j * CONSUMERS
        if mine:
            if cutlass.const_expr(k.put):
                tail = targets - inside + Int64(row[j]) * k.row_pitch + row_bytes
                write(tail, 0, (a.rank << HOME_BITS) | route)
                if cutlass.const_expr(k.by_place):
                    write(tail, 1, (a.rank << HOME_BITS) | place[j])
            else:
                write(a.heap + a.home_at, side * a.rows + row[j], (a.rank << HOME_BITS) | route)
        bits = Int32(0)
        if cutlass.const_expr(not k.gathers):
            bits = cute.arch.vote_ballot_sync(mine)
        while bits != 0:
            one = Int32(cute.arch.popc((bits & (0 - bits)) - 1))
            bits = bits & (bits - 1)
            token = cute.arch.shuffle_sync(route // k.top_k, one)
            source = sources + Int64(token) * row_bytes
            target = targets + Int64(cute.arch.shuffle_sync(row[j], one)) * k.row_pitch
            if held:
                copy_pair(k, held_source, source, held_target, target, lane)
            held, held_source, held_target = not held, source, target
    if held:
        copy_pair(k, held_source, held_source, held_target, held_target, lane)
    cute.arch.sync_warp()
    cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_warp()
    for j in cutlass.range_constexpr(cute.size(place)):
        if place[j] >= begin and place[j] < until:
            if cutlass.const_expr(k.put):
                add_signal(a.heap + a.arrived_at + Int64(arrived_word(k, a, side, row[j] // TILE_ROWS)) * 4, 1)
            else:
                add(a.heap + a.arrived_at, arrived_word(k, a, side, row[j] // TILE_ROWS), 1, "sys")
    cute.arch.sync_warp()


@cute.jit
def units_here(k: cutlass.Constexpr[KernelShape], a: Args) -> tuple[Int32, Int32]:
    """Units of local rows: those that all warps push before the first task, and all."""
    rows = read(a.plan, PlanWord.NEAR_ROWS)
    return Int32(ceil_div(boost_rows(rows), k.near_unit)), Int32(ceil_div(rows, k.near_unit))


@cute.jit
def next_far(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, units: Int32, lane: Int32
) -> tuple[Boolean, Int32, Int32]:
    """Whole warp: whether there is a unit for another rank left, for which one, and its number there."""
    unit = next_unit(a, side, Counter.PUSH_FAR, lane)
    others = k.ranks - 1
    return unit < units, (a.rank + 1 + unit % others) % k.ranks, unit // others


@cute.jit
def push_near(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, begun: Int32, units: Int32, lane: Int32
) -> Boolean:
    """One warp pushes the next unit of local rows; whether there was one."""
    unit = begun + next_unit(a, side, Counter.PUSH_NEAR, lane)
    near = Boolean(unit < units)
    if near:
        own = a.rank
        if cutlass.const_expr(k.by_token):
            # not plainly: what the compiler then works out ahead doesn't fit into the registers
            own = a.rank + (unit >> 30)
        push_unit(k, a, side, own, unit, k.near_unit, lane)
    return near


@cute.jit
def near_follows(k: cutlass.Constexpr[KernelShape], a: Args, destination: Int32, number: Int32) -> Boolean:
    """Whether a unit of local rows follows unit `number` for rank `destination`.

    Local rows begin with a lead. If they kept it, an expert's local rows would be computed long before its remote ones,
    and its weights come from memory twice. So they go at half the pace of those for one other rank, the next, until
    these have caught up.
    """
    begun, _ = units_here(k, a)
    follows = number % 2 != 0 or number >= 2 * begun
    if cutlass.const_expr(k.ranks > 2):
        follows = follows and destination == (a.rank + 1) % k.ranks
    return follows


@cute.jit
def push_rest(k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, lane: Int32):
    """A spare warp that sends: remote and local rows in turn, until none is left. Remote ones go to all peers in turn,
    local ones at the pace of `near_follows`."""
    # How many there are is read anew for every unit, beside its claim: kept over the copies it would not fit into the
    # registers.
    begun, units = units_here(k, a)
    near, far = Boolean(units > begun), Boolean(read(a.plan, PlanWord.FAR_UNITS) > 0)
    while near or far:
        follows = Boolean(True)
        if cutlass.const_expr(k.ranks > 1):
            if far:
                far, destination, number = next_far(k, a, side, read(a.plan, PlanWord.FAR_UNITS), lane)
                if far:
                    follows = near_follows(k, a, destination, number)
                    push_unit(k, a, side, destination, number, k.far_unit, lane)
        if near and follows:
            near = push_near(k, a, side, *units_here(k, a), lane)


@cute.jit
def wait_list(a: Args, side: Int32, blocks: Int32):
    """Wait until every block has entered its routes into the send list."""
    wait_reached(side_counters(a, side), Counter.LISTED, blocks, a, Role.DISPATCH, Wait.LIST, blocks, "gpu")
