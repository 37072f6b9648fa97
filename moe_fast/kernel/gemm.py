"""One matrix product of a task: TMA loads, the wgmma main loop, the epilogue into shared memory.

A task computes a tile of 128 rows x 256 columns in steps of 128 bytes along the depth. A stage of the pipeline holds a
step of 128 rows and of 256 rows of weights, both in the 128-byte swizzle; operands of float32 are rounded to TF32 on
their way into it (TMA). The weights come as two halves of 128
rows: neighbours, or for the first product of a gated layer the gate's rows and the up projection's. Either way column c
of the first half and column c of the second lie in the same thread's accumulators, so a gated activation needs no
exchange and reads the rows once.

A bias of the task's 256 columns comes with the first stage, into one of two small buffers: the loader is never more
than one task ahead of the consumers (it has their next task word only when they have done with the last).

Stage barriers count in a running number: stage = count % STAGES, phase = count // STAGES % 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Boolean, Float16, Float32, Int16, Int32, Int64, TFloat32
from cutlass._mlir import ir
from cutlass.cute.nvgpu import warpgroup

from moe_fast.kernel.constants import (
    AHEAD,
    CARRIED_ROWS,
    HALF_COLUMNS,
    HOME_BITS,
    LINE_BYTES,
    STAGES,
    TILE_COLUMNS,
    TILE_ROWS,
)
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import Args, gmem, result_at, staged_at, tile_at_home
from moe_fast.kernel.transport import put_lines

LOWEST = 1 << 24
"""Device addresses are above this, offsets inside a row below."""
PIECE = 4
"""Values that the epilogue rounds together."""
LOG2E = 1.4426950408889634
DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}
"""A layer's dtype as the DSL's."""


@dataclass(frozen=True)
class MmaTF32Op(warpgroup.MmaF16BF16Op):
    """wgmma of TF32, m64 n<columns> k8, both operands from shared memory: the DSL has the atom, but no class for it."""

    def __init__(self, columns: int) -> None:
        major = cute.nvgpu.OperandMajorMode.K
        shape = (64, columns, 8)
        super().__init__(TFloat32, Float32, shape, warpgroup.OperandSource.SMEM, major, major)

    def _verify(self) -> None:
        """The base class' checks are those of 16-bit operands."""


def operand_type(dtype):
    """What the tensor cores take for a layer's dtype."""
    return TFloat32 if dtype is Float32 else dtype


def tiled_mma(dtype, columns: int = TILE_COLUMNS, groups: int = 2) -> cute.TiledMma:
    """wgmma m64 n<columns>, 32 bytes deep, for each of the two consumer warpgroups (or one), both operands from shared
    memory, fp32 sums."""
    if dtype is Float32:
        return cute.make_tiled_mma(cute.make_mma_atom(MmaTF32Op(columns)), (groups, 1, 1))
    return sm90.make_trivial_tiled_mma(
        dtype,
        dtype,
        cute.nvgpu.OperandMajorMode.K,
        cute.nvgpu.OperandMajorMode.K,
        Float32,
        (groups, 1, 1),
        tiler_mn=(64, columns),
    )


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
) -> Int32:
    """The whole loader warp streams one task's operands; returns the new running count of stages.

    asked: barrier of the dispatcher, which is told AHEAD steps before the end to fetch the next task: in time for its
    operands, and not long before, for a task that waits behind this one could run elsewhere.
    rows_there: rows that rows_atom loads, 128, or 64 or FEW_ROWS where the others are padding (rows_smem then counts
    such parts of a stage). What a stage holds in their place multiplies into rows of results that nobody reads.
    pair: see `load_weights`.
    """
    for step in range(depth):
        stage = count % STAGES
        if step == max(depth - AHEAD, 0):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(asked)
        cute.arch.mbarrier_wait(empty + stage, ((count // STAGES) & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, (rows_there + TILE_COLUMNS) * LINE_BYTES)
        place = stage * (TILE_ROWS // rows_there)
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
    """As `load_product`, for a full row tile and CARRIED_ROWS rows of the next one; returns the new running count.

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

    rows_there: tokens of the tile, 128 or 64; as in `load_product`. steps: of 128 bytes in a stage. A block alone is
    bound by the way to memory, not by its bytes: where a tile is low, a stage takes two steps and as many bytes.

    The router's stages are as narrow as it is, so they share memory with other stages of tasks. That is safe: a task
    begins only after the plan, and the plan only after every token tile's logits are computed.
    """
    for step in range(k.gate_depth // steps):
        stage = count % STAGES
        cute.arch.mbarrier_wait(empty + stage, ((count // STAGES) & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, (rows_there + k.gate_columns) * LINE_BYTES * steps)
        place = stage * (TILE_ROWS // rows_there)
        for i in cutlass.range_constexpr(steps):
            here = step * steps + i
            part = here
            if cutlass.const_expr(k.router_parts > 1):
                # the router's parts stand side by side; each meets the whole token
                part = here % k.depth0
            cute.copy(rows_atom, rows[(None, part)], rows_smem[(None, place + i)], tma_bar_ptr=full + stage)
            to = router_smem[(None, stage * steps + i)]
            cute.copy(router_atom, router[(None, here)], to, tma_bar_ptr=full + stage)
        count += 1
    return count


@cute.jit
def release(empty: cute.Pointer, count: Int32, paired: cutlass.Constexpr = False):
    """A consumer warp hands a stage back to the loader, or to those of both blocks, which both fill it."""
    with cute.arch.elect_one():
        if cutlass.const_expr(paired):
            for member in cutlass.range_constexpr(2):
                cute.arch.mbarrier_arrive(empty + count % STAGES, member)
        else:
            cute.arch.mbarrier_arrive(empty + count % STAGES)


@cute.jit
def multiply(
    dtype: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    acc: cute.Tensor,
    a_frag: cute.Tensor,
    b_frag: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    count: Int32,
    depth: Int32,
    paired: cutlass.Constexpr = False,
) -> Int32:
    """A consumer warpgroup accumulates one task; returns the new running count of stages."""
    # made here, not handed in: whether it accumulates is a property of the object, which may not outlive a loop body
    mma = tiled_mma(dtype, columns)
    blocks = cute.size(a_frag, mode=[2])
    mma.set(warpgroup.Field.ACCUMULATE, False)
    cute.arch.mbarrier_wait(full + count % STAGES, (count // STAGES) & 1)
    warpgroup.fence()
    for kb in cutlass.range_constexpr(blocks):
        stage = count % STAGES
        cute.gemm(mma, acc, a_frag[(None, None, kb, stage)], b_frag[(None, None, kb, stage)], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    for _ in range(1, depth):
        following = count + 1
        stage = following % STAGES
        cute.arch.mbarrier_wait(full + stage, (following // STAGES) & 1)
        for kb in cutlass.range_constexpr(blocks):
            cute.gemm(mma, acc, a_frag[(None, None, kb, stage)], b_frag[(None, None, kb, stage)], acc)
        warpgroup.commit_group()
        # the product of one step stays in flight, so only the stage before it is free
        warpgroup.wait_group(1)
        release(empty, count, paired)
        count = following
    warpgroup.wait_group(0)
    release(empty, count, paired)
    return count + 1


@cute.jit
def multiply_logits(
    dtype: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    acc: cute.Tensor,
    a_frag: cute.Tensor,
    b_frag: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    count: Int32,
    depth: cutlass.Constexpr,
    double: Int32,
    group: Int32,
) -> Int32:
    """As `multiply`, for what `load_logits` brings: 64 rows of a token tile for warpgroup `group`.

    a_frag: in places of 64 rows, two in a stage. depth: steps of 128 bytes. double: 1 where a stage holds two of them,
    all for the first warpgroup, else 0.
    """
    mma = tiled_mma(dtype, columns)
    blocks = cute.size(a_frag, mode=[2])
    mma.set(warpgroup.Field.ACCUMULATE, False)
    stage = count % STAGES
    cute.arch.mbarrier_wait(full + stage, (count // STAGES) & 1)
    warpgroup.fence()
    a_place, b_place = stage * 2 + group, stage << double
    for kb in cutlass.range_constexpr(blocks):
        cute.gemm(mma, acc, a_frag[(None, None, kb, a_place)], b_frag[(None, None, kb, b_place)], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    for step in range(1, depth):
        # the second step of a stage has come with the first
        second = step & double
        following = count + 1 - second
        stage = following % STAGES
        cute.arch.mbarrier_wait(full + stage, (following // STAGES) & 1)
        a_place, b_place = stage * 2 + group + second, (stage << double) + second
        for kb in cutlass.range_constexpr(blocks):
            cute.gemm(mma, acc, a_frag[(None, None, kb, a_place)], b_frag[(None, None, kb, b_place)], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if second == 0:
            release(empty, count)
        count = following
    warpgroup.wait_group(0)
    release(empty, count)
    return count + 1


@cute.jit
def multiply_carrying(
    dtype: cutlass.Constexpr,
    acc: cute.Tensor,
    few_acc: cute.Tensor,
    a_frag: cute.Tensor,
    b_frag: cute.Tensor,
    w_frag: cute.Tensor,
    few_frag: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    count: Int32,
    depth: Int32,
    paired: cutlass.Constexpr,
) -> Int32:
    """As `multiply`, and beside it the product of the CARRIED_ROWS rows, with its operands in turned roles: out^T =
    W rows^T, blocks of 64 weight rows (w_frag, the same memory as b_frag) by CARRIED_ROWS rows.

    Warpgroup g takes the weights' blocks g and 2 + g, so gate and up values of a column are one thread's, as in `acc`.
    """
    mma, few_mma = tiled_mma(dtype), tiled_mma(dtype, CARRIED_ROWS)
    blocks = cute.size(a_frag, mode=[2])
    mma.set(warpgroup.Field.ACCUMULATE, False)
    few_mma.set(warpgroup.Field.ACCUMULATE, False)
    cute.arch.mbarrier_wait(full + count % STAGES, (count // STAGES) & 1)
    warpgroup.fence()
    for kb in cutlass.range_constexpr(blocks):
        stage = count % STAGES
        cute.gemm(mma, acc, a_frag[(None, None, kb, stage)], b_frag[(None, None, kb, stage)], acc)
        cute.gemm(few_mma, few_acc, w_frag[(None, None, kb, stage)], few_frag[(None, None, kb, stage)], few_acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        few_mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    for _ in range(1, depth):
        following = count + 1
        stage = following % STAGES
        cute.arch.mbarrier_wait(full + stage, (following // STAGES) & 1)
        for kb in cutlass.range_constexpr(blocks):
            cute.gemm(mma, acc, a_frag[(None, None, kb, stage)], b_frag[(None, None, kb, stage)], acc)
            cute.gemm(few_mma, few_acc, w_frag[(None, None, kb, stage)], few_frag[(None, None, kb, stage)], few_acc)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        release(empty, count, paired)
        count = following
    warpgroup.wait_group(0)
    release(empty, count, paired)
    return count + 1


@cute.jit
def multiply_exactly(
    dtype: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    acc: cute.Tensor,
    a_frag: cute.Tensor,
    b_frag: cute.Tensor,
    rest_frag: cute.Tensor,
    rows: cute.Pointer,
    rest: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    count: Int32,
    depth: cutlass.Constexpr,
    thread: Int32,
) -> Int32:
    """A consumer warpgroup's logits of fp32 tokens and router, by three products of TF32; returns the new running
    count.

    x = h + r with h the bits that TF32 has; so is the router, whose two parts come one after the other. While the first
    is here, h and r are multiplied by it, then h by the second: what is missing is a product of rests, 2^-22. The
    loader brings x as it is; the warpgroup takes it apart in shared memory, h in place, r into `rest`, in the same
    swizzle. rows: the stages; both pointers of fp32.
    """
    mma = tiled_mma(dtype, columns)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    acc.fill(0.0)
    group, inside = thread // 128, thread % 128
    whole = cute.make_rmem_tensor(4, Float32)
    high = cute.make_rmem_tensor(4, Float32)
    low = cute.make_rmem_tensor(4, Float32)
    quarter = cute.make_layout(4)
    blocks = cute.size(a_frag, mode=[2])
    for _ in range(depth):
        stage = count % STAGES
        cute.arch.mbarrier_wait(full + stage, (count // STAGES) & 1)
        for j in cutlass.range_constexpr(4):
            place = group * (64 * LINE_BYTES // 4) + (j * 128 + inside) * 4
            source = shared_floats(rows + stage * (TILE_ROWS * LINE_BYTES // 4) + place)
            cute.autovec_copy(cute.make_tensor(source, quarter), whole)
            for i in cutlass.range_constexpr(4):
                high[i] = (whole[i].bitcast(Int32) & ~0x1FFF).bitcast(Float32)
                low[i] = whole[i] - high[i]
            cute.autovec_copy(high, cute.make_tensor(source, quarter))
            cute.autovec_copy(low, cute.make_tensor(shared_floats(rest + place), quarter))
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_group(group)
        warpgroup.fence()
        for kb in cutlass.range_constexpr(blocks):
            cute.gemm(mma, acc, a_frag[(None, None, kb, stage)], b_frag[(None, None, kb, stage)], acc)
            cute.gemm(mma, acc, rest_frag[(None, None, kb)], b_frag[(None, None, kb, stage)], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        # nobody takes the next stage apart while a product of this one still reads the rest
        sync_group(group)
        release(empty, count)
        count += 1
    warpgroup.fence()
    for step in range(depth):
        stage = count % STAGES
        cute.arch.mbarrier_wait(full + stage, (count // STAGES) & 1)
        for kb in cutlass.range_constexpr(blocks):
            cute.gemm(mma, acc, a_frag[(None, None, kb, stage)], b_frag[(None, None, kb, stage)], acc)
        warpgroup.commit_group()
        # as in `multiply`: the product of one step stays in flight
        warpgroup.wait_group(1)
        if step > 0:
            release(empty, count - 1)
        count += 1
    warpgroup.wait_group(0)
    release(empty, count - 1)
    return count


def shared_floats(pointer):
    """Pointer to four aligned fp32 values in shared memory."""
    return cute.make_ptr(Float32, pointer.toint(), cute.AddressSpace.smem, assumed_align=16)


def sync_group(group):
    """Barrier of one consumer warpgroup."""
    cute.arch.barrier(barrier_id=2 + group, number_of_threads=128)


@cute.jit
def pass_over(
    full: cute.Pointer, empty: cute.Pointer, count: Int32, depth: Int32, paired: cutlass.Constexpr = False
) -> Int32:  # fmt: skip
    """A consumer warpgroup whose 64 rows are all padding: hand the stages back unread, leave the tensor cores to the
    other one; returns the new running count of stages."""
    for _ in range(depth):
        cute.arch.mbarrier_wait(full + count % STAGES, (count // STAGES) & 1)
        release(empty, count, paired)
        count += 1
    return count


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

    Lane l knows the address of row l % 16. The rows pass through the
    warp's own part of the epilogue buffers, one line at a time, so that a store instruction covers four rows of 128
    bytes. Nobody waits for these stores here: the storer's fence and counters come after all eight warps have issued
    theirs.

    The buffers are in the 128-byte swizzle: 16-byte piece p of row r lies at piece p ^ (r % 8).
    """
    vector = ir.VectorType.get([4], Int32.mlir_type)
    lane, warp = thread % 32, thread % 128 // 32
    count = k.line // 2
    values = cute.make_rmem_tensor(PIECE, Float32)
    whole = k.hidden % TILE_COLUMNS == 0
    for buffer in cutlass.range_constexpr(2):
        # the storer may still be reading a hidden tile out of it
        cute.arch.mbarrier_wait(empty + (group * 2 + buffer), (parity & 1) ^ 1)
    for c in cutlass.range_constexpr(TILE_COLUMNS // k.line):
        for p in cutlass.range_constexpr(0, count, PIECE):
            here = None
            if cutlass.const_expr(k.expert_bias):
                here = bias_at(dtype, bias, c * k.line + p // PIECE * 8 + thread % 4 * 2, 2)
            for v in cutlass.range_constexpr(PIECE):
                value = acc[c * count + p + v]
                if cutlass.const_expr(k.expert_bias):
                    value = value + here[v % 2]
                values[v] = value
            put_piece(k, dtype, values, copy, memory, group, c % 2, p, thread)
        if cutlass.const_expr(dtype is not Float32):
            put_line(copy, c % 2)
        cute.arch.sync_warp()
        chunk = memory + (group + 2 * (c % 2)) * (64 * k.line) + warp * (16 * k.line)
        pieces, places = [], []
        for step in cutlass.range_constexpr(4):
            row = step * 4 + lane // 8
            place = cute.arch.shuffle_sync(address, row)
            first = Int64(column) * (TILE_COLUMNS * k.element_size)
            places.append(place + first + (c * LINE_BYTES + lane % 8 * 16))
            inside = row * k.line + ((lane % 8) ^ (row % 8)) * (16 // k.element_size)
            pieces.append(cute.arch.load(chunk + inside, vector, ss="cta"))
        for step in cutlass.range_constexpr(4):
            # an address of 0 stays below any real one whatever the column
            if places[step] >= LOWEST and (whole or column * TILE_COLUMNS + c * k.line < k.hidden):
                cute.arch.store(gmem(places[step], Int32, 16), pieces[step])


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
