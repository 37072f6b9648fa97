"""Which engines a layer gets: made on first use, kept by what decides them, shared by layers of one shape."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_fast import quick
from moe_fast.blocks import LEAST_BLOCKS, blocks_per_rank
from moe_fast.engine import Engine
from moe_fast.heap import all_mapped, local_heaps, symmetric_heap
from moe_fast.kernel.limits import unsupported, unsupported_wire
from moe_fast.kernel.regions import heap_regions
from moe_fast.kernel.shapes import KernelShape
from moe_fast.layers import check_layer
from moe_fast.local_ranks import LocalRanks
from moe_fast.router import is_fp32_router
from moe_ref.errors import UsageError
from moe_ref.inputs import router_weight
from moe_ref.world import DistributedWorld

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer

DEFAULT_SCHEDULER = "spare_warps"

_engines: dict[tuple, LocalRanks] = {}
_last: WeakKeyDictionary[MoELayer, tuple[tuple, LocalRanks]] = WeakKeyDictionary()
"""By layer: what its last engines were asked for, and those engines. Working out shape and sizes anew took longer than
small layers take on the device."""
_mapped: dict[int, bool] = {}
"""Per process group: whether every rank's memory is mapped in every other."""


def _variable(name: str, default: str) -> Callable[[], str]:
    """An environment variable, to be read at every call; one that is empty is as good as none.

    This is what os.environ.get looks into. Of a variable that isn't set that raises and catches two exceptions, and two
    such variables were a tenth of the host's time of a call.
    """
    environment: Any = os.environ
    key, values, decode = environment.encodekey(name), environment._data, environment.decodevalue

    def read() -> str:
        found = values.get(key)
        return decode(found) if found else default

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
    check_layer("fused", unsupported(layer.config, ranks))
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
        # the last ranks that fit have one block less than pairs need
        shape = replace(shape, paired=shape.paired and blocks - blocks % 2 >= LEAST_BLOCKS[scheduler])
    elif transport == "auto":
        size = heap_regions(replace(shape, transport="put_signal"), layer.config.max_tokens)[1]
        way = choose_transport(device, ranks, group, size)
        shape = replace(shape, transport=way, paired=shape.paired and way == "stores")
        check_layer("fused", unsupported_wire(layer.config, ranks, shape.transport))
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
    text = os.environ.get("MOE_REF_DEADLINE_S") or "30"
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
    quick.forget()


def check_errors() -> None:
    """Wait for every engine's device and raise what its kernel reported."""
    for engines in _engines.values():
        engines.check()
