"""Partial sums of the wire format "tokens": a rank sums its results of a token, one row goes home; see `tokens`.

    partial[s, g] = sum over k in k order, expert[s, k] on rank g, of weight[s, k] * row[s, k]     fp32, rounded once
    y_s = sum over ranks g in rank order of partial[s, g] (+ shared expert)                        fp32, rounded once

The token's own rank keeps its partial in fp32. Results and partials are summed by one function: a warp per token, all
loads of a step on their way before the first sum.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from moe_fast.kernel.constants import TOKEN_TILE
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import (
    Args,
    Phase,
    Role,
    Wait,
    add,
    back_word,
    gmem,
    need_at,
    note,
    peer,
    place_at,
    read,
    side_counters,
    summed_word,
    taken_word,
    wait_reached,
    weight_at,
    word,
)
from moe_fast.kernel.tokens import lowest, wait_listed
from moe_ref.layout import ceil_div, return_row

IN_FLIGHT = 12
"""16-byte loads that a lane has in flight while it sums; with 16 the spare warps spill."""
STEP_BYTES = 512
"""What a warp takes of a row in one step: 16 bytes a lane."""
SUMS_PER_FENCE = 4
"""Tokens of another rank that a warp sums before it makes them visible there; divides TOKEN_TILE."""


@cute.jit
def sum_vector(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, place: cute.Tensor, weight: cute.Tensor,
    number: Int32, slots: cutlass.Constexpr, home: cutlass.Constexpr, partials: Int64, used: Int32, shared_row: Int64,
    shared_weight: Float32, out: Int64, inside: Int64, count: cutlass.Constexpr,
):  # fmt: skip
    """One lane sums `count` times 16 bytes, 512 bytes apart, from `inside` bytes into the rows on.

    place, weight: of the `number` results of this rank, in k order, at most `slots`. home: whether it is the token's
    own rank that sums, which adds the partials of the ranks whose bits are set in `used`, in rank order, and the shared
    expert's row. All loads are on their way before the first sum.
    """
    row_bytes, vector = k.hidden * k.element_size, 16 // k.element_size
    others = k.ranks - 1 if home else 0
    parts = [[cute.make_rmem_tensor(4, Int32) for _ in range(slots)] for _ in range(count)]
    remote = [[cute.make_rmem_tensor(4, Int32) for _ in range(others)] for _ in range(count)]
    shared = [cute.make_rmem_tensor(4, Int32) for _ in range(count if home and k.shared_intermediate else 0)]
    for v in cutlass.range_constexpr(count):
        here = inside + v * STEP_BYTES
        for j in cutlass.range_constexpr(slots):
            load_words(a.heap + a.results_at + Int64(place[j]) * row_bytes + here, parts[v][j])
        for i in cutlass.range_constexpr(others):
            load_words(partials + Int64(i) * a.max_tokens * row_bytes + here, remote[v][i])
    for v in cutlass.range_constexpr(len(shared)):
        load_words(shared_row + inside + v * STEP_BYTES, shared[v])
    for v in cutlass.range_constexpr(count):
        total = cute.make_rmem_tensor(vector, Float32)
        total.fill(0.0)
        for j in cutlass.range_constexpr(slots):
            total.store(total.load() + kept(dtype, parts[v][j], number > j) * weight[j])
        if cutlass.const_expr(home):
            own = total
            if cutlass.const_expr(k.ranks > 2):
                total = cute.make_rmem_tensor(vector, Float32)
                total.fill(0.0)
            for i in cutlass.range_constexpr(k.ranks):
                if cutlass.const_expr(k.ranks > 2):
                    # of two summands the order is no matter
                    here = cute.make_rmem_tensor(vector, Float32)
                    here.store(own.load())
                    total.store(total.load() + kept(Float32, cute.recast_tensor(here, Int32), a.rank == i))
                if cutlass.const_expr(i < others):
                    rank = Int32(i)
                    if a.rank <= i:
                        rank = Int32(i + 1)
                    total.store(total.load() + kept(dtype, remote[v][i], ((used >> rank) & 1) != 0))
            if cutlass.const_expr(k.shared_intermediate > 0):
                total.store(total.load() + kept(dtype, shared[v], Boolean(True)) * shared_weight)
        rounded = cute.make_rmem_tensor(vector, dtype)
        rounded.store(total.load().to(dtype))
        place_out = cute.make_tensor(gmem(out + inside + v * STEP_BYTES, dtype, 16), cute.make_layout(vector))
        cute.autovec_copy(rounded, place_out)


def load_words(address, words):
    """16 bytes into four words of registers."""
    cute.autovec_copy(cute.make_tensor(gmem(address, Int32, 16), cute.make_layout(4)), words)


def kept(dtype, words, used):
    """Words of registers as fp32 values, zeros where they aren't used. They may hold anything then, NaN included; and
    it is no branch, for loads behind branches would wait for each other."""
    mask = -Int32(used)
    count = cute.size(words)
    masked = cute.make_rmem_tensor(count, Int32)
    for i in range(count):
        masked[i] = words[i] & mask
    return cute.recast_tensor(masked, dtype).load().to(Float32)


@cute.jit
def sum_row(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, place_of_lane: Int32, weight_of_lane: Float32,
    slots: cutlass.Constexpr, home: cutlass.Constexpr, partials: Int64, used: Int32, shared_row: Int64,
    shared_weight: Float32, out: Int64, lane: Int32,
):  # fmt: skip
    """One warp sums a token's results of this rank and what else `sum_vector` says.

    place_of_lane, weight_of_lane: of choice number `lane`; -1 where this rank has no result of it. slots: at most so
    many results.
    """
    row_bytes = k.hidden * k.element_size
    rest = Int32(cute.arch.vote_ballot_sync(place_of_lane >= 0))
    number = Int32(cute.arch.popc(rest))
    place = cute.make_rmem_tensor(slots, Int32)
    weight = cute.make_rmem_tensor(slots, Float32)
    for j in cutlass.range_constexpr(slots):
        at = lowest(rest) & 31
        rest = rest & (rest - 1)
        # beyond the last result any row and no weight: what is read there isn't used
        place[j] = cute.arch.shuffle_sync(max(place_of_lane, Int32(0)), at)
        weight[j] = Float32(0.0)
        factor = cute.arch.shuffle_sync(weight_of_lane, at)
        if number > j:
            weight[j] = factor
    steps = row_bytes // STEP_BYTES
    extra = (k.ranks - 1 + (1 if k.shared_intermediate else 0)) if home else 0
    width = max(1, IN_FLIGHT // (slots + extra))
    for v in cutlass.range(steps // width, unroll=1):
        sum_vector(
            k, dtype, a, place, weight, number, slots, home, partials, used, shared_row, shared_weight, out,
            Int64(v * (width * STEP_BYTES) + lane * 16), width,
        )  # fmt: skip
    if cutlass.const_expr(steps % width > 0):
        at = steps // width * width * STEP_BYTES
        sum_vector(
            k, dtype, a, place, weight, number, slots, home, partials, used, shared_row, shared_weight, out,
            Int64(at + lane * 16), steps % width,
        )  # fmt: skip
    if cutlass.const_expr(row_bytes % STEP_BYTES > 0):
        tail = steps * STEP_BYTES + lane * 16
        if tail < row_bytes:
            sum_vector(
                k, dtype, a, place, weight, number, slots, home, partials, used, shared_row, shared_weight, out,
                Int64(tail), 1,
            )  # fmt: skip


@cute.jit
def send_sum(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, side: Int32, source: Int32, token: Int32,
    lane: Int32,
):  # fmt: skip
    """One warp: the partial sum of another rank's token, stored there. The caller makes it visible."""
    place, weight = Int32(-1), Float32(0.0)
    if lane < k.top_k:
        at = source * (a.max_tokens * k.top_k) + return_row(token, lane, k.top_k)
        place = read(a.heap + place_at(k, a), at)
        weight = read(a.heap + weight_at(k, a), at, Float32)
    number = a.rank
    if a.rank > source:
        number = a.rank - 1
    row = (Int64(side) * (k.ranks - 1) + number) * a.max_tokens + token
    out = peer(a, source) + a.returned_at + row * (k.hidden * k.element_size)
    nothing = Int64(0)
    half = (k.top_k + 1) // 2
    if cutlass.const_expr(k.top_k >= 4):
        if cute.arch.popc(cute.arch.vote_ballot_sync(place >= 0)) <= half:
            sum_row(k, dtype, a, place, weight, half, False, nothing, Int32(0), nothing, Float32(0.0), out, lane)
        else:
            sum_row(k, dtype, a, place, weight, k.top_k, False, nothing, Int32(0), nothing, Float32(0.0), out, lane)
    else:
        sum_row(k, dtype, a, place, weight, k.top_k, False, nothing, Int32(0), nothing, Float32(0.0), out, lane)


@cute.jit
def combine_sums(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, side: Int32, token: Int32,
    shared_weight: Float32, lane: Int32,
):  # fmt: skip
    """One warp: y of a token of this rank, from its results here and the partials of other ranks."""
    row_bytes = k.hidden * k.element_size
    where, weight = Int32(-1), Float32(0.0)
    if lane < k.top_k:
        where = read(a.where, return_row(token, lane, k.top_k))
        weight = read(a.weight, return_row(token, lane, k.top_k), Float32)
    used = Int32(0)
    for p in cutlass.range_constexpr(k.ranks):
        if cute.arch.vote_any_sync(where == -2 - p):
            used = used | (1 << p)
    partials = a.heap + a.returned_at + (Int64(side) * (k.ranks - 1) * a.max_tokens + token) * row_bytes
    shared_row = a.shared_rows + Int64(token) * row_bytes
    out = a.y + Int64(token) * row_bytes
    half = (k.top_k + 1) // 2
    if cutlass.const_expr(k.top_k >= 4):
        if cute.arch.popc(cute.arch.vote_ballot_sync(where >= 0)) <= half:
            sum_row(k, dtype, a, where, weight, half, True, partials, used, shared_row, shared_weight, out, lane)
        else:
            sum_row(k, dtype, a, where, weight, k.top_k, True, partials, used, shared_row, shared_weight, out, lane)
    else:
        sum_row(k, dtype, a, where, weight, k.top_k, True, partials, used, shared_row, shared_weight, out, lane)


@cute.jit
def signal_sums(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, source: Int32, first: Int32, bits: Int32, lane: Int32
):
    """A whole warp: what it stored at home of tokens first + i, bit i set, becomes visible and is counted there."""
    cute.arch.sync_warp()
    cute.arch.fence_acq_rel_sys()
    cute.arch.sync_warp()
    if (bits >> lane) & 1 != 0:
        add(peer(a, source) + a.back_at, back_word(k, a, side, first + lane), 1, "sys")


@cute.jit
def landed_tiles(k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, size: cutlass.Constexpr) -> Int32:
    """Groups of `size` tokens of the other rank that has most of them."""
    most = Int32(0)
    for p in cutlass.range_constexpr(k.ranks):
        if p != a.rank:
            most = max(most, tokens_of(k, a, side, p))
    return Int32(ceil_div(most, size))


def tokens_of(k, a, side, rank):
    """S of a rank, as it came with its counts."""
    return read(a.heap + a.counts_at, (side * k.ranks + rank) * Int32(k.counts_stride) + k.experts + 1)


@cute.jit
def claim_sums(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, source: Int32, tile: Int32, bits: Int32, lane: Int32
) -> Int32:
    """Whole warp: those of another rank's tokens (bits of a tile) that no warp has taken yet; now this one has."""
    old = Int32(0)
    if lane == 0:
        place = word(side_counters(a, side), taken_word(k, a, source, tile))
        old = cute.arch.atomic_or(place, bits, sem="relaxed", scope="gpu")
    return bits & ~cute.arch.shuffle_sync(old, 0)


@cute.jit
def sum_ready(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, side: Int32, source: Int32, tile: Int32,
    block: Int32, lane: Int32,
):  # fmt: skip
    """A spare warp: sums up to four tokens of a tile of another rank's tokens whose results are all here."""
    counters = side_counters(a, side)
    token = tile * TOKEN_TILE + lane
    ready = Boolean(False)
    if token < tokens_of(k, a, side, source):
        need = read(a.heap + need_at(k, a), source * a.max_tokens + token)
        done = read(counters, summed_word(k, a, source, token), sem="acquire", scope="gpu")
        ready = need > 0 and done == need
    taken = read(counters, taken_word(k, a, source, tile), sem="relaxed", scope="gpu")
    bits = Int32(cute.arch.vote_ballot_sync(ready)) & ~taken
    if bits != 0:
        start = Int64(0)
        if cutlass.const_expr(k.trace):
            start = Int64(cute.arch.globaltimer())
        rest = bits
        for _ in cutlass.range_constexpr(SUMS_PER_FENCE):
            rest = rest & (rest - 1)
        mine = claim_sums(k, a, side, source, tile, bits ^ rest, lane)
        left = mine
        while left != 0:
            send_sum(k, dtype, a, side, source, tile * TOKEN_TILE + lowest(left), lane)
            left = left & (left - 1)
        if mine != 0:
            signal_sums(k, a, side, source, tile * TOKEN_TILE, mine, lane)
        if cutlass.const_expr(k.trace):
            if lane == 0:
                note(a, block, 2, start, Int64(Phase.COMBINE))


@cute.jit
def sum_rest(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, side: Int32, warp: Int32, warps: Int32,
    lane: Int32,
):  # fmt: skip
    """Warp number `warp` of `warps` sums its share of the other ranks' tokens that nobody has summed yet."""
    counters = side_counters(a, side)
    go = wait_listed(k, a, Role.COMBINE, lane)
    others = k.ranks - 1
    turns = landed_tiles(k, a, side, SUMS_PER_FENCE) * others
    turn = warp
    while go and turn < turns:
        source = (a.rank + 1 + turn % others) % k.ranks
        first = turn // others * SUMS_PER_FENCE
        shift = first % TOKEN_TILE
        token = first + lane
        need = Int32(0)
        if lane < SUMS_PER_FENCE and token < tokens_of(k, a, side, source):
            need = read(a.heap + need_at(k, a), source * a.max_tokens + token)
        bits = Int32(cute.arch.vote_ballot_sync(need > 0))
        if bits != 0:
            bits = claim_sums(k, a, side, source, first // TOKEN_TILE, bits << shift, lane) >> shift
            bits = bits & ((1 << SUMS_PER_FENCE) - 1)
        if bits != 0:
            ok = Boolean(True)
            if (bits >> lane) & 1 != 0:
                ok = wait_reached(
                    counters, summed_word(k, a, source, token), need, a, Role.COMBINE, Wait.RESULTS, token, "gpu"
                )
            go = cute.arch.vote_all_sync(ok)
            if go:
                left = bits
                while left != 0:
                    send_sum(k, dtype, a, side, source, first + lowest(left), lane)
                    left = left & (left - 1)
                signal_sums(k, a, side, source, first, bits, lane)
        turn += warps
