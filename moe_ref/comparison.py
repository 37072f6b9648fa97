"""Comparing two records of a forward: every named buffer, element by element, and the report of it.

Rows of the buffers between dispatch and return stand in the order (slot, source rank, token) without padding, whatever
layout a backend uses, so buffers with different tile heights compare position by position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
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
    ("return", "partial_NH"),
    ("combine", "y_SH"),
)
"""Every named intermediate and the stage that makes it, in order."""

_EXACT = {"expert_SK", "counts_PE", "quota_PED", "rows_NH"}
"""Integers, and rows that are only moved: equal in every bit or wrong."""

Place = tuple[int | None, int | None, int]
"""(expert, tile, row) of an element; None where a buffer has no such thing."""

_TILES_LISTED = 64
"""A report names this many wrong tiles at most."""


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


def _place(record: Record, name: str, i: int, rank: int, tile_rows: int, row: int) -> Place:
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


@dataclass
class _Tally:
    """Sums over the ranks of one buffer."""

    first: Difference | None = None
    wrong_tiles: dict[tuple[int, int, int], None] = field(default_factory=dict)
    wrong: int = 0
    elements: int = 0
    largest: float = 0.0
    bit_equal: bool = True
    difference_squared: float = 0.0
    expected_squared: float = 0.0


def _matrix(value: Tensor) -> Tensor:
    """Any buffer as float64 rows and columns."""
    value = value.detach().double()
    return value.reshape(value.shape[0], math.prod(value.shape[1:])) if value.dim() else value.reshape(1, 1)


def _rms(b: Tensor) -> float:
    """Root mean square of the finite elements, scaled so that no square overflows."""
    b = b[b.isfinite()]
    largest = float(b.abs().max()) if b.numel() else 0.0
    return largest * float((b / largest).square().mean().sqrt()) if largest else 0.0


def _compare_rank(
    tally: _Tally,
    a: Tensor,
    b: Tensor,
    tolerance: float,
    rank: int,
    where: Callable[[int], Place],
    names: tuple[str, str],
) -> None:
    """Add one rank's matrices a (actual) and b (expected) to the tally; `where(row)` is (expert, tile, row).

    Tolerance 0 asks for the same bits.
    """
    exact = tolerance == 0.0
    tally.elements += b.numel()
    if a.shape != b.shape:
        value = float(b.flatten()[0]) if b.numel() else 0.0
        place: Place = where(0) if b.numel() else (None, None, 0)
        tally.first = tally.first or Difference(*names, rank, *place, 0, float("nan"), value)
        tally.wrong += max(b.numel(), 1)
        tally.bit_equal, tally.largest, tally.difference_squared = False, float("inf"), float("inf")
        return
    if not b.numel():
        return
    # Zeros of different sign are different bits; two NaNs count as the same, whatever their payload.
    same = ((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())
    delta = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"), posinf=float("inf"))
    # Where the expected value is not finite, only the same value is right.
    close = (delta <= tolerance * (b.abs() + _rms(b))) & b.isfinite() & a.isfinite()
    good = same if exact else same | close
    tally.bit_equal = tally.bit_equal and bool(same.all())
    tally.largest = max(tally.largest, float(delta.max()))
    tally.difference_squared += float(delta.square().sum())
    tally.expected_squared += float(torch.where(b.isfinite(), b, 0.0).square().sum())
    bad = (~good).nonzero()
    tally.wrong += len(bad)
    if len(bad) and tally.first is None:
        row, column = (int(v) for v in bad[0])
        tally.first = Difference(*names, rank, *where(row), column, float(a[row, column]), float(b[row, column]))
    for row in bad[:, 0].unique().tolist():
        if len(tally.wrong_tiles) >= _TILES_LISTED:
            break
        expert, tile, _ = where(row)
        tally.wrong_tiles.setdefault((rank, -1 if expert is None else expert, -1 if tile is None else tile))


def compare_buffer(
    stage: str,
    name: str,
    actual: Record,
    expected: Record,
    ranks: Sequence[int],
    dtype: torch.dtype,
    tile_rows: int,
    tolerance: float = 0.0,
) -> BufferResult | None:
    """Compare one buffer of two records; None where either side doesn't have it.

    tolerance: of values that are computed, where it is more than the dtype's.

    A buffer that the actual side lacks on some rank, or whose shape differs, is wrong in its first element. A NaN or an
    infinity on one side alone is wrong wherever it stands.
    """
    ours, theirs = _buffer(actual, name), _buffer(expected, name)
    if theirs is None or ours is None:
        return None
    tolerance = 0.0 if name in _EXACT else max(tolerance, TOLERANCE[dtype])
    tally = _Tally()
    for i, b in enumerate(theirs):
        rank = ranks[i] if len(theirs) == len(ranks) else 0
        a = ours[i].to(b.device) if i < len(ours) else b.new_zeros(0)
        where = partial(_place, expected, name, i, rank, tile_rows)
        _compare_rank(tally, _matrix(a), _matrix(b), tolerance, rank, where, (stage, name))
    if len(ours) > len(theirs):
        nothing = partial(_place, expected, name, 0, 0, tile_rows)
        _compare_rank(
            tally, _matrix(ours[len(theirs)]), torch.zeros(0, 0), tolerance, len(theirs), nothing, (stage, name)
        )
    scale, error = tally.expected_squared**0.5, tally.difference_squared**0.5
    return BufferResult(
        stage,
        name,
        ok=tally.wrong == 0,
        bit_equal=tally.bit_equal,
        relative_error=error / scale if scale else (0.0 if error == 0 else float("inf")),
        max_abs_error=tally.largest,
        elements=tally.elements,
        wrong_elements=tally.wrong,
        wrong_tiles=list(tally.wrong_tiles),
        first=tally.first,
    )


def compare_records(
    actual: Record,
    expected: Record,
    ranks: Sequence[int],
    dtype: torch.dtype,
    tile_rows: int,
    tolerance: float = 0.0,
) -> tuple[list[BufferResult], list[str]]:
    """Compare every buffer that both records hold, in stage order; also the names of those that only one side has."""
    results, missing = [], []
    for stage, name in _BUFFERS:
        result = compare_buffer(stage, name, actual, expected, ranks, dtype, tile_rows, tolerance)
        if result is not None:
            results.append(result)
        elif (_buffer(actual, name) is None) != (_buffer(expected, name) is None):
            missing.append(name)
    return results, missing
