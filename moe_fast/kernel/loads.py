"""Operands of a task and of the gate by TMA, step by step into the stages of the pipeline; see `gemm`. Rows that TMA
can't fetch are loaded by `gather`."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32

from moe_fast.kernel.constants import (
    AHEAD,
    CARRIED_ROWS,
    LINE_BYTES,
    STAGES,
    TILE_COLUMNS,
    TILE_ROWS,
)
from moe_fast.kernel.shapes import KernelShape


@cute.jit
def load_weights(
    k: cutlass.Constexpr[KernelShape], weight_atom: cute.CopyAtom, first_half: cute.Tensor, second_half: cute.Tensor,
    weight_smem: cute.Tensor, step: Int32, full: cute.Pointer, stage: Int32, pair: tuple,
):  # fmt: skip
    """The weights of one step of a task.

    pair: in a paired kernel whether both blocks multiply by the same weights, and which of the two this is. Then each
    loads one half of them for both; a stage is as full either way.
    """
    if cutlass.const_expr(k.paired):
        same, member = pair
        targets = Int16(1) << Int16(member)
        if same:
            targets = Int16(3)
        if not same or member == 0:
            cute.copy(
                weight_atom, first_half[(None, step)], weight_smem[(None, stage * 2)], tma_bar_ptr=full + stage,
                mcast_mask=targets,
            )  # fmt: skip
        if not same or member == 1:
            cute.copy(
                weight_atom, second_half[(None, step)], weight_smem[(None, stage * 2 + 1)], tma_bar_ptr=full + stage,
                mcast_mask=targets,
            )  # fmt: skip
    else:
        cute.copy(weight_atom, first_half[(None, step)], weight_smem[(None, stage * 2)], tma_bar_ptr=full + stage)
        cute.copy(weight_atom, second_half[(None, step)], weight_smem[(None, stage * 2 + 1)], tma_bar_ptr=full + stage)


def arrive_lanes(k: KernelShape, barrier: cute.Pointer):
    """Where stages also take gathered rows, their barriers wait for every lane of the loader; at a stage that TMA fills
    alone the lanes have nothing to wait for."""
    if k.gathers:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def load_product(
    k: cutlass.Constexpr[KernelShape],
    depth: cutlass.Constexpr,
    full: cute.Pointer,
    empty: cute.Pointer,
    count: Int32,
    rows_atom: cute.CopyAtom,
    rows: cute.Tensor,
    rows_smem: cute.Tensor,
    weight_atom: cute.CopyAtom,
    first_half: cute.Tensor,
    second_half: cute.Tensor,
    weight_smem: cute.Tensor,
    asked: cute.Pointer,
    rows_there: cutlass.Constexpr,
    pair: tuple,
    part: Int32 | int = 0,
) -> Int32:
    """The whole loader warp streams one task's operands; returns the new running count of stages.

    asked: barrier of the dispatcher, which is told AHEAD steps before the end to fetch the next task: in time for its
    operands, and not long before, for a task that waits behind this one could run elsewhere.
    rows_there: rows that rows_atom loads, 128, or 64 or FEW_ROWS where the others are padding (rows_smem then counts
    such parts of a stage). What a stage holds in their place multiplies into rows of results that nobody reads.
    pair: see `load_weights`. part: which part of a stage they go to.
    """
    for step in range(depth):
        stage = count % STAGES
        if step == max(depth - AHEAD, 0):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(asked)
        cute.arch.mbarrier_wait(empty + stage, ((count // STAGES) & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, (rows_there + TILE_COLUMNS) * LINE_BYTES)
        arrive_lanes(k, full + stage)
        place = stage * (TILE_ROWS // rows_there) + part
        cute.copy(rows_atom, rows[(None, step)], rows_smem[(None, place)], tma_bar_ptr=full + stage)
        load_weights(k, weight_atom, first_half, second_half, weight_smem, step, full, stage, pair)
        count += 1
    return count


@cute.jit
def load_carrying(
    k: cutlass.Constexpr[KernelShape],
    depth: cutlass.Constexpr,
    full: cute.Pointer,
    empty: cute.Pointer,
    count: Int32,
    rows_atom: cute.CopyAtom,
    rows: cute.Tensor,
    rows_smem: cute.Tensor,
    weight_atom: cute.CopyAtom,
    first_half: cute.Tensor,
    second_half: cute.Tensor,
    weight_smem: cute.Tensor,
    few_atom: cute.CopyAtom,
    few: cute.Tensor,
    few_smem: cute.Tensor,
    asked: cute.Pointer,
    few_free: cute.Pointer,
    turn: Int32,
    pair: tuple,
) -> Int32:
    """As `load_product`, for a full row tile and CARRIED_ROWS rows of the carried one; returns the new running count.

    The few rows have a ring of their own in the epilogue buffers. It is free only when the consumers are through with
    the task before (few_free, a phase for each such task; turn: how many there were): the first stages get their other
    operands meanwhile.
    """
    for step in range(depth):
        stage = count % STAGES
        if step == max(depth - AHEAD, 0):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(asked)
        cute.arch.mbarrier_wait(empty + stage, ((count // STAGES) & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                full + stage, (TILE_ROWS + CARRIED_ROWS + TILE_COLUMNS) * LINE_BYTES
            )
        arrive_lanes(k, full + stage)
        cute.copy(rows_atom, rows[(None, step)], rows_smem[(None, stage)], tma_bar_ptr=full + stage)
        load_weights(k, weight_atom, first_half, second_half, weight_smem, step, full, stage, pair)
        if step == STAGES - 1:
            cute.arch.mbarrier_wait(few_free, turn & 1)
            for early in cutlass.range_constexpr(STAGES - 1):
                before = (count - (STAGES - 1 - early)) % STAGES
                cute.copy(few_atom, few[(None, early)], few_smem[(None, before)], tma_bar_ptr=full + before)
        if step >= STAGES - 1:
            cute.copy(few_atom, few[(None, step)], few_smem[(None, stage)], tma_bar_ptr=full + stage)
        count += 1
    return count


@cute.jit
def load_bias(
    k: cutlass.Constexpr[KernelShape],
    full: cute.Pointer,
    empty: cute.Pointer,
    count: Int32,
    atom: cute.CopyAtom,
    first_half: cute.Tensor,
    second_half: cute.Tensor,
    smem: cute.Tensor,
    buffer: Int32,
):
    """The whole loader warp adds the bias of a task to its first stage, which `load_product` then fills."""
    stage = count % STAGES
    cute.arch.mbarrier_wait(empty + stage, ((count // STAGES) & 1) ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_expect_tx(full + stage, TILE_COLUMNS * k.element_size)
    cute.copy(atom, first_half, smem[(None, buffer * 2)], tma_bar_ptr=full + stage)
    cute.copy(atom, second_half, smem[(None, buffer * 2 + 1)], tma_bar_ptr=full + stage)


@cute.jit
def load_logits(
    k: cutlass.Constexpr[KernelShape],
    full: cute.Pointer,
    empty: cute.Pointer,
    count: Int32,
    rows_atom: cute.CopyAtom,
    rows: cute.Tensor,
    rows_smem: cute.Tensor,
    router_atom: cute.CopyAtom,
    router: cute.Tensor,
    router_smem: cute.Tensor,
    rows_there: cutlass.Constexpr,
    steps: cutlass.Constexpr,
) -> Int32:
    """The whole loader warp streams one token tile and the router; returns the new running count of stages.

    rows_there: tokens of the tile, 128 or 64; as in `load_product`. steps: of 128 bytes in a stage
    (`KernelShape.gate_steps`). What doesn't fit in a stage's place for rows goes behind all of those, where tasks have
    weights.

    Neither those nor the router's places, as narrow as it is, are a task's of the same stage. That is safe: a task
    begins only after the plan, and the plan only after every token tile's logits are computed.
    """
    for step in range(k.gate_depth // steps):
        stage = count % STAGES
        cute.arch.mbarrier_wait(empty + stage, ((count // STAGES) & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, (rows_there + k.gate_columns) * LINE_BYTES * steps)
        per = TILE_ROWS // rows_there
        for i in cutlass.range_constexpr(steps):
            place = stage * per + i // per * (STAGES * per) + i % per
            here = step * steps + i
            part = here
            if cutlass.const_expr(k.router_parts > 1):
                # the router's parts stand side by side; each meets the whole token
                part = here % k.depth0
            cute.copy(rows_atom, rows[(None, part)], rows_smem[(None, place)], tma_bar_ptr=full + stage)
            to = router_smem[(None, stage * steps + i)]
            cute.copy(router_atom, router[(None, here)], to, tma_bar_ptr=full + stage)
        count += 1
    return count
