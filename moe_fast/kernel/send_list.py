"""The send list: from a token's choices to the rows that they go to, in the order of the experts.

Run by the 256 consumer threads of each processor block, for its token tiles.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from moe_fast.kernel import replicas
from moe_fast.kernel.constants import HOME_BITS, TILE_ROWS, Counter
from moe_fast.kernel.plan import tiles_per_part
from moe_fast.kernel.scans import CONSUMERS, sync_consumers
from moe_fast.kernel.shapes import KernelShape, dropped
from moe_fast.kernel.signals import (
    Args,
    add,
    home_row,
    read,
    side_counters,
    write,
)
from moe_ref.layout import ceil_div
from moe_ref.runtime.encoding import next_target


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
    usable: Boolean, given_up: Boolean, routes: tuple, places: tuple, thread: Int32,
):  # fmt: skip
    """Enter the routes of one token tile into the send list, and the returned rows that its tokens will expect; nothing
    where the plan isn't usable, or some role has given up.

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
        fits = place[j] >= 0 and usable and not given_up
        if not fits:
            place[j] = -1
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
    if thread < height and token < a.tokens and usable and not given_up:
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
