"""Level 4: persistent blocks and a list. As many blocks as multiprocessors, each walking the list of tasks.

The loader of a block goes on to the next task while the consumers still store the last one, and no block is set up or
torn down in between. The order is chosen by the host (`problem.ordered_tasks`): expert after expert, and within an
expert all row tiles of one column before the next column, so that a tile of weights is used by all its row tiles at
about one time.

A list entry is one int32, row tile * 256 + column; block b takes entries b, b + blocks, b + 2 blocks, ...
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64

from moe_fast.ladder.pipeline import STAGES, THREADS, load_steps, multiply_steps
from moe_fast.ladder.tiles import (
    COLUMNS,
    CONSUMERS,
    ROWS,
    STEP,
    expert_of,
    gmem,
    matrix,
    operand_layouts,
    store_tile,
    tiled_mma,
    tma_operands,
    tma_views,
    weights,
)


class Persistent:
    """out[r, n] = act(sum over k of rows[r, k] * weight[expert of r, n, k])."""

    def __init__(self, depth: int, columns: int, relu: bool) -> None:
        self.depth, self.columns, self.relu = depth, columns, relu

    @cute.jit
    def __call__(
        self, rows: Int64, weight: Int64, out: Int64, tile_expert: Int64, tiles: Int32, slots: Int32, tasks: Int64,
        count: Int32, blocks: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Build the descriptors and launch `blocks` blocks over the `count` tasks at address `tasks`."""
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
        self.kernel(aA, tA, aB, tB, matrix(out, tiles * ROWS, self.columns), tile_expert, tasks, count, lA, lB).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self, aA: cute.CopyAtom, tA: cute.Tensor, aB: cute.CopyAtom, tB: cute.Tensor, out: cute.Tensor,
        tile_expert: Int64, tasks: Int64, count: Int32, lA: cute.ComposedLayout, lB: cute.ComposedLayout,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
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
        steps = Int32(0)  # of all tasks so far: the stages do not begin anew with each

        if warp == CONSUMERS // 32:
            toA, fromA = tma_views(aA, tA, (ROWS, STEP), sA)
            toB, fromB = tma_views(aB, tB, (COLUMNS, STEP), sB)
            for i in range(block, count, blocks):
                task = cute.arch.load(gmem(tasks + Int64(i) * 4, Int32, 4), Int32)
                row_tile, column = task >> 8, task & 255
                expert = expert_of(tile_expert, row_tile)
                steps = load_steps(
                    self.depth, full, empty, steps,
                    aA, fromA[(None, row_tile, None)], toA, aB, fromB[(None, column, None, expert)], toB,
                )  # fmt: skip
        else:
            mma = tiled_mma().get_slice(thread // 128 * 128)
            a_frag = tiled_mma().make_fragment_A(mma.partition_A(sA))
            b_frag = tiled_mma().make_fragment_B(mma.partition_B(sB))
            acc = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, COLUMNS)), Float32)
            for i in range(block, count, blocks):
                task = cute.arch.load(gmem(tasks + Int64(i) * 4, Int32, 4), Int32)
                steps = multiply_steps(self.depth, full, empty, steps, acc, a_frag, b_frag)
                store_tile(acc, out, task >> 8, task & 255, thread, self.relu)
