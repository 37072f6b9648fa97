"""The gate, fused: logits by wgmma, scores, top-k, and the place of every route inside its token tile.

A token tile's logits [128 or 64, E <= 256] are one accumulator tile: a row lies in the registers of four neighbouring
threads, 64 columns each. They turn into scores in place; K times the best column wins and is struck out. Ties go to the
lower expert id. Scores and sums are fp32. A choice that is limited to groups of experts strikes out the other groups
first; a choice before the scores is one among the logits, of which only the K chosen become scores. Of a low token
tile (64) the first warpgroup computes all logits; where the choice takes long, it hands half of the rows to the second.

Then the routes of the tile are ranked per expert in (token, choice) order: that rank, plus the routes of earlier tiles,
is a route's place among all of this rank's routes to the expert. No atomics decide it, so it's the same in every run
and the same as the reference's.

Routing may be handed in instead: ids outside [-1, E) are treated as masked and raise the status bit.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from moe_fast.kernel.constants import LINE_BYTES, MAX_TOP_K, TILE_ROWS, Counter, PlanWord, Status
from moe_fast.kernel.scans import CONSUMERS, sync_consumers
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import Args, add, gmem, read, side_counters, word, write

LOG2E = 1.4426950408889634
NEGATIVE = -3.0e38
"""Below every score: a struck-out or absent expert."""
SHORT = 4
"""Columns in eights up to which the choice is short: not worth a barrier, and its code may be there twice."""
TINY = 1e-20
"""Guards the renormalisation of a token whose scores are all zero."""

# shared-memory scratch of a token tile, in 4-byte words
SCRATCH_WORDS = 2 * TILE_ROWS * LINE_BYTES // 4
"""All epilogue buffers; in float32 layers the gate's product has the lower half first."""
IDS = 0
WEIGHTS = IDS + TILE_ROWS * MAX_TOP_K
RANKS = WEIGHTS + TILE_ROWS * MAX_TOP_K
COUNTS = RANKS + TILE_ROWS * MAX_TOP_K
"""[8 warps][E]"""
SELECTION_BIAS = SCRATCH_WORDS - 2 * 256
ROUTER_BIAS = SELECTION_BIAS + 256
"""[E] each, fp32"""
HANDED = RANKS
"""[columns in eights][128 threads][2], logits that change hands, fp32: where ranks and counts come only later"""
AT_ONCE = (SELECTION_BIAS - HANDED) // 256
"""Columns in eights that there is room for."""


@cute.jit
def quad_max(value: Float32) -> Float32:
    """Largest value of the four threads that share a row."""
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, 1))
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, 2))


@cute.jit
def quad_sum(value: Float32) -> Float32:
    """Sum over the four threads that share a row."""
    value = value + cute.arch.shuffle_sync_bfly(value, 1)
    return value + cute.arch.shuffle_sync_bfly(value, 2)


def exp(value):
    """e^x through the hardware's 2^x."""
    return cute.arch.exp2(value * LOG2E)


def sigmoid(value):
    """1 / (1 + e^-x)."""
    return cute.arch.rcp_approx(Float32(1.0) + exp(-value))


@cute.jit
def stage_biases(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, scratch: cute.Pointer, thread: Int32
):
    """Once per block: the biases of the gate to shared memory, where every thread looks each of them up many times."""
    if cutlass.const_expr(k.selection_bias):
        if thread < k.experts:
            cute.arch.store(scratch + SELECTION_BIAS + thread, read(a.bias, thread))
    if cutlass.const_expr(k.router_bias):
        if thread < k.experts:
            place = gmem(a.router_bias + Int64(thread) * (dtype.width // 8), dtype)
            value = cute.make_tensor(place, cute.make_layout(1))[0].to(Float32)
            cute.arch.store(scratch + ROUTER_BIAS + thread, value.bitcast(Int32))
    if cutlass.const_expr(k.selection_bias or k.router_bias):
        sync_consumers()


def staged(scratch: cute.Pointer, place, column):
    """A staged bias of a column; beyond the last expert it is any number."""
    return cute.arch.load(scratch + place + column, Int32).bitcast(Float32)


@cute.jit
def scores_in_place(
    k: cutlass.Constexpr[KernelShape],
    scratch: cute.Pointer,
    logit: cute.Tensor,
    quad: Int32,
) -> Int32:
    """Turn a row's logits into what the choice is made among, scores as a rule; returns nonzero if a logit isn't
    finite. logit: this thread's two of every eight columns."""
    groups = (k.experts + 7) // 8
    # zero as long as all are finite; the compiler mustn't know that numbers are (no fast-math here)
    nought = Float32(0.0)
    top = Float32(NEGATIVE)
    for g in cutlass.range_constexpr(groups):
        if cutlass.const_expr(k.router_bias):
            for i in cutlass.range_constexpr(2):
                v = g * 2 + i
                logit[v] = logit[v] + staged(scratch, ROUTER_BIAS, g * 8 + quad * 2 + i)
        for i in cutlass.range_constexpr(2):
            v = g * 2 + i
            if cutlass.const_expr(g * 8 + 8 > k.experts):
                if g * 8 + quad * 2 + i >= k.experts:
                    logit[v] = Float32(NEGATIVE)
            nought = nought + logit[v] * Float32(0.0)
            top = cute.arch.fmax(top, logit[v])
    if cutlass.const_expr(k.top_k_order == "before_scores"):
        pass
    elif cutlass.const_expr(k.scoring == "softmax"):
        top = quad_max(top)
        total = Float32(0.0)
        for g in cutlass.range_constexpr(groups):
            for i in cutlass.range_constexpr(2):
                v = g * 2 + i
                logit[v] = exp(logit[v] - top)
                total += logit[v]
        # one division a row, then products: 64 divisions would each bring their slow path into the kernel
        inverse = Float32(1.0) / quad_sum(total)
        for g in cutlass.range_constexpr(groups):
            for i in cutlass.range_constexpr(2):
                v = g * 2 + i
                logit[v] = logit[v] * inverse
    else:
        for g in cutlass.range_constexpr(groups):
            for i in cutlass.range_constexpr(2):
                v = g * 2 + i
                logit[v] = sigmoid(logit[v])
    bad = Int32(0)
    if not nought == Float32(0.0):
        bad = Int32(1)
    if cutlass.const_expr(k.experts % 8 != 0):
        for i in cutlass.range_constexpr(2):
            v = (groups - 1) * 2 + i
            if (groups - 1) * 8 + quad * 2 + i >= k.experts:
                logit[v] = Float32(NEGATIVE)
    return bad


@cute.jit
def best_groups(k: cutlass.Constexpr[KernelShape], group: cute.Tensor) -> Int32:
    """Bits of the top_groups best of num_groups scores, ties to the lower group; overwrites the scores."""
    kept = Int32(0)
    for _ in cutlass.range(k.top_groups, unroll=1):
        best = Float32(float("-inf"))
        chosen = Int32(0)
        for q in cutlass.range_constexpr(k.num_groups):
            if group[q] > best:
                best = group[q]
                chosen = Int32(q)
        kept = kept | (Int32(1) << chosen)
        for q in cutlass.range_constexpr(k.num_groups):
            if chosen == q:
                group[q] = Float32(float("-inf"))
    return kept


@cute.jit
def keep_best_groups(k: cutlass.Constexpr[KernelShape], scratch: cute.Pointer, score: cute.Tensor, quad: Int32):
    """Strike out a row's experts outside its best groups.

    A group's score is the best, or the sum of the best two, of what its experts are chosen by. Groups are runs of
    E / G columns, so a block of eight columns may belong to several.
    """
    size = k.experts // k.num_groups
    group = cute.make_rmem_tensor(k.num_groups, Float32)
    for q in cutlass.range_constexpr(k.num_groups):
        low, high = q * size, (q + 1) * size
        first = Float32(NEGATIVE)
        second = Float32(NEGATIVE)
        for g in cutlass.range_constexpr(low // 8, (high + 7) // 8):
            for i in cutlass.range_constexpr(2):
                column = g * 8 + quad * 2 + i
                key = score[g * 2 + i]
                if cutlass.const_expr(k.selection_bias):
                    key = key + staged(scratch, SELECTION_BIAS, column)
                if cutlass.const_expr(g * 8 < low or g * 8 + 8 > high):
                    if column < low or column >= high:
                        key = Float32(NEGATIVE)
                second = cute.arch.fmax(second, cute.arch.fmin(first, key))
                first = cute.arch.fmax(first, key)
        for d in cutlass.range_constexpr(2):
            other_first = cute.arch.shuffle_sync_bfly(first, 1 << d)
            other_second = cute.arch.shuffle_sync_bfly(second, 1 << d)
            second = cute.arch.fmax(cute.arch.fmin(first, other_first), cute.arch.fmax(second, other_second))
            first = cute.arch.fmax(first, other_first)
        group[q] = first
        if cutlass.const_expr(k.group_score == "top2_sum"):
            group[q] = first + second
    kept = best_groups(k, group)
    for q in cutlass.range_constexpr(k.num_groups):
        low, high = q * size, (q + 1) * size
        if (kept >> q) & 1 == 0:
            for g in cutlass.range_constexpr(low // 8, (high + 7) // 8):
                for i in cutlass.range_constexpr(2):
                    column = g * 8 + quad * 2 + i
                    if column >= low and column < high:
                        score[g * 2 + i] = Float32(NEGATIVE)


@cute.jit
def score_chosen(k: cutlass.Constexpr[KernelShape], chosen: cute.Pointer) -> Float32:
    """One thread: turn the K chosen logits of a token (shared memory) into scores; returns their sum."""
    top = Float32(NEGATIVE)
    for j in cutlass.range_constexpr(k.top_k):
        top = cute.arch.fmax(top, cute.arch.load(chosen + j, Int32).bitcast(Float32))
    total = Float32(0.0)
    for j in cutlass.range_constexpr(k.top_k):
        score = cute.arch.load(chosen + j, Int32).bitcast(Float32)
        if cutlass.const_expr(k.scoring == "softmax"):
            score = exp(score - top)
        else:
            score = sigmoid(score)
        total += score
        cute.arch.store(chosen + j, score.bitcast(Int32))
    if cutlass.const_expr(k.scoring == "softmax"):
        for j in cutlass.range_constexpr(k.top_k):
            score = cute.arch.load(chosen + j, Int32).bitcast(Float32)
            cute.arch.store(chosen + j, (score / total).bitcast(Int32))
        total = Float32(1.0)
    return total


@cute.jit
def best_column(
    k: cutlass.Constexpr[KernelShape], scratch: cute.Pointer, score: cute.Tensor, quad: Int32
) -> tuple[Int32, Float32]:
    """The best column of a row that isn't struck out yet, and its score; strikes it out."""
    groups = (k.experts + 7) // 8
    best = Float32(NEGATIVE)
    weight = Float32(0.0)
    column = Int32(1 << 20)
    for g in cutlass.range_constexpr(groups):
        for i in cutlass.range_constexpr(2):
            here = score[g * 2 + i]
            key = here
            if cutlass.const_expr(k.selection_bias):
                if here > Float32(NEGATIVE):
                    key = here + staged(scratch, SELECTION_BIAS, g * 8 + quad * 2 + i)
            if key > best:
                best = key
                if cutlass.const_expr(k.selection_bias):
                    weight = here
                column = g * 8 + quad * 2 + i
    for d in cutlass.range_constexpr(2):
        other_best = cute.arch.shuffle_sync_bfly(best, 1 << d)
        other_column = cute.arch.shuffle_sync_bfly(column, 1 << d)
        other_weight = Float32(0.0)
        if cutlass.const_expr(k.selection_bias):
            other_weight = cute.arch.shuffle_sync_bfly(weight, 1 << d)
        if other_best > best or (other_best == best and other_column < column):
            best = other_best
            weight = other_weight
            column = other_column
    if cutlass.const_expr(not k.selection_bias):
        # the score itself, which isn't carried along twice
        if best > Float32(NEGATIVE):
            weight = best
    for g in cutlass.range_constexpr(groups):
        for i in cutlass.range_constexpr(2):
            if g * 8 + quad * 2 + i == column:
                score[g * 2 + i] = Float32(NEGATIVE)
    return column, weight


def rows_of(logits: cute.Tensor, groups: int, first: int = 0) -> tuple[cute.Tensor, cute.Tensor]:
    """A thread's two rows of logits, each [2, groups], from group `first` of eight columns on: its own row and the one
    eight below, as wgmma leaves them."""
    layout = cute.make_layout((2, groups), stride=(1, 4))
    own, below = (cute.make_tensor(logits.iterator + (first * 4 + half * 2), layout) for half in range(2))
    return own, below


@cute.jit
def hand_over(groups: cutlass.Constexpr, logits: cute.Tensor, scratch: cute.Pointer, thread: Int32):
    """The lower rows of the first warpgroup's threads become the own rows of the second's, place by place. All
    consumers.

    Through the scratch, not the operand ring: that belongs to TMA and wgmma, whose accesses other fences order.
    """
    place = (scratch + HANDED + thread % 128 * 2).toint()
    place = cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=8)
    for first in cutlass.range_constexpr(0, groups, AT_ONCE):
        count = min(AT_ONCE, groups - first)
        own, below = rows_of(logits, count, first)
        handed = cute.make_tensor(place, cute.make_layout((2, count), stride=(1, 256)))
        if cutlass.const_expr(first > 0):
            # what lies there has been read
            sync_consumers()
        if thread < 128:
            cute.autovec_copy(below, handed)
        sync_consumers()
        if thread >= 128:
            cute.autovec_copy(handed, own)


def rehearses(k: KernelShape) -> bool:
    """Whether of a low token tile the second warpgroup leaves the product to the first, and rehearses the choice unless
    that is short. Written for 16-bit layers and up to 128 experts: beyond, no registers are left for the loop."""
    return k.element_size == 2 and k.experts <= 128


@cute.jit
def choose(
    k: cutlass.Constexpr[KernelShape],
    a: Args,
    logits: cute.Tensor,
    begin: Int32,
    height: Int32,
    scratch: cute.Pointer,
    thread: Int32,
):
    """Epilogue of the gate's product, by all consumers: scores and top-k of a token tile; ids and weights to memory.

    begin, height: first token of the tile, and how many. logits: this thread's two of every eight columns, see
    `rows_of`; of a low tile those of the first warpgroup count. Where it `rehearses`, the second comes to a low tile
    before the first has them, and until then chooses among its own, which are finite: then the code is there.
    """
    groups = (k.experts + 7) // 8
    number = (thread >> 5) * 16 + (thread % 32 >> 2)
    low = height < TILE_ROWS
    if cutlass.const_expr(groups > SHORT):
        # By the same code, one row after the other, or of a low tile both at once, each by one warpgroup: the code runs
        # once a call, so it is fetched from memory, and where it is long that takes longer than what it does.
        first, turns = Int32(0), Int32(2)
        if low:
            if cutlass.const_expr(rehearses(k)):
                # what it writes, of rows that are this warpgroup's, it writes again
                first = 0 - (thread >> 7)
            # the second warpgroup's threads: from 64 rows below the first one's to eight
            number = number - (thread >> 7) * (TILE_ROWS // 2 - 8)
            turns = Int32(1)
        own, below = rows_of(logits, groups)
        for turn in cutlass.range(first, turns, unroll=1):
            if low and turn == 0:
                hand_over(groups, logits, scratch, thread)
            choose_row(k, a, own, begin, number, scratch, thread % 4)
            if turn >= 0:
                number += 8
            for v in cutlass.range_constexpr(2 * groups):
                own[v] = below[v]
    else:
        if thread < 128 or not low:
            for row in rows_of(logits, groups):
                choose_row(k, a, row, begin, number, scratch, thread % 4)
                number += 8


@cute.jit
def choose_row(
    k: cutlass.Constexpr[KernelShape], a: Args, row: cute.Tensor, begin: Int32, number: Int32, scratch: cute.Pointer,
    quad: Int32,
):  # fmt: skip
    """`choose` for row `number` of the token tile; row: its logits, see `scores_in_place`."""
    there = begin + number < a.tokens
    bad = scores_in_place(k, scratch, row, quad)
    if bad != 0 and there:
        cute.arch.atomic_or(word(a.plan, PlanWord.STATUS), Int32(Status.NONFINITE), sem="relaxed", scope="gpu")
    if cutlass.const_expr(k.num_groups > 1):
        keep_best_groups(k, scratch, row, quad)
    total = Float32(0.0)
    first = number * k.top_k
    for j in cutlass.range(k.top_k, unroll=1):
        column, weight = best_column(k, scratch, row, quad)
        total = total + weight
        if quad == 0:
            # a row of NaNs has no best column
            if column >= k.experts or not there:
                column = Int32(-1)
            cute.arch.store(scratch + IDS + first + j, column)
            cute.arch.store(scratch + WEIGHTS + first + j, weight.bitcast(Int32))
    if quad == 0:
        if cutlass.const_expr(k.top_k_order == "before_scores"):
            total = score_chosen(k, scratch + WEIGHTS + first)
        factor = Float32(k.routed_scaling)
        if cutlass.const_expr(k.renormalize):
            factor = factor / cute.arch.fmax(total, Float32(TINY))
        for j in cutlass.range_constexpr(k.top_k):
            weight = cute.arch.load(scratch + WEIGHTS + first + j, Int32).bitcast(Float32)
            if there:
                route = begin * k.top_k + first + j
                write(a.expert, route, cute.arch.load(scratch + IDS + first + j, Int32))
                write(a.weight, route, weight * factor, Float32)


@cute.jit
def take_given(
    k: cutlass.Constexpr[KernelShape], a: Args, tile: Int32, height: Int32, scratch: cute.Pointer, thread: Int32
):
    """Routing that was handed in: copy one token tile of it, `height` tokens, masking what isn't an expert."""
    first = tile * (height * k.top_k)
    for r in range(thread, height * k.top_k, CONSUMERS):
        expert = Int32(-1)
        if first + r < a.tokens * k.top_k:
            id_ = read(a.given_expert, first + r, Int64)
            if id_ >= 0 and id_ < k.experts:
                expert = Int32(id_)
            elif id_ != -1:
                cute.arch.atomic_or(word(a.plan, PlanWord.STATUS), Int32(Status.BAD_EXPERT), sem="relaxed", scope="gpu")
            write(a.expert, first + r, expert)
            write(a.weight, first + r, read(a.given_weight, first + r, Float32), Float32)
        cute.arch.store(scratch + IDS + r, expert)


@cute.jit
def rank_routes(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, tile: Int32, height: Int32, scratch: cute.Pointer,
    thread: Int32,
):  # fmt: skip
    """Histogram of a token tile of `height` tokens, and for each of its routes how many routes before it in the tile
    have its expert."""
    lane, warp = thread % 32, thread >> 5
    sync_consumers()
    for w in cutlass.range_constexpr(8):
        if thread < k.experts:
            cute.arch.store(scratch + COUNTS + w * 256 + thread, Int32(0))
    sync_consumers()
    # a warp has an eighth of the tile
    per_warp = height // 8 * k.top_k
    counts = scratch + COUNTS + warp * 256
    for first in cutlass.range(0, per_warp, 32, unroll=1):
        expert = Int32(-1)
        if first + lane < per_warp:
            expert = cute.arch.load(scratch + IDS + warp * per_warp + first + lane, Int32)
        same = Int32(cute.arch.match_sync(-1, expert))
        earlier = cute.arch.popc(same & ((Int32(1) << lane) - 1))
        before = Int32(0)
        if expert >= 0:
            before = cute.arch.load(counts + expert, Int32)
        cute.arch.sync_warp()
        if expert >= 0:
            if earlier == 0:
                cute.arch.store(counts + expert, before + cute.arch.popc(same))
            cute.arch.store(scratch + RANKS + warp * per_warp + first + lane, before + earlier)
        cute.arch.sync_warp()
    sync_consumers()
    if thread < k.experts:
        total = Int32(0)
        for w in cutlass.range_constexpr(8):
            part = cute.arch.load(scratch + COUNTS + w * 256 + thread, Int32)
            cute.arch.store(scratch + COUNTS + w * 256 + thread, total)
            total += part
        write(a.histogram, tile * k.experts + thread, total)
    sync_consumers()
    for first in cutlass.range_constexpr(0, TILE_ROWS // 8 * k.top_k, 32):
        if first + lane < per_warp:
            r = warp * per_warp + first + lane
            expert = cute.arch.load(scratch + IDS + r, Int32)
            if expert >= 0:
                base = cute.arch.load(counts + expert, Int32)
                rank = cute.arch.load(scratch + RANKS + r, Int32)
                write(a.index, tile * (height * k.top_k) + r, base + rank)
    # the release below covers what all threads wrote before this barrier
    sync_consumers()
    if thread == 0:
        add(side_counters(a, side), Counter.ROUTED, 1, "gpu", "release")
