"""Numbers that every kernel has: sizes of tiles and stages, fields of words, indices of counters.

Letters: E experts, K choices per token, P ranks, X local expert slots, R rows of the dispatch buffer, T tile rows.
"""

from __future__ import annotations

from moe_ref.runtime.encoding import SLOT_BITS

TILE_ROWS = 128
"""T: rows of a task. Two consumer warpgroups compute 64 each."""
TILE_COLUMNS = 256
"""Columns of a task: the widest wgmma. A gated first product holds 128 gate and 128 up columns."""
LINE_BYTES = 128
"""Bytes of a row in one pipeline stage and in one epilogue buffer: the widest TMA swizzle."""
FEW_ROWS = 16
"""Rows of a task that are loaded where the others are padding, if there aren't more; else 64 or 128."""
CARRIED_ROWS = 32
"""Rows of an expert's last row tile that go along with its tile pair before, if there aren't more; see `tile_pairs`.
Their ring is half of the epilogue buffers: 32 rows of a stage are the most that fit."""
HALF_COLUMNS = 128
"""Rows of a weight matrix that one TMA load brings; a task takes two of them, which need not be neighbours."""
STAGES = 4
THREADS = 384
MAX_EXPERTS = 256
"""The gate's logits of a token tile are one wgmma tile wide."""
MAX_TOP_K = 8
MAX_GROUPS = 32
"""The groups that a token keeps are one word of bits."""
DTYPES = ("bfloat16", "float16", "float32")
"""float32 means products of TF32 (10 bits of mantissa) with sums, activations and buffers of fp32."""
SHARED_SLOT = (1 << SLOT_BITS) - 1
"""Slot field of a task of the shared expert: no routed expert has it."""
UNIT_ROWS = 8
"""Rows that a warp pushes under one fence."""
BOOST_UNIT = 2
"""The same for the first rows, where there are more warps than units: shorter is sooner."""
BOOST_ROWS = 2112
"""Local rows that all warps push together before the first task, instead of the spare warps alone: two for each of
1056 warps, a first wave's."""
HOME_BITS = 26
"""Where a row goes home to is one int32: source rank above, route (token, choice) in this many low bits."""
FIELDS_SHIFT = 48
"""In the block's task word, above the task's own bits: the fields of `tile_pairs`."""
AHEAD = 8
"""Steps before the end of a task's loads at which its block asks for the next one."""
BACKLOG = 4
"""For how many first products' time second ones are kept back while there are first ones left: those that end last have
their own second ones ready only then, and everybody else needs work as long as that takes."""
DEEP = 128
"""Steps of a second product from which on it is deep, see `KernelShape.halves`."""
SENDERS = 2
"""Of so many spare warps one sends rows to other ranks, where `KernelShape.few_send`. All together would have 4 MB on
their way, several times what NVLink needs to be busy, and whatever else crosses would queue behind."""
MANY_COLUMNS = 16
"""Column tiles of the first product beyond which a layer has many: its ready blocks are higher
(`KernelShape.block_tiles`), and its rows are copied once instead of being gathered for each (`KernelShape.gathers`)."""
WORDS = 4
"""Task words that a block has room for: how far the storer may be behind."""
TOKEN_TILE = 32
"""Tokens that a spare warp looks at together for the combine: one per lane, one word of claim bits."""
TOKEN_UNIT = 32
"""Entries of the send list, or rows of a tile, that a warp takes together in the wire format "tokens": one per lane."""
TOKEN_WINDOW = 128
"""Units of the send list whose entries are mixed, see `tokens.push_leaders`: about as many as there are spare warps."""
FOLLOWER = 1 << 30
"""Beside the route in an entry of the send list: another route of the token goes to the same rank before it."""
SCHEDULERS = ("spare_warps", "os_block", "tickets")
TRANSPORTS = ("stores", "put_signal")
PACKET_TAIL = 128
"""With put-with-signal a row is a packet: the row, then its home, padded to this many bytes for the TMA's sake."""
PLAN_WORDS = 16
COUNTER_WORDS = 16
"""Single counters of a call, before the per-tile ones: see `Counter`."""


class Counter:
    """Index of each single counter of a staging side (int32 words)."""

    TICKET, PUSH_NEAR, PUSH_FAR, ROUTED, LISTED, PLANNED, READY0, READY1, SHARED0, SHARED1, FOLLOW, PIECE = range(12)


class PlanWord:
    """Index of each word that the planner publishes. ROW_TILES are those that are dealt; in a paired kernel, which
    deals some twice and others not at all, HELD_TILES are those that there are."""

    ROW_TILES, NEAR_ROWS, FAR_UNITS, STATUS, USABLE, HELD_TILES = range(6)


class Status:
    """Bits of the error word that travels with the counts, so that every rank learns of it."""

    NONFINITE, BAD_EXPERT, OVERFLOW, BAD_PLAN = 1, 2, 4, 8
