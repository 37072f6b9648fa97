"""The spare warp: Scheduler and Subscribers in the first blocks; elsewhere it pushes rows, then combines early.

In 16-bit kernels of several ranks whose processors are pairs of blocks, only one spare warp of SENDERS pushes rows. The
others combine from the start; in the wire format "tokens" they first look after followers, as all do.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from moe_fast.kernel.combine import combine_early
from moe_fast.kernel.constants import SENDERS, PlanWord
from moe_fast.kernel.dispatch import push_rest, wait_list
from moe_fast.kernel.gemm import DTYPES
from moe_fast.kernel.plan import wait_plan
from moe_fast.kernel.scheduler import schedule
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import Args, Phase, Role, held_start, hold_start, note, read, side_counters, write
from moe_fast.kernel.subscriber import subscribe
from moe_fast.kernel.tokens import push_tokens


@cute.jit
def spare(
    k: cutlass.Constexpr[KernelShape],
    a: Args,
    side: Int32,
    block: Int32,
    processors: Int32,
    over: cute.Pointer,
    lane: Int32,
):
    """The spare warp: zero the other side's counters, then schedule, subscribe, or push rows and combine."""
    other = side_counters(a, 1 - side)
    for i in range(block * 32 + lane, a.counter_words, processors * 32):
        write(other, i, 0)
    if cute.arch.vote_all_sync(wait_plan(a, side, Role.DISPATCH)):
        pushes = Boolean(True)
        if cutlass.const_expr(k.scheduler == "spare_warps"):
            row_tiles = read(a.plan, PlanWord.ROW_TILES)
            workers = processors
            if cutlass.const_expr(k.paired):
                workers = processors // 2
            if block == 0:
                pushes = Boolean(False)
                schedule(k, a, side, row_tiles, workers, lane)
            elif block < 4:
                pushes = Boolean(False)
                subscribe(k, a, side, row_tiles, workers, (block - 1) * 32 + lane)
        if pushes:
            wait_list(a, side, processors)
            if cutlass.const_expr(k.trace):
                if lane == 0:
                    hold_start(a, block, 2)
            sends = Boolean(True)
            if cutlass.const_expr(k.few_send):
                sends = block % SENDERS == 0
            if cutlass.const_expr(k.by_token):
                push_tokens(k, a, side, sends, lane)
            elif sends:
                push_rest(k, a, side, lane)
            if cutlass.const_expr(k.trace):
                if lane == 0:
                    note(a, block, 2, held_start(a, block, 2), Int64(Phase.PUSH))
            # Numbers of the warps that combine, from the last block on. Were they the blocks' own, combining would
            # count on in that register, and the compiler keep it in memory throughout the kernel; told before the
            # pushes, they would take one there.
            first, stride = processors - 1 - block, processors
            if cutlass.const_expr(k.scheduler == "spare_warps"):
                stride = processors - 4
            usable = Boolean(True)
            if cutlass.const_expr(k.fixed or k.by_token or k.put):
                # without a plan nobody has written where results come back
                usable = read(a.plan, PlanWord.USABLE) != 0
            if usable:
                blocks, _, _ = cute.arch.grid_dim()
                combine_early(k, DTYPES[k.dtype], a, side, first, stride, over, block, blocks, lane)
