"""The storer warp: first products to memory, completion of both, and the counters that tell others."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from moe_fast.kernel.constants import SHARED_SLOT, TILE_ROWS, PlanWord
from moe_fast.kernel.processor import count_returned, fields_of, member_of, release_hidden, take_word, unpack
from moe_fast.kernel.ring import ring_phase, ring_place
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import Args, add, note, read, shared_done, side_counters
from moe_fast.kernel.tile_pairs import field_rows, field_void, field_wide
from moe_fast.kernel.transport import count_put
from moe_ref.runtime.encoding import GEMM0, GEMM1, STOP, task_slot


@cute.jit
def store(
    k: cutlass.Constexpr[KernelShape], a: Args, aOut: cute.CopyAtom, tOut: cute.Tensor, shared: tuple,
    sCs: cute.Tensor,
    full: cute.Pointer, empty: cute.Pointer, sent: cute.Pointer, slots: cute.Pointer, word_full: cute.Pointer,
    word_empty: cute.Pointer, over: cute.Pointer, side: Int32, block: Int32, lane: Int32,
):  # fmt: skip
    """The storer warp."""
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
            fields = fields_of(word)
            rows = field_rows(fields)
            if cutlass.const_expr(k.paired):
                routed = field_void(fields) == 0
            # of a row tile's column tile, two of which are the whole
            halves = Int32(1)
            if cutlass.const_expr(k.halves):
                if kind == GEMM1:
                    halves = Int32(2)
            start = Int64(0)
            if cutlass.const_expr(k.trace):
                if kind == GEMM0:
                    cute.arch.mbarrier_wait(full, parity & 1)
                else:
                    cute.arch.mbarrier_wait(sent + ring_place(returns, k.sent), ring_phase(returns, k.sent))
                start = Int64(cute.arch.globaltimer())
            if kind == GEMM0:
                for c in cutlass.range_constexpr(chunks):
                    for q in cutlass.range_constexpr(2):
                        barrier = q * 2 + c % 2
                        cute.arch.mbarrier_wait(full + barrier, (parity + c // 2) & 1)
                        # columns beyond D are computed but not stored, nor are 64 rows of padding
                        used = routed
                        if cutlass.const_expr(q == 1):
                            used = used and rows > TILE_ROWS // 2
                        if used and (whole or column * chunks + c < k.intermediate // k.line):
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
                        release_hidden(k, a, side, row_tile, field_wide(fields), read(a.plan, PlanWord.ROW_TILES))
                    elif cutlass.const_expr(not k.paired):
                        add(side_counters(a, side), shared_done(a, row_tile), 1, "gpu", "release")
                parity += chunks // 2
            else:
                cute.arch.mbarrier_wait(sent + ring_place(returns, k.sent), ring_phase(returns, k.sent))
                if cutlass.const_expr(k.put):
                    count_put(k, a, side, row_tile, column, rows, routed, lane)
                else:
                    if cutlass.const_expr(k.paired):
                        if routed:
                            count_returned(k, a, side, row_tile, fields, member_of(block), routed, halves, lane)
                    else:
                        count_returned(k, a, side, row_tile, fields, member_of(block), routed, halves, lane)
                returns += 1
            if cutlass.const_expr(k.trace):
                if lane == 0:
                    note(a, block, 1, start, word)
        number += 1
    if lane == 0:
        cute.arch.store(over, Int32(1), sem="relaxed", scope="cta", ss="cta")
