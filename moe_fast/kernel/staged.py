"""Sums of tokens whose rows come through shared memory, for the consumer warps when products are over.

The pipeline stages are free then, and have room for several tokens of each warp: more of them are on their way than
registers could hold, and one copy of the code does for all. It runs once a call, and long code takes longer to fetch
than to run.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from moe_fast.kernel.combine import STEP_BYTES, TOKENS_PER_TURN, gate_of_shared, result_at_home, results_at
from moe_fast.kernel.constants import MAX_TOP_K
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import Args, gmem
from moe_fast.kernel.tokens import lowest
from moe_ref.layout import ceil_div

STAGED_AT = 4 << 10
"""Where they begin in the stages, in bytes: behind the lists of `final_combine`."""
STAGED = 40
"""STEP_BYTES of rows that each of the warps has room for there, in two halves: one is summed, one is on its way."""


def stage_of(dtype, lists, warp, lane):
    """This lane's 16 bytes in each STEP_BYTES of a warp's room for rows."""
    place = lists.toint() + STAGED_AT + warp * (STAGED * STEP_BYTES) + lane * 16
    return cute.make_ptr(dtype, place, cute.AddressSpace.smem, assumed_align=16)


@cute.jit
def combine_staged(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, side: Int32, counted: Int32, choices: tuple,
    done: Int32, stage: cute.Pointer, lane: Int32,
):  # fmt: skip
    """One warp sums those of its tokens that are back (bits of `done`), 512 bytes of columns at a time.

    counted: token number i in lane i. choices: of four tokens, see `choices_of`. A lane reads what it has copied
    itself.
    """
    expert, weight, place = choices
    if expert < 0:
        # a masked route's row was never written: it may hold anything, NaN included
        weight = Float32(0.0)
    # lane i: number of the i-th token among those of the turn
    rest = done
    for _ in cutlass.range(lane % TOKENS_PER_TURN, unroll=1):
        rest = rest & (rest - 1)
    number = lowest(rest)
    rows = k.top_k + (1 if k.shared_intermediate else 0)
    units = STAGED // 2 // rows
    half = units * rows * (STEP_BYTES // k.element_size)
    steps = ceil_div(k.hidden * k.element_size, STEP_BYTES)
    total = Int32(cute.arch.popc(done)) * steps
    ask_for_units(k, dtype, a, side, counted, place, number, stage, Int32(0), min(total, units), lane)
    turn, shared_weight = Int32(0), Float32(1.0)
    for first in cutlass.range(0, total, units, unroll=1):
        ahead = first + units
        there = stage + (1 - turn) * half
        ask_for_units(k, dtype, a, side, counted, place, number, there, ahead, min(total - ahead, units), lane)
        # all but what was asked for last
        cute.arch.cp_async_wait_group(1)
        here = stage + turn * half
        count = min(total - first, units)
        shared_weight = sum_units(
            k, dtype, a, counted, ~(expert >> 31), weight, number, shared_weight, here, first, count, lane
        )  # fmt: skip
        turn = 1 - turn


@cute.jit
def ask_for_units(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, side: Int32, counted: Int32, place: Int32,
    number: Int32, stage: cute.Pointer, first: Int32, count: Int32, lane: Int32,
):  # fmt: skip
    """One warp: have `count` units of its tokens from unit `first` on copied to `stage`, none if count is negative. A
    unit is a step of all of a token's rows."""
    row_bytes, vector = k.hidden * k.element_size, 16 // k.element_size
    steps, rows = ceil_div(row_bytes, STEP_BYTES), k.top_k + (1 if k.shared_intermediate else 0)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cute.nvgpu.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128)
    results, layout = results_at(k, a, side), cute.make_layout(vector)
    for u in cutlass.range(count, unroll=1):
        unit = first + u
        i = cute.arch.shuffle_sync(number, unit // steps)
        token = cute.arch.shuffle_sync(counted, i)
        inside = Int64(unit % steps * STEP_BYTES + lane * 16)
        where = [Int32(0)] * (2 * k.top_k)
        if cutlass.const_expr(k.fixed or k.by_place):
            for j in cutlass.range_constexpr(k.top_k):
                where[j] = cute.arch.shuffle_sync(place, i * MAX_TOP_K + j)
                if cutlass.const_expr(k.put and k.fixed):
                    where[k.top_k + j] = where[j] // a.slot_capacity * a.slot_capacity
                    where[j] = where[j] - where[k.top_k + j]
        if row_bytes % STEP_BYTES == 0 or inside < row_bytes:
            for j in cutlass.range_constexpr(rows):
                if cutlass.const_expr(j < k.top_k):
                    source = result_at_home(k, a, results, token, where, j, inside, 0)
                else:
                    source = a.shared_rows + Int64(token) * row_bytes + inside
                to = stage + (u * rows + j) * (STEP_BYTES // k.element_size)
                to = cute.make_ptr(dtype, to.toint(), cute.AddressSpace.smem, assumed_align=16)
                cute.copy(atom, cute.make_tensor(gmem(source, dtype, 16), layout), cute.make_tensor(to, layout))
    cute.arch.cp_async_commit_group()


@cute.jit
def sum_units(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, counted: Int32, mask: Int32, weight: Float32,
    number: Int32, shared_weight: Float32, stage: cute.Pointer, first: Int32, count: Int32, lane: Int32,
) -> Float32:  # fmt: skip
    """One warp: sum `count` units that are in `stage`, from unit `first` on. mask: of a choice, all bits or none.
    shared_weight: of the unit before; returns that of the last one, which the next one may be of, too."""
    row_bytes, vector = k.hidden * k.element_size, 16 // k.element_size
    steps, rows = ceil_div(row_bytes, STEP_BYTES), k.top_k + (1 if k.shared_intermediate else 0)
    layout = cute.make_layout(vector)
    for u in cutlass.range(count, unroll=2):
        unit = first + u
        i = cute.arch.shuffle_sync(number, unit // steps)
        token = cute.arch.shuffle_sync(counted, i)
        inside = Int64(unit % steps * STEP_BYTES + lane * 16)
        if cutlass.const_expr(k.shared_gate):
            if unit % steps == 0 or u == 0:
                shared_weight = gate_of_shared(k, dtype, a, token, lane)
        total = cute.make_rmem_tensor(vector, Float32)
        total.fill(0.0)
        for j in cutlass.range_constexpr(rows):
            words = cute.make_rmem_tensor(4, Int32)
            place = stage + (u * rows + j) * (STEP_BYTES // k.element_size)
            place = cute.make_ptr(Int32, place.toint(), cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(place, cute.make_layout(4)), words)
            scale = shared_weight
            if cutlass.const_expr(j < k.top_k):
                scale = cute.arch.shuffle_sync(weight, i * MAX_TOP_K + j)
                kept = cute.arch.shuffle_sync(mask, i * MAX_TOP_K + j)
                for w in cutlass.range_constexpr(4):
                    words[w] = words[w] & kept
            total.store(total.load() + cute.recast_tensor(words, dtype).load().to(Float32) * scale)
        if row_bytes % STEP_BYTES == 0 or inside < row_bytes:
            out = cute.make_rmem_tensor(vector, dtype)
            out.store(total.load().to(dtype))
            to = gmem(a.y + Int64(token) * row_bytes + inside, dtype, 16)
            cute.autovec_copy(out, cute.make_tensor(to, layout))
    return shared_weight
