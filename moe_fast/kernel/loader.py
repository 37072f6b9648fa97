"""The loader warp: TMA loads of token tiles for the gate, then of every task's operands as soon as they are there; rows
that aren't where TMA would look for them are gathered (`gather`)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from moe_fast.kernel.constants import CARRIED_ROWS, FEW_ROWS, HALF_COLUMNS, SHARED_SLOT, TILE_ROWS
from moe_fast.kernel.gather import load_gathered_carrying, load_gathered_or_landed
from moe_fast.kernel.loads import load_bias, load_carrying, load_logits, load_product
from moe_fast.kernel.processor import fields_of, member_of, take_word, unpack
from moe_fast.kernel.ring import ring_place
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import (
    Args,
    Role,
    Wait,
    arrived_word,
    buffer_tile,
    done_word,
    read,
    shared_done,
    side_counters,
    wait_reached,
)
from moe_fast.kernel.tile_pairs import carried_tile, field_few, field_rows, field_same
from moe_ref.runtime.encoding import GEMM0, GEMM1, GEMM1_HIGH, STOP, task_slot


@cute.jit
def load(
    k: cutlass.Constexpr[KernelShape], a: Args,
    aX: cute.CopyAtom, tX: cute.Tensor, aXHalf: cute.CopyAtom, tXHalf: cute.Tensor,
    aRouter: cute.CopyAtom, tRouter: cute.Tensor,
    aRows: cute.CopyAtom, tRows: cute.Tensor, aHidden: cute.CopyAtom, tHidden: cute.Tensor,
    aFirst: cute.CopyAtom, tFirst: cute.Tensor, aSecond: cute.CopyAtom, tSecond: cute.Tensor,
    aRowsHalf: cute.CopyAtom, tRowsHalf: cute.Tensor, aHiddenHalf: cute.CopyAtom, tHiddenHalf: cute.Tensor,
    few: tuple, bias: tuple, shared: tuple, following: tuple, sE: cute.Tensor, sA: cute.Tensor, sX: cute.Tensor,
    sAh: cute.Tensor, sAf: cute.Tensor, sBh: cute.Tensor, sG: cute.Tensor,
    sBias: cute.Tensor, full: cute.Pointer, empty: cute.Pointer,
    slots: cute.Pointer, word_full: cute.Pointer, word_empty: cute.Pointer, asked: cute.Pointer,
    few_free: cute.Pointer, pair: tuple, memory: tuple, side: Int32, block: Int32, processors: Int32, height: Int32,
    token_tiles: Int32, lane: Int32,
):  # fmt: skip
    """The loader warp. pair: the stage barriers of a paired kernel's products. memory: in shared memory, where the
    addresses of gathered rows are kept, the row stages and the ring of the carried rows."""
    one = cute.make_layout(1)
    aRowsFew, tRowsFew, aHiddenFew, tHiddenFew = few
    pairs = []
    for atom, tensor, box, smem in (
        (aX, tX, (TILE_ROWS, k.line), sX),
        (aXHalf, tXHalf, (TILE_ROWS // 2, k.line), sAh),
        (aRows, tRows, (TILE_ROWS, k.line), sA),
        (aHidden, tHidden, (TILE_ROWS, k.line), sA),
        (aRouter, tRouter, (k.gate_columns, k.line), sG),
        (aRowsHalf, tRowsHalf, (TILE_ROWS // 2, k.line), sAh),
        (aHiddenHalf, tHiddenHalf, (TILE_ROWS // 2, k.line), sAh),
        (aRowsFew, tRowsFew, (FEW_ROWS, k.line), sAf),
        (aHiddenFew, tHiddenFew, (FEW_ROWS, k.line), sAf),
    ):
        tiled = cute.local_tile(tensor, box, (None, None))
        pairs.append(cpasync.tma_partition(atom, 0, one, cute.group_modes(smem, 0, 2), cute.group_modes(tiled, 0, 2)))
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
        pairs.append(cpasync.tma_partition(atom, 0, one, cute.group_modes(sBh, 0, 2), cute.group_modes(tiled, 0, 2)))
    (
        (sX, gX),
        (sXHalf, gXHalf),
        (sRows, gRows),
        (sHidden, gHidden),
        (sRouter, gRouter),
        (sRowsHalf, gRowsHalf),
        (sHiddenHalf, gHiddenHalf),
        (sRowsFew, gRowsFew),
        (sHiddenFew, gHiddenFew),
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

    turn = Int32(0)
    if cutlass.const_expr(k.carries):
        pairs = []
        aRowsNext, tRowsNext, aHiddenNext, tHiddenNext = following
        for atom, tensor in ((aRowsNext, tRowsNext), (aHiddenNext, tHiddenNext)):
            tiled = cute.local_tile(tensor, (CARRIED_ROWS, k.line), (None, None))
            pairs.append(cpasync.tma_partition(atom, 0, one, cute.group_modes(sE, 0, 2), cute.group_modes(tiled, 0, 2)))
        (sRowsNext, gRowsNext), (sHiddenNext, gHiddenNext) = pairs

    count = Int32(0)
    if a.given == 0:
        for tile in range(block, token_tiles, processors):
            # columns beyond E: TMA fills what is outside the router with zeros
            if height > TILE_ROWS // 2:
                count = load_logits(
                    k, full, empty, count, aX, gX[(None, tile, None)], sX, aRouter, gRouter[(None, 0, None)], sRouter,
                    TILE_ROWS, k.gate_steps(False),
                )  # fmt: skip
            else:
                count = load_logits(
                    k, full, empty, count, aXHalf, gXHalf[(None, tile, None)], sXHalf, aRouter,
                    gRouter[(None, 0, None)], sRouter, TILE_ROWS // 2, k.gate_steps(True),
                )  # fmt: skip
    counters = side_counters(a, side)
    arrived = a.heap + a.arrived_at + Int64(arrived_word(k, a, side, 0)) * 4
    targets = a.arrived_target + Int64(side * (a.rows // TILE_ROWS)) * 4
    if cutlass.const_expr(k.paired):
        # both blocks count the stages of their common tasks from 0 on, however many token tiles each has had
        full, empty = pair
        count = Int32(0)
    number, member = Int32(0), member_of(block)
    go = Boolean(True)
    while go:
        word = take_word(k, slots, word_full, word_empty, number)
        kind, row_tile, column = unpack(word)
        go = kind != STOP
        if go:
            expert = Int32(task_slot(word))
            fields = fields_of(word)
            couple = ()
            rows = field_rows(fields)
            if cutlass.const_expr(k.paired):
                couple = (field_same(fields) != 0, member)
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
                        gUpBias[(None, second, expert)], sFirstBias, ring_place(number, k.biases),
                    )  # fmt: skip
                else:
                    load_bias(
                        k, full, empty, count, aSecondBias, gSecondBias[(None, low, expert)],
                        gSecondBias[(None, high, expert)], sSecondBias, ring_place(number, k.biases),
                    )  # fmt: skip
            routed = Boolean(True)
            if cutlass.const_expr(k.shared_intermediate > 0):
                routed = expert != SHARED_SLOT
                if not routed:
                    if kind == GEMM0:
                        # a token tile is read where it is, nobody has to send it
                        count = load_product(
                            k, k.depth0, full, empty, count, aToken, gToken[(None, row_tile, None)], sToken,
                            aSharedFirst, gSharedFirst[(None, low, None)], gSharedUp[(None, high, None)],
                            sSharedFirst, asked, TILE_ROWS, couple,
                        )  # fmt: skip
                    else:
                        wait_reached(
                            counters, shared_done(a, row_tile), Int32(k.shared_columns0), a, Role.LOADER,
                            Wait.HIDDEN, row_tile, "gpu",
                        )  # fmt: skip
                        cute.arch.fence_proxy("async")
                        count = load_product(
                            k, k.shared_depth1, full, empty, count, aSharedHidden,
                            gSharedHidden[(None, row_tile, None)], sSharedHidden, aSharedSecond,
                            gSharedSecond[(None, low, None)], gSharedSecond[(None, high, None)], sSharedSecond,
                            asked, TILE_ROWS, couple,
                        )  # fmt: skip
            wanted = Int32(k.columns0)
            if cutlass.const_expr(k.carries):
                if field_few(fields) > 0:
                    # a full row tile and the few rows of the carried one
                    routed = Boolean(False)
                    other = carried_tile(fields, member, row_tile)
                    boxes = TILE_ROWS // CARRIED_ROWS
                    if kind == GEMM0:
                        for tile in (row_tile, other):
                            wait_reached(
                                arrived, tile * k.signal_words, read(targets, tile), a, Role.LOADER, Wait.ARRIVED, tile,
                                "sys",
                            )  # fmt: skip
                        gA, gB = gFirst[(None, low, None, expert)], gUp[(None, high, None, expert)]
                        if cutlass.const_expr(k.gathers):
                            count = load_gathered_carrying(
                                k, a, side, full, empty, count, row_tile, rows, other, field_few(fields), memory,
                                aFirst, gA, gB, sFirst, asked, few_free, turn, couple, lane,
                            )  # fmt: skip
                        else:
                            cute.arch.fence_proxy("async")
                            first = side * (a.rows // TILE_ROWS)
                            gNext = gRowsNext[(None, (first + other) * boxes, None)]
                            count = load_carrying(
                                k, k.depth0, full, empty, count, aRows, gRows[(None, first + row_tile, None)], sRows,
                                aFirst, gA, gB, sFirst, aRowsNext, gNext, sRowsNext, asked, few_free, turn, couple,
                            )  # fmt: skip
                    else:
                        # a whole tile pair's few hidden rows are half of either member's
                        beside = row_tile
                        if field_same(fields) != 0:
                            beside = row_tile + 1 - 2 * member
                        for tile in (row_tile, beside):
                            wait_reached(
                                counters, done_word(tile), wanted, a, Role.LOADER, Wait.HIDDEN, tile, "gpu"
                            )  # fmt: skip
                        cute.arch.fence_proxy("async")
                        gA, gB = gSecond[(None, low, None, expert)], gSecond[(None, high, None, expert)]
                        gNext = gHiddenNext[(None, other * boxes, None)]
                        count = load_carrying(
                            k, k.depth1, full, empty, count, aHidden, gHidden[(None, row_tile, None)], sHidden, aSecond,
                            gA, gB, sSecond, aHiddenNext, gNext, sHiddenNext, asked, few_free, turn, couple,
                        )  # fmt: skip
                    turn += 1
            if routed:
                few_box = TILE_ROWS // FEW_ROWS
                if kind == GEMM0:
                    tile = buffer_tile(k, a, row_tile)
                    wait_reached(
                        arrived, tile * k.signal_words, read(targets, tile), a, Role.LOADER, Wait.ARRIVED, row_tile,
                        "sys",
                    )  # fmt: skip
                    # peers write rows by ordinary stores, TMA reads them
                    cute.arch.fence_proxy("async")
                    gA, gB = gFirst[(None, low, None, expert)], gUp[(None, high, None, expert)]
                    tile = side * (a.rows // TILE_ROWS) + tile
                    if cutlass.const_expr(k.gathers):
                        count = load_gathered_or_landed(
                            k, a, side, full, empty, count, row_tile, rows, memory, aRows, gRows[(None, tile, None)],
                            sRows, aFirst, gA, gB, sFirst, asked, couple, lane,
                        )  # fmt: skip
                    elif rows > TILE_ROWS // 2:
                        count = load_product(
                            k, k.depth0, full, empty, count, aRows, gRows[(None, tile, None)], sRows, aFirst, gA, gB,
                            sFirst, asked, TILE_ROWS, couple,
                        )  # fmt: skip
                    elif rows > FEW_ROWS:
                        count = load_product(
                            k, k.depth0, full, empty, count, aRowsHalf, gRowsHalf[(None, tile * 2, None)],
                            sRowsHalf, aFirst, gA, gB, sFirst, asked, TILE_ROWS // 2, couple,
                        )  # fmt: skip
                    else:
                        count = load_product(
                            k, k.depth0, full, empty, count, aRowsFew,
                            gRowsFew[(None, tile * few_box, None)], sRowsFew, aFirst, gA, gB,
                            sFirst, asked, FEW_ROWS, couple,
                        )  # fmt: skip
                else:
                    wait_reached(
                        counters, done_word(row_tile), wanted, a, Role.LOADER, Wait.HIDDEN, row_tile, "gpu"
                    )  # fmt: skip
                    cute.arch.fence_proxy("async")
                    gA, gB = gSecond[(None, low, None, expert)], gSecond[(None, high, None, expert)]
                    half = Boolean(False)
                    if cutlass.const_expr(k.halves):
                        half = kind != GEMM1
                    if half:
                        upper = Int32(kind == GEMM1_HIGH)
                        count = load_product(
                            k, k.depth1, full, empty, count, aHiddenHalf,
                            gHiddenHalf[(None, row_tile * 2 + upper, None)], sHiddenHalf, aSecond, gA, gB, sSecond,
                            asked, TILE_ROWS // 2, couple, upper,
                        )  # fmt: skip
                    elif rows > TILE_ROWS // 2:
                        count = load_product(
                            k, k.depth1, full, empty, count, aHidden, gHidden[(None, row_tile, None)], sHidden,
                            aSecond, gA, gB, sSecond, asked, TILE_ROWS, couple,
                        )  # fmt: skip
                    elif rows > FEW_ROWS:
                        count = load_product(
                            k, k.depth1, full, empty, count, aHiddenHalf,
                            gHiddenHalf[(None, row_tile * 2, None)], sHiddenHalf, aSecond, gA, gB, sSecond,
                            asked, TILE_ROWS // 2, couple,
                        )  # fmt: skip
                    else:
                        count = load_product(
                            k, k.depth1, full, empty, count, aHiddenFew,
                            gHiddenFew[(None, row_tile * few_box, None)], sHiddenFew, aSecond,
                            gA, gB, sSecond, asked, FEW_ROWS, couple,
                        )  # fmt: skip
        number += 1
