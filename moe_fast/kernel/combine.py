"""Combine: y_s = sum over k, in k order, of weight[s, k] * result[s, k] (+ shared expert), in fp32, rounded once.

The results of a token lie in its home rank's buffer, one row per choice, so no atomics decide an order and two runs
give the same bits. A warp takes a token once the arrival counter of its token tile says that all rows are back. A token
without a valid route becomes zero. The shared expert's row comes last, with weight 1 or with the sigmoid of its gate,
which is computed here: it needs nothing but the token.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from moe_fast.kernel.gemm import LOG2E
from moe_fast.kernel.shapes import TOKEN_TILE, KernelShape
from moe_fast.kernel.signals import Args, Role, Wait, gmem, read, wait_reached
from moe_ref.layout import return_row
from moe_ref.runtime.encoding import combine_tasks

VECTOR = 8
"""Elements of 16 bytes."""
STEP_BYTES = 512
"""What a warp takes of a row in one step: 16 bytes a lane."""
IN_FLIGHT = 8
"""Loads that a lane has in flight."""
TOKENS_PER_TURN = 4
"""Tokens that a warp takes at a time; divides TOKEN_TILE."""


@cute.jit
def combine_vector(
    k: cutlass.Constexpr[KernelShape],
    dtype: cutlass.Constexpr,
    a: Args,
    first: Int64,
    token: Int32,
    weight: cute.Tensor,
    valid: cute.Tensor,
    shared_weight: Float32,
    inside: Int64,
    count: cutlass.Constexpr,
):
    """One lane sums `count` times 8 elements, 512 bytes apart, from `inside` bytes into the rows on.

    first: address of this side's returned rows. All loads are on their way before the first sum.
    """
    row_bytes = k.hidden * k.element_size
    layout = cute.make_layout(VECTOR)
    parts = [[cute.make_rmem_tensor(VECTOR, dtype) for _ in range(k.top_k)] for _ in range(count)]
    for v in cutlass.range_constexpr(count):
        for j in cutlass.range_constexpr(k.top_k):
            row = first + Int64(return_row(token, j, k.top_k)) * row_bytes + inside + v * STEP_BYTES
            cute.autovec_copy(cute.make_tensor(gmem(row, dtype, 16), layout), parts[v][j])
    shared = [cute.make_rmem_tensor(VECTOR, dtype) for _ in range(count if k.shared_intermediate else 0)]
    for v in cutlass.range_constexpr(len(shared)):
        row = a.shared_rows + Int64(token) * row_bytes + inside + v * STEP_BYTES
        cute.autovec_copy(cute.make_tensor(gmem(row, dtype, 16), layout), shared[v])
    for v in cutlass.range_constexpr(count):
        total = cute.make_rmem_tensor(VECTOR, Float32)
        total.fill(0.0)
        for j in cutlass.range_constexpr(k.top_k):
            # a masked route's row was never written: it may hold anything, NaN included
            if valid[j] >= 0:
                total.store(total.load() + parts[v][j].load().to(Float32) * weight[j])
        if cutlass.const_expr(k.shared_intermediate > 0):
            total.store(total.load() + shared[v].load().to(Float32) * shared_weight)
        out = cute.make_rmem_tensor(VECTOR, dtype)
        out.store(total.load().to(dtype))
        place = a.y + Int64(token) * row_bytes + inside + v * STEP_BYTES
        cute.autovec_copy(out, cute.make_tensor(gmem(place, dtype, 16), layout))


@cute.jit
def gate_of_shared(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, token: Int32, lane: Int32
) -> Float32:
    """One warp: sigmoid(x w) of a token, the weight of the shared expert's row."""
    row_bytes = k.hidden * k.element_size
    layout = cute.make_layout(VECTOR)
    x = cute.make_rmem_tensor(VECTOR, dtype)
    w = cute.make_rmem_tensor(VECTOR, dtype)
    total = Float32(0.0)
    for inside in range(lane * 16, row_bytes, STEP_BYTES):
        cute.autovec_copy(cute.make_tensor(gmem(a.x + Int64(token) * row_bytes + inside, dtype, 16), layout), x)
        cute.autovec_copy(cute.make_tensor(gmem(a.shared_gate + Int64(inside), dtype, 16), layout), w)
        for i in cutlass.range_constexpr(VECTOR):
            total += x[i].to(Float32) * w[i].to(Float32)
    total = cute.arch.warp_reduction_sum(total)
    return cute.arch.rcp_approx(Float32(1.0) + cute.arch.exp2(total * Float32(-LOG2E)))


@cute.jit
def combine_token(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, side: Int32, token: Int32, lane: Int32
):
    """One warp sums the K results of one token."""
    row_bytes = k.hidden * k.element_size
    first = a.heap + a.returned_at + Int64(side) * a.max_tokens * k.top_k * row_bytes
    expert = Int32(-1)
    scale = Float32(0.0)
    if lane < k.top_k:
        expert = read(a.expert, return_row(token, lane, k.top_k))
        scale = read(a.weight, return_row(token, lane, k.top_k), Float32)
    weight = cute.make_rmem_tensor(k.top_k, Float32)
    valid = cute.make_rmem_tensor(k.top_k, Int32)
    for j in cutlass.range_constexpr(k.top_k):
        weight[j] = cute.arch.shuffle_sync(scale, j)
        valid[j] = cute.arch.shuffle_sync(expert, j)
    shared_weight = Float32(1.0)
    if cutlass.const_expr(k.shared_gate):
        shared_weight = gate_of_shared(k, dtype, a, token, lane)
    steps = k.hidden * k.element_size // STEP_BYTES
    width = max(1, IN_FLIGHT // (k.top_k + (1 if k.shared_intermediate else 0)))
    for v in cutlass.range(steps // width, unroll=1):
        combine_vector(
            k, dtype, a, first, token, weight, valid, shared_weight, Int64(v * (width * STEP_BYTES) + lane * 16), width
        )
    if cutlass.const_expr(steps % width > 0):
        inside = steps // width * width * STEP_BYTES
        combine_vector(
            k, dtype, a, first, token, weight, valid, shared_weight, Int64(inside + lane * 16), steps % width
        )
    if cutlass.const_expr(k.hidden % (32 * VECTOR) > 0):
        tail = steps * STEP_BYTES + lane * 16
        if tail < row_bytes:
            combine_vector(k, dtype, a, first, token, weight, valid, shared_weight, Int64(tail), 1)


@cute.jit
def combine(
    k: cutlass.Constexpr[KernelShape],
    dtype: cutlass.Constexpr,
    a: Args,
    side: Int32,
    warp: Int32,
    warps: Int32,
    lane: Int32,
):
    """Warp number `warp` of `warps` combines its share of this rank's tokens."""
    counters = a.heap + a.back_at + Int64(side * a.token_tiles) * 4
    targets = a.back_target + Int64(side * a.token_tiles) * 4
    turn = warp
    go = Boolean(True)
    while go and turn < combine_tasks(a.tokens, TOKENS_PER_TURN):
        token = turn * TOKENS_PER_TURN
        part = token // TOKEN_TILE
        scope = "sys" if cutlass.const_expr(k.ranks > 1) else "gpu"
        go = wait_reached(counters, part, read(targets, part), a, Role.COMBINE, Wait.BACK, part, scope)
        if go:
            for i in range(min(Int32(TOKENS_PER_TURN), a.tokens - token)):
                combine_token(k, dtype, a, side, token + i, lane)
        turn += warps
