"""The second transport: NVSHMEM's put-with-signal, for peers whose memory isn't mapped here.

Direct stores need a mapped peer. A put names the peer by its rank and the place by this rank's own address of the same
symmetric memory; NVSHMEM carries it over whatever links the two. Payload and signal travel together: the signal is seen
only after the payload, so a receiver waits for its counters exactly as with stores.

What differs from stores, all of it at compile time (`KernelShape.put`):

* A put's source must lie in symmetric memory, so rows are staged: dispatched ones in `wire`, results in `results`.
  Nothing there is written before every rank has begun the call, so no peer's last put can still be on its way.
* A row is one packet: the row, then its home. With stores the home is a word of another array.
* Signals are 64-bit words. Only their lower halves are looked at, so waits are the same.
* A result travels as a whole row, once its last column tile is done, not tile by tile.

`put_signal_nbi` on a peer of the same host is a copy by this warp's stores, then a fence and an atomic add: slower than
direct stores, by the staging and by a fence for each row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint64
from cutlass._mlir.dialects.cute import PtrType
from cutlass.base_dsl.typing import get_mlir_types

from moe_fast.kernel.constants import HOME_BITS, TILE_ROWS
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import (
    PUT_RESULTS,
    PUT_ROWS,
    Args,
    aborted,
    add,
    arrived_word,
    back_word,
    buffer_tile,
    fetch_add,
    gmem,
    home_of,
    result_at,
    returned_word,
    shared_returned,
    side_counters,
)

SIGNAL_SET, SIGNAL_ADD = 9, 10
"""NVSHMEM_SIGNAL_SET and NVSHMEM_SIGNAL_ADD."""


class DeviceLibrary(cute.BitCode):
    """NVSHMEM's device code for Hopper, found when a kernel that uses it is compiled (no GPU is asked)."""

    def __init__(self) -> None:
        pass

    @property
    def path(self) -> str:
        from nvshmem.core.init_fini import find_device_bitcode_library

        return find_device_bitcode_library(arch=90)


class GlobalPointer:
    """A pointer to global memory as an extern's parameter."""

    def __init__(self, dtype) -> None:
        self.dtype = dtype

    def __get_mlir_types__(self):
        # natural alignment, as `gmem` makes pointers
        return [PtrType.get(self.dtype.mlir_type, cute.AddressSpace.gmem, self.dtype.width // 8)]

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


@cute.jit
def put(
    target: Int64, source: Int64, words: cutlass.Constexpr, signal: Int64, value: Int32, operation: cutlass.Constexpr,
    rank: Int32,
):  # fmt: skip
    """Whole warp: `words` 4-byte words to another rank, then its signal. target, signal: this rank's own addresses."""
    nvshmem_put_signal(
        gmem(target), gmem(source), Uint64(words), gmem(signal, Uint64), Uint64(value), Int32(operation), rank
    )


@cute.jit
def put_counts(k: cutlass.Constexpr[KernelShape], a: Args, row: Int32, signal: Int32, lane: Int32):
    """A whole warp: this rank's row of counts, which lies in its own memory, to all others.

    row: index of its first word. The caller has made it visible to this warp.
    """
    cute.arch.fence_acq_rel_sys()
    own = a.heap + a.counts_at + Int64(row) * 4
    flag = a.heap + a.counts_flag_at + Int64(a.rank) * (4 * k.signal_words)
    for i in range(1, k.ranks):
        put(own, own, k.counts_stride, flag, signal, SIGNAL_SET, (a.rank + i) % k.ranks)


@cute.jit
def put_rows(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, destination: Int32, begin: Int32, count: Int32, row: Int32,
    lane: Int32,
):  # fmt: skip
    """A whole warp: `count` staged packets from place `begin` on. row: of lane r, the row where packet r lands."""
    pitch = k.row_pitch
    for r in range(count):
        there = cute.arch.shuffle_sync(row, r)
        put(
            a.heap + a.rows_at + (Int64(side) * a.rows + there) * pitch,
            a.heap + a.wire_at + Int64(begin + r) * pitch,
            (k.hidden * k.element_size + 16) // 4,
            a.heap + a.arrived_at + Int64(arrived_word(k, a, side, there // TILE_ROWS)) * 4,
            Int32(1),
            SIGNAL_ADD,
            destination,
        )
    if lane == 0:
        add(a.control, PUT_ROWS, count, "gpu")


@cute.jit
def put_results(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, row_tile: Int32, filled: Int32, routed: Boolean,
    lane: Int32,
):  # fmt: skip
    """The storer warp, after the consumers have issued the stores of a GEMM1 tile: the last column tile sends the rows.

    Rows of this rank are home already and are only counted, like those of the shared expert (not routed), which never
    leave; the others' go from `results`.
    """
    row_bytes = k.hidden * k.element_size
    cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_warp()
    before = Int32(0)
    if lane == 0:
        place = returned_word(k, a, row_tile)
        if not routed:
            place = shared_returned(a, row_tile)
        before = fetch_add(side_counters(a, side), place)
    if cute.arch.shuffle_sync(before, 0) == k.columns1 - 1 and not aborted(a):
        # what other blocks' consumers stored, then what NVSHMEM reads
        cute.arch.fence_acq_rel_sys()
        first = row_tile * TILE_ROWS
        if routed:
            first = buffer_tile(k, a, row_tile) * TILE_ROWS
        homes = cute.make_rmem_tensor(4, Int32)
        for i in cutlass.range_constexpr(4):
            homes[i] = Int32(0)
            if i * 32 + lane < filled:
                homes[i] = (a.rank << HOME_BITS) | ((row_tile * TILE_ROWS + i * 32 + lane) * k.top_k)
                if routed:
                    homes[i] = home_of(k, a, side, first + i * 32 + lane)
        sent = Int32(0)
        for r in range(filled):
            home = Int32(0)
            for i in cutlass.range_constexpr(4):
                one = cute.arch.shuffle_sync(homes[i], r & 31)
                if r // 32 == i:
                    home = one
            route = home & ((1 << HOME_BITS) - 1)
            owner = home >> HOME_BITS
            signal = a.heap + a.back_at + Int64(back_word(k, a, side, route // k.top_k)) * 4
            if owner == a.rank:
                if lane == 0:
                    add_signal(signal, 1)
            else:
                put(
                    a.heap + result_at(k, a, side, owner, route, first + r),
                    a.heap + a.results_at + (Int64(row_tile) * TILE_ROWS + r) * row_bytes,
                    row_bytes // 4,
                    signal,
                    Int32(1),
                    SIGNAL_ADD,
                    owner,
                )
                sent += 1
        if lane == 0:
            add(a.control, PUT_RESULTS, sent, "gpu")
    cute.arch.sync_warp()


def add_signal(address, value):
    """Add to a signal of this rank, which peers add to with puts: all 64 bits, as they do."""
    cute.arch.red(gmem(address, Int64), Int64(value), op="add", dtype="u64", sem="relaxed", scope="sys")
