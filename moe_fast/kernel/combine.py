"""Combine: y_s = sum over k, in k order, of weight[s, k] * result[s, k] (+ shared expert), in fp32, rounded once.

The results of a token lie in its home rank's buffer, one row per choice, so no atomics decide an order and two runs
give the same bits. A token is combined once its arrival counter says that all its rows are back, by whoever claims it
first: a spare warp that has no rows to push any more, while products still run, or at the end all consumer warps
(`final_combine`). Where there are no more tokens than those, each has its warps from the start. A token without a valid
route becomes zero. The shared expert's row comes last, with weight 1 or with the sigmoid of its gate, which is computed
here: it needs nothing but the token.

In the wire format "tokens" other ranks send partial sums instead of results: see `sums`.

The simulator and the protocol's checker (`moe_ref.runtime`) keep one counter for a tile of tokens and combine the tile
as one task; the kernel counts per token, for of 32 tokens one always waits for the last expert.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import nvvm

from moe_fast.kernel.constants import HOME_BITS, LINE_BYTES, MAX_TOP_K, TOKEN_TILE
from moe_fast.kernel.gemm import LOG2E
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import (
    Args,
    Phase,
    Role,
    aborted,
    back_word,
    combined_word,
    gmem,
    in_lines,
    landed_rows,
    note,
    read,
    side_counters,
    word,
)
from moe_fast.kernel.sums import combine_sums, landed_tiles, sum_ready
from moe_fast.kernel.tokens import lowest, wait_listed
from moe_ref.layout import return_row
from moe_ref.runtime.encoding import reached

PIECES = LINE_BYTES // 16
"""Pieces of 16 bytes in a line."""
STEP_BYTES = 512
"""What a warp takes of a row in one step: 16 bytes a lane."""
IN_FLIGHT = 16
"""Loads that a lane has in flight."""
TOKENS_PER_TURN = 4
"""Tokens that a warp takes at a time; divides TOKEN_TILE, and a warp has MAX_TOP_K lanes for each."""
FEW_CHOICES = 4
"""Choices of a token up to which a spare warp asks for those of all tokens that it takes at one time; for more it has
no registers."""
MOST_ASKED = 32 << 10
"""Bytes of rows that a consumer warp has brought into L2 ahead, at most: those of all warps must have room there."""


def results_at(k: KernelShape, a, side):
    """Address of this side's returned rows."""
    if k.fixed:
        return a.heap + a.rows_at + Int64(side) * a.rows * k.row_pitch
    return a.heap + a.returned_at + Int64(side) * a.max_tokens * k.top_k * (k.hidden * k.element_size)


def result_at_home(k: KernelShape, a, first, token, where, j: int, inside, further: int):
    """Address, `inside` + `further` bytes into a row of H, of the result of a token's choice number j; see
    `combine_vector`."""
    if k.put:
        within = Int32(inside) + further
        place, twist = where[j], where[j]
        block = Int64(0)
        if k.fixed:
            block = Int64(where[k.top_k + j]) * k.row_pitch
        else:
            place, twist = place & ((1 << HOME_BITS) - 1), twist >> HOME_BITS
        piece = (within // 16 ^ twist) % PIECES
        return first + block + in_lines(landed_rows(k, a), place, within // LINE_BYTES) + piece * 16
    if k.fixed:
        return first + Int64(where[j]) * k.row_pitch + inside + further
    return first + Int64(return_row(token, j, k.top_k)) * (k.hidden * k.element_size) + inside + further


@cute.jit
def combine_vector(
    k: cutlass.Constexpr[KernelShape],
    dtype: cutlass.Constexpr,
    a: Args,
    first: Int64,
    token: Int32,
    weight: cute.Tensor,
    valid: cute.Tensor,
    where: cute.Tensor,
    shared_weight: Float32,
    inside: Int64,
    count: cutlass.Constexpr,
):
    """One lane sums `count` times 16 bytes, 512 bytes apart, from `inside` bytes into the rows on.

    first: address of this side's returned rows. where: rows of each choice's result, in the fixed layout and with
    puts; with both within their blocks, and then the blocks' first rows. All loads are on their way before the first
    sum.
    """
    row_bytes, vector = k.hidden * k.element_size, 16 // k.element_size
    layout = cute.make_layout(vector)
    parts = [[cute.make_rmem_tensor(vector, dtype) for _ in range(k.top_k)] for _ in range(count)]
    for v in cutlass.range_constexpr(count):
        for j in cutlass.range_constexpr(k.top_k):
            row = result_at_home(k, a, first, token, where, j, inside, v * STEP_BYTES)
            cute.autovec_copy(cute.make_tensor(gmem(row, dtype, 16), layout), parts[v][j])
    shared = [cute.make_rmem_tensor(vector, dtype) for _ in range(count if k.shared_intermediate else 0)]
    for v in cutlass.range_constexpr(len(shared)):
        row = a.shared_rows + Int64(token) * row_bytes + inside + v * STEP_BYTES
        cute.autovec_copy(cute.make_tensor(gmem(row, dtype, 16), layout), shared[v])
    for v in cutlass.range_constexpr(count):
        total = cute.make_rmem_tensor(vector, Float32)
        total.fill(0.0)
        for j in cutlass.range_constexpr(k.top_k):
            # a masked route's row was never written: it may hold anything, NaN included
            if valid[j] >= 0:
                total.store(total.load() + parts[v][j].load().to(Float32) * weight[j])
        if cutlass.const_expr(k.shared_intermediate > 0):
            total.store(total.load() + shared[v].load().to(Float32) * shared_weight)
        out = cute.make_rmem_tensor(vector, dtype)
        out.store(total.load().to(dtype))
        place = a.y + Int64(token) * row_bytes + inside + v * STEP_BYTES
        cute.autovec_copy(out, cute.make_tensor(gmem(place, dtype, 16), layout))


@cute.jit
def gate_of_shared(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, token: Int32, lane: Int32
) -> Float32:
    """One warp: sigmoid(x w) of a token, the weight of the shared expert's row."""
    row_bytes, vector = k.hidden * k.element_size, 16 // k.element_size
    layout = cute.make_layout(vector)
    x = cute.make_rmem_tensor(vector, dtype)
    w = cute.make_rmem_tensor(vector, dtype)
    total = Float32(0.0)
    for inside in range(lane * 16, row_bytes, STEP_BYTES):
        cute.autovec_copy(cute.make_tensor(gmem(a.x + Int64(token) * row_bytes + inside, dtype, 16), layout), x)
        cute.autovec_copy(cute.make_tensor(gmem(a.shared_gate + Int64(inside), dtype, 16), layout), w)
        for i in cutlass.range_constexpr(vector):
            total += x[i].to(Float32) * w[i].to(Float32)
    total = cute.arch.warp_reduction_sum(total)
    return cute.arch.rcp_approx(Float32(1.0) + cute.arch.exp2(total * Float32(-LOG2E)))


@cute.jit
def choices_of(k: cutlass.Constexpr[KernelShape], a: Args, token: Int32, lane: Int32) -> tuple:
    """Of choice number lane % MAX_TOP_K of a lane's token: the expert, negative for none, its weight, and in the fixed
    layout and with puts where its result lies. So a warp asks for the choices of four tokens at one time."""
    expert, scale, place = Int32(-1), Float32(0.0), Int32(0)
    choice = lane % MAX_TOP_K
    if choice < k.top_k and token < a.tokens:
        route = return_row(token, choice, k.top_k)
        expert = read(a.expert, route)
        scale = read(a.weight, route, Float32)
        if cutlass.const_expr(k.fixed or k.by_place):
            # a masked route has no place; what is read in its stead isn't used
            if expert >= 0:
                place = read(a.where, route)
    return expert, scale, place


def steps_together(k: KernelShape) -> int:
    """Steps whose loads a lane has in flight together."""
    return max(1, IN_FLIGHT // (k.top_k + (1 if k.shared_intermediate else 0)))


def most_parts(k: KernelShape) -> int:
    """Among how many warps the columns of a token may be divided. In the wire format "tokens" it wasn't tried."""
    if k.by_token:
        return 1
    return max(1, k.hidden * k.element_size // STEP_BYTES // steps_together(k))


@cute.jit
def combine_token(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, side: Int32, token: Int32, choices: tuple,
    number: Int32, part: Int32, parts: Int32, lane: Int32,
):  # fmt: skip
    """One warp sums the K results of one token, number `number` of those that it has the choices of: all columns, or
    part `part` of `parts`, at most `most_parts`."""
    row_bytes, first = k.hidden * k.element_size, results_at(k, a, side)
    expert, scale, place = choices
    weight = cute.make_rmem_tensor(k.top_k, Float32)
    valid = cute.make_rmem_tensor(k.top_k, Int32)
    where = cute.make_rmem_tensor(k.top_k * (2 if k.put and k.fixed else 1), Int32)
    base = number * MAX_TOP_K
    for j in cutlass.range_constexpr(k.top_k):
        weight[j] = cute.arch.shuffle_sync(scale, base + j)
        valid[j] = cute.arch.shuffle_sync(expert, base + j)
        if cutlass.const_expr(k.fixed or k.by_place):
            where[j] = cute.arch.shuffle_sync(place, base + j)
            if cutlass.const_expr(k.put and k.fixed):
                where[k.top_k + j] = where[j] // a.slot_capacity * a.slot_capacity
                where[j] = where[j] - where[k.top_k + j]
    shared_weight = Float32(1.0)
    if cutlass.const_expr(k.shared_gate):
        shared_weight = gate_of_shared(k, dtype, a, token, lane)
    steps, width = k.hidden * k.element_size // STEP_BYTES, steps_together(k)
    for v in cutlass.range(part, steps // width, parts, unroll=1):
        combine_vector(
            k,
            dtype,
            a,
            first,
            token,
            weight,
            valid,
            where,
            shared_weight,
            Int64(v * (width * STEP_BYTES) + lane * 16),
            width,
        )
    if cutlass.const_expr(steps % width > 0):
        inside = steps // width * width * STEP_BYTES
        if part == 0:
            combine_vector(
                k, dtype, a, first, token, weight, valid, where, shared_weight, Int64(inside + lane * 16), steps % width
            )
    if cutlass.const_expr(row_bytes % STEP_BYTES > 0):
        tail = steps * STEP_BYTES + lane * 16
        if part == 0 and tail < row_bytes:
            combine_vector(k, dtype, a, first, token, weight, valid, where, shared_weight, Int64(tail), 1)


@cute.jit
def finish_token(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, side: Int32, token: Int32, choices: tuple,
    number: Int32, part: Int32, parts: Int32, lane: Int32,
):  # fmt: skip
    """One warp: y of a token, in either wire format. choices, number, part, parts: see `combine_token`; for "tokens" ()
    and all of it."""
    if cutlass.const_expr(k.by_token):
        shared_weight = Float32(1.0)
        if cutlass.const_expr(k.shared_gate):
            shared_weight = gate_of_shared(k, dtype, a, token, lane)
        combine_sums(k, dtype, a, side, token, shared_weight, lane)
    else:
        combine_token(k, dtype, a, side, token, choices, number, part, parts, lane)


def ask_for_rows(k: KernelShape, a: Args, side, token):
    """One thread: have the results of a token brought into L2, where they lie side by side: the older ones have left it
    long ago, and a warp has no registers to wait for those of several tokens at one time."""
    if k.by_token or k.put or k.fixed:
        return
    size = k.top_k * k.hidden * k.element_size
    place = a.heap + a.returned_at + (Int64(side) * a.max_tokens + token) * size
    nvvm.cp_async_bulk_prefetch(gmem(place, align=16).to_llvm_ptr(), Int32(size).ir_value())


@cute.jit
def claim(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, token_tile: Int32, bits: Int32, lane: Int32
) -> Int32:
    """Whole warp: those of the tokens (bits of a tile) that no warp has taken yet; from now on they are this warp's."""
    old = Int32(0)
    if lane == 0:
        place = word(side_counters(a, side), combined_word(k, a, token_tile))
        old = cute.arch.atomic_or(place, bits, sem="relaxed", scope="gpu")
    return bits & ~cute.arch.shuffle_sync(old, 0)


def are_few(a: Args, blocks):
    """Whether there are no more tokens than consumer warps."""
    return a.tokens <= blocks * 8


@cute.jit
def combine_early(
    k: cutlass.Constexpr[KernelShape],
    dtype: cutlass.Constexpr,
    a: Args,
    side: Int32,
    first: Int32,
    stride: Int32,
    over: cute.Pointer,
    block: Int32,
    blocks: Int32,
    lane: Int32,
):
    """A spare warp, while products run: the tokens of tiles first, first + stride, ... whose rows are all back. In the
    wire format "tokens" other ranks' tokens, too, whose results are all here: their sums go home. Few tokens are left
    to the consumers, one of whose warps waits for each anyway, or several.

    over: word of shared memory that is nonzero when this block has no more products.
    """
    counters = a.heap + a.back_at + Int64(back_word(k, a, side, 0)) * 4
    targets = a.back_target + Int64(side * a.max_tokens) * 4
    go = Boolean(first * TOKEN_TILE < a.tokens)
    if cutlass.const_expr(not k.by_token):
        go = go and not are_few(a, blocks)
    tile = first
    if cutlass.const_expr(k.by_token):
        landed = landed_tiles(k, a, side, TOKEN_TILE) * (k.ranks - 1)
        turn = first
        go = Boolean(first * TOKEN_TILE < a.tokens or first < landed)
        if not wait_listed(k, a, Role.COMBINE, lane):
            go = Boolean(False)
    while go:
        if cutlass.const_expr(k.by_token):
            if turn < landed:
                others = k.ranks - 1
                sum_ready(
                    k, dtype, a, side, (a.rank + 1 + turn % others) % k.ranks, turn // others, block, lane
                )  # fmt: skip
            turn += stride
            if turn >= landed:
                turn = first
        token = tile * TOKEN_TILE + lane
        back = Boolean(False)
        taken = read(side_counters(a, side), combined_word(k, a, tile), sem="relaxed", scope="gpu")
        if token < a.tokens:
            scope = "sys" if cutlass.const_expr(k.ranks > 1) else "gpu"
            # before the acquire, which what comes after it would wait for
            target = read(targets, token)
            seen = read(counters, token * k.signal_words, sem="relaxed" if k.put else "acquire", scope=scope)
            back = reached(seen, target)
        bits = cute.arch.vote_ballot_sync(back) & ~cute.arch.shuffle_sync(taken, 0)
        if bits != 0:
            if cutlass.const_expr(k.put):
                # only now, for it empties L1, from where rows are put
                if back:
                    # the value is used: a load that nobody needs the compiler drops, with what it acquires
                    seen = read(counters, token * k.signal_words, sem="acquire", scope="sys")
                    back = reached(seen, read(targets, token))
                bits = bits & cute.arch.vote_ballot_sync(back)
            start = Int64(0)
            if cutlass.const_expr(k.trace):
                start = Int64(cute.arch.globaltimer())
            # few at a time: what one warp has claimed, the consumers can't help with when the products are over
            others = bits
            for _ in cutlass.range_constexpr(TOKENS_PER_TURN):
                others = others & (others - 1)
            bits = claim(k, a, side, tile, bits ^ others, lane)
            if (bits >> lane) & 1 != 0:
                ask_for_rows(k, a, side, tile * TOKEN_TILE + lane)
            choices, number = (), Int32(0)
            if cutlass.const_expr(k.top_k <= FEW_CHOICES and not k.by_token):
                rest = bits
                for i in cutlass.range_constexpr(32 // MAX_TOP_K - 1):
                    if lane >= (i + 1) * MAX_TOP_K:
                        rest = rest & (rest - 1)
                choices = choices_of(k, a, tile * TOKEN_TILE + lowest(rest), lane)
            while bits != 0:
                token, own = tile * TOKEN_TILE + lowest(bits), choices
                if cutlass.const_expr(k.top_k > FEW_CHOICES and not k.by_token):
                    own = choices_of(k, a, token, lane)
                finish_token(k, dtype, a, side, token, own, number, Int32(0), Int32(1), lane)
                if cutlass.const_expr(k.top_k <= FEW_CHOICES):
                    number += 1
                bits = bits & (bits - 1)
            if cutlass.const_expr(k.trace):
                if lane == 0:
                    note(a, block, 2, start, Int64(Phase.COMBINE))
        tile += stride
        if tile * TOKEN_TILE >= a.tokens:
            tile = first
        # lanes may see the flags change at different times, and must leave together
        done = cute.arch.load(over, Int32, sem="relaxed", scope="cta", ss="cta") != 0
        go = not cute.arch.vote_any_sync(done or aborted(a))
