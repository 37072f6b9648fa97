"""One frozen dataclass describes a layer; every derived size is a property whose docstring is its formula.

Letters: S tokens of a rank, H hidden, D intermediate, E experts (logical), K choices per token, P ranks, X local expert
slots of a rank, C capacity, N routed rows, T tile rows.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch

from moe_ref.layout import ROUNDS, SIDES, align_up, ceil_div

Activation = Literal["relu", "gelu", "silu", "clamped_swiglu"]
Scoring = Literal["softmax", "sigmoid"]
TopKOrder = Literal["after_scores", "before_scores"]
GroupScore = Literal["max", "top2_sum"]
LayoutName = Literal["compact", "fixed"]
WireFormat = Literal["routes", "tokens"]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def _is_finite(value: Any) -> bool:
    """True for a real number that a float holds."""
    try:
        return not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


@dataclass(frozen=True)
class MoEConfig:
    """Everything that fixes what a layer computes, and the sizes of its buffers.

    Gate
        scoring: softmax over experts, or an independent sigmoid each.
        top_k_order: "after_scores" chooses among scores; "before_scores" chooses among logits and then scores the
            chosen K only (gpt-oss).
        renormalize: divide the K weights of a token by their sum (guarded against 0).
        routed_scaling: factor on the weights, after renormalising.
        selection_bias: a buffer [E] is added to the scores to choose, never to weigh (DeepSeek-V3).
        num_groups, top_groups, group_score: choose among the experts of the best groups only; a group's score is the
            max of its scores or the sum of its best two. num_groups = 1 switches it off.
        router_bias: adds a trainable bias [E] to the logits.

    Experts
        gated: (act(x Wg) * (x Wu)) Wd instead of act(x W1) W2.
        activation: "clamped_swiglu" is gpt-oss' gate and needs gated=True:
            g = min(gate, limit), u = clamp(up, -limit, limit), hidden = (u + 1) * g * sigmoid(alpha * g).
        expert_bias: biases on both products, inside the weighting.
        interleaved: rows of gate_up_proj are g0, u0, g1, u1, ... instead of all gate rows, then all up rows.
        shared_intermediate: width of an always-on shared expert, 0 for none; shared_gate multiplies its output by
            sigmoid(x w), w [1, H].

    Buffers
        layout: how rows lie in the symmetric heap.
        wire_format: what crosses between ranks: a row for each route there and back, or one for each (token, rank)
            there and a partial sum back (`moe_ref.wire`). Of a token's sum "tokens" rounds the part of each other rank
            to the dtype. Needs layout="compact".
        capacity_factor: None is dropless; otherwise C = ceil(factor * S * K / E) rows per (source rank, expert), first
            come (token order), first served, the rest counted as dropped.
        max_tokens: largest S that buffers are sized for.
        tile_rows: T; products are computed in row tiles padded to a multiple of it, so that the bits of a row don't
            depend on how many rows came with it.

    Raises:
        ValueError: a value is out of range or two values contradict each other; the message names the field.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: Activation = "silu"
    gated: bool = True
    expert_bias: bool = False
    router_bias: bool = False
    scoring: Scoring = "softmax"
    top_k_order: TopKOrder = "after_scores"
    renormalize: bool = True
    routed_scaling: float = 1.0
    selection_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    shared_intermediate: int = 0
    shared_gate: bool = False
    interleaved: bool = False
    clamp_limit: float = 7.0
    clamp_alpha: float = 1.702
    layout: LayoutName = "compact"
    capacity_factor: float | None = None
    max_tokens: int = 8192
    tile_rows: int = 16
    dtype: str = "float32"
    wire_format: WireFormat = "routes"

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "experts", "top_k", "num_groups", "top_groups", "tile_rows"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}, expected an integer of at least 1")
        for name in ("shared_intermediate", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} is {value!r}, expected an integer of at least 0")
        for name in (f.name for f in fields(self) if f.type == "bool"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected true or false")
        choices = {
            "activation": ("relu", "gelu", "silu", "clamped_swiglu"),
            "scoring": ("softmax", "sigmoid"),
            "top_k_order": ("after_scores", "before_scores"),
            "group_score": ("max", "top2_sum"),
            "layout": ("compact", "fixed"),
            "wire_format": ("routes", "tokens"),
            "dtype": tuple(DTYPES),
        }
        for name, legal in choices.items():
            if getattr(self, name) not in legal:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(legal)}")
        for name in ("routed_scaling", "clamp_limit", "clamp_alpha"):
            if not _is_finite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected a finite number")
        if self.clamp_limit <= 0:
            raise ValueError(f"clamp_limit is {self.clamp_limit}, expected a positive number")
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}, expected at most experts = {self.experts}")
        if self.experts % self.num_groups:
            small = [g for g in range(1, math.isqrt(self.experts) + 1) if self.experts % g == 0]
            legal = sorted({*small, *(self.experts // g for g in small)})
            raise ValueError(
                f"num_groups is {self.num_groups}, expected a divisor of experts = {self.experts}: {legal}"
            )
        if self.top_groups > self.num_groups:
            raise ValueError(f"top_groups is {self.top_groups}, expected at most num_groups = {self.num_groups}")
        if self.top_k > self.top_groups * (self.experts // self.num_groups):
            raise ValueError(
                f"top_k is {self.top_k}, but the {self.top_groups} chosen groups hold only "
                f"{self.top_groups * (self.experts // self.num_groups)} experts; raise top_groups or lower top_k"
            )
        if self.group_score == "top2_sum" and self.num_groups > 1 and self.experts // self.num_groups < 2:
            raise ValueError("group_score 'top2_sum' needs groups of at least two experts; lower num_groups")
        if self.activation == "clamped_swiglu" and not self.gated:
            raise ValueError("activation 'clamped_swiglu' multiplies a gate and an up product; set gated=True")
        if self.interleaved and not self.gated:
            raise ValueError("interleaved orders the rows of gate_up_proj; it needs gated=True")
        if self.shared_gate and not self.shared_intermediate:
            raise ValueError("shared_gate needs a shared expert; set shared_intermediate to its width")
        if self.wire_format == "tokens" and self.layout == "fixed":
            raise ValueError(
                "wire_format 'tokens' sends a token once for several slots, but layout='fixed' gives every slot its "
                "own place; use layout='compact'"
            )
        if self.capacity_factor is not None and not (_is_finite(self.capacity_factor) and self.capacity_factor > 0):
            raise ValueError(
                f"capacity_factor is {self.capacity_factor!r}, expected a positive number, or None for dropless"
            )

    # --- derived sizes ------------------------------------------------------------------------------------------

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of parameters, rows, hidden activations and results."""
        return DTYPES[self.dtype]

    @property
    def element_size(self) -> int:
        """bytes of one element of dtype"""
        return self.torch_dtype.itemsize

    @property
    def up_rows(self) -> int:
        """2 D if gated else D"""
        return 2 * self.intermediate if self.gated else self.intermediate

    @property
    def parameters_per_expert(self) -> int:
        """H * up_rows + D * H (+ up_rows + H with biases)"""
        biases = self.up_rows + self.hidden if self.expert_bias else 0
        return self.hidden * self.up_rows + self.intermediate * self.hidden + biases

    @property
    def flops_per_row(self) -> int:
        """2 * H * up_rows + 2 * D * H"""
        return 2 * self.hidden * self.up_rows + 2 * self.intermediate * self.hidden

    @property
    def row_bytes(self) -> int:
        """H * element_size"""
        return self.hidden * self.element_size

    def capacity(self, tokens: int) -> int | None:
        """C = min(ceil(capacity_factor * S * K / E), S * K), None when dropless."""
        if self.capacity_factor is None:
            return None
        routes = tokens * self.top_k
        return math.ceil(min(self.capacity_factor * routes / self.experts, routes))

    def slots(self, ranks: int) -> int:
        """X = ceil(E / P), one replica per expert"""
        return ceil_div(self.experts, ranks)

    def max_rows(self, ranks: int) -> int:
        """min(K, X) * max_tokens * P: every rank sends all it can to one rank"""
        return min(self.top_k, self.slots(ranks)) * self.max_tokens * ranks

    def compact_bytes(self, ranks: int) -> int:
        """B * (align(max_rows, T) + X * T + K * max_tokens) * row_bytes: rows in, results back, both sides; with
        wire_format "tokens" P - 1 instead of K, for partial sums"""
        dispatch = align_up(self.max_rows(ranks), self.tile_rows) + self.slots(ranks) * self.tile_rows
        back = self.top_k if self.wire_format == "routes" else ranks - 1
        return SIDES * (dispatch + back * self.max_tokens) * self.row_bytes

    def fixed_bytes(self, ranks: int) -> int:
        """P * R * B * X * C * row_bytes, C = align(capacity or max_tokens, T)"""
        capacity = align_up(self.capacity(self.max_tokens) or self.max_tokens, self.tile_rows)
        return ranks * ROUNDS * SIDES * self.slots(ranks) * capacity * self.row_bytes

    # --- plumbing -----------------------------------------------------------------------------------------------

    def replace(self, **changes: Any) -> MoEConfig:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the inverse of `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MoEConfig:
        """Config from plain values; unknown keys are an error that lists the legal ones."""
        legal = [f.name for f in fields(cls)]
        unknown = sorted(set(values) - set(legal))
        if unknown:
            raise ValueError(f"unknown config fields {unknown}; legal ones: {', '.join(legal)}")
        return cls(**values)
