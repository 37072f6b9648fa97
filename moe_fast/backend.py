"""Backend "fused": a layer's forward in one kernel.

Nothing here waits for the device: `forward` enqueues one kernel and returns. What only the device can know (counts,
routing, errors) is fetched when it is asked for: the record's fields are filled on first access, and a failure that the
kernel reported is raised by the next call, by `check_errors`, or when a record is read.

Training is in `moe_fast.autograd`.

A simulated world of P ranks is P kernels side by side on the layer's GPU (`moe_fast.local_ranks`), with all that
crosses between them: the protocol is that of P GPUs, the times are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from moe_fast import quick
from moe_fast.autograd import FusedFunction, TogetherFunction
from moe_fast.engine_choice import engine_for
from moe_fast.launching import in_kernel, launch, launch_together, plan_first, quota_on
from moe_fast.layers import is_placed, no_device
from moe_fast.local_ranks import LocalRanks
from moe_fast.record import FusedRecord, fill_record
from moe_fast.weights import ChainWeights, layer_weights
from moe_ref.balance.plan import Plan
from moe_ref.errors import BackendUnavailable, UsageError
from moe_ref.gate import Routing
from moe_ref.pipeline import Record

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer

_requires_grad = attrgetter("requires_grad")


class FusedBackend:
    """Backend "fused"; see the module's docstring."""

    name = "fused"
    default_dtype = "bfloat16"
    tolerances: ClassVar = {"float32": 5e-3}
    """Products of TF32: 5e-4 over a whole buffer, single elements ten times that."""

    def unavailable(self) -> str | None:
        """Why it can't run here: no Hopper GPU, or the extra isn't installed."""
        reason = no_device()
        if reason:
            return reason
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) != (9, 0):
            return (
                f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}; the megakernel needs 9.0 "
                "(H100, H200)"
            )
        from moe_fast.compiler import import_cutlass

        try:
            import_cutlass()
        except BackendUnavailable as error:
            return str(error)
        return None

    quick = staticmethod(quick.call)
    """See `moe_ref.backends.Backend` and `moe_fast.quick`."""

    def forward(
        self, layer: MoELayer, x_SH: Sequence[Tensor], routing: Sequence[Routing] | None, *, keep: bool = False
    ) -> Record:
        """See `moe_ref.backends.Backend`. With `keep` it waits for the device and copies every buffer."""
        weights = layer_weights(layer)
        engines = engine_for(layer, router=weights.router_EH)
        engine = engines.only
        if engine is None:
            return _forward_together(engines, layer, weights, x_SH, routing, keep)
        x = x_SH[0].contiguous()
        _check_dtype(x, layer)
        ids = weight = plan = None
        if routing is not None:
            _check_shapes(routing[0], layer, x)
            ids, weight = routing[0].expert_SK.contiguous(), routing[0].weight_SK
        if is_placed(layer) and not in_kernel(layer):
            given = None if ids is None or weight is None else ([ids], [weight])
            (ids,), (weight,), plan = plan_first(layer, [x], *(given or (None, None)))
        inputs = (x, weight, *weights)
        # only those that there are: autograd looks at every argument
        present = [t for t in inputs if t is not None] if torch.is_grad_enabled() else []
        if any(map(_requires_grad, present)):
            y = FusedFunction.apply(engine, layer, plan, ids, [t is not None for t in inputs], *present)
        else:
            quota = None if plan is None else quota_on(plan, x.device)
            y = launch(engine, layer, weights, x, ids, weight, quota)
            # the short way is for calls without gradients; those with them would remember in vain, each time
            if routing is None and not torch.is_grad_enabled():
                quick.remember(layer, engine, weights, x, y)
        return _record(engines, layer, [y], [x], plan, keep)


def _forward_together(
    engines: LocalRanks,
    layer: MoELayer,
    weights: ChainWeights,
    x_SH: Sequence[Tensor],
    routing: Sequence[Routing] | None,
    keep: bool,
) -> Record:
    """`FusedBackend.forward` of several ranks on one GPU."""
    engines.raise_if_failed()
    xs = [x.contiguous() for x in x_SH]
    _check_dtype(xs[0], layer)
    ids = given = plan = None
    if routing is not None:
        for one, x in zip(routing, xs, strict=True):
            _check_shapes(one, layer, x)
        ids, given = [one.expert_SK.contiguous() for one in routing], [one.weight_SK for one in routing]
    if is_placed(layer) and not in_kernel(layer):
        ids, given, plan = plan_first(layer, xs, ids, given)
    inputs = (*xs, *(given or [None] * len(xs)), *weights)
    present = [t for t in inputs if t is not None] if torch.is_grad_enabled() else []
    if any(map(_requires_grad, present)):
        ys = TogetherFunction.apply(engines, layer, plan, ids, [t is not None for t in inputs], *present)
    else:
        ys = launch_together(engines, layer, weights, xs, ids, given, plan)
    return _record(engines, layer, list(ys), xs, plan, keep)


def _record(
    engines: LocalRanks, layer: MoELayer, y_SH: list[Tensor], x_SH: Sequence[Tensor], plan: Plan | None, keep: bool
) -> FusedRecord:
    """What `FusedBackend.forward` returns for the call that was just enqueued; x_SH: of every local rank."""
    call, tokens = engines.calls, [x.shape[0] for x in x_SH]
    kept = x_SH if keep else None

    def fill(target: Record) -> None:
        if engines.calls != call:
            raise UsageError("this record's buffers were overwritten by a later call; read it first, or keep=True")
        engines.check()
        fill_record(target, engines.engines, layer, tokens, plan, kept)

    record = FusedRecord(y_SH, fill)
    if keep:
        record.fetch()
    return record


def _check_dtype(x: Tensor, layer: MoELayer) -> None:
    """Tokens are of the layer's dtype unless autocast has cast them."""
    if x.dtype != layer.config.torch_dtype:
        raise UsageError(f"the layer's dtype is {layer.config.dtype}, autocast asks for {x.dtype}; leave autocast")


def _check_shapes(routing: Routing, layer: MoELayer, x: Tensor) -> None:
    """What can be checked without asking the device; the kernel checks the ids."""
    want = (x.shape[0], layer.config.top_k)
    for name, value in (("expert_SK", routing.expert_SK), ("weight_SK", routing.weight_SK)):
        if value.shape != want:
            raise ValueError(f"routing.{name} has shape {list(value.shape)}, expected [tokens, top_k] = {list(want)}")
        if value.device != x.device:
            raise ValueError(f"routing.{name} is on {value.device}, but x is on {x.device}; move one of them")
    if routing.expert_SK.dtype != torch.int64:
        raise TypeError(f"routing.expert_SK is {routing.expert_SK.dtype}, expected torch.int64")
    if routing.weight_SK.dtype != torch.float32:
        raise TypeError(f"routing.weight_SK is {routing.weight_SK.dtype}, expected torch.float32")
