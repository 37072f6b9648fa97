"""Level 2: the TMA unit copies. One warp asks for a box of each operand and goes on; a barrier in shared memory says
when all bytes are there.

The unit computes the addresses, writes the swizzle, and needs no registers for what passes through. There is still one
stage, so copying and multiplying still take turns.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
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


class Tma:
    """out[r, n] = act(sum over k of rows[r, k] * weight[expert of r, n, k])."""

    def __init__(self, depth: int, columns: int, relu: bool) -> None:
        self.depth, self.columns, self.relu = depth, columns, relu

    @cute.jit
    def __call__(
        self, rows: Int64, weight: Int64, out: Int64, tile_expert: Int64, tiles: Int32, slots: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Build the descriptors and launch: one block per task."""
        lA, lB = operand_layouts(1)
        mRows, mWeight = matrix(rows, tiles * ROWS, self.depth), weights(weight, self.columns, self.depth, slots)
        aA, tA, aB, tB = tma_operands(mRows, mWeight, lA, lB)

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, 1]
            sA: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(lA)], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(lB)], 1024]

        self.shared = Shared
        self.kernel(aA, tA, aB, tB, matrix(out, tiles * ROWS, self.columns), tile_expert, lA, lB).launch(
            grid=(self.columns // COLUMNS, tiles, 1), block=(CONSUMERS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self, aA: cute.CopyAtom, tA: cute.Tensor, aB: cute.CopyAtom, tB: cute.Tensor, out: cute.Tensor,
        tile_expert: Int64, lA: cute.ComposedLayout, lB: cute.ComposedLayout,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        column, row_tile, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        expert = expert_of(tile_expert, row_tile)
        smem = utils.SmemAllocator()
        s = smem.allocate(self.shared)
        full = s.full.data_ptr()
        if thread == 0:
            cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        sA = s.sA.get_tensor(lA.outer, swizzle=lA.inner)
        sB = s.sB.get_tensor(lB.outer, swizzle=lB.inner)
        toA, fromA = tma_views(aA, tA, (ROWS, STEP), sA)
        toB, fromB = tma_views(aB, tB, (COLUMNS, STEP), sB)
        mma = tiled_mma().get_slice(thread // 128 * 128)
        a_frag = tiled_mma().make_fragment_A(mma.partition_A(sA))
        b_frag = tiled_mma().make_fragment_B(mma.partition_B(sB))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, COLUMNS)), Float32)
        acc.fill(0.0)
        for step in range(self.depth // STEP):
            if warp == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, STEP_BYTES)
                cute.copy(aA, fromA[(None, row_tile, step)], toA[(None, 0)], tma_bar_ptr=full)
                cute.copy(aB, fromB[(None, column, step, expert)], toB[(None, 0)], tma_bar_ptr=full)
            cute.arch.mbarrier_wait(full, step & 1)
            warpgroup.fence()
            multiply_step(acc, a_frag, b_frag, 0, False)
            warpgroup.wait_group(0)
            # nobody may ask for the next step while somebody's product still reads this one
            cute.arch.sync_threads()
        store_tile(acc, out, row_tile, column, thread, self.relu)
