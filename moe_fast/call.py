"""The kernel's host function with its arguments in place: what a launch costs the host is nearly all here."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch

from moe_fast.failures import MegakernelError

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""What torch's own compiled code asks for the stream, without making an object of it; not in builds for CPUs."""


def current_stream(device: torch.device) -> int:
    """Address of a device's current CUDA stream."""
    if _raw_stream is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


CHANGING = (
    "stream", "x", "y", "tokens", "given", "given_expert", "given_weight", "router", "first", "second", "slots", "bias",
    "router_bias", "first_bias", "second_bias", "shared_first", "shared_second", "shared_gate", "deadline", "placement",
    "planned", "quota", "capacity",
)  # fmt: skip
"""Arguments that may differ from one launch of an engine to the next, in the order in which `Call` takes them."""


class Call:
    """The kernel's host function with its arguments kept in place: a call writes those that may change, and goes.

    Building 45 argument objects for each call took 0.23 ms of host time, more than small layers take on the device. The
    DSL's own caller then still lists the addresses of all of them each time; here the list is made once, and what may
    change lies side by side, written in one go.
    """

    def __init__(self, function: Any, fixed: dict[str, int]) -> None:
        import cuda.bindings.driver as cuda
        from cutlass import Int32, Int64

        from moe_fast.kernel.signals import Args, Operands

        kinds = {name: Int64 if "Int64" in str(kind) else Int32 for name, kind in Args.__annotations__.items()}
        operands = dict.fromkeys(Operands._fields, Int64)
        more = {"slots": Int32, "grid": Int32}
        given: list[dict[str, Any]] = [
            {name: kind(fixed.get(name, 0)) for name, kind in part.items()} for part in (kinds, operands, more)
        ]
        arguments = (Args(**given[0]), Operands(**given[1]), *given[2].values(), cuda.CUstream(0))
        owners, adapted = function.execution_args.generate_execution_args(arguments, {})
        addresses = list(owners)
        names = {**kinds, **operands, **more, "stream": Int64}
        for (name, kind), place in zip(names.items(), addresses, strict=True):
            address: Any = place.value if isinstance(place, ctypes.c_void_p) else place
            value = (ctypes.c_int64 if kind is Int64 else ctypes.c_int32).from_address(address).value
            if value != fixed.get(name, 0):
                raise RuntimeError(f"argument {name} of the kernel isn't where the DSL said it is")
        # cells of 64 bits; of those of Int32 the kernel's host function reads the lower half, which comes first
        self._cells = (ctypes.c_int64 * len(CHANGING))()
        order = list(names)
        for i, name in enumerate(CHANGING):
            addresses[order.index(name)] = ctypes.addressof(self._cells) + 8 * i
        # what JitExecutor.run_compiled_program does, apart from the call; nobody else uses this executor
        executor = function.to(None)
        self._packed = executor._get_invoke_packed_args(addresses)
        self._run, self._result = executor.capi_func, executor.cuda_result
        # each of the DSL's addresses owns the value there: what it keeps isn't in the arguments
        self._keep = (function, executor, arguments, owners, adapted)
        self._write = struct.Struct(f"<{len(CHANGING)}q").pack_into

    def __call__(self, stream: int, values: tuple[int, ...]) -> None:
        """Launch on a stream, with the other values of `CHANGING` in its order.

        Raises:
            MegakernelError: CUDA refused the launch.
        """
        self._write(self._cells, 0, stream, *values)
        self._run(self._packed)
        if self._result.value:
            from cuda.bindings.runtime import cudaError_t

            raise MegakernelError(f"the kernel was not launched: {cudaError_t(self._result.value).name}")
