"""What the levels share: the shape of a tile, the tensor-core instruction, how a tile is addressed and stored.

A row tile is 128 rows of one expert (the rows of an expert are padded to whole tiles), a task is a row tile times 256
columns. `tile_expert[row tile]` says whose weights to take.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

ROWS, COLUMNS, STEP = 128, 256, 64
"""A task's tile, and the depth that one pass of the loop over the inner dimension takes: 128 bytes of a row."""
CONSUMERS = 256
"""Threads that multiply: two warpgroups, 64 rows each."""
STEP_BYTES = (ROWS + COLUMNS) * STEP * 2


def gmem(address, dtype=BFloat16, align=16):
    """Global pointer to an address in bytes."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


def expert_of(tile_expert, row_tile):
    """Whose weights a row tile takes."""
    return cute.arch.load(gmem(tile_expert + Int64(row_tile) * 4, Int32, 4), Int32)


def matrix(address, rows, columns):
    """A row-major bfloat16 matrix in global memory."""
    return cute.make_tensor(gmem(address, BFloat16, 16), cute.make_layout((rows, columns), stride=(columns, 1)))


def weights(address, columns, depth, slots):
    """[columns, depth, slots]: one matrix per expert."""
    layout = cute.make_layout((columns, depth, slots), stride=(depth, 1, columns * depth))
    return cute.make_tensor(gmem(address, BFloat16, 16), layout)


def operand_layouts(stages: int):
    """Shared memory of both operands, in the 128-byte swizzle that wgmma reads and TMA writes."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    return (
        cute.tile_to_shape(atom, (ROWS, STEP, stages), order=(0, 1, 2)),
        cute.tile_to_shape(atom, (COLUMNS, STEP, stages), order=(0, 1, 2)),
    )


def tma_operands(rows, weight, lA, lB):
    """TMA descriptors for a step of the rows and one of the weights: (atom, tensor) each."""
    load = cpasync.CopyBulkTensorTileG2SOp()
    first = (None, None, 0)
    return (
        *cpasync.make_tiled_tma_atom(load, rows, cute.slice_(lA, first), (ROWS, STEP)),
        *cpasync.make_tiled_tma_atom(load, weight, cute.slice_(lB, first), (COLUMNS, STEP)),
    )


def tma_views(atom, tensor, box, smem):
    """(shared, global) views of what one TMA copy moves, by stage and by (tile, step[, expert])."""
    tiled = cute.local_tile(tensor, box, (None,) * cute.rank(tensor))
    one = cute.make_layout(1)
    return cpasync.tma_partition(atom, 0, one, cute.group_modes(smem, 0, 2), cute.group_modes(tiled, 0, 2))


def tiled_mma() -> cute.TiledMma:
    """wgmma m64n256k16 for each of two warpgroups, both operands from shared memory, sums in fp32."""
    return sm90.make_trivial_tiled_mma(
        BFloat16,
        BFloat16,
        cute.nvgpu.OperandMajorMode.K,
        cute.nvgpu.OperandMajorMode.K,
        Float32,
        (2, 1, 1),
        tiler_mn=(64, COLUMNS),
    )


@cute.jit
def multiply_step(acc: cute.Tensor, a_frag: cute.Tensor, b_frag: cute.Tensor, stage: Int32, first: cutlass.Constexpr):
    """Start the four wgmma of a step; `first`: they begin a new sum."""
    mma = tiled_mma()
    mma.set(warpgroup.Field.ACCUMULATE, not first)
    for block in cutlass.range_constexpr(STEP // 16):
        cute.gemm(mma, acc, a_frag[(None, None, block, stage)], b_frag[(None, None, block, stage)], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def store_tile(
    acc: cute.Tensor, out: cute.Tensor, row_tile: Int32, column: Int32, thread: Int32, relu: cutlass.Constexpr
):
    """Round the accumulators and store them where they belong, two neighbouring columns at a time."""
    tile = cute.local_tile(out, (ROWS, COLUMNS), (row_tile, column))
    mine = tiled_mma().get_slice(thread).partition_C(tile)
    pair = cute.make_rmem_tensor(2, Float32)
    rounded = cute.make_rmem_tensor(2, BFloat16)
    flat = cute.make_tensor(acc.iterator, cute.make_layout((2, cute.size(acc) // 2)))
    target = cute.group_modes(cute.flatten(mine), 1, cute.rank(cute.flatten(mine)))
    for i in cutlass.range_constexpr(cute.size(acc) // 2):
        for j in cutlass.range_constexpr(2):
            pair[j] = flat[j, i]
            if cutlass.const_expr(relu):
                pair[j] = cute.arch.fmax(pair[j], Float32(0.0))
        rounded.store(pair.load().to(BFloat16))
        cute.autovec_copy(rounded, target[(None, i)])
