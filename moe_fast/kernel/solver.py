"""Token scheduling inside the kernel: one warp divides every expert's rows between its replicas, exactly.

The same algorithm as `moe_ref.balance.flow`, step for step and tie for tie, so the plan is the same bit for bit: every
rank begins with its own rows on its own replica, the rest is poured over the replicas, and a breadth-first search from
all ranks above the target pushes rows to ranks below it until the largest load is the smallest possible one. Read
`flow` first for why that is optimal.

What a warp makes of it. The steps depend on each other, so what counts is how long one takes:

* Lane p holds what there is once for rank p: its load, its place in the search's queue, how the search came to it.
  Reading another rank's is a shuffle. Sets of ranks are words of bits, the same in all lanes.
* A path of the search is such a set, too. What it can carry is one minimum over the warp, and its lanes move the rows
  of their own arcs, however long it is, once for all that its last rank gives away.
* A rank that is reached looks at 32 of its slots together. Most ranks have nothing to look at: every lane knows which
  ranks its rows could go to, so the next rank that has a new one among them is found in one step, and those before it
  in the queue are passed over, which changes nothing.
* In pouring, lane p pours rank p's part. Experts of a round share no rank, so a round is one step; from one to the
  next only the loads are waited for.

Branches are the same for all lanes; where lanes differ they `pick` a value or write under a condition. So the code runs
on any machine as plain Python on 32 lanes (tests/warps.py), which is how it is tested without a GPU.

Memory is one array of int32 words (shared memory), cut up by `Words`. A replica's number is v = e * D + j.

Letters: E experts, D replicas of an expert (at most), P ranks, X slots of a rank, R rounds of pouring (at most).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from moe_fast.kernel.limits import most_rounds
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
    turn: int
    rounds: int
    total: int

    @classmethod
    def of(cls, experts: int, replicas: int, ranks: int, slots: int) -> Words:
        """rows, start, rank, before [E, D]; rest, mask, count [E]; held [P, X]; tile, listed [P, X] + 1.

        turn [R, P] and the number of rounds lie where tile and listed come once the rows are divided.
        """
        pairs, all_slots = experts * replicas, ranks * slots
        sizes = [pairs] * 4 + [experts] * 3 + [all_slots, all_slots + 1, all_slots + 1]
        *offsets, end = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        turn = end - 2 * (all_slots + 1)
        rounds = turn + most_rounds(experts, replicas, slots) * ranks
        return cls(*offsets, turn, rounds, max(end, rounds + 1))


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


def most(value):
    """The largest of all lanes."""
    return Int32(cute.arch.warp_redux_sync(value, "max"))


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
def halve(load: Int32, other: Int32, amount: Int32, first: Boolean) -> Int32:
    """`flow.fill_evenly` over two ranks: the part of the lane's own; first: whether that is the earlier replica."""
    gap = other - load
    # halved on a non-negative number: // floors there as in Python
    return min(max(gap + amount + pick(gap >= pick(first, 0, 1), 1, 0), Int32(0)) // 2, amount)


@cute.jit
def fill(
    k: cutlass.Constexpr[KernelShape], load: Int32, ranks: cute.Tensor, amount: Int32, replica: Int32, mine: Boolean
) -> Int32:
    """`flow.fill_evenly` over any number of ranks: the part of the lane's own.

    ranks: of the replicas of the lane's expert, -1 for none; replica: the lane's own; mine: whether it has one.
    """
    # how many ranks lie below this one (ties to the earlier replica), and how many rows lift them up to it
    position, lift = Int32(0), Int32(0)
    loads = cute.make_rmem_tensor(k.replicas, Int32)
    for j in cutlass.range_constexpr(k.replicas):
        loads[j] = from_lane(load, max(ranks[j], Int32(0)))
        below = (ranks[j] >= 0) & (loads[j] < load + pick(replica > j, 1, 0))
        position += pick(below, 1, 0)
        lift += pick(below, load - loads[j], 0)
    shared = pick(mine & (lift < amount), 1, 0)
    width, rows = Int32(0), amount
    for j in cutlass.range_constexpr(k.replicas):
        shares = (ranks[j] >= 0) & (from_lane(shared, max(ranks[j], Int32(0))) != 0)
        width += pick(shares, 1, 0)
        rows += pick(shares, loads[j], 0)
    level = rows // max(width, Int32(1)) if cutlass.const_expr(k.replicas > 8) else rows
    for n in cutlass.range_constexpr(2, k.replicas + 1 if k.replicas <= 8 else 2):
        # division by a constant is a product
        level = pick(width == n, rows // n, level)
    return pick(shared != 0, level - load + pick(position < rows - level * width, 1, 0), 0)


@cute.jit
def pour(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, load: Int32, lane: Int32) -> Int32:
    """`flow.pour`: what has no replica at home, of experts with several, round by round; returns the loads."""
    w = words_of(k)
    last_turn = Int32(most_rounds(k.experts, k.replicas, k.slots) * k.ranks - 1)
    rounds = m[w.rounds]
    ranks = cute.make_rmem_tensor(k.replicas, Int32)
    others = cute.make_rmem_tensor(k.replicas, Int32)
    # what the next rounds need is asked for before: from one to the next only the loads are waited for
    coming = pick(lane < k.ranks, m[w.turn + min(lane, last_turn)], -1)
    after = pick(lane < k.ranks, m[w.turn + min(lane + k.ranks, last_turn)], -1)
    begin = max(coming, Int32(0)) // k.replicas * k.replicas
    amount = m[w.rest + begin // k.replicas]
    for j in cutlass.range_constexpr(k.replicas):
        ranks[j] = m[w.rank + begin + j]
    for r in range(rounds):
        v, mine, replica = coming, coming >= 0, coming - begin
        rest = pick(mine, amount, 0)
        for j in cutlass.range_constexpr(k.replicas):
            others[j] = ranks[j]
        coming = after
        begin = max(coming, Int32(0)) // k.replicas * k.replicas
        amount = m[w.rest + begin // k.replicas]
        for j in cutlass.range_constexpr(k.replicas):
            ranks[j] = m[w.rank + begin + j]
        after = pick(lane < k.ranks, m[w.turn + min((r + 2) * k.ranks + lane, last_turn)], -1)
        if cutlass.const_expr(k.replicas == 2):
            first = replica == 0
            part = halve(load, from_lane(load, max(pick(first, others[1], others[0]), Int32(0))), rest, first)
        else:
            part = fill(k, load, others, rest, replica, mine)
        load += part
        put_where(m, mine, w.rows + max(v, Int32(0)), part)
    sync()
    return load


# --- searching -------------------------------------------------------------------------------------------------------


@cute.jit
def first_of(
    k: cutlass.Constexpr[KernelShape], m: cute.Tensor, votes: Int32, slot: Int32, mask: Int32, rows: Int32, lane: Int32
) -> tuple[Int32, Int32, Int32, Int32, Int32]:
    """Of the lowest lane that is set: which it is, what is in its slot, its rows, the ranks where its expert has other
    replicas; with more than two replicas also the rank of replica j in lane j."""
    w, turn = words_of(k), lowest_bit(votes)
    out = from_lane(slot, turn)
    ranks_of, rank = Int32(1) << (out & 31), Int32(0)
    if cutlass.const_expr(k.replicas > 2):
        ranks_of = from_lane(mask, turn)
        replica = max(out, Int32(0)) // k.replicas * k.replicas + min(lane, Int32(k.replicas - 1))
        rank = m[w.rank + replica]
    return turn, out, from_lane(rows, turn), ranks_of, rank


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
    source = (sources & own) != 0
    # of lane p: its place in the queue, the ranks on the way to it; of the last step there: the replica that gives, the
    # ranks of its expert, and what there is to give (with two replicas nobody else changes it)
    place, path = count_bits(sources & (own - 1)), own
    giver, through, left = Int32(0), Int32(0), Int32(0)
    # the ranks whose last step is used up, and with it every path through them
    spent, last = Int32(0), Int32(-1)
    moved = Boolean(False)
    go = Boolean(True)
    while go:
        # the next in the queue that a path leads to, and from whom a new rank can be reached
        waits = ((seen & own) != 0) & (place > last) & ((ways & ~seen) != 0) & ((path & spent) == 0)
        key = least(pick(waits, place << 5 | lane, NONE))
        go = key != NONE
        if go:
            last, u = key >> 5, key & 31
            own_u, path_u = Int32(1) << u, from_lane(path, u)
            on = (path_u & own) != 0
            if cutlass.const_expr(k.replicas > 2):
                left = m[w.rows + giver]
            carried = least(pick(on, pick(source, load - target, left), NONE))
            rest, reaches = carried, Int32(0)
            for first in range(0, k.slots, WARP):
                index = first + lane
                held = pick(index < k.slots, m[w.held + u * k.slots + min(index, Int32(k.slots - 1))], -1)
                at = max(held, Int32(0))
                had, mask = pick(held >= 0, m[w.rows + at], 0), m[w.mask + at // k.replicas]
                rows, slot, other, there = had, held, Int32(0), Int32(0)
                if cutlass.const_expr(k.replicas == 2):
                    # the other replica, its rows, and with `held` its rank
                    other = at // 2 * 4 + 1 - at
                    there = m[w.rows + other]
                    slot = at << 5 | max(m[w.rank + other], Int32(0))
                reaches = reaches | union_of(pick(rows != 0, mask, 0))
                votes = pick(rest > 0, vote((rows != 0) & ((mask & ~seen) != 0)), 0)
                turn, out, have, ranks_of, rank = first_of(k, m, votes, slot, mask, rows, lane)
                while votes != 0:
                    # the slot that is probably next
                    votes = votes & (votes - 1)
                    following = first_of(k, m, votes, slot, mask, rows, lane)
                    begin, before, replicas = out // k.replicas * k.replicas, rest, Int32(0)
                    if cutlass.const_expr(k.replicas > 2):
                        replicas = m[w.rows + begin + min(lane, Int32(k.replicas - 1))]
                    more = Boolean(True)
                    while more:
                        # the next rank that wasn't reached; of two the other one
                        v = out & 31 if cutlass.const_expr(k.replicas == 2) else lowest_bit(ranks_of & ~seen)
                        here = lane == v
                        space = target - from_lane(load, v)
                        amount = max(min(min(rest, have), space), Int32(0))
                        load += pick(here, amount, 0)
                        rest, have = rest - amount, have - amount
                        rows -= pick(lane == turn, amount, 0)
                        ways = pick(here & (amount > 0), ways | ranks_of | own_u, ways)
                        replicas += pick(rank == v, amount, 0)
                        if space <= amount:
                            # no room (left): others may be reached through it
                            seen = seen | (Int32(1) << v)
                            place, path = pick(here, tail, place), pick(here, path_u | own, path)
                            giver = pick(here, out >> 5 if cutlass.const_expr(k.replicas == 2) else out, giver)
                            through, left = pick(here, ranks_of | own_u, through), pick(here, have, left)
                            tail += 1
                        more = Boolean(False)
                        if cutlass.const_expr(k.replicas > 2):
                            more = (rest > 0) & (have > 0) & ((ranks_of & ~seen) != 0)
                    if cutlass.const_expr(k.replicas > 2):
                        took = (rest < before) & (lane < k.replicas) & (begin + lane != out)
                        put_where(m, took, w.rows + begin + lane, replicas)
                    votes = pick(rest > 0, votes, 0)
                    if (votes != 0) & ((following[3] & ~seen) == 0):
                        votes = vote((rows != 0) & ((mask & ~seen) != 0) & (lane > turn))
                        following = first_of(k, m, votes, slot, mask, rows, lane)
                    turn, out, have, ranks_of, rank = following
                put_where(m, rows != had, w.rows + at, rows)
                if cutlass.const_expr(k.replicas == 2):
                    put_where(m, rows != had, w.rows + other, there + had - rows)
                sync()
            ways = pick(lane == u, reaches | through, ways)
            amount = carried - rest
            if amount > 0:
                # `flow._carry`
                moved = Boolean(True)
                load -= pick(on & source, amount, 0)
                if (path_u & ~sources) != 0:
                    step, begin = on & ~source, giver // k.replicas * k.replicas
                    taker = begin * 2 + 1 - giver
                    if cutlass.const_expr(k.replicas > 2):
                        for j in cutlass.range_constexpr(k.replicas):
                            taker = pick(m[w.rank + begin + j] == lane, begin + j, taker)
                    add_where(m, step, w.rows + giver, -amount)
                    add_where(m, step, w.rows + taker, amount)
                    left -= pick(step, amount, 0)
                    ways = pick(step, ways | through, ways)
                    sync()
                if cutlass.const_expr(k.replicas > 2):
                    left = m[w.rows + giver]
                spent = vote(((seen & own) != 0) & (pick(source, load - target, left) == 0))
    return moved, seen, load, ways


# --- all of it -------------------------------------------------------------------------------------------------------


@cute.jit
def begin_expert(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, expert: Int32, total: Int32):
    """One thread, once start[e] holds its rows that begin on their own rank: what is left of an expert's `total`.

    Until `route_expert`, before[e] holds the load that no division of this expert's rows can avoid.
    """
    w = words_of(k)
    count = m[w.count + expert]
    even = (total + count - 1) // count if cutlass.const_expr(k.replicas > 8) else total
    for n in cutlass.range_constexpr(2, k.replicas + 1 if k.replicas <= 8 else 2):
        # division by a constant is a product
        even = pick(count == n, (total + (n - 1)) // n, even)
    m[w.before + expert * k.replicas] = even
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
def begin_loads(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, lane: Int32) -> tuple[Int32, Int32, Int32]:
    """Rows that have to stay on rank p or begin there, in lane p; all rows that are to be poured; the load that one
    expert alone makes unavoidable."""
    w = words_of(k)
    parts = cute.make_rmem_tensor(k.ranks, Int32)
    for p in cutlass.range_constexpr(k.ranks):
        parts[p] = Int32(0)
    load, poured, bound = Int32(0), Int32(0), Int32(0)
    for first in range(0, k.experts, WARP):
        inside = first + lane < k.experts
        expert = min(first + lane, Int32(k.experts - 1))
        rest, several = m[w.rest + expert], m[w.count + expert] > 1
        poured += pick(inside & several, rest, 0)
        bound = max(bound, m[w.before + expert * k.replicas])
        # an expert with one replica has no choice
        rest = pick(several, 0, rest)
        put_where(m, inside & (rest > 0), w.rows + expert * k.replicas, rest)
        for j in cutlass.range_constexpr(k.replicas):
            v = expert * k.replicas + j
            rank = pick(inside, m[w.rank + v], -1)
            rows = m[w.start + v] + rest if cutlass.const_expr(j == 0) else m[w.start + v]
            for p in cutlass.range_constexpr(k.ranks):
                parts[p] = parts[p] + pick(rank == p, rows, 0)
    for p in cutlass.range_constexpr(k.ranks):
        load = pick(lane == p, total_of(parts[p]), load)
    return load, total_of(poured), most(bound)


@cute.jit
def solve(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, lane: Int32) -> Int32:
    """A whole warp: `flow.solve` with locality: rows[v] from start, rest and the tables; returns the largest load."""
    w = words_of(k)
    load, poured, bound = begin_loads(k, m, lane)
    sync()
    target = max(Int32(ceil_div(total_of(load) + poured, k.ranks)), bound)
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
