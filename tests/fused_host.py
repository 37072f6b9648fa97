"""The fused backend on a machine without a GPU: everything that the host does for a call, and no kernel.

Layers lie on the CPU, engines get ordinary memory, and the compiled function is the DSL's own executor around another C
function; what would ask a device is replaced. So the host's time per call can be measured, and what a launch would have
passed to the kernel can be read.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from moe_fast import backend, call, compiler, engine, engine_choice, quick
from moe_fast.engine import Engine
from moe_fast.heap import Heap
from moe_fast.kernel.regions import heap_regions
from moe_fast.kernel.shapes import KernelShape
from moe_fast.layers import group_of
from moe_fast.local_ranks import LocalRanks
from moe_fast.router import is_fp32_router
from moe_ref.layer import MoELayer
from moe_ref.world import DistributedWorld


def argument_names() -> tuple[str, ...]:
    """Names of what the kernel's host function takes, in its order."""
    from moe_fast.kernel.signals import Args, Operands

    return (*Args._fields, *Operands._fields, "slots", "grid", "stream")


def c_function(python: Any) -> Any:
    """A C function as the DSL calls it: one pointer to the arguments' addresses and the result's."""
    return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(python)


def nothing() -> Any:
    """The cheapest of them: it does nothing."""
    return c_function(ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value)


class Launches(list):
    """What each launch passed to the kernel, by name. `error`: what CUDA answers to the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.error = 0
        self.function = c_function(self._record)

    def _record(self, packed: int) -> int:
        names = argument_names()
        addresses = (ctypes.c_void_p * (len(names) + 1)).from_address(packed)
        self.append({name: ctypes.c_int64.from_address(at).value for name, at in zip(names, addresses, strict=False)})
        ctypes.c_int32.from_address(addresses[-1]).value = self.error
        return 0


class _Arguments:
    """How the DSL lays a call's arguments out: one address for each; here all have 64 bits.

    The DSL's addresses own what they point to; what is no longer owned has another value here.
    """

    def __init__(self) -> None:
        self.memory: list[ctypes.c_int64] = []

    def generate_execution_args(self, arguments: tuple, named: dict) -> tuple[list[Any], list[Any]]:
        args, operands, *rest, stream = arguments
        addresses = [self._owning(int(value.value)) for value in (*args, *operands, *rest)]
        return [*addresses, self._owning(int(stream))], []

    def _owning(self, number: int) -> ctypes.c_void_p:
        cell = ctypes.c_int64(number)
        self.memory.append(cell)
        address: Any = ctypes.c_void_p(ctypes.addressof(cell))
        weakref.finalize(address, setattr, cell, "value", -1)
        return address


def compiled_function(called: Any) -> Any:
    """What `compiler.load` returns, around another C function."""
    from cutlass.base_dsl.jit_executor import JitExecutor

    arguments = _Arguments()
    module: Any = SimpleNamespace(capi_func=called, execution_args=arguments)
    return SimpleNamespace(execution_args=arguments, to=lambda device: JitExecutor(module, None, False), library=0)


class FirstOf(DistributedWorld):
    """Rank 0 of a real world, alone: enough for what the host does before a launch."""

    def __init__(self, ranks: int) -> None:
        self.group, self.num_ranks, self.local_ranks = None, ranks, (0,)

    def gather(self, values_LN: np.ndarray) -> np.ndarray:
        return np.repeat(np.asarray(values_LN, dtype=np.int64), self.num_ranks, axis=0)

    def gather_text(self, value: str) -> list[str]:
        return [value] * self.num_ranks

    def __repr__(self) -> str:
        return f"FirstOf(ranks={self.num_ranks})"


@contextmanager
def fused_on_cpu(called: Any = None, stream: dict[None, int] | None = None) -> Iterator[None]:
    """Layers on the CPU run with backend="fused".

    called: the C function instead of the kernel. stream: {None: address of the current stream}.
    """
    compiler.import_cutlass()
    function, zeros = compiled_function(called or nothing()), torch.zeros
    engines: dict[tuple, LocalRanks] = {}

    def find(layer: MoELayer, scheduler: str, transport: str) -> LocalRanks:
        _, ranks, _ = group_of(layer)
        config = layer.config
        shape = KernelShape.from_config(
            config, ranks, scheduler, fp32_router=is_fp32_router(layer), placement=layer.placement
        )
        key = (shape, config.max_tokens, transport)
        if key not in engines:
            memory = zeros(heap_regions(shape, config.max_tokens)[1], dtype=torch.uint8)
            heap = Heap(memory, zeros(ranks, dtype=torch.int64), layer.world.local_ranks[0], ranks)
            engines[key] = LocalRanks([Engine(shape, heap, config.max_tokens)])
        return engines[key]

    def unpinned(*sizes: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return zeros(*sizes, **more)

    properties = SimpleNamespace(multi_processor_count=132)
    with (
        mock.patch.object(backend.FusedBackend, "unavailable", return_value=None),
        mock.patch.object(engine_choice, "_find_engines", find),
        mock.patch.object(engine.compiler, "load", return_value=function),
        mock.patch.object(engine.torch, "zeros", unpinned),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(call, "_raw_stream", ({None: 7} if stream is None else stream).get),
    ):
        yield
    engine_choice._last.clear()
    quick.forget()
