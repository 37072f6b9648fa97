"""The persistent MoE megakernel: gate, dispatch, expert FFN, return and combine in one launch (FlashMoE, section 3).

`MegaKernel.__call__` runs on the host: it builds the TMA descriptors and launches one block per SM. `kernel` hands the
warps their roles:

    warp 0      loader      TMA: token tiles for the gate, then the operands of each task
    warp 1      dispatcher  the next task word
    warp 2      storer      results to memory and home, completion, counters
    warp 3      spare       pushes rows, then combines tokens whose results are back; in the first blocks Scheduler and
                            Subscribers (scheduler="spare_warps")
    warps 4-11  consumers   gate, send list, first rows, wgmma and epilogue, combine

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
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from moe_fast.kernel import gate
from moe_fast.kernel.combine import combine, combine_early
from moe_fast.kernel.dispatch import push_first, push_rest, wait_list
from moe_fast.kernel.gemm import (
    home_address,
    load_bias,
    load_logits,
    load_product,
    multiply,
    multiply_exactly,
    operand_type,
    pass_over,
    return_rows,
    store_chunks,
    tiled_mma,
)
from moe_fast.kernel.plan import list_routes, make_plan, publish_list, sync_consumers, wait_plan
from moe_fast.kernel.processor import (
    READERS,
    count_returned,
    dispatch_words,
    filled_rows,
    release_hidden,
    take_word,
    unpack,
)
from moe_fast.kernel.scheduler import schedule
from moe_fast.kernel.shapes import (
    HALF_COLUMNS,
    SHARED_SLOT,
    STAGES,
    THREADS,
    TILE_COLUMNS,
    TILE_ROWS,
    KernelShape,
    PlanWord,
)
from moe_fast.kernel.signals import (
    ABORT,
    EPOCH,
    EXITED,
    Args,
    Operands,
    Phase,
    Role,
    Wait,
    aborted,
    add,
    arrived_word,
    buffer_tile,
    done_word,
    fetch_add,
    gmem,
    home_of,
    note,
    read,
    shared_done,
    side_counters,
    wait_reached,
    write,
)
from moe_fast.kernel.subscriber import subscribe
from moe_fast.kernel.transport import put_results
from moe_ref.layout import ceil_div
from moe_ref.runtime.encoding import GEMM0, STOP, side_of, task_slot

LOAD_REGISTERS, MATH_REGISTERS = 104, 200
"""128 * 104 + 256 * 200 = 64,512, all registers of an SM. With 88 and 208 the spare warp spills."""
DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}


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
        lG = cute.tile_to_shape(atom, (k.gate_columns, k.line, STAGES), order=(0, 1, 2))
        lBh = cute.tile_to_shape(atom, (HALF_COLUMNS, k.line, STAGES * 2), order=(0, 1, 2))
        # one memory, two views: both warpgroups' 64 rows for the register copy, one 64 x 64 buffer for a TMA store
        lC = cute.tile_to_shape(atom, (TILE_ROWS, k.line, 2), order=(0, 1, 2))
        lCs = cute.tile_to_shape(atom, (64, k.line, 4), order=(0, 1, 2))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        lA1, lB1, lC1, lG1 = (cute.slice_(x, (None, None, 0)) for x in (lA, lBh, lCs, lG))
        rows_box, half_box, chunk_box = (TILE_ROWS, k.line), (HALF_COLUMNS, k.line), (64, k.line)
        lAh = cute.tile_to_shape(atom, (TILE_ROWS // 2, k.line, STAGES * 2), order=(0, 1, 2))
        lAh1, half_rows_box = cute.slice_(lAh, (None, None, 0)), (TILE_ROWS // 2, k.line)
        aX, tX = cpasync.make_tiled_tma_atom(load, mX, lA1, rows_box)
        aRouter, tRouter = cpasync.make_tiled_tma_atom(load, mRouter, lG1, (k.gate_columns, k.line), **rounded)
        aRows, tRows = cpasync.make_tiled_tma_atom(load, mRows, lA1, rows_box, **rounded)
        aHidden, tHidden = cpasync.make_tiled_tma_atom(load, mHidden, lA1, rows_box, **rounded)
        aRowsHalf, tRowsHalf = cpasync.make_tiled_tma_atom(load, mRows, lAh1, half_rows_box, **rounded)
        aHiddenHalf, tHiddenHalf = cpasync.make_tiled_tma_atom(load, mHidden, lAh1, half_rows_box, **rounded)
        aFirst, tFirst = cpasync.make_tiled_tma_atom(load, mFirst, lB1, half_box, **rounded)
        aSecond, tSecond = cpasync.make_tiled_tma_atom(load, mSecond, lB1, half_box, **rounded)
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
            peers: cute.struct.MemRange[Int64, k.ranks]
            slots: cute.struct.MemRange[Int64, k.words]
            sBias: cute.struct.Align[cute.struct.MemRange[dtype, TILE_COLUMNS * k.biases if k.expert_bias else 0], 128]
            sA: cute.struct.Align[cute.struct.MemRange[operand, cute.cosize(lA)], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[operand, cute.cosize(lB)], 1024]
            sC: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(lC)], 1024]

        self.shared = Shared
        self.kernel(
            a, aX, tX, aRouter, tRouter, aRows, tRows, aHidden, tHidden, aFirst, tFirst, aSecond, tSecond, aOut, tOut,
            aRowsHalf, tRowsHalf, aHiddenHalf, tHiddenHalf, bias, shared, lA, lA1, lAh, lB, lBh, lG, lC, lCs, lBias,
        ).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, a: Args,
        aX: cute.CopyAtom, tX: cute.Tensor, aRouter: cute.CopyAtom, tRouter: cute.Tensor,
        aRows: cute.CopyAtom, tRows: cute.Tensor, aHidden: cute.CopyAtom, tHidden: cute.Tensor,
        aFirst: cute.CopyAtom, tFirst: cute.Tensor, aSecond: cute.CopyAtom, tSecond: cute.Tensor,
        aOut: cute.CopyAtom, tOut: cute.Tensor, aRowsHalf: cute.CopyAtom, tRowsHalf: cute.Tensor,
        aHiddenHalf: cute.CopyAtom, tHiddenHalf: cute.Tensor, bias: tuple, shared: tuple,
        lA: cute.ComposedLayout, lA1: cute.ComposedLayout, lAh: cute.ComposedLayout, lB: cute.ComposedLayout,
        lBh: cute.ComposedLayout,
        lG: cute.ComposedLayout, lC: cute.ComposedLayout, lCs: cute.ComposedLayout, lBias: cute.Layout,
    ):  # fmt: skip
        """Hand out the roles; leave together.

        bias: atoms and tensors of the biases of both products; shared: of the shared expert's first and second weight,
        hidden to load and hidden to store, and of the tokens; both empty for a layer without.
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
        over = cute.recast_ptr(s.over.data_ptr(), dtype=Int32)
        if warp_id == 0:
            for descriptor in (aX, aRouter, aRows, aHidden, aFirst, aSecond, aOut, *bias[::2], *shared[::2]):
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
                cute.arch.store(over, Int32(0))
                for i in cutlass.range_constexpr(k.words):
                    cute.arch.mbarrier_init(word_full + i, 1)
                    cute.arch.mbarrier_init(word_empty + i, READERS)
                cute.arch.mbarrier_init(asked, 1)
        if thread < k.ranks:
            cute.arch.store(s.peers.data_ptr() + thread, read(a.peers, thread, Int64))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        sA = s.sA.get_tensor(lA.outer, swizzle=lA.inner)
        sAh = s.sA.get_tensor(lAh.outer, swizzle=lAh.inner)
        sB = s.sB.get_tensor(lB.outer, swizzle=lB.inner)
        sBh = s.sB.get_tensor(lBh.outer, swizzle=lBh.inner)
        sG = s.sB.get_tensor(lG.outer, swizzle=lG.inner)
        sC = s.sC.get_tensor(lC.outer, swizzle=lC.inner)
        sCs = s.sC.get_tensor(lCs.outer, swizzle=lCs.inner)
        # what TF32 leaves of a step of tokens, for the gate of float32 layers; as large as half of sC
        sRest = s.sC.get_tensor(lA1.outer, swizzle=lA1.inner, dtype=operand_type(self.dtype))
        sBias = s.sBias.data_ptr()
        scratch = cute.recast_ptr(s.sC.data_ptr(), dtype=Int32)
        token_tiles = ceil_div(a.tokens, TILE_ROWS)

        if group == 0:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if block < processors:
                if warp_id == 0:
                    self.load(
                        a, aX, tX, aRouter, tRouter, aRows, tRows, aHidden, tHidden, aFirst, tFirst, aSecond, tSecond,
                        aRowsHalf, tRowsHalf, aHiddenHalf, tHiddenHalf, bias, shared, sA, sAh, sBh, sG,
                        cute.make_tensor(sBias, lBias), ab_full, ab_empty, slots, word_full, word_empty, asked, side,
                        block, processors, token_tiles,
                    )  # fmt: skip
                elif warp_id == 1:
                    if lane == 0:
                        dispatch_words(k, a, side, slots, word_full, word_empty, asked, block, processors)
                elif warp_id == 2:
                    self.store(
                        a, aOut, tOut, shared, sCs, chunk_full, chunk_empty, sent, slots, word_full, word_empty, over,
                        side, block, lane,
                    )  # fmt: skip
                else:
                    self.spare(a, side, block, processors, over, lane)
            elif cutlass.const_expr(k.scheduler == "os_block"):
                if wait_plan(a, side, Role.SCHEDULER):
                    row_tiles = read(a.plan, PlanWord.ROW_TILES)
                    if warp_id == 0:
                        schedule(k, a, side, row_tiles, processors, lane)
                    else:
                        subscribe(k, a, side, row_tiles, (warp_id - 1) * 32 + lane)
        else:
            cute.arch.setmaxregister_increase(MATH_REGISTERS)
            self.consume(
                a, sA, sB, sG, sC, sRest, s.sA.data_ptr(), s.sC.data_ptr(), sBias, s.peers.data_ptr(), scratch,
                ab_full, ab_empty, chunk_full, chunk_empty, sent, slots, word_full, word_empty, epoch, side,
                block, blocks, processors, token_tiles, thread - 128,
            )  # fmt: skip

        cute.arch.sync_threads()
        if thread == 0:
            if fetch_add(a.control, EXITED) == blocks - 1:
                write(a.control, EXITED, 0)
                if read(a.control, ABORT, sem="relaxed", scope="gpu") == 0:
                    write(a.control, EPOCH, epoch + 1)

    @cute.jit
    def now(self) -> Int64:
        """globaltimer in ns in traced variants, else 0."""
        time = Int64(0)
        if cutlass.const_expr(self.shape.trace):
            time = Int64(cute.arch.globaltimer())
        return time

    @cute.jit
    def mark(self, a: Args, block: Int32, track: cutlass.Constexpr, start: Int64, what: cutlass.Constexpr, me: Boolean):
        """In traced variants the thread `me` notes a phase."""
        if cutlass.const_expr(self.shape.trace):
            if me:
                note(a, block, track, start, Int64(what))

    @cute.jit
    def load(
        self, a: Args, aX: cute.CopyAtom, tX: cute.Tensor, aRouter: cute.CopyAtom, tRouter: cute.Tensor,
        aRows: cute.CopyAtom, tRows: cute.Tensor, aHidden: cute.CopyAtom, tHidden: cute.Tensor,
        aFirst: cute.CopyAtom, tFirst: cute.Tensor, aSecond: cute.CopyAtom, tSecond: cute.Tensor,
        aRowsHalf: cute.CopyAtom, tRowsHalf: cute.Tensor, aHiddenHalf: cute.CopyAtom, tHiddenHalf: cute.Tensor,
        bias: tuple, shared: tuple, sA: cute.Tensor, sAh: cute.Tensor, sBh: cute.Tensor, sG: cute.Tensor,
        sBias: cute.Tensor, full: cute.Pointer, empty: cute.Pointer,
        slots: cute.Pointer, word_full: cute.Pointer, word_empty: cute.Pointer, asked: cute.Pointer,
        side: Int32, block: Int32, processors: Int32, token_tiles: Int32,
    ):  # fmt: skip
        """The loader warp."""
        k = self.shape
        one = cute.make_layout(1)
        pairs = []
        for atom, tensor, box, smem in (
            (aX, tX, (TILE_ROWS, k.line), sA),
            (aRows, tRows, (TILE_ROWS, k.line), sA),
            (aHidden, tHidden, (TILE_ROWS, k.line), sA),
            (aRouter, tRouter, (k.gate_columns, k.line), sG),
            (aRowsHalf, tRowsHalf, (TILE_ROWS // 2, k.line), sAh),
            (aHiddenHalf, tHiddenHalf, (TILE_ROWS // 2, k.line), sAh),
        ):
            tiled = cute.local_tile(tensor, box, (None, None))
            pairs.append(
                cpasync.tma_partition(atom, 0, one, cute.group_modes(smem, 0, 2), cute.group_modes(tiled, 0, 2))
            )
        # A gated task takes gate rows and up rows, D apart: the up rows are the same tensor seen from row D on. Rows
        # beyond the matrix are zeros (TMA), columns beyond D are not stored.
        # Interleaved rows are two matrices in one tensor already.
        tGate, tUp = tFirst, tFirst
        if cutlass.const_expr(k.interleaved):
            tGate, tUp = tFirst[(None, None, 0, None)], tFirst[(None, None, 1, None)]
        elif cutlass.const_expr(k.gated):
            tUp = cute.domain_offset((k.intermediate, 0, 0), tFirst)
        for atom, tensor in ((aFirst, tGate), (aFirst, tUp), (aSecond, tSecond)):
            tiled = cute.local_tile(tensor, (HALF_COLUMNS, k.line), (None, None, None))
            pairs.append(
                cpasync.tma_partition(atom, 0, one, cute.group_modes(sBh, 0, 2), cute.group_modes(tiled, 0, 2))
            )
        (
            (sX, gX),
            (sRows, gRows),
            (sHidden, gHidden),
            (sRouter, gRouter),
            (sRowsHalf, gRowsHalf),
            (sHiddenHalf, gHiddenHalf),
            (sFirst, gFirst),
            (_, gUp),
            (sSecond, gSecond),
        ) = pairs
        if cutlass.const_expr(k.expert_bias):
            aFirstBias, tFirstBias, aSecondBias, tSecondBias = bias
            tUpBias = tFirstBias
            if cutlass.const_expr(k.gated and not k.interleaved):
                tUpBias = cute.domain_offset((k.intermediate, 0), tFirstBias)
            pairs = []
            for atom, tensor in ((aFirstBias, tFirstBias), (aFirstBias, tUpBias), (aSecondBias, tSecondBias)):
                tiled = cute.local_tile(tensor, (HALF_COLUMNS, 1), (None, None))
                pairs.append(
                    cpasync.tma_partition(atom, 0, one, cute.group_modes(sBias, 0, 2), cute.group_modes(tiled, 0, 2))
                )
            (sFirstBias, gFirstBias), (_, gUpBias), (sSecondBias, gSecondBias) = pairs
        if cutlass.const_expr(k.shared_intermediate > 0):
            aSharedFirst, tSharedFirst, aSharedSecond, tSharedSecond, aSharedHidden, tSharedHidden = shared[:6]
            aToken, tToken = shared[8:]
            tSharedUp = tSharedFirst
            if cutlass.const_expr(k.gated):
                tSharedUp = cute.domain_offset((k.shared_intermediate, 0), tSharedFirst)
            pairs = []
            for atom, tensor, rows, smem in (
                (aSharedFirst, tSharedFirst, HALF_COLUMNS, sBh),
                (aSharedFirst, tSharedUp, HALF_COLUMNS, sBh),
                (aSharedSecond, tSharedSecond, HALF_COLUMNS, sBh),
                (aSharedHidden, tSharedHidden, TILE_ROWS, sA),
                (aToken, tToken, TILE_ROWS, sA),
            ):
                tiled = cute.local_tile(tensor, (rows, k.line), (None, None))
                pairs.append(
                    cpasync.tma_partition(atom, 0, one, cute.group_modes(smem, 0, 2), cute.group_modes(tiled, 0, 2))
                )
            (
                (sSharedFirst, gSharedFirst),
                (_, gSharedUp),
                (sSharedSecond, gSharedSecond),
                (sSharedHidden, gSharedHidden),
                (sToken, gToken),
            ) = pairs

        count = Int32(0)
        if a.given == 0:
            for tile in range(block, token_tiles, processors):
                # columns beyond E: TMA fills what is outside the router with zeros
                count = load_logits(
                    k, full, empty, count, aX, gX[(None, tile, None)], sX, aRouter, gRouter[(None, 0, None)], sRouter
                )
        counters = side_counters(a, side)
        arrived = a.heap + a.arrived_at + Int64(arrived_word(k, a, side, 0)) * 4
        targets = a.arrived_target + Int64(side * (a.rows // TILE_ROWS)) * 4
        number = Int32(0)
        go = Boolean(True)
        while go:
            word = take_word(k, slots, word_full, word_empty, number)
            kind, row_tile, column = unpack(word)
            go = kind != STOP
            if go:
                expert = Int32(task_slot(word))
                low, high = column * 2, column * 2 + 1
                if cutlass.const_expr(k.gated):
                    if kind == GEMM0:
                        low, high = column, column
                if cutlass.const_expr(k.expert_bias):
                    # the shared expert's slot lies outside the tensors: TMA brings zeros
                    if kind == GEMM0:
                        first, second = low, high
                        if cutlass.const_expr(k.interleaved):
                            first, second = column * 2, column * 2 + 1
                        load_bias(
                            k, full, empty, count, aFirstBias, gFirstBias[(None, first, expert)],
                            gUpBias[(None, second, expert)], sFirstBias, number % k.biases,
                        )  # fmt: skip
                    else:
                        load_bias(
                            k, full, empty, count, aSecondBias, gSecondBias[(None, low, expert)],
                            gSecondBias[(None, high, expert)], sSecondBias, number % k.biases,
                        )  # fmt: skip
                routed = Boolean(True)
                if cutlass.const_expr(k.shared_intermediate > 0):
                    routed = expert != SHARED_SLOT
                    if not routed:
                        if kind == GEMM0:
                            # a token tile is read where it is, nobody has to send it
                            count = load_product(
                                k.depth0, full, empty, count, aToken, gToken[(None, row_tile, None)], sToken,
                                aSharedFirst, gSharedFirst[(None, low, None)], gSharedUp[(None, high, None)],
                                sSharedFirst, asked, TILE_ROWS,
                            )  # fmt: skip
                        else:
                            wait_reached(
                                counters, shared_done(a, row_tile), Int32(k.shared_columns0), a, Role.LOADER,
                                Wait.HIDDEN, row_tile, "gpu",
                            )  # fmt: skip
                            cute.arch.fence_proxy("async")
                            count = load_product(
                                k.shared_depth1, full, empty, count, aSharedHidden,
                                gSharedHidden[(None, row_tile, None)], sSharedHidden, aSharedSecond,
                                gSharedSecond[(None, low, None)], gSharedSecond[(None, high, None)], sSharedSecond,
                                asked, TILE_ROWS,
                            )  # fmt: skip
                if routed:
                    if kind == GEMM0:
                        tile = buffer_tile(k, a, row_tile)
                        wait_reached(
                            arrived, tile * k.signal_words, read(targets, tile), a, Role.LOADER, Wait.ARRIVED, row_tile,
                            "sys",
                        )  # fmt: skip
                        cute.arch.fence_proxy("async")
                        gA, gB = gFirst[(None, low, None, expert)], gUp[(None, high, None, expert)]
                        tile = side * (a.rows // TILE_ROWS) + tile
                        if filled_rows(word) > TILE_ROWS // 2:
                            count = load_product(
                                k.depth0, full, empty, count, aRows, gRows[(None, tile, None)], sRows, aFirst, gA, gB,
                                sFirst, asked, TILE_ROWS,
                            )  # fmt: skip
                        else:
                            count = load_product(
                                k.depth0, full, empty, count, aRowsHalf, gRowsHalf[(None, tile * 2, None)], sRowsHalf,
                                aFirst, gA, gB, sFirst, asked, TILE_ROWS // 2,
                            )  # fmt: skip
                    else:
                        wait_reached(
                            counters, done_word(row_tile), Int32(k.columns0), a, Role.LOADER, Wait.HIDDEN, row_tile,
                            "gpu",
                        )  # fmt: skip
                        cute.arch.fence_proxy("async")
                        gA, gB = gSecond[(None, low, None, expert)], gSecond[(None, high, None, expert)]
                        if filled_rows(word) > TILE_ROWS // 2:
                            count = load_product(
                                k.depth1, full, empty, count, aHidden, gHidden[(None, row_tile, None)], sHidden,
                                aSecond, gA, gB, sSecond, asked, TILE_ROWS,
                            )  # fmt: skip
                        else:
                            count = load_product(
                                k.depth1, full, empty, count, aHiddenHalf, gHiddenHalf[(None, row_tile * 2, None)],
                                sHiddenHalf, aSecond, gA, gB, sSecond, asked, TILE_ROWS // 2,
                            )  # fmt: skip
            number += 1

    @cute.jit
    def store(
        self, a: Args, aOut: cute.CopyAtom, tOut: cute.Tensor, shared: tuple, sCs: cute.Tensor,
        full: cute.Pointer, empty: cute.Pointer, sent: cute.Pointer, slots: cute.Pointer, word_full: cute.Pointer,
        word_empty: cute.Pointer, over: cute.Pointer, side: Int32, block: Int32, lane: Int32,
    ):  # fmt: skip
        """The storer warp."""
        k = self.shape
        one = cute.make_layout(1)
        tiled = cute.local_tile(tOut, (64, k.line), (None, None))
        sOut, gOut = cpasync.tma_partition(aOut, 0, one, cute.group_modes(sCs, 0, 2), cute.group_modes(tiled, 0, 2))
        chunks = k.chunks0
        whole = k.intermediate % (chunks * k.line) == 0
        if cutlass.const_expr(k.shared_intermediate > 0):
            tiled = cute.local_tile(shared[7], (64, k.line), (None, None))
            _, gShared = cpasync.tma_partition(
                shared[6], 0, one, cute.group_modes(sCs, 0, 2), cute.group_modes(tiled, 0, 2)
            )
        number, parity, returns = Int32(0), Int32(0), Int32(0)
        go = Boolean(True)
        while go:
            word = take_word(k, slots, word_full, word_empty, number)
            kind, row_tile, column = unpack(word)
            go = kind != STOP
            if go:
                routed = Boolean(True)
                if cutlass.const_expr(k.shared_intermediate > 0):
                    routed = Int32(task_slot(word)) != SHARED_SLOT
                start = Int64(0)
                if cutlass.const_expr(k.trace):
                    if kind == GEMM0:
                        cute.arch.mbarrier_wait(full, parity & 1)
                    else:
                        cute.arch.mbarrier_wait(sent + returns % k.sent, (returns // k.sent) & 1)
                    start = Int64(cute.arch.globaltimer())
                if kind == GEMM0:
                    for c in cutlass.range_constexpr(chunks):
                        for q in cutlass.range_constexpr(2):
                            barrier = q * 2 + c % 2
                            cute.arch.mbarrier_wait(full + barrier, (parity + c // 2) & 1)
                            # columns beyond D are computed but not stored
                            if routed and (whole or column * chunks + c < k.intermediate // k.line):
                                cute.copy(
                                    aOut, sOut[(None, q + 2 * (c % 2))],
                                    gOut[(None, row_tile * 2 + q, column * chunks + c)],
                                )  # fmt: skip
                            if cutlass.const_expr(k.shared_intermediate > 0):
                                if not routed and column * chunks + c < k.shared_depth1:
                                    cute.copy(
                                        shared[6], sOut[(None, q + 2 * (c % 2))],
                                        gShared[(None, row_tile * 2 + q, column * chunks + c)],
                                    )  # fmt: skip
                            cute.arch.cp_async_bulk_commit_group()
                            if cutlass.const_expr(c * 2 + q > 0):
                                before = c * 2 + q - 1
                                cute.arch.cp_async_bulk_wait_group(1, read=True)
                                cute.arch.sync_warp()
                                with cute.arch.elect_one():
                                    cute.arch.mbarrier_arrive(empty + (before % 2 * 2 + before // 2 % 2))
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(empty + 3)
                    # written, then visible to others, then counted
                    cute.arch.cp_async_bulk_wait_group(0)
                    cute.arch.fence_proxy("async")
                    cute.arch.sync_warp()
                    if lane == 0:
                        if routed:
                            release_hidden(k, a, side, row_tile, read(a.plan, PlanWord.ROW_TILES))
                        else:
                            add(side_counters(a, side), shared_done(a, row_tile), 1, "gpu", "release")
                    parity += chunks // 2
                else:
                    cute.arch.mbarrier_wait(sent + returns % k.sent, (returns // k.sent) & 1)
                    if cutlass.const_expr(k.put):
                        put_results(k, a, side, row_tile, filled_rows(word), routed, lane)
                    else:
                        count_returned(k, a, side, row_tile, filled_rows(word), routed, lane)
                    returns += 1
                if cutlass.const_expr(k.trace):
                    if lane == 0:
                        note(a, block, 1, start, word)
            number += 1
        if lane == 0:
            cute.arch.store(over, Int32(1), sem="relaxed", scope="cta", ss="cta")

    @cute.jit
    def spare(self, a: Args, side: Int32, block: Int32, processors: Int32, over: cute.Pointer, lane: Int32):
        """The spare warp: zero the other side's counters, then schedule, subscribe, or push rows and combine."""
        k = self.shape
        other = side_counters(a, 1 - side)
        for i in range(block * 32 + lane, a.counter_words, processors * 32):
            write(other, i, 0)
        if wait_plan(a, side, Role.DISPATCH):
            pushes = Boolean(True)
            if cutlass.const_expr(k.scheduler == "spare_warps"):
                row_tiles = read(a.plan, PlanWord.ROW_TILES)
                if block == 0:
                    pushes = Boolean(False)
                    schedule(k, a, side, row_tiles, processors, lane)
                elif block < 4:
                    pushes = Boolean(False)
                    subscribe(k, a, side, row_tiles, (block - 1) * 32 + lane)
            if pushes:
                wait_list(a, side, processors)
                start = self.now()
                push_rest(k, a, side, lane)
                self.mark(a, block, 2, start, Phase.PUSH, lane == 0)
                first = block
                if cutlass.const_expr(k.scheduler == "spare_warps"):
                    first = block - 4
                usable = Boolean(True)
                if cutlass.const_expr(k.fixed):
                    # without a plan nobody has written where results come back
                    usable = read(a.plan, PlanWord.USABLE) != 0
                if usable:
                    combine_early(k, self.dtype, a, side, first, processors - (block - first), over, block, lane)

    @cute.jit
    def consume(
        self, a: Args, sA: cute.Tensor, sB: cute.Tensor, sG: cute.Tensor, sC: cute.Tensor, sRest: cute.Tensor,
        rows_memory: cute.Pointer, memory: cute.Pointer,
        sBias: cute.Pointer, peers: cute.Pointer, scratch: cute.Pointer, full: cute.Pointer, empty: cute.Pointer,
        chunk_full: cute.Pointer, chunk_empty: cute.Pointer, sent: cute.Pointer, slots: cute.Pointer,
        word_full: cute.Pointer, word_empty: cute.Pointer, epoch: Int32, side: Int32,
        block: Int32, blocks: Int32, processors: Int32, token_tiles: Int32, thread: Int32,
    ):  # fmt: skip
        """The two consumer warpgroups, 256 threads."""
        k, dtype = self.shape, self.dtype
        lane = thread % 32
        warp_id = cute.arch.make_warp_uniform(thread // 32)
        group = cute.arch.make_warp_uniform(thread // 128)
        gate_mma = tiled_mma(dtype, k.gate_columns)
        gate_thr = gate_mma.get_slice(group * 128)
        gate_a = gate_mma.make_fragment_A(gate_thr.partition_A(sA))
        gate_b = gate_mma.make_fragment_B(gate_thr.partition_B(sG))
        if cutlass.const_expr(dtype is Float32):
            gate_rest = gate_mma.make_fragment_A(gate_thr.partition_A(sRest))
        logits = cute.make_rmem_tensor(gate_thr.partition_shape_C((TILE_ROWS, k.gate_columns)), Float32)
        count = Int32(0)

        # who goes where
        if block < processors:
            gate.stage_biases(k, dtype, a, scratch, thread)
            for tile in range(block, token_tiles, processors):
                start = self.now()
                if a.given == 0:
                    if cutlass.const_expr(dtype is Float32):
                        count = multiply_exactly(
                            dtype, k.gate_columns, logits, gate_a, gate_b, gate_rest, rows_memory, memory, full, empty,
                            count, k.depth0, thread,
                        )  # fmt: skip
                    else:
                        count = multiply(
                            dtype, k.gate_columns, logits, gate_a, gate_b, full, empty, count, Int32(k.gate_depth)
                        )
                    gate.choose(k, a, logits, tile, scratch, thread)
                else:
                    gate.take_given(k, a, tile, scratch, thread)
                gate.rank_routes(k, a, side, tile, scratch, thread)
                self.mark(a, block, 0, start, Phase.GATE, thread == 0)
        if block == blocks - 1:
            sync_consumers()
            start = self.now()
            make_plan(k, a, epoch, side, scratch, thread)
            self.mark(a, block, 0, start, Phase.PLAN, thread == 0)
        if thread == 0:
            wait_plan(a, side, Role.GATE)
        sync_consumers()
        start = self.now()
        if block < processors:
            if read(a.plan, PlanWord.USABLE) != 0 and not aborted(a):
                for tile in range(block, token_tiles, processors):
                    list_routes(k, a, side, tile, thread)
            publish_list(a, side, thread)
        if thread == 0:
            wait_list(a, side, processors)
        sync_consumers()

        self.mark(a, block, 0, start, Phase.LIST, thread == 0)

        # the first rows, with all hands
        start = self.now()
        push_first(k, a, side, block * 8 + warp_id, blocks * 8, lane)
        self.mark(a, block, 0, start, Phase.PUSH, thread == 0)

        # the products; their addresses are worked out only here, for the gate has no register to spare
        mma = tiled_mma(dtype)
        thr = mma.get_slice(group * 128)
        a_frag = mma.make_fragment_A(thr.partition_A(sA))
        b_frag = mma.make_fragment_B(thr.partition_B(sB))
        acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE_ROWS, TILE_COLUMNS)), Float32)
        copy = ()
        if cutlass.const_expr(dtype is not Float32):
            copy_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
            tiled_copy = cute.make_tiled_copy_S(copy_atom, cute.make_tiled_copy_C_atom(copy_atom, mma))
            thr_copy = tiled_copy.get_slice(thread)
            shape = cute.shape(thr_copy.partition_S(sC))[:3]
            copy = (tiled_copy, thr_copy.partition_D(sC), cute.make_rmem_tensor(shape, dtype))

        number, parity, returns = Int32(0), Int32(0), Int32(0)
        go = Boolean(block < processors)
        while go:
            word = take_word(k, slots, word_full, word_empty, number)
            kind, row_tile, column = unpack(word)
            go = kind != STOP
            if go:
                depth = Int32(k.depth1)
                if kind == GEMM0:
                    depth = Int32(k.depth0)
                routed = Boolean(True)
                if cutlass.const_expr(k.shared_intermediate > 0):
                    routed = Int32(task_slot(word)) != SHARED_SLOT
                    if kind != GEMM0 and not routed:
                        depth = Int32(k.shared_depth1)
                filled = filled_rows(word)
                # the wait for the first operands is not work
                cute.arch.mbarrier_wait(full + count % STAGES, (count // STAGES) & 1)
                start = self.now()
                home, place = Int32(0), Int32(0)
                if kind != GEMM0 and routed:
                    # Asked for now, when the rows and their homes have arrived for sure, and first looked at after the
                    # product: a thread that used it here would hold its product up for the time of a load.
                    place = buffer_tile(k, a, row_tile) * TILE_ROWS + warp_id * 16 + lane % 16
                    home = home_of(k, a, side, place)
                if group == 0 or filled > TILE_ROWS // 2:
                    count = multiply(dtype, TILE_COLUMNS, acc, a_frag, b_frag, full, empty, count, depth)
                else:
                    count = pass_over(full, empty, count, depth)
                if cutlass.const_expr(k.trace):
                    if thread == 0:
                        note(a, block, 3, start, word)
                    if thread == 128:
                        note(a, block, 4, start, word)
                if kind == GEMM0:
                    store_chunks(
                        k, dtype, group, parity, acc, copy, memory, chunk_full, chunk_empty,
                        sBias + number % k.biases * TILE_COLUMNS, thread,
                    )  # fmt: skip
                    parity += k.chunks0 // 2
                else:
                    row = warp_id * 16 + lane % 16
                    address = home_address(
                        k, a, side, home, row < filled and routed, peers, row_tile * TILE_ROWS + row, place
                    )  # fmt: skip
                    if cutlass.const_expr(k.shared_intermediate > 0):
                        if row < filled and not routed:
                            token = Int64(row_tile * TILE_ROWS + row)
                            address = a.shared_rows + token * (k.hidden * k.element_size)
                    return_rows(
                        k, dtype, address, column, group, parity, acc, copy, memory, chunk_empty,
                        sBias + number % k.biases * TILE_COLUMNS, thread,
                    )  # fmt: skip
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(sent + returns % k.sent)
                    returns += 1
                if cutlass.const_expr(k.trace):
                    if thread == 0:
                        note(a, block, 0, start, word)
            number += 1

        start = self.now()
        if read(a.plan, PlanWord.USABLE) != 0 and not aborted(a):
            combine(k, dtype, a, side, block * 8 + warp_id, blocks * 8, lane)
        self.mark(a, block, 0, start, Phase.COMBINE, thread == 0)
