"""What is fixed when the megakernel is compiled, and every size that follows from it.

One compilation serves one (H, D, E, K, dtype, expert form, gate form, shared expert, P, scheduler). S and the buffer
sizes are run-time values, so a layer never recompiles when its batch changes.

Letters: S tokens of a rank, H hidden, D intermediate, E experts, K choices per token, P ranks, X local expert slots,
R rows of the dispatch buffer, T tile rows.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from moe_ref.config import MoEConfig
from moe_ref.errors import UsageError
from moe_ref.layout import ROUNDS, SIDES, align_up, ceil_div
from moe_ref.placement import Placement
from moe_ref.runtime.encoding import SLOT_BITS

TILE_ROWS = 128
"""T: rows of a task. Two consumer warpgroups compute 64 each."""
TILE_COLUMNS = 256
"""Columns of a task: the widest wgmma. A gated first product holds 128 gate and 128 up columns."""
LINE_BYTES = 128
"""Bytes of a row in one pipeline stage and in one epilogue buffer: the widest TMA swizzle."""
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
"""Rows that a warp copies under one fence."""
BOOST_UNIT = 4
"""The same for the first rows, where there are more warps than units: shorter is sooner."""
BOOST_ROWS = 3072
"""Local rows that all warps copy together before the first task, instead of the spare warps alone: a first wave's."""
HOME_BITS = 26
"""Where a row goes home to is one int32: source rank above, route (token, choice) in this many low bits."""
FILLED_SHIFT = 48
"""In the block's task word, above the task's own bits: rows of the row tile that are no padding."""
EARLY = 256
"""In the table of a row tile's rows: a bit for a tile whose rows are all among the first ones of its own rank."""
AHEAD = 8
"""Steps before the end of a task's loads at which its block asks for the next one."""
WORDS = 3
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

    TICKET, PUSH_NEAR, PUSH_FAR, ROUTED, LISTED, PLANNED, READY0, READY1, SHARED0, SHARED1, FOLLOW = range(11)


class PlanWord:
    """Index of each word that the planner publishes."""

    ROW_TILES, NEAR_ROWS, FAR_UNITS, STATUS, USABLE = range(5)


class Status:
    """Bits of the error word that travels with the counts, so that every rank learns of it."""

    NONFINITE, BAD_EXPERT, OVERFLOW, BAD_PLAN = 1, 2, 4, 8


@dataclass(frozen=True)
class KernelShape:
    """Compile-time description of a megakernel; build it with `from_config`, which refuses what isn't supported."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    ranks: int
    dtype: str
    activation: str
    gated: bool
    scoring: str
    renormalize: bool
    routed_scaling: float
    selection_bias: bool
    scheduler: str = "tickets"
    trace: bool = False
    router_bias: bool = False
    top_k_order: str = "after_scores"
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    expert_bias: bool = False
    interleaved: bool = False
    clamp_limit: float = 0.0
    clamp_alpha: float = 0.0
    shared_intermediate: int = 0
    shared_gate: bool = False
    fp32_router: bool = False
    replicas: int = 0
    """D, the largest number of replicas of an expert; 0 for plain expert parallelism (experts in blocks)."""
    placed_slots: int = 0
    """X of the placement; 0 for plain expert parallelism."""
    transport: str = "stores"
    layout: str = "compact"
    capacity_factor: float | None = None
    wire_format: str = "routes"
    """On one rank nothing crosses, and both formats are "routes"."""

    @classmethod
    def from_config(
        cls,
        config: MoEConfig,
        ranks: int,
        scheduler: str = "tickets",
        trace: bool = False,
        fp32_router: bool = False,
        placement: Placement | None = None,
        transport: str = "stores",
    ) -> KernelShape:
        """Shape for a layer on `ranks` ranks; fp32_router: the router's weight is kept in fp32 (DeepSeek).

        Only the number of slots and replicas of a placement are compiled in; which expert is where is a table that a
        launch hands over, so moving experts compiles nothing.

        Raises:
            UsageError: a feature that the kernel doesn't have, by name, or a size that its tiles can't divide.
        """
        problems = unsupported(config, ranks)
        replicas = slots = 0
        if config.experts >= ranks:
            in_blocks = Placement.contiguous(config.experts, ranks)
            placement = placement or in_blocks
            # the fixed layout is written for slots of a placement only, whatever it is
            if placement != in_blocks or config.layout == "fixed":
                replicas, slots = placement.max_replicas, placement.slots
                problems += unsupported_placement(config, placement, ranks)
        if scheduler not in SCHEDULERS:
            problems.append(f"scheduler={scheduler!r} is not one of {', '.join(SCHEDULERS)}")
        if transport not in TRANSPORTS:
            problems.append(f"transport={transport!r} is not one of {', '.join(TRANSPORTS)}")
        problems += unsupported_wire(config, ranks, transport)
        if problems:
            raise UsageError(
                'backend="fused" can\'t run this layer: ' + "; ".join(problems) + '. Use backend="unfused" or "ref".'
            )
        # what has no effect is left at its default, so that equal kernels have equal shapes
        grouped = config.num_groups if config.top_groups < config.num_groups else 1
        clamped = config.activation == "clamped_swiglu"
        return cls(
            config.hidden,
            config.intermediate,
            config.experts,
            config.top_k,
            ranks,
            config.dtype,
            config.activation,
            config.gated,
            config.scoring,
            config.renormalize,
            config.routed_scaling,
            config.selection_bias,
            scheduler,
            trace,
            router_bias=config.router_bias,
            top_k_order=config.top_k_order,
            num_groups=grouped,
            top_groups=config.top_groups if grouped > 1 else 1,
            group_score=config.group_score if grouped > 1 else "max",
            expert_bias=config.expert_bias,
            interleaved=config.interleaved,
            clamp_limit=config.clamp_limit if clamped else 0.0,
            clamp_alpha=config.clamp_alpha if clamped else 0.0,
            shared_intermediate=config.shared_intermediate,
            shared_gate=config.shared_gate,
            fp32_router=fp32_router,
            replicas=replicas,
            placed_slots=slots,
            transport=transport,
            layout=config.layout,
            capacity_factor=config.capacity_factor,
            wire_format=config.wire_format if ranks > 1 else "routes",
        )

    @property
    def name(self) -> str:
        """Readable and unique name, used for cache files and reports."""
        parts = [
            f"h{self.hidden}d{self.intermediate}e{self.experts}k{self.top_k}p{self.ranks}",
            {"bfloat16": "bf16", "float16": "fp16", "float32": "tf32"}[self.dtype],
            self.activation + ("_gated" if self.gated else ""),
            self.scoring + ("_renorm" if self.renormalize else ""),
        ]
        parts += [f"scale{self.routed_scaling:g}"] if self.routed_scaling != 1.0 else []
        parts += ["bias"] if self.selection_bias else []
        parts += ["rbias"] if self.router_bias else []
        parts += ["before"] if self.top_k_order == "before_scores" else []
        parts += [f"g{self.top_groups}of{self.num_groups}{self.group_score}"] if self.num_groups > 1 else []
        parts += ["r32"] if self.fp32_router else []
        parts += ["ebias"] if self.expert_bias else []
        parts += ["inter"] if self.interleaved else []
        parts += [f"clamp{self.clamp_limit:g}x{self.clamp_alpha:g}"] if self.clamp_limit else []
        parts += (
            [f"s{self.shared_intermediate}" + ("g" if self.shared_gate else "")] if self.shared_intermediate else []
        )
        parts += [f"r{self.replicas}x{self.placed_slots}"] if self.placed else []
        parts += [self.transport] if self.put else []
        parts += [self.layout] if self.fixed else []
        parts += [f"capacity{self.capacity_factor:g}"] if self.drops else []
        parts += [self.wire_format] if self.by_token else []
        parts += [self.scheduler] + (["trace"] if self.trace else [])
        return "-".join(parts)

    def to_dict(self) -> dict:
        """Plain values."""
        return asdict(self)

    # --- sizes ---------------------------------------------------------------------------------------------------

    @property
    def element_size(self) -> int:
        """bytes of an element: 4 for float32, else 2"""
        return 4 if self.dtype == "float32" else 2

    @property
    def line(self) -> int:
        """columns of 128 bytes, the depth of a pipeline stage and the width of an epilogue buffer: 32 for float32, else
        64"""
        return LINE_BYTES // self.element_size

    @property
    def up_rows(self) -> int:
        """rows of the first weight: 2 D if gated else D"""
        return 2 * self.intermediate if self.gated else self.intermediate

    @property
    def columns0(self) -> int:
        """column tiles of the first product: ceil(D / 128) if gated else ceil(D / 256)"""
        return ceil_div(self.intermediate, HALF_COLUMNS if self.gated else TILE_COLUMNS)

    @property
    def columns1(self) -> int:
        """column tiles of the second product: ceil(H / 256)"""
        return ceil_div(self.hidden, TILE_COLUMNS)

    @property
    def words(self) -> int:
        """task words that a block has room for; the biases of float32 layers take the place of two of them"""
        return 1 if self.expert_bias and self.element_size == 4 else WORDS

    @property
    def sent(self) -> int:
        """barriers of finished GEMM1 tiles: more than the words by which consumers can be ahead of the storer"""
        return 2 * self.words

    @property
    def biases(self) -> int:
        """places for the biases of a task: the loader is at most that many tasks ahead of the epilogue"""
        return self.words + 1

    @property
    def chunks0(self) -> int:
        """epilogue buffers' worth of columns that a task of the first product makes"""
        return (HALF_COLUMNS if self.gated else TILE_COLUMNS) // self.line

    @property
    def depth0(self) -> int:
        """pipeline stages of one task of the first product (and of the gate): H / line"""
        return self.hidden // self.line

    @property
    def depth1(self) -> int:
        """pipeline stages of one task of the second product: D / line"""
        return self.intermediate // self.line

    @property
    def gate_depth(self) -> int:
        """pipeline stages of one token tile of the gate: parts of the router * H / line"""
        return self.depth0 * self.router_parts

    @property
    def router_parts(self) -> int:
        """summands as which the router is handed over: 3 x 8 bits of bfloat16 hold the 24 of an fp32 router beside
        16-bit tokens; 2 x 11 bits of TF32 in a float32 layer"""
        if self.dtype == "float32":
            return 2
        return 3 if self.fp32_router else 1

    @property
    def shared_columns0(self) -> int:
        """column tiles of the shared expert's first product"""
        return ceil_div(self.shared_intermediate, HALF_COLUMNS if self.gated else TILE_COLUMNS)

    @property
    def shared_depth1(self) -> int:
        """pipeline stages of one task of the shared expert's second product"""
        return self.shared_intermediate // self.line

    @property
    def group_tiles(self) -> int:
        """Row tiles whose GEMM0 tasks are handed out together, column by column, before the GEMM1 tasks of the group
        before: at least 200 tasks, so that a GEMM1 task asks for its inputs when they are there."""
        return max(ceil_div(200, self.columns0), self.block_tiles)

    @property
    def block_tiles(self) -> int:
        """Row tiles that become ready together in the modes with a Scheduler: few, so that GEMM1 can begin soon; eight
        where there are many column tiles, for then the blocks under way share no weights, and each reads them anew."""
        return 8 if self.columns0 > 16 else 2

    @property
    def gate_columns(self) -> int:
        """columns of the gate's product: E rounded up to 64"""
        return align_up(self.experts, 64)

    @property
    def plan_parts(self) -> int:
        """Parts into which the planner's 256 threads cut the token tiles, one thread per (part, expert)."""
        return 256 // (1 << (self.experts - 1).bit_length())

    @property
    def placed(self) -> bool:
        """Whether replica tables and quotas decide where rows go, instead of experts in blocks."""
        return self.replicas > 0

    @property
    def fixed(self) -> bool:
        """Whether rows lie at the paper's coordinates L[source, round, side, slot, index] instead of exact offsets."""
        return self.layout == "fixed"

    @property
    def drops(self) -> bool:
        """Whether a rank sends an expert at most so many rows and drops the rest."""
        return self.capacity_factor is not None

    def capacity(self, tokens: int) -> int:
        """Rows that a rank of S = `tokens` may send to one expert: that of `MoEConfig.capacity`, or all of them."""
        routes = tokens * self.top_k
        return math.ceil(min((self.capacity_factor or self.experts) * routes / self.experts, routes))

    def slot_capacity(self, max_tokens: int) -> int:
        """C of the fixed layout: align(capacity or max_tokens, T)"""
        return align_up(max(self.capacity(max_tokens) if self.drops else max_tokens, 1), TILE_ROWS)

    @property
    def put(self) -> bool:
        """Whether rows and signals leave by NVSHMEM's put-with-signal instead of direct stores."""
        return self.transport == "put_signal"

    @property
    def by_token(self) -> bool:
        """Whether a token crosses once to each rank and one partial sum comes back, instead of a row for each route."""
        return self.wire_format == "tokens"

    @property
    def early(self) -> bool:
        """Whether row tiles that consist of the rank's own first rows are marked `EARLY`. Not where replicas move rows,
        whose places the plan's slots don't tell; not in the wire format "tokens", whose spare warps read how many rows
        a tile has and would take the bit for rows."""
        return not (self.placed or self.by_token)

    @property
    def far_unit(self) -> int:
        """entries of the send list that a warp takes together for another rank"""
        return TOKEN_UNIT if self.by_token else UNIT_ROWS

    @property
    def signal_words(self) -> int:
        """4-byte words of a counter that peers add to: NVSHMEM's signals have two."""
        return 2 if self.put else 1

    @property
    def row_factor(self) -> int:
        """rows of the whole dispatch buffer over those of one side: B, in the fixed layout P * R * B"""
        return SIDES * (self.ranks * ROUNDS if self.fixed else 1)

    @property
    def row_pitch(self) -> int:
        """bytes from one row of the dispatch buffer to the next: H * 2 (+ 128 with put-with-signal, for the home)"""
        return self.hidden * self.element_size + (PACKET_TAIL if self.put else 0)

    @property
    def slots(self) -> int:
        """X = ceil(E / P), or that of the placement"""
        return self.placed_slots or ceil_div(self.experts, self.ranks)

    @property
    def counts_stride(self) -> int:
        """words of one rank's row of counts: E, a status word, S, the E before a capacity, padded to 128 bytes"""
        return align_up(self.experts + 2 + (self.experts if self.drops else 0), 32)

    def owner(self, expert):
        """Rank that holds `expert`: blocks of experts, the first E mod P ranks hold one more. Traced by the kernel."""
        base, extra = divmod(self.experts, self.ranks)
        if extra == 0:
            return expert // base
        head = extra * (base + 1)
        if base == 0:
            return expert
        in_head = (expert - head) >> 31  # all ones when expert < head
        clamped = (expert - head) & ~in_head
        return ((expert // (base + 1)) & in_head) | ((extra + clamped // base) & ~in_head)

    def first_expert(self, rank: int) -> int:
        """First expert of a rank, as a Python int; `first_expert(P)` is E."""
        base, extra = divmod(self.experts, self.ranks)
        return rank * base + min(rank, extra)


def dropped(expert):
    """What stands in the place of an expert whose capacity was full: negative, like any masked route, and its own
    inverse, so that who was chosen can still be read. Traced by the kernel."""
    return -2 - expert


def unsupported(config: MoEConfig, ranks: int) -> list[str]:
    """Everything about a layer that the megakernel can't do, in words; empty if it can."""
    c, out = config, []
    if c.dtype not in DTYPES:
        out.append(f"dtype={c.dtype} (only {', '.join(DTYPES)})")
    if c.experts > MAX_EXPERTS:
        out.append(f"experts={c.experts} (at most {MAX_EXPERTS})")
    if c.top_k > MAX_TOP_K:
        out.append(f"top_k={c.top_k} (at most {MAX_TOP_K})")
    if c.experts < ranks:
        out.append(f"experts={c.experts} on {ranks} ranks (every rank needs an expert)")
    if c.num_groups > MAX_GROUPS:
        out.append(f"num_groups={c.num_groups} (at most {MAX_GROUPS})")
    for name in ("hidden", "intermediate", "shared_intermediate"):
        if getattr(c, name) * c.element_size % LINE_BYTES:
            out.append(f"{name}={getattr(c, name)} (must be a multiple of {LINE_BYTES // c.element_size})")
    if c.max_tokens * c.top_k >= 1 << HOME_BITS:
        out.append(f"max_tokens={c.max_tokens} (max_tokens * top_k must stay below 2**{HOME_BITS})")
    if ranks > 1 << (31 - HOME_BITS):
        out.append(f"{ranks} ranks (at most {1 << (31 - HOME_BITS)})")
    return out


def unsupported_wire(config: MoEConfig, ranks: int, transport: str) -> list[str]:
    """What about the wire format the megakernel can't do with a transport, in words."""
    if config.wire_format == "tokens" and ranks > 1 and transport == "put_signal":
        return ["wire_format=tokens with transport=put_signal (direct stores only: every peer's memory must be mapped)"]
    return []


PLANNER_WORDS = 7680
"""Shared memory of the planner's block for the tables of replicas, in 4-byte words."""


def solver_words(experts: int, replicas: int, ranks: int, slots: int) -> int:
    """4 E D + 3 E + 3 P X + 2: what the solver holds in shared memory, in 4-byte words."""
    return 4 * experts * replicas + 3 * experts + 3 * ranks * slots + 2


def unsupported_placement(config: MoEConfig, placement: Placement, ranks: int) -> list[str]:
    """What about a placement the megakernel can't do, in words."""
    out = []
    if (placement.num_experts, placement.num_ranks) != (config.experts, ranks):
        out.append(
            f"a placement of {placement.num_experts} experts on {placement.num_ranks} ranks, expected "
            f"{config.experts} on {ranks}"
        )
    need = solver_words(config.experts, placement.max_replicas, ranks, placement.slots)
    need += 2 * placement.slots * (ranks if config.layout == "fixed" else 1)
    if need > PLANNER_WORDS:
        out.append(
            f"a placement with up to {placement.max_replicas} replicas in {placement.slots} slots of {ranks} ranks "
            f"({need} words of shared memory for its tables, at most {PLANNER_WORDS})"
        )
    return out


def placement_tables(placement: Placement, replicas: int, slots: int) -> np.ndarray:
    """What a launch hands over about a placement, int32 [E * D + P * X]: the rank of every replica, -1 for none; then
    what every slot holds, replica number e * D + j, -1 for an empty slot.

    replicas, slots: D and X of the kernel, at least those of the placement.
    """
    rank_ED = np.full((placement.num_experts, replicas), -1, dtype=np.int32)
    rank_ED[:, : placement.max_replicas] = placement.rank_ED
    held_PX = np.full((placement.num_ranks, slots), -1, dtype=np.int32)
    for rank, pairs in enumerate(placement.replicas_of_rank):
        for slot, (expert, replica) in enumerate(pairs):
            held_PX[rank, slot] = expert * replicas + replica
    return np.concatenate([rank_ED.ravel(), held_PX.ravel()])


# --- buffers ---------------------------------------------------------------------------------------------------------


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

    In the fixed layout X * C, of one source and one round; see `all_rows`.
    """
    if shape.fixed:
        return shape.slots * shape.slot_capacity(max_tokens)
    most = min(shape.top_k, shape.slots) * max_tokens * shape.ranks
    return align_up(most, TILE_ROWS) + shape.slots * TILE_ROWS


def all_rows(shape: KernelShape, max_tokens: int) -> int:
    """Rows of the dispatch buffer, both sides: B * R, in the fixed layout P * R * B * X * C (results included)."""
    return buffer_rows(shape, max_tokens) * SIDES * (shape.ranks * ROUNDS if shape.fixed else 1)


def most_tiles(shape: KernelShape, max_tokens: int) -> int:
    """Row tiles that one call can have on one rank: R / T, in the fixed layout P * X * C / T"""
    return buffer_rows(shape, max_tokens) // TILE_ROWS * (shape.ranks if shape.fixed else 1)


def heap_regions(shape: KernelShape, max_tokens: int) -> tuple[dict[str, Region], int]:
    """The symmetric heap, the same on every rank.

    bytes = B * (R + K * max_tokens) * H * element size  (rows in, results back: `MoEConfig.compact_bytes` with T = 128)
          + B * 4 * (R + R / T + max_tokens + P * E) + 4 P  (where each row goes home, arrival counters, counts)

    With put-with-signal rows lie 128 bytes further apart, counters take 8 bytes, and rows to send are staged:
    K * max_tokens rows (wire) and R results.

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
            "counts": SIDES * shape.ranks * shape.counts_stride * 4,
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


def workspace_regions(shape: KernelShape, max_tokens: int, blocks: int) -> tuple[dict[str, Region], int]:
    """Memory of one rank that no peer touches; of the shared expert: its hidden activations and results, a row per
    token."""
    tokens = align_up(max(max_tokens, 1), TILE_ROWS) if shape.shared_intermediate else 0
    routes = max(1, shape.top_k * max_tokens)
    tiles = most_tiles(shape, max_tokens)
    return regions(
        {
            "hidden": tiles * TILE_ROWS * shape.intermediate * shape.element_size,
            "expert": routes * 4,
            "weight": routes * 4,
            "index": routes * 4,
            "send": routes * 8,
            "histogram": ceil_div(max(max_tokens, 1), TILE_ROWS) * shape.experts * 4,
            "row_shift": shape.experts * max(shape.replicas, 1) * 4,
            "quota_end": shape.experts * shape.replicas * 4,
            "list_shift": shape.experts * shape.replicas * 4,
            "list_start": (shape.plan_parts * shape.experts + shape.ranks + 1) * 4,
            "plan": PLAN_WORDS * 4,
            "tile_slot": tiles * 4,
            "tile_rows": tiles * 4,
            "tile_at": tiles * 4 if shape.fixed else 0,
            "where": routes * 4 if shape.fixed or shape.by_token else 0,
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
