"""What is fixed when the megakernel is compiled, and every size of a task that follows from it.

One compilation serves one (H, D, E, K, dtype, expert form, gate form, shared expert, P, scheduler). S and the buffer
sizes are run-time values, so a layer never recompiles when its batch changes.

Letters: S tokens of a rank, H hidden, D intermediate, E experts, K choices per token, P ranks, X local expert slots,
R rows of the dispatch buffer, T tile rows.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from moe_fast.kernel.constants import (
    BACKLOG,
    DEEP,
    HALF_COLUMNS,
    LINE_BYTES,
    MANY_COLUMNS,
    PACKET_TAIL,
    SCHEDULERS,
    STAGES,
    TILE_COLUMNS,
    TILE_ROWS,
    TOKEN_UNIT,
    TRANSPORTS,
    UNIT_ROWS,
    WORDS,
)
from moe_fast.kernel.limits import unsupported, unsupported_pairs, unsupported_placement, unsupported_wire
from moe_ref.config import MoEConfig
from moe_ref.errors import UsageError
from moe_ref.layout import ROUNDS, SIDES, align_up, ceil_div
from moe_ref.placement import Placement


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
    paired: bool = False
    """Two neighbouring blocks are one processor and share the weights of its task, see `pairs`."""

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
        paired: bool | None = None,
    ) -> KernelShape:
        """Shape for a layer on `ranks` ranks; fp32_router: the router's weight is kept in fp32 (DeepSeek).

        Only the number of slots and replicas of a placement are compiled in; which expert is where is a table that a
        launch hands over, so moving experts compiles nothing. paired: processors of two blocks, see `pairs`; None for
        them wherever they can do what the layer asks for.

        Raises:
            UsageError: a feature that the kernel doesn't have, by name, or a size that its tiles can't divide; an
                argument of another kind, by its name.
        """
        _check_arguments(config, ranks, placement, trace=trace, fp32_router=fp32_router, paired=paired)
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
        alone = unsupported_pairs(config, ranks, scheduler, transport)
        if paired:
            problems += alone
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
            paired=not alone if paired is None else paired,
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
        parts += ["pairs"] if self.paired else []
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
        """task words that a block has room for; biases take the place of one of them, those of float32 layers of three.
        A storer that waits for puts takes longer than a short task: it may be further behind where no biases are
        kept."""
        if self.expert_bias:
            return 1 if self.element_size == 4 else WORDS - 1
        return 2 * WORDS if self.put else WORDS

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

    def gate_steps(self, low: bool) -> int:
        """steps of 128 bytes in a pipeline stage of a low or a high token tile of the gate: two where the stage has
        room for as many, rows and router, so that twice as many bytes are under way; else one, as elsewhere"""
        rows, room = TILE_ROWS // 2 if low else TILE_ROWS, TILE_ROWS + TILE_COLUMNS
        fit = self.element_size == 2 and 2 * (rows + self.gate_columns) <= room
        return 2 if fit and self.gate_depth % 2 == 0 else 1

    @property
    def router_at(self) -> int:
        """where in the weights' stages, in rows of them all, those of the gate's router begin: behind the half that
        token tiles take, too, if the router is narrow enough for the other one"""
        wide = self.element_size == 2 and self.gate_columns <= HALF_COLUMNS // 2
        return STAGES * HALF_COLUMNS if wide else 0

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
        return 8 if self.columns0 > MANY_COLUMNS else 2

    @property
    def backlog(self) -> int:
        """Second products for each processor that wait while there are first ones: as many as take as long as BACKLOG
        first ones. The Scheduler looks at 32 ready blocks: where they hold no more, all first products come first."""
        return max(1, BACKLOG * self.depth0 // self.depth1)

    def task_rows(self, row_tiles):
        """Tasks in one column of `row_tiles` neighbouring row tiles that are dealt: one for each, or one for two, the
        members of a tile pair. Traced by the kernel."""
        return row_tiles >> 1 if self.paired else row_tiles

    def first_tile(self, task_row):
        """First row tile of row `task_row` of tasks. Traced by the kernel."""
        return task_row * 2 if self.paired else task_row

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
        """Whether rows and signals leave by NVSHMEM's puts and signals instead of direct stores."""
        return self.transport == "put_signal"

    @property
    def by_place(self) -> bool:
        """Whether a result comes back to its place in the send list instead of to its route, so that neighbours in a
        row tile are neighbours at home. The fixed layout's coordinates are so by themselves."""
        return self.put and not self.fixed

    @property
    def put_from_shared(self) -> bool:
        """Whether results are put from shared memory to peers that are mapped: 16-bit ones, of which the sums that have
        to outlive a put fit into registers."""
        return self.put and self.element_size == 2

    @property
    def by_token(self) -> bool:
        """Whether a token crosses once to each rank and one partial sum comes back, instead of a row for each route."""
        return self.wire_format == "tokens"

    @property
    def early(self) -> bool:
        """Whether row tiles that consist of the rank's own first rows are marked `EARLY`. Not where replicas move rows,
        whose places the plan's slots don't tell; nor in the wire format "tokens", where it was not tried."""
        return not (self.placed or self.by_token)

    @property
    def carries(self) -> bool:
        """Whether a row tile of at most CARRIED_ROWS rows goes along with its expert's tile pair before it, see
        `tile_pairs`. Written for 16-bit layers whose processors are pairs of blocks."""
        return self.paired and self.element_size == 2 and min(self.depth0, self.depth1) >= STAGES

    @property
    def gathers(self) -> bool:
        """Whether rows that stay on their rank are read where the tokens lie instead of being copied, see `gather`, and
        followers of the wire format "tokens" where their leaders lie. Written for 16-bit layers whose processors are
        pairs of blocks. Every column tile gathers a row anew, so where there are many a copy costs less."""
        return self.paired and self.element_size == 2 and self.columns0 <= MANY_COLUMNS

    @property
    def halves(self) -> bool:
        """Whether the last second products are dealt in halves of their rows (`scheduler`): where they are deep, one
        that begins late keeps everybody waiting for long. A half takes two thirds of the time of the whole, so
        elsewhere little is gained. Written for 16-bit layers whose processors are pairs of blocks, for a Scheduler,
        direct stores and the wire format "routes"."""
        possible = self.paired and self.element_size == 2 and not (self.put or self.by_token)
        return possible and self.scheduler != "tickets" and self.depth1 >= DEEP

    @property
    def deals_ahead(self) -> bool:
        """Whether processor number p begins with task number p, which nobody has to deal. On one rank, where rows come
        in the order of the tasks; not where processors come at different times, from the shared expert's tasks."""
        return self.scheduler != "tickets" and self.ranks == 1 and self.shared_intermediate == 0

    @property
    def few_send(self) -> bool:
        """Whether of SENDERS spare warps only one sends rows to other ranks, and the local ones that aren't gathered.
        Rows of float32 are twice as long and copied: there half of the warps are too few."""
        return self.ranks > 1 and self.paired and self.element_size == 2

    @property
    def far_unit(self) -> int:
        """entries of the send list that a warp takes together for another rank"""
        return TOKEN_UNIT if self.by_token else UNIT_ROWS

    @property
    def near_unit(self) -> int:
        """local rows that a spare warp pushes together: as many as `far_unit`, but UNIT_ROWS where they are copied"""
        return TOKEN_UNIT if self.by_token and self.gathers else UNIT_ROWS

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
        """bytes from one row of the dispatch buffer to the next: H * element size (+ 128 with put-with-signal, for the
        home)"""
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


def _check_arguments(config: object, ranks: object, placement: object, **switches: object) -> None:
    """Raise UsageError for what no kernel can be made of. Switches are True or False, not anything that counts as such:
    a kernel's file is named by its shape."""
    if not isinstance(config, MoEConfig):
        raise UsageError(f"config is a {type(config).__name__}, expected a MoEConfig")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise UsageError(f"ranks is {ranks!r}, expected an integer of at least 1")
    if placement is not None and not isinstance(placement, Placement):
        raise UsageError(f"placement is a {type(placement).__name__}, expected a Placement or None")
    for name, value in switches.items():
        if not isinstance(value, bool) and not (name == "paired" and value is None):
            kinds = "True, False or None" if name == "paired" else "True or False"
            raise UsageError(f"{name} is {value!r}, expected {kinds}")
