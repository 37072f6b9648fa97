"""Level 1: the same loop on tensor cores. All threads copy a step to shared memory, then all multiply, in turn.

A tensor-core instruction (wgmma, 64 x 256 x 16) belongs to a warpgroup of four warps and reads both operands from
shared memory, where they must lie in its swizzle: the eight 16-byte pieces of a row of 128 bytes are permuted by the
row's number, so that eight rows never meet in one bank.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass.cute.nvgpu import warpgroup

from moe_fast.ladder.tiles import (
    COLUMNS,
    CONSUMERS,
    ROWS,
    STEP,
    expert_of,
    gmem,
    matrix,
    multiply_step,
    operand_layouts,
    store_tile,
    tiled_mma,
)


class Wgmma:
    """out[r, n] = act(sum over k of rows[r, k] * weight[expert of r, n, k])."""

    def __init__(self, depth: int, columns: int, relu: bool) -> None:
        self.depth, self.columns, self.relu = depth, columns, relu

    @cute.jit
    def __call__(
        self, rows: Int64, weight: Int64, out: Int64, tile_expert: Int64, tiles: Int32, slots: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch: one block per task."""
        lA, lB = operand_layouts(1)

        @cute.struct
        class Shared:
            sA: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(lA)], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(lB)], 1024]

        self.shared = Shared
        self.kernel(rows, weight, matrix(out, tiles * ROWS, self.columns), tile_expert, lA, lB).launch(
            grid=(self.columns // COLUMNS, tiles, 1), block=(CONSUMERS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self, rows: Int64, weight: Int64, out: cute.Tensor, tile_expert: Int64,
        lA: cute.ComposedLayout, lB: cute.ComposedLayout,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        column, row_tile, _ = cute.arch.block_idx()
        expert = expert_of(tile_expert, row_tile)
        smem = utils.SmemAllocator()
        s = smem.allocate(self.shared)
        mma = tiled_mma().get_slice(thread // 128 * 128)
        a_frag = tiled_mma().make_fragment_A(mma.partition_A(s.sA.get_tensor(lA.outer, swizzle=lA.inner)))
        b_frag = tiled_mma().make_fragment_B(mma.partition_B(s.sB.get_tensor(lB.outer, swizzle=lB.inner)))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, COLUMNS)), Float32)
        acc.fill(0.0)
        x = rows + Int64(row_tile) * (ROWS * self.depth * 2)
        w = weight + (Int64(expert) * self.columns + column * COLUMNS) * (self.depth * 2)
        for step in range(self.depth // STEP):
            self.copy_step(x, s.sA.data_ptr(), ROWS, step, thread)
            self.copy_step(w, s.sB.data_ptr(), COLUMNS, step, thread)
            # written by ordinary stores, read by the tensor cores' own path to shared memory
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            warpgroup.fence()
            multiply_step(acc, a_frag, b_frag, 0, False)
            warpgroup.wait_group(0)
            cute.arch.sync_threads()
        store_tile(acc, out, row_tile, column, thread, self.relu)

    @cute.jit
    def copy_step(self, source: Int64, target: cute.Pointer, count: cutlass.Constexpr, step: Int32, thread: Int32):
        """Copy `count` rows of 128 bytes: 16-byte piece p of row r goes to piece p ^ (r % 8)."""
        vector = ir.VectorType.get([4], Int32.mlir_type)
        for i in cutlass.range_constexpr(count * 8 // CONSUMERS):
            r, p = (i * CONSUMERS + thread) // 8, thread % 8
            place = source + Int64(r) * (self.depth * 2) + (step * STEP * 2 + p * 16)
            piece = cute.arch.load(gmem(place, Int32, 16), vector)
            cute.arch.store(target + (r * STEP + (p ^ (r % 8)) * 8), piece)
