"""The roles inside a processor block: loader, dispatcher, storer, and two warpgroups of consumers.

Warpgroup 0 gives registers away and does the talking; warpgroups 1 and 2 compute and never wait for memory beyond this
block's shared memory while tasks run. A ring of slots carries task words from the dispatcher to the ten readers
(loader, storer, eight consumer warps), each of which hands a slot back as soon as it has read it. The next word is
fetched when the loader nears the end of a task: early enough for its operands, and no earlier, for a task that waits
here could run elsewhere.

The storer owns completion: it alone waits until results have arrived where they go, and then releases the counters. For
rows of other ranks that takes longer than a short task, so the ring lets it fall behind without holding the others up.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from moe_fast.kernel.constants import FIELDS_SHIFT, HOME_BITS, TILE_ROWS, PlanWord
from moe_fast.kernel.dispatch import wait_list
from moe_fast.kernel.final_combine import open_side
from moe_fast.kernel.plan import wait_plan
from moe_fast.kernel.ring import ring_phase, ring_place
from moe_fast.kernel.scheduler import ahead_of, finish_hidden, first_word, next_mail, next_shared, next_ticket
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import (
    Args,
    Role,
    aborted,
    add,
    back_word,
    buffer_tile,
    done_word,
    fetch_add,
    home_of,
    peer,
    read,
    returned_word,
    shared_returned,
    side_counters,
    summed_word,
)
from moe_fast.kernel.tile_pairs import FIELDS, carried_tile, field_few, field_rows, field_same
from moe_ref.layout import ceil_div
from moe_ref.runtime.encoding import (
    GEMM0,
    GEMM1,
    NONE,
    SLOT_SHIFT,
    STOP,
    task_column_tile,
    task_kind,
    task_row_tile,
)

READERS = 10
"""Warps that read each task word."""


def unpack(word):
    """(kind, row tile, column tile) of a task word, as Int32."""
    return Int32(task_kind(word)), Int32(task_row_tile(word)), Int32(task_column_tile(word))


def member_of(block):
    """Which of the two blocks of a pair this is, in a paired kernel."""
    return block & 1


def fields_of(word):
    """The fields (`tile_pairs`) of a block's task word, as Int32."""
    return Int32(word >> FIELDS_SHIFT)


@cute.jit
def take_word(
    k: cutlass.Constexpr[KernelShape], slots: cute.Pointer, full: cute.Pointer, empty: cute.Pointer, number: Int32
) -> Int64:
    """A whole warp reads task word `number` (from 0) and hands its slot back."""
    slot = ring_place(number, k.words)
    cute.arch.mbarrier_wait(full + slot, ring_phase(number, k.words))
    word = cute.arch.load(slots + slot, Int64)
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(empty + slot)
    return word


@cute.jit
def try_word(
    k: cutlass.Constexpr[KernelShape], slots: cute.Pointer, full: cute.Pointer, empty: cute.Pointer, number: Int32
) -> tuple[Boolean, Int64]:
    """As `take_word`, if the word is there; else False, and nothing is taken."""
    slot = ring_place(number, k.words)
    there, word = cute.arch.mbarrier_test_wait(full + slot, ring_phase(number, k.words)), Int64(0)
    there = cute.arch.vote_all_sync(there)
    if there:
        word = cute.arch.load(slots + slot, Int64)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty + slot)
    return there, word


@cute.jit
def dispatch_words(
    k: cutlass.Constexpr[KernelShape],
    a: Args,
    side: Int32,
    slots: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    asked: cute.Pointer,
    shares: cute.Pointer,
    processor: Int32,
    processors: Int32,
):
    """The dispatcher, one thread: fetch task words until the stop word.

    A shared expert's tasks depend on no other rank: its first products come before all routed tasks, while rows are on
    their way here, its second ones after them, while results are on their way home.
    """
    ok = wait_plan(a, side, Role.DISPATCHER)
    row_tiles = Int32(0)
    token_tiles = Int32(0)
    if ok:
        row_tiles = read(a.plan, PlanWord.ROW_TILES)
        if cutlass.const_expr(k.shared_intermediate > 0):
            if read(a.plan, PlanWord.USABLE) != 0:
                token_tiles = Int32(ceil_div(a.tokens, TILE_ROWS))
    # of the shared expert: first products left, then the routed tasks, then second products
    before, after = token_tiles > 0, Boolean(False)
    number = Int32(0)
    mails = Int32(0)
    ahead = ahead_of(k, row_tiles, processors)
    go = Boolean(True)
    while go:
        slot = ring_place(number, k.words)
        cute.arch.mbarrier_wait(empty + slot, ring_phase(number, k.words) ^ 1)
        # the loader is near the end of the task before; for word 0 this passes at once
        cute.arch.mbarrier_wait(asked, (number & 1) ^ 1)
        word = Int64(STOP)
        if ok:
            if cutlass.const_expr(k.shared_intermediate > 0):
                if before:
                    word = next_shared(k, a, side, GEMM0, token_tiles)
                    before = Int32(task_kind(word)) != STOP
            routed = not (before or after)
            if routed:
                if cutlass.const_expr(k.scheduler == "tickets"):
                    word = next_ticket(k, a, side, row_tiles)
                else:
                    word = Int64(NONE)
                    while Int32(task_kind(word)) == NONE:
                        mails += 1
                        if cutlass.const_expr(k.deals_ahead):
                            if mails == 1 and processor < ahead:
                                word = first_word(k, processor, row_tiles)
                            else:
                                word = next_mail(k, a, side, processor, processors, mails)
                        else:
                            word = next_mail(k, a, side, processor, processors, mails)
                if Int32(task_kind(word)) != STOP:
                    # looked up here, where there is time: the consumers' own loads would hold their products up
                    fields = read(a.tile_rows, Int32(task_row_tile(word))) & FIELDS
                    if cutlass.const_expr(k.scheduler != "tickets"):
                        expert = read(a.tile_slot, Int32(task_row_tile(word)))
                        word = word | (Int64(expert) << SLOT_SHIFT)
                    word = word | (Int64(fields) << FIELDS_SHIFT)
                else:
                    after = token_tiles > 0
            if cutlass.const_expr(k.shared_intermediate > 0):
                if after:
                    word = next_shared(k, a, side, GEMM1, token_tiles)
        go = Int32(task_kind(word)) != STOP
        if not go:
            # Whoever combines after the last task knows what every token waits for: this acquires what all blocks
            # listed, and the barrier below hands it on to the readers of the word. It waits for consumers only, who
            # list before their first task, so for no product.
            wait_list(a, side, processors)
            open_side(a, side, shares)
        cute.arch.store(slots + slot, word)
        cute.arch.mbarrier_arrive(full + slot)
        number += 1


@cute.jit
def count_returned(
    k: cutlass.Constexpr[KernelShape],
    a: Args,
    side: Int32,
    row_tile: Int32,
    fields: Int32,
    member: Int32,
    routed: Boolean,
    halves: Int32,
    lane: Int32,
):
    """The storer warp, after the consumers have issued the stores of a GEMM1 tile: make them visible, then count them.

    The fence covers the consumers' stores too: they came before the barrier that this warp waited for. The warp that
    counts the last column tile of a row tile signals every row of it to its home, once: lane l rows l, l + 32, l + 64
    and l + 96. Carried rows are counted by lane 1, twice a column tile where each member of a pair computes half of it,
    and signalled by the last one to do so. Its second fence hands on what the storers of the other column tiles made
    visible.

    Where the last tasks are halves (`KernelShape.halves`), row tiles are counted in halves: of a column tile 2 for a
    whole task, or for a half that is all there is. Elsewhere `halves` is 1.

    In the wire format "tokens" results stay here: those of another rank's token are counted for whoever sums them.
    """
    fence_results(k)
    cute.arch.sync_warp()
    counters = side_counters(a, side)
    few, other = Int32(0), row_tile
    if cutlass.const_expr(k.carries):
        few, other = field_few(fields), carried_tile(fields, member, row_tile)
    # all asked for at once, whoever may need them, together with the count
    homes = [home_in(k, a, side, row_tile, i * 32 + lane, routed) for i in range(TILE_ROWS // 32)]
    before = Int32(0)
    if lane == 0:
        place = returned_word(k, a, row_tile)
        if not routed:
            place = shared_returned(a, row_tile)
        before = fetch_add(counters, place, halves)
    if cutlass.const_expr(k.carries):
        if lane == 1 and few > 0:
            before = fetch_add(counters, returned_word(k, a, other))
    of_few = k.columns1 * (1 + field_same(fields))
    if cute.arch.shuffle_sync(before, 0) == k.columns1 * (1 + k.halves) - halves:
        fence_results(k)
        if not aborted(a):
            for i in cutlass.range_constexpr(TILE_ROWS // 32):
                if i * 32 + lane < field_rows(fields):
                    signal_home(k, a, side, homes[i])
    if cutlass.const_expr(k.carries):
        if few > 0 and cute.arch.shuffle_sync(before, 1) == of_few - 1:
            fence_results(k)
            if lane < few and not aborted(a):
                signal_home(k, a, side, home_in(k, a, side, other, lane, routed))
    cute.arch.sync_warp()


@cute.jit
def home_in(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, row_tile: Int32, inside: Int32, routed: Boolean
) -> Int32:
    """Home of row `inside` of a row tile; of a row of padding anything."""
    home = (a.rank << HOME_BITS) | ((row_tile * TILE_ROWS + inside) * k.top_k)
    if routed:
        home = home_of(k, a, side, buffer_tile(k, a, row_tile) * TILE_ROWS + inside)
    return home


@cute.jit
def signal_home(k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, home: Int32):
    """One thread: the result of the row with this home is where it goes."""
    token = (home & ((1 << HOME_BITS) - 1)) // k.top_k
    if cutlass.const_expr(k.by_token):
        if home >> HOME_BITS == a.rank:
            add(a.heap + a.back_at, back_word(k, a, side, token), 1, "sys")
        else:
            place = summed_word(k, a, home >> HOME_BITS, token)
            add(side_counters(a, side), place, 1, "gpu")
    else:
        add(peer(a, home >> HOME_BITS) + a.back_at, back_word(k, a, side, token), 1, "sys")


def fence_results(k: KernelShape):
    """Order this thread's view of memory before what it writes next, for everyone who may read the results."""
    if k.ranks > 1 and not k.by_token:
        cute.arch.fence_acq_rel_sys()
    else:
        cute.arch.fence_acq_rel_gpu()


@cute.jit
def release_hidden(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, row_tile: Int32, wide: Int32, row_tiles: Int32
):
    """One thread: a hidden tile is in memory. wide: whether its row tile is dealt by two numbers, for which it counts
    twice."""
    add(side_counters(a, side), done_word(row_tile), 1, "gpu", "release")
    if cutlass.const_expr(k.scheduler != "tickets"):
        finish_hidden(k, a, side, row_tile, 1 + wide, row_tiles)
