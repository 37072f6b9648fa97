"""Counts from every rank to every rank, each with the number of the call beside it; see `plan`."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import (
    Args,
    Role,
    Wait,
    aborted,
    fail,
    read,
    write,
)
from moe_ref.layout import SIDES
from moe_ref.runtime.encoding import counts_signal


def told_at(k, a):
    """Where in a heap counts come in, behind where they then are: [side, rank, counts_stride] words of 8 bytes, the
    count below, the signal of the call above."""
    return a.counts_at + SIDES * k.ranks * k.counts_stride * 4


@cute.jit
def tell(
    k: cutlass.Constexpr[KernelShape], a: Args, base: Int64, word: Int32, value: Int32, epoch: Int32,
    told: cutlass.Constexpr,
):  # fmt: skip
    """One word of my row of counts into the heap at `base`: with the call's signal, or as it is."""
    if cutlass.const_expr(told):
        both = (Int64(value) & 0xFFFFFFFF) | (Int64(counts_signal(epoch)) << 32)
        write(base + told_at(k, a), word, both, Int64, sem="relaxed", scope="sys")
    else:
        write(base + a.counts_at, word, value)


@cute.jit
def hear(k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, column: Int32, epoch: Int32, scratch: cute.Pointer):
    """One thread: wait for one column of all ranks' counts and leave it as it is. If that fails, scratch[8] is 0."""
    words = a.heap + told_at(k, a)
    signal = counts_signal(epoch)
    seen = cute.make_rmem_tensor(k.ranks, Int64)
    start = cute.arch.globaltimer()
    turns = Int32(0)
    go = Boolean(True)
    while go:
        missing, last = Int32(k.ranks), signal
        for p in cutlass.range_constexpr(k.ranks):
            at = (side * k.ranks + p) * Int32(k.counts_stride) + column
            seen[p] = read(words, at, Int64, sem="relaxed", scope="sys")
        for p in cutlass.range_constexpr(k.ranks):
            if Int32(seen[p] >> 32) != signal:
                missing, last = Int32(p), Int32(seen[p] >> 32)
        go = missing < k.ranks
        turns += 1
        if go and (turns & 15) == 0:
            if aborted(a):
                cute.arch.store(scratch + 8, Int32(0))
                go = Boolean(False)
            elif Int64(cute.arch.globaltimer() - start) > a.deadline:
                fail(a, Role.PLANNER, Wait.COUNTS, missing, last, signal)
                cute.arch.store(scratch + 8, Int32(0))
                go = Boolean(False)
    for p in cutlass.range_constexpr(k.ranks):
        at = (side * k.ranks + p) * Int32(k.counts_stride) + column
        write(a.heap + a.counts_at, at, Int32(seen[p] & 0xFFFFFFFF))
