"""What a fused layer's call leaves behind: a record that is fetched from the device when it is read.

Letters: S tokens of a rank, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moe_fast.engine import Engine
from moe_ref.balance.plan import Plan
from moe_ref.gate import Routing
from moe_ref.pipeline import Record

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer


class _Fetched:
    """A field of `FusedRecord` that the device knows; what the record's own dictionary holds comes before it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, record: FusedRecord | None, owner: type) -> Any:
        if record is None:
            return self
        record.fetch()
        return record.__dict__.get(self.name)


class FusedRecord(Record):
    """A record whose integers and buffers are fetched from the device on first access.

    Args:
        y_SH: the results, of each local rank.
        fill: sets the other fields of the record that it is given.
    """

    routing: Any = _Fetched()
    before_PE: Any = _Fetched()
    counts_PE: Any = _Fetched()
    tokens_P: Any = _Fetched()
    plan: Any = _Fetched()
    rows_NH: Any = _Fetched()
    hidden_ND: Any = _Fetched()
    output_NH: Any = _Fetched()
    returned_NH: Any = _Fetched()
    partial_NH: Any = _Fetched()
    sent_PG: Any = _Fetched()

    def __init__(self, y_SH: list[Tensor], fill: Callable[[FusedRecord], None]) -> None:
        # not the dataclass' own: it would set the fields that are to be fetched
        self.y_SH, self.seconds, self._pending = y_SH, {}, fill

    def fetch(self) -> None:
        """Fill the fields, once; what can't be fetched is said at every access."""
        if self._pending is not None:
            self._pending(self)
            self._pending = None


def fill_record(
    record: Record,
    engines: Sequence[Engine],
    layer: MoELayer,
    tokens: Sequence[int],
    plan: Plan | None,
    x_SH: Sequence[Tensor] | None,
) -> None:
    """Copy what a call left behind into the record; waits for the device.

    Args:
        engines: of the local ranks, in rank order; tokens: S of each in that call.
        plan: the plan that the launch was handed, None where the kernel made its own.
        x_SH: each local rank's tokens in that call, for rows and results as well; None for integers and weights only.
    """
    seen = [engine.buffers(size) for engine, size in zip(engines, tokens, strict=True)]
    first = seen[0]
    # the same on every rank
    counts_PE = first.counts_PE.cpu().numpy().astype(np.int64)
    if plan is None:
        # a pure function of the counts: what the kernel's solver found
        plan = layer.make_plan(counts_PE)
    record.routing = [Routing(one.expert_SK, one.weight_SK.clone()) for one in seen]
    record.before_PE = first.before_PE.cpu().numpy().astype(np.int64)
    record.counts_PE = counts_PE
    record.tokens_P = first.tokens_P.cpu().numpy().astype(np.int64)
    record.plan = plan
    if first.sent_PG is not None:
        record.sent_PG = first.sent_PG.cpu().numpy().astype(np.int64)
    if x_SH is not None:
        record.rows_NH, record.hidden_ND = [], []
        returned_NH, output_NH, partial_NH = [], [], []
        for engine, one, x in zip(engines, seen, x_SH, strict=True):
            stretches = engine.readback.stretches(plan.quota_by_slot()[:, engine.heap.rank])
            spread = [torch.arange(n, device=one.expert_SK.device) for _, _, n in stretches]
            rows = torch.cat([row + n for (row, _, _), n in zip(stretches, spread, strict=True)])
            hidden = torch.cat([row + n for (_, row, _), n in zip(stretches, spread, strict=True)])
            record.rows_NH.append(engine.readback.dispatched(one.rows_RH, rows, x))
            record.hidden_ND.append(one.hidden_RD[hidden])
            if one.returned_NH is not None:
                returned = one.returned_NH.clone()
                # masked routes have no returned row; zero is what the reference keeps there
                returned[one.expert_SK.flatten() < 0] = 0
                returned_NH.append(returned.view(-1, layer.config.hidden))
            if one.results_RH is not None and one.partial_NH is not None:
                output_NH.append(one.results_RH[hidden])
                partial_NH.append(one.partial_NH)
        record.returned_NH = returned_NH or None
        record.output_NH, record.partial_NH = output_NH or None, partial_NH or None
