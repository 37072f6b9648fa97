"""The second transport: NVSHMEM's puts and signals, for peers whose memory isn't mapped here.

Direct stores need a mapped peer. A put names the peer by its rank and the place by this rank's own address of the same
symmetric memory; NVSHMEM carries it over whatever links the two. Between puts and their signals stands `nvshmem_quiet`:
a signal is seen only after the payload, so a receiver waits for its counters exactly as with stores.

What differs from stores, all but the second of it at compile time (`KernelShape.put`):

* A put's source must lie in symmetric memory, so rows are staged: dispatched ones in `wire`, results in `results`.
  Nothing there is written before every rank has begun the call, so no peer's last put can still be on its way.
* Where NVSHMEM reaches a peer by loads and stores (`peer_mapped`), a put's source may lie anywhere: a row is put from
  where its token lies, a result from the epilogue's buffers in shared memory.
* A row is one packet: the row, then its home. With stores the home is a word of another array.
* Signals are 64-bit words. Only their lower halves are looked at, so waits are the same.
* Consumers put where they would otherwise store; counting and signals are those of stores.
* Results land by their place in the send list, not by route: there an owner's rows of an expert are neighbours, as they
  are in its row tiles. Staged and landed they lie line by line of 128 bytes, in the swizzle of the epilogue's buffers:
  neighbours are one run of bytes in all three. A packet's end carries the place beside the home. In the fixed layout
  coordinates are neighbours by themselves.

A put to a peer of the same host is a copy by this warp, 512 bytes to load, then to store, one step after the other: 1
us a step where the bytes come from L2, a tenth of that from L1 or shared memory. So what is more than a step and lies
in global memory is asked for in one go before it is put (`touch`). The puts' completion takes 10 us while rows are on
their way, and a signal has to wait for it: what lands side by side goes in one put, a unit of rows has one `quiet` and
a signal for each row tile, a column tile of results has one.

Who puts has the bytes from its own SM, or they are tokens, which nothing writes meanwhile: a warp stages its unit
itself, and results come from consumers of the same block. So a barrier orders them before the put's loads, and L1 holds
no older version of them. NVSHMEM has the fence that a network adapter needs. NVSHMEM's functions are called, not
inlined: with such calls the compiler waits for each wgmma and gives all warps 168 registers. Products are as fast as
without, for two warpgroups take turns.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint64
from cutlass._mlir.dialects import llvm
from cutlass._mlir.dialects.cute import PtrType
from cutlass.base_dsl.typing import get_mlir_types

from moe_fast.kernel.constants import HOME_BITS, LINE_BYTES, PACKET_TAIL, TILE_COLUMNS, TILE_ROWS
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import (
    PUT_RESULTS,
    PUT_ROWS,
    Args,
    aborted_together,
    add,
    arrived_word,
    back_word,
    buffer_tile,
    fetch_add,
    gmem,
    home_of,
    in_lines,
    landed_rows,
    landing_of,
    read,
    returned_word,
    shared_returned,
    side_counters,
    staged_at,
    tile_at_home,
    tile_lines,
)
from moe_ref.layout import ceil_div

SIGNAL_SET, SIGNAL_ADD = 9, 10
"""NVSHMEM_SIGNAL_SET and NVSHMEM_SIGNAL_ADD."""
WARPS = 8
"""Consumer warps of a block."""
GROUPS = TILE_ROWS // 32
"""Rows of a tile that a lane knows: its own of every 32."""
PIECE_BYTES = 8192
"""What a warp asks for before it puts it: two warps of an SM do so, and 28 KB are left for L1."""
RESULT_PIECE_BYTES = 4096
"""The same of results, which eight warps of an SM put at one time."""
IN_PLACE_BYTES, TOGETHER = 4096, 2
"""What a warp asks for of a row that it puts from where it lies, of so many rows together."""
STEP_BYTES = 512
"""What a put copies in one step: asking for it first would only be a step more."""
HOME_BYTES = 16
"""What of a packet behind its row is sent: the home, the result's place there, and what fills it up to 16 bytes."""
SECTOR_BYTES = 32
"""What L1 fetches at least."""
WARP_BYTES = 32 * SECTOR_BYTES
"""What a warp asks for with one load of each lane."""


class DeviceLibrary(cute.BitCode):
    """NVSHMEM's device code for Hopper, found when a kernel that uses it is compiled (no GPU is asked)."""

    def __init__(self) -> None:
        pass

    @property
    def path(self) -> str:
        from nvshmem.core.init_fini import find_device_bitcode_library

        return find_device_bitcode_library(arch=90)


class GlobalPointer:
    """A pointer to global memory, or to any, as an extern's parameter."""

    def __init__(self, dtype, space=cute.AddressSpace.gmem) -> None:
        self.dtype, self.space = dtype, space

    def __get_mlir_types__(self):
        # natural alignment, as `gmem` makes pointers
        return [PtrType.get(self.dtype.mlir_type, self.space, self.dtype.width // 8)]

    def isinstance(self, value) -> bool:
        return get_mlir_types(value) == self.__get_mlir_types__()


@cute.extern(name="nvshmemx_int32_put_signal_nbi_warp", source=DeviceLibrary())
def nvshmem_put_signal(
    target: GlobalPointer(Int32),
    source: GlobalPointer(Int32),
    words: Uint64,
    signal: GlobalPointer(Uint64),
    value: Uint64,
    operation: Int32,
    rank: Int32,
) -> None: ...


@cute.extern(name="nvshmemx_int32_put_nbi_warp", source=DeviceLibrary())
def nvshmem_put(
    target: GlobalPointer(Int32), source: GlobalPointer(Int32, cute.AddressSpace.generic), words: Uint64, rank: Int32
) -> None: ...


@cute.extern(name="nvshmem_uint64_p", source=DeviceLibrary())
def nvshmem_put_word(target: GlobalPointer(Uint64), value: Uint64, rank: Int32) -> None: ...


@cute.extern(name="nvshmem_ptr", source=DeviceLibrary())
def nvshmem_ptr(address: GlobalPointer(Int32), rank: Int32) -> Int64: ...


@cute.extern(name="nvshmem_quiet", source=DeviceLibrary())
def nvshmem_quiet() -> None: ...


@cute.extern(name="nvshmemx_signal_op", source=DeviceLibrary())
def nvshmem_signal(signal: GlobalPointer(Uint64), value: Uint64, operation: Int32, rank: Int32) -> None: ...


@cute.jit
def put_counts(k: cutlass.Constexpr[KernelShape], a: Args, row: Int32, signal: Int32):
    """A whole warp: this rank's row of counts, which lies in its own memory, to all others, with its signal.

    row: index of its first word. The caller has made it visible to this warp.
    """
    cute.arch.fence_acq_rel_sys()
    own = a.heap + a.counts_at + Int64(row) * 4
    flag = a.heap + a.counts_flag_at + Int64(a.rank) * (4 * k.signal_words)
    for i in range(1, k.ranks):
        nvshmem_put_signal(
            gmem(own), gmem(own), Uint64(k.counts_stride), gmem(flag, Uint64), Uint64(signal), Int32(SIGNAL_SET),
            (a.rank + i) % k.ranks,
        )  # fmt: skip


@cute.jit
def put_rows(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, destination: Int32, begin: Int32, count: Int32, row: Int32,
    lane: Int32,
):  # fmt: skip
    """A whole warp: `count` packets that it has staged from place `begin` on, and for every row tile how many rows it
    has got. row: of lane r, the row where packet r lands.

    Packets that land side by side are one run of bytes, put in pieces.
    """
    pitch = k.row_pitch
    valid = lane < count
    before = cute.arch.shuffle_sync_up(row, 1, mask_and_clamp=0)
    heads = cute.arch.vote_ballot_sync(valid and (lane == 0 or row != before + 1))
    staged = a.heap + a.wire_at + Int64(begin) * pitch
    landing = a.heap + a.rows_at + Int64(side) * a.rows * pitch
    r = Int32(0)
    while r < count:
        source = staged + Int64(r) * pitch
        target = landing + Int64(cute.arch.shuffle_sync(row, r)) * pitch
        until = next_bit(heads, r, count)
        # what lies behind the last packet's home stays here
        put_run(target, source, (until - r) * pitch - (PACKET_TAIL - HOME_BYTES), destination, PIECE_BYTES, lane)
        r = until
    signal_rows(k, a, side, destination, count, row, lane)


@cute.jit
def put_rows_in_place(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, destination: Int32, count: Int32, source: Int64,
    tail: Int64, row: Int32, lane: Int32,
):  # fmt: skip
    """`put_rows` for a peer that is mapped: nothing is staged. Of lane r, source: where row r lies; tail: the two words
    behind it; row: where it lands.

    A piece of each of several rows is asked for together.
    """
    row_bytes = k.hidden * k.element_size
    piece = min(IN_PLACE_BYTES, row_bytes)
    target = a.heap + a.rows_at + (Int64(side) * a.rows + row) * k.row_pitch
    for first in range(0, count, TOGETHER):
        until = min(first + TOGETHER, count)
        for inside in range(0, row_bytes, piece):
            part = min(row_bytes - inside, piece)
            asked = [cute.arch.shuffle_sync(source, min(first + i, count - 1)) + inside for i in range(TOGETHER)]
            touch(asked, part, piece, lane)
            for r in range(first, until):
                here, there = cute.arch.shuffle_sync(source, r), cute.arch.shuffle_sync(target, r)
                nvshmem_put(gmem(there + inside), anywhere(here + inside), Uint64(part // 4), destination)
    if lane < count:
        nvshmem_put_word(gmem(target + row_bytes, Uint64), Uint64(tail), destination)
    cute.arch.sync_warp()
    signal_rows(k, a, side, destination, count, row, lane)


@cute.jit
def signal_rows(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, destination: Int32, count: Int32, row: Int32, lane: Int32
):
    """A whole warp, after its puts: tell every row tile how many rows it has got. row: of lane r, where row r lands.

    Rows of a tile that aren't neighbours in the unit have a signal for each stretch.
    """
    tile = row // TILE_ROWS
    before = cute.arch.shuffle_sync_up(tile, 1, mask_and_clamp=0)
    tiles = cute.arch.vote_ballot_sync(lane < count and (lane == 0 or tile != before))
    nvshmem_quiet()
    cute.arch.sync_warp()
    if ((tiles >> lane) & 1) != 0:
        signal = a.heap + a.arrived_at + Int64(arrived_word(k, a, side, tile)) * 4
        landed = next_bit(tiles, lane, count) - lane
        nvshmem_signal(gmem(signal, Uint64), Uint64(landed), Int32(SIGNAL_ADD), destination)
    if lane == 0:
        add(a.control, PUT_ROWS, count, "gpu")
    cute.arch.sync_warp()


@cute.jit
def next_bit(bits: Int32, position: Int32, otherwise: Int32) -> Int32:
    """The lowest set bit above `position` (0 to 31), or `otherwise`."""
    out = otherwise
    # shifted twice, for a shift by 32 is undefined
    rest = bits & ~(((1 << position) << 1) - 1)
    if rest != 0:
        out = lowest(rest)
    return out


def lowest(bits):
    """The lowest set bit; 32 if there is none."""
    return Int32(cute.arch.popc((bits & (0 - bits)) - 1))


def highest(bits):
    """The highest set bit; -1 if there is none."""
    return 31 - Int32(cute.arch.clz(bits))


@cute.jit
def put_run(target: Int64, source: Int64, size: Int32, rank: Int32, piece: cutlass.Constexpr, lane: Int32):
    """A whole warp: `size` bytes (a multiple of 16) to another rank, in pieces that it asks for first."""
    left = size
    while left > 0:
        part = min(left, Int32(piece))
        if part > STEP_BYTES:
            touch((source,), part, piece, lane)
        nvshmem_put(gmem(target), anywhere(source), Uint64(part // 4), rank)
        source += piece
        target += piece
        left -= piece


@cute.jit
def homes_of(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, row_tile: Int32, first: Int32, filled: Int32,
    routed: Boolean, lane: Int32,
) -> cute.Tensor:  # fmt: skip
    """Where the rows lane, lane + 32, ... of a row tile go home to; this rank for those that aren't used.

    first: row of the dispatch buffer that is the tile's first.
    """
    homes = cute.make_rmem_tensor(GROUPS, Int32)
    for i in cutlass.range_constexpr(GROUPS):
        homes[i] = a.rank << HOME_BITS
        if i * 32 + lane < filled:
            homes[i] = (a.rank << HOME_BITS) | ((row_tile * TILE_ROWS + i * 32 + lane) * k.top_k)
            if routed:
                homes[i] = home_of(k, a, side, first + i * 32 + lane)
    return homes


@cute.jit
def landings_of(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, row_tile: Int32, filled: Int32, lane: Int32
) -> cute.Tensor:
    """`homes_of` a routed tile's rows, as `landing_of` names them."""
    first = buffer_tile(k, a, row_tile) * TILE_ROWS
    landings = cute.make_rmem_tensor(GROUPS, Int32)
    for i in cutlass.range_constexpr(GROUPS):
        landings[i] = a.rank << HOME_BITS
        if i * 32 + lane < filled:
            landings[i] = landing_of(k, a, side, first + i * 32 + lane)
    return landings


@cute.jit
def put_results(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, row_tile: Int32, column: Int32, landings: cute.Tensor,
    warp: Int32, lane: Int32,
):  # fmt: skip
    """One of the eight consumer warps puts its share of column tile `column` of a row tile: of those rows that other
    ranks wait for, from `results`, where the block's consumers have stored them before a barrier.

    Rows from one rank lie side by side in a tile, so a warp's own 16 would often be all of them or none: of the rows
    that leave each warp takes an eighth, one after the other. Rows that are neighbours here and at home are one run.
    landings: `landings_of` the tile.
    """
    first = buffer_tile(k, a, row_tile) * TILE_ROWS
    leaving, dealt, total = [], [], Int32(0)
    for i in cutlass.range_constexpr(GROUPS):
        leaving.append(Int32(cute.arch.vote_ballot_sync(landings[i] >> HOME_BITS != a.rank)))
        dealt.append(total)
        total += Int32(cute.arch.popc(leaving[i]))
    share = ceil_div(total, WARPS)
    begin = min(warp * share, total)
    end = min(begin + share, total)
    # where runs of this warp's rows begin
    starts = []
    last = Int32(-1)
    for i in cutlass.range_constexpr(GROUPS):
        before = cute.arch.shuffle_sync_up(landings[i], 1, mask_and_clamp=0)
        if lane == 0:
            before = last
        last = cute.arch.shuffle_sync(landings[i], 31)
        follows = landings[i] == before + 1
        if cutlass.const_expr(k.fixed):
            follows = landings[i] >> HOME_BITS == before >> HOME_BITS
        number = dealt[i] + cute.arch.popc(leaving[i] & ((1 << lane) - 1))
        mine = ((leaving[i] >> lane) & 1) != 0 and number >= begin and number < end
        starts.append(Int32(cute.arch.vote_ballot_sync(mine and (number == begin or not follows))))
    per_tile = tile_lines(k)
    lines = min(Int32(per_tile), k.hidden // k.line - column * per_tile)
    # from the last run to the first: where one begins, the one before has ended
    for step in cutlass.range_constexpr(GROUPS):
        i = GROUPS - 1 - step
        owner, place = landings[i] >> HOME_BITS, landings[i] & ((1 << HOME_BITS) - 1)
        target = a.heap + tile_at_home(k, a, side, owner, place, first + i * 32 + lane, column)
        bits = starts[i]
        while bits != 0:
            r = highest(bits)
            number = dealt[i] + Int32(cute.arch.popc(leaving[i] & ((1 << r) - 1)))
            there, owned = cute.arch.shuffle_sync(target, r), cute.arch.shuffle_sync(owner, r)
            here = a.heap + staged_at(k, a, row_tile * TILE_ROWS + i * 32 + r, column)
            for line in range(lines):
                put_run(
                    there + in_lines(landed_rows(k, a), 0, line), here + in_lines(TILE_ROWS, 0, line),
                    (end - number) * LINE_BYTES, owned, RESULT_PIECE_BYTES, lane,
                )  # fmt: skip
            end = number
            bits = bits ^ (1 << r)


def peer_mapped(a, rank):
    """Whole warp: whether NVSHMEM reaches a peer by loads and stores. Only then may a put's source lie anywhere."""
    return cute.arch.vote_all_sync(Int64(nvshmem_ptr(gmem(a.heap), rank)) != 0)


@cute.jit
def peers_mapped(k: cutlass.Constexpr[KernelShape], a: Args) -> Boolean:
    """Whole warp: `peer_mapped` of every peer."""
    mapped = Boolean(True)
    for i in range(1, k.ranks):
        mapped = peer_mapped(a, (a.rank + i) % k.ranks) and mapped
    return mapped


@cute.jit
def runs_of_warp(k: cutlass.Constexpr[KernelShape], home: Int32, leaves: Boolean, lane: Int32) -> tuple[Int32, Int32]:
    """Of the 16 rows of a consumer warp, of which lane l knows row l % 16: where runs begin of rows that leave and are
    neighbours at home, and where they end. home: `landing_of` the row."""
    before = cute.arch.shuffle_sync_up(home, 1, mask_and_clamp=0)
    follows = home == before + 1
    if cutlass.const_expr(k.fixed):
        follows = home >> HOME_BITS == before >> HOME_BITS
    some = Int32(cute.arch.vote_ballot_sync(leaves))
    heads = Int32(cute.arch.vote_ballot_sync(lane == 0 or not follows))
    return some & heads & 0xFFFF, heads | ~some | (1 << 16)


@cute.jit
def put_lines(
    k: cutlass.Constexpr[KernelShape], column: Int32, first: cutlass.Constexpr, put: tuple, memory: cute.Pointer,
    thread: Int32,
):  # fmt: skip
    """A consumer warp puts two lines of its 16 rows, from number `first` of column tile `column` on, from the epilogue
    buffers (of its group, 64 rows each, the second one 128 rows on).

    put: where runs begin and end (`runs_of_warp`); of lane l the owner of row l % 16 and the address of its column
    tile's first line there; bytes from one line to the next.
    """
    starts, ends, owner, target, step = put
    source = generic_address(memory + thread % 128 // 32 * (16 * k.line))
    for b in range(2):
        bits = starts
        if cutlass.const_expr(k.hidden % TILE_COLUMNS != 0):
            if column * tile_lines(k) + first + b >= k.hidden // k.line:
                bits = Int32(0)
        while bits != 0:
            r = lowest(bits)
            bits = bits & (bits - 1)
            nvshmem_put(
                gmem(cute.arch.shuffle_sync(target, r) + Int64(step) * (first + b)),
                anywhere(source + (b * (TILE_ROWS * LINE_BYTES) + r * LINE_BYTES)),
                Uint64((next_bit(ends, r, Int32(16)) - r) * (LINE_BYTES // 4)), cute.arch.shuffle_sync(owner, r),
            )  # fmt: skip


def generic_address(pointer):
    """Address, in all of memory, of a place in shared memory."""
    place = Int32(pointer.toint())
    return Int64(
        llvm.inline_asm(
            Int64.mlir_type, [place.ir_value()], "{ .reg .u64 t; cvt.u64.u32 t, $1; cvta.shared.u64 $0, t; }", "=l,r",
            has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )  # fmt: skip


def anywhere(address):
    """Pointer to words at an address that may be one of shared memory."""
    return cute.make_ptr(Int32, address, cute.AddressSpace.generic, assumed_align=4)


@cute.jit
def count_put(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, row_tile: Int32, column: Int32, filled: Int32,
    routed: Boolean, lane: Int32,
):  # fmt: skip
    """The storer warp, after the consumers have stored and put a GEMM1 tile: `processor.count_returned` with signals.

    Every block waits for its own puts before it counts. So the warp that counts the last column tile may signal for
    all: lane l rows l, l + 32, l + 64 and l + 96. Rows of the shared expert (not routed) never leave.
    """
    first = row_tile * TILE_ROWS
    if routed:
        first = buffer_tile(k, a, row_tile) * TILE_ROWS
    homes = homes_of(k, a, side, row_tile, first, filled, routed, lane)
    going = not aborted_together(a)
    some = Int32(0)
    for i in cutlass.range_constexpr(GROUPS):
        some += Int32(cute.arch.popc(cute.arch.vote_ballot_sync(homes[i] >> HOME_BITS != a.rank)))
    if some > 0:
        nvshmem_quiet()
    else:
        cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_warp()
    counted = Int32(0)
    if lane == 0:
        place = returned_word(k, a, row_tile)
        if not routed:
            place = shared_returned(a, row_tile)
        counted = fetch_add(side_counters(a, side), place)
    last = cute.arch.shuffle_sync(counted, 0) == k.columns1 - 1
    if last and going:
        # what the other column tiles' blocks have put
        cute.arch.fence_acq_rel_sys()
        for i in cutlass.range_constexpr(GROUPS):
            owner = homes[i] >> HOME_BITS
            token = (homes[i] & ((1 << HOME_BITS) - 1)) // k.top_k
            signal = a.heap + a.back_at + Int64(back_word(k, a, side, token)) * 4
            if owner != a.rank:
                nvshmem_signal(gmem(signal, Uint64), Uint64(1), Int32(SIGNAL_ADD), owner)
            elif i * 32 + lane < filled:
                add_signal(signal, 1)
        if lane == 0:
            add(a.control, PUT_RESULTS, some, "gpu")
    cute.arch.sync_warp()


@cute.jit
def touch(sources, size: Int32, most: cutlass.Constexpr, lane: Int32):
    """A whole warp: have `size` bytes (a multiple of 16, at most `most`) from each of the sources on brought into L1,
    for the puts that follow.

    A put's loop has one load of a lane on its way and waits for it; here all are on their way together.
    """
    seen = Int32(0)
    values = []
    for source in sources:
        for i in cutlass.range_constexpr(ceil_div(most, WARP_BYTES)):
            values.append(read(source + Int64(min((i * 32 + lane) * SECTOR_BYTES, size - 4)), 0))
    for value in values:
        seen = seen | value
    await_values(seen)


def await_values(value):
    """Nothing, but not before a value is there: its loads can't be left out."""
    llvm.inline_asm(
        None, [value.ir_value()], "{ .reg .pred p; setp.eq.b32 p, $0, 0x5ca1ab1e; @p nanosleep.u32 0; }", "r",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip


def add_signal(address, value):
    """Add to a signal of this rank, which peers add to with puts: all 64 bits, as they do."""
    cute.arch.red(gmem(address, Int64), Int64(value), op="add", dtype="u64", sem="relaxed", scope="sys")
