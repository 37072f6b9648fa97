"""Which task comes next, behind one interface: `next_word` of a processor's dispatcher.

"tickets"      one ordered list that exists only as arithmetic; a ticket counter is its head. In the list a GEMM1 task
               comes after all GEMM0 tasks of its row tile, and a processor may wait for inputs of the task it holds:
               everything before it has been claimed by a running processor, so that wait ends.
"os_block"     the paper's: the last block has one Scheduler warp and three Subscriber warps.
"spare_warps"  the same warps, living in the spare warps of the first four processor blocks.

With a Scheduler, Subscribers and storers put blocks of row tiles into two ready queues; the Scheduler deals their tasks
to processors that ask for one (work-conserving). It deals second products only beyond a backlog (`KernelShape.backlog`)
while there are first ones: with the backlog it bridges the end of the last first products, whose second ones are not
ready yet. A mail is a hint: the loader acquires the counter its task depends on.

Termination is exact: the plan says how many row tiles there are.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from moe_fast.kernel.constants import COUNTER_WORDS, FIELDS_SHIFT, SHARED_SLOT, TILE_ROWS, Counter
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import (
    Args,
    Role,
    Wait,
    aborted,
    aborted_together,
    dealt_at,
    dense_tiles,
    fail,
    fetch_add,
    read,
    side_counters,
    write,
)
from moe_fast.kernel.tile_pairs import dealt_number, pack_fields
from moe_ref.layout import ceil_div
from moe_ref.runtime.encoding import (
    GEMM0,
    GEMM1,
    GEMM1_LOW,
    NONE,
    STOP,
    gemm0_tasks,
    gemm1_tasks,
    mail_sequence,
    mail_task,
    pack_mail,
    pack_task,
)


@cute.jit
def ticket_place(k: cutlass.Constexpr[KernelShape], ticket: Int32, row_tiles: Int32) -> tuple[Boolean, Int32, Int32]:
    """Task number `ticket` of the ordered list: (is it GEMM1, row tile, column tile).

    Row tiles are taken in groups of G. The list is: GEMM0 of group 0, then for each following group its GEMM0 and the
    GEMM1 of the group before, at last the GEMM1 of the last group. Within a group the row tile runs fastest, so a
    weight tile is used by all its row tiles at one time. Where a processor is a pair of blocks, this counts in twos of
    row tiles, and names the first.
    """
    size = k.task_rows(k.group_tiles)
    row_tiles = k.task_rows(row_tiles)
    groups = ceil_div(row_tiles, size)
    full0, full1 = gemm0_tasks(size, k.columns0), gemm1_tasks(size, k.columns1)
    group = Int32(0)
    second = Boolean(False)
    place = ticket
    first = min(row_tiles, Int32(size)) * k.columns0
    if ticket >= first:
        place = ticket - first
        pair = min(place // (full0 + full1), max(groups - 2, Int32(0)))
        place = place - pair * (full0 + full1)
        ahead = Int32(0)
        if groups > 1:
            ahead = min(row_tiles - (pair + 1) * size, Int32(size)) * k.columns0
        if place < ahead:
            group = pair + 1
        else:
            place = place - ahead
            second = Boolean(True)
            group = pair
            if groups > 1 and place >= full1:
                place = place - full1
                group = pair + 1
    members = min(row_tiles - group * size, Int32(size))
    return second, k.first_tile(group * size + place % members), place // members


@cute.jit
def ticket_word(k: cutlass.Constexpr[KernelShape], a: Args, ticket: Int32, row_tiles: Int32) -> Int64:
    """Word of task number `ticket` of the ordered list."""
    second, row_tile, column = ticket_place(k, ticket, row_tiles)
    kind = Int32(GEMM0)
    if second:
        kind = Int32(GEMM1)
    return pack_task(Int64(kind), Int64(read(a.tile_slot, row_tile)), Int64(row_tile), Int64(column))


@cute.jit
def next_ticket(k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, row_tiles: Int32) -> Int64:
    """Claim the next task of the ordered list, or stop."""
    word = Int64(STOP)
    ticket = fetch_add(side_counters(a, side), Counter.TICKET)
    rows = k.task_rows(row_tiles)
    total = gemm0_tasks(rows, k.columns0) + gemm1_tasks(rows, k.columns1)
    if ticket < total:
        if not aborted(a):
            word = ticket_word(k, a, ticket, row_tiles)
    return word


@cute.jit
def next_shared(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, kind: cutlass.Constexpr, token_tiles: Int32
) -> Int64:
    """Claim the shared expert's next task of one kind, or stop. The token tile runs fastest: a weight tile is used by
    all of them at one time."""
    word = Int64(STOP)
    columns = k.shared_columns0 if kind == GEMM0 else k.columns1
    ticket = fetch_add(side_counters(a, side), Counter.SHARED0 if kind == GEMM0 else Counter.SHARED1)
    if ticket < token_tiles * columns:
        if not aborted(a):
            tile = ticket % token_tiles
            word = pack_task(Int64(kind), Int64(SHARED_SLOT), Int64(tile), Int64(ticket // token_tiles))
            rows = min(a.tokens - tile * TILE_ROWS, Int32(TILE_ROWS))
            word = word | (Int64(pack_fields(rows, 0, 0, 0)) << FIELDS_SHIFT)
    return word


# --- ready queues, mailboxes ---------------------------------------------------------------------------------------


def ready_at(k, a, queue, index):
    """Index of an entry of ready queue 0 or 1: block number + 1, or 0 while empty."""
    return COUNTER_WORDS + (1 + queue) * dense_tiles(k, a) + index


def taken_at(k, a, processor):
    """Index of the count of mails that a processor has taken."""
    return COUNTER_WORDS + 5 * dense_tiles(k, a) + a.token_tiles + processor


def mail_at(k, a, processors, processor):
    """Index, in 8-byte words, of a processor's mailbox."""
    return (COUNTER_WORDS + 5 * dense_tiles(k, a) + a.token_tiles + processors + 8) // 2 + processor


def first_products_of(k: KernelShape) -> int:
    """First products of a block of row tiles."""
    return k.task_rows(k.block_tiles) * k.columns0


@cute.jit
def ahead_of(k: cutlass.Constexpr[KernelShape], row_tiles: Int32, processors: Int32) -> Int32:
    """First products that nobody deals, see `KernelShape.deals_ahead`: one for each processor, if there are so many."""
    return min(processors, Int32(ceil_div(row_tiles, k.block_tiles) * first_products_of(k)))


@cute.jit
def first_word(k: cutlass.Constexpr[KernelShape], processor: Int32, row_tiles: Int32) -> Int64:
    """First product number `processor`; NONE where its row tile is padding of a block."""
    size = k.task_rows(k.block_tiles)
    place = processor % first_products_of(k)
    row_tile = k.first_tile(processor // first_products_of(k) * size + place % size)
    kind = Int32(GEMM0)
    if row_tile >= row_tiles:
        kind = Int32(NONE)
    return pack_task(Int64(kind), Int64(0), Int64(row_tile), Int64(place // size))


@cute.jit
def make_ready(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, queue: cutlass.Constexpr, block: Int32,
    row_tiles: Int32, processors: Int32,
):  # fmt: skip
    """One thread: append a block of row tiles to a ready queue. Before those of first products are, in their order, the
    blocks of which some are dealt ahead."""
    counters = side_counters(a, side)
    place, ahead = block, Int32(0)
    if cutlass.const_expr(queue == 0 and k.deals_ahead):
        ahead = Int32(ceil_div(ahead_of(k, row_tiles, processors), first_products_of(k)))
    if block >= ahead:
        place = ahead + fetch_add(counters, Counter.READY0 + queue)
    write(counters, ready_at(k, a, queue, place), block + 1, sem="relaxed", scope="gpu")


@cute.jit
def finish_hidden(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, row_tile: Int32, numbers: Int32, row_tiles: Int32
):
    """One thread: a hidden tile is complete; the last one of a block makes the block's GEMM1 tasks ready. numbers: by
    how many its row tile is dealt, so for how many it counts."""
    counters = side_counters(a, side)
    size = k.block_tiles
    if cutlass.const_expr(k.paired):
        row_tile = dealt_number(read(dealt_at(k, a), row_tile))
    block = row_tile // size
    members = min(row_tiles - block * size, Int32(size))
    done = fetch_add(counters, COUNTER_WORDS + 3 * dense_tiles(k, a) + block, numbers)
    if done == members * k.columns0 - numbers:
        make_ready(k, a, side, 1, block, row_tiles, Int32(0))


@cute.jit
def next_mail(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, processor: Int32, processors: Int32, number: Int32
) -> Int64:
    """Ask for and take mail `number` (from 1); a task whose row tile is padding of a block comes as NONE.

    The Scheduler sends a mail once the one before is acknowledged. It is acknowledged here, when the next task is asked
    for, towards the end of the one that runs, not when it was taken: so no task is stuck behind a long one while others
    idle at the end.
    """
    counters = side_counters(a, side)
    write(counters, taken_at(k, a, processor), number - 1, sem="relaxed", scope="gpu")
    box = mail_at(k, a, processors, processor)
    mail = read(counters, box, Int64, sem="relaxed", scope="gpu")
    turns = Int32(0)
    start = cute.arch.globaltimer()
    go = mail_sequence(mail) != number
    while go:
        mail = read(counters, box, Int64, sem="relaxed", scope="gpu")
        go = mail_sequence(mail) != number
        turns += 1
        if go and (turns & 15) == 0:
            if aborted(a):
                go = Boolean(False)
                mail = Int64(STOP)
            elif Int64(cute.arch.globaltimer() - start) > a.deadline * 2:
                fail(a, Role.DISPATCHER, Wait.MAIL, processor, number - 1, number)
                go = Boolean(False)
                mail = Int64(STOP)
    return mail_task(mail)


@cute.jit
def prefix_of_ones(flag: Boolean) -> Int32:
    """How many lanes, from lane 0 on, have the flag set without a gap."""
    missing = cute.arch.vote_ballot_sync(not flag)
    length = Int32(32)
    if missing != 0:
        length = Int32(cute.arch.popc((missing & (0 - missing)) - 1))
    return length


def seconds_before(block, whole, per):
    """Second products that are dealt before those of the `block`-th ready block: `per` for each of the first `whole`
    ones, twice as many halves for the others."""
    over = block - whole
    return (block + (over & ~(over >> 31))) * per


def block_of_second(number, whole, per):
    """Which ready block second product `number` is of; inverse of `seconds_before`."""
    over = number - whole * per
    over = over & ~(over >> 31)
    return (number - over) // per + over // (2 * per)


@cute.jit
def schedule(k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, row_tiles: Int32, processors: Int32, lane: Int32):
    """The Scheduler: one warp; lane l serves processors l, l + 32, ... One round is one trip to memory.

    Both queues hold blocks of B row tiles, B * columns tasks each (half as many for pairs of blocks); the last block is
    padded with tasks that processors drop, so a task's place is plain arithmetic.
    """
    lanes_of = 5  # processors per lane: up to 160 blocks
    counters = side_counters(a, side)
    size = k.task_rows(k.block_tiles)
    blocks = ceil_div(row_tiles, k.block_tiles)
    per0, per1 = size * k.columns0, size * k.columns1
    backlog = processors * k.backlog
    # Blocks whose second products are dealt whole; those of the last blocks come in halves, about one task for each
    # processor, where an expert has two tile pairs or more: with one, two halves would stream all of its weights twice.
    whole = blocks
    if cutlass.const_expr(k.halves):
        if a.tokens * (k.top_k * k.ranks) >= k.experts * (4 * TILE_ROWS):
            whole = max(blocks - max(processors // per1, Int32(1)), Int32(0))
    sent = cute.make_rmem_tensor(lanes_of, Int32)
    free = cute.make_rmem_tensor(lanes_of, Int32)
    sent.fill(0)
    head0, head1, stopped = Int32(0), Int32(0), Int32(0)
    if cutlass.const_expr(k.deals_ahead):
        # what a processor begins with, it acknowledges like a mail
        head0 = ahead_of(k, row_tiles, processors)
        for j in cutlass.range_constexpr(lanes_of):
            sent[j] = Int32(lane + 32 * j < head0)
    start = cute.arch.globaltimer()
    go = Boolean(True)
    while go:
        wanted = Int32(0)
        for j in cutlass.range_constexpr(lanes_of):
            free[j] = 0
            if lane + 32 * j < processors:
                taken = read(counters, taken_at(k, a, lane + 32 * j), sem="relaxed", scope="gpu")
                free[j] = 1 - (sent[j] - taken)
            wanted += free[j]
        block0, block1 = head0 // per0, block_of_second(head1, whole, per1)
        entry0, entry1 = Int32(0), Int32(0)
        if block0 + lane < blocks:
            entry0 = read(counters, ready_at(k, a, 0, block0 + lane), sem="relaxed", scope="gpu")
        if block1 + lane < blocks:
            entry1 = read(counters, ready_at(k, a, 1, block1 + lane), sem="relaxed", scope="gpu")
        inside0 = head0 - block0 * per0
        # some of a block may have been dealt ahead, before it is ready
        ready0 = max(prefix_of_ones(entry0 != 0) * per0 - inside0, 0)
        ready1 = seconds_before(block1 + prefix_of_ones(entry1 != 0), whole, per1) - head1
        rank = wanted
        for d in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(rank, 1 << d, mask_and_clamp=0)
            if lane >= (1 << d):
                rank += other
        total = cute.arch.shuffle_sync(rank, 31)
        rank -= wanted
        # finished hidden tiles beyond the backlog, then new rows, then the backlog
        beyond = min(total, max(ready1 - backlog, Int32(0)))
        give0 = min(total - beyond, ready0)
        give1 = min(total - give0, ready1)
        if head0 + head1 < blocks * per0 + seconds_before(blocks, whole, per1):
            for j in cutlass.range_constexpr(lanes_of):
                at1 = head1 + rank
                of1 = block_of_second(at1, whole, per1)
                at0 = inside0 + max(rank - give1, Int32(0))
                chosen1 = cute.arch.shuffle_sync(entry1, (of1 - block1) & 31) - 1
                chosen0 = cute.arch.shuffle_sync(entry0, (at0 // per0) & 31) - 1
                if free[j] > 0:
                    if rank < give1 + give0:
                        kind, block, place = Int32(GEMM1), chosen1, at1 - seconds_before(of1, whole, per1)
                        if cutlass.const_expr(k.halves):
                            if of1 >= whole:
                                kind, place = Int32(GEMM1_LOW) + place % 2, place // 2
                        if rank >= give1:
                            kind, block, place = Int32(GEMM0), chosen0, at0 % per0
                        # the row tile runs fastest; the processor looks the expert slot up
                        row_tile = k.first_tile(block * size + place % size)
                        if row_tile >= row_tiles:
                            kind = Int32(NONE)
                        task = pack_task(Int64(kind), Int64(0), Int64(row_tile), Int64(place // size))
                        sent[j] = sent[j] + 1
                        write(
                            counters,
                            mail_at(k, a, processors, lane + 32 * j),
                            pack_mail(Int64(sent[j]), task),
                            Int64,
                            sem="relaxed",
                            scope="gpu",
                        )
                    rank += 1
            head1 += give1
            head0 += give0
            if give0 + give1 > 0:
                start = cute.arch.globaltimer()
        else:
            mine = Int32(0)
            for j in cutlass.range_constexpr(lanes_of):
                if lane + 32 * j < processors:
                    mine = mine | (1 << j)
                    if free[j] > 0 and ((stopped >> j) & 1) == 0:
                        sent[j] = sent[j] + 1
                        write(
                            counters,
                            mail_at(k, a, processors, lane + 32 * j),
                            pack_mail(Int64(sent[j]), Int64(STOP)),
                            Int64,
                            sem="relaxed",
                            scope="gpu",
                        )
                        stopped = stopped | (1 << j)
            go = not cute.arch.vote_all_sync(stopped == mine)
        # lanes read flag and clock at different times, and must leave together
        if aborted_together(a):
            go = Boolean(False)
        elif cute.arch.vote_any_sync(Int64(cute.arch.globaltimer() - start) > a.deadline * 2):
            if lane == 0:
                fail(a, Role.SCHEDULER, Wait.ARRIVALS, Int32(0), head0 + head1, blocks * (per0 + per1))
            go = Boolean(False)
