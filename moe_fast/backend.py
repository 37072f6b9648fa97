"""Backend "fused": a layer's forward in one kernel.

Nothing here waits for the device: `forward` enqueues one kernel and returns. What only the device can know (counts,
routing, errors) is fetched when it is asked for: the record's fields are filled on first access, and a failure that the
kernel reported is raised by the next call, by `check_errors`, or when a record is read.

Training: the forward is the kernel; the backward recomputes the chain of `moe_fast.unfused` with the forward's routing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from moe_fast import unfused
from moe_fast.engine import Engine, router_parts
from moe_fast.heap import local_heap, symmetric_heap
from moe_fast.kernel.shapes import KernelShape, heap_regions, unsupported
from moe_ref.balance.plan import Plan
from moe_ref.errors import BackendUnavailable, UsageError
from moe_ref.gate import Routing
from moe_ref.pipeline import Record

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer

DEFAULT_SCHEDULER = "spare_warps"

_engines: dict[tuple, Engine] = {}


def engine_for(layer: MoELayer, scheduler: str | None = None) -> Engine:
    """The engine of a layer, made on first use (collective); layers of one shape share it and its buffers.

    Raises:
        UsageError: the layer asks for what the kernel can't do, ranks disagree, or the buffers don't fit.
    """
    _, ranks, group = unfused.group_of(layer)
    unfused.check_layer(layer, "fused", unsupported(layer.config, ranks))
    shape = KernelShape.from_config(
        layer.config,
        ranks,
        scheduler or os.environ.get("MOE_REF_SCHEDULER", DEFAULT_SCHEDULER),
        fp32_router=_fp32_router(layer),
    )
    device = layer.router.weight.device
    if device.type != "cuda":
        raise UsageError(f"the layer is on {device}; backend='fused' needs it on a CUDA device: layer.cuda()")
    key = (shape, layer.config.max_tokens, device, id(group))
    if key not in _engines:
        layer.world.agree("the fused kernel", f"{shape.name}, max_tokens={layer.config.max_tokens}")
        size = heap_regions(shape, layer.config.max_tokens)[1]
        heap = symmetric_heap(size, device, group) if ranks > 1 else local_heap(size, device)
        engine = Engine(shape, heap, layer.config.max_tokens, deadline_s())
        # nobody's first wait may begin while another rank still compiles
        heap.barrier()
        _engines[key] = engine
    return _engines[key]


def deadline_s() -> float:
    """Patience of every wait in the kernel: MOE_REF_DEADLINE_S seconds, by default 30.

    Ranks that call the layer further apart than this are taken for dead.

    Raises:
        UsageError: the variable isn't a positive number.
    """
    text = os.environ.get("MOE_REF_DEADLINE_S", "30")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 3600:
        raise UsageError(f"MOE_REF_DEADLINE_S is {text!r}, expected seconds between 0 and 3600")
    return value


def _fp32_router(layer: MoELayer) -> bool:
    """Whether the router is kept in more bits than the layer has (DeepSeek)."""
    return layer.router.weight.dtype.itemsize > layer.config.element_size


_parts = WeakTensorKeyDictionary()
"""By router weight of fp32: its version and address, and its parts. A CUDA graph keeps the parts of its capture."""


def _router(layer: MoELayer) -> Tensor:
    """The router's weight as the kernel takes it; one of fp32 is split again only after it has changed."""
    weight = layer.router.weight
    if not _fp32_router(layer) and layer.config.dtype != "float32":
        return weight
    now = (weight._version, weight.data_ptr())
    found = _parts.get(weight)
    if found is None or found[0] != now:
        found = _parts[weight] = (now, router_parts(weight.detach(), layer.config.torch_dtype))
    return found[1]


def close_engines() -> None:
    """Free all engines and their heaps; collective."""
    for engine in _engines.values():
        engine.heap.close()
    _engines.clear()


class FusedRecord(Record):
    """A record whose integers and buffers are fetched from the device on first access."""

    _LAZY = frozenset({"routing", "before_PE", "counts_PE", "tokens_P", "plan", "rows_NH", "hidden_ND", "returned_NH"})

    def __getattribute__(self, name: str) -> Any:
        if name in FusedRecord._LAZY:
            pending = self.__dict__.pop("_pending", None)
            if pending is not None:
                pending(self)
        return object.__getattribute__(self, name)


class FusedBackend:
    """Backend "fused"; see the module's docstring."""

    name = "fused"
    default_dtype = "bfloat16"
    tolerances: ClassVar = {"float32": 5e-3}
    """Products of TF32: 5e-4 over a whole buffer, single elements ten times that."""

    def unavailable(self) -> str | None:
        """Why it can't run here: no Hopper GPU, or the extra isn't installed."""
        reason = unfused.no_device()
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

    def forward(
        self, layer: MoELayer, x_SH: Sequence[Tensor], routing: Sequence[Routing] | None, *, keep: bool = False
    ) -> Record:
        """See `moe_ref.backends.Backend`. With `keep` it waits for the device and copies every buffer."""
        engine = engine_for(layer)
        x = x_SH[0].contiguous()
        if x.dtype != layer.config.torch_dtype:
            raise UsageError(f"the layer's dtype is {layer.config.dtype}, autocast asks for {x.dtype}; leave autocast")
        ids = weight = None
        if routing is not None:
            _check_shapes(routing[0], layer, x)
            ids = routing[0].expert_SK.contiguous()
            weight = routing[0].weight_SK
        # those of the fields of ChainWeights, in their order
        parameters = tuple(vars(unfused.layer_weights(layer)).values())
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, *parameters)):
            y = _FusedFunction.apply(engine, layer, ids, x, weight, *parameters)
        else:
            y = _launch(engine, layer, x, ids, weight)
        record = FusedRecord(y_SH=[y])
        call = engine.calls

        def fill(target: Record) -> None:
            if engine.calls != call:
                raise UsageError("this record's buffers were overwritten by a later call; read it first, or keep=True")
            _fill(target, engine, layer, x.shape[0], buffers=keep)

        record.__dict__["_pending"] = fill
        if keep:
            _ = record.routing
        return record


def check_errors() -> None:
    """Wait for every engine's device and raise what its kernel reported."""
    for engine in _engines.values():
        engine.check()


def _check_shapes(routing: Routing, layer: MoELayer, x: Tensor) -> None:
    """What can be checked without asking the device; the kernel checks the ids."""
    want = (x.shape[0], layer.config.top_k)
    for name, value in (("expert_SK", routing.expert_SK), ("weight_SK", routing.weight_SK)):
        if tuple(value.shape) != want:
            raise ValueError(f"routing.{name} has shape {list(value.shape)}, expected [tokens, top_k] = {list(want)}")
        if value.device != x.device:
            raise ValueError(f"routing.{name} is on {value.device}, but x is on {x.device}; move one of them")
    if routing.expert_SK.dtype != torch.int64:
        raise TypeError(f"routing.expert_SK is {routing.expert_SK.dtype}, expected torch.int64")
    if routing.weight_SK.dtype != torch.float32:
        raise TypeError(f"routing.weight_SK is {routing.weight_SK.dtype}, expected torch.float32")


def _launch(engine: Engine, layer: MoELayer, x: Tensor, ids: Tensor | None, weight: Tensor | None) -> Tensor:
    bias = layer.router.selection_bias
    weights = unfused.layer_weights(layer)
    return engine.launch(
        x,
        _router(layer),
        weights.up_XUH,
        weights.down_XHD,
        selection_bias_E=None if bias is None else bias.float().contiguous(),
        router_bias_E=weights.router_bias_E,
        first_bias_XU=weights.up_bias_XU,
        second_bias_XH=weights.down_bias_XH,
        shared_first_VH=weights.shared_up_VH,
        shared_second_HW=weights.shared_down_HW,
        shared_gate_1H=weights.shared_gate_1H,
        expert_SK=ids,
        weight_SK=None if weight is None else weight.contiguous(),
    )


def _fill(record: Record, engine: Engine, layer: MoELayer, tokens: int, buffers: bool) -> None:
    """Copy what the call left behind into the record."""
    engine.check()
    seen, config = engine.buffers(tokens), layer.config
    counts_PE = seen.counts_PE.cpu().numpy().astype(np.int64)
    plan = Plan.plain(counts_PE, layer.placement)
    expert_SK = seen.expert_SK.long()
    record.routing = [Routing(expert_SK, seen.weight_SK.clone())]
    record.before_PE = record.counts_PE = counts_PE
    record.tokens_P = seen.tokens_P.cpu().numpy().astype(np.int64)
    record.plan = plan
    if buffers:
        rank = engine.heap.rank
        low, high = engine.shape.first_expert(rank), engine.shape.first_expert(rank + 1)
        rows, first = [], 0
        for count in counts_PE[:, low:high].sum(axis=0).tolist():
            rows.append(torch.arange(first, first + count, device=expert_SK.device))
            first += -(-count // 128) * 128
        at = torch.cat(rows)
        record.rows_NH = [seen.rows_RH[at]]
        record.hidden_ND = [seen.hidden_RD[at]]
        returned = seen.returned_NH.clone()
        # masked routes have no returned row; zero is what the reference keeps there
        returned[expert_SK.flatten() < 0] = 0
        record.returned_NH = [returned.view(-1, config.hidden)]


class _FusedFunction(torch.autograd.Function):
    """Forward: the kernel. Backward: the unfused chain, recomputed with the forward's routing."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        layer: MoELayer,
        ids: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        *parameters: Tensor | None,
    ) -> Tensor:
        y = _launch(engine, layer, x, ids, weight)
        # the choice is remembered, not recomputed: a tie could fall otherwise in other arithmetic
        chosen = engine.expert_ids(x.shape[0]) if ids is None else ids
        ctx.layer, ctx.given = layer, ids is not None
        ctx.save_for_backward(chosen, x, weight, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        chosen, *saved = ctx.saved_tensors
        layer, config = ctx.layer, ctx.layer.config
        _, ranks, group = unfused.group_of(layer)
        # the selection bias is a buffer that chooses and never weighs: it has no gradient
        needed = [t if t is None else t.detach().requires_grad_(True) for t in saved]
        x, weight, *parameters = needed
        with torch.enable_grad():
            weights = unfused.ChainWeights(*parameters)
            if ctx.given:
                used = weight
            else:
                used = unfused.weigh(*unfused.gate_scores(x, weights, config), chosen, config)
            routes = unfused.make_routes(chosen, config, group, ranks)
            y = unfused.compute(x, used, routes, weights, config, group, ranks)
        inputs = [t for t in needed if t is not None]
        result = iter(torch.autograd.grad(y, inputs, grads[0], allow_unused=True))
        return None, None, None, *(None if t is None else next(result) for t in needed)
