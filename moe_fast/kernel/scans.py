"""What the 256 consumer threads of a block do together: a barrier of their own, and sums over all of them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

CONSUMERS = 256


def sync_consumers():
    """Barrier of the 256 consumer threads of a block."""
    cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)


@cute.jit
def scan(value: Int32, scratch: cute.Pointer, thread: Int32) -> Int32:
    """Exclusive sum over the 256 threads; every thread must call it. scratch: 8 words of shared memory."""
    lane = thread % 32
    total = value
    for d in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(total, 1 << d, mask_and_clamp=0)
        if lane >= (1 << d):
            total += other
    sync_consumers()
    if lane == 31:
        cute.arch.store(scratch + (thread >> 5), total)
    sync_consumers()
    before = Int32(0)
    for w in cutlass.range_constexpr(8):
        part = cute.arch.load(scratch + w, Int32)
        if w < (thread >> 5):
            before += part
    return before + total - value
