"""The wire format "tokens": a token crosses once to each rank that computes any of it, one partial sum comes back.

The oracle is `moe_ref.wire`. What differs from "routes", all of it at compile time (`KernelShape.by_token`):

* The send list is the same, but of a token's routes to another rank only the first, the leader, is sent, to the row
  that it has there anyway. Beside the list every rank writes to its peers where their rows are to come from
  (`leader` of a row), and of each token its K rows there, its weights and how many of them there are.
* The receiver's spare warps count the followers, tile by tile, into the tiles' arrival counters once their leaders are
  there; the peer counts the leaders. So a tile is there when its rows are. Its tasks read a follower from its leader's
  row (`gather`); kernels that don't gather copy it to its own before they count it, and nobody else sees a difference.
* Results stay on the rank that computed them, in `results`, at the row of their tile. A token of another rank whose
  results are all there is summed, in k order in fp32, rounded once, stored at home and counted there: by spare warps
  while products run, by all consumer warps at the end. Home adds one partial of each other rank to its own, in rank
  order.

Nobody waits in a circle. Sending waits for nothing. A warp that has claimed followers goes on sending while their
leaders are not there, and waits for them only when it has nothing left to send. Sums wait for products, products for
rows, and what combines at home for the sums, never the other way round.

Flags hold the number of the call, so they are not reset. The rest of what peers write here is written after every rank
has begun the call (counts exchange), so the call before has ended everywhere, and one side is enough.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from moe_fast.kernel import replicas
from moe_fast.kernel.constants import (
    FOLLOWER,
    HOME_BITS,
    TILE_ROWS,
    TOKEN_UNIT,
    TOKEN_WINDOW,
    Counter,
    PlanWord,
)
from moe_fast.kernel.dispatch import copy_pair, near_follows, next_far, next_unit, push_near, units_here
from moe_fast.kernel.scans import CONSUMERS, sync_consumers
from moe_fast.kernel.send_list import keep_within, place_of, starts_of
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import (
    EPOCH,
    SENT_ROWS,
    Args,
    Role,
    Wait,
    aborted,
    add,
    arrived_word,
    dealt_at,
    fetch_add,
    landed_at,
    leader_at,
    listed_at,
    need_at,
    peer,
    place_at,
    read,
    sent_at,
    sent_word,
    side_counters,
    wait_reached,
    weight_at,
    write,
)
from moe_fast.kernel.tile_pairs import dealt_rows, field_rows
from moe_ref.layout import ceil_div
from moe_ref.runtime.encoding import counts_signal, next_target, reached


def this_call(a):
    """Value of the flags of this call."""
    return counts_signal(read(a.control, EPOCH))


def lowest(bits):
    """Number of the lowest bit that is set."""
    return Int32(cute.arch.popc((bits & (0 - bits)) - 1))


# --- the send list ---------------------------------------------------------------------------------------------------


@cute.jit
def list_tokens(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, tile: Int32, height: Int32, token_tiles: Int32,
    scratch: cute.Pointer, thread: Int32,
):  # fmt: skip
    """Enter the routes of one token tile into the send list, tell every rank what it gets of the tile's tokens, and
    note what the tokens will expect back: their own results and a partial of each other rank.

    height: tokens of a tile. scratch: 3 * 128 * K words of shared memory: row, place in the list and rank of every
    route.
    """
    size = TILE_ROWS * k.top_k
    first = tile * (height * k.top_k)
    count = min(a.tokens * k.top_k - first, height * k.top_k)
    starts = starts_of(k, tile, token_tiles)
    rows, places, ranks = scratch, scratch + size, scratch + 2 * size
    sync_consumers()
    for r in range(thread, height * k.top_k, CONSUMERS):
        row, place, rank = Int32(-1), Int32(0), Int32(-1)
        if r < count:
            expert = read(a.expert, first + r)
            if expert >= 0:
                place = place_of(k, a, tile, starts, expert, read(a.index, first + r))
                if keep_within(k, a, first + r, expert, place):
                    target = expert
                    if cutlass.const_expr(k.placed):
                        target, place = replicas.choose_replica(k, a, expert, place)
                        rank = read(a.placement, target)
                    else:
                        rank = Int32(k.owner(expert))
                    row = place + read(a.row_shift, target)
        cute.arch.store(rows + r, row)
        cute.arch.store(places + r, place)
        cute.arch.store(ranks + r, rank)
    sync_consumers()
    for r in range(thread, count, CONSUMERS):
        rank, row, place = (cute.arch.load(part + r, Int32) for part in (ranks, rows, places))
        where = Int32(-1)
        if rank >= 0:
            # the token's first route to the rank, in the order of the list
            lead, earliest = row, place
            for j in cutlass.range_constexpr(k.top_k):
                other = r // k.top_k * k.top_k + j
                before = cute.arch.load(places + other, Int32)
                if cute.arch.load(ranks + other, Int32) == rank and before < earliest:
                    earliest = before
                    lead = cute.arch.load(rows + other, Int32)
            entry = first + r
            if rank == a.rank:
                # rows that stay here are all read, or copied, from the tokens
                lead = row
                where = row
            else:
                where = -2 - rank
            if lead != row:
                entry = entry | FOLLOWER
            write(a.send, place, Int64(entry) | (Int64(row) << 32), Int64)
            base = peer(a, rank)
            write(base + a.home_at, side * a.rows + row, (a.rank << HOME_BITS) | (first + r))
            write(base + leader_at(k, a), row, lead)
        write(a.where, first + r, where)
    counters = side_counters(a, side)
    token = tile * height + thread
    expected = Int32(0)
    for i in cutlass.range_constexpr(k.ranks):
        p = (a.rank + i) % k.ranks
        base = peer(a, p)
        if cutlass.const_expr(i > 0):
            to = a.rank * (a.max_tokens * k.top_k) + first
            for r in range(thread, count, CONSUMERS):
                value = Int32(-1)
                if cute.arch.load(ranks + r, Int32) == p:
                    value = cute.arch.load(rows + r, Int32)
                write(base + place_at(k, a), to + r, value)
                write(base + weight_at(k, a), to + r, read(a.weight, first + r))
        if thread < height:
            here = Int32(0)
            for j in cutlass.range_constexpr(k.top_k):
                if cute.arch.load(ranks + thread * k.top_k + j, Int32) == p:
                    here += 1
            if cutlass.const_expr(i > 0):
                if token < a.tokens:
                    write(base + need_at(k, a), a.rank * a.max_tokens + token, here)
                expected += min(here, Int32(1))
            else:
                expected += here
            some = cute.arch.popc(cute.arch.vote_ballot_sync(here > 0))
            if thread % 32 == 0:
                add(counters, sent_word(k, a, p), some, "gpu")
    if thread < height and token < a.tokens:
        if cutlass.const_expr(k.shared_intermediate > 0):
            expected += 1
        targets = a.back_target + Int64(side * a.max_tokens) * 4
        write(targets, token, next_target(read(targets, token), expected))


@cute.jit
def publish_tokens(k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, blocks: Int32, thread: Int32):
    """This block has entered all of its token tiles; the last block tells every rank that it has been told all."""
    counters = side_counters(a, side)
    cute.arch.fence_acq_rel_sys()
    sync_consumers()
    if thread == 0:
        cute.arch.fence_acq_rel_sys()
        if fetch_add(counters, Counter.LISTED) == blocks - 1:
            # what the other blocks told, then the flags
            cute.arch.fence_acq_rel_sys()
            for p in cutlass.range_constexpr(k.ranks):
                for q in cutlass.range_constexpr(k.ranks):
                    seen = read(counters, sent_word(k, a, Int32(q)), sem="relaxed", scope="gpu")
                    write(peer(a, p) + sent_at(k, a), a.rank * k.ranks + q, seen)
            cute.arch.fence_acq_rel_sys()
            for p in cutlass.range_constexpr(k.ranks):
                write(peer(a, p) + listed_at(a), a.rank, this_call(a), sem="release", scope="sys")


@cute.jit
def list_all_tokens(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, block: Int32, processors: Int32, height: Int32,
    token_tiles: Int32, scratch: cute.Pointer, thread: Int32,
):  # fmt: skip
    """The consumers of a processor block enter the token tiles block, block + processors, ... and publish them."""
    # all threads must decide alike, for listing has barriers
    if thread == 0:
        usable = read(a.plan, PlanWord.USABLE) != 0 and not aborted(a)
        cute.arch.store(scratch, Int32(usable))
    sync_consumers()
    if cute.arch.load(scratch, Int32) != 0:
        for tile in range(block, token_tiles, processors):
            list_tokens(k, a, side, tile, height, token_tiles, scratch, thread)
    publish_tokens(k, a, side, processors, thread)


@cute.jit
def all_listed(k: cutlass.Constexpr[KernelShape], a: Args, lane: Int32) -> Boolean:
    """Whole warp: whether every rank has told what comes here."""
    told = Boolean(True)
    if lane < k.ranks:
        told = reached(read(a.heap + listed_at(a), lane, sem="acquire", scope="sys"), this_call(a))
    return cute.arch.vote_all_sync(told)


@cute.jit
def wait_listed(k: cutlass.Constexpr[KernelShape], a: Args, role: cutlass.Constexpr, lane: Int32) -> Boolean:
    """Whole warp: wait until every rank has told what comes here; False if that failed."""
    told = Boolean(True)
    if lane < k.ranks:
        told = wait_reached(a.heap + listed_at(a), lane, this_call(a), a, role, Wait.TOKENS, lane, "sys")
    return cute.arch.vote_all_sync(told)


# --- rows there ------------------------------------------------------------------------------------------------------


@cute.jit
def push_leaders(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, destination: Int32, number: Int32, lane: Int32
):
    """One warp sends the leaders of unit `number` of a destination's part of the send list.

    The first experts' routes are nearly all leaders, the last ones' nearly none. So a unit's 32 entries lie apart in a
    window of the list: all units of a window have as many leaders, and windows follow each other in the list's order.
    """
    starts = k.plan_parts * k.experts
    begin, end = read(a.list_start, starts + destination), read(a.list_start, starts + destination + 1)
    begin = begin + number // TOKEN_WINDOW * (TOKEN_WINDOW * TOKEN_UNIT)
    size = min(end - begin, Int32(TOKEN_WINDOW * TOKEN_UNIT))
    inside = number % TOKEN_WINDOW
    units = Int32(ceil_div(max(size, Int32(0)), TOKEN_UNIT))
    if inside < units:
        base = peer(a, destination)
        row_bytes = k.hidden * k.element_size
        place = inside + units * lane
        entry = Int64(FOLLOWER)
        if place < size:
            entry = read(a.send, begin + place, Int64)
        low, row = Int32(entry & 0xFFFFFFFF), Int32(entry >> 32)
        leads = (low & FOLLOWER) == 0
        source = a.x + Int64((low & (FOLLOWER - 1)) // k.top_k) * row_bytes
        target = base + a.rows_at + (Int64(side) * a.rows + row) * k.row_pitch
        copy_marked(k, source, target, leads, lane)
        cute.arch.sync_warp()
        cute.arch.fence_acq_rel_sys()
        cute.arch.sync_warp()
        if leads:
            write(base + landed_at(a), row, this_call(a), sem="relaxed", scope="sys")
            add(base + a.arrived_at, arrived_word(k, a, side, row // TILE_ROWS), 1, "sys")
        if cutlass.const_expr(k.trace):
            sent = cute.arch.popc(cute.arch.vote_ballot_sync(leads))
            if lane == 0:
                add(a.control, SENT_ROWS, sent, "gpu")
    cute.arch.sync_warp()


@cute.jit
def copy_marked(k: cutlass.Constexpr[KernelShape], source: Int64, target: Int64, marked: Boolean, lane: Int32):
    """A whole warp copies the rows of the lanes that are marked, two at a time."""
    inside = Int64(lane * 16)
    left = Int32(cute.arch.vote_ballot_sync(marked))
    while left != 0:
        one = lowest(left)
        left = left & (left - 1)
        two = one
        if left != 0:
            two = lowest(left)
            left = left & (left - 1)
        copy_pair(
            k,
            cute.arch.shuffle_sync(source, one) + inside,
            cute.arch.shuffle_sync(source, two) + inside,
            cute.arch.shuffle_sync(target, one) + inside,
            cute.arch.shuffle_sync(target, two) + inside,
            lane,
        )


def held_tiles(k):
    """Index of the plan's word that says how many row tiles this rank has."""
    return PlanWord.HELD_TILES if k.paired else PlanWord.ROW_TILES


def rows_of_tile(k, a, tile):
    """Rows of a row tile that are no padding."""
    if k.paired:
        return dealt_rows(read(dealt_at(k, a), tile))
    return field_rows(read(a.tile_rows, tile))


@cute.jit
def push_tokens(k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, sends: Boolean, lane: Int32):
    """A spare warp: leaders to all peers in turn, local rows, and followers whose leaders are here, until none is left.

    sends: whether leaders and local rows are this warp's affair, too; followers are every spare warp's. They are taken
    32 rows of a tile at a time, in the order of the tiles.
    """
    # How many there are is read anew for every unit, beside its claim: kept over the copies it would not fit into the
    # registers.
    begun, units = units_here(k, a)
    near = Boolean(sends and units > begun)
    far = Boolean(sends and read(a.plan, PlanWord.FAR_UNITS) > 0)
    own = Boolean(read(a.plan, held_tiles(k)) > 0)
    told, pending = Boolean(False), Boolean(False)
    row, lead = Int32(0), Int32(0)
    rows = a.heap + a.rows_at + Int64(side) * a.rows * k.row_pitch
    while near or far or own or pending:
        follows = Boolean(True)
        if far:
            far, destination, number = next_far(k, a, side, read(a.plan, PlanWord.FAR_UNITS), lane)
            if far:
                if cutlass.const_expr(k.paired):
                    # else a register more than there is, over the copies
                    follows = near_follows(k, a, destination, number)
                push_leaders(k, a, side, destination, number, lane)
        if near and follows:
            near = push_near(k, a, side, *units_here(k, a), lane)
        busy = near or far
        if not told:
            told = all_listed(k, a, lane)
            if not told and not busy:
                told = wait_listed(k, a, Role.DISPATCH, lane)
                own = told
        # the heap, but not plainly: addresses that the compiler works out ahead don't fit into the registers
        heap = a.heap + (Int64(row) >> 40)
        if told and own and not pending:
            own_units = read(a.plan, held_tiles(k)) * (TILE_ROWS // TOKEN_UNIT)
            unit = next_unit(a, side, Counter.FOLLOW, lane)
            own = unit < own_units
            if own:
                row = unit * TOKEN_UNIT + lane
                lead = row
                if row % TILE_ROWS < rows_of_tile(k, a, row // TILE_ROWS):
                    lead = read(heap + leader_at(k, a), row)
                pending = cute.arch.vote_any_sync(lead != row)
        if pending:
            here, ok = Boolean(True), Boolean(True)
            if lead != row:
                if busy:
                    seen = read(heap + landed_at(a), lead, sem="acquire", scope="sys")
                    here = reached(seen, this_call(a))
                else:
                    ok = wait_reached(
                        heap + landed_at(a), lead, this_call(a), a, Role.DISPATCH, Wait.LEADER, lead, "sys"
                    )
            ok = cute.arch.vote_all_sync(ok)
            if not ok:
                own = Boolean(False)
                pending = Boolean(False)
            elif cute.arch.vote_all_sync(here):
                if cutlass.const_expr(not k.gathers):
                    copy_marked(k, rows + Int64(lead) * k.row_pitch, rows + Int64(row) * k.row_pitch, lead != row, lane)
                cute.arch.sync_warp()
                cute.arch.fence_acq_rel_gpu()
                cute.arch.sync_warp()
                copied = cute.arch.popc(cute.arch.vote_ballot_sync(lead != row))
                if lane == 0:
                    add(heap + a.arrived_at, arrived_word(k, a, side, row // TILE_ROWS), copied, "sys")
                pending = Boolean(False)
