"""Backend "fused": a layer's forward in one kernel.

Nothing here waits for the device: `forward` enqueues one kernel and returns. What only the device can know (counts,
routing, errors) is fetched when it is asked for: the record's fields are filled on first access, and a failure that the
kernel reported is raised by the next call, by `check_errors`, or when a record is read.

Training: the forward is the kernel; the backward recomputes the chain of `moe_fast.unfused` with the forward's routing.

A simulated world of P ranks is P kernels side by side on the layer's GPU (`moe_fast.local_ranks`), with all that
crosses between them: the protocol is that of P GPUs, the times are not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_fast import unfused
from moe_fast.blocks import LEAST_BLOCKS, blocks_per_rank
from moe_fast.engine import Engine
from moe_fast.heap import all_mapped, local_heaps, symmetric_heap
from moe_fast.kernel.limits import unsupported, unsupported_wire
from moe_fast.kernel.regions import heap_regions
from moe_fast.kernel.shapes import KernelShape
from moe_fast.local_ranks import LocalRanks
from moe_fast.record import FusedRecord, fill_record
from moe_fast.router import is_fp32_router, router_operand
from moe_ref.balance.plan import Plan
from moe_ref.errors import BackendUnavailable, UsageError
from moe_ref.gate import Routing
from moe_ref.inputs import router_weight
from moe_ref.pipeline import Record
from moe_ref.world import DistributedWorld

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer

DEFAULT_SCHEDULER = "spare_warps"

_requires_grad = attrgetter("requires_grad")

_engines: dict[tuple, LocalRanks] = {}
_last: WeakKeyDictionary[MoELayer, tuple[tuple, LocalRanks]] = WeakKeyDictionary()
"""By layer: what its last engines were asked for, and those engines. Working out shape and sizes anew took longer than
small layers take on the device."""
_mapped: dict[int, bool] = {}
"""Per process group: whether every rank's memory is mapped in every other."""


def _variable(name: str, default: str) -> Callable[[], str]:
    """An environment variable, to be read at every call.

    This is what os.environ.get looks into. Of a variable that isn't set that raises and catches two exceptions, and two
    such variables were a tenth of the host's time of a call.
    """
    environment: Any = os.environ
    key, values, decode = environment.encodekey(name), environment._data, environment.decodevalue

    def read() -> str:
        found = values.get(key)
        return default if found is None else decode(found)

    return read


_scheduler = _variable("MOE_REF_SCHEDULER", DEFAULT_SCHEDULER)
_transport = _variable("MOE_REF_TRANSPORT", "auto")


def engine_for(
    layer: MoELayer, scheduler: str | None = None, transport: str | None = None, router: Tensor | None = None
) -> LocalRanks:
    """The engines of a layer's ranks in this process, made on first use (collective); layers of one shape share them
    and their buffers.

    Args:
        scheduler: one of `constants.SCHEDULERS`; None for MOE_REF_SCHEDULER, by default "spare_warps".
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
    engines = _find_engines(layer, scheduler, transport)
    _last[layer] = (asked, engines)
    return engines


def _find_engines(layer: MoELayer, scheduler: str, transport: str) -> LocalRanks:
    """See `engine_for`."""
    world = layer.world
    ranks, group = world.num_ranks, world.group if isinstance(world, DistributedWorld) else None
    on_one_gpu = len(world.local_ranks) > 1
    unfused.check_layer("fused", unsupported(layer.config, ranks))
    device = layer.router.weight.device
    if device.type != "cuda":
        raise UsageError(f"the layer is on {device}; backend='fused' needs it on a CUDA device: layer.cuda()")
    shape = KernelShape.from_config(
        layer.config,
        ranks,
        scheduler,
        fp32_router=is_fp32_router(layer),
        placement=layer.placement,
        transport="stores" if transport == "auto" else transport,
    )
    if on_one_gpu:
        if shape.put:
            raise UsageError(
                f'transport="put_signal" is between GPUs; the {ranks} simulated ranks of this layer are on one and '
                'store into each other\'s memory: take "stores" or "auto" (MOE_REF_TRANSPORT)'
            )
        blocks = blocks_per_rank(torch.cuda.get_device_properties(device).multi_processor_count, ranks, scheduler)
        # the last ranks that fit have one block more than pairs need
        shape = replace(shape, paired=shape.paired and blocks - blocks % 2 >= LEAST_BLOCKS[scheduler])
    elif transport == "auto":
        size = heap_regions(replace(shape, transport="put_signal"), layer.config.max_tokens)[1]
        way = choose_transport(device, ranks, group, size)
        shape = replace(shape, transport=way, paired=shape.paired and way == "stores")
        unfused.check_layer("fused", unsupported_wire(layer.config, ranks, shape.transport))
    key = (shape, layer.config.max_tokens, device, id(group), on_one_gpu)
    if key not in _engines:
        layer.world.agree("the fused kernel", f"{shape.name}, max_tokens={layer.config.max_tokens}")
        size = heap_regions(shape, layer.config.max_tokens)[1]
        if ranks == 1 or on_one_gpu:
            heaps = local_heaps(size, device, ranks)
        else:
            heaps = [symmetric_heap(size, device, group, not shape.put)]
        engines = LocalRanks([Engine(shape, heap, layer.config.max_tokens, deadline_s()) for heap in heaps])
        # nobody's first wait may begin while another rank still compiles
        heaps[0].barrier()
        _engines[key] = engines
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


def close_engines() -> None:
    """Free all engines and their heaps; collective."""
    for engines in _engines.values():
        engines.close()
    _engines.clear()
    _last.clear()


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
        weights = unfused.layer_weights(layer)
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
        if unfused.is_placed(layer) and not in_kernel(layer):
            given = None if ids is None or weight is None else ([ids], [weight])
            (ids,), (weight,), plan = plan_first(layer, [x], *(given or (None, None)))
        inputs = (x, weight, *weights)
        # only those that there are: autograd looks at every argument
        present = [t for t in inputs if t is not None] if torch.is_grad_enabled() else []
        if any(map(_requires_grad, present)):
            y = _FusedFunction.apply(engine, layer, plan, ids, [t is not None for t in inputs], *present)
        else:
            quota = None if plan is None else _quota(plan, x.device)
            y = _launch(engine, layer, weights, x, ids, weight, quota)
        return _record(engines, layer, [y], [x.shape[0]], plan, keep)


def _forward_together(
    engines: LocalRanks,
    layer: MoELayer,
    weights: unfused.ChainWeights,
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
    if unfused.is_placed(layer) and not in_kernel(layer):
        ids, given, plan = plan_first(layer, xs, ids, given)
    inputs = (*xs, *(given or [None] * len(xs)), *weights)
    present = [t for t in inputs if t is not None] if torch.is_grad_enabled() else []
    if any(map(_requires_grad, present)):
        ys = _TogetherFunction.apply(engines, layer, plan, ids, [t is not None for t in inputs], *present)
    else:
        ys = _launch_together(engines, layer, weights, xs, ids, given, plan)
    return _record(engines, layer, list(ys), [x.shape[0] for x in xs], plan, keep)


def _record(
    engines: LocalRanks, layer: MoELayer, y_SH: list[Tensor], tokens: Sequence[int], plan: Plan | None, keep: bool
) -> FusedRecord:
    """What `FusedBackend.forward` returns for the call that was just enqueued; tokens: S of every local rank."""
    call = engines.calls

    def fill(target: Record) -> None:
        if engines.calls != call:
            raise UsageError("this record's buffers were overwritten by a later call; read it first, or keep=True")
        engines.check()
        fill_record(target, engines.engines, layer, tokens, plan, buffers=keep)

    record = FusedRecord(y_SH, fill)
    if keep:
        record.fetch()
    return record


def check_errors() -> None:
    """Wait for every engine's device and raise what its kernel reported."""
    for engines in _engines.values():
        engines.check()


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


def in_kernel(layer: MoELayer) -> bool:
    """Whether the kernel's own solver makes the plan: the exact flow, for all ranks as one group."""
    return layer.planner is None and layer.schedule_method in ("flow", "flow_compiled")


def plan_first(
    layer: MoELayer, xs: Sequence[Tensor], ids: Sequence[Tensor] | None, weights: Sequence[Tensor] | None
) -> tuple[list[Tensor], list[Tensor], Plan]:
    """Gate, counts and plan before the launch, for a planner that the kernel doesn't have; waits for the device.

    Of every local rank tokens, and ids and weights if they are given. Returns ids and weights, which the launch is
    handed (so that counts and choices are the same), and the plan.
    """
    config = layer.config
    if ids is None or weights is None:
        routed = [unfused.gate(x, unfused.layer_weights(layer), config) for x in xs]
        ids, weights = [one for one, _ in routed], [weight for _, weight in routed]
    counts = []
    for x, one in zip(xs, ids, strict=True):
        inside_N = one.flatten()
        counts_E = torch.bincount(inside_N[(inside_N >= 0) & (inside_N < config.experts)], minlength=config.experts)
        capacity = config.capacity(x.shape[0])
        counts.append(counts_E if capacity is None else counts_E.clamp_max(capacity))
    plan = layer.make_plan(layer.world.gather(torch.stack(counts).cpu().numpy().astype(np.int64)))
    return list(ids), list(weights), plan


def check_weights(weights: unfused.ChainWeights, dtype: torch.dtype, device: torch.device) -> None:
    """The kernel is handed addresses and believes what it was compiled for; a layer can be changed tensor by tensor.

    Raises:
        UsageError: a parameter of another dtype than the layer's (the router may be fp32), on another device, or not
            contiguous; the message names it. The selection bias is copied if need be: it only has to be on the device.
    """
    for name, value in zip(unfused.ChainWeights._fields, weights, strict=True):
        if value is None or (value.dtype is dtype and value.device == device and value.is_contiguous()):
            continue
        found, legal = value.dtype, (dtype, torch.float32) if name == "router_EH" else (dtype,)
        if value.device != device:
            problem, remedy = f"is on {value.device}, but x is on {device}", f".to({str(device)!r})"
        elif name == "selection_bias_E":
            continue
        elif found not in legal:
            problem, remedy = f"is {found} in a layer of {dtype}", f".to({dtype})"
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
    quota_PED: Tensor | None,
    together: list[Callable[[int], None]] | None = None,
) -> Tensor:
    """One forward of a rank: its tokens, ids and weights that were handed in, the experts that it holds."""
    bias = weights.selection_bias_E
    check_weights(weights, layer.config.torch_dtype, x.device)
    return engine.launch(
        x,
        router_operand(layer, weights.router_EH),
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
        quota_PED=quota_PED,
        together=together,
    )


def _quota(plan: Plan, device: torch.device) -> Tensor:
    """A plan as the kernel takes it."""
    return torch.from_numpy(plan.quota_PED.astype(np.int32)).to(device)


def _launch_together(
    engines: LocalRanks,
    layer: MoELayer,
    weights: unfused.ChainWeights,
    xs: Sequence[Tensor],
    ids: Sequence[Tensor] | None,
    given: Sequence[Tensor | None] | None,
    plan: Plan | None,
) -> list[Tensor]:
    """One forward of every local rank; everything that needs memory or the device comes before the first launch."""
    starts: list[Callable[[int], None]] = []
    quota = None if plan is None else _quota(plan, xs[0].device)
    none = [None] * len(xs)
    of_ranks = zip(engines.engines, rank_weights(engines, layer, weights), xs, ids or none, given or none, strict=True)
    ys = [_launch(engine, layer, own, x, one, weight, quota, starts) for engine, own, x, one, weight in of_ranks]
    engines.start(starts)
    return ys


def rank_weights(engines: LocalRanks, layer: MoELayer, weights: unfused.ChainWeights) -> list[unfused.ChainWeights]:
    """Parameters of each of several local ranks as its kernel takes them, slot after slot.

    A simulated world's layer holds all E experts: a rank's are a view of them where they are neighbours (experts in
    blocks), else a copy, made anew for each call.
    """
    experts = ("up_XUH", "down_XHD", "up_bias_XU", "down_bias_XH")
    parts = {name: value.detach() for name in experts if (value := getattr(weights, name)) is not None}
    return [
        weights._replace(**{name: value[where] for name, value in parts.items()})
        for where in engines.held(layer.placement)
    ]


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
        quota = None if plan is None else _quota(plan, x.device)
        y = _launch(engine, layer, unfused.ChainWeights(*parameters), x, ids, weight, quota)
        # the choice is remembered, not recomputed: a tie could fall otherwise in other arithmetic
        chosen = kept = ids
        if chosen is None or kept is None or engine.shape.drops:
            chosen, kept = engine.readback.expert_ids(x.shape[0])
        ctx.layer, ctx.given, ctx.plan, ctx.placed = layer, ids is not None, plan, unfused.is_placed(layer)
        ctx.there = there
        ctx.save_for_backward(chosen, kept, *present)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        chosen, kept, *saved = ctx.saved_tensors
        # the selection bias is a buffer that chooses and never weighs: it has no gradient
        needed = [t.detach().requires_grad_(True) for t in saved]
        with torch.enable_grad():
            x, weight, *parameters = _spread(needed, ctx.there)
            y = _recompute(ctx, chosen, kept, x, weight, parameters, unfused.group_of(ctx.layer))
        return (None,) * 5 + torch.autograd.grad(y, needed, grads[0], allow_unused=True)


class _TogetherFunction(torch.autograd.Function):
    """`_FusedFunction` of several ranks on one GPU: a result and x of each, then their handed-in weights.

    The backward is the chain of one rank with all tokens and all experts: a token's result doesn't depend on where it
    is computed, and an expert's replicas are one parameter here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        engines: LocalRanks,
        layer: MoELayer,
        plan: Plan | None,
        ids: list[Tensor] | None,
        there: list[bool],
        *present: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.count = count = len(engines.engines)
        tensors = _spread(present, there)
        xs, weights = tensors[:count], tensors[count : 2 * count]
        ys = _launch_together(engines, layer, unfused.ChainWeights(*tensors[2 * count :]), xs, ids, weights, plan)
        chosen = kept = ids
        if chosen is None or kept is None or engines.shape.drops:
            pairs = [engine.readback.expert_ids(x.shape[0]) for engine, x in zip(engines.engines, xs, strict=True)]
            chosen, kept = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        ctx.layer, ctx.given, ctx.plan, ctx.placed = layer, ids is not None, plan, unfused.is_placed(layer)
        ctx.there = there
        ctx.save_for_backward(torch.cat(chosen), torch.cat(kept), *present)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (chosen, kept, *saved), count = ctx.saved_tensors, ctx.count
        needed = [t.detach().requires_grad_(True) for t in saved]
        with torch.enable_grad():
            tensors = _spread(needed, ctx.there)
            x, weight = torch.cat(tensors[:count]), torch.cat(tensors[count : 2 * count]) if ctx.given else None
            y = _recompute(ctx, chosen, kept, x, weight, tensors[2 * count :], (0, 1, None))
        return (None,) * 5 + torch.autograd.grad(y, needed, torch.cat(grads), allow_unused=True)


def _recompute(
    ctx: Any,
    chosen: Tensor,
    kept: Tensor,
    x: Tensor,
    weight: Tensor | None,
    parameters: Sequence[Any],
    chain: tuple[int, int, Any],
) -> Tensor:
    """The forward by the unfused chain, with the routing that the kernel had. chain: its rank, ranks and group."""
    layer, config, weights = ctx.layer, ctx.layer.config, unfused.ChainWeights(*parameters)
    _, ranks, group = chain
    if weight is None:
        weight = unfused.weigh(*unfused.gate_scores(x, weights, config), chosen, config)
    # the forward's plan: the one that was handed in, or the same function of the same counts
    planner = (lambda counts_PE: ctx.plan or layer.make_plan(counts_PE)) if ctx.placed else None
    routes = unfused.make_routes(kept, config, group, ranks, planner)
    return unfused.compute(x, weight, routes, weights, config, group, ranks)


def _spread(present: Sequence[Tensor], there: list[bool]) -> list[Any]:
    """The tensors in their places, None where there is none."""
    rest = iter(present)
    return [next(rest) if here else None for here in there]
