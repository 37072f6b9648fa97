"""What the megakernel can't do, and why: each in words, so that a refusal says what would have to be different."""

from __future__ import annotations

from moe_fast.kernel.constants import (
    DTYPES,
    HOME_BITS,
    LINE_BYTES,
    MAX_EXPERTS,
    MAX_GROUPS,
    MAX_TOP_K,
    TILE_COLUMNS,
)
from moe_ref.config import MoEConfig
from moe_ref.placement import Placement
from moe_ref.runtime.encoding import COLUMN_BITS

MAX_ROW_BYTES = 1 << 17
"""Of a token's row, so of hidden: copying a row is unrolled, and with rows of this size a kernel already takes several
times as long to compile as usual. The largest models have about a quarter of it."""
PLANNER_WORDS = 7680
"""Shared memory of the planner's block for the tables of replicas, in 4-byte words."""


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
    if c.hidden * c.element_size > MAX_ROW_BYTES:
        most = MAX_ROW_BYTES // c.element_size
        out.append(f"hidden={c.hidden} (at most {most} with {c.dtype}: copying a row is unrolled when compiled)")
    for name in ("intermediate", "shared_intermediate"):
        most = TILE_COLUMNS // (1 + c.gated) << COLUMN_BITS
        if getattr(c, name) > most:
            out.append(f"{name}={getattr(c, name)} (at most {most}: a task's word has room for no more)")
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


def unsupported_pairs(config: MoEConfig, ranks: int, scheduler: str, transport: str) -> list[str]:
    """What about a layer processors of two blocks can't do, in words."""
    out = []
    if scheduler == "os_block":
        out.append("paired with scheduler=os_block (its last block would be half of a pair)")
    if transport == "put_signal":
        out.append("paired with transport=put_signal (direct stores only)")
    if config.layout == "fixed":
        out.append("paired with layout=fixed (only the compact layout)")
    if config.shared_intermediate:
        out.append("paired with a shared expert (its token tiles are tasks of one block)")
    if config.expert_bias:
        out.append("paired with expert_bias (biases come with a stage that both blocks fill)")
    return out


def most_rounds(experts: int, replicas: int, slots: int) -> int:
    """Most rounds of a placement (`Placement.rounds`): an expert waits for a round only while every earlier one has
    another expert of one of its ranks."""
    return min(experts, replicas * (slots - 1) + 1)


def solver_words(experts: int, replicas: int, ranks: int, slots: int) -> int:
    """4 E D + 3 E + P X + max(2 P X + 2, R P + 1), R rounds: what the solver has in shared memory, in 4-byte words."""
    turns = most_rounds(experts, replicas, slots) * ranks
    return 4 * experts * replicas + 3 * experts + ranks * slots + max(2 * ranks * slots + 2, turns + 1)


def unsupported_placement(config: MoEConfig, placement: Placement, ranks: int) -> list[str]:
    """What about a placement the megakernel can't do, in words."""
    out = []
    if (placement.num_experts, placement.num_ranks) != (config.experts, ranks):
        out.append(
            f"a placement of {placement.num_experts} experts on {placement.num_ranks} ranks, expected "
            f"{config.experts} on {ranks}"
        )
    need = solver_words(config.experts, placement.max_replicas, ranks, placement.slots)
    # behind them rows, first tile and tile pairs of every slot
    need += 3 * placement.slots * (ranks if config.layout == "fixed" else 1)
    if need > PLANNER_WORDS:
        out.append(
            f"a placement with up to {placement.max_replicas} replicas in {placement.slots} slots of {ranks} ranks "
            f"({need} words of shared memory for its tables, at most {PLANNER_WORDS})"
        )
    return out
