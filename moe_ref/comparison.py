"""Comparing two records of a forward: every named buffer, element by element, and the report of it.

Rows of the buffers between dispatch and return stand in the order (slot, source rank, token) without padding, whatever
layout a backend uses, so buffers with different tile heights compare position by position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_ref.pipeline import Record

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest |a - b| / (|b| + rms(b)) of one element that two correct backends may show, by dtype of the layer."""

_BUFFERS = (
    ("gate", "expert_SK"),
    ("gate", "weight_SK"),
    ("counts", "counts_PE"),
    ("plan", "quota_PED"),
    ("dispatch", "rows_NH"),
    ("gemm0", "hidden_ND"),
    ("gemm1", "output_NH"),
    ("return", "returned_NH"),
    ("combine", "y_SH"),
)
"""Every named intermediate and the stage that makes it, in order."""

_EXACT = {"expert_SK", "counts_PE", "quota_PED", "rows_NH"}
"""Integers, and rows that are only moved: equal in every bit or wrong."""


@dataclass(frozen=True)
class Difference:
    """The first element that differs; `rank` is where the buffer lives; None where a field has no meaning."""

    stage: str
    buffer: str
    rank: int
    expert: int | None
    tile: int | None
    row: int
    column: int
    value: float
    expected: float

    def __str__(self) -> str:
        where = [f"rank {self.rank}"]
        where += [f"expert {self.expert}"] if self.expert is not None else []
        where += [f"tile {self.tile}"] if self.tile is not None else []
        where += [f"row {self.row}", f"column {self.column}"]
        return f"{self.stage} ({self.buffer}): {', '.join(where)}: {self.value:.9g}, expected {self.expected:.9g}"


@dataclass(frozen=True)
class BufferResult:
    """Comparison of one buffer over all local ranks.

    Attributes:
        relative_error: ||a - b||_F / ||b||_F; max_abs_error likewise over elements.
        bit_equal: every element has the same bits; ok: every element within tolerance.
        wrong_elements, elements: counts; wrong_tiles: (rank, expert or -1, tile) of up to 64 tiles that hold one.
        first: the first wrong element.
    """

    stage: str
    buffer: str
    ok: bool
    bit_equal: bool
    relative_error: float
    max_abs_error: float
    elements: int
    wrong_elements: int
    wrong_tiles: list[tuple[int, int, int]] = field(default_factory=list)
    first: Difference | None = None


@dataclass(frozen=True)
class Report:
    """Outcome of a comparison; prints as a table, `to_dict` is what --json prints."""

    backend: str
    against: str
    buffers: list[BufferResult]
    note: str = ""

    @property
    def ok(self) -> bool:
        """Nothing differs by more than the tolerance."""
        return all(b.ok for b in self.buffers)

    @property
    def first(self) -> Difference | None:
        """First difference in stage order."""
        return next((b.first for b in self.buffers if b.first is not None), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "backend": self.backend,
            "against": self.against,
            "ok": self.ok,
            "note": self.note,
            "first": None if self.first is None else asdict(self.first),
            "buffers": [asdict(b) for b in self.buffers],
        }

    def __str__(self) -> str:
        lines = [f"{self.backend} against {self.against}: {'equal within tolerance' if self.ok else 'DIFFERENT'}"]
        for b in self.buffers:
            state = "same bits" if b.bit_equal else ("ok" if b.ok else f"{b.wrong_elements} of {b.elements} wrong")
            lines.append(f"  {b.stage:9} {b.buffer:12} relative error {b.relative_error:.2e}  {state}")
        if self.first is not None:
            lines.append(f"first difference: {self.first}")
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)


def _buffer(record: Record, name: str) -> list[Tensor] | None:
    """A named intermediate as one tensor per local rank (or one for what all ranks share)."""
    if name in ("expert_SK", "weight_SK"):
        return None if record.routing is None else [getattr(r, name) for r in record.routing]
    if name == "counts_PE":
        return None if record.counts_PE is None else [torch.as_tensor(record.counts_PE)]
    if name == "quota_PED":
        return None if record.plan is None else [torch.as_tensor(record.plan.quota_PED)]
    return getattr(record, name)


def _place(
    record: Record, name: str, i: int, rank: int, row: int, tile_rows: int
) -> tuple[int | None, int | None, int]:
    """(expert, tile, row) that a person would look for: rows count within the expert's block where there is one."""
    if name in ("rows_NH", "hidden_ND", "output_NH") and record.plan is not None:
        end_X = np.cumsum(record.plan.quota_by_slot()[:, rank].sum(axis=0))
        slot = int(np.searchsorted(end_X, row, side="right"))
        inside = row - (int(end_X[slot - 1]) if slot else 0)
        return record.plan.placement.experts_of_rank[rank][slot], inside // tile_rows, inside
    if name == "returned_NH" and record.routing is not None:
        return int(record.routing[i].expert_SK.flatten()[row]), row // tile_rows, row
    if name == "counts_PE":
        return None, None, row
    return None, row // tile_rows, row


def compare_buffer(
    stage: str, name: str, actual: Record, expected: Record, ranks: Sequence[int], dtype: torch.dtype, tile_rows: int
) -> BufferResult | None:
    """Compare one buffer of two records; None where the expected side doesn't have it.

    A buffer that the actual side lacks on some rank, or whose shape differs, is wrong in its first element.
    """
    ours, theirs = _buffer(actual, name), _buffer(expected, name)
    if theirs is None or ours is None:
        return None
    tolerance = 0.0 if name in _EXACT else TOLERANCE[dtype]
    wrong_tiles: dict[tuple[int, int, int], None] = {}
    first, wrong, elements, largest, bit_equal = None, 0, 0, 0.0, True
    squares = [0.0, 0.0]
    for i, b in enumerate(theirs):
        rank = ranks[i] if len(theirs) == len(ranks) else 0
        a = ours[i].detach().to(b.device) if i < len(ours) else b.new_zeros(0)
        a, b = a.double(), b.detach().double()
        a, b = (t.reshape(t.shape[0], math.prod(t.shape[1:])) for t in (a, b))
        elements += b.numel()
        if a.shape != b.shape:
            bit_equal, wrong = False, wrong + max(b.numel(), 1)
            place = _place(expected, name, i, rank, 0, tile_rows) if b.numel() else (None, None, 0)
            first = first or Difference(
                stage, name, rank, *place, 0, float("nan"), float(b.flatten()[0]) if b.numel() else 0.0
            )
            largest, squares = float("inf"), [float("inf"), 1.0]
            continue
        if not b.numel():
            continue
        delta = (a - b).abs()
        bit_equal = bit_equal and bool(torch.equal(a, b))
        # A NaN on either side alone is wrong, wherever it stands; the comparison is written so that NaN fails it.
        good = (delta <= tolerance * (b.abs() + b.square().mean().sqrt())) | (a.isnan() & b.isnan())
        largest = max(largest, float(delta.nan_to_num(nan=float("inf")).max()))
        squares[0] += float(delta.nan_to_num(nan=float("inf")).square().sum())
        squares[1] += float(b.square().nan_to_num().sum())
        bad = (~good).nonzero()
        wrong += len(bad)
        for row in bad[:, 0].unique().tolist():
            expert, tile, _ = _place(expected, name, i, rank, row, tile_rows)
            wrong_tiles.setdefault((rank, -1 if expert is None else expert, -1 if tile is None else tile))
            if len(wrong_tiles) >= 64:
                break
        if len(bad) and first is None:
            row, column = (int(v) for v in bad[0])
            first = Difference(
                stage,
                name,
                rank,
                *_place(expected, name, i, rank, row, tile_rows),
                column,
                float(a[row, column]),
                float(b[row, column]),
            )
    scale = squares[1] ** 0.5
    error = squares[0] ** 0.5 / scale if scale else (0.0 if squares[0] == 0 else float("inf"))
    return BufferResult(stage, name, wrong == 0, bit_equal, error, largest, elements, wrong, list(wrong_tiles), first)


def compare_records(
    actual: Record, expected: Record, ranks: Sequence[int], dtype: torch.dtype, tile_rows: int
) -> list[BufferResult]:
    """Compare every buffer that both records hold, in stage order."""
    results = (compare_buffer(stage, name, actual, expected, ranks, dtype, tile_rows) for stage, name in _BUFFERS)
    return [result for result in results if result is not None]
