"""The persistent MoE megakernel: gate, dispatch, expert FFN, return and combine in one launch (FlashMoE, section 3).

`MegaKernel.__call__` runs on the host: it builds the TMA descriptors and launches one block per SM. `kernel` hands the
warps their roles:

    warp 0      loader      TMA: token tiles for the gate, then the operands of each task; rows that stay on their rank
                            are gathered by asynchronous copies, see `gather`
    warp 1      dispatcher  the next task word
    warp 2      storer      results to memory and home, completion, counters
    warp 3      spare       pushes rows (see `spare`: in which blocks), then combines tokens whose results are back; in
                            the first blocks Scheduler and Subscribers (scheduler="spare_warps")
    warps 4-11  consumers   gate, send list, first rows, wgmma and epilogue, combine

In a paired kernel blocks 2 i and 2 i + 1 are one processor, see `pairs`.

With scheduler="os_block" the last block has no processor: warp 0 is the Scheduler, warps 1-3 the Subscribers.

Epochs: the call number lives in device memory and is moved on by the last block to leave; its lowest bit is the staging
side. Counters that peers add to only grow, with targets kept beside them. Counters of this GPU are zeroed one call
ahead, by the call that uses the other side. So the host neither resets nor waits between calls, and a captured graph
can be replayed.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from moe_fast.kernel.constants import (
    CARRIED_ROWS,
    FEW_ROWS,
    HALF_COLUMNS,
    STAGES,
    THREADS,
    TILE_COLUMNS,
    TILE_ROWS,
    PlanWord,
)
from moe_fast.kernel.consumer import consume
from moe_fast.kernel.final_combine import BLOCKS, SHARE_WORDS, SIDE
from moe_fast.kernel.gather import SOURCES
from moe_fast.kernel.gemm import DTYPES, operand_type
from moe_fast.kernel.loader import load
from moe_fast.kernel.pairs import dispatch_pair_words, meet, pass_words_on
from moe_fast.kernel.plan import wait_plan
from moe_fast.kernel.processor import READERS, dispatch_words, member_of
from moe_fast.kernel.regions import gate_tiles
from moe_fast.kernel.scheduler import schedule
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import ABORT, EPOCH, EXITED, Args, Operands, Role, fetch_add, gmem, read, write
from moe_fast.kernel.spare import spare
from moe_fast.kernel.storer import store
from moe_fast.kernel.subscriber import subscribe
from moe_ref.layout import ceil_div
from moe_ref.runtime.encoding import side_of

LOAD_REGISTERS, MATH_REGISTERS = 104, 200
"""Of a thread of the loading warps and of the computing ones: 128 * 104 + 256 * 200 = 64,512, all registers of an SM.
With 88 and 208 the spare warp spills."""


def registers_of(k: KernelShape) -> tuple[int, int]:
    """LOAD_REGISTERS and MATH_REGISTERS of a kernel. The choice among many experts needs more of the latter; where
    Scheduler and Subscribers have a block of their own, spare warps need fewer."""
    if k.scheduler == "os_block" and k.experts > HALF_COLUMNS:
        return LOAD_REGISTERS - 32, MATH_REGISTERS + 16
    return LOAD_REGISTERS, MATH_REGISTERS


class MegaKernel:
    """One compiled variant; see `moe_fast.compiler` for how it is compiled and kept."""

    def __init__(self, shape: KernelShape) -> None:
        self.shape = shape
        self.dtype = DTYPES[shape.dtype]

    @cute.jit
    def __call__(self, a: Args, w: Operands, slots: Int32, grid: Int32, stream: cuda.CUstream):
        """Launch.

        router [E, H], one of fp32 as [E, 2 H] or [E, 3 H]: two or three summands; first [slots, up_rows, H] and bias
        [slots, up_rows]; second [slots, H, D] and bias [slots, H]; hidden [R, D]; of a shared expert of width W first
        [2 W or W, H], second [H, W] and hidden [S, W]. All of dtype.
        """
        k, dtype = self.shape, self.dtype
        H, D, U = k.hidden, k.intermediate, k.up_rows
        tokens = max(a.tokens, Int32(1))
        mX = cute.make_tensor(gmem(a.x, dtype, 16), cute.make_layout((tokens, H), stride=(H, 1)))
        HR = H * k.router_parts
        mRouter = cute.make_tensor(gmem(w.router, dtype, 16), cute.make_layout((k.experts, HR), stride=(HR, 1)))
        pitch = k.row_pitch // k.element_size
        mRows = cute.make_tensor(
            gmem(a.heap + a.rows_at, dtype, 128), cute.make_layout((a.rows * k.row_factor, H), stride=(pitch, 1))
        )
        hidden_rows = a.rows * k.ranks if k.fixed else a.rows
        mHidden = cute.make_tensor(gmem(w.hidden, dtype, 128), cute.make_layout((hidden_rows, D), stride=(D, 1)))
        if cutlass.const_expr(k.interleaved):
            # gate and up rows in turn: two matrices whose rows are 2 H apart
            first_layout = cute.make_layout((D, H, 2, slots), stride=(2 * H, 1, H, U * H))
        else:
            first_layout = cute.make_layout((U, H, slots), stride=(H, 1, U * H))
        mFirst = cute.make_tensor(gmem(w.first, dtype, 16), first_layout)
        mSecond = cute.make_tensor(gmem(w.second, dtype, 16), cute.make_layout((H, D, slots), stride=(D, 1, H * D)))

        # fp32 operands become TF32 on their way, rounded to nearest; tokens for the gate come as they are
        operand = operand_type(dtype)
        rounded = {"internal_type": operand} if operand is not dtype else {}
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
        lA = cute.tile_to_shape(atom, (TILE_ROWS, k.line, STAGES), order=(0, 1, 2))
        lB = cute.tile_to_shape(atom, (TILE_COLUMNS, k.line, STAGES), order=(0, 1, 2))
        # places of the gate's router and tokens: the latter's go on into the weights' stages
        most_steps = max(k.gate_steps(True), k.gate_steps(False))
        lG = cute.tile_to_shape(atom, (k.gate_columns, k.line, STAGES * most_steps), order=(0, 1, 2))
        lX = cute.tile_to_shape(atom, (TILE_ROWS, k.line, STAGES * 2), order=(0, 1, 2))
        lBh = cute.tile_to_shape(atom, (HALF_COLUMNS, k.line, STAGES * 2), order=(0, 1, 2))
        # one memory, two views: both warpgroups' 64 rows for the register copy, one 64 x 64 buffer for a TMA store
        lC = cute.tile_to_shape(atom, (TILE_ROWS, k.line, 2), order=(0, 1, 2))
        lCs = cute.tile_to_shape(atom, (64, k.line, 4), order=(0, 1, 2))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        lA1, lB1, lC1, lG1 = (cute.slice_(x, (None, None, 0)) for x in (lA, lBh, lCs, lG))
        rows_box, half_box, chunk_box = (TILE_ROWS, k.line), (HALF_COLUMNS, k.line), (64, k.line)
        lAh = cute.tile_to_shape(atom, (TILE_ROWS // 2, k.line, STAGES * 4), order=(0, 1, 2))
        lAh1, half_rows_box = cute.slice_(lAh, (None, None, 0)), (TILE_ROWS // 2, k.line)
        aX, tX = cpasync.make_tiled_tma_atom(load, mX, lA1, rows_box)
        aXHalf, tXHalf = cpasync.make_tiled_tma_atom(load, mX, lAh1, half_rows_box)
        aRouter, tRouter = cpasync.make_tiled_tma_atom(load, mRouter, lG1, (k.gate_columns, k.line), **rounded)
        aRows, tRows = cpasync.make_tiled_tma_atom(load, mRows, lA1, rows_box, **rounded)
        aHidden, tHidden = cpasync.make_tiled_tma_atom(load, mHidden, lA1, rows_box, **rounded)
        aRowsHalf, tRowsHalf = cpasync.make_tiled_tma_atom(load, mRows, lAh1, half_rows_box, **rounded)
        aHiddenHalf, tHiddenHalf = cpasync.make_tiled_tma_atom(load, mHidden, lAh1, half_rows_box, **rounded)
        lAf = cute.tile_to_shape(atom, (FEW_ROWS, k.line, STAGES * (TILE_ROWS // FEW_ROWS)), order=(0, 1, 2))
        lAf1, few = cute.slice_(lAf, (None, None, 0)), ()
        for rows in (mRows, mHidden):
            few += (*cpasync.make_tiled_tma_atom(load, rows, lAf1, (FEW_ROWS, k.line), **rounded),)
        # what a pair of blocks loads once, whole halves at a time, is for those that a mask names
        weights = cpasync.CopyBulkTensorTileG2SMulticastOp() if k.paired else load
        aFirst, tFirst = cpasync.make_tiled_tma_atom(weights, mFirst, lB1, half_box, **rounded)
        aSecond, tSecond = cpasync.make_tiled_tma_atom(weights, mSecond, lB1, half_box, **rounded)
        aOut, tOut = cpasync.make_tiled_tma_atom(store, mHidden, lC1, chunk_box)
        lBias = cute.make_layout((HALF_COLUMNS, 1, 2 * k.biases), stride=(1, HALF_COLUMNS, HALF_COLUMNS))
        bias, shared = (), ()
        if cutlass.const_expr(k.expert_bias):
            lBias1, bias_box = cute.slice_(lBias, (None, None, 0)), (HALF_COLUMNS, 1)
            for address, columns in ((w.first_bias, U), (w.second_bias, H)):
                mBias = cute.make_tensor(
                    gmem(address, dtype, 16), cute.make_layout((columns, slots), stride=(1, columns))
                )
                bias += (*cpasync.make_tiled_tma_atom(load, mBias, lBias1, bias_box),)
        if cutlass.const_expr(k.shared_intermediate > 0):
            W = k.shared_intermediate
            V = 2 * W if k.gated else W
            mSharedFirst = cute.make_tensor(gmem(w.shared_first, dtype, 16), cute.make_layout((V, H), stride=(H, 1)))
            mSharedSecond = cute.make_tensor(gmem(w.shared_second, dtype, 16), cute.make_layout((H, W), stride=(W, 1)))
            token_rows = ceil_div(tokens, TILE_ROWS) * TILE_ROWS
            mSharedHidden = cute.make_tensor(
                gmem(w.shared_hidden, dtype, 128), cute.make_layout((token_rows, W), stride=(W, 1))
            )
            shared += (*cpasync.make_tiled_tma_atom(load, mSharedFirst, lB1, half_box, **rounded),)
            shared += (*cpasync.make_tiled_tma_atom(load, mSharedSecond, lB1, half_box, **rounded),)
            shared += (*cpasync.make_tiled_tma_atom(load, mSharedHidden, lA1, rows_box, **rounded),)
            shared += (*cpasync.make_tiled_tma_atom(store, mSharedHidden, lC1, chunk_box),)
            shared += (*cpasync.make_tiled_tma_atom(load, mX, lA1, rows_box, **rounded),)

        # the rows that go along with a full row tile, and their ring in the epilogue buffers
        lE = cute.tile_to_shape(atom, (CARRIED_ROWS, k.line, STAGES), order=(0, 1, 2))
        following, hidden = (), ()
        if cutlass.const_expr(k.carries):
            lE1, hidden = cute.slice_(lE, (None, None, 0)), (mHidden,)
            for rows in (mRows, mHidden):
                following += (*cpasync.make_tiled_tma_atom(load, rows, lE1, (CARRIED_ROWS, k.line)),)

        @cute.struct
        class Shared:
            ab_full: cute.struct.MemRange[Int64, STAGES]
            ab_empty: cute.struct.MemRange[Int64, STAGES]
            word_full: cute.struct.MemRange[Int64, k.words]
            word_empty: cute.struct.MemRange[Int64, k.words]
            asked: cute.struct.MemRange[Int64, 1]
            chunk_full: cute.struct.MemRange[Int64, 4]
            chunk_empty: cute.struct.MemRange[Int64, 4]
            sent: cute.struct.MemRange[Int64, k.sent]
            over: cute.struct.MemRange[Int64, 1]
            shares: cute.struct.MemRange[Int64, SHARE_WORDS // 2]
            few_free: cute.struct.MemRange[Int64, int(k.carries)]
            peers: cute.struct.MemRange[Int64, k.ranks]
            slots: cute.struct.MemRange[Int64, k.words]
            sources: cute.struct.Align[cute.struct.MemRange[Int64, SOURCES if k.gathers else 0], 16]
            pair_full: cute.struct.MemRange[Int64, STAGES if k.paired else 0]
            pair_empty: cute.struct.MemRange[Int64, STAGES if k.paired else 0]
            inbox: cute.struct.MemRange[Int64, 3 if k.paired else 0]
            sBias: cute.struct.Align[cute.struct.MemRange[dtype, TILE_COLUMNS * k.biases if k.expert_bias else 0], 128]
            sA: cute.struct.Align[cute.struct.MemRange[operand, cute.cosize(lA)], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[operand, cute.cosize(lB)], 1024]
            sC: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(lC)], 1024]

        self.shared = Shared
        self.kernel(
            a, aX, tX, aXHalf, tXHalf, aRouter, tRouter, aRows, tRows, aHidden, tHidden, aFirst, tFirst, aSecond,
            tSecond, aOut, tOut, aRowsHalf, tRowsHalf, aHiddenHalf, tHiddenHalf, few, bias, shared, following, hidden,
            lE, lA, lA1, lX, lAh, lAf, lB, lBh, lG, lC, lCs, lBias,
        ).launch(
            grid=(grid, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream,
            **({"cluster": (2, 1, 1)} if k.paired else {}),
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, a: Args,
        aX: cute.CopyAtom, tX: cute.Tensor, aXHalf: cute.CopyAtom, tXHalf: cute.Tensor,
        aRouter: cute.CopyAtom, tRouter: cute.Tensor,
        aRows: cute.CopyAtom, tRows: cute.Tensor, aHidden: cute.CopyAtom, tHidden: cute.Tensor,
        aFirst: cute.CopyAtom, tFirst: cute.Tensor, aSecond: cute.CopyAtom, tSecond: cute.Tensor,
        aOut: cute.CopyAtom, tOut: cute.Tensor, aRowsHalf: cute.CopyAtom, tRowsHalf: cute.Tensor,
        aHiddenHalf: cute.CopyAtom, tHiddenHalf: cute.Tensor, few: tuple, bias: tuple, shared: tuple,
        following: tuple, hidden: tuple, lE: cute.ComposedLayout,
        lA: cute.ComposedLayout, lA1: cute.ComposedLayout, lX: cute.ComposedLayout,
        lAh: cute.ComposedLayout, lAf: cute.ComposedLayout,
        lB: cute.ComposedLayout, lBh: cute.ComposedLayout,
        lG: cute.ComposedLayout, lC: cute.ComposedLayout, lCs: cute.ComposedLayout, lBias: cute.Layout,
    ):  # fmt: skip
        """Hand out the roles; leave together.

        few: atoms and tensors of dispatched rows and hidden activations in boxes of FEW_ROWS rows.
        bias: atoms and tensors of the biases of both products; shared: of the shared expert's first and second weight,
        hidden to load and hidden to store, and of the tokens; both empty for a layer without. following: atoms
        and tensors of dispatched rows and hidden activations in boxes of CARRIED_ROWS rows, hidden: the activations
        themselves, where row tiles are carried.
        """
        k = self.shape
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        group = cute.arch.make_warp_uniform(thread // 128)
        processors = blocks
        if cutlass.const_expr(k.scheduler == "os_block"):
            processors = blocks - 1
        epoch = read(a.control, EPOCH)
        side = side_of(epoch)

        smem = utils.SmemAllocator()
        s = smem.allocate(self.shared)
        ab_full, ab_empty = s.ab_full.data_ptr(), s.ab_empty.data_ptr()
        word_full, word_empty = s.word_full.data_ptr(), s.word_empty.data_ptr()
        chunk_full, chunk_empty = s.chunk_full.data_ptr(), s.chunk_empty.data_ptr()
        sent, slots, asked = s.sent.data_ptr(), s.slots.data_ptr(), s.asked.data_ptr()
        few_free = s.few_free.data_ptr()
        shares = cute.recast_ptr(s.shares.data_ptr(), dtype=Int32)
        over = cute.recast_ptr(s.over.data_ptr(), dtype=Int32)
        if warp_id == 0:
            for descriptor in (
                aX,
                aXHalf,
                aRouter,
                aRows,
                aHidden,
                aFirst,
                aSecond,
                aOut,
                *few[::2],
                *bias[::2],
                *shared[::2],
                *following[::2],
            ):
                cpasync.prefetch_descriptor(descriptor)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(ab_full + i, 1)
                    cute.arch.mbarrier_init(ab_empty + i, 8)
                for i in cutlass.range_constexpr(4):
                    cute.arch.mbarrier_init(chunk_full + i, 4)
                    cute.arch.mbarrier_init(chunk_empty + i, 1)
                for i in cutlass.range_constexpr(k.sent):
                    cute.arch.mbarrier_init(sent + i, 8)
                if cutlass.const_expr(k.carries):
                    cute.arch.mbarrier_init(few_free, 8)
                cute.arch.store(over, Int32(0))
                cute.arch.store(shares + BLOCKS, Int32(blocks))
                cute.arch.store(shares + SIDE, side)
                for i in cutlass.range_constexpr(k.words):
                    cute.arch.mbarrier_init(word_full + i, 1)
                    cute.arch.mbarrier_init(word_empty + i, READERS)
                cute.arch.mbarrier_init(asked, 1)
                if cutlass.const_expr(k.paired):
                    for i in cutlass.range_constexpr(STAGES):
                        cute.arch.mbarrier_init(s.pair_full.data_ptr() + i, 1 + 32 * int(k.gathers))
                        cute.arch.mbarrier_init(s.pair_empty.data_ptr() + i, 16)
                    for i in cutlass.range_constexpr(2):
                        cute.arch.mbarrier_init(s.inbox.data_ptr() + 1 + i, 1)
        if thread < k.ranks:
            cute.arch.store(s.peers.data_ptr() + thread, read(a.peers, thread, Int64))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        pair = ()
        if cutlass.const_expr(k.paired):
            meet()
            inbox = s.inbox.data_ptr()
            pair = (s.pair_full.data_ptr(), s.pair_empty.data_ptr())

        sA = s.sA.get_tensor(lA.outer, swizzle=lA.inner)
        sX = s.sA.get_tensor(lX.outer, swizzle=lX.inner)
        sAh = s.sA.get_tensor(lAh.outer, swizzle=lAh.inner)
        sAf = s.sA.get_tensor(lAf.outer, swizzle=lAf.inner)
        sB = s.sB.get_tensor(lB.outer, swizzle=lB.inner)
        sBh = s.sB.get_tensor(lBh.outer, swizzle=lBh.inner)
        sG = cute.make_tensor(cute.recast_ptr(s.sB.data_ptr() + k.router_at * k.line, lG.inner), lG.outer)
        sC = s.sC.get_tensor(lC.outer, swizzle=lC.inner)
        sCs = s.sC.get_tensor(lCs.outer, swizzle=lCs.inner)
        # what TF32 leaves of a step of tokens, for the gate of float32 layers; as large as half of sC
        sRest = s.sC.get_tensor(lA1.outer, swizzle=lA1.inner, dtype=operand_type(self.dtype))
        # both warpgroups' first epilogue buffer
        sE = cute.make_tensor(cute.recast_ptr(s.sC.data_ptr(), lE.inner), lE.outer)
        sBias = s.sBias.data_ptr()
        scratch = cute.recast_ptr(s.sC.data_ptr(), dtype=Int32)

        if group == 0:
            cute.arch.setmaxregister_decrease(registers_of(k)[0])
            if block < processors:
                if warp_id == 0:
                    load(
                        k, a, aX, tX, aXHalf, tXHalf, aRouter, tRouter, aRows, tRows, aHidden, tHidden, aFirst, tFirst,
                        aSecond, tSecond, aRowsHalf, tRowsHalf, aHiddenHalf, tHiddenHalf, few, bias, shared, following,
                        sE, sA, sX, sAh, sAf, sBh, sG, cute.make_tensor(sBias, lBias), ab_full, ab_empty, slots,
                        word_full, word_empty, asked, few_free, pair,
                        (s.sources.data_ptr(), s.sA.data_ptr(), s.sC.data_ptr()), side, block, processors,
                        *gate_tiles(a.tokens, processors), lane,
                    )  # fmt: skip
                elif warp_id == 1:
                    if lane == 0:
                        if cutlass.const_expr(k.paired):
                            if member_of(block) == 0:
                                dispatch_pair_words(
                                    k, a, side, slots, word_full, word_empty, asked, shares, inbox, block, processors
                                )
                            else:
                                pass_words_on(k, a, side, slots, word_full, word_empty, shares, inbox, processors)
                        else:
                            dispatch_words(k, a, side, slots, word_full, word_empty, asked, shares, block, processors)
                elif warp_id == 2:
                    store(
                        k, a, aOut, tOut, shared, sCs, chunk_full, chunk_empty, sent, slots, word_full, word_empty,
                        over, side, block, lane,
                    )  # fmt: skip
                else:
                    spare(k, a, side, block, processors, over, lane)
            elif cutlass.const_expr(k.scheduler == "os_block"):
                if cute.arch.vote_all_sync(wait_plan(a, side, Role.SCHEDULER)):
                    row_tiles = read(a.plan, PlanWord.ROW_TILES)
                    if warp_id == 0:
                        schedule(k, a, side, row_tiles, processors, lane)
                    else:
                        subscribe(k, a, side, row_tiles, processors, (warp_id - 1) * 32 + lane)
        else:
            cute.arch.setmaxregister_increase(registers_of(k)[1])
            consume(
                k, a, sA, sAh, sB, sG, sC, sRest, sE, tuple(tensor.iterator for tensor in hidden), s.sA.data_ptr(),
                s.sC.data_ptr(), sBias, s.peers.data_ptr(), shares, scratch, ab_full, ab_empty, chunk_full, chunk_empty,
                few_free, sent, slots, word_full, word_empty, pair, epoch, side, block, blocks, processors,
                *gate_tiles(a.tokens, processors), thread - 128,
            )  # fmt: skip

        cute.arch.sync_threads()
        if cutlass.const_expr(k.paired):
            # nobody leaves while the other block still arrives at barriers here
            meet()
        if thread == 0:
            if fetch_add(a.control, EXITED) == cute.arch.load(shares + BLOCKS, Int32) - 1:
                write(a.control, EXITED, 0)
                if read(a.control, ABORT, sem="relaxed", scope="gpu") == 0:
                    # read anew, for no role leaves a register to keep it in
                    write(a.control, EPOCH, read(a.control, EPOCH) + 1)
