"""Plans that are made once and used again: for activation recomputation.

Recomputing the forward of an MoE layer in the backward must not exchange counts and solve again: the backward belongs
to the forward's plan. A `PlanMemory` is active while a forward runs and keeps what each layer agreed on; while
the recomputation runs it is active again and gives that back, in order. Who recomputes decides when
(`moe_ref.train.recompute`); the pipeline only asks `active()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer
    from moe_ref.pipeline import Record

_ACTIVE: ContextVar[PlanMemory | None] = ContextVar("moe_ref_plan_memory", default=None)


class PlanMemory:
    """What the layers of one recomputed region agreed on: routing, counts, plan and layout, per call in order."""

    def __init__(self) -> None:
        self._kept: list[Record] = []
        self._next: int | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The forward runs inside."""
        token = _ACTIVE.set(self)
        self._kept, self._next = [], None
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """The recomputation runs inside; it may run more than once."""
        token = _ACTIVE.set(self)
        self._next = 0
        try:
            yield
        finally:
            _ACTIVE.reset(token)
            self._next = None

    def keep(self, record: Record) -> None:
        """Keep the integers of a forward, none of its activations."""
        assert record.routing is not None
        kept = type(record)()
        kept.before_PE, kept.counts_PE, kept.tokens_P = record.before_PE, record.counts_PE, record.tokens_P
        kept.plan, kept.layout = record.plan, record.layout
        kept.routing = [type(r)(r.expert_SK, r.weight_SK.detach()[:0]) for r in record.routing]
        self._kept.append(kept)

    def recall(self, record: Record, layer: MoELayer, problem: str) -> bool:
        """Fill a record with what its first forward agreed on; False while recording.

        Raises:
            RuntimeError: the recomputation is not the forward again: more layers run, the placement has changed, or the
                gate chose otherwise.
        """
        if self._next is None:
            return False
        if self._next >= len(self._kept):
            raise RuntimeError(f"the recomputation runs more MoE layers than the forward did ({len(self._kept)})")
        kept = self._kept[self._next]
        self._next += 1
        assert record.routing is not None
        assert kept.routing is not None
        assert kept.plan is not None
        if problem:
            raise RuntimeError(f"the recomputation refused an input that the forward took: {problem}")
        if kept.plan.placement is not layer.placement:
            raise RuntimeError("the placement changed between forward and backward; re-place between optimiser steps")
        for now, then in zip(record.routing, kept.routing, strict=True):
            if not torch.equal(now.expert_SK, then.expert_SK):
                raise RuntimeError("the gate chose other experts in the recomputation than in the forward")
        record.before_PE, record.counts_PE, record.tokens_P = kept.before_PE, kept.counts_PE, kept.tokens_P
        record.plan, record.layout = kept.plan, kept.layout
        return True


def active() -> PlanMemory | None:
    """The memory that this forward belongs to, or None."""
    return _ACTIVE.get()
