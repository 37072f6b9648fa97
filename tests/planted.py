"""Twenty planted bugs: a backend that is the reference with one thing wrong, and where the harness must find it.

Each bug changes the results of one stage; everything after it is computed from the changed results, as in a kernel.
`where` is worked out from the input, not from the harness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_ref import MoELayer, Routing, pipeline
from moe_ref.pipeline import Record

STAGE_BUFFER = {"dispatch": "rows_NH", "gemm0": "hidden_ND", "gemm1": "output_NH"}


class MutantBackend:
    """The reference, stopped after a stage, changed by `mutate`, and resumed from there."""

    name = "mutant"

    def __init__(self, stage: str, mutate: Callable[[Record, MoELayer], None]) -> None:
        self.stage, self.mutate = stage, mutate

    def unavailable(self) -> str | None:
        return None

    def forward(
        self, layer: MoELayer, x_SH: Sequence[Tensor], routing: Sequence[Routing] | None, *, keep: bool = False
    ) -> Record:
        record = pipeline.run(layer, x_SH, routing, keep=True)
        assert record.routing is not None
        if self.stage == "gate":
            self.mutate(record, layer)
            return pipeline.run(layer, x_SH, record.routing, keep=True)
        if self.stage in STAGE_BUFFER:
            name = STAGE_BUFFER[self.stage]
            self.mutate(record, layer)
            given = Record(**{name: getattr(record, name)})
            later = pipeline.run(layer, x_SH, routing, given=given, keep=True)
            earlier = ("rows_NH", "hidden_ND", "output_NH")[: list(STAGE_BUFFER).index(self.stage) + 1]
            for buffer in earlier:
                setattr(later, buffer, getattr(record, buffer))
            return later
        self.mutate(record, layer)
        if self.stage == "return":
            from moe_ref.combine import combine

            assert record.returned_NH is not None
            record.y_SH = [combine(rows, r, None) for rows, r in zip(record.returned_NH, record.routing, strict=True)]
        return record


@dataclass(frozen=True)
class Bug:
    """One planted bug and the place where it must be found: (buffer, rank, expert or None, row, column)."""

    name: str
    stage: str
    mutate: Callable[[Record, MoELayer], None]
    where: tuple[str, int, int | None, int, int]


def _start(record: Record, rank: int, expert: int) -> int:
    """First row of an expert's block in the buffers of `rank`."""
    assert record.plan is not None
    slot = record.plan.placement.experts_of_rank[rank].index(expert)
    return int(record.plan.quota_by_slot()[:, rank, :slot].sum())


def _rows(record: Record, rank: int, expert: int) -> int:
    assert record.plan is not None
    slot = record.plan.placement.experts_of_rank[rank].index(expert)
    return int(record.plan.quota_by_slot()[:, rank, slot].sum())


def _edit(name: str, rank: int, change: Callable[[Tensor, Record, MoELayer], None]):
    """Change a copy of one rank's buffer."""

    def mutate(record: Record, layer: MoELayer) -> None:
        buffers = list(getattr(record, name))
        buffers[rank] = buffers[rank].clone()
        change(buffers[rank], record, layer)
        setattr(record, name, buffers)

    return mutate


def _route(rank: int, change: Callable[[Tensor, Tensor], None]):
    def mutate(record: Record, layer: MoELayer) -> None:
        assert record.routing is not None
        old = record.routing[rank]
        ids, weights = old.expert_SK.clone(), old.weight_SK.clone()
        change(ids, weights)
        record.routing = [
            replace(r, expert_SK=ids, weight_SK=weights) if i == rank else r for i, r in enumerate(record.routing)
        ]

    return mutate


def _block(expert: int, rank: int, change: Callable[[Tensor], None]):
    """Change the rows of one expert's block in place."""

    def edit(buffer: Tensor, record: Record, layer: MoELayer) -> None:
        first = _start(record, rank, expert)
        change(buffer[first : first + _rows(record, rank, expert)])

    return edit


def _swap_experts(buffer: Tensor, record: Record, layer: MoELayer) -> None:
    """Rank 1 computes expert 3's first product with expert 2's weights."""
    from moe_ref.experts import gemm0

    assert record.rows_NH is not None
    first, rows = _start(record, 1, 3), _rows(record, 1, 3)
    wrong = layer.weights_of(1, buffer.dtype)[layer.experts_of(1).index(2)]
    buffer[first : first + rows] = gemm0(record.rows_NH[1][first : first + rows], wrong, layer.config)


def _no_activation(buffer: Tensor, record: Record, layer: MoELayer) -> None:
    """The up product without its gate on the last tile of expert 4 (rank 2)."""
    from moe_ref.experts import tiled_linear

    assert record.rows_NH is not None
    first, rows = _start(record, 2, 4), _rows(record, 2, 4)
    tile = (rows - 1) // 16 * 16
    weights = layer.weights_of(2, buffer.dtype)[layer.experts_of(2).index(4)]
    part = record.rows_NH[2][first + tile : first + rows]
    buffer[first + tile : first + rows] = tiled_linear(part, weights.up_UH, None, 16).chunk(2, dim=1)[1]


def _half_k(buffer: Tensor, record: Record, layer: MoELayer) -> None:
    """The K loop of GEMM1 stops one step early for expert 1 (rank 0): the last 16 of D are missing."""
    assert record.hidden_ND is not None
    first, rows = _start(record, 0, 1), _rows(record, 0, 1)
    weights = layer.weights_of(0, buffer.dtype)[layer.experts_of(0).index(1)]
    hidden = record.hidden_ND[0][first : first + rows].clone()
    hidden[:, -16:] = 0
    buffer[first : first + rows] = hidden @ weights.down_HD.T


def _sum_in_16_bits(buffer: Tensor, record: Record, layer: MoELayer) -> None:
    """Rank 2's combine keeps its running sum in bf16."""
    assert record.routing is not None
    assert record.returned_NH is not None
    routing = record.routing[2]
    rows_SKH = record.returned_NH[2].view(*routing.expert_SK.shape, -1)
    total = torch.zeros_like(buffer, dtype=torch.bfloat16)
    for k in range(rows_SKH.shape[1]):
        total += (routing.weight_SK[:, k : k + 1] * rows_SKH[:, k]).bfloat16()
    buffer.copy_(total)


def _forget_last_choice(buffer: Tensor, record: Record, layer: MoELayer) -> None:
    assert record.routing is not None
    assert record.returned_NH is not None
    routing = record.routing[1]
    rows_SKH = record.returned_NH[1].view(*routing.expert_SK.shape, -1)
    buffer[7] -= routing.weight_SK[7, -1] * rows_SKH[7, -1]


def _twice_weighted(buffer: Tensor, record: Record, layer: MoELayer) -> None:
    """Token 3 of rank 0: the weight was applied at the expert and again at home."""
    assert record.routing is not None
    assert record.returned_NH is not None
    routing = record.routing[0]
    rows_KH = record.returned_NH[0].view(*routing.expert_SK.shape, -1)[3]
    buffer[3] = (routing.weight_SK[3].square()[:, None] * rows_KH).sum(dim=0)


def _rank_missing(buffer: Tensor, record: Record, layer: MoELayer) -> None:
    """Nothing came back to rank 2 from rank 1."""
    assert record.routing is not None
    from_rank_1 = torch.isin(record.routing[2].expert_SK.flatten(), torch.tensor(layer.experts_of(1)))
    buffer[from_rank_1] = 0


def _set(row: int, column: int, value: float):
    def edit(buffer: Tensor, record: Record, layer: MoELayer) -> None:
        buffer[row, column] = value

    return edit


def _copy_row(target: int, source: int):
    def edit(buffer: Tensor, record: Record, layer: MoELayer) -> None:
        buffer[target] = buffer[source]

    return edit


def _counts(record: Record, layer: MoELayer) -> None:
    """Rank 1's count of expert 3 is lost, as if its signal had arrived before its payload."""
    assert record.counts_PE is not None
    record.counts_PE = record.counts_PE.copy()
    record.counts_PE[1, 3] = 0


def _plan(record: Record, layer: MoELayer) -> None:
    """Rank 2 plans one row too many for expert 5."""
    assert record.plan is not None
    quota = record.plan.quota_PED.copy()
    quota[2, 5, 0] += 1
    record.plan = replace(record.plan, quota_PED=quota)


def _swap_rows(block: Tensor) -> None:
    block[[4, 9]] = block[[9, 4]]


def _zero_last(block: Tensor) -> None:
    block[-1] = 0


def _choice(ids: Tensor, weights: Tensor) -> None:
    ids[6, 1] = (ids[6, 1] + 1) % 6 if (ids[6, 1] + 1) % 6 != ids[6, 0] else (ids[6, 1] + 2) % 6


def _weights_swapped(ids: Tensor, weights: Tensor) -> None:
    weights[2] = weights[2].flip(0)


def _weight_missing(ids: Tensor, weights: Tensor) -> None:
    weights[-1] = 1.0


def _masked_as_0(ids: Tensor, weights: Tensor) -> None:
    ids[11, 0] = -1


BUGS = [
    Bug("token goes to a neighbouring expert", "gate", _route(0, _choice), ("expert_SK", 0, None, 6, 1)),
    Bug("route is masked by mistake", "gate", _route(1, _masked_as_0), ("expert_SK", 1, None, 11, 0)),
    Bug("weights of the two choices swapped", "gate", _route(1, _weights_swapped), ("weight_SK", 1, None, 2, 0)),
    Bug("weight forgotten for the last token", "gate", _route(2, _weight_missing), ("weight_SK", 2, None, -1, 0)),
    Bug("a count is lost", "counts", _counts, ("counts_PE", 0, None, 1, 3)),
    Bug("one row too many is planned", "plan", _plan, ("quota_PED", 0, None, 2, 5)),
    Bug("two rows swapped", "dispatch", _edit("rows_NH", 1, _block(3, 1, _swap_rows)), ("rows_NH", 1, 3, 4, 0)),
    Bug(
        "last row of a block never arrived",
        "dispatch",
        _edit("rows_NH", 2, _block(4, 2, _zero_last)),
        ("rows_NH", 2, 4, -1, 0),
    ),
    Bug(
        "garbage of the padding in a row",
        "dispatch",
        _edit("rows_NH", 0, _block(1, 0, lambda b: b[5, 8:].fill_(float("nan")))),
        ("rows_NH", 0, 1, 5, 8),
    ),
    Bug(
        "stale row of an earlier call",
        "dispatch",
        _edit("rows_NH", 0, _block(0, 0, lambda b: b[3].mul_(-1))),
        ("rows_NH", 0, 0, 3, 0),
    ),
    Bug(
        "one bit of one element flipped",
        "dispatch",
        _edit("rows_NH", 1, _block(2, 1, lambda b: b[2, 9:10].copy_(torch.nextafter(b[2, 9:10], torch.tensor([9.0]))))),
        ("rows_NH", 1, 2, 2, 9),
    ),
    Bug("experts swapped in GEMM0", "gemm0", _edit("hidden_ND", 1, _swap_experts), ("hidden_ND", 1, 3, 0, 0)),
    Bug(
        "activation missing in the last tile",
        "gemm0",
        _edit("hidden_ND", 2, _no_activation),
        ("hidden_ND", 2, 4, -2, 0),
    ),
    Bug(
        "column tile written to its neighbour",
        "gemm0",
        _edit("hidden_ND", 0, _block(0, 0, lambda b: b[:, 16:32].copy_(b[:, :16].clone()))),
        ("hidden_ND", 0, 0, 0, 16),
    ),
    Bug("K loop of GEMM1 one step short", "gemm1", _edit("output_NH", 0, _half_k), ("output_NH", 0, 1, 0, 0)),
    Bug(
        "GEMM1 started before GEMM0 had ended",
        "gemm1",
        _edit("output_NH", 2, _block(5, 2, lambda b: b[16:32].zero_())),
        ("output_NH", 2, 5, 16, 0),
    ),
    Bug(
        "result put at another choice's row",
        "return",
        _edit("returned_NH", 1, _copy_row(8, 9)),
        ("returned_NH", 1, None, 8, 0),
    ),
    Bug(
        "a whole rank's results missing",
        "return",
        _edit("returned_NH", 2, _rank_missing),
        ("returned_NH", 2, None, -3, 0),
    ),
    Bug("running sum in 16 bits", "combine", _edit("y_SH", 2, _sum_in_16_bits), ("y_SH", 2, None, 0, 0)),
    Bug("last choice forgotten", "combine", _edit("y_SH", 1, _forget_last_choice), ("y_SH", 1, None, 7, 0)),
    Bug("weight applied twice", "combine", _edit("y_SH", 0, _twice_weighted), ("y_SH", 0, None, 3, 0)),
    Bug("one element of one tile", "combine", _edit("y_SH", 0, _set(20, 5, 1e3)), ("y_SH", 0, None, 20, 5)),
]
"""Negative rows: -1 is the last row of the buffer or block, -2 the first row of the block's last tile of 16, -3 the
first row that belongs to an expert of rank 1."""
