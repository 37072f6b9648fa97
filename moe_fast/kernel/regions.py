"""The memory of a kernel: how the symmetric heap and a rank's workspace are cut up, and the tables of a placement.

Letters: S tokens of a rank, H hidden, D intermediate, E experts, D replicas of an expert (where it counts them), K
choices per token, P ranks, X local expert slots, R rows of the dispatch buffer, T tile rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_fast.kernel.constants import COUNTER_WORDS, PLAN_WORDS, TILE_ROWS, TOKEN_TILE
from moe_fast.kernel.limits import most_rounds
from moe_fast.kernel.shapes import KernelShape
from moe_fast.kernel.tile_pairs import at_least
from moe_ref.layout import SIDES, align_up, ceil_div
from moe_ref.placement import Placement


@dataclass(frozen=True)
class Region:
    """One named piece of a buffer: byte offset and length."""

    offset: int
    size: int


def regions(sizes: dict[str, int]) -> tuple[dict[str, Region], int]:
    """Lay pieces out one after the other, each on a multiple of 1024 bytes; returns them and the total."""
    out, offset = {}, 0
    for name, size in sizes.items():
        out[name] = Region(offset, size)
        offset += align_up(max(size, 16), 1024)
    return out, offset


def buffer_rows(shape: KernelShape, max_tokens: int) -> int:
    """R = align(min(K, X) * max_tokens * P, T) + X * T: rows of one side of the dispatch buffer.

    A row that stays on its rank has a place among them like any other; where the kernel gathers (`KernelShape.gathers`)
    nobody writes it. In the fixed layout X * C, of one source and one round; see `all_rows`.
    """
    if shape.fixed:
        return shape.slots * shape.slot_capacity(max_tokens)
    most = min(shape.top_k, shape.slots) * max_tokens * shape.ranks
    return align_up(most, TILE_ROWS) + shape.slots * TILE_ROWS


def all_rows(shape: KernelShape, max_tokens: int) -> int:
    """Rows of the dispatch buffer, both sides: B * R, in the fixed layout P * R * B * X * C (results included)."""
    return buffer_rows(shape, max_tokens) * shape.row_factor


def most_tiles(shape: KernelShape, max_tokens: int) -> int:
    """Row tiles that one call can have on one rank: R / T, in the fixed layout P * X * C / T"""
    return buffer_rows(shape, max_tokens) // TILE_ROWS * (shape.ranks if shape.fixed else 1)


def heap_regions(shape: KernelShape, max_tokens: int) -> tuple[dict[str, Region], int]:
    """The symmetric heap, the same on every rank.

    bytes = B * (R + K * max_tokens) * H * element size  (rows in, results back: `MoEConfig.compact_bytes` with T = 128)
          + B * 4 * (R + R / T + max_tokens + 3 P * E) + 4 P  (where each row goes home, arrival counters, counts: as
          they are, and as they come, with the number of the call)

    With put-with-signal rows lie 128 bytes further apart, counters take 8 bytes, and rows to send are staged:
    K * max_tokens rows (wire) and R results. Results then lie line by line of 128 bytes, each row tile's (results), a
    side's (returned) or, in the fixed layout, those of a slot.

    In the wire format "tokens" P - 1 partials of a token come back instead of K results, results stay here (R rows),
    and beside the rows stand the words of `wire_words`.
    """
    rows, routes = all_rows(shape, max_tokens), max(1, shape.top_k * max_tokens)
    row_bytes = shape.hidden * shape.element_size
    back = SIDES * (shape.ranks - 1) * max(1, max_tokens) if shape.by_token else SIDES * routes
    wire = routes * shape.row_pitch if shape.put else 0
    if shape.by_token:
        wire = wire_words(shape, max_tokens) * 4
    staged = shape.put or shape.by_token
    return regions(
        {
            "rows": rows * shape.row_pitch,
            "returned": 0 if shape.fixed else back * row_bytes,
            "home": 0 if shape.put else rows * 4,
            "arrived": (rows // TILE_ROWS) * 4 * shape.signal_words,
            "back": SIDES * max(max_tokens, 1) * 4 * shape.signal_words,
            "counts": SIDES * shape.ranks * shape.counts_stride * (4 if shape.put else 12),
            "counts_flag": shape.ranks * 4 * shape.signal_words,
            "wire": wire,
            "results": most_tiles(shape, max_tokens) * TILE_ROWS * row_bytes if staged else 0,
        }
    )


def wire_flags(shape: KernelShape, max_tokens: int) -> int:
    """Words of the flags at the beginning of `wire_words`: R + P"""
    return buffer_rows(shape, max_tokens) + shape.ranks


def wire_words(shape: KernelShape, max_tokens: int) -> int:
    """What peers write beside rows in the wire format "tokens", in 4-byte words: 2 R + P + P * P + P * max_tokens *
    (2 K + 1).

    In this order: the call in which a row landed [R], that in which a rank told all [P], the leader of a row [R],
    tokens from rank to rank [P, P], of every rank's tokens how many rows they have here [P, max_tokens], which rows
    [P, max_tokens, K] and with what weights [P, max_tokens, K]. `signals` has a function for each.
    """
    p = shape.ranks
    return 2 * buffer_rows(shape, max_tokens) + p + p * p + p * max(max_tokens, 1) * (2 * shape.top_k + 1)


def gate_tiles(tokens, processors):
    """(tokens of a token tile, token tiles) of the gate and all that goes by its tiles, up to the send list.

    A processor block draws a tile's tokens through its own pipeline, so the gate takes as long as a tile is high,
    however few there are: tiles of T / 2 tokens where each has a block of its own, else of T. Traced by the kernel.
    """
    halves = ceil_div(tokens, TILE_ROWS // 2)
    low = at_least(halves, processors + 1) - 1
    return TILE_ROWS - (TILE_ROWS // 2 & low), (halves & low) | ((halves + 1 >> 1) & ~low)


def most_gate_tiles(max_tokens: int, processors: int) -> int:
    """Token tiles that a call of up to max_tokens can have: max(ceil(max_tokens / T), min(ceil(2 max_tokens / T),
    processors))"""
    return max(ceil_div(max_tokens, TILE_ROWS), min(ceil_div(max_tokens, TILE_ROWS // 2), processors))


def workspace_regions(shape: KernelShape, max_tokens: int, blocks: int) -> tuple[dict[str, Region], int]:
    """Memory of one rank that no peer touches; of the shared expert: its hidden activations and results, a row per
    token."""
    tokens = align_up(max(max_tokens, 1), TILE_ROWS) if shape.shared_intermediate else 0
    routes = max(1, shape.top_k * max_tokens)
    tiles = most_tiles(shape, max_tokens)
    # in a paired kernel a row tile may be dealt twice
    dealt = tiles * 2 if shape.paired else tiles
    return regions(
        {
            "hidden": tiles * TILE_ROWS * shape.intermediate * shape.element_size,
            "expert": routes * 4,
            "weight": routes * 4,
            "index": routes * 4,
            "send": routes * 8,
            "histogram": most_gate_tiles(max(max_tokens, 1), blocks) * shape.experts * 4,
            "row_shift": shape.experts * max(shape.replicas, 1) * 4,
            "quota_end": shape.experts * shape.replicas * 4,
            "list_shift": shape.experts * shape.replicas * 4,
            "list_start": (shape.plan_parts * shape.experts + shape.ranks + 1) * 4,
            "plan": PLAN_WORDS * 4,
            "tile_slot": dealt * 4,
            "tile_rows": dealt * 4,
            "tile_at": (dealt + tiles) * 4 if shape.paired else tiles * 4 * shape.fixed,
            "where": routes * 4 if shape.fixed or shape.by_token or shape.put else 0,
            "arrived_target": all_rows(shape, max_tokens) // TILE_ROWS * 4,
            "back_target": SIDES * max(max_tokens, 1) * 4,
            "counters": SIDES * counter_words(shape, max_tokens, blocks) * 4,
            "control": 64,
            "shared_hidden": tokens * shape.shared_intermediate * shape.element_size,
            "shared_rows": tokens * shape.hidden * shape.element_size,
        }
    )


def counter_words(shape: KernelShape, max_tokens: int, blocks: int) -> int:
    """Words of one side of the local counters: single ones, done[tile], two ready queues, done[block], returned[tile],
    a bit per combined token, taken, mails; at the end, counted backwards, the shared expert's done[token tile] and
    returned[token tile]. In the wire format "tokens" before these `sum_words`."""
    tiles = most_tiles(shape, max_tokens)
    shared = 2 * ceil_div(max(max_tokens, 1), TILE_ROWS) if shape.shared_intermediate else 0
    combined = ceil_div(max(max_tokens, 1), TOKEN_TILE)
    more = sum_words(shape, max(max_tokens, 1), combined) if shape.by_token else 0
    return align_up(COUNTER_WORDS + 5 * tiles + combined + 3 * blocks + 8 + shared + more, 32)


def sum_words(shape: KernelShape, max_tokens, token_tiles):
    """P * (max_tokens + token tiles + 1): results that are here of every rank's tokens, a bit for each that is summed,
    tokens sent to each rank. Traced by the kernel."""
    return shape.ranks * (max_tokens + token_tiles + 1)


def placement_tables(placement: Placement, replicas: int, slots: int) -> np.ndarray:
    """What a launch hands over about a placement, int32 [E * D + P * X + R * P + 1]: the rank of every replica, -1 for
    none; what every slot holds, replica number e * D + j, -1 for an empty slot; the replica that each rank pours in
    each round, -1 for none; and the number of rounds.

    replicas, slots: D and X of the kernel, at least those of the placement.
    """
    rank_ED = np.full((placement.num_experts, replicas), -1, dtype=np.int32)
    rank_ED[:, : placement.max_replicas] = placement.rank_ED
    held_PX = np.full((placement.num_ranks, slots), -1, dtype=np.int32)
    for rank, pairs in enumerate(placement.replicas_of_rank):
        for slot, (expert, replica) in enumerate(pairs):
            held_PX[rank, slot] = expert * replicas + replica
    turn_RP = np.full((most_rounds(placement.num_experts, replicas, slots), placement.num_ranks), -1, dtype=np.int32)
    for turn, experts in enumerate(placement.rounds):
        for expert in experts:
            for replica, rank in enumerate(placement.ranks_of_expert[expert]):
                turn_RP[turn, rank] = expert * replicas + replica
    rounds = np.array([len(placement.rounds)], dtype=np.int32)
    return np.concatenate([rank_ED.ravel(), held_PX.ravel(), turn_RP.ravel(), rounds])
