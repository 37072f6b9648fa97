"""Token scheduling inside the kernel: one warp divides every expert's rows between its replicas, exactly.

The same algorithm as `moe_ref.balance.flow`, step for step and tie for tie, so the plan is the same bit for bit: every
rank begins with its own rows on its own replica, the rest is poured over the replicas, and a breadth-first search from
all ranks above the target pushes rows to ranks below it until the largest load is the smallest possible one. Read
`flow` first for why that is optimal.

What a warp changes: looking for the next replica that can give rows away takes 32 of them at a time. The rest is a
chain of dependent steps that all lanes take together; lane 0 writes. With `lanes` = 1 the same code runs as host code,
which is how it is tested without a GPU.

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


@dataclass(frozen=True)
class Words:
    """Offsets of the solver's arrays, in words, and their sum (`shapes.solver_words`)."""

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
    load: int
    came_from: int
    came_by: int
    came_into: int
    queue: int
    order: int
    total: int

    @classmethod
    def of(cls, experts: int, replicas: int, ranks: int, slots: int) -> Words:
        """rows, start, rank, before [E, D]; rest, mask, count [E]; held [P, X]; tile, listed [P, X] + 1; others [P]."""
        pairs, all_slots = experts * replicas, ranks * slots
        sizes = [pairs] * 4 + [experts] * 3 + [all_slots, all_slots + 1, all_slots + 1] + [ranks] * 5 + [replicas]
        offsets = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        return cls(*offsets)


def words_of(k: KernelShape) -> Words:
    """The arrays of a kernel's solver."""
    return Words.of(k.experts, k.replicas, k.ranks, k.slots)


def sync(lanes: int) -> None:
    """What one lane wrote, the others see."""
    if lanes > 1:
        cute.arch.sync_warp()


@cute.jit
def lowest_bit(mask: Int32) -> Int32:
    """Index of the lowest bit that is set; the mask isn't 0."""
    return Int32(cute.arch.popc((mask & (0 - mask)) - 1))


@cute.jit
def next_rest(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, after: Int32, lane: Int32, lanes: cutlass.Constexpr):
    """First expert from `after` on that has rows to pour; E if none has."""
    w = words_of(k)
    found = Int32(k.experts)
    if cutlass.const_expr(lanes == 1):
        expert = after
        while expert < found:
            if m[w.rest + expert] > 0:
                found = expert
            expert += 1
    else:
        first = after // WARP * WARP
        while first < found:
            good = Boolean(False)
            if first + lane >= after and first + lane < k.experts:
                good = m[w.rest + first + lane] > 0
            votes = Int32(cute.arch.vote_ballot_sync(good))
            if votes != 0:
                found = first + lowest_bit(votes)
            first += WARP
    return found


@cute.jit
def can_give(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, place: Int32, seen: Int32) -> Boolean:
    """Whether the replica in a slot has rows, and its expert a replica on a rank that wasn't reached."""
    w = words_of(k)
    good = Boolean(False)
    v = m[w.held + place]
    if v >= 0:
        if m[w.rows + v] != 0:
            good = (m[w.mask + v // k.replicas] & ~seen) != 0
    return good


@cute.jit
def next_replica(
    k: cutlass.Constexpr[KernelShape],
    m: cute.Tensor,
    rank: Int32,
    after: Int32,
    seen: Int32,
    lane: Int32,
    lanes: cutlass.Constexpr,
):
    """First slot of a rank from `after` on whose replica can give rows; X if none can."""
    found = Int32(k.slots)
    if cutlass.const_expr(lanes == 1):
        slot = after
        while slot < found:
            if can_give(k, m, rank * k.slots + slot, seen):
                found = slot
            slot += 1
    else:
        first = after // WARP * WARP
        while first < found:
            good = Boolean(False)
            if first + lane >= after and first + lane < k.slots:
                good = can_give(k, m, rank * k.slots + first + lane, seen)
            votes = Int32(cute.arch.vote_ballot_sync(good))
            if votes != 0:
                found = first + lowest_bit(votes)
            first += WARP
    return found


@cute.jit
def largest_load(k: cutlass.Constexpr[KernelShape], m: cute.Tensor) -> Int32:
    """Rows of the busiest rank."""
    w = words_of(k)
    most = Int32(0)
    for p in cutlass.range_constexpr(k.ranks):
        most = max(most, m[w.load + p])
    return most


@cute.jit
def give(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, v: Int32, amount: Int32):
    """One lane: replica v gets rows."""
    w = words_of(k)
    rank = m[w.rank + v]
    m[w.load + rank] = m[w.load + rank] + amount
    m[w.rows + v] = m[w.rows + v] + amount


@cute.jit
def fill_evenly(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, expert: Int32):
    """One lane: `flow.fill_evenly` of what an expert has to pour over its replicas."""
    w = words_of(k)
    amount, count, first = m[w.rest + expert], m[w.count + expert], expert * k.replicas
    if count == 1:
        give(k, m, first, amount)
    elif count == 2:
        load_a, load_b = m[w.load + m[w.rank + first]], m[w.load + m[w.rank + first + 1]]
        # halved on a non-negative number: // floors there as in Python
        lift = load_b - load_a + amount
        if load_a <= load_b:
            lift += 1
        to_a = min(max(lift, Int32(0)) // 2, amount)
        give(k, m, first, to_a)
        give(k, m, first + 1, amount - to_a)
    elif cutlass.const_expr(k.replicas > 2):
        # insertion sort by (load, replica), then the lowest ranks share: `width` of them
        for j in range(count):
            mine = m[w.load + m[w.rank + first + j]]
            i = j
            go = i > 0
            while go:
                before = m[w.order + i - 1]
                go = m[w.load + m[w.rank + first + before]] > mine
                if go:
                    m[w.order + i] = before
                    i -= 1
                    go = i > 0
            m[w.order + i] = j
        below = m[w.load + m[w.rank + first + m[w.order]]]
        width = Int32(1)
        go = width < count
        while go:
            following = m[w.load + m[w.rank + first + m[w.order + width]]]
            go = following * width - below < amount
            if go:
                below += following
                width += 1
                go = width < count
        level, extra = (below + amount) // width, (below + amount) % width
        for position in range(width):
            v = first + m[w.order + position]
            part = level - m[w.load + m[w.rank + v]]
            if position < extra:
                part += 1
            give(k, m, v, part)


@cute.jit
def push(
    k: cutlass.Constexpr[KernelShape],
    m: cute.Tensor,
    sink: Int32,
    target: Int32,
    lane: Int32,
    lanes: cutlass.Constexpr,
) -> Int32:
    """`flow._push`: move what the path to `sink` can carry; the rows moved."""
    w = words_of(k)
    amount = target - m[w.load + sink]
    v = sink
    u = m[w.came_from + sink]
    while u >= 0:
        amount = min(amount, m[w.rows + m[w.came_by + v]])
        v = u
        u = m[w.came_from + v]
    amount = min(amount, m[w.load + v] - target)
    sync(lanes)
    if lane == 0 and amount > 0:
        m[w.load + v] = m[w.load + v] - amount
        m[w.load + sink] = m[w.load + sink] + amount
        v = sink
        u = m[w.came_from + sink]
        while u >= 0:
            out, into = m[w.came_by + v], m[w.came_into + v]
            m[w.rows + out] = m[w.rows + out] - amount
            m[w.rows + into] = m[w.rows + into] + amount
            v = u
            u = m[w.came_from + v]
    sync(lanes)
    return amount


@cute.jit
def search(
    k: cutlass.Constexpr[KernelShape], m: cute.Tensor, target: Int32, lane: Int32, lanes: cutlass.Constexpr
) -> tuple[Boolean, Int32]:
    """`flow.search`: whether rows moved, and the ranks that were reached as a bit mask."""
    w = words_of(k)
    seen, tail = Int32(0), Int32(0)
    for p in cutlass.range_constexpr(k.ranks):
        if m[w.load + p] > target:
            seen = seen | Int32(_bit(p))
            if lane == 0:
                m[w.came_from + p] = -1
                m[w.queue + tail] = p
            tail += 1
    sync(lanes)
    head = Int32(0)
    moved = Boolean(False)
    while head < tail:
        u = m[w.queue + head]
        head += 1
        slot = next_replica(k, m, u, Int32(0), seen, lane, lanes)
        while slot < k.slots:
            out = m[w.held + u * k.slots + slot]
            first = out // k.replicas * k.replicas
            for i in cutlass.range_constexpr(k.replicas):
                v = m[w.rank + first + i]
                known = Int32(1)
                if v >= 0:
                    known = (seen >> v) & 1
                if known == 0:
                    if lane == 0:
                        m[w.came_from + v] = u
                        m[w.came_by + v] = out
                        m[w.came_into + v] = first + i
                    sync(lanes)
                    if m[w.load + v] < target:
                        if push(k, m, v, target, lane, lanes) > 0:
                            moved = Boolean(True)
                    if m[w.load + v] >= target:
                        seen = seen | (Int32(1) << v)
                        if lane == 0:
                            m[w.queue + tail] = v
                        tail += 1
                    sync(lanes)
            slot = next_replica(k, m, u, slot + 1, seen, lane, lanes)
    return moved, seen


def _bit(position: int) -> int:
    """Bit as a signed 32-bit integer."""
    return 1 << position if position < 31 else -(1 << 31)


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
def own_load(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, rank: Int32, lane: Int32, lanes: cutlass.Constexpr):
    """Rows that begin on a rank's own replicas."""
    w = words_of(k)
    total = Int32(0)
    for slot in range(lane, k.slots, lanes):
        v = m[w.held + rank * k.slots + slot]
        if v >= 0:
            total += m[w.start + v]
    if cutlass.const_expr(lanes > 1):
        total = cute.arch.warp_reduction_sum(total)
    return total


@cute.jit
def solve(k: cutlass.Constexpr[KernelShape], m: cute.Tensor, lane: Int32, lanes: cutlass.Constexpr) -> Int32:
    """`flow.solve` with locality: rows[v] from start, rest and the tables; returns the largest load."""
    w = words_of(k)
    total = Int32(0)
    for p in cutlass.range_constexpr(k.ranks):
        here = own_load(k, m, Int32(p), lane, lanes)
        total += here
        if lane == 0:
            m[w.load + p] = here
    sync(lanes)
    poured = Int32(0)
    for expert in range(lane, k.experts, lanes):
        poured += m[w.rest + expert]
    if cutlass.const_expr(lanes > 1):
        poured = cute.arch.warp_reduction_sum(poured)
    target = Int32(ceil_div(total + poured, k.ranks))
    expert = next_rest(k, m, Int32(0), lane, lanes)
    while expert < k.experts:
        if lane == 0:
            fill_evenly(k, m, expert)
        expert = next_rest(k, m, expert + 1, lane, lanes)
    sync(lanes)
    # first only what was poured moves; what replicas began with gives way where that isn't enough
    go = poured > 0 and largest_load(k, m) > target
    while go:
        moved, _ = search(k, m, target, lane, lanes)
        go = moved and largest_load(k, m) > target
    for v in range(lane, k.experts * k.replicas, lanes):
        m[w.rows + v] = m[w.rows + v] + m[w.start + v]
    sync(lanes)
    go = largest_load(k, m) > target
    while go:
        moved, seen = search(k, m, target, lane, lanes)
        if not moved:
            # what is in the reached set is trapped in it
            inside, size = Int32(0), Int32(0)
            for p in cutlass.range_constexpr(k.ranks):
                if ((seen >> p) & 1) != 0:
                    inside += m[w.load + p]
                    size += 1
            target = Int32(ceil_div(inside, size))
        go = largest_load(k, m) > target
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
