"""Token scheduling inside the kernel: one warp divides every expert's rows between its replicas, exactly.

The same algorithm as `moe_ref.balance.flow`, step for step and tie for tie, so the plan is the same bit for bit: every
rank begins with its own rows on its own replica, the rest is poured over the replicas, and a breadth-first search from
all ranks above the target pushes rows to ranks below it until the largest load is the smallest possible one. Read
`flow` first for why that is optimal.

What a warp makes of it. The steps depend on each other, so what counts is how long one takes:

* Lane p holds what there is once for rank p: its load, its place in the search's queue, how the search came to it.
  Reading another rank's is a shuffle. Sets of ranks are words of bits, the same in all lanes.
* A path of the search is such a set, too. What it can carry is one minimum over the warp, and its lanes move the rows
  of their own arcs, however long it is.
* A rank that is reached looks at 32 of its slots together. Most ranks have nothing to look at: every lane knows which
  ranks its rows could go to, so the next rank that has a new one among them is found in one step, and those before it
  in the queue are passed over, which changes nothing.
* In pouring, 32 experts lie in the lanes; from one to the next only the loads are waited for.

Branches are the same for all lanes; where lanes differ they `pick` a value or write under a condition. So the code runs
on any machine as plain Python on 32 lanes (tests/warps.py), which is how it is tested without a GPU.

Memory is one array of int32 words (shared memory), cut up by `Words`. A replica's number is v = e * D + j.

Letters: E experts, D replicas of an expert (at most), P ranks, X slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from moe_fast.kernel.shapes import KernelShape
from moe_ref.layout import ceil_div

WARP = 32
NONE = (1 << 31) - 1
"""Larger than any load and any key."""


@dataclass(frozen=True)
class Words:
    """Offsets of the solver's arrays, in words, and their sum (`limits.solver_words`)."""

    rows: int
    start: int
    rank: int
    before: int
    rest: int
    mask: int
    count: int
    held: int
    tile: int
    listed: int
    total: int

    @classmethod
    def of(cls, experts: int, replicas: int, ranks: int, slots: int) -> Words:
        """rows, start, rank, before [E, D]; rest, mask, count [E]; held [P, X]; tile, listed [P, X] + 1."""
        pairs, all_slots = experts * replicas, ranks * slots
        sizes = [pairs] * 4 + [experts] * 3 + [all_slots, all_slots + 1, all_slots + 1]
        offsets = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        return cls(*offsets)


def words_of(k: KernelShape) -> Words:
    """The arrays of a kernel's solver."""
    return Words.of(k.experts, k.replicas, k.ranks, k.slots)


# --- what lanes do together ----------------------------------------------------------------------------------------


def pick(condition, yes, no):
    """`yes` in the lanes where the condition holds, else `no`."""
    return Int32(cutlass.select_(condition, Int32(yes).ir_value(), Int32(no).ir_value()))


def from_lane(value, lane):
    """What another lane has."""
    return cute.arch.shuffle_sync(value, lane)


def vote(condition):
    """The lanes where it holds, as a word of bits."""
    return Int32(cute.arch.vote_ballot_sync(condition))


def least(value):
    """The smallest of all lanes."""
    return Int32(cute.arch.warp_redux_sync(value, "min"))


def total_of(value):
    """The sum of all lanes."""
    return Int32(cute.arch.warp_redux_sync(value, "add"))


def union_of(value):
    """The bits of all lanes."""
    return Int32(cute.arch.warp_redux_sync(value, "or"))


def count_bits(mask):
    """How many are set."""
    return Int32(cute.arch.popc(mask))


def sync():
    """What a lane wrote before, the others see."""
    cute.arch.sync_warp()


@cute.jit
def put_where(m: cute.Tensor, condition: Boolean, at: Int32, value: Int32):
    """Write a word in the lanes where the condition holds."""
    if condition:
        m[at] = value


@cute.jit
def add_where(m: cute.Tensor, condition: Boolean, at: Int32, value: Int32):
    """Add to a word in the lanes where the condition holds; several may have the same word."""
    if condition:
        cute.arch.red(m.iterator + at, value, op="add", dtype="s32", sem="relaxed", scope="cta")


def lowest_bit(mask):
    """Index of the lowest bit that is set; 32 if none is."""
    return count_bits((mask & (0 - mask)) - 1)


# --- pouring ---------------------------------------------------------------------------------------------------------


@cute.jit
def pour_many(
    k: cutlass.Constexpr[KernelShape],
    m: cute.Tensor,
    load: Int32,
    expert: Int32,
    rank: Int32,
    count: Int32,
    amount: Int32,
    lane: Int32,
) -> Int32:
    """`flow.fill_evenly` over any number of replicas, one a lane; writes their rows and returns the loads.

    rank: of the replica that a lane has; anything beyond the last.
    """
    w = words_of(k)
    mine = lane < count
    here = pick(mine, from_lane(load, rank), NONE - 1)
    # how many ranks lie below this one (ties to the earlier replica), and how many rows lift them up to it
    position, lift = Int32(0), Int32(0)
    for j in cutlass.range_constexpr(k.replicas):
        other = from_lane(here, j)
        below = mine & (other < here + pick(lane > j, 1, 0))
        position += pick(below, 1, 0)
        lift += pick(below, here - other, 0)
    shared = mine & (lift < amount)
    width = count_bits(vote(shared))
    rows = total_of(pick(shared, here, 0)) + amount
    level = rows // width if cutlass.const_expr(k.replicas > 8) else rows
    for n in cutlass.range_constexpr(2, k.replicas + 1 if k.replicas <= 8 else 2):
        # division by a constant is a product
        level = pick(width == n, rows // n, level)
    part = pick(shared, level - here + pick(position < rows - level * width, 1, 0), 0)
    put_where(m, mine, w.rows + expert * k.replicas + lane, part)
    for j in cutlass.range_constexpr(k.replicas):
        load += pick(lane == from_lane(rank, j), from_lane(part, j), 0)
    return load


@cute.jit
def pour(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, load: Int32, lane: Int32) -> Int32:
    """`flow.pour`: what has no replica at home, expert by expert; returns the loads."""
    w = words_of(k)
    last = Int32(k.experts - 1)
    for first in range(0, k.experts, WARP):
        expert = min(first + lane, last)
        rest, count = pick(first + lane < k.experts, m[w.rest + expert], 0), m[w.count + expert]
        rank_a, rank_b = m[w.rank + expert * k.replicas], m[w.rank + expert * k.replicas + 1]
        # one replica is two on the same rank
        where = count << 10 | pick(count > 1, rank_b, rank_a) << 5 | rank_a
        to_a, ranks = Int32(0), Int32(0)
        votes = vote(rest > 0)
        turn = lowest_bit(votes)
        amount, packed = from_lane(rest, turn), from_lane(where, turn)
        go = votes != 0
        votes = votes & (votes - 1)
        following = lowest_bit(votes)
        if cutlass.const_expr(k.replicas > 2):
            ranks = m[w.rank + min(first + turn, last) * k.replicas + min(lane, Int32(k.replicas - 1))]
        while go:
            # what the next expert needs is asked for now: from one to the next only the loads are waited for
            load_a, load_b = from_lane(load, packed & 31), from_lane(load, packed >> 5 & 31)
            next_amount, next_packed = from_lane(rest, following), from_lane(where, following)
            now_ranks = ranks
            if cutlass.const_expr(k.replicas > 2):
                ranks = m[w.rank + min(first + following, last) * k.replicas + min(lane, Int32(k.replicas - 1))]
            if packed >> 10 <= 2:
                # `flow.fill_evenly`; halved on a non-negative number: // floors there as in Python
                lift = load_b - load_a + amount + pick(load_a <= load_b, 1, 0)
                part = min(max(lift, Int32(0)) // 2, amount)
                load += pick(lane == (packed & 31), part, 0)
                load += pick(lane == (packed >> 5 & 31), amount - part, 0)
                to_a = pick(lane == turn, part, to_a)
            elif cutlass.const_expr(k.replicas > 2):
                load = pour_many(k, m, load, first + turn, now_ranks, packed >> 10, amount, lane)
            turn, amount, packed = following, next_amount, next_packed
            go = votes != 0
            votes = votes & (votes - 1)
            following = lowest_bit(votes)
        put_where(m, (rest > 0) & (count <= 2), w.rows + expert * k.replicas, pick(count == 1, rest, to_a))
        put_where(m, (rest > 0) & (count == 2), w.rows + expert * k.replicas + 1, rest - to_a)
    sync()
    return load


# --- searching -------------------------------------------------------------------------------------------------------


@cute.jit
def first_of(
    k: cutlass.Constexpr[KernelShape], m: cute.Tensor, votes: Int32, held: Int32, mask: Int32, rows: Int32, lane: Int32
) -> tuple[Int32, Int32, Int32, Int32, Int32]:
    """Of the lowest lane that is set: which it is, the replica there, the ranks of its expert as bits, its rows; the
    rank of replica j of that expert in lane j."""
    turn = lowest_bit(votes)
    out = from_lane(held, turn)
    rank = Int32(0)
    if cutlass.const_expr(k.replicas > 2):
        rank = m[words_of(k).rank + max(out, Int32(0)) // k.replicas * k.replicas + min(lane, Int32(k.replicas - 1))]
    return turn, out, from_lane(mask, turn), from_lane(rows, turn), rank


@cute.jit
def search(
    k: cutlass.Constexpr[KernelShape], m: cute.Tensor, target: Int32, load: Int32, ways: Int32, lane: Int32
) -> tuple[Boolean, Int32, Int32, Int32]:
    """`flow.search`: whether rows moved, the ranks that were reached as bits, the loads, the ways.

    ways: of lane p, at least the ranks that have a replica of an expert with rows on rank p.
    """
    w = words_of(k)
    own = Int32(1) << lane
    sources = vote(load > target)
    seen, tail = sources, count_bits(sources)
    room = vote(load < target)
    # of lane p: its place in the queue, the ranks on the way to it; of the last step there: the replicas that give and
    # take, the ranks of their expert, and what there is to give (with two replicas nobody else changes it)
    place, path = count_bits(sources & (own - 1)), own
    giver, taker, through, left = Int32(0), Int32(-2), Int32(0), Int32(0)
    last = Int32(-1)
    moved = Boolean(False)
    go = Boolean(True)
    while go:
        # the next in the queue from whom a new rank can be reached
        waits = ((seen & own) != 0) & (place > last) & ((ways & ~seen) != 0)
        key = least(pick(waits, place << 5 | lane, NONE))
        go = key != NONE
        if go:
            last, u = key >> 5, key & 31
            path_u, taker_u = from_lane(path, u), from_lane(taker, u)
            reaches = Int32(0)
            for first in range(0, k.slots, WARP):
                slot = first + lane
                held = pick(slot < k.slots, m[w.held + u * k.slots + min(slot, Int32(k.slots - 1))], -1)
                at = max(held, Int32(0))
                rows, mask = pick(held >= 0, m[w.rows + at], 0), m[w.mask + at // k.replicas]
                reaches = reaches | union_of(pick(rows != 0, mask, 0))
                votes = vote((rows != 0) & ((mask & ~seen) != 0))
                turn, out, ranks_of, have, rank = first_of(k, m, votes, held, mask, rows, lane)
                while votes != 0:
                    # the slot that is probably next
                    votes = votes & (votes - 1)
                    following = first_of(k, m, votes, held, mask, rows, lane)
                    begin = out // k.replicas * k.replicas
                    # replicas on ranks that weren't reached, in their order; of two the other one
                    others, again = Int32(1), Boolean(False)
                    if cutlass.const_expr(k.replicas > 2):
                        others = vote((lane < k.replicas) & (rank >= 0) & ((seen >> max(rank, Int32(0)) & 1) == 0))
                    while others != 0:
                        bit, into = ranks_of & ~seen, begin * 2 + 1 - out
                        if cutlass.const_expr(k.replicas > 2):
                            j = lowest_bit(others)
                            bit, into = Int32(1) << from_lane(rank, j), begin + j
                        others = others & (others - 1)
                        here = own == bit
                        giver, taker = pick(here, out, giver), pick(here, into, taker)
                        path, through = pick(here, path_u | bit, path), pick(here, ranks_of, through)
                        left = pick(here, have, left)
                        if (room & bit) != 0:
                            # `flow._push`
                            on = ((path_u | bit) & own) != 0
                            source = on & ((sources & own) != 0)
                            step = on & ((sources & own) == 0)
                            if cutlass.const_expr(k.replicas > 2):
                                left = m[w.rows + giver]
                            carries = pick(here, min(left, target - load), pick(source, load - target, left))
                            amount = least(pick(on, carries, NONE))
                            if amount > 0:
                                moved = Boolean(True)
                                load += pick(here, amount, 0) - pick(source, amount, 0)
                                add_where(m, step, w.rows + giver, -amount)
                                add_where(m, step, w.rows + taker, amount)
                                left -= pick(step, amount, 0)
                                ways = pick(step, ways | through, ways)
                                # these may be the rows of a slot that had none; with two replicas that slot's other
                                # rank was reached before
                                if cutlass.const_expr(k.replicas > 2):
                                    rows += pick(held == taker_u, amount, 0) - pick(lane == turn, amount, 0)
                                    again = taker_u >= 0
                                sync()
                                room = vote(load < target)
                        if (room & bit) == 0:
                            seen = seen | bit
                            place = pick(here, tail, place)
                            tail += 1
                    if again | ((following[2] & ~seen) == 0):
                        votes = vote((rows != 0) & ((mask & ~seen) != 0) & (lane > turn))
                        following = first_of(k, m, votes, held, mask, rows, lane)
                    turn, out, ranks_of, have, rank = following
            ways = pick(lane == u, reaches | through, ways)
    return moved, seen, load, ways


# --- all of it -------------------------------------------------------------------------------------------------------


@cute.jit
def begin_expert(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, expert: Int32, total: Int32):
    """One thread, once start[e] holds its rows that begin on their own rank: what is left of an expert's `total`."""
    w = words_of(k)
    for j in cutlass.range_constexpr(k.replicas):
        total -= m[w.start + expert * k.replicas + j]
        m[w.rows + expert * k.replicas + j] = 0
    m[w.rest + expert] = total


@cute.jit
def begin_tables(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, expert: Int32):
    """One thread, once rank[e] is filled: how many replicas an expert has, and its ranks as a bit mask."""
    w = words_of(k)
    mask, count = Int32(0), Int32(0)
    for j in cutlass.range_constexpr(k.replicas):
        rank = m[w.rank + expert * k.replicas + j]
        if rank >= 0:
            mask = mask | (Int32(1) << rank)
            count += 1
    m[w.mask + expert] = mask
    m[w.count + expert] = count


@cute.jit
def begin_loads(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, lane: Int32) -> tuple[Int32, Int32]:
    """Rows that begin on rank p's own replicas, in lane p, and all rows that are to be poured."""
    w = words_of(k)
    parts = cute.make_rmem_tensor(k.ranks, Int32)
    for p in cutlass.range_constexpr(k.ranks):
        parts[p] = Int32(0)
    pairs = k.experts * k.replicas
    for first in range(0, pairs, WARP):
        v = min(first + lane, Int32(pairs - 1))
        rank = pick(first + lane < pairs, m[w.rank + v], -1)
        rows = m[w.start + v]
        for p in cutlass.range_constexpr(k.ranks):
            parts[p] = parts[p] + pick(rank == p, rows, 0)
    load, rest = Int32(0), Int32(0)
    for p in cutlass.range_constexpr(k.ranks):
        load = pick(lane == p, total_of(parts[p]), load)
    for first in range(0, k.experts, WARP):
        rest += pick(first + lane < k.experts, m[w.rest + min(first + lane, Int32(k.experts - 1))], 0)
    return load, total_of(rest)


@cute.jit
def solve(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, lane: Int32) -> Int32:
    """A whole warp: `flow.solve` with locality: rows[v] from start, rest and the tables; returns the largest load."""
    w = words_of(k)
    load, poured = begin_loads(k, m, lane)
    target = Int32(ceil_div(total_of(load) + poured, k.ranks))
    ways = Int32(-1)
    # first only what was poured moves; what replicas began with gives way where that isn't enough
    if poured > 0:
        load = pour(k, m, load, lane)
        go = vote(load > target) != 0
        while go:
            moved, _, load, ways = search(k, m, target, load, ways, lane)
            go = moved and vote(load > target) != 0
    pairs = k.experts * k.replicas
    for first in range(0, pairs, WARP):
        v = min(first + lane, Int32(pairs - 1))
        put_where(m, first + lane < pairs, w.rows + v, m[w.rows + v] + m[w.start + v])
    sync()
    ways = Int32(-1)
    go = vote(load > target) != 0
    while go:
        moved, seen, load, ways = search(k, m, target, load, ways, lane)
        if not moved:
            # what is in the reached set is trapped in it
            inside = total_of(pick((seen >> lane & 1) != 0, load, 0))
            target = Int32(ceil_div(inside, count_bits(seen)))
        go = vote(load > target) != 0
    return target


@cute.jit
def route_sources(
    k: cutlass.Constexpr[KernelShape], m: cute.Tensor, expert: Int32, counts: cute.Tensor, stride: Int32, last: Int32,
    before: cute.Tensor, quota: cute.Tensor, limit: Int32,
) -> Boolean:  # fmt: skip
    """One thread: `routing.route` of one expert for sources 0 to `last`, once rows[e] is final.

    Leaves the quotas [D] of `last` in quota, and those of lower sources, in sum, in before; returns whether any quota
    is above the limit. counts[p * stride + e]: rows of source p.
    """
    w = words_of(k)
    first = expert * k.replicas
    own = cute.make_rmem_tensor(k.replicas, Int32)
    room = cute.make_rmem_tensor(k.replicas, Int32)
    for j in cutlass.range_constexpr(k.replicas):
        own[j] = min(m[w.start + first + j], m[w.rows + first + j])
        room[j] = m[w.rows + first + j] - own[j]
        before[j] = Int32(0)
        quota[j] = Int32(0)
    over = Boolean(False)
    for p in range(last + 1):
        rest = counts[p * stride + expert]
        for j in cutlass.range_constexpr(k.replicas):
            before[j] = before[j] + quota[j]
            quota[j] = Int32(0)
            if m[w.rank + first + j] == p:
                quota[j] = own[j]
                rest -= own[j]
        for j in cutlass.range_constexpr(k.replicas):
            amount = min(rest, room[j])
            quota[j] = quota[j] + amount
            room[j] = room[j] - amount
            rest -= amount
            if quota[j] > limit:
                over = Boolean(True)
    return over


@cute.jit
def route_expert(
    k: cutlass.Constexpr[KernelShape], m: cute.Tensor, expert: Int32, counts: cute.Tensor, stride: Int32, rank: Int32
):
    """One thread: the quotas of one expert and rank into start[e], those of lower ranks, in sum, into before[e]."""
    w = words_of(k)
    before = cute.make_rmem_tensor(k.replicas, Int32)
    quota = cute.make_rmem_tensor(k.replicas, Int32)
    route_sources(k, m, expert, counts, stride, rank, before, quota, Int32(1 << 30))
    for j in cutlass.range_constexpr(k.replicas):
        m[w.start + expert * k.replicas + j] = quota[j]
        m[w.before + expert * k.replicas + j] = before[j]
