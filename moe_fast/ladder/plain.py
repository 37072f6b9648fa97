"""Level 0: a tile loop as in every introduction, without tensor cores.

A block of 256 threads computes 64 x 64 results. It walks along the inner dimension in steps of 16: bring 64 x 16 of the
rows and 64 x 16 of the weights to shared memory, wait, add 16 products to each of a thread's 4 x 4 sums, wait. Each
value that was brought is used 64 times, which is the whole point of shared memory.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64

from moe_fast.ladder.tiles import ROWS, expert_of, matrix, weights

TILE, STEP, EACH = 64, 16, 4
"""Results of a block (64 x 64), the step, results of a thread (4 x 4)."""


class Plain:
    """out[r, n] = act(sum over k of rows[r, k] * weight[expert of r, n, k])."""

    def __init__(self, depth: int, columns: int, relu: bool) -> None:
        self.depth, self.columns, self.relu = depth, columns, relu

    @cute.jit
    def __call__(
        self, rows: Int64, weight: Int64, out: Int64, tile_expert: Int64, tiles: Int32, slots: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch: addresses, number of row tiles, number of experts."""
        self.kernel(
            matrix(rows, tiles * ROWS, self.depth),
            weights(weight, self.columns, self.depth, slots),
            matrix(out, tiles * ROWS, self.columns),
            tile_expert,
        ).launch(grid=(self.columns // TILE, tiles * (ROWS // TILE), 1), block=(256, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, rows: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, tile_expert: Int64):
        thread, _, _ = cute.arch.thread_idx()
        column_tile, row_tile, _ = cute.arch.block_idx()
        expert = expert_of(tile_expert, row_tile // (ROWS // TILE))
        # one more column than used: threads that read down a column then hit different banks
        padded = cute.make_layout((TILE, STEP), stride=(STEP + 1, 1))
        smem = utils.SmemAllocator()
        a = smem.allocate_tensor(Float32, padded)
        b = smem.allocate_tensor(Float32, padded)
        x, y = thread % (TILE // EACH), thread // (TILE // EACH)
        sums = cute.make_rmem_tensor((EACH, EACH), Float32)
        sums.fill(0.0)
        for step in range(self.depth // STEP):
            for i in cutlass.range_constexpr(TILE * STEP // 256):
                r, k = (i * 256 + thread) // STEP, (i * 256 + thread) % STEP
                a[r, k] = Float32(rows[row_tile * TILE + r, step * STEP + k])
                b[r, k] = Float32(weight[column_tile * TILE + r, step * STEP + k, expert])
            cute.arch.sync_threads()
            for k in cutlass.range_constexpr(STEP):
                for i in cutlass.range_constexpr(EACH):
                    for j in cutlass.range_constexpr(EACH):
                        sums[i, j] += a[y + i * (TILE // EACH), k] * b[x + j * (TILE // EACH), k]
            cute.arch.sync_threads()
        for i in cutlass.range_constexpr(EACH):
            for j in cutlass.range_constexpr(EACH):
                value = sums[i, j]
                if cutlass.const_expr(self.relu):
                    value = cute.arch.fmax(value, Float32(0.0))
                r, n = row_tile * TILE + y + i * (TILE // EACH), column_tile * TILE + x + j * (TILE // EACH)
                out[r, n] = value.to(BFloat16)
