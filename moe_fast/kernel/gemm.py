"""One matrix product of a task, and the gate's: the wgmma main loop. `loads` brings its operands, `epilogue` takes its
sums.

A task computes a tile of 128 rows x 256 columns in steps of 128 bytes along the depth. A stage of the pipeline holds a
step of 128 rows and of 256 rows of weights, both in the 128-byte swizzle; operands of float32 are rounded to TF32 on
their way into it (TMA). The weights come as two halves of 128
rows: neighbours, or for the first product of a gated layer the gate's rows and the up projection's. Either way column c
of the first half and column c of the second lie in the same thread's accumulators, so a gated activation needs no
exchange and reads the rows once.

Rows come by TMA or, gathered, by copies of the loader's lanes (`gather`); where they may be gathered, consumers put a
proxy fence behind every wait for a full stage.

A bias of the task's 256 columns comes with the first stage, into one of two small buffers: the loader is never more
than one task ahead of the consumers (it has their next task word only when they have done with the last).

Stage barriers count in a running number: see `ring`.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, TFloat32
from cutlass.cute.nvgpu import warpgroup

from moe_fast.kernel.constants import (
    CARRIED_ROWS,
    LINE_BYTES,
    STAGES,
    TILE_COLUMNS,
    TILE_ROWS,
)
from moe_fast.kernel.ring import ring_phase, ring_place

LOG2E = 1.4426950408889634
DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}
"""A layer's dtype as the DSL's."""


@dataclass(frozen=True)
class MmaTF32Op(warpgroup.MmaF16BF16Op):
    """wgmma of TF32, m64 n<columns> k8, both operands from shared memory: the DSL has the atom, but no class for it."""

    def __init__(self, columns: int) -> None:
        major = cute.nvgpu.OperandMajorMode.K
        shape = (64, columns, 8)
        super().__init__(TFloat32, Float32, shape, warpgroup.OperandSource.SMEM, major, major)

    def _verify(self) -> None:
        """The base class' checks are those of 16-bit operands."""


def operand_type(dtype):
    """What the tensor cores take for a layer's dtype."""
    return TFloat32 if dtype is Float32 else dtype


def tiled_mma(dtype, columns: int = TILE_COLUMNS, groups: int = 2) -> cute.TiledMma:
    """wgmma m64 n<columns>, 32 bytes deep, for each of the two consumer warpgroups (or one), both operands from shared
    memory, fp32 sums."""
    if dtype is Float32:
        return cute.make_tiled_mma(cute.make_mma_atom(MmaTF32Op(columns)), (groups, 1, 1))
    return sm90.make_trivial_tiled_mma(
        dtype,
        dtype,
        cute.nvgpu.OperandMajorMode.K,
        cute.nvgpu.OperandMajorMode.K,
        Float32,
        (groups, 1, 1),
        tiler_mn=(64, columns),
    )


@cute.jit
def release(empty: cute.Pointer, count: Int32, paired: cutlass.Constexpr = False):
    """A consumer warp hands a stage back to the loader, or to those of both blocks, which both fill it."""
    with cute.arch.elect_one():
        if cutlass.const_expr(paired):
            for member in cutlass.range_constexpr(2):
                cute.arch.mbarrier_arrive(empty + ring_place(count, STAGES), member)
        else:
            cute.arch.mbarrier_arrive(empty + ring_place(count, STAGES))


def see_gathered(gathers: bool):
    """Behind the wait for a full stage: rows that the loader gathered are written by the generic proxy, and wgmma reads
    shared memory by the asynchronous one."""
    if gathers:
        cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def multiply(
    dtype: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    acc: cute.Tensor,
    a_frag: cute.Tensor,
    b_frag: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    count: Int32,
    depth: Int32,
    paired: cutlass.Constexpr = False,
    gathers: cutlass.Constexpr = False,
) -> Int32:
    """A consumer warpgroup accumulates one task; returns the new running count of stages."""
    # made here, not handed in: whether it accumulates is a property of the object, which may not outlive a loop body
    mma = tiled_mma(dtype, columns)
    blocks = cute.size(a_frag, mode=[2])
    mma.set(warpgroup.Field.ACCUMULATE, False)
    cute.arch.mbarrier_wait(full + ring_place(count, STAGES), ring_phase(count, STAGES))
    see_gathered(gathers)
    warpgroup.fence()
    for kb in cutlass.range_constexpr(blocks):
        stage = ring_place(count, STAGES)
        cute.gemm(mma, acc, a_frag[(None, None, kb, stage)], b_frag[(None, None, kb, stage)], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    for _ in range(1, depth):
        following = count + 1
        stage = ring_place(following, STAGES)
        cute.arch.mbarrier_wait(full + stage, ring_phase(following, STAGES))
        see_gathered(gathers)
        for kb in cutlass.range_constexpr(blocks):
            cute.gemm(mma, acc, a_frag[(None, None, kb, stage)], b_frag[(None, None, kb, stage)], acc)
        warpgroup.commit_group()
        # the product of one step stays in flight, so only the stage before it is free
        warpgroup.wait_group(1)
        release(empty, count, paired)
        count = following
    warpgroup.wait_group(0)
    release(empty, count, paired)
    return count + 1


@cute.jit
def multiply_logits(
    dtype: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    acc: cute.Tensor,
    a_frag: cute.Tensor,
    b_frag: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    count: Int32,
    depth: cutlass.Constexpr,
    double: Int32,
    high: Int32,
    group: Int32,
    alone: Boolean,
) -> Int32:
    """As `multiply`, for what `load_logits` brings: 64 rows of a token tile for warpgroup `group`.

    a_frag: in places of 64 rows. depth: steps of 128 bytes. double: 1 where a stage holds two of them, else 0. high: 1
    where a step has a place for each warpgroup, 0 where all are for the first one. alone: whether the other warpgroup
    leaves the stages to this one, which hands them back for both.
    """
    mma = tiled_mma(dtype, columns)
    blocks = cute.size(a_frag, mode=[2])
    mma.set(warpgroup.Field.ACCUMULATE, False)
    stage = ring_place(count, STAGES)
    cute.arch.mbarrier_wait(full + stage, ring_phase(count, STAGES))
    warpgroup.fence()
    a_place, b_place = stage * 2 + group, stage << double
    for kb in cutlass.range_constexpr(blocks):
        cute.gemm(mma, acc, a_frag[(None, None, kb, a_place)], b_frag[(None, None, kb, b_place)], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    for step in range(1, depth):
        # the second step of a stage has come with the first
        inside = step & double
        following = count + 1 - inside
        stage = ring_place(following, STAGES)
        cute.arch.mbarrier_wait(full + stage, ring_phase(following, STAGES))
        # of a low tile beside the first, of a high one behind all stages' first ones
        a_place = stage * 2 + group + inside + inside * high * (2 * STAGES - 1)
        b_place = (stage << double) + inside
        for kb in cutlass.range_constexpr(blocks):
            cute.gemm(mma, acc, a_frag[(None, None, kb, a_place)], b_frag[(None, None, kb, b_place)], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if inside == 0:
            release(empty, count)
            if alone:
                release(empty, count)
        count = following
    warpgroup.wait_group(0)
    release(empty, count)
    if alone:
        release(empty, count)
    return count + 1


@cute.jit
def multiply_carrying(
    dtype: cutlass.Constexpr,
    acc: cute.Tensor,
    few_acc: cute.Tensor,
    a_frag: cute.Tensor,
    b_frag: cute.Tensor,
    w_frag: cute.Tensor,
    few_frag: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    count: Int32,
    depth: Int32,
    paired: cutlass.Constexpr,
    gathers: cutlass.Constexpr,
) -> Int32:
    """As `multiply`, and beside it the product of the CARRIED_ROWS rows, with its operands in turned roles: out^T =
    W rows^T, blocks of 64 weight rows (w_frag, the same memory as b_frag) by CARRIED_ROWS rows.

    Warpgroup g takes the weights' blocks g and 2 + g, so gate and up values of a column are one thread's, as in `acc`.
    """
    mma, few_mma = tiled_mma(dtype), tiled_mma(dtype, CARRIED_ROWS)
    blocks = cute.size(a_frag, mode=[2])
    mma.set(warpgroup.Field.ACCUMULATE, False)
    few_mma.set(warpgroup.Field.ACCUMULATE, False)
    cute.arch.mbarrier_wait(full + ring_place(count, STAGES), ring_phase(count, STAGES))
    see_gathered(gathers)
    warpgroup.fence()
    for kb in cutlass.range_constexpr(blocks):
        stage = ring_place(count, STAGES)
        cute.gemm(mma, acc, a_frag[(None, None, kb, stage)], b_frag[(None, None, kb, stage)], acc)
        cute.gemm(few_mma, few_acc, w_frag[(None, None, kb, stage)], few_frag[(None, None, kb, stage)], few_acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        few_mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    for _ in range(1, depth):
        following = count + 1
        stage = ring_place(following, STAGES)
        cute.arch.mbarrier_wait(full + stage, ring_phase(following, STAGES))
        see_gathered(gathers)
        for kb in cutlass.range_constexpr(blocks):
            cute.gemm(mma, acc, a_frag[(None, None, kb, stage)], b_frag[(None, None, kb, stage)], acc)
            cute.gemm(few_mma, few_acc, w_frag[(None, None, kb, stage)], few_frag[(None, None, kb, stage)], few_acc)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        release(empty, count, paired)
        count = following
    warpgroup.wait_group(0)
    release(empty, count, paired)
    return count + 1


@cute.jit
def multiply_exactly(
    dtype: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    acc: cute.Tensor,
    a_frag: cute.Tensor,
    b_frag: cute.Tensor,
    rest_frag: cute.Tensor,
    rows: cute.Pointer,
    rest: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    count: Int32,
    depth: cutlass.Constexpr,
    thread: Int32,
) -> Int32:
    """A consumer warpgroup's logits of fp32 tokens and router, by three products of TF32; returns the new running
    count.

    x = h + r with h the bits that TF32 has; so is the router, whose two parts come one after the other. While the first
    is here, h and r are multiplied by it, then h by the second: what is missing is a product of rests, 2^-22. The
    loader brings x as it is; the warpgroup takes it apart in shared memory, h in place, r into `rest`, in the same
    swizzle. rows: the stages; both pointers of fp32.
    """
    mma = tiled_mma(dtype, columns)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    acc.fill(0.0)
    group, inside = thread // 128, thread % 128
    whole = cute.make_rmem_tensor(4, Float32)
    high = cute.make_rmem_tensor(4, Float32)
    low = cute.make_rmem_tensor(4, Float32)
    quarter = cute.make_layout(4)
    blocks = cute.size(a_frag, mode=[2])
    for _ in range(depth):
        stage = ring_place(count, STAGES)
        cute.arch.mbarrier_wait(full + stage, ring_phase(count, STAGES))
        for j in cutlass.range_constexpr(4):
            place = group * (64 * LINE_BYTES // 4) + (j * 128 + inside) * 4
            source = shared_floats(rows + stage * (TILE_ROWS * LINE_BYTES // 4) + place)
            cute.autovec_copy(cute.make_tensor(source, quarter), whole)
            for i in cutlass.range_constexpr(4):
                high[i] = (whole[i].bitcast(Int32) & ~0x1FFF).bitcast(Float32)
                low[i] = whole[i] - high[i]
            cute.autovec_copy(high, cute.make_tensor(source, quarter))
            cute.autovec_copy(low, cute.make_tensor(shared_floats(rest + place), quarter))
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_group(group)
        warpgroup.fence()
        for kb in cutlass.range_constexpr(blocks):
            cute.gemm(mma, acc, a_frag[(None, None, kb, stage)], b_frag[(None, None, kb, stage)], acc)
            cute.gemm(mma, acc, rest_frag[(None, None, kb)], b_frag[(None, None, kb, stage)], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        # nobody takes the next stage apart while a product of this one still reads the rest
        sync_group(group)
        release(empty, count)
        count += 1
    warpgroup.fence()
    for step in range(depth):
        stage = ring_place(count, STAGES)
        cute.arch.mbarrier_wait(full + stage, ring_phase(count, STAGES))
        for kb in cutlass.range_constexpr(blocks):
            cute.gemm(mma, acc, a_frag[(None, None, kb, stage)], b_frag[(None, None, kb, stage)], acc)
        warpgroup.commit_group()
        # as in `multiply`: the product of one step stays in flight
        warpgroup.wait_group(1)
        if step > 0:
            release(empty, count - 1)
        count += 1
    warpgroup.wait_group(0)
    release(empty, count - 1)
    return count


def shared_floats(pointer):
    """Pointer to four aligned fp32 values in shared memory."""
    return cute.make_ptr(Float32, pointer.toint(), cute.AddressSpace.smem, assumed_align=16)


def sync_group(group):
    """Barrier of one consumer warpgroup."""
    cute.arch.barrier(barrier_id=2 + group, number_of_threads=128)


@cute.jit
def pass_over(
    full: cute.Pointer, empty: cute.Pointer, count: Int32, depth: Int32, paired: cutlass.Constexpr = False,
    gathers: cutlass.Constexpr = False,
) -> Int32:  # fmt: skip
    """A consumer warpgroup whose 64 rows are all padding: hand the stages back unread, leave the tensor cores to the
    other one; returns the new running count of stages."""
    # by one copy of the code: the gate comes here once a call, and the loader waits while code comes from memory
    for _ in cutlass.range(depth, unroll=1):
        cute.arch.mbarrier_wait(full + ring_place(count, STAGES), ring_phase(count, STAGES))
        # also before TMA writes over them
        see_gathered(gathers)
        release(empty, count, paired)
        count += 1
    return count
