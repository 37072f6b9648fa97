"""The two consumer warpgroups: gate, plan, send list, first rows, then products and their epilogues, then combine."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import warp

from moe_fast.kernel import gate
from moe_fast.kernel.constants import (
    CARRIED_ROWS,
    HOME_BITS,
    LINE_BYTES,
    SHARED_SLOT,
    STAGES,
    TILE_COLUMNS,
    TILE_ROWS,
    PlanWord,
)
from moe_fast.kernel.dispatch import first_places, push_first, push_own, pushes_own, wait_list
from moe_fast.kernel.epilogue import home_address, keep_lines, return_rows, store_chunks, turn_few
from moe_fast.kernel.final_combine import BLOCKS, OPEN_SIDE, SIDE, combine, open_side
from moe_fast.kernel.gemm import (
    DTYPES,
    multiply,
    multiply_carrying,
    multiply_exactly,
    multiply_logits,
    pass_over,
    tiled_mma,
)
from moe_fast.kernel.plan import make_plan, wait_plan
from moe_fast.kernel.processor import fields_of, member_of, take_word, try_word, unpack
from moe_fast.kernel.ring import ring_phase, ring_place
from moe_fast.kernel.scans import sync_consumers
from moe_fast.kernel.send_list import list_routes, load_routes, publish_list, routes_per_thread
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import (
    Args,
    Phase,
    Role,
    aborted,
    buffer_tile,
    held_start,
    hold_start,
    landed_rows,
    landing_of,
    mark,
    note,
    now,
    read,
    tile_at_home,
)
from moe_fast.kernel.sums import sum_rest
from moe_fast.kernel.tile_pairs import carried_tile, field_few, field_rows, field_same, field_void
from moe_fast.kernel.tokens import list_all_tokens
from moe_fast.kernel.transport import landings_of, peers_mapped, put_results, runs_of_warp
from moe_ref.runtime.encoding import GEMM0, GEMM1_HIGH, GEMM1_LOW, STOP, task_slot


@cute.jit
def consume(
    k: cutlass.Constexpr[KernelShape], a: Args, sA: cute.Tensor, sAh: cute.Tensor, sB: cute.Tensor, sG: cute.Tensor,
    sC: cute.Tensor, sRest: cute.Tensor, sE: cute.Tensor, hidden: tuple,
    rows_memory: cute.Pointer, memory: cute.Pointer,
    sBias: cute.Pointer, peers: cute.Pointer, shares: cute.Pointer, scratch: cute.Pointer, full: cute.Pointer,
    empty: cute.Pointer,
    chunk_full: cute.Pointer, chunk_empty: cute.Pointer, few_free: cute.Pointer, sent: cute.Pointer,
    slots: cute.Pointer, word_full: cute.Pointer, word_empty: cute.Pointer, pair: tuple, epoch: Int32, side: Int32,
    block: Int32, blocks: Int32, processors: Int32, height: Int32, token_tiles: Int32, thread: Int32,
):  # fmt: skip
    """The two consumer warpgroups, 256 threads. height: tokens of a token tile; the first warpgroup computes the
    logits of all 64. pair: the stage barriers of a paired kernel's products."""
    dtype = DTYPES[k.dtype]
    lane = thread % 32
    warp_id = cute.arch.make_warp_uniform(thread >> 5)
    group = cute.arch.make_warp_uniform(thread >> 7)
    gate_mma = tiled_mma(dtype, k.gate_columns)
    gate_thr = gate_mma.get_slice(group * 128)
    gate_b = gate_mma.make_fragment_B(gate_thr.partition_B(sG))
    if cutlass.const_expr(dtype is Float32):
        gate_a = gate_mma.make_fragment_A(gate_thr.partition_A(sA))
        gate_rest = gate_mma.make_fragment_A(gate_thr.partition_A(sRest))
    else:
        # in places of 64 rows: each warpgroup's, or those of several steps
        half_mma = tiled_mma(dtype, k.gate_columns, 1)
        gate_a = half_mma.make_fragment_A(half_mma.get_slice(0).partition_A(sAh))
    logits = cute.make_rmem_tensor(gate_thr.partition_shape_C((TILE_ROWS, k.gate_columns)), Float32)
    count = Int32(0)

    # who goes where
    if block < processors:
        gate.stage_biases(k, dtype, a, scratch, thread)
        high = height // TILE_ROWS
        doubles = [k.gate_steps(low) - 1 for low in (True, False)]
        for tile in range(block, token_tiles, processors):
            start = now(k)
            if a.given == 0:
                low, alone = height <= TILE_ROWS // 2, Boolean(False)
                if cutlass.const_expr(gate.rehearses(k)):
                    alone = Boolean(low)
                if group == 0 or not low:
                    if cutlass.const_expr(dtype is Float32):
                        count = multiply_exactly(
                            dtype, k.gate_columns, logits, gate_a, gate_b, gate_rest, rows_memory, memory, full, empty,
                            count, k.depth0, thread,
                        )  # fmt: skip
                    else:
                        count = multiply_logits(
                            dtype, k.gate_columns, logits, gate_a, gate_b, full, empty, count, k.gate_depth,
                            Int32(doubles[0]) + (doubles[1] - doubles[0]) * high, high, group, alone,
                        )  # fmt: skip
                elif cutlass.const_expr(gate.rehearses(k)):
                    count += k.gate_depth >> doubles[0]
                    logits.fill(0.0)
                else:
                    count = pass_over(full, empty, count, Int32(k.gate_depth >> doubles[0]))
                gate.choose(k, a, logits, tile * height, height, scratch, thread)
            else:
                gate.take_given(k, a, tile, height, scratch, thread)
            gate.rank_routes(k, a, side, tile, height, scratch, thread)
            mark(k, a, block, 0, start, Phase.GATE, thread == 0)
    if block == blocks - 1:
        sync_consumers()
        # Not kept in registers, of which a rehearsal leaves none. A solver notes an event of its own meanwhile, in the
        # same place; it has no rehearsal.
        start, held = Int64(0), k.trace and not k.placed
        if cutlass.const_expr(not held):
            start = now(k)
        elif thread == 0:
            hold_start(a, block, 0)
        # a block without tokens has the time to rehearse
        rehearsals = Int32(0)
        if cutlass.const_expr(not k.placed):
            rehearsals = Int32(block >= token_tiles)
        for i in cutlass.range(rehearsals + 1, unroll=1):
            make_plan(k, a, epoch, side, token_tiles, scratch, thread, i == rehearsals)
        if cutlass.const_expr(held):
            start = held_start(a, block, 0)
        mark(k, a, block, 0, start, Phase.PLAN, thread == 0)
    each = routes_per_thread(k)
    routes = tuple(cute.make_rmem_tensor(size, Int32) for size in (each, each, 2))
    places = tuple(cute.make_rmem_tensor(each, Int32) for _ in range(2))
    places[0].fill(-1)
    if cutlass.const_expr(not k.by_token):
        if block < processors:
            load_routes(k, a, side, block, height, routes, thread)
    if thread == 0:
        wait_plan(a, side, Role.GATE)
    sync_consumers()
    start = now(k)
    # looked at only when what the send list asks for is on its way, too
    usable, given_up = read(a.plan, PlanWord.USABLE) != 0, aborted(a)
    begun = first_places(k, a)
    if cutlass.const_expr(k.by_token):
        if block < processors:
            list_all_tokens(k, a, side, block, processors, height, token_tiles, scratch, thread)
    elif block < processors:
        for tile in range(block, token_tiles, processors):
            list_routes(k, a, side, tile, height, token_tiles, usable, given_up, routes, places, thread)
            load_routes(k, a, side, tile + processors, height, routes, thread)
        publish_list(a, side, thread)
    # the same in all lanes: pushing takes whole warps
    usable = cute.arch.vote_all_sync(usable and not given_up)
    mark(k, a, block, 0, start, Phase.LIST, thread == 0)

    # the first rows, with all hands
    start = now(k)
    direct = Boolean(False)
    if cutlass.const_expr(not k.by_token):
        direct = pushes_own(token_tiles, processors)
    if direct and block < processors:
        # Each block those of its own tokens, which it knows already. That every block has listed its routes, the
        # dispatcher makes sure of before the last word: nobody here reads another block's entries before the combine.
        if usable:
            push_own(k, a, side, block, height, begun, places, thread)
    else:
        if thread == 0:
            wait_list(a, side, processors)
        sync_consumers()
        if not direct:
            push_first(k, a, side, block * 8 + warp_id, blocks * 8, lane)
    mark(k, a, block, 0, start, Phase.PUSH, thread == 0)

    # the products; their addresses are worked out only here, for the gate has no register to spare
    mma = tiled_mma(dtype)
    thr = mma.get_slice(group * 128)
    a_frag = mma.make_fragment_A(thr.partition_A(sA))
    b_frag = mma.make_fragment_B(thr.partition_B(sB))
    acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE_ROWS, TILE_COLUMNS)), Float32)
    if cutlass.const_expr(k.carries):
        few_mma = tiled_mma(dtype, CARRIED_ROWS)
        few_thr = few_mma.get_slice(group * 128)
        w_frag = few_mma.make_fragment_A(few_thr.partition_A(sB))
        few_frag = few_mma.make_fragment_B(few_thr.partition_B(sE))
        few_acc = cute.make_rmem_tensor(few_thr.partition_shape_C((TILE_COLUMNS, CARRIED_ROWS)), Float32)
    copy = ()
    if cutlass.const_expr(dtype is not Float32):
        copy_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        tiled_copy = cute.make_tiled_copy_S(copy_atom, cute.make_tiled_copy_C_atom(copy_atom, mma))
        thr_copy = tiled_copy.get_slice(thread)
        shape = cute.shape(thr_copy.partition_S(sC))[:3]
        copy = (tiled_copy, thr_copy.partition_D(sC), cute.make_rmem_tensor(shape, dtype))

    if cutlass.const_expr(k.paired):
        full, empty = pair
        count = Int32(0)
    number, parity, returns = Int32(0), Int32(0), Int32(0)
    mapped = Boolean(False)
    if cutlass.const_expr(k.put_from_shared):
        mapped = peers_mapped(k, a)
    # the next word, where it was there before it was needed
    known, following = Boolean(False), Int64(0)
    if cutlass.const_expr(k.paired):
        # as of here, see `final_combine.SIDE`
        side = cute.arch.load(shares + SIDE, Int32)
    go = Boolean(block < processors)
    while go:
        word = following
        if not known:
            word = take_word(k, slots, word_full, word_empty, number)
        known = Boolean(False)
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
            fields = fields_of(word)
            filled = field_rows(fields)
            # whether this warpgroup has rows of the tile
            used = filled > group * (TILE_ROWS // 2)
            if cutlass.const_expr(not k.paired):
                used = group == 0 or used
            else:
                used = used and field_void(fields) == 0
            if cutlass.const_expr(k.halves):
                used = used and not (kind == GEMM1_LOW and group == 1) and not (kind == GEMM1_HIGH and group == 0)
            few, mine = Int32(0), Boolean(False)
            if cutlass.const_expr(k.carries):
                few = field_few(fields)
                # where both blocks have the weights, each does half of the carried rows' columns
                mine = few > 0 and (field_same(fields) == 0 or group == member_of(block))
                if few > 0:
                    # the ring of the carried rows is both warpgroups' first buffer: free once the storer has read it
                    cute.arch.mbarrier_wait(chunk_empty + group * 2, (parity & 1) ^ 1)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(few_free)
            # the wait for the first operands is not work
            cute.arch.mbarrier_wait(full + ring_place(count, STAGES), ring_phase(count, STAGES))
            start = now(k)
            home, place = Int32(0), Int32(0)
            if kind != GEMM0 and routed:
                # Asked for now, when the rows and their homes have arrived for sure, and first looked at after the
                # product: a thread that used it here would hold its product up for the time of a load.
                place = buffer_tile(k, a, row_tile) * TILE_ROWS + warp_id * 16 + lane % 16
                if cutlass.const_expr(not k.by_token):
                    home = landing_of(k, a, side, place)
            if cutlass.const_expr(k.put):
                # nothing of the last product is left: else it would be kept in memory over the calls below
                acc.fill(0.0)
            if cutlass.const_expr(k.carries):
                if mine:
                    few_row = carried_tile(fields, member_of(block), row_tile) * TILE_ROWS + lane % CARRIED_ROWS
                    few_home = Int32(0)
                    if cutlass.const_expr(not k.by_token):
                        if kind != GEMM0:
                            few_home = landing_of(k, a, side, few_row)
                    count = multiply_carrying(
                        dtype, acc, few_acc, a_frag, b_frag, w_frag, few_frag, full, empty, count, depth, k.paired,
                        k.gathers,
                    )  # fmt: skip
                    # the other warpgroup may still read the ring out of the buffers
                    sync_consumers()
                    # the second buffer: the storer may still be reading a hidden tile out of it
                    cute.arch.mbarrier_wait(chunk_empty + (group * 2 + 1), (parity & 1) ^ 1)
                    own = memory + (group + 2) * (64 * k.line) + warp_id % 4 * (16 * k.line)
                    if kind == GEMM0:
                        address = hidden[0].toint() + Int64(few_row) * (k.intermediate * k.element_size)
                        turn_few(k, dtype, True, few_acc, own, address, column, group, thread)
                    else:
                        address = home_address(
                            k, a, side, few_home, lane % CARRIED_ROWS < few, peers, few_row, few_row, column
                        )  # fmt: skip
                        turn_few(k, dtype, False, few_acc, own, address, column, group, thread)
                else:
                    if used:
                        count = multiply(
                            dtype, TILE_COLUMNS, acc, a_frag, b_frag, full, empty, count, depth, k.paired, k.gathers
                        )
                    else:
                        count = pass_over(full, empty, count, depth, k.paired, k.gathers)
                    if few > 0:
                        # as above, where the other warpgroup carries
                        sync_consumers()
            elif used:
                count = multiply(
                    dtype, TILE_COLUMNS, acc, a_frag, b_frag, full, empty, count, depth, k.paired, k.gathers
                )
            else:
                count = pass_over(full, empty, count, depth, k.paired, k.gathers)
            if cutlass.const_expr(k.trace):
                if thread == 0:
                    note(a, block, 3, start, word)
                if thread == 128:
                    note(a, block, 4, start, word)
            if cutlass.const_expr(not k.expert_bias):
                # the next word, if it is there, under this task's epilogue; not where the loader, one word further
                # ahead then, would put a bias in the place of this task's
                known, following = try_word(k, slots, word_full, word_empty, number + 1)
            if kind == GEMM0:
                store_chunks(
                    k, dtype, group, parity, acc, copy, memory, chunk_full, chunk_empty,
                    sBias + ring_place(number, k.biases) * TILE_COLUMNS, thread,
                )  # fmt: skip
                parity += k.chunks0 // 2
            else:
                row = warp_id * 16 + lane % 16
                address = home_address(
                    k, a, side, home, used and row < filled and routed, peers, row_tile * TILE_ROWS + row, place,
                    column,
                )  # fmt: skip
                if cutlass.const_expr(k.shared_intermediate > 0):
                    if row < filled and not routed:
                        token = Int64(row_tile * TILE_ROWS + row)
                        address = a.shared_rows + token * (k.hidden * k.element_size)
                        if cutlass.const_expr(k.put):
                            address += Int64(column) * (TILE_COLUMNS * k.element_size)
                if cutlass.const_expr(not k.put):
                    return_rows(
                        k, dtype, address, column, group, parity, acc, copy, memory, chunk_empty,
                        sBias + ring_place(number, k.biases) * TILE_COLUMNS, thread,
                    )  # fmt: skip
                else:
                    owner = home >> HOME_BITS
                    leaves = row < filled and routed and owner != a.rank
                    step = Int32(TILE_ROWS * LINE_BYTES)
                    if not leaves:
                        step = landed_rows(k, a) * LINE_BYTES
                    put = ()
                    if cutlass.const_expr(k.put_from_shared):
                        starts, ends = runs_of_warp(k, home, leaves and mapped, lane)
                        target = a.heap + tile_at_home(k, a, side, owner, home & ((1 << HOME_BITS) - 1), place, column)
                        put = (starts, ends, owner, target, landed_rows(k, a) * LINE_BYTES)
                        if leaves and mapped:
                            address = Int64(0)
                    if address == 0:
                        step = Int32(0)
                    keep_lines(
                        k, dtype, address, step, routed, put, column, group, parity, acc, copy, memory, chunk_empty,
                        sBias + ring_place(number, k.biases) * TILE_COLUMNS, thread,
                    )  # fmt: skip
                    if routed and not mapped:
                        landings = landings_of(k, a, side, row_tile, filled, lane)
                        # any warp may put any row
                        sync_consumers()
                        put_results(k, a, side, row_tile, column, landings, warp_id, lane)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(sent + ring_place(returns, k.sent))
                returns += 1
            if cutlass.const_expr(k.trace):
                if thread == 0:
                    note(a, block, 0, start, word)
        number += 1

    start = now(k)
    if cutlass.const_expr(k.scheduler == "os_block"):
        # the Scheduler's block has no dispatcher
        if block >= processors:
            if thread == 0:
                open_side(a, side, shares)
            sync_consumers()
    opened = cute.arch.load(shares + OPEN_SIDE, Int32)
    if opened >= 0:
        all_blocks = cute.arch.load(shares + BLOCKS, Int32)
        if cutlass.const_expr(k.by_token):
            sum_rest(k, dtype, a, opened, block * 8 + warp_id, all_blocks * 8, lane)
        lists = cute.recast_ptr(rows_memory, dtype=Int32)
        combine(k, dtype, a, opened, shares, lists, block, all_blocks, warp_id, lane)
    mark(k, a, block, 0, start, Phase.COMBINE, thread == 0)
