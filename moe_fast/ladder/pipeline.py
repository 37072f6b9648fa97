"""Level 3: a pipeline. One warp only loads, two warpgroups only multiply, four stages of shared memory between them.

Two barriers per stage: `full` (the bytes are there) and `empty` (both warpgroups are done with them). The loader runs
up to four steps ahead, so the tensor cores wait only at the beginning of a tile. One product stays in flight while the
next stage is awaited; only then the stage before is handed back.

A stage's number and the parity of its barriers follow from a running count: stage = count % 4, phase = count // 4 % 2.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from moe_fast.ladder.tiles import (
    COLUMNS,
    CONSUMERS,
    ROWS,
    STEP,
    STEP_BYTES,
    expert_of,
    matrix,
    multiply_step,
    operand_layouts,
    store_tile,
    tiled_mma,
    tma_operands,
    tma_views,
    weights,
)

STAGES = 4
THREADS = CONSUMERS + 32


@cute.jit
def load_steps(
    depth: cutlass.Constexpr, full: cute.Pointer, empty: cute.Pointer, count: Int32,
    aA: cute.CopyAtom, fromA: cute.Tensor, toA: cute.Tensor, aB: cute.CopyAtom, fromB: cute.Tensor, toB: cute.Tensor,
) -> Int32:  # fmt: skip
    """The loader warp brings all steps of a task; returns the new count."""
    for step in range(depth // STEP):
        stage = count % STAGES
        cute.arch.mbarrier_wait(empty + stage, ((count // STAGES) & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, STEP_BYTES)
        cute.copy(aA, fromA[(None, step)], toA[(None, stage)], tma_bar_ptr=full + stage)
        cute.copy(aB, fromB[(None, step)], toB[(None, stage)], tma_bar_ptr=full + stage)
        count += 1
    return count


@cute.jit
def multiply_steps(
    depth: cutlass.Constexpr, full: cute.Pointer, empty: cute.Pointer, count: Int32,
    acc: cute.Tensor, a_frag: cute.Tensor, b_frag: cute.Tensor,
) -> Int32:  # fmt: skip
    """A consumer warpgroup multiplies all steps of a task; returns the new count."""
    cute.arch.mbarrier_wait(full + count % STAGES, (count // STAGES) & 1)
    warpgroup.fence()
    multiply_step(acc, a_frag, b_frag, count % STAGES, True)
    for _ in range(1, depth // STEP):
        following = count + 1
        cute.arch.mbarrier_wait(full + following % STAGES, (following // STAGES) & 1)
        multiply_step(acc, a_frag, b_frag, following % STAGES, False)
        warpgroup.wait_group(1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty + count % STAGES)
        count = following
    warpgroup.wait_group(0)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(empty + count % STAGES)
    return count + 1


class Pipeline:
    """out[r, n] = act(sum over k of rows[r, k] * weight[expert of r, n, k])."""

    def __init__(self, depth: int, columns: int, relu: bool) -> None:
        self.depth, self.columns, self.relu = depth, columns, relu

    @cute.jit
    def __call__(
        self, rows: Int64, weight: Int64, out: Int64, tile_expert: Int64, tiles: Int32, slots: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Build the descriptors and launch: one block per task."""
        lA, lB = operand_layouts(STAGES)
        mRows, mWeight = matrix(rows, tiles * ROWS, self.depth), weights(weight, self.columns, self.depth, slots)
        aA, tA, aB, tB = tma_operands(mRows, mWeight, lA, lB)

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, STAGES]
            empty: cute.struct.MemRange[Int64, STAGES]
            sA: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(lA)], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(lB)], 1024]

        self.shared = Shared
        self.kernel(aA, tA, aB, tB, matrix(out, tiles * ROWS, self.columns), tile_expert, lA, lB).launch(
            grid=(self.columns // COLUMNS, tiles, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self, aA: cute.CopyAtom, tA: cute.Tensor, aB: cute.CopyAtom, tB: cute.Tensor, out: cute.Tensor,
        tile_expert: Int64, lA: cute.ComposedLayout, lB: cute.ComposedLayout,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        column, row_tile, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = utils.SmemAllocator()
        s = smem.allocate(self.shared)
        full, empty = s.full.data_ptr(), s.empty.data_ptr()
        if thread == 0:
            for i in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, CONSUMERS // 32)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        sA = s.sA.get_tensor(lA.outer, swizzle=lA.inner)
        sB = s.sB.get_tensor(lB.outer, swizzle=lB.inner)

        if warp == CONSUMERS // 32:
            toA, fromA = tma_views(aA, tA, (ROWS, STEP), sA)
            toB, fromB = tma_views(aB, tB, (COLUMNS, STEP), sB)
            expert = expert_of(tile_expert, row_tile)
            load_steps(
                self.depth, full, empty, Int32(0),
                aA, fromA[(None, row_tile, None)], toA, aB, fromB[(None, column, None, expert)], toB,
            )  # fmt: skip
        else:
            mma = tiled_mma().get_slice(thread // 128 * 128)
            a_frag = tiled_mma().make_fragment_A(mma.partition_A(sA))
            b_frag = tiled_mma().make_fragment_B(mma.partition_B(sB))
            acc = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, COLUMNS)), Float32)
            multiply_steps(self.depth, full, empty, Int32(0), acc, a_frag, b_frag)
            store_tile(acc, out, row_tile, column, thread, self.relu)
