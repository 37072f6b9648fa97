"""The end of the combine: all consumer warps, when products are over, take what the spare warps have left.

Everything here runs once a call, when nothing else is left to do: what counts is how long the last block takes, for
trips to memory and for code that has to come from there, too.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from moe_fast.kernel.combine import (
    FEW_CHOICES,
    MOST_ASKED,
    TOKENS_PER_TURN,
    are_few,
    ask_for_rows,
    choices_of,
    claim,
    combine_token,
    finish_token,
    most_parts,
)
from moe_fast.kernel.constants import MAX_TOP_K, TOKEN_TILE, Counter, PlanWord
from moe_fast.kernel.scans import sync_consumers
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.signals import Args, Role, Wait, aborted, back_word, fetch_add, read, side_counters, wait_reached
from moe_fast.kernel.staged import combine_staged, stage_of
from moe_ref.layout import ceil_div
from moe_ref.runtime.encoding import reached

SHARES = 4
"""Pieces of neighbouring tokens, at most TOKEN_TILE, that a block claims together: a round."""
NEXT_SHARES = 2
"""The same where pieces go to whoever comes first (`by_arrival`): fewer, so that all end at one time."""
FEW_LEFT = 8
"""Tokens put by from which on a block claims no further ones before these are back: one for each of its warps."""
LEFT, TURNS, OPEN_SIDE, BLOCKS, SIDE, SHARE_WORDS = (SHARES + i for i in (0, 1, 2, 3, 4, 6))
"""What a block's warps share when they combine: how many tokens of each piece of a round they have claimed; how many
were put by; how many turns are given out; the side that there is something to combine of. From the start of the kernel
on, the number of blocks and the call's side: what is needed again after the products, and in them, would else be kept
in memory all the time before. An even number of words."""
LEFT_AT = SHARES * TOKEN_TILE
"""In the memory for their lists: behind the claimed tokens, room for TOKEN_TILE of each piece, those that were put
by."""


@cute.jit
def open_side(a: Args, side: Int32, shares: cute.Pointer):
    """One thread, before its block's consumers come to combine: the call's side, or -1 if there is nothing to combine.
    It is decided once for all of them, for they meet in there; and ahead of time, for at the end everybody waits for
    them. The side goes with it because all registers are taken until then."""
    told = side
    if read(a.plan, PlanWord.USABLE) == 0 or aborted(a):
        told = Int32(-1)
    cute.arch.store(shares + OPEN_SIDE, told)


def by_arrival(k: KernelShape) -> bool:
    """Whether pieces go to whoever comes first: blocks that end early leave to those that end last nothing but the
    tokens that wait for these. On one rank; and not where a token has many choices, for most of those wait for the
    last rows, and the first blocks would have them all."""
    return k.ranks == 1 and k.top_k <= FEW_CHOICES


@cute.jit
def combine(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, side: Int32, shares: cute.Pointer,
    lists: cute.Pointer, block: Int32, blocks: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """The consumer warps of a block combine tokens that nobody has combined yet.

    In rounds: a block claims up to SHARES pieces of neighbouring tokens, of which its warps look at TOKENS_PER_TURN at
    a time, or at fewer if there aren't as many for each, whichever is free. What isn't back then is put by, and waited
    for at the end, by any warp again: so the last results, which come all at one time, are divided among all warps.
    Where there are more warps than tokens, each has one, or a part of its columns.

    shares: SHARE_WORDS in shared memory. lists: the pipeline stages, which nobody needs any more when all of the
    block's consumers are here.
    """
    few = Boolean(are_few(a, blocks))
    parts = Int32(1)
    if few:
        parts = min(blocks * 8 // max(a.tokens, 1), most_parts(k))
    size = Int32(TOKEN_TILE)
    for _ in cutlass.range_constexpr(2):
        if a.tokens < size * blocks:
            size = size // 2
    pieces = (a.tokens + size - 1) // size
    # of the next tokens: how many; one of this lane's, for its counter and for a choice
    token, part = (block * 8 + warp) // parts, (block * 8 + warp) % parts
    counted, chosen, count = token, token, Int32(0)
    if few:
        if token < a.tokens:
            count = Int32(1)
            if cutlass.const_expr(k.by_token):
                if claim(k, a, side, token // TOKEN_TILE, Int32(1) << token % TOKEN_TILE, lane) == 0:
                    count = Int32(0)
    # first: piece of the next round. total, take: tokens to be looked at or waited for, how many in a turn
    first, total, take = block, Int32(0), Int32(TOKENS_PER_TURN)
    looked, more, patient, go = Boolean(False), Boolean(True), few, Boolean(True)
    while go:
        if not few:
            turn = Int32(0)
            if total > 0:
                turn = next_turn(shares + TURNS, lane)
            count = min(total - turn * take, take)
            if count <= 0:
                # between these barriers nobody has a turn
                sync_consumers()
                total = Int32(0)
                if looked and not patient:
                    total = cute.arch.load(shares + LEFT, Int32)
                elif warp == 0 and lane == 0:
                    cute.arch.store(shares + LEFT, Int32(0))
                if warp == 0 and lane == 0:
                    cute.arch.store(shares + TURNS, Int32(0))
                patient = total >= FEW_LEFT or (total > 0 and not more)
                go = patient or more
                take = min(ceil_div(total, 8), Int32(TOKENS_PER_TURN))
                if go and not patient:
                    claim_pieces(k, a, side, shares, lists, first, size, pieces, blocks, warp, lane)
                    first += SHARES * blocks
                sync_consumers()
                if go and not patient:
                    total, more = Int32(0), first < pieces
                    for p in cutlass.range_constexpr(SHARES):
                        claimed = cute.arch.load(shares + p, Int32)
                        total += max(claimed, 0)
                        if cutlass.const_expr(by_arrival(k) and p == NEXT_SHARES - 1):
                            # if this one wasn't even asked for, there is one piece for each block
                            more = claimed >= 0
                    looked, take = Boolean(True), min(max(ceil_div(total, 8), 1), Int32(TOKENS_PER_TURN))
            else:
                counted = listed(shares, lists, patient, turn * take + min(lane % TOKENS_PER_TURN, count - 1))
                chosen = listed(shares, lists, patient, turn * take + min(lane // MAX_TOP_K, count - 1))
        if count > 0:
            back = combine_turn(
                k, dtype, a, side, counted, chosen, count, patient, few, stage_of(dtype, lists, warp, lane), part,
                parts, lane,
            )  # fmt: skip
            if not patient:
                put_by(shares, lists, counted, ones(count) & ~back, lane)
        if few:
            go = Boolean(False)


@cute.jit
def claim_pieces(
    k: cutlass.Constexpr[KernelShape], a: Args, side: Int32, shares: cute.Pointer, lists: cute.Pointer, first: Int32,
    size: Int32, pieces: Int32, blocks: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """A block's warps claim its next pieces, each of up to `size` tokens, and list them: number `first` and every
    `blocks`-th behind it, or the next ones that nobody has. Between two barriers."""
    if warp < SHARES:
        piece, mine, count = first + warp * blocks, Int32(0), Int32(-1)
        if cutlass.const_expr(by_arrival(k)):
            # where there are fewer for each block, none takes more than its part
            piece = pieces
            if lane == 0 and warp < NEXT_SHARES and warp * blocks < pieces:
                piece = fetch_add(side_counters(a, side), Counter.PIECE)
            piece = cute.arch.shuffle_sync(piece, 0)
        if piece < pieces:
            tile, shift = piece * size // TOKEN_TILE, piece * size % TOKEN_TILE
            there = ones(min(a.tokens - piece * size, size))
            mine = (claim(k, a, side, tile, there << shift, lane) >> shift) & there
            count = Int32(cute.arch.popc(mine))
        if (mine >> lane) & 1 != 0:
            cute.arch.store(lists + warp * TOKEN_TILE + rank_in(mine, lane), piece * size + lane)
        if lane == 0:
            cute.arch.store(shares + warp, count)


def rank_in(bits, lane):
    """How many bits are set below a lane's."""
    return Int32(cute.arch.popc(bits & ((Int32(1) << lane) - 1)))


@cute.jit
def listed(shares: cute.Pointer, lists: cute.Pointer, left: Boolean, number: Int32) -> Int32:
    """Token number `number` of those that were claimed, or of those that were put by."""
    place = LEFT_AT + number
    if not left:
        place = number
        for p in cutlass.range_constexpr(SHARES - 1):
            claimed = max(cute.arch.load(shares + p, Int32), 0)
            if place >= p * TOKEN_TILE + claimed:
                place += TOKEN_TILE - claimed
    return cute.arch.load(lists + place, Int32)


@cute.jit
def put_by(shares: cute.Pointer, lists: cute.Pointer, token: Int32, bits: Int32, lane: Int32):
    """Whole warp: list those of the tokens of its first lanes (bits) that are to be waited for."""
    if bits != 0:
        place = Int32(0)
        if lane == 0:
            place = cute.arch.atomic_add(shares + LEFT, Int32(cute.arch.popc(bits)), sem="relaxed", scope="cta")
        place = cute.arch.shuffle_sync(place, 0)
        if (bits >> lane) & 1 != 0:
            cute.arch.store(lists + LEFT_AT + place + rank_in(bits, lane), token)


def ones(count):
    """The lowest bits set, 1 to 32 of them."""
    return (Int32(2) << (count - 1)) - 1


@cute.jit
def next_turn(ticket: cute.Pointer, lane: Int32) -> Int32:
    """Whole warp: a ticket of this block."""
    turn = Int32(0)
    if lane == 0:
        turn = cute.arch.atomic_add(ticket, Int32(1), sem="relaxed", scope="cta")
    return cute.arch.shuffle_sync(turn, 0)


@cute.jit
def combine_turn(
    k: cutlass.Constexpr[KernelShape], dtype: cutlass.Constexpr, a: Args, side: Int32, counted: Int32, chosen: Int32,
    count: Int32, patient: Boolean, few: Boolean, stage: cute.Pointer, part: Int32, parts: Int32, lane: Int32,
) -> Int32:  # fmt: skip
    """One warp: of `count` tokens, at most TOKENS_PER_TURN, combine those that are back; patient: all of them, as they
    come. Returns the bits of those that are combined.

    counted: token number lane % TOKENS_PER_TURN. chosen: token number lane // MAX_TOP_K. Beyond the last one any of
    them. few: whether there are no more tokens than warps. stage: see `stage_of`. part, parts: see `combine_token`.
    """
    counters = a.heap + a.back_at + Int64(back_word(k, a, side, 0)) * 4
    targets = a.back_target + Int64(side * a.max_tokens) * 4
    choices = ()
    if cutlass.const_expr(not k.by_token):
        choices = choices_of(k, a, chosen, lane)
    target = read(targets, counted)
    mine = lane < count
    if cutlass.const_expr(TOKENS_PER_TURN * k.top_k * k.hidden * k.element_size <= MOST_ASKED):
        if mine:
            ask_for_rows(k, a, side, counted)
    scope = "sys" if cutlass.const_expr(k.ranks > 1) else "gpu"
    back = Boolean(False)
    if mine:
        if patient:
            back = wait_reached(counters, counted * k.signal_words, target, a, Role.COMBINE, Wait.BACK, counted, scope)
        else:
            back = reached(read(counters, counted * k.signal_words, sem="acquire", scope=scope), target)
    done = cute.arch.vote_ballot_sync(back)
    if cutlass.const_expr(k.by_token):
        for i in range(TOKENS_PER_TURN):
            if ((done >> i) & 1) != 0:
                token = cute.arch.shuffle_sync(counted, i)
                finish_token(k, dtype, a, side, token, choices, Int32(i), part, parts, lane)
    elif few:
        # in registers: a warp that is the only one to have it has no other token to go on with
        if done != 0:
            combine_token(k, dtype, a, side, counted, choices, Int32(0), part, parts, lane)
    elif done != 0:
        combine_staged(k, dtype, a, side, counted, choices, done, stage, lane)
    return done
