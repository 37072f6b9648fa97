"""Backend "fused": a layer's forward in one kernel.

Nothing here waits for the device: `forward` enqueues one kernel and returns. What only the device can know (counts,
routing, errors) is fetched when it is asked for: the record's fields are filled on first access, and a failure that the
kernel reported is raised by the next call, by `check_errors`, or when a record is read.

Training: the forward is the kernel; the backward recomputes the chain of `moe_fast.unfused` with the forward's routing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor

from moe_fast import unfused
from moe_fast.engine import Engine, router_parts
from moe_fast.heap import all_mapped, local_heap, symmetric_heap
from moe_fast.kernel.shapes import KernelShape, heap_regions, unsupported, unsupported_wire
from moe_ref.balance.plan import Plan
from moe_ref.errors import BackendUnavailable, UsageError
from moe_ref.gate import Routing
from moe_ref.inputs import router_weight
from moe_ref.pipeline import Record

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer

DEFAULT_SCHEDULER = "spare_warps"

_engines: dict[tuple, Engine] = {}
_last: WeakKeyDictionary[MoELayer, tuple[tuple, Engine]] = WeakKeyDictionary()
"""By layer: what its last engine was asked for, and that engine. Working out shape and sizes anew took longer than
small layers take on the device."""
_mapped: dict[int, bool] = {}
"""Per process group: whether every rank's memory is mapped in every other."""


def _variable(name: str, default: str) -> Callable[[], str]:
    """An environment variable, to be read at every call.

    This is what os.environ.get looks into. Of a variable that isn't set that raises and catches two exceptions, and two
    such variables were a tenth of the host's time of a call.
    """
    key, values, decode = os.environ.encodekey(name), os.environ._data, os.environ.decodevalue

    def read() -> str:
        found = values.get(key)
        return default if found is None else decode(found)

    return read


_scheduler = _variable("MOE_REF_SCHEDULER", DEFAULT_SCHEDULER)
_transport = _variable("MOE_REF_TRANSPORT", "auto")


def engine_for(
    layer: MoELayer, scheduler: str | None = None, transport: str | None = None, router: Tensor | None = None
) -> Engine:
    """The engine of a layer, made on first use (collective); layers of one shape share it and its buffers.

    Args:
        scheduler: one of `shapes.SCHEDULERS`; None for MOE_REF_SCHEDULER, by default "spare_warps".
        transport: "stores" into mapped peers, "put_signal" through NVSHMEM, or "auto": stores where every peer is
            mapped. None for MOE_REF_TRANSPORT, by default "auto".
        router: the router's weight, where the caller has it at hand.

    Raises:
        UsageError: the layer asks for what the kernel can't do, ranks disagree, or the buffers don't fit.
    """
    router = router_weight(layer) if router is None else router
    scheduler = scheduler or _scheduler()
    transport = transport or _transport()
    asked = (layer.config, layer.placement, layer.world, router.dtype, router.device, scheduler, transport)
    last = _last.get(layer)
    if last is not None and last[0] == asked:
        return last[1]
    engine = _find_engine(layer, scheduler, transport)
    _last[layer] = (asked, engine)
    return engine


def _find_engine(layer: MoELayer, scheduler: str, transport: str) -> Engine:
    """See `engine_for`."""
    _, ranks, group = unfused.group_of(layer)
    unfused.check_layer("fused", unsupported(layer.config, ranks))
    device = layer.router.weight.device
    if device.type != "cuda":
        raise UsageError(f"the layer is on {device}; backend='fused' needs it on a CUDA device: layer.cuda()")
    shape = KernelShape.from_config(
        layer.config,
        ranks,
        scheduler,
        fp32_router=_fp32_router(layer),
        placement=layer.placement,
        transport="stores" if transport == "auto" else transport,
    )
    if transport == "auto":
        size = heap_regions(replace(shape, transport="put_signal"), layer.config.max_tokens)[1]
        shape = replace(shape, transport=choose_transport(device, ranks, group, size))
        unfused.check_layer("fused", unsupported_wire(layer.config, ranks, shape.transport))
    key = (shape, layer.config.max_tokens, device, id(group))
    if key not in _engines:
        layer.world.agree("the fused kernel", f"{shape.name}, max_tokens={layer.config.max_tokens}")
        size = heap_regions(shape, layer.config.max_tokens)[1]
        heap = symmetric_heap(size, device, group, not shape.put) if ranks > 1 else local_heap(size, device)
        engine = Engine(shape, heap, layer.config.max_tokens, deadline_s())
        # nobody's first wait may begin while another rank still compiles
        heap.barrier()
        _engines[key] = engine
    return _engines[key]


def choose_transport(device: torch.device, ranks: int, group: Any, size: int) -> str:
    """Direct stores where every rank reaches every other's memory, else put-with-signal; asked once a group.

    size: bytes of symmetric memory that the first layer will want.
    """
    if ranks == 1:
        return "stores"
    if id(group) not in _mapped:
        _mapped[id(group)] = all_mapped(device, group, size)
    return "stores" if _mapped[id(group)] else "put_signal"


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


_parts: dict[int, tuple[ref[Tensor], tuple[int, int], Tensor]] = {}
"""By id of a router's weight of fp32: the weight, its version and address, and its parts, until the weight is gone. A
CUDA graph keeps the parts of its capture."""


def _router(layer: MoELayer, weight: Tensor) -> Tensor:
    """The router's weight as the kernel takes it; one of fp32 is split again only after it has changed."""
    dtype = layer.config.torch_dtype
    if weight.dtype.itemsize <= dtype.itemsize < 4:
        return weight
    key, now = id(weight), (weight._version, weight.data_ptr())
    found = _parts.get(key)
    if found is None or found[0]() is not weight or found[1] != now:
        held = ref(weight, lambda _: _parts.pop(key, None))
        found = _parts[key] = (held, now, router_parts(weight.detach(), dtype))
    return found[2]


def close_engines() -> None:
    """Free all engines and their heaps; collective."""
    for engine in _engines.values():
        engine.heap.close()
    _engines.clear()
    _last.clear()


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
        y: the result.
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

    def __init__(self, y: Tensor, fill: Callable[[FusedRecord], None]) -> None:
        # not the dataclass' own: it would set the fields that are to be fetched
        self.y_SH, self.seconds, self._pending = [y], {}, fill

    def fetch(self) -> None:
        """Fill the fields, once; what can't be fetched is said at every access."""
        if self._pending is not None:
            self._pending(self)
            self._pending = None


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
        config, weights = layer.config, unfused.layer_weights(layer)
        engine = engine_for(layer, router=weights.router_EH)
        x = x_SH[0].contiguous()
        if x.dtype != config.torch_dtype:
            raise UsageError(f"the layer's dtype is {config.dtype}, autocast asks for {x.dtype}; leave autocast")
        ids = weight = plan = None
        if routing is not None:
            _check_shapes(routing[0], layer, x)
            ids, weight = routing[0].expert_SK.contiguous(), routing[0].weight_SK
        if unfused.is_placed(layer) and not in_kernel(layer):
            ids, weight, plan = plan_first(layer, x, ids, weight)
        inputs = (x, weight, *weights)
        if torch.is_grad_enabled() and any([t.requires_grad for t in inputs if t is not None]):  # noqa: C419
            # only those that there are: autograd looks at every argument
            present = [t for t in inputs if t is not None]
            y = _FusedFunction.apply(engine, layer, plan, ids, [t is not None for t in inputs], *present)
        else:
            y = _launch(engine, layer, weights, x, ids, weight, plan)
        call = engine.calls

        def fill(target: Record) -> None:
            if engine.calls != call:
                raise UsageError("this record's buffers were overwritten by a later call; read it first, or keep=True")
            _fill(target, engine, layer, x.shape[0], plan, buffers=keep)

        record = FusedRecord(y, fill)
        if keep:
            record.fetch()
        return record


def check_errors() -> None:
    """Wait for every engine's device and raise what its kernel reported."""
    for engine in _engines.values():
        engine.check()


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


def in_kernel(layer: MoELayer) -> bool:
    """Whether the kernel's own solver makes the plan: the exact flow, for all ranks as one group."""
    return layer.planner is None and layer.schedule_method in ("flow", "flow_compiled")


def plan_first(layer: MoELayer, x: Tensor, ids: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor, Plan]:
    """Gate, counts and plan before the launch, for a planner that the kernel doesn't have; waits for the device.

    Returns ids and weights, which the launch is handed (so that counts and choices are the same), and the plan.
    """
    config = layer.config
    if ids is None or weight is None:
        ids, weight = unfused.gate(x, unfused.layer_weights(layer), config)
    inside_N = ids.flatten()
    counts_E = torch.bincount(inside_N[(inside_N >= 0) & (inside_N < config.experts)], minlength=config.experts)
    capacity = config.capacity(x.shape[0])
    if capacity is not None:
        counts_E = counts_E.clamp_max(capacity)
    plan = layer.make_plan(layer.world.gather(counts_E.cpu().numpy().astype(np.int64)[None]))
    return ids, weight, plan


def check_weights(weights: unfused.ChainWeights, dtype: torch.dtype, device: torch.device) -> None:
    """The kernel is handed addresses and believes what it was compiled for; a layer can be changed tensor by tensor.

    Raises:
        UsageError: a parameter of another dtype than the layer's (the router may be fp32, the selection bias anything),
            on another device, or not contiguous; the message names it.
    """
    for name, value in zip(unfused.ChainWeights._fields, weights, strict=True):
        if value is None or (value.dtype is dtype and value.device == device and value.is_contiguous()):
            continue
        found, legal = value.dtype, (dtype, torch.float32) if name == "router_EH" else (dtype,)
        if name == "selection_bias_E":
            continue
        if found not in legal:
            problem, remedy = f"is {found} in a layer of {dtype}", f".to({dtype})"
        elif value.device != device:
            problem, remedy = f"is on {value.device}, but x is on {device}", f".to({str(device)!r})"
        elif not value.is_contiguous():
            problem, remedy = "is not contiguous", ".contiguous()"
        else:
            continue
        raise UsageError(f"parameter {name} {problem}; the kernel takes it as it lies in memory: {remedy}")


def _launch(
    engine: Engine,
    layer: MoELayer,
    weights: unfused.ChainWeights,
    x: Tensor,
    ids: Tensor | None,
    weight: Tensor | None,
    plan: Plan | None,
) -> Tensor:
    bias = weights.selection_bias_E
    check_weights(weights, layer.config.torch_dtype, x.device)
    quota = None
    if plan is not None:
        quota = torch.from_numpy(plan.quota_PED.astype(np.int32)).to(x.device)
    return engine.launch(
        x,
        _router(layer, weights.router_EH),
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
        placement=layer.placement if engine.shape.placed else None,
        quota_PED=quota,
    )


def _fill(record: Record, engine: Engine, layer: MoELayer, tokens: int, plan: Plan | None, buffers: bool) -> None:
    """Copy what the call left behind into the record."""
    engine.check()
    seen, config = engine.buffers(tokens), layer.config
    counts_PE = seen.counts_PE.cpu().numpy().astype(np.int64)
    if plan is None:
        # a pure function of the counts: what the kernel's solver found
        plan = layer.make_plan(counts_PE)
    expert_SK = seen.expert_SK
    record.routing = [Routing(expert_SK, seen.weight_SK.clone())]
    record.before_PE = seen.before_PE.cpu().numpy().astype(np.int64)
    record.counts_PE = counts_PE
    record.tokens_P = seen.tokens_P.cpu().numpy().astype(np.int64)
    record.plan = plan
    if seen.sent_PG is not None:
        record.sent_PG = seen.sent_PG.cpu().numpy().astype(np.int64)
    if buffers:
        stretches = engine.stretches(plan.quota_by_slot()[:, engine.heap.rank])
        spread = [torch.arange(n, device=expert_SK.device) for _, _, n in stretches]
        rows = torch.cat([first + n for (first, _, _), n in zip(stretches, spread, strict=True)])
        hidden = torch.cat([first + n for (_, first, _), n in zip(stretches, spread, strict=True)])
        record.rows_NH = [seen.rows_RH[rows]]
        record.hidden_ND = [seen.hidden_RD[hidden]]
        if seen.returned_NH is not None:
            returned = seen.returned_NH.clone()
            # masked routes have no returned row; zero is what the reference keeps there
            returned[expert_SK.flatten() < 0] = 0
            record.returned_NH = [returned.view(-1, config.hidden)]
        if seen.results_RH is not None and seen.partial_NH is not None:
            record.output_NH, record.partial_NH = [seen.results_RH[hidden]], [seen.partial_NH]


class _FusedFunction(torch.autograd.Function):
    """Forward: the kernel. Backward: the unfused chain, recomputed with the forward's routing.

    Inputs are x, the handed-in weights and the fields of ChainWeights; `there` says which of them exist, `present` are
    those.
    """

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        layer: MoELayer,
        plan: Plan | None,
        ids: Tensor | None,
        there: list[bool],
        *present: Tensor,
    ) -> Tensor:
        x, weight, *parameters = _spread(present, there)
        assert x is not None
        y = _launch(engine, layer, unfused.ChainWeights(*parameters), x, ids, weight, plan)
        # the choice is remembered, not recomputed: a tie could fall otherwise in other arithmetic
        chosen = kept = ids
        if chosen is None or kept is None or engine.shape.drops:
            chosen, kept = engine.expert_ids(x.shape[0])
        ctx.layer, ctx.given, ctx.plan, ctx.placed = layer, ids is not None, plan, unfused.is_placed(layer)
        ctx.there = there
        ctx.save_for_backward(chosen, kept, *present)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        chosen, kept, *saved = ctx.saved_tensors
        layer, config = ctx.layer, ctx.layer.config
        _, ranks, group = unfused.group_of(layer)
        # the selection bias is a buffer that chooses and never weighs: it has no gradient
        needed: list[Any] = [t.detach().requires_grad_(True) for t in saved]
        x, weight, *parameters = _spread(needed, ctx.there)
        with torch.enable_grad():
            weights = unfused.ChainWeights(*parameters)
            if ctx.given:
                used = weight
            else:
                used = unfused.weigh(*unfused.gate_scores(x, weights, config), chosen, config)
            # the forward's plan: the one that was handed in, or the same function of the same counts
            planner = (lambda counts_PE: ctx.plan or layer.make_plan(counts_PE)) if ctx.placed else None
            routes = unfused.make_routes(kept, config, group, ranks, planner)
            y = unfused.compute(x, used, routes, weights, config, group, ranks)
        return (None,) * 5 + torch.autograd.grad(y, needed, grads[0], allow_unused=True)


def _spread(present: Sequence[Tensor], there: list[bool]) -> list[Tensor | None]:
    """The tensors in their places, None where there is none."""
    rest = iter(present)
    return [next(rest) if here else None for here in there]
