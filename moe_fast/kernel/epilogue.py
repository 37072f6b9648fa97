"""The epilogue of a product: activation and rounding, then into shared memory and on to where the tile goes."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir import ir

from moe_fast.kernel.constants import (
    CARRIED_ROWS,
    HALF_COLUMNS,
    HOME_BITS,
    LINE_BYTES,
    TILE_COLUMNS,
)
from moe_fast.kernel.gemm import LOG2E
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import Args, gmem, result_at, staged_at, tile_at_home
from moe_fast.kernel.transport import put_lines

LOWEST = 1 << 24
"""Device addresses are above this, offsets inside a row below."""
PIECE = 4
"""Values that the epilogue rounds together."""


def gelu(x):
    """x * Phi(x), Phi to 1e-7 (Abramowitz and Stegun, 7.1.26), without a branch and with few registers.

    With q(|x|) = 1 - Phi(|x|) it is max(x, 0) - |x| q(|x|) on both sides of zero.
    """
    size = cute.arch.fmax(x, -x)
    t = cute.arch.rcp_approx(Float32(1.0) + Float32(0.3275911 * 0.7071067811865476) * size)
    poly = Float32(1.061405429 / 2)
    for c in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        poly = poly * t + Float32(c / 2)
    q = poly * t * cute.arch.exp2(size * size * Float32(-LOG2E / 2))
    return cute.arch.fmax(x, Float32(0.0)) - size * q


def clamped_swiglu(k: KernelShape, gate, up):
    """gpt-oss' gate: with g = min(gate, L) and u = clamp(up, -L, L) it is (u + 1) * g * sigmoid(alpha g)."""
    limit = Float32(k.clamp_limit)
    gate = cute.arch.fmin(gate, limit)
    up = cute.arch.fmax(cute.arch.fmin(up, limit), Float32(-k.clamp_limit))
    scale = cute.arch.rcp_approx(Float32(1.0) + cute.arch.exp2(gate * Float32(-LOG2E * k.clamp_alpha)))
    return (up + Float32(1.0)) * (gate * scale)


def bias_at(dtype, bias: cute.Pointer, column, count: int):
    """fp32 values of `count` neighbouring columns of a task's bias in shared memory."""
    place = cute.make_ptr(
        dtype, (bias + column).toint(), cute.AddressSpace.smem, assumed_align=count * dtype.width // 8
    )
    values = cute.make_rmem_tensor(count, dtype)
    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(count)), values)
    return values.load().to(Float32)


def activate(name: str, x):
    """The activation of one fp32 value, in fp32."""
    if name == "relu":
        return cute.arch.fmax(x, Float32(0.0))
    if name == "silu":
        return x * cute.arch.rcp_approx(Float32(1.0) + cute.arch.exp2(x * Float32(-LOG2E)))
    return gelu(x)


def put_piece(k: KernelShape, dtype, values, copy, memory, group, buffer, place, thread):
    """Four sums of a line, from number `place` on, rounded: fp32 ones go to the buffer at once, 16-bit ones wait in
    registers for `put_line`.

    A thread's four are two neighbouring columns of row lane // 4 of its warp's 16 and of the row eight below. In the
    128-byte swizzle 16-byte piece p of row r lies at piece p ^ (r % 8).
    """
    if dtype is not Float32:
        _, _, packed = copy
        cute.make_tensor(packed.iterator + place, cute.make_layout(PIECE)).store(values.load().to(dtype))
        return
    lane, warp = thread % 32, thread % 128 // 32
    row = lane // 4
    piece = (place // PIECE * 2 + lane % 4 // 2) ^ row
    start = memory + (group + 2 * buffer) * (64 * k.line) + (warp * 16 + row) * k.line + piece * 4 + lane % 2 * 2
    pair = cute.make_layout(2)
    for half in range(2):
        target = cute.make_ptr(Float32, (start + half * (8 * k.line)).toint(), cute.AddressSpace.smem, assumed_align=8)
        cute.autovec_copy(cute.make_tensor(values.iterator + half * 2, pair), cute.make_tensor(target, pair))


def put_line(copy, buffer):
    """A line of 16-bit values from registers to its buffer (stmatrix)."""
    tiled, buffers, packed = copy
    cute.copy(tiled, packed, buffers[(None, None, None, buffer)])


@cute.jit
def store_chunks(
    k: cutlass.Constexpr[KernelShape],
    dtype: cutlass.Constexpr,
    group: Int32,
    parity: Int32,
    acc: cute.Tensor,
    copy: tuple,
    memory: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    bias: cute.Pointer,
    thread: Int32,
):
    """A consumer warpgroup applies the activation and writes its 64 rows, one line at a time, into its two buffers for
    the storer.

    parity: how many pairs of chunks this warpgroup has written before, for the phase of the buffer barriers. bias: of
    the task's columns (layers with biases). A thread holds columns 8 g + 2 (lane % 4) + {0, 1} of two rows.
    """
    count = k.line // 2
    second = HALF_COLUMNS // 2
    values = cute.make_rmem_tensor(PIECE, Float32)
    for c in cutlass.range_constexpr(k.chunks0):
        buffer = c % 2
        if cutlass.const_expr(dtype is Float32):
            cute.arch.mbarrier_wait(empty + (group * 2 + buffer), ((parity + c // 2) & 1) ^ 1)
        # rounded piece by piece: a whole chunk in fp32 beside the accumulators would not fit into the registers
        for p in cutlass.range_constexpr(0, count, PIECE):
            first_bias, second_bias = None, None
            if cutlass.const_expr(k.expert_bias):
                column = c * k.line + p // PIECE * 8 + thread % 4 * 2
                if cutlass.const_expr(k.interleaved):
                    both = bias_at(dtype, bias, column * 2, 4)
                    first_bias, second_bias = (both[0], both[2]), (both[1], both[3])
                else:
                    first_bias = bias_at(dtype, bias, column, 2)
                    if cutlass.const_expr(k.gated):
                        second_bias = bias_at(dtype, bias, column + HALF_COLUMNS, 2)
            for v in cutlass.range_constexpr(PIECE):
                value = acc[c * count + p + v]
                if cutlass.const_expr(k.expert_bias):
                    value = value + first_bias[v % 2]
                if cutlass.const_expr(k.gated):
                    up = acc[second + c * count + p + v]
                    if cutlass.const_expr(k.expert_bias):
                        up = up + second_bias[v % 2]
                    if cutlass.const_expr(k.activation == "clamped_swiglu"):
                        value = clamped_swiglu(k, value, up)
                    else:
                        value = activate(k.activation, value) * up
                else:
                    value = activate(k.activation, value)
                values[v] = value
            put_piece(k, dtype, values, copy, memory, group, buffer, p, thread)
        if cutlass.const_expr(dtype is not Float32):
            cute.arch.mbarrier_wait(empty + (group * 2 + buffer), ((parity + c // 2) & 1) ^ 1)
            put_line(copy, buffer)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full + (group * 2 + buffer))


@cute.jit
def turn_few(
    k: cutlass.Constexpr[KernelShape],
    dtype: cutlass.Constexpr,
    kind_first: cutlass.Constexpr,
    few_acc: cute.Tensor,
    base: cute.Pointer,
    address: Int64,
    column: Int32,
    group: Int32,
    thread: Int32,
):
    """A consumer warp stores its columns of the carried rows: the activation of a first product, or the results of a
    second one.

    base: this warp's own 2048 bytes of an epilogue buffer, which must be free. address: in lane l the first byte of
    row l, 0 for none. Of each of the two blocks of weight rows the warp has 16: output columns here. A thread holds
    columns lane // 4 + {0, 8} of rows 2 (lane % 4) + {0, 1} + {0, 8, 16, 24}; through shared memory they become rows
    of 32 bytes, of which a store takes 16.
    """
    vector = ir.VectorType.get([4], Int32.mlir_type)
    lane, warp = thread % 32, thread % 128 // 32
    gated = kind_first and k.gated
    # of a gated first product both blocks make one block of columns
    turned = 1 if gated else 2
    width = k.intermediate if kind_first else k.hidden
    here = HALF_COLUMNS if gated else TILE_COLUMNS
    size = CARRIED_ROWS // 2
    for b in cutlass.range_constexpr(turned):
        place = cute.make_tensor(base + b * (CARRIED_ROWS * 16), cute.make_layout((CARRIED_ROWS, 16), stride=(16, 1)))
        for v in cutlass.range_constexpr(size):
            value = few_acc[b * size + v]
            if cutlass.const_expr(gated):
                up = few_acc[size + v]
                if cutlass.const_expr(k.activation == "clamped_swiglu"):
                    value = clamped_swiglu(k, value, up)
                else:
                    value = activate(k.activation, value) * up
            elif cutlass.const_expr(kind_first):
                value = activate(k.activation, value)
            place[lane % 4 * 2 + v % 2 + v // 4 * 8, lane // 4 + v // 2 % 2 * 8] = value.to(dtype)
    cute.arch.sync_warp()
    for part in cutlass.range_constexpr(CARRIED_ROWS // 16):
        to = cute.arch.shuffle_sync(address, part * 16 + lane // 2)
        for b in cutlass.range_constexpr(turned):
            first = column * here + b * HALF_COLUMNS + group * 64 + warp * 16
            piece = cute.arch.load(base + (b * CARRIED_ROWS + part * 16) * 16 + lane * 8, vector, ss="cta")
            if to >= LOWEST and (width % here == 0 or first < width):
                cute.arch.store(gmem(to + Int64(first) * 2 + lane % 2 * 16, Int32, 16), piece)
    # the buffers are written anew by what follows
    cute.arch.sync_warp()


@cute.jit
def home_address(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, home: Int32, used: Boolean, peers: cute.Pointer,
    staged_row: Int32, buffer_row: Int32, column: Int32,
) -> Int64:  # fmt: skip
    """First byte of the row that `home` names, or 0 unless it is used. peers: the heaps' addresses (shared memory).

    In the wire format "tokens" every result stays here, in row `staged_row` of the results.
    With put-with-signal `home` is the row's `landing_of`, and the address that of the first line of column tile
    `column`; a result for another rank is staged: in row `staged_row` of the results. In the fixed layout a result goes
    to round 1 of the coordinates that its row, `buffer_row`, has in round 0, with this rank as the source.
    """
    address = Int64(0)
    if cutlass.const_expr(k.by_token):
        if used:
            address = a.heap + a.results_at + Int64(staged_row) * (k.hidden * k.element_size)
    elif used:
        rank, route = home >> HOME_BITS, home & ((1 << HOME_BITS) - 1)
        if cutlass.const_expr(k.put):
            address = a.heap + staged_at(k, a, staged_row, column)
            if rank == a.rank:
                address = a.heap + tile_at_home(k, a, side, rank, route, buffer_row, column)
        else:
            base = cute.arch.load(peers + rank, Int64)
            address = base + result_at(k, a, side, rank, route, buffer_row)
    return address


@cute.jit
def return_rows(
    k: cutlass.Constexpr[KernelShape],
    dtype: cutlass.Constexpr,
    address: Int64,
    column: Int32,
    group: Int32,
    parity: Int32,
    acc: cute.Tensor,
    copy: tuple,
    memory: cute.Pointer,
    empty: cute.Pointer,
    bias: cute.Pointer,
    thread: Int32,
):
    """A consumer warp sends its 16 rows of a GEMM1 tile home: 256 columns to row (token, k) of each row's source rank.

    Lane l knows the address of row l % 16. The rows pass through the warp's own part of the epilogue buffers, one line
    at a time, so that a store instruction covers four rows of 128 bytes. Nobody waits for these stores here: the
    storer's fence and counters come after all eight warps have issued theirs.
    """
    wait_buffers(group, parity, empty)
    first = Int64(column) * (TILE_COLUMNS * k.element_size)
    for c in cutlass.range_constexpr(TILE_COLUMNS // k.line):
        round_line(k, dtype, c, group, acc, copy, memory, bias, thread)
        if cutlass.const_expr(dtype is not Float32):
            put_line(copy, c % 2)
        cute.arch.sync_warp()
        store_line(k, column, c, address, first + c * LINE_BYTES, Int32(7), group, memory, thread)


@cute.jit
def keep_lines(
    k: cutlass.Constexpr[KernelShape],
    dtype: cutlass.Constexpr,
    address: Int64,
    step: Int32,
    routed: Boolean,
    put: tuple,
    column: Int32,
    group: Int32,
    parity: Int32,
    acc: cute.Tensor,
    copy: tuple,
    memory: cute.Pointer,
    empty: cute.Pointer,
    bias: cute.Pointer,
    thread: Int32,
):
    """`return_rows` with put-with-signal: lines are stored as they lie in the buffers, and put from there to peers that
    are mapped.

    Lane l knows of row l % 16 the address of the first line that is stored and the bytes from one line to the next, 0
    and 0 if none is. Rows that aren't routed, the shared expert's, lie in order. put: see `put_lines`.
    """
    lines = TILE_COLUMNS // k.line
    wait_buffers(group, parity, empty)
    # 16-bit ones are all rounded first: half as much has to outlive the calls
    rounded = [copy] * lines
    if cutlass.const_expr(dtype is not Float32):
        tiled, buffers, packed = copy
        rounded = [(tiled, buffers, cute.make_rmem_tensor(packed.layout, dtype)) for _ in range(lines)]
        for c in cutlass.range_constexpr(lines):
            round_line(k, dtype, c, group, acc, rounded[c], memory, bias, thread)
    for pair in cutlass.range_constexpr(lines // 2):
        for b in cutlass.range_constexpr(2):
            if cutlass.const_expr(dtype is Float32):
                round_line(k, dtype, pair * 2 + b, group, acc, copy, memory, bias, thread)
            else:
                put_line(rounded[pair * 2 + b], b)
        cute.arch.sync_warp()
        for b in cutlass.range_constexpr(2):
            c = pair * 2 + b
            unswizzle, further = Int32(0), Int64(step) * c
            if cutlass.const_expr(k.shared_intermediate > 0):
                if not routed:
                    unswizzle, further = Int32(7), Int64(c * LINE_BYTES)
            store_line(k, column, c, address, further, unswizzle, group, memory, thread)
        if cutlass.const_expr(k.put_from_shared):
            put_lines(k, column, pair * 2, put, memory + group * (64 * k.line), thread)
        # the buffers are written again only when all lanes have read them
        cute.arch.sync_warp()


@cute.jit
def wait_buffers(group: Int32, parity: Int32, empty: cute.Pointer):
    """The storer may still be reading a hidden tile out of the epilogue buffers."""
    for buffer in cutlass.range_constexpr(2):
        cute.arch.mbarrier_wait(empty + (group * 2 + buffer), (parity & 1) ^ 1)


def round_line(k: KernelShape, dtype, c: int, group, acc, copy, memory, bias, thread):
    """Line c of a GEMM1 tile: sums, with their bias, rounded by `put_piece`."""
    count = k.line // 2
    values = cute.make_rmem_tensor(PIECE, Float32)
    for p in range(0, count, PIECE):
        here = bias_at(dtype, bias, c * k.line + p // PIECE * 8 + thread % 4 * 2, 2) if k.expert_bias else None
        for v in range(PIECE):
            value = acc[c * count + p + v]
            values[v] = value if here is None else value + here[v % 2]
        put_piece(k, dtype, values, copy, memory, group, c % 2, p, thread)


@cute.jit
def store_line(
    k: cutlass.Constexpr[KernelShape], column: Int32, c: cutlass.Constexpr, address: Int64, further: Int64,
    unswizzle: Int32, group: Int32, memory: cute.Pointer, thread: Int32,
):  # fmt: skip
    """A warp stores line c of its 16 rows from their buffer, `further` bytes from their addresses: lane l knows that of
    row l % 16.

    The buffers are in the 128-byte swizzle: 16-byte piece p of row r lies at piece p ^ (r % 8). unswizzle: 7 to store a
    row's pieces in order, 0 to store them as they lie.
    """
    vector = ir.VectorType.get([4], Int32.mlir_type)
    lane, warp = thread % 32, thread % 128 // 32
    whole = k.hidden % TILE_COLUMNS == 0
    chunk = memory + (group + 2 * (c % 2)) * (64 * k.line) + warp * (16 * k.line)
    pieces, places = [], []
    for step in cutlass.range_constexpr(4):
        row = step * 4 + lane // 8
        places.append(cute.arch.shuffle_sync(address + further, row) + lane % 8 * 16)
        inside = row * k.line + ((lane % 8) ^ (row & unswizzle)) * (16 // k.element_size)
        pieces.append(cute.arch.load(chunk + inside, vector, ss="cta"))
    for step in cutlass.range_constexpr(4):
        # an address of 0 stays below any real one whatever the line
        if places[step] >= LOWEST and (whole or column * TILE_COLUMNS + c * k.line < k.hidden):
            cute.arch.store(gmem(places[step], Int32, 16), pieces[step])
