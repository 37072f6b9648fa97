"""Level 5: both products in one launch. A counter per row tile stands where the boundary between two launches stood.

The second product of a row tile needs all columns of its hidden rows, and those come from several blocks. Each block
that has stored a hidden tile adds one to the row tile's counter (release); the loader that is given a second product
waits until the counter says that all are there (acquire), then loads. Consumers never wait for memory.

Why nobody waits for ever: in the list a second product stands after all first products of its row tile, every block is
resident, and each works through its entries in order. So the first task of the list that is not finished can always be
worked on. Why nobody waits long: the second products of a group of row tiles come only after the first ones of the next
group (`problem.fused_tasks`).

The hidden rows are written by ordinary stores and read by TMA, another path to memory: after the acquire the loader
needs a proxy fence. Counters only grow, `call` says how often; the real kernel keeps that number on the device. A list
entry is one int32: second product? << 30 | row tile << 8 | column.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Boolean, Float32, Int32, Int64

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

SECOND = 30
"""Bit of a list entry that marks a task of the second product."""
PATIENCE_NS = 2_000_000_000
"""A loader that has waited for longer than this gives up and says so."""


class Fused:
    """out = relu(rows first^T) second^T, per expert; `hidden` between them. depth: H, intermediate: D."""

    def __init__(self, depth: int, intermediate: int) -> None:
        self.depth, self.intermediate = depth, intermediate

    @cute.jit
    def __call__(
        self, rows: Int64, first: Int64, hidden: Int64, second: Int64, out: Int64, tile_expert: Int64, tiles: Int32,
        slots: Int32, tasks: Int64, count: Int32, counters: Int64, call: Int32, failed: Int64, blocks: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch. counters: int32 per row tile, zero before call 1; failed: one int32 that stays 0."""
        H, D = self.depth, self.intermediate
        lA, lB = operand_layouts(STAGES)
        mHidden, mOut = matrix(hidden, tiles * ROWS, D), matrix(out, tiles * ROWS, H)
        aX, tX, aW1, tW1 = tma_operands(matrix(rows, tiles * ROWS, H), weights(first, D, H, slots), lA, lB)
        aHidden, tHidden, aW2, tW2 = tma_operands(mHidden, weights(second, H, D, slots), lA, lB)

        @cute.struct
        class Shared:
            full: cute.struct.MemRange[Int64, STAGES]
            empty: cute.struct.MemRange[Int64, STAGES]
            sA: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(lA)], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(lB)], 1024]

        self.shared = Shared
        self.kernel(
            aX, tX, aW1, tW1, aHidden, tHidden, aW2, tW2, mHidden, mOut, tile_expert, tasks, count, counters, call,
            failed, lA, lB,
        ).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, aX: cute.CopyAtom, tX: cute.Tensor, aW1: cute.CopyAtom, tW1: cute.Tensor, aHidden: cute.CopyAtom,
        tHidden: cute.Tensor, aW2: cute.CopyAtom, tW2: cute.Tensor, mHidden: cute.Tensor, mOut: cute.Tensor,
        tile_expert: Int64, tasks: Int64, count: Int32, counters: Int64, call: Int32, failed: Int64,
        lA: cute.ComposedLayout, lB: cute.ComposedLayout,
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
        steps = Int32(0)

        if warp == CONSUMERS // 32:
            toX, fromX = tma_views(aX, tX, (ROWS, STEP), sA)
            toW1, fromW1 = tma_views(aW1, tW1, (COLUMNS, STEP), sB)
            toHidden, fromHidden = tma_views(aHidden, tHidden, (ROWS, STEP), sA)
            toW2, fromW2 = tma_views(aW2, tW2, (COLUMNS, STEP), sB)
            for i in range(block, count, blocks):
                second, row_tile, column = self.task(tasks, i)
                expert = expert_of(tile_expert, row_tile)
                if second == 0:
                    steps = load_steps(
                        self.depth, full, empty, steps,
                        aX, fromX[(None, row_tile, None)], toX, aW1, fromW1[(None, column, None, expert)], toW1,
                    )  # fmt: skip
                else:
                    self.wait(counters + Int64(row_tile) * 4, call * (self.intermediate // COLUMNS), failed)
                    cute.arch.fence_proxy("async")
                    steps = load_steps(
                        self.intermediate, full, empty, steps,
                        aHidden, fromHidden[(None, row_tile, None)], toHidden,
                        aW2, fromW2[(None, column, None, expert)], toW2,
                    )  # fmt: skip
        else:
            mma = tiled_mma().get_slice(thread // 128 * 128)
            a_frag = tiled_mma().make_fragment_A(mma.partition_A(sA))
            b_frag = tiled_mma().make_fragment_B(mma.partition_B(sB))
            acc = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, COLUMNS)), Float32)
            for i in range(block, count, blocks):
                second, row_tile, column = self.task(tasks, i)
                if second == 0:
                    steps = multiply_steps(self.depth, full, empty, steps, acc, a_frag, b_frag)
                    store_tile(acc, mHidden, row_tile, column, thread, True)
                    # all 256 threads have stored; then one of them releases
                    cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)
                    if thread == 0:
                        counter = gmem(counters + Int64(row_tile) * 4, Int32, 4)
                        cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
                else:
                    steps = multiply_steps(self.intermediate, full, empty, steps, acc, a_frag, b_frag)
                    store_tile(acc, mOut, row_tile, column, thread, False)

    @cute.jit
    def task(self, tasks: Int64, i: Int32) -> tuple[Int32, Int32, Int32]:
        """(second product?, row tile, column) of entry i of the list."""
        word = cute.arch.load(gmem(tasks + Int64(i) * 4, Int32, 4), Int32)
        return word >> SECOND, (word & ((1 << SECOND) - 1)) >> 8, word & 255

    @cute.jit
    def wait(self, counter: Int64, target: Int32, failed: Int64):
        """Acquire the counter; on expiry tell the host and go on, so that the kernel ends."""
        start = cute.arch.globaltimer()
        go = Boolean(True)
        while go:
            seen = cute.arch.load(gmem(counter, Int32, 4), Int32, sem="acquire", scope="gpu")
            go = seen < target
            if go and Int64(cute.arch.globaltimer() - start) > PATIENCE_NS:
                cute.arch.store(gmem(failed, Int32, 4), Int32(1))
                go = Boolean(False)
