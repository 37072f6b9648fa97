"""A processor of two blocks that share weights (`KernelShape.paired`).

Blocks 2 i and 2 i + 1 are a cluster. A task is for both: one tile pair (`tile_pairs`), one column tile. Where the pair
is of one expert each block loads one half of the weights of a step and TMA writes it into both (multicast): 16 KB of
rows and 16 KB of weights leave the L2 cache for a block and step, instead of 48 KB. Where it is of two experts, each
block loads its own weights. So it does in a wide tile pair, where both blocks have the same row tile: there a task is
for two column tiles, one for each block, so the later half of the tile pair's tasks have none and are dropped by the
processor that gets them (`dropped_column`). Of an odd number of column tiles the last leaves the second block without
one: it keeps step, and computes and stores nothing.

Who waits for whom across the pair, and why that ends:

- Stages. A block's full barrier counts its own loader's arrival and 48 KB (less where rows are padding), whoever loads
  them. Where rows may be gathered it counts one arrival more of each of its own loader's lanes, which comes when that
  lane's copies have; of a step whose rows are gathered the bytes are the weights' 32 KB. Its empty barrier counts 16
  warps, the consumers of both blocks: a loader writes into both blocks' stage n % 4 once both have done with step
  n - 4. Both blocks take the same tasks in the same order, all tasks of one kind have the same depth, and a warp
  without rows hands the stages back unread, so step n is the same step of the same task in both.
  Bytes of the other block may come before the own loader has told how many to expect: its arrival is still missing,
  so the phase can't end. They can't be a phase early, for the other loader waited for this block's consumers, who had
  waited for the phase before.
- Induction over steps: step n is loaded when both blocks' consumers have released step n - 4 and both loaders have
  come to n. A consumer between two tasks waits for its epilogue's buffers, that is for its own storer, which waits for
  its own TMA stores; where rows are carried its loader waits for that consumer, each block's for its own. A
  loader between two tasks waits for rows, which no product holds up, or for hidden tiles: those of tasks before its own
  (see `scheduler`), whose steps, if they were this pair's, are all below n. These waits also end with the clock, and a
  loader whose wait has failed goes on and loads, so the other block isn't left alone.
- Stage barriers of the gate are others: a block's token tiles are its own, and their number may differ in a pair. The
  same memory isn't written too early, for tasks come after the plan, the plan after the logits of all token tiles.
- Words. The first block's dispatcher fetches them, looks up what both blocks need, and sends the second its own; that
  one's dispatcher passes them on into its own ring. The inbox has room for one word. It is free again when the second
  dispatcher has read it, which it does as soon as the word before is in its ring: when all readers have read the word
  before that by as many as the ring has room for (`KernelShape.words`). Readers get there by finishing tasks before,
  which no later word is needed for.
- Both get the same number of words, and the last is STOP: whether to go on, the first dispatcher decides alone. A
  second dispatcher that has given up waiting for the plan takes its words' rows away and passes them on: its block
  computes and stores nothing, but keeps step.
- Blocks meet when barriers are made and before they leave: a word, an arrival or bytes never meet a block that isn't
  there.

Both dispatchers acquire the plan and the send list themselves: what other blocks published doesn't cross with a word.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects.nvvm import MemScopeKind

from moe_fast.kernel.constants import FIELDS_SHIFT, TILE_ROWS, PlanWord
from moe_fast.kernel.dispatch import wait_list
from moe_fast.kernel.final_combine import open_side
from moe_fast.kernel.plan import wait_plan
from moe_fast.kernel.ring import ring_phase, ring_place
from moe_fast.kernel.scheduler import ahead_of, first_word, next_mail, next_ticket
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import Args, Role, read
from moe_fast.kernel.tile_pairs import FIELDS, SAME_BIT, VOID, at_least, field_few, field_rows, field_wide
from moe_ref.runtime.encoding import (
    GEMM0,
    GEMM1,
    GEMM1_HIGH,
    GEMM1_LOW,
    KIND_BITS,
    NONE,
    STOP,
    pack_task,
    task_column_tile,
    task_kind,
    task_row_tile,
)

WORD, FULL, FREE = range(3)
"""The inbox: a word in the second block; barriers of its arrival (there) and of its having been read (in the first)."""


@cute.jit
def meet():
    """All threads of both blocks."""
    cute.arch.sync_warp()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def pair_words(task, slots, tiles, fields, columns):
    """The task words of both blocks, from a task of the pair: Int64s or ints.

    slots, tiles, fields: expert slot, place in the buffers and fields of the first and the second member's row tile.
    columns: column tiles of the task's product. Not for a task that is dropped, see `dropped_column`.
    """
    words = []
    for member in range(2):
        wide = field_wide(fields[member])
        column = task_column_tile(task) * (1 + wide)
        # of an odd number of columns the second member has no last one
        void = wide * member * (1 - at_least(columns - column, 2))
        kind = task_kind(task)
        low, high = halves_of(kind)
        tall = is_tall(fields[member])
        # of a low row tile the lower half is all of it
        void = void | (high * (1 - tall))
        kind = kind - low * (1 - tall) * (GEMM1_LOW - GEMM1)
        own = (fields[member] & FIELDS) * (1 - void) + (VOID | (fields[member] & (1 << SAME_BIT))) * void
        word = pack_task(kind, slots[member], tiles[member], column + wide * member * (1 - void))
        words.append(word | (own << FIELDS_SHIFT))
    return tuple(words)


def halves_of(kind):
    """(1 if a GEMM task is a lower half else 0, 1 if it is an upper half else 0)."""
    high = at_least(kind, GEMM1_HIGH)
    return at_least(kind, GEMM1_LOW) - high, high


def is_tall(fields):
    """1 if a row tile has rows in its upper half, else 0."""
    return at_least(field_rows(fields), TILE_ROWS // 2 + 1)


def dealt_kind(kind, fields):
    """What becomes of a GEMM task of this kind for a tile pair with these fields of its members: a half is one only
    where a member is tall and none carries rows; else the lower half is the whole task, and of the upper one nothing is
    left (NONE)."""
    low, high = halves_of(kind)
    kept = (is_tall(fields[0]) | is_tall(fields[1])) * (1 - at_least(field_few(fields[0]) + field_few(fields[1]), 1))
    return kind - (1 - kept) * (low * (GEMM1_LOW - GEMM1) + high * (GEMM1_HIGH - NONE))


def dropped_column(column, columns, wide):
    """1 if a tile pair's task of this number has no column tile left, for both blocks take one at a time; else 0."""
    return wide * at_least(2 * column, columns)


@cute.jit
def dispatch_pair_words(
    k: cutlass.Constexpr[KernelShape],
    a: Args,
    side: Int32,
    slots: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    asked: cute.Pointer,
    shares: cute.Pointer,
    inbox: cute.Pointer,
    block: Int32,
    blocks: Int32,
):
    """The first block's dispatcher, one thread: fetch the pair's task words until the stop word, for both blocks."""
    ok = wait_plan(a, side, Role.DISPATCHER)
    row_tiles = Int32(0)
    if ok:
        row_tiles = read(a.plan, PlanWord.ROW_TILES)
    number = Int32(0)
    mails = Int32(0)
    ahead = ahead_of(k, row_tiles, blocks // 2)
    # of a task's members: slots, row tiles, fields
    known = cute.make_rmem_tensor(6, Int32)
    known.fill(0)
    go = Boolean(True)
    while go:
        slot = ring_place(number, k.words)
        cute.arch.mbarrier_wait(empty + slot, ring_phase(number, k.words) ^ 1)
        # as in `dispatch_words`
        cute.arch.mbarrier_wait(asked, (number & 1) ^ 1)
        word, other = Int64(STOP), Int64(STOP)
        if ok:
            word = Int64(NONE)
            columns = Int32(k.columns1)
            while Int32(task_kind(word)) == NONE:
                if cutlass.const_expr(k.scheduler == "tickets"):
                    word = next_ticket(k, a, side, row_tiles)
                else:
                    mails += 1
                    if cutlass.const_expr(k.deals_ahead):
                        if mails == 1 and block // 2 < ahead:
                            word = first_word(k, block // 2, row_tiles)
                        else:
                            word = next_mail(k, a, side, block // 2, blocks // 2, mails)
                    else:
                        word = next_mail(k, a, side, block // 2, blocks // 2, mails)
                kind = Int32(task_kind(word))
                if kind != STOP and kind != NONE:
                    columns = Int32(k.columns1)
                    if kind == GEMM0:
                        columns = Int32(k.columns0)
                    # all that there is to know, in one trip to memory
                    for i in cutlass.range_constexpr(6):
                        table = (a.tile_slot, a.tile_at, a.tile_rows)[i // 2]
                        known[i] = read(table, Int32(task_row_tile(word)) + i % 2)
                    wide = field_wide(known[4])
                    if cutlass.const_expr(k.halves):
                        kind = dealt_kind(kind, (known[4], known[5]))
                        word = Int64(kind) | (word & ~Int64((1 << KIND_BITS) - 1))
                    if kind == NONE or dropped_column(Int32(task_column_tile(word)), columns, wide) != 0:
                        word = Int64(NONE)
            if Int32(task_kind(word)) != STOP:
                entries = [(Int64(known[2 * i]), Int64(known[2 * i + 1])) for i in range(3)]
                word, other = pair_words(word, *entries, Int64(columns))
        go = Int32(task_kind(word)) != STOP
        cute.arch.mbarrier_wait(inbox + FREE, (number & 1) ^ 1)
        cute.arch.store_async_dsmem(inbox + WORD, (Int32(other & 0xFFFFFFFF), Int32(other >> 32)), inbox + FULL, 1)
        if not go:
            # as in `dispatch_words`
            wait_list(a, side, blocks)
            open_side(a, side, shares)
        cute.arch.store(slots + slot, word)
        cute.arch.mbarrier_arrive(full + slot)
        number += 1


@cute.jit
def pass_words_on(
    k: cutlass.Constexpr[KernelShape],
    a: Args,
    side: Int32,
    slots: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    shares: cute.Pointer,
    inbox: cute.Pointer,
    blocks: Int32,
):
    """The second block's dispatcher, one thread: its words come from the first block."""
    ok = wait_plan(a, side, Role.DISPATCHER)
    number = Int32(0)
    go = Boolean(True)
    while go:
        slot = ring_place(number, k.words)
        cute.arch.mbarrier_arrive_and_expect_tx(inbox + FULL, 8)
        cute.arch.mbarrier_wait(inbox + FULL, number & 1)
        word = cute.arch.load(inbox + WORD, Int64)
        cute.arch.mbarrier_arrive(inbox + FREE, 0, scope=MemScopeKind.CLUSTER)
        go = Int32(task_kind(word)) != STOP
        if not ok and go:
            # the same weights as for the other block, but no rows
            kept = FIELDS_SHIFT + SAME_BIT
            word = (word & ((1 << FIELDS_SHIFT) - 1 | 1 << kept)) | (Int64(VOID) << FIELDS_SHIFT)
        cute.arch.mbarrier_wait(empty + slot, ring_phase(number, k.words) ^ 1)
        if not go:
            wait_list(a, side, blocks)
            open_side(a, side, shares)
        cute.arch.store(slots + slot, word)
        cute.arch.mbarrier_arrive(full + slot)
        number += 1
