"""Rows of a first product, gathered on their way into the pipeline: from where the tokens lie, or where peers put them.

A row that a rank routes to itself is never copied: its task reads the token itself. In the wire format "tokens" a
follower is read from its leader's row. TMA can't fetch rows from addresses of their own, so the loader warp does, by
asynchronous copies of 16 bytes, eight lanes a row. Before a task it looks up where each of its rows lies and keeps the
addresses in shared memory; a step then costs a load and two copies for every eight rows. A tile of more than 64 rows
that all came from peers lies in the buffer row behind row: in the wire format "routes" it still goes by TMA, unless
rows are carried with it.

Stages are written as TMA writes them, in the 128-byte swizzle: piece p of row r lies at p ^ (r % 8). The lanes' copies
arrive at the stage's barrier by themselves, each lane once a step, beside the one arrival that counts the weights'
bytes: 33 arrivals, also where a stage is TMA's alone (`loads.arrive_lanes`). The copies write by the generic proxy, and
wgmma reads by the asynchronous one, so consumers put a proxy fence between the barrier and the product
(`gemm.see_gathered`). What the copies read needs none: tokens are the caller's, and peers stored rows by the generic
proxy, too; the acquire of the tile's arrival counter covers the rows and the homes that say where they lie.

Tokens are read as long as there are first products, so x has to stay as it is until the call has ended.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from moe_fast.kernel.constants import (
    AHEAD,
    CARRIED_ROWS,
    FEW_ROWS,
    HOME_BITS,
    LINE_BYTES,
    STAGES,
    TILE_COLUMNS,
    TILE_ROWS,
)
from moe_fast.kernel.loads import load_product, load_weights
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import Args, gmem, home_of, leader_at, read

SOURCES = TILE_ROWS + CARRIED_ROWS
"""Addresses that a block keeps: of a row tile, then of the carried rows."""
GROUP = 8
"""Rows that a warp copies a line of by two copies of 16 bytes a lane."""
BATCH = 4
"""Groups of rows whose addresses are fetched together."""


@cute.jit
def find_sources(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, first: Int32, rows: Int32, sources: cute.Pointer,
    most: cutlass.Constexpr, lane: Int32,
) -> Boolean:  # fmt: skip
    """The whole warp: where rows `first` to `first + rows` of the dispatch buffer are to be read, into `sources`; then
    the last one again, up to `most` rows. Returns whether any of them may not be in its place in the buffer.

    Every lane has acquired the arrival counter of their tile: only then homes and leaders are this call's.
    """
    # every lane has done with the addresses of the task before
    cute.arch.sync_warp()
    gathered = Boolean(k.by_token)
    row_bytes = k.hidden * k.element_size
    for i in cutlass.range_constexpr((most + 31) // 32):
        row = first + min(i * 32 + lane, rows - 1)
        home = home_of(k, a, side, row)
        lead = row
        if cutlass.const_expr(k.by_token):
            lead = read(a.heap + leader_at(k, a), row)
            if lead < 0 or lead >= a.rows:
                lead = row
        address = a.heap + a.rows_at + (Int64(side) * a.rows + lead) * k.row_pitch
        token = (home & ((1 << HOME_BITS) - 1)) // k.top_k
        # after a wait that failed a home may be of another call
        if home >> HOME_BITS == a.rank and token < a.tokens:
            gathered = Boolean(True)
            address = a.x + Int64(token) * row_bytes
        cute.arch.store(sources + i * 32 + lane, address)
    cute.arch.sync_warp()
    return cute.arch.vote_any_sync(gathered)


@cute.jit
def copy_line(
    k: cutlass.Constexpr[KernelShape], step: Int32, rows: cutlass.Constexpr, sources: cute.Pointer,
    target: cute.Pointer, lane: Int32,
):  # fmt: skip
    """The whole warp: 128 bytes of each of `rows` rows into a stage; target: its first row there.

    A lane copies piece lane % 8 of two neighbouring rows of every eight. Their addresses are fetched ahead of the
    copies before them: both are accesses of shared memory, which the compiler leaves in this order.
    """
    inside, piece = lane // 8, lane % 8
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cute.nvgpu.LoadCacheMode.GLOBAL), target.dtype, num_bits_per_copy=128)
    vector = cute.make_layout(16 * 8 // target.dtype.width)
    offset = Int64(step * LINE_BYTES + piece * 16)
    places = [target.toint() + (inside * 2 + h) * LINE_BYTES + (piece ^ (inside * 2 + h)) * 16 for h in range(2)]
    groups = rows // GROUP
    batch = min(groups, BATCH)
    known = [cute.make_rmem_tensor(2, Int64) for _ in range(2 * batch)]
    for g in cutlass.range_constexpr(batch):
        fetch_two(sources, g, inside, known[g])
    for b in cutlass.range_constexpr(groups // batch):
        here, ahead = (known[(b + i) % 2 * batch : (b + i) % 2 * batch + batch] for i in range(2))
        for g in cutlass.range_constexpr(batch):
            if cutlass.const_expr((b + 1) * batch < groups):
                fetch_two(sources, (b + 1) * batch + g, inside, ahead[g])
        for g in cutlass.range_constexpr(batch):
            for h in cutlass.range_constexpr(2):
                place = places[h] + (b * batch + g) * (GROUP * LINE_BYTES)
                to = cute.make_ptr(target.dtype, place, cute.AddressSpace.smem, assumed_align=16)
                source = cute.make_tensor(gmem(here[g][h] + offset, target.dtype, 16), vector)
                cute.copy(atom, source, cute.make_tensor(to, vector))


def fetch_two(sources, group, inside, into):
    """This lane's two addresses of a group of rows."""
    pointer = sources + group * GROUP + inside * 2
    two = cute.make_ptr(Int64, pointer.toint(), cute.AddressSpace.smem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(two, cute.make_layout(2)), into)


@cute.jit
def fill_stage(
    k: cutlass.Constexpr[KernelShape], step: Int32, full: cute.Pointer, empty: cute.Pointer, count: Int32,
    sources: cute.Pointer, stages: cute.Pointer, weight_atom: cute.CopyAtom, first_half: cute.Tensor,
    second_half: cute.Tensor, weight_smem: cute.Tensor, asked: cute.Pointer, rows_there: cutlass.Constexpr, pair: tuple,
    lane: Int32,
):  # fmt: skip
    """Step `step` of a task, once stage number `count` is free: weights by TMA, rows gathered. The lanes have yet to
    arrive at the stage's barrier."""
    stage = count % STAGES
    if step == max(k.depth0 - AHEAD, 0):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(asked)
    cute.arch.mbarrier_wait(empty + stage, ((count // STAGES) & 1) ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE_COLUMNS * LINE_BYTES)
    load_weights(k, weight_atom, first_half, second_half, weight_smem, step, full, stage, pair)
    copy_line(k, step, rows_there, sources, stages + stage * (TILE_ROWS * k.line), lane)


@cute.jit
def load_gathered(
    k: cutlass.Constexpr[KernelShape], full: cute.Pointer, empty: cute.Pointer, count: Int32, sources: cute.Pointer,
    stages: cute.Pointer, weight_atom: cute.CopyAtom, first_half: cute.Tensor, second_half: cute.Tensor,
    weight_smem: cute.Tensor, asked: cute.Pointer, rows_there: cutlass.Constexpr, pair: tuple, lane: Int32,
) -> Int32:  # fmt: skip
    """As `loads.load_product`, for a first product whose rows' addresses are in `sources`. stages: the row stages."""
    for step in range(k.depth0):
        stage = count % STAGES
        fill_stage(
            k, step, full, empty, count, sources, stages, weight_atom, first_half, second_half, weight_smem, asked,
            rows_there, pair, lane,
        )  # fmt: skip
        cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
        count += 1
    return count


@cute.jit
def load_gathered_or_landed(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, full: cute.Pointer, empty: cute.Pointer, count: Int32,
    row_tile: Int32, rows: Int32, memory: tuple, rows_atom: cute.CopyAtom, landed: cute.Tensor,
    rows_smem: cute.Tensor, weight_atom: cute.CopyAtom, first_half: cute.Tensor, second_half: cute.Tensor,
    weight_smem: cute.Tensor, asked: cute.Pointer, pair: tuple, lane: Int32,
) -> Int32:  # fmt: skip
    """As `loads.load_product`, for the first product of row tile `row_tile` of `rows` rows: by TMA from `landed` where
    all of them came from other ranks, else gathered. memory: see `loader.load`."""
    sources, stages, _ = memory
    first = row_tile * TILE_ROWS
    if rows > TILE_ROWS // 2:
        if find_sources(k, a, side, first, rows, sources, TILE_ROWS, lane):
            count = load_gathered(
                k, full, empty, count, sources, stages, weight_atom, first_half, second_half, weight_smem, asked,
                TILE_ROWS, pair, lane,
            )  # fmt: skip
        else:
            count = load_product(
                k, k.depth0, full, empty, count, rows_atom, landed, rows_smem, weight_atom, first_half, second_half,
                weight_smem, asked, TILE_ROWS, pair,
            )  # fmt: skip
    elif rows > FEW_ROWS:
        find_sources(k, a, side, first, rows, sources, TILE_ROWS // 2, lane)
        count = load_gathered(
            k, full, empty, count, sources, stages, weight_atom, first_half, second_half, weight_smem, asked,
            TILE_ROWS // 2, pair, lane,
        )  # fmt: skip
    else:
        find_sources(k, a, side, first, rows, sources, FEW_ROWS, lane)
        count = load_gathered(
            k, full, empty, count, sources, stages, weight_atom, first_half, second_half, weight_smem, asked, FEW_ROWS,
            pair, lane,
        )  # fmt: skip
    return count


@cute.jit
def load_gathered_carrying(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, full: cute.Pointer, empty: cute.Pointer, count: Int32,
    row_tile: Int32, rows: Int32, carried: Int32, few_rows: Int32, memory: tuple, weight_atom: cute.CopyAtom,
    first_half: cute.Tensor, second_half: cute.Tensor, weight_smem: cute.Tensor, asked: cute.Pointer,
    few_free: cute.Pointer, turn: Int32, pair: tuple, lane: Int32,
) -> Int32:  # fmt: skip
    """As `loads.load_carrying`, for a first product: row tile `row_tile` of `rows` rows and the `few_rows` rows of tile
    `carried`. memory: see `loader.load`."""
    sources, stages, ring = memory
    few = sources + TILE_ROWS
    find_sources(k, a, side, carried * TILE_ROWS, few_rows, few, CARRIED_ROWS, lane)
    find_sources(k, a, side, row_tile * TILE_ROWS, rows, sources, TILE_ROWS, lane)
    for step in range(k.depth0):
        stage = count % STAGES
        fill_stage(
            k, step, full, empty, count, sources, stages, weight_atom, first_half, second_half, weight_smem, asked,
            TILE_ROWS, pair, lane,
        )  # fmt: skip
        if step == STAGES - 1:
            cute.arch.mbarrier_wait(few_free, turn & 1)
            for early in cutlass.range_constexpr(STAGES - 1):
                before = (count - (STAGES - 1 - early)) % STAGES
                copy_line(k, Int32(early), CARRIED_ROWS, few, ring + before * (CARRIED_ROWS * k.line), lane)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + before)
        if step >= STAGES - 1:
            copy_line(k, step, CARRIED_ROWS, few, ring + stage * (CARRIED_ROWS * k.line), lane)
            cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
        count += 1
    return count
